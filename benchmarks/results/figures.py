"""Figures as pure functions: from numbers to a Matplotlib figure, and to an SVG.

Equal numbers give equal bytes. Text stays text, and colours are CSS variables with the
light palette as fallback, so one drawing serves the light page, the dark page and a
stand-alone file. Closed-book is blue and with-context orange everywhere; the two can be
distinguished with the common colour-vision deficiencies. Every distinction is also one
of shape, fill or position, so that figures can be read in grey.
"""

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import quoteattr

import matplotlib
import numpy as np
import pandas
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.names import SETTING_LABELS
from beatrice.benchmarks.results.shown import Curves
from beatrice.extract.records import Setting
from beatrice.jaxprobe.stages import LayerCurve

INK, MUTED, GRID, PAPER = "#1b2430", "#5c6878", "#dbe1e8", "#fefefe"
STRONG = {"closed_book": "#1f68ad", "with_context": "#c2570f"}
SOFT = {"closed_book": "#a5c6e4", "with_context": "#f1c5a0"}
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "card",
    STRONG["closed_book"]: "closed",
    STRONG["with_context"]: "context",
    SOFT["closed_book"]: "closed-soft",
    SOFT["with_context"]: "context-soft",
}
FAMILIES = {"H": "hidden", "P": "probability", "R": "residual", "A": "attention"}
_DASHED: Any = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.labelpad": 9.0,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "patch.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "beatrice",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def styled() -> Any:
    """Return a context in which figures are drawn in the house style."""
    style: Any = {**matplotlib.rcParamsDefault, **_STYLE}
    del style["backend"]
    return matplotlib.rc_context(style)


def _figure(height: float, *grid: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, without registering it with pyplot."""
    figure = Figure(figsize=(6.0, height), layout="constrained")
    return figure, figure.subplots(*grid, **options)


def _label(text: str, width: int = 34) -> str:
    """Wrap and escape a legend's name: Matplotlib interprets `$` and a leading `_`."""
    lines = textwrap.fill(text, width).replace("$", r"\$")
    return f" {lines}" if lines.startswith("_") else lines


def _legend(figure: Figure, side: str, n_columns: int = 2) -> None:
    outside: Any = f"outside {side} center"
    figure.legend(loc=outside, ncols=n_columns, fontsize=9.5)


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an SVG element to embed in a page."""
    buffer = io.StringIO()
    with styled(), warnings.catch_warnings():
        # Glyphs missing from this font are drawn with the reader's: text stays text.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<g) id="[^"]*"', r"\1", svg)  # nothing refers to groups
    svg = re.sub(  # coordinates, not numbers in names
        r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d{3,}", r"\1", tag[0]), svg
    )
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    head = re.compile(r'<svg width="[^"]*" height="[^"]*"( viewBox="[^"]*")[^>]*>')
    label = f'role="img" aria-label={quoteattr(description)}'
    return head.sub(lambda match: f"<svg{match[1]} {label}>", svg, count=1)


class Picture(NamedTuple):
    """A figure on the page, with its title and caption."""

    title: str
    svg: Markup
    caption: str


def picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """Make a `Picture` of a figure; its SVG is our own, so it is not escaped."""
    return Picture(title, Markup(to_svg(figure, name, f"{title}. {caption}")), caption)


def _cropped(values: Sequence[float], above: float) -> tuple[float, float]:
    """Return axis limits, with `above` times the values' spread as room for labels."""
    spread = max(max(values) - min(values), 0.01)
    return min(values) - 0.15 * spread, max(values) + above * spread


@styled()
def reliability(curves: Curves, setting: str) -> Figure:
    """Draw the share of right answers against P(correct), with bin counts below.

    The calibrated shares have Wilson's 95 % intervals, of the number of questions.
    """
    from scipy.stats import binomtest  # takes longer to import than Matplotlib

    drawn = (
        ("raw", curves.raw, SOFT[setting], "s"),
        ("calibrated", curves.calibrated, STRONG[setting], "o"),
    )
    figure, (top, bottom) = _figure(4.6, 2, 1, sharex=True, height_ratios=(3.4, 1))
    top.plot((0, 1), (0, 1), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for number, (label, bins, colour, marker) in enumerate(drawn):
        x, y = [b.mean_p for b in bins], [b.accuracy for b in bins]
        rim = {"markeredgecolor": STRONG[setting]}  # pale marks alone are hard to see
        top.plot(x, y, color=colour, marker=marker, ms=5.5, label=label, **rim)
        if label == "calibrated":
            counts = [(b.accuracy, b.n_questions or b.n) for b in bins]
            tests = [binomtest(round(share * n), n) for share, n in counts]
            ends = [test.proportion_ci(method="wilson") for test in tests]
            top.vlines(x, *zip(*ends, strict=True), color=colour, linewidth=1)
        lower, upper = np.array([(b.lower, b.upper) for b in bins]).T
        width = upper - lower
        style = {"align": "edge", "color": colour, "edgecolor": STRONG[setting]}
        left = lower + (0.06 + 0.46 * number) * width
        bottom.bar(left, [b.n for b in bins], width=0.42 * width, **style)
    top.set(ylabel="share correct", xlim=(0, 1), ylim=(-0.02, 1.02))
    top.legend(loc="upper left")
    bottom.set(xlabel="P(correct)", ylabel="answers")
    bottom.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    return figure


@styled()
def layer_sweep(sweep: Mapping[Setting, LayerCurve]) -> Figure:
    """Draw the AUROC of a linear probe by layer: seeds, means and the best."""
    figure, axes = _figure(3.6)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    for setting, curve in sweep.items():
        strong, soft = STRONG[setting], SOFT[setting]
        for layer, seeds in zip(curve.layers, curve.auroc, strict=True):
            pale = {"color": soft, "markeredgecolor": strong, "markeredgewidth": 0.5}
            axes.plot([layer] * len(seeds), seeds, "o", markersize=3.5, **pale)
        means = np.mean(curve.auroc, axis=1)
        axes.plot(
            curve.layers,
            means,
            color=strong,
            marker="o" if setting == "closed_book" else "s",
            markersize=5,
            label=f"{SETTING_LABELS[setting]}, best layer {curve.best}",
        )
        _ring(axes, curve.best, means[curve.layers.index(curve.best)], strong)
    axes.set(xlabel="layer (0 is the embedding)", ylabel="validation AUROC")
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best")
    return figure


def _ring(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.plot([x], [y], "o", color=colour, fillstyle="none", markersize=12)


def _name(
    axes: Axes, label: str, x: float, y: float, colour: str, **style: Any
) -> None:
    style = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center", **style}
    axes.annotate(label, (x, y), color=colour, **style)


@styled()
def synergy(auroc: Mapping[str, float], setting: str) -> Figure:
    """Draw encoders from best to worst, with dots for the families that each reads."""
    order = sorted(auroc, key=lambda name: (-auroc[name], len(name), name))
    places = range(len(order))
    figure, (bars, dots) = _figure(4.2, 2, 1, sharex=True, height_ratios=(2.6, 1))
    colours = [(STRONG if "H" in name else SOFT)[setting] for name in order]
    style: dict[str, Any] = {"color": colours, "edgecolor": STRONG[setting]}
    bars.bar(places, [auroc[name] for name in order], width=0.76, **style)
    for x, name in zip(places, order, strict=True):
        value = f"{auroc[name]:.3f}".removeprefix("0")
        # Not a leading blank: browsers drop it.
        above: Any = {"xytext": (0, 3), "va": "bottom", "rotation": 90}
        _name(bars, value, x, auroc[name], INK, fontsize=9.5, **above)
    bars.set(ylabel="validation AUROC", ylim=_cropped(list(auroc.values()), 0.35))
    bars.grid(False, axis="x")
    bars.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    for y, letter in enumerate(FAMILIES):
        for has, colour in ((False, GRID), (True, INK)):
            reads = [x for x in places if (letter in order[x]) == has]
            dots.plot(reads, [y] * len(reads), "o", color=colour, markersize=7)
    dots.set_yticks(range(len(FAMILIES)), FAMILIES.values(), color=INK)
    dots.set(ylim=(len(FAMILIES) - 0.4, -0.6), xticks=[])
    dots.tick_params(length=0)
    dots.grid(False)
    dots.spines[:].set_visible(False)
    return figure


@styled()
def selection_path(rounds: Sequence[Mapping[str, Any]], setting: str) -> Figure:
    """Draw the greedy search: every candidate of every round, and the one it kept.

    Rounds are `{"added": name or None, "auroc": float, "candidates": {name: float}}`.
    Candidates are squares if they read the with-context pass ("[HP]"), and circles if
    they read the closed-book pass.
    """
    figure, axes = _figure(3.6)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    seen = [x for r in rounds for x in r["candidates"].values()]
    kinds = (("closed_book", "(", -0.06, "o"), ("with_context", "[", 0.06, "s"))
    for n, search in enumerate(rounds, start=1):
        for pool, bracket, shift, marker in kinds:
            scores = [x for k, x in search["candidates"].items() if k[0] == bracket]
            at = [n + shift] * len(scores)
            rim: Any = {"markeredgecolor": STRONG[pool], "markeredgewidth": 0.5}
            axes.plot(at, scores, marker, color=SOFT[pool], markersize=4.5, **rim)
    added = [(n, r) for n, r in enumerate(rounds, start=1) if r["added"]]
    heights = [r["auroc"] for _, r in added]
    axes.plot([n for n, _ in added], heights, color=STRONG[setting], zorder=3)
    for n, search in added:
        _ring(axes, n, search["auroc"], STRONG[setting])
        above = {"xytext": (0, 10), "fontweight": "bold"}
        _name(axes, search["added"], n, search["auroc"], STRONG[setting], **above)
    axes.set(xlabel="round", ylabel="validation AUROC")
    axes.set(ylim=_cropped(seen + heights, 0.2), xlim=(0.5, len(rounds) + 0.5))
    axes.set_xticks(range(1, len(rounds) + 1))
    return figure


@styled()
def frontier(
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    rivals: Mapping[str, tuple[float, float]],
    metric: str,
    budget: int,
) -> Figure:
    """Draw answer quality against cost, one point per budget of each loop.

    Args:
      curves: for each controller with a budget (the paper's first), a mapping
        `{"budget", "generations", metric}` per budget.
      rivals: for each other controller, (generations per question, score).
      metric: "em" or "f1".
      budget: the chosen budget of the first controller, marked with a ring.
    """
    figure, axes = _figure(3.6)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    curves = {_label(name): points for name, points in curves.items()}
    rivals = {_label(name): point for name, point in rivals.items()}
    heights = [score for _, score in rivals.values()]
    # Blue and orange would stand for one setting.
    styles = itertools.cycle(((INK, "-"), (MUTED, "--"), (MUTED, ":")))
    for number, (label, curve) in enumerate(curves.items()):
        points = sorted(curve, key=lambda point: point["budget"])
        colour, line = next(styles)
        x, y = [p["generations"] for p in points], [p[metric] for p in points]
        axes.plot(x, y, f"{line}o", color=colour, markersize=5, label=label)
        heights += y
        budgets: dict[tuple[float, float], list[int]] = {}
        for point in points:
            here = (point["generations"], point[metric])
            budgets.setdefault(here, []).append(int(point["budget"]))
        for here, same in budgets.items():
            is_chosen = number == 0 and budget in same
            if is_chosen:
                _ring(axes, *here, colour)
            label, weight = ", ".join(map(str, same)), "bold" if is_chosen else "normal"
            _name(axes, label, *here, colour, fontweight=weight)
    shapes = itertools.cycle(("s", "D", "^", "v", "P", "X", "<", ">", "*", "h"))
    for marker, (label, (cost, score)) in zip(shapes, rivals.items(), strict=False):
        axes.plot(cost, score, marker, color=MUTED, label=label)
    low, high = _cropped(heights, 0.15)
    axes.set(ylim=(low - 0.1 * (high - low), high))
    axes.set(xlabel="generations per question", ylabel=metric.upper())
    axes.margins(x=0.1)
    n_lines = -(-sum(name.count("\n") + 1 for name in (*curves, *rivals)) // 2)
    figure.set_size_inches(6.0, 3.6 + 0.18 * n_lines)
    _legend(figure, "lower")
    return figure


@styled()
def ranking(ranked: Mapping[str, Any], setting: str) -> Figure:
    """Draw a ranking: AUROC above, and a ribbon per family below.

    `ranked` is `{"n_sets", "rank", "means": [per part], "ribbon": [{"family": letter,
    "reads": pass, "means": [per part]}]}`, see `selection.exhaustive.ranking_summary`.
    """
    n_parts = len(ranked["means"])
    x = (np.arange(n_parts) + 0.5) * ranked["n_sets"] / n_parts
    heights = (2.4, *(1 for _ in FAMILIES))
    figure, (curve, *ribbons) = _figure(5.0, 5, 1, sharex=True, height_ratios=heights)
    curve.plot(x, ranked["means"], color=STRONG[setting])
    curve.set(ylabel="validation AUROC")
    for axes, (letter, family) in zip(ribbons, FAMILIES.items(), strict=True):
        floor = np.zeros(n_parts)
        for layer in (x for x in ranked["ribbon"] if x["family"] == letter):
            top, colour = floor + layer["means"], STRONG[layer["reads"]]
            style = {"color": colour, "linewidth": 0, "alpha": 0.85}
            axes.fill_between(x, floor, top, **style)
            floor = top
        axes.set(ylim=(0, 3), yticks=(0, 3))
        axes.set_ylabel(family, rotation=0, ha="right", va="center", fontsize=9.5)
    for axes in (curve, *ribbons):
        axes.axvline(ranked["rank"], **_DASHED)
    ribbons[-1].set(xlabel="rank of the set", xlim=(0, ranked["n_sets"]))
    ribbons[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _short(value: float, undefined: str = "") -> str:
    return undefined if np.isnan(value) else f"{value:.2f}".replace("0.", ".", 1)


def _alpha(tint: float) -> float:
    """Return the opacity of a tint in [0, 1], on which ink has a contrast of 4.5.

    That holds for the colours of both schemes of the page.
    """
    return 0.5 * max(0.04, tint)


def _heat(
    axes: Axes, tints: np.ndarray, colour: str, texts: np.ndarray | None = None
) -> None:
    """Draw a matrix as tinted cells, empty for NaN, with optional texts in them."""
    for (i, j), tint in np.ndenumerate(tints):
        if not np.isnan(tint):
            cell = (j - 0.5, i - 0.5), 1, 1
            style = {"facecolor": colour, "alpha": _alpha(tint), "lw": 0}
            axes.add_patch(Rectangle(*cell, **style))
        if texts is not None and texts[i, j]:
            axes.text(j, i, str(texts[i, j]), ha="center", va="center", fontsize=9.5)
    axes.set(xlim=(-0.5, tints.shape[1] - 0.5), ylim=(tints.shape[0] - 0.5, -0.5))
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@styled()
def complementarity(
    rights: pandas.DataFrame, errors: Sequence[float], setting: str
) -> Figure:
    """Draw which family gets right what another gets wrong, and each one's error rate.

    `rights` is `[4, 4]`: the share of the column's mistakes that the row gets right,
    NaN on the diagonal. A fifth column is what the row would get right by chance.
    """
    shares, names = rights.to_numpy(float), list(FAMILIES.values())
    figure, (heat, bars) = _figure(3.4, 1, 2, width_ratios=(3, 1), sharey=True)
    _heat(heat, shares, STRONG[setting], np.vectorize(_short)(shares))
    columns = [FAMILIES.get(x, x.replace(" ", "\n")) for x in rights.columns]
    heat.set_xticks(range(len(columns)), columns)
    heat.set_yticks(range(4), names)
    heat.set(xlabel="of the mistakes of …", ylabel="… gets right (share)")
    style = {"color": SOFT[setting], "edgecolor": STRONG[setting]}
    bars.barh(range(4), errors, height=0.6, **style)
    for i, error in enumerate(errors):
        beside: Any = {"xytext": (4, 0), "ha": "left", "va": "center"}
        _name(bars, _short(error), error, i, INK, fontsize=9.5, **beside)
    bars.set(xlabel="own error rate\n(share)")
    bars.margins(x=0.35)
    bars.grid(False, axis="y")
    bars.tick_params(axis="y", length=0)
    bars.xaxis.set_major_locator(MaxNLocator(2))
    return figure


@styled()
def boundary_band(cells: pandas.DataFrame, setting: str) -> Figure:
    """Draw the score without a family against what the family adds, in logits.

    `cells` has the number of answers (`value`) by `family`, `metric` ("answers" whose
    decision stays, or "flips"), and the centre and width of a cell.
    """
    numbers = ["value", "bin_x", "bin_y", "bin_width"]
    cells = cells.astype(dict.fromkeys(numbers, float))
    most, width = cells["value"].max(), cells["bin_width"].max()
    edge = width + cells[["bin_x", "bin_y"]].abs().to_numpy().max()
    families = {x: name for x, name in names.FAMILIES.items() if x in set(cells.family)}
    n_rows = -(-len(families) // 2)
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, grid = _figure(0.6 + 2.5 * n_rows, n_rows, 2, **shared)
    kinds = {"answers": ("o", SOFT, "none"), "flips": ("s", STRONG, INK)}
    for axes, (letter, family) in zip(grid.flat, families.items(), strict=False):
        axes.fill_between((0, edge), (0, -edge), -edge, color=GRID, lw=0, alpha=0.6)
        axes.fill_between((-edge, 0), (edge, 0), edge, color=GRID, lw=0, alpha=0.6)
        axes.axvline(0, color=MUTED, lw=0.8)
        for metric, (marker, colours, rim) in kinds.items():
            shown = cells[(cells["family"] == letter) & (cells["metric"] == metric)]
            if not shown.empty:
                style = {"marker": marker, "color": colours[setting], "edgecolor": rim}
                sizes = 4 + 110 * shown["value"] / most
                axes.scatter(shown["bin_x"], shown["bin_y"], sizes, lw=0.5, **style)
        axes.set_title(family, fontsize=9.5, color=INK)
        axes.set(xlim=(-edge, edge), ylim=(-edge, edge))
    for axes in list(grid.flat)[len(families) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("logit without the family")
    for axes in grid[:, 0]:
        axes.set_ylabel("logits the family adds")
    return figure


@styled()
def head_map(shares: pandas.DataFrame, setting: str) -> Figure:
    """Draw the share (`value`) of every `head` and `layer`, one panel per encoder."""
    most, encoders = shares["value"].max(), shares["families"].unique()
    widths = (*(6 for _ in encoders), 0.5)
    figure, (*panels, scale) = _figure(4.0, 1, len(widths), width_ratios=widths)
    for axes, families in zip(panels, encoders, strict=True):
        of_encoder = shares[shares["families"] == families]
        cells = of_encoder.pivot(index="layer", columns="head", values="value")
        _heat(axes, cells.to_numpy(float) / most, STRONG[setting])
        axes.set_title(names.family_name(families, setting), fontsize=9.5, color=INK)
        axes.set(xlabel="head")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    panels[0].set_ylabel("attention layer read, from 0")
    steps = np.linspace(0, most, 21)
    for low, high in itertools.pairwise(steps):
        step = Rectangle((0, low), 1, high - low, lw=0)
        step.set(facecolor=STRONG[setting], alpha=_alpha((low + high) / 2 / most))
        scale.add_patch(step)
    n_heads = shares.groupby("families").size().max()
    scale.axhline(1 / n_heads, color=INK, lw=1.5)
    scale.set(xlim=(0, 1), ylim=(0, most), xticks=[])
    scale.set_xlabel("share", fontsize=9.5)
    scale.yaxis.tick_right()
    scale.grid(False)
    return figure


@styled()
def shares_of_text(
    spans: Mapping[str, tuple[float, float]],
    positions: Mapping[str, tuple[float, float, float, float]],
    setting: str,
) -> Figure:
    """Draw how much spans and positions of the answer move the logit.

    By name, `spans` have their shares of the logit's change and of the tokens;
    `positions` their share within the answer, its interval, and an even share.
    """
    figure, (left, right) = _figure(3.2, 1, 2, width_ratios=(1.2, 1.6))
    x = np.arange(len(spans))
    for shift, which, colour, hatch, label in (
        (-0.2, 0, STRONG[setting], "", "logit"),
        (0.2, 1, SOFT[setting], "///", "tokens"),
    ):
        heights = [shares[which] for shares in spans.values()]
        style = {"color": colour, "hatch": hatch, "edgecolor": PAPER}
        left.bar(x + shift, heights, width=0.38, label=label, **style)
    left.set_xticks(x, list(spans), fontsize=9.5)
    left.set(ylabel="share", ylim=(0, 1), xlabel="span")
    left.legend(loc="upper left", fontsize=9.5)
    left.grid(False, axis="x")
    at = np.arange(len(positions))
    values = np.array(list(positions.values()))
    right.bar(at, values[:, 0], width=0.7, color=STRONG[setting], alpha=0.85)
    errors = np.abs(values[:, 1:3].T - values[:, 0])
    bars = {"fmt": "none", "ecolor": INK, "elinewidth": 1.0}
    right.errorbar(at, values[:, 0], yerr=errors, **bars)
    right.plot(at, values[:, 3], "_", color=INK, ms=14, mew=2, label="even")
    right.set_xticks(at, list(positions))
    right.set(ylabel="share within the answer", xlabel="token of the answer")
    right.legend(loc="upper right", fontsize=9.5)
    right.set_ylim(0, 1.2 * max(values[:, 2].max(), values[:, 3].max()))
    right.grid(False, axis="x")
    return figure


@styled()
def layer_curves(
    curves: Mapping[str, pandas.DataFrame], best: Mapping[str, int]
) -> Figure:
    """Draw AUROC by layer with intervals, and a ring at the best on validation."""
    figure, axes = _figure(3.4)
    for marker, (setting, curve) in zip("os", curves.items(), strict=False):
        x, (y, low, high) = curve.index.to_numpy(int), curve.to_numpy(float).T
        axes.fill_between(x, low, high, color=SOFT[setting], alpha=0.45, lw=0)
        style = {"color": STRONG[setting], "marker": marker, "ms": 4.5}
        axes.plot(x, y, label=SETTING_LABELS[setting], **style)
        at = int(np.flatnonzero(x == best[setting])[0])
        _ring(axes, x[at], y[at], STRONG[setting])
    axes.set(xlabel="layer (0 is the embedding)", ylabel="AUROC, in-domain test")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, "upper")
    return figure


@styled()
def pair_gains(gains: pandas.DataFrame, pairs: Mapping[str, str]) -> Figure:
    """Draw the gain of pairs of families over their better member, a point per set.

    The column `is_other` says whether a gain is on another backbone.
    """
    kinds: Any = list(gains.groupby(["setting", "is_other"], sort=False))
    figure, axes = _figure(3.4)
    axes.axvline(0, color=MUTED, lw=1)
    for number, ((setting, is_other), points) in enumerate(kinds):
        shift = (number - (len(kinds) - 1) / 2) * 0.17
        style = {"color": STRONG[setting], "ms": 5.5, "ls": "none"}
        style["fillstyle"] = "none" if is_other else "full"
        style["marker"] = "o" if setting == "closed_book" else "s"
        label = SETTING_LABELS[setting] + (", other backbone" if is_other else "")
        at = [list(pairs).index(families) + shift for families in points["families"]]
        axes.plot(100 * points["value"].astype(float), at, label=label, **style)
    axes.set_yticks(range(len(pairs)), list(pairs.values()))
    axes.set(xlabel="AUROC of the pair − better member (× 100)")
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    _legend(figure, "upper")
    return figure


@styled()
def closed_book_counts(shares: np.ndarray) -> Figure:
    """Draw the shares `[4, n_parts]` of sets with 0 to 3 closed-book encoders."""
    n_parts = shares.shape[1]
    x = np.arange(n_parts + 1) / n_parts
    shares = np.concatenate([shares, shares[:, -1:]], axis=1)  # each part is a step
    floor = np.zeros(n_parts + 1)
    figure, axes = _figure(3.2)
    for k, share in enumerate(shares):
        tint = (0.1, 0.3, 0.5, 0.9)[k]
        colour = STRONG["closed_book"]
        style: dict[str, Any] = {"color": colour, "alpha": tint, "lw": 0}
        axes.fill_between(x, floor, floor + share, step="post", **style)
        axes.step(x, floor + share, where="post", color=PAPER, lw=1)
        widest = int(np.argmax(share[:-1]))
        if share[widest] > 0.1:
            y, ink = floor[widest] + share[widest] / 2, PAPER if k > 2 else INK
            style = {"ha": "center", "va": "center", "color": ink}
            axes.text(x[widest] + 0.5 / n_parts, y, str(k), **style)
        floor = floor + share
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set(xlabel="place in the ranking (0 best, 1 worst)")
    axes.set(ylabel="share of sets, by number of\nclosed-book encoders")
    axes.grid(False)
    return figure


@styled()
def two_backbones(
    aurocs: Mapping[str, pandas.DataFrame], backbones: Mapping[str, str]
) -> Figure:
    """Draw the AUROC of every subset on one backbone (`first`) against `second`."""
    figure, (panels,) = _figure(3.4, 1, len(aurocs), squeeze=False)
    for axes, (setting, both) in zip(panels, aurocs.items(), strict=True):
        reads = both.index.str.contains("H")
        for is_read, colour, marker in ((reads, STRONG, "o"), (~reads, SOFT, "D")):
            points = both[is_read].astype(float)
            style = {"color": colour[setting], "markeredgecolor": STRONG[setting]}
            style["label"] = "no hidden states" if marker == "D" else "hidden states"
            axes.plot(points["first"], points["second"], marker, ms=6, **style)
        axes.set_title(SETTING_LABELS[setting], fontsize=9.5, color=INK)
        axes.margins(0.1)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    figure.supxlabel(f"test AUROC, {backbones['first']}", fontsize=9.5)
    figure.supylabel("test AUROC,\n" + backbones["second"], fontsize=9.5)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=9.5)
    return figure


@styled()
def learning_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], setting: str
) -> Figure:
    """Draw AUROC against the number of labelled answers, a line per detector."""
    marks, strong = iter("os^DvPX"), iter((STRONG[setting], INK, MUTED))
    figure, axes = _figure(4.2)
    for name, points in curves.items():
        is_single = name in names.FAMILIES.values()
        colour = MUTED if is_single else next(strong)
        x, y = zip(*points, strict=True)
        style: dict[str, Any] = {"lw": 1.0 if is_single else 2.2}
        style["linestyle"] = (0, (4, 2)) if "regression" in name else "-"
        axes.plot(x, y, marker=next(marks), color=colour, ms=5, label=name, **style)
    axes.set_xscale("log")
    ticks = sorted({x for points in curves.values() for x, _ in points})
    # If the last two ticks are too close, only the last one is named.
    named = [x for x in ticks if x == ticks[-1] or x < 0.7 * ticks[-1]]
    axes.set_xticks(named, [f"{x:,.0f}" for x in named])
    axes.minorticks_off()
    axes.set(xlabel="labelled answers", ylabel="AUROC, in-domain test")
    _legend(figure, "lower", 3)
    return figure


@styled()
def matrix(values: pandas.DataFrame, setting: str) -> Figure:
    """Draw AUROC by training set (row) and test set (column)."""
    figure, axes = _figure(2.0 + 0.55 * len(values))
    # Tints start at .5, which is guessing.
    aurocs = values.to_numpy(float)
    tints, texts = np.clip(2 * aurocs - 1, 0.0, 1.0), np.vectorize(_short)(aurocs, "–")
    _heat(axes, tints, STRONG[setting], texts)
    axes.set_xticks(range(values.shape[1]), list(values.columns))
    # Long names of sets would overlap if horizontal.
    axes.tick_params(axis="x", rotation=30)
    for name in axes.get_xticklabels():
        name.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(values)), list(values.index))
    axes.set(xlabel="tested on (AUROC)", ylabel="trained on")
    return figure


CostKind = Literal["plain", "trained", "sampled"]
MARKERS: dict[CostKind, tuple[str, str]] = {
    "plain": ("o", "untrained"),
    "trained": ("s", "trained on labels"),
    "sampled": ("^", "reads drawn answers"),
}
_N_NAMED = 5


@styled()
def cost_figure(
    points: Sequence[tuple[str, CostKind, float, float]],
    setting: str,
    axis: str,
    ours: Mapping[str, float],
    *,
    is_log: bool,
) -> Figure:
    """Draw AUROC against cost, a point per detector; the best few are named.

    `points` are (title, kind, cost, AUROC), best first. `ours` is by label the AUROC of
    the selected set (dashed) and perhaps of another (dotted). On a logarithmic axis no
    cost may be 0.
    """
    figure, axes = _figure(4.2)
    for kind, (marker, label) in MARKERS.items():
        of_kind = [(cost, auroc) for _, of, cost, auroc in points if of == kind]
        if of_kind:
            colour = (SOFT if kind == "plain" else STRONG)[setting]
            style: Any = {"color": colour, "markeredgecolor": STRONG[setting]}
            axes.plot(*zip(*of_kind, strict=True), marker, label=label, **style)
    for number, (title, _, cost, auroc) in enumerate(points[:_N_NAMED]):
        # Numbers, since names would overlap: the best often cost the same.
        text = f"{number + 1}"
        shift = {"xytext": (7, 4), "textcoords": "offset points", "fontsize": 9.5}
        # A line may pass behind a number, but not through it.
        under: Any = {"facecolor": PAPER, "linewidth": 0, "pad": 0.5}
        axes.annotate(text, (cost, auroc), color=MUTED, bbox=under, **shift)
        axes.plot([], [], " ", label=_label(f"{text}  {title}", 99))
    for (label, auroc), style in zip(ours.items(), ((0, (4, 3)), ":"), strict=False):
        axes.axhline(auroc, label=label, **_DASHED | {"linestyle": style})
    axes.set_xscale("log" if is_log else "linear")
    axes.set(xlabel=axis, ylabel="AUROC, all in-domain test questions")
    axes.margins(x=0.12, y=0.12)
    _legend(figure, "lower")
    return figure

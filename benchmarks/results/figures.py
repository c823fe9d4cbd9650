"""Figures as pure functions: numbers to a Matplotlib figure, and that to an SVG.

The SVG of the same numbers is the same bytes. Text stays text, and colours are CSS
variables with the light palette as their fallback, so that one drawing serves the light
page, the dark page and a stand-alone file. Closed-book is blue and with-context orange
everywhere; the pair is told apart under the common colour-vision deficiencies, and
every distinction is also one of shape, fill or position.
"""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from beatrice.benchmarks.results.names import METRIC_LABELS, SETTING_LABELS

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
    """Apply the house style to what is drawn inside this context, and nothing else."""
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if k != "backend"}
    return matplotlib.rc_context({**defaults, **_STYLE})


def _axes() -> tuple[Figure, Axes]:
    """One figure with one pair of axes, outside pyplot's registry."""
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    return figure, axes


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an SVG element to put into a page.

    Args:
      figure: a figure of this module.
      name: prefix of all ids, so that several figures can share a page.
      description: what a screen reader says instead.
    """
    buffer = io.StringIO()
    with styled():
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable}, {colour})")
    head = re.compile(r'<svg width="[^"]*" height="[^"]*"( viewBox="[^"]*")[^>]*>')
    label = (
        description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    )
    return head.sub(rf'<svg\1 role="img" aria-label="{label}">', svg, count=1)


def _cropped(values: Sequence[float], above: float = 0.12) -> tuple[float, float]:
    """Return axis limits around the values; `above` leaves room for labels."""
    spread = max(max(values) - min(values), 0.01)
    return min(values) - 0.15 * spread, max(values) + above * spread


def reliability(
    raw: Sequence[Mapping[str, Any]],
    calibrated: Sequence[Mapping[str, Any]],
    setting: str,
) -> Figure:
    """Draw how often answers are right against what the score says, with bin counts.

    Args:
      raw: bins `{lower, upper, mean_p, accuracy, n}` of the uncalibrated score.
      calibrated: the same of the calibrated probability.
      setting: for the colour.
    """
    curves = (
        ("raw", raw, SOFT[setting], "s"),
        ("calibrated", calibrated, STRONG[setting], "o"),
    )
    with styled():
        figure = Figure(figsize=(6.0, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        top.plot((0, 1), (0, 1), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for place, (label, bins, colour, marker) in enumerate(curves):
            full = [b for b in bins if b["n"] > 0]
            x, y = [b["mean_p"] for b in full], [b["accuracy"] for b in full]
            top.plot(x, y, color=colour, marker=marker, markersize=5.5, label=label)
            steps = [b["upper"] - b["lower"] for b in bins]
            shifts = [(0.06 + 0.46 * place) * step for step in steps]
            bottom.bar(
                [b["lower"] + shift for b, shift in zip(bins, shifts, strict=True)],
                [b["n"] for b in bins],
                width=[0.42 * step for step in steps],
                align="edge",
                color=colour,
            )
        top.set(ylabel="share correct", xlim=(0, 1), ylim=(-0.02, 1.02))
        top.legend(loc="upper left")
        bottom.set(xlabel="P(correct)", ylabel="answers")
        bottom.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    return figure


def layer_sweep(sweep: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the hidden-state encoder's AUROC over layers: seeds, their mean, the best.

    Args:
      sweep: per setting `{"layers": [...], "auroc": [[per seed] per layer], "best"}`; a
        seed whose AUROC is undefined is None.
    """
    with styled():
        figure, axes = _axes()
        for setting, found in sweep.items():
            strong, soft = STRONG[setting], SOFT[setting]
            means = {}
            for layer, seeds in zip(found["layers"], found["auroc"], strict=True):
                known = [x for x in seeds if x is not None]
                axes.plot([layer] * len(known), known, "o", color=soft, markersize=3.5)
                if known:
                    means[layer] = sum(known) / len(known)
            best = found["best"]
            axes.plot(
                list(means),
                list(means.values()),
                color=strong,
                marker="o" if setting == "closed_book" else "s",
                markersize=5,
                label=f"{SETTING_LABELS[setting]}, best layer {best}",
            )
            _ring(axes, best, means[best], strong)
        axes.set(xlabel="layer", ylabel="validation AUROC")
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")
    return figure


def _ring(axes: Axes, x: float, y: float, colour: str) -> None:
    """Mark one point."""
    axes.plot([x], [y], "o", color=colour, fillstyle="none", markersize=12)


def _name(
    axes: Axes, label: str, x: float, y: float, colour: str, **style: Any
) -> None:
    """Write a name under a point."""
    style = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center", **style}
    axes.annotate(label, (x, y), color=colour, **style)


def synergy(auroc: Mapping[str, float], setting: str) -> Figure:
    """Draw encoders best to worst, with a dot matrix of the families each one reads.

    Args:
      auroc: per encoder, named by its letters ("HPA"), the validation AUROC.
      setting: for the colour; darker bars read hidden states.
    """
    order = sorted(auroc, key=lambda name: (-auroc[name], len(name), name))
    places = range(len(order))
    with styled():
        figure = Figure(figsize=(6.0, 4.2), layout="constrained")
        bars, dots = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        colours = [(STRONG if "H" in name else SOFT)[setting] for name in order]
        bars.bar(places, [auroc[name] for name in order], width=0.76, color=colours)
        for x, name in zip(places, order, strict=True):
            value = f"{auroc[name]:.3f}".removeprefix("0")
            bars.text(x, auroc[name], value, ha="center", va="bottom", fontsize=8)
        bars.set(ylabel="validation AUROC", ylim=_cropped(list(auroc.values())))
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


def selection_path(rounds: Sequence[Mapping[str, Any]], setting: str) -> Figure:
    """Draw the greedy search: every candidate of every round, and the one it kept.

    Args:
      rounds: `{"added": name or None, "auroc": float, "candidates": {name: float}}`.
      setting: for the colour of the path. Candidates are squares where they read the
        with-context pass ("[HP]") and circles where they read the closed-book one.
    """
    with styled():
        figure, axes = _axes()
        seen = [x for r in rounds for x in r["candidates"].values()]
        for n, found in enumerate(rounds, start=1):
            pools: dict[str, list[float]] = {"closed_book": [], "with_context": []}
            for name, score in found["candidates"].items():
                is_context = name.startswith("[")
                pools["with_context" if is_context else "closed_book"].append(score)
            for shift, marker, (pool, scores) in zip(
                (-0.06, 0.06), "os", pools.items(), strict=True
            ):
                at = [n + shift] * len(scores)
                axes.plot(at, scores, marker, color=SOFT[pool], markersize=4.5)
        kept = [(n, r) for n, r in enumerate(rounds, start=1) if r["added"]]
        heights = [r["auroc"] for _, r in kept]
        axes.plot([n for n, _ in kept], heights, color=STRONG[setting], zorder=3)
        for n, found in kept:
            _ring(axes, n, found["auroc"], STRONG[setting])
            above = {"xytext": (0, 10), "fontweight": "bold"}
            _name(axes, found["added"], n, found["auroc"], STRONG[setting], **above)
        axes.set(xlabel="round", ylabel="validation AUROC")
        axes.set(ylim=_cropped(seen + heights, 0.2), xlim=(0.5, len(rounds) + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def frontier(
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    rivals: Mapping[str, tuple[float, float]],
    metric: str,
    budget: int,
) -> Figure:
    """Draw answer quality against cost, one point per budget of each loop.

    Args:
      curves: per controller with a budget, the paper's first, `{"budget",
        "generations", metric}` for each.
      rivals: per controller its generations per question and its score.
      metric: "em" or "f1".
      budget: the budget B that was chosen for the first, marked with a ring.
    """
    with styled():
        figure, axes = _axes()
        heights = [score for _, score in rivals.values()]
        colours = (STRONG["closed_book"], INK, MUTED)
        for place, (label, curve) in enumerate(curves.items()):
            points = sorted(curve, key=lambda point: point["budget"])
            colour = colours[place % len(colours)]
            x, y = [p["generations"] for p in points], [p[metric] for p in points]
            axes.plot(x, y, "-o", color=colour, markersize=5, label=label)
            heights += y
            for point in points:
                here = (point["generations"], point[metric])
                is_chosen = place == 0 and point["budget"] == budget
                if is_chosen:
                    _ring(axes, *here, colour)
                weight = "bold" if is_chosen else "normal"
                _name(axes, f"B={point['budget']}", *here, colour, fontweight=weight)
        shapes = itertools.cycle(("s", "D", "^", "v", "P", "X", "<", ">", "*", "h"))
        for marker, (label, (cost, score)) in zip(shapes, rivals.items(), strict=False):
            axes.plot(cost, score, marker, color=STRONG["with_context"], label=label)
        low, high = _cropped(heights, 0.15)
        axes.set(ylim=(low - 0.1 * (high - low), high))
        axes.set(xlabel="generations per question", ylabel=METRIC_LABELS[metric])
        axes.margins(x=0.1)
        n_lines = -(-(len(curves) + len(rivals)) // 2)
        figure.set_size_inches(6.0, 3.6 + 0.18 * n_lines)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _ribbon(axes: Axes, x: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    """Draw how many encoders of a set read a family, pass upon pass."""
    floor = np.zeros_like(x)
    for which, mean in parts.items():
        top = floor + mean
        axes.fill_between(x, floor, top, color=STRONG[which], linewidth=0, alpha=0.85)
        floor = top


def ranking(found: Mapping[str, Any], setting: str) -> Figure:
    """Draw a ranking: AUROC above, and a ribbon per family below.

    Args:
      found: `{"n_sets", "rank", "means": [per part of the ranking], "ribbon":
        {"H:closed_book": [per part]}}`, see `selection.exhaustive.ranking_summary`.
      setting: for the colours.
    """
    n_parts = len(found["means"])
    x = (np.arange(n_parts) + 0.5) * found["n_sets"] / n_parts
    with styled():
        figure = Figure(figsize=(6.0, 5.0), layout="constrained")
        heights = (2.4, *(1 for _ in FAMILIES))
        top, *ribbons = figure.subplots(
            len(heights), 1, sharex=True, height_ratios=heights
        )
        top.plot(x, found["means"], color=STRONG[setting])
        top.set(ylabel="validation AUROC")
        for axes, (letter, family) in zip(ribbons, FAMILIES.items(), strict=True):
            parts = {
                name.split(":")[1]: np.asarray(mean)
                for name, mean in found["ribbon"].items()
                if name.startswith(f"{letter}:")
            }
            _ribbon(axes, x, parts)
            axes.set(ylim=(0, 3), yticks=(0, 3))
            axes.set_ylabel(family, rotation=0, ha="right", va="center", fontsize=9)
        for axes in (top, *ribbons):
            axes.axvline(
                found["rank"], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3))
            )
        ribbons[-1].set(xlabel="rank of the set", xlim=(0, found["n_sets"]))
        ribbons[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure

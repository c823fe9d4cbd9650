"""Figures of the anatomy as pure functions: numbers to a Matplotlib figure.

As in `benchmarks.results.figures` every distinction is one of shape, fill or position
besides colour, so that they can be read in grey.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from beatrice.benchmarks.results.figures import (
    FAMILIES,
    GRID,
    INK,
    MUTED,
    PAPER,
    SOFT,
    STRONG,
    styled,
)
from beatrice.benchmarks.results.names import SETTING_LABELS

Cells = Mapping[tuple[float, float], float]  # counts by the centres of cells


def short(value: float) -> str:
    """Spell a share with two digits."""
    return f"{value:.2f}".replace("0.", ".", 1)


def _heat(
    axes: Axes, values: np.ndarray, colour: str, *, text: bool = True, most: float = 1.0
) -> None:
    """Draw a matrix as tinted cells; NaN is left empty."""
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        tint = min(1.0, max(0.04, value / most)) * 0.75
        axes.add_patch(
            Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, alpha=tint, lw=0)
        )
        if text:
            axes.text(j, i, short(value), ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def complementarity(
    rights: np.ndarray, errors: Sequence[float], setting: str
) -> Figure:
    """Draw which family gets right what another gets wrong, and each one's error rate.

    Args:
      rights: `[4, 4]` share of the column's mistakes that the row gets right; NaN on
        the diagonal.
      errors: of each family.
      setting: for the colour.
    """
    names = list(FAMILIES.values())
    with styled():
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        heat, bars = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
        _heat(heat, rights, STRONG[setting])
        heat.set_xticks(range(4), names)
        heat.set_yticks(range(4), names)
        heat.set(xlabel="of the mistakes of …", ylabel="… gets right (share)")
        bars.barh(range(4), errors, height=0.6, color=SOFT[setting])
        for i, error in enumerate(errors):
            bars.text(error, i, f"  {short(error)}", va="center", fontsize=9)
        bars.set(xlabel="own error rate\n(share of answers)")
        bars.margins(x=0.35)
        bars.grid(False, axis="y")
        bars.tick_params(axis="y", length=0)
        bars.xaxis.set_major_locator(MaxNLocator(2))
    return figure


def boundary_band(
    panels: Mapping[str, tuple[Cells, Cells]], width: float, setting: str
) -> Figure:
    """Draw the score without a family against what the family adds, in logits.

    Args:
      panels: by the family's name, numbers of answers by cell, first those whose
        decision stays and then those whose decision flips.
      width: of a cell.
      setting: for the colours.
    """
    every = [cells for kinds in panels.values() for cells in kinds]
    most = max((n for cells in every for n in cells.values()), default=1.0)
    edge = width + max(
        (abs(x) for cells in every for at in cells for x in at), default=0
    )
    with styled():
        n_rows = -(-len(panels) // 2)
        figure = Figure(figsize=(6.0, 0.6 + 2.5 * n_rows), layout="constrained")
        grid = figure.subplots(n_rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes, (family, kinds) in zip(grid.flat, panels.items(), strict=False):
            axes.fill_between((0, edge), (0, -edge), -edge, color=GRID, lw=0, alpha=0.6)
            axes.fill_between((-edge, 0), (edge, 0), edge, color=GRID, lw=0, alpha=0.6)
            axes.axvline(0, color=MUTED, lw=0.8)
            for cells, marker, colours in zip(kinds, "os", (SOFT, STRONG), strict=True):
                if cells:
                    x, y = zip(*cells, strict=True)
                    sizes = [4 + 110 * n / most for n in cells.values()]
                    axes.scatter(
                        x,
                        y,
                        s=sizes,
                        marker=marker,
                        color=colours[setting],
                        edgecolor=INK if marker == "s" else "none",
                        linewidth=0.5,
                    )
            axes.set_title(family, fontsize=9.5, color=INK)
            axes.set(xlim=(-edge, edge), ylim=(-edge, edge))
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("logit without the family")
        for axes in grid[:, 0]:
            axes.set_ylabel("added by it (logits)")
    return figure


def head_map(maps: Mapping[str, np.ndarray], setting: str) -> Figure:
    """Draw the share of every head of every layer, one panel an encoder.

    Args:
      maps: `[n_layers, n_heads]` shares by the encoder's printed name.
      setting: for the colour.
    """
    most = max(float(shares.max()) for shares in maps.values())
    with styled():
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        *panels, scale = figure.subplots(
            1, len(maps) + 1, width_ratios=(*(6 for _ in maps), 0.5)
        )
        for axes, (name, shares) in zip(panels, maps.items(), strict=True):
            _heat(axes, shares, STRONG[setting], text=False, most=most)
            axes.set_title(name, fontsize=9.5, color=INK)
            axes.set(xlabel="head")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        panels[0].set_ylabel("attention layer")
        steps = np.linspace(0, most, 21)
        for low, high in itertools.pairwise(steps):
            tint = min(1.0, max(0.04, (low + high) / 2 / most)) * 0.75
            scale.add_patch(
                Rectangle(
                    (0, low), 1, high - low, facecolor=STRONG[setting], alpha=tint, lw=0
                )
            )
        even = 1 / next(iter(maps.values())).size
        scale.axhline(even, color=INK, lw=1.5)
        scale.set(xlim=(0, 1), ylim=(0, most), xticks=[])
        scale.set_xlabel("share", fontsize=9)
        scale.yaxis.tick_right()
        scale.grid(False)
    return figure


def shares_of_text(
    spans: Mapping[str, tuple[float, float]],
    positions: Mapping[str, tuple[float, float, float, float]],
    setting: str,
) -> Figure:
    """Draw how much spans and positions of the answer move the logit.

    Args:
      spans: by name the share of what is moved, and of the tokens.
      positions: by name the share within the answer, its interval, and an even share.
      setting: for the colours.
    """
    with styled():
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.6))
        x = np.arange(len(spans))
        for shift, place, colour, hatch, label in (
            (-0.2, 0, STRONG[setting], "", "moved"),
            (0.2, 1, SOFT[setting], "///", "tokens"),
        ):
            heights = [own[place] for own in spans.values()]
            style = {"color": colour, "hatch": hatch, "edgecolor": PAPER}
            left.bar(x + shift, heights, width=0.38, label=label, **style)
        left.set_xticks(x, list(spans), fontsize=8)
        left.set(ylabel="share", ylim=(0, 1), xlabel="span")
        left.legend(loc="upper left", fontsize=8)
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
        right.legend(loc="upper right", fontsize=8)
        right.set_ylim(0, 1.2 * max(values[:, 2].max(), values[:, 3].max()))
        right.grid(False, axis="x")
    return figure


def layer_curves(
    curves: Mapping[str, Sequence[tuple[int, float, float, float]]],
    best: Mapping[str, int],
) -> Figure:
    """Draw AUROC by layer with intervals, and ring the layer that validation chooses.

    Args:
      curves: by setting layers, values and both ends of the interval.
      best: by setting.
    """
    with styled():
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for marker, (setting, points) in zip("os", curves.items(), strict=False):
            x, y, low, high = (np.array(own) for own in zip(*points, strict=True))
            axes.fill_between(x, low, high, color=SOFT[setting], alpha=0.45, lw=0)
            style = {"color": STRONG[setting], "marker": marker, "ms": 4.5}
            axes.plot(x, y, label=SETTING_LABELS[setting], **style)
            at = int(np.flatnonzero(x == best[setting])[0])
            ring = {"ms": 12, "fillstyle": "none", "color": STRONG[setting]}
            axes.plot([x[at]], [y[at]], "o", **ring)
        axes.set(xlabel="layer (0 is the embedding)", ylabel="AUROC, in-domain test")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    return figure


def pair_gains(gains: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw what a pair of families gains over the better of the two, a point a set.

    Args:
      gains: by pair and kind ("closed_book", "with_context", either with "other:" in
        front for another backbone), differences of AUROC.
    """
    names = list(gains)
    kinds = dict.fromkeys(kind for own in gains.values() for kind in own)
    with styled():
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=MUTED, lw=1)
        for place, kind in enumerate(kinds):
            is_other, setting = kind.startswith("other:"), kind.split(":")[-1]
            points = [(100 * g, i) for i, n in enumerate(names) for g in gains[n][kind]]
            shift = (place - (len(kinds) - 1) / 2) * 0.17
            style = {"color": STRONG[setting], "ms": 5.5, "ls": "none"}
            style["fillstyle"] = "none" if is_other else "full"
            label = SETTING_LABELS[setting] + (", other backbone" if is_other else "")
            axes.plot(
                [x for x, _ in points],
                [y + shift for _, y in points],
                "o" if setting == "closed_book" else "s",
                label=label,
                **style,
            )
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="AUROC of the pair − better member (× 100)")
        axes.set_ylim(len(names) - 0.5, -0.5)
        figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    return figure


def closed_book_counts(shares: np.ndarray) -> Figure:
    """Draw how many closed-book encoders sets hold along the ranking.

    Args:
      shares: `[4, n_parts]` share of a part's sets that hold 0, 1, 2 or 3.
    """
    n_parts = shares.shape[1]
    x = np.arange(n_parts + 1) / n_parts
    shares = np.concatenate([shares, shares[:, -1:]], axis=1)  # each part is a step
    floor = np.zeros(n_parts + 1)
    with styled():
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for k, own in enumerate(shares):
            tint = (0.12, 0.38, 0.64, 0.9)[k]
            colour = STRONG["closed_book"]
            style = {"color": colour, "alpha": tint, "lw": 0, "step": "post"}
            axes.fill_between(x, floor, floor + own, **style)
            axes.step(x, floor + own, where="post", color=PAPER, lw=1)
            widest = int(np.argmax(own[:-1]))
            if own[widest] > 0.1:
                y, ink = floor[widest] + own[widest] / 2, PAPER if k > 1 else INK
                style = {"ha": "center", "va": "center", "color": ink}
                axes.text(x[widest] + 0.5 / n_parts, y, str(k), **style)
            floor = floor + own
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set(xlabel="place in the ranking (0 best, 1 worst)")
        axes.set(ylabel="share of the sets that\nhold so many closed-book")
        axes.grid(False)
    return figure


def two_backbones(
    points: Mapping[str, Sequence[tuple[str, float, float]]],
    names: tuple[str, str],
) -> Figure:
    """Draw the AUROC of every subset on one backbone against another, by setting.

    Args:
      points: by setting the subset's letters and both AUROCs.
      names: of the backbones.
    """
    with styled():
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        panels = figure.subplots(1, len(points), squeeze=False)[0]
        for axes, (setting, own) in zip(panels, points.items(), strict=True):
            for reads, colour, marker in ((True, STRONG, "o"), (False, SOFT, "D")):
                some = [p for p in own if ("H" in p[0]) == reads]
                label = "reads hidden states" if reads else "does not"
                axes.plot(
                    [x for _, x, _ in some],
                    [y for _, _, y in some],
                    marker,
                    color=colour[setting],
                    markeredgecolor=STRONG[setting],
                    ms=6,
                    label=label,
                )
            axes.set_title(SETTING_LABELS[setting], fontsize=9.5, color=INK)
            axes.margins(0.1)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_locator(MaxNLocator(5))
        figure.supxlabel(f"test AUROC, {names[0]}", fontsize=9)
        figure.supylabel("test AUROC,\n" + names[1], fontsize=9)
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=8)
    return figure


def learning_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], setting: str
) -> Figure:
    """Draw AUROC against the number of labelled answers, a line a reader.

    Args:
      curves: by name, numbers of labels and AUROCs.
      setting: for the colours.
    """
    marks = itertools.cycle(("o", "s", "^", "D", "v", "P", "X", "*"))
    with styled():
        figure = Figure(figsize=(6.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, points) in enumerate(curves.items()):
            is_whole = place >= len(FAMILIES)
            colour = (STRONG[setting], INK, MUTED)[place - 4] if is_whole else MUTED
            x, y = zip(*points, strict=True)
            style = {"lw": 2.2} if is_whole else {"lw": 1.0}
            style["linestyle"] = (0, (4, 2)) if "regression" in name else "-"
            axes.plot(x, y, marker=next(marks), color=colour, ms=5, label=name, **style)
        axes.set_xscale("log")
        ticks = sorted({x for points in curves.values() for x, _ in points})
        # Where the last two lie too near to each other, the last one is named.
        kept = [x for x in ticks if x == ticks[-1] or x < 0.7 * ticks[-1]]
        axes.set_xticks(kept, [f"{x:,.0f}" for x in kept])
        axes.minorticks_off()
        axes.set(xlabel="labelled answers", ylabel="AUROC, in-domain test")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def matrix(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], setting: str
) -> Figure:
    """Draw AUROC by the set that taught (row) and the set that is read (column)."""
    with styled():
        size = 1.6 + 0.55 * len(rows)
        figure = Figure(figsize=(6.0, size), layout="constrained")
        axes = figure.add_subplot()
        # From .5, which is guessing: a tint says how much is told.
        tint = np.clip(2 * values - 1, 0.0, 1.0)
        _heat(axes, tint, STRONG[setting], text=False)
        for (i, j), value in np.ndenumerate(values):
            text = "–" if np.isnan(value) else short(value)
            axes.text(j, i, text, ha="center", va="center", fontsize=9)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel="read on (AUROC)", ylabel="trained on")
    return figure

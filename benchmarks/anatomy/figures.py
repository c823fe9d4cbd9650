"""Figures of the anatomy as pure functions: numbers to a Matplotlib figure.

As in `benchmarks.results.figures` every distinction is one of shape, fill or position
besides colour, so that they can be read in grey.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from benchmarks.results.figures import (
    FAMILIES,
    GRID,
    INK,
    MUTED,
    SOFT,
    STRONG,
    styled,
)

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
            bars.text(error, i, f" {short(error)}", va="center", fontsize=9)
        bars.set(xlabel="own error rate\n(share of answers)")
        bars.margins(x=0.35)
        bars.grid(False, axis="y")
        bars.tick_params(axis="y", length=0)
        bars.xaxis.set_major_locator(MaxNLocator(2))
    return figure


def boundary_band(panels: Mapping[str, tuple[Cells, Cells]], setting: str) -> Figure:
    """Draw the score without a family against what the family adds, in logits.

    Args:
      panels: by the family's name, numbers of answers by cell, first those whose
        decision stays and then those whose decision flips.
      setting: for the colours.
    """
    most = max(
        (n for kinds in panels.values() for cells in kinds for n in cells.values()),
        default=1.0,
    )
    with styled():
        n_rows = -(-len(panels) // 2)
        figure = Figure(figsize=(6.0, 0.6 + 2.5 * n_rows), layout="constrained")
        grid = figure.subplots(n_rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes, (family, kinds) in zip(grid.flat, panels.items(), strict=False):
            edge = 6.4
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

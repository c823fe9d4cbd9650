"""The figure of how training time grows."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.results.figures import MUTED, STRONG, styled
from benchmarks.speed.scaling_cost import Point

LABELS = {"examples": "examples", "members": "members", "width": "hidden width"}


def scaling(points: Sequence[Point], fitted: Mapping[str, float]) -> Figure:
    """Draw seconds against size, one axis a panel, with the fitted power law."""
    with styled():
        figure = Figure(figsize=(8.4, 3.0), layout="constrained")
        panels = figure.subplots(1, len(fitted), sharey=True)
        for axes, (axis, exponent) in zip(panels, fitted.items(), strict=True):
            own = [(p.size, p.seconds) for p in points if p.axis == axis]
            sizes, seconds = np.array(own).T
            middle = np.exp(np.log(seconds).mean() - exponent * np.log(sizes).mean())
            axes.plot(
                sizes,
                middle * sizes**exponent,
                color=MUTED,
                linewidth=1.2,
                linestyle=(0, (4, 3)),
            )
            axes.plot(sizes, seconds, "o", color=STRONG["closed_book"])
            axes.set(xscale="log", yscale="log", xlabel=LABELS[axis])
            axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
            axes.minorticks_off()
            axes.set_title(f"exponent {exponent:.2f}", fontsize=10)
        panels[0].set_ylabel("seconds an epoch")
    return figure

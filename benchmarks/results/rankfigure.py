"""The figure of an exhaustive ranking: what the sets carry, best to worst."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.results.figures import FAMILIES, MUTED, STRONG, styled
from benchmarks.results.pictures import Picture, picture
from extract.run.results import SETTING_LABELS


def _ribbon(axes: Axes, x: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    """Draw how many encoders of a set read a family, pass upon pass."""
    floor = np.zeros_like(x)
    for which, mean in parts.items():
        top = floor + mean
        axes.fill_between(x, floor, top, color=STRONG[which], linewidth=0, alpha=0.85)
        floor = top


def ranking(story: Mapping[str, Any], setting: str) -> Figure:
    """Draw a ranking: AUROC above, and a ribbon per family below.

    Args:
      story: `{"n_sets", "rank", "means": [per part of the ranking], "ribbon":
        {"H:closed_book": [per part]}}`, see `exhaustive_stage.ranking_story`.
      setting: for the colours.
    """
    n_parts = len(story["means"])
    x = (np.arange(n_parts) + 0.5) * story["n_sets"] / n_parts
    with styled():
        figure = Figure(figsize=(6.0, 5.0), layout="constrained")
        heights = (2.4, *(1 for _ in FAMILIES))
        top, *ribbons = figure.subplots(
            len(heights), 1, sharex=True, height_ratios=heights
        )
        top.plot(x, story["means"], color=STRONG[setting])
        top.set(ylabel="validation AUROC")
        for axes, (letter, family) in zip(ribbons, FAMILIES.items(), strict=True):
            parts = {
                name.split(":")[1]: np.asarray(mean)
                for name, mean in story["ribbon"].items()
                if name.startswith(f"{letter}:")
            }
            _ribbon(axes, x, parts)
            axes.set(ylim=(0, 3), yticks=(0, 3))
            axes.set_ylabel(family, rotation=0, ha="right", va="center", fontsize=9)
        for axes in (top, *ribbons):
            axes.axvline(
                story["rank"], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3))
            )
        ribbons[-1].set(xlabel="rank of the set", xlim=(0, story["n_sets"]))
        ribbons[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def ranking_pictures(found: Mapping[str, Mapping[str, Any]]) -> list[Picture]:
    """One picture per setting."""
    return [
        picture(
            ranking(story, setting),
            f"ranking-{setting}",
            SETTING_LABELS[setting],
            f"{story['n_sets']:,} sets of three, best to worst. Greedy's "
            f"{' '.join(story['greedy'])} is number {story['rank']:,} (dashed), "
            f"{story['gap']:.4f} AUROC below the best, "
            f"{' '.join(story['best'])}. Ribbons: how many of the three read a family, "
            "with context in orange, closed-book in blue.",
        )
        for setting, story in found.items()
    ]

"""Figures of what a detector costs against how well it tells wrong answers."""

from collections.abc import Callable, Sequence
from typing import Literal

from matplotlib.figure import Figure

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.panorama.costs import measured
from beatrice.benchmarks.results.figures import MUTED, SOFT, STRONG, styled
from beatrice.benchmarks.results.names import SETTING_LABELS
from beatrice.benchmarks.results.pictures import Picture, picture
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import ResultRow, ResultTable

Kind = Literal["plain", "trained", "sampled"]
MARKERS: dict[Kind, tuple[str, str]] = {
    "plain": ("o", "untrained"),
    "trained": ("s", "trained on labels"),
    "sampled": ("^", "reads drawn answers"),
}
_N_NAMED = 5


def kind_of(one: DetectorCost) -> Kind:
    """Return how a detector is drawn; one that samples and is trained samples."""
    if "samples" in one.needs:
        return "sampled"
    return "trained" if one.is_trained else "plain"


def cost_figure(
    points: Sequence[tuple[str, Kind, float, float]],
    setting: str,
    axis: str,
    ours: float | None,
    *,
    is_log: bool,
) -> Figure:
    """Draw AUROC against cost, a point a detector; the best few are named.

    Args:
      points: title, kind, cost and AUROC of each, the best first.
      setting: for the colour.
      axis: what the cost is.
      ours: AUROC of the selected set, a dashed line; None draws none.
      is_log: whether the cost is on a logarithmic axis; then none may be 0.
    """
    with styled():
        figure = Figure(figsize=(6.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for kind, (marker, label) in MARKERS.items():
            own = [(cost, auroc) for _, of, cost, auroc in points if of == kind]
            if own:
                colour = (SOFT if kind == "plain" else STRONG)[setting]
                style = {"color": colour, "markeredgecolor": STRONG[setting]}
                axes.plot(*zip(*own, strict=True), marker, label=label, **style)
        for place, (title, _, cost, auroc) in enumerate(points[:_N_NAMED]):
            # Numbers, not names: the best often cost the same and would overlap.
            text = f"{place + 1}"
            shift = {"xytext": (7, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(text, (cost, auroc), color=MUTED, **shift)
            axes.plot([], [], " ", label=f"{text}  {title}")
        if ours is not None:
            axes.axhline(
                ours,
                color=MUTED,
                linewidth=1.2,
                linestyle=(0, (4, 3)),
                label="BEATRICE",
            )
        axes.set_xscale("log" if is_log else "linear")
        axes.set(xlabel=axis, ylabel="AUROC, all in-domain test questions")
        axes.margins(x=0.12, y=0.12)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


_COSTS: tuple[tuple[str, str, bool, Callable[[DetectorCost], float | None]], ...] = (
    ("seconds", "seconds a question", True, lambda one: one.seconds),
    ("forwards", "forwards more", False, lambda one: one.n_forwards),
    ("tokens", "tokens generated more", False, lambda one: one.n_new_tokens),
)
_CAPTION = (
    "The five best are numbered. Dashed: the selected encoders, whose signals come "
    "from the pass that gave the answer."
)
_TIMED = (
    " Time is measured on this machine, fitting included; what was not timed has no "
    "point."
)


def cost_pictures(
    judged: Sequence[DetectorCost], rows: Sequence[ResultRow]
) -> list[Picture]:
    """Return AUROC against seconds, forwards and tokens, setting by setting.

    A cost that is the same for all detectors of a setting has no figure.
    """
    found = []
    for setting in SETTINGS:
        known = [
            (one, auroc)
            for one, auroc in measured(judged, rows)
            if one.setting == setting and auroc is not None
        ]
        where = {"dataset": IN_DOMAIN, "split": "test", "setting": setting}
        row = ResultTable(rows).find(
            experiment="detection",
            detector="champion",
            metric="auroc",
            seed="mean",
            **where,
        )
        for name, axis, is_log, cost_of in _COSTS:
            points = [
                (one.title, kind_of(one), cost, auroc)
                for one, auroc in known
                if (cost := cost_of(one)) is not None
            ]
            if len({cost for *_, cost, _ in points}) < 2:
                continue
            ours = row and row.value
            figure = cost_figure(points, setting, axis, ours, is_log=is_log)
            title = f"{SETTING_LABELS[setting]}: AUROC against {axis}"
            caption = _CAPTION + _TIMED * is_log
            found.append(picture(figure, f"cost-{name}-{setting}", title, caption))
    return found

"""Result rows laid out as tables, once for the page and once for the terminal.

A table is a structure (columns, lines, cells of measures) in which the best value of
each column and the notes under the table are settled; `terminal.as_text` and the page's
template only spell it out. Ranks go by the printed digits, so two equal numbers rank
equally.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from beatrice.benchmarks.results.names import (
    CONTROLS,
    DETECTORS,
    SETTING_LABELS,
    SPLIT_LABELS,
)
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import DIFFERENCE, MACRO, ResultRow, ResultTable
from beatrice.pgir.controllers import BOUNDS, CONTROLLERS

METRICS = ("auroc", "auprc")  # of a detector, in the order of a cell
Rank = Literal["best", "second"]
Place = tuple[str, str, str]  # setting, dataset, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a cell and its rank in its column."""

    row: ResultRow
    rank: Rank | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before using the number."""
        row = self.row
        undefined = (str(row.reason),) if row.value is None else ()
        plural = "" if row.n_failed == 1 else "s"
        failed = f"{row.n_failed} example{plural} left out: no label or no score"
        return undefined + ((failed,) if row.n_failed else ())

    @property
    def is_clear(self) -> bool:
        """Whether this is a difference whose interval excludes zero."""
        row = self.row
        is_known = row.against is not None and row.ci_low is not None
        return is_known and row.ci_low * row.ci_high > 0


Cell = tuple[Measure | None, ...]  # None: not measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column and its place under a group heading."""

    group: str
    label: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One method and its cells, in the order of the columns."""

    label: str
    cells: tuple[Cell, ...]
    is_ours: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table ready to be spelled out."""

    corner: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def groups(self) -> dict[str, int]:
        """How many columns stand under each group heading; a group is contiguous."""
        return dict(collections.Counter(column.group for column in self.columns))

    @property
    def notes(self) -> tuple[str, ...]:
        """Distinct notes in reading order; a cell refers to them by number."""
        measures = (m for line in self.lines for cell in line.cells for m in cell)
        return tuple(dict.fromkeys(n for m in measures if m for n in m.notes))


def number(value: float, metric: str = "") -> str:
    """Spell a value as the tables do: three decimals, no leading zero.

    A cost has two decimals, a difference its sign.
    """
    if metric == "generations":
        return f"{value:.2f}"
    value = round(value, 3) + 0.0  # no minus before a zero
    spelled = f"{value:+.3f}" if metric.endswith(DIFFERENCE) else f"{value:.3f}"
    return spelled.replace("0.", ".", 1) if abs(value) < 1 else spelled


def interval(row: ResultRow) -> str:
    """Spell a row's interval, empty where there is none."""
    if row.ci_low is None or row.ci_high is None:
        return ""
    link = "–" if row.against is None else " to "
    return link.join(number(end, row.metric) for end in (row.ci_low, row.ci_high))


def _cell(rows: Iterable[ResultRow | None]) -> Cell:
    """Put rows side by side; None was not measured."""
    return tuple(None if row is None else Measure(row=row) for row in rows)


def _printed(measure: Measure | None) -> float | None:
    """Return what a rank goes by; costs, differences, undefined values have none."""
    if measure is None or measure.row.metric in COSTS or measure.row.against:
        return None
    return None if measure.row.value is None else round(measure.row.value, 3)


def _rank_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Mark the best and the second measure of every part of one column."""
    ranked = []
    for part in zip(*cells, strict=True):
        printed = {_printed(m) for m in part} - {None}
        best_first = sorted(printed, reverse=True)
        ranks = dict(zip(best_first, get_args(Rank), strict=False))
        ranked.append(
            [m and dataclasses.replace(m, rank=ranks.get(_printed(m))) for m in part]
        )
    return list(zip(*ranked, strict=True))


def _ranked(table: Table) -> Table:
    """Mark the best and the second of every column, where there is a comparison."""
    if len(table.lines) < 2:
        return table
    columns = zip(*(line.cells for line in table.lines), strict=True)
    ranked = zip(*map(_rank_cells, columns), strict=True)
    lines = (
        dataclasses.replace(line, cells=cells)
        for line, cells in zip(table.lines, ranked, strict=True)
    )
    return dataclasses.replace(table, lines=tuple(lines))


def _ordered(found: Iterable[str], labels: Mapping[str, str]) -> list[str]:
    """Known names in the order of their labels, then the others as they came."""
    names = dict.fromkeys(found)
    return [n for n in labels if n in names] + [n for n in names if n not in labels]


def _detection_rows(
    rows: Sequence[ResultRow],
    experiment: str,
    labels: Mapping[str, str] | None,
    splits: Sequence[str],
    metrics: Sequence[str],
) -> list[ResultRow]:
    """Keep the seed means that a table of detectors shows."""

    def is_wanted(detector: str) -> bool:
        # Single encoders have their figure, controls their own table.
        is_shown = detector not in CONTROLS and not detector.startswith("encoder:")
        return is_shown if labels is None else detector in labels

    found = ResultTable(rows).select(experiment=experiment, seed="mean")
    return [
        row
        for row in found
        if row.split in splits and row.metric in metrics and is_wanted(row.detector)
    ]


def places_of(rows: Iterable[ResultRow], splits: Sequence[str]) -> list[Place]:
    """Where rows were measured: by setting, split, all sets at once, then as they came.

    One in-domain set alone is not shown a second time as all of them.
    """
    settings = list(SETTING_LABELS)
    found = dict.fromkeys((row.setting, row.dataset, row.split) for row in rows)
    n_sets = collections.Counter((at, split) for at, _, split in found)
    return sorted(
        (p for p in found if p[1] != IN_DOMAIN or n_sets[p[0], p[2]] != 2),
        key=lambda p: (settings.index(p[0]), splits.index(p[2]), p[1] != IN_DOMAIN),
    )


def detection_table(
    rows: Sequence[ResultRow],
    *,
    experiment: str = "detection",
    labels: Mapping[str, str] | None = None,
    splits: Sequence[str] = ("test", "ood"),
    metrics: Sequence[str] = METRICS,
    titles: Mapping[str, str] | None = None,
) -> Table:
    """Lay out detectors against the evaluation sets of both settings, AUROC / AUPRC.

    Args:
      rows: result rows; only those of seed "mean" are read.
      experiment: which rows to lay out.
      labels: detectors and their printed names, in order. None is every detector but
        single encoders and the permuted-label control.
      splits: which splits become columns, in this order.
      metrics: in the order of a cell.
      titles: without `labels`, printed names beyond those of `DETECTORS`.
    """
    kept = _detection_rows(rows, experiment, labels, splits, metrics)
    table = ResultTable(kept)
    names = {**DETECTORS, **(titles or {})} if labels is None else labels
    places = places_of(kept, splits)

    def cell(name: str, place: Place) -> Cell:
        at, dataset, split = place
        where = {"setting": at, "dataset": dataset, "split": split}
        return _cell(table.find(detector=name, metric=m, **where) for m in metrics)

    columns = tuple(
        Column(
            group=SETTING_LABELS[at],
            label=dataset,
            detail=SPLIT_LABELS[split],
        )
        for at, dataset, split in places
    )
    found = _ordered((row.detector for row in kept), names)
    cells = [tuple(cell(name, place) for place in places) for name in found]
    lines = tuple(
        Line(label=names.get(n, n), cells=c, is_ours=n == "champion")
        for n, c in zip(found, cells, strict=True)
    )
    return _ranked(Table(corner="Detector", columns=columns, lines=lines))


# What a controller spends on a question, as its rows name it, and the unit.
COSTS = {
    "generations": "per question",
    "sequences": "texts written",
    "tokens": "read, written",
    "retrievals": "per question",
    "forwards": "over text",
    "seconds": "this machine",
}


def controller_table(rows: Sequence[ResultRow]) -> Table:
    """Lay out controllers against datasets, EM / F1, with macro means and cost.

    What bounds them stands below, and takes no rank away.
    """
    table = controller_rows(rows)
    macro = ResultTable(ResultTable(rows).select(experiment="controller_macro"))
    places = {r.dataset: r.split for r in table.rows}
    datasets = sorted(places, key=lambda name: ("test", "ood").index(places[name]))

    def mean(name: str, metric: str) -> ResultRow | None:
        found = macro.find(detector=name, metric=metric)
        return found or macro_row(table, name, metric, datasets)

    measured = {row.metric for row in (*table.rows, *macro.rows)}
    costs = [cost for cost in COSTS if cost == "generations" or cost in measured]

    def cells(name: str) -> tuple[Cell, ...]:
        found = [
            [table.find(detector=name, dataset=d, metric=m) for m in ("em", "f1")]
            for d in datasets
        ]
        means = [mean(name, "em"), mean(name, "f1")]
        spent = [[mean(name, cost)] for cost in costs]
        return tuple(map(_cell, [*found, means, *spent]))

    labels = {**CONTROLLERS, **BOUNDS}
    names = _ordered((row.detector for row in table.rows), labels)
    lines = {
        n: Line(label=labels.get(n, n), cells=cells(n), is_ours=n == "pgir")
        for n in names
    }
    heads = [(name, SPLIT_LABELS[places[name]]) for name in datasets]
    columns = [
        Column(group="Exact match / F1", label=label, detail=detail)
        for label, detail in [*heads, ("macro", "mean")]
    ]
    columns += [Column(group="Cost", label=n, detail=COSTS[n]) for n in costs]
    rivals = tuple(line for name, line in lines.items() if name not in BOUNDS)
    bounds = tuple(line for name, line in lines.items() if name in BOUNDS)
    ranked = _ranked(Table(corner="Controller", columns=tuple(columns), lines=rivals))
    return dataclasses.replace(ranked, lines=ranked.lines + bounds)


# The seven variants of the paper's table, in its order.
FEATURES = {
    "hidden_only": "Hidden states only",
    "without_hidden": "Without hidden states",
    "early_fusion": "Early fusion: one encoder, all families",
    "late_fusion_singles": "Late fusion: single families",
    "late_fusion_all": "Late fusion: all encoders (not ranked)",
    "without_closed_book": "Without closed-book encoders",
    "champion": "Full: the selected encoders",
}
REFERENCE = "late_fusion_all"  # a saturation reference, which the paper does not rank
FAMILY_VARIANTS = {
    "without_hidden": "Without hidden states",
    "without_prob": "Without probabilities",
    "without_resid": "Without residual stream",
    "without_attn": "Without attention",
    "champion": "Full: all four families",
}
_SPANS = ("context", "question", "answer")
SPAN_VARIANTS = {
    "champion": "None: all spans",
    **{f"zeroed_{x}_span": f"{x.capitalize()}, zeroed in training" for x in _SPANS},
    **{f"without_{x}_span": f"{x.capitalize()}, left out of both" for x in _SPANS},
}
# A head reads the answer span's vector: what the encoders say without one.
for _name, _label in list(SPAN_VARIANTS.items()):
    SPAN_VARIANTS[f"{_name}_encoders"] = f"{_label} · no head"
RANKED = {
    "best_three": "Best of all sets of three",
    "greedy_three": "Greedy search after three rounds",
}


def _table(rows: Sequence[ResultRow], names: Mapping[str, str], corner: str) -> Table:
    """Lay some detectors and variants out under one experiment, as the main table does.

    Nothing, where none was made on request: `evaluate` alone makes no ablation.
    """
    together = [
        msgspec.structs.replace(row, experiment="ablation")
        for row in rows
        if row.experiment in ("detection", "ablation") and row.detector in names
    ]
    shown = together if any(row.experiment == "ablation" for row in rows) else []
    found = detection_table(shown, experiment="ablation", labels=names)
    return dataclasses.replace(found, corner=corner)


def feature_table(rows: Sequence[ResultRow]) -> Table:
    """The paper's table of features and fusion, seven variants in both settings."""
    ranked = {name: label for name, label in FEATURES.items() if name != REFERENCE}
    whole, table = (_table(rows, names, "Variant") for names in (FEATURES, ranked))
    lines = {line.label: line for line in table.lines}
    for line in whole.lines:  # the reference has no rank, and takes none away
        if line.label not in lines:
            plain = [_cell(m and m.row for m in cell) for cell in line.cells]
            lines[line.label] = dataclasses.replace(line, cells=tuple(plain))
    return dataclasses.replace(whole, lines=tuple(lines[x.label] for x in whole.lines))


def family_table(rows: Sequence[ResultRow]) -> Table:
    """The search without the encoders that read a family, for each family."""
    return _table(rows, FAMILY_VARIANTS, "Pool")


def span_table(rows: Sequence[ResultRow]) -> Table:
    """The champion trained anew without a token span, for each span."""
    return _table(rows, SPAN_VARIANTS, "Dropped span")


def exhaustive_table(rows: Sequence[ResultRow]) -> Table:
    """The best set of the enumeration and greedy's, where they were evaluated."""
    splits = ("validation", "test", "ood")
    found = detection_table(rows, experiment="exhaustive", labels=RANKED, splits=splits)
    return dataclasses.replace(found, corner="Set")


def set_names(
    selection: Mapping[str, Mapping[str, Any]],
    ablations: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[tuple[str, list[str]]]:
    """Spell which encoders each variant reads: its label, and a text per setting."""
    if not ablations:
        return []
    labels = {"without_closed_book": "Without closed-book encoders", **FAMILY_VARIANTS}

    def spelled(name: str, setting: str) -> str:
        if name == "champion":
            return " ".join(selection[setting]["selected"])
        if name not in ablations[setting]:
            return "–"  # there is nothing of the kind to take away
        return " ".join(ablations[setting][name]) or "none: no better than chance"

    return [
        (label, [spelled(name, setting) for setting in ablations])
        for name, label in labels.items()
        if name == "champion" or any(name in found for found in ablations.values())
    ]


def controller_rows(rows: Sequence[ResultRow]) -> ResultTable:
    """Keep the evaluation rows of the retrieval controllers."""
    controllers = ResultTable(rows).select(experiment="controller", seed="mean")
    return ResultTable([row for row in controllers if row.split in ("test", "ood")])


def macro_row(
    table: ResultTable, detector: str, metric: str, datasets: Sequence[str]
) -> ResultRow | None:
    """Return the unweighted mean over datasets as a row without an interval.

    Returns:
      None if a dataset was not measured; a row without value, with its reason, if one
      is undefined.
    """
    rows = [table.find(detector=detector, metric=metric, dataset=d) for d in datasets]
    if not rows or None in rows:
        return None
    undefined = [row.dataset for row in rows if row.value is None]
    return msgspec.structs.replace(
        rows[0],
        dataset=MACRO,
        value=None if undefined else sum(row.value for row in rows) / len(rows),
        ci_low=None,
        ci_high=None,
        n=sum(row.n for row in rows),
        n_failed=sum(row.n_failed for row in rows),
        reason=f"undefined on {', '.join(undefined)}" if undefined else None,
    )

"""Result rows as tables: one pivot, for page, terminal, Markdown and LaTeX.

`results_of` puts rows into a data frame with a typed column for each field (see
docs/results/schema.md). A table has columns, and lines of cells; a cell holds measures.
Measures are ranked by their printed digits, and may have notes.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas

from beatrice.benchmarks.baselines.detector import is_rival
from beatrice.benchmarks.results import names
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import MACRO, ResultRow, Subject, as_frame, encoder
from beatrice.jaxprobe.scope import PRECISIONS, Thresholds
from beatrice.pgir.controllers import BOUNDS, titles_of

METRICS = ("auroc", "auprc")  # of a detector, in the order in which a cell shows them
EVALUATED = ("test", "ood")  # splits that no choice was made on
POOLED = {"dataset": IN_DOMAIN, "split": "test"}  # all in-domain test questions
_RANKED = (*METRICS, "em", "f1")  # metrics whose best values are marked
CHANGES = ("auroc_gap", "moved_more_by_top_heads")  # metrics that are differences
# The key of a line that is marked as ours has one of these.
_OURS = (names.CHAMPION._asdict(), {"detector": "pgir"})
_COUNTS = ("best_sets", "labels", "n_sets", "rank")
Rank = Literal["best", "second"]
Titles = Mapping[Subject, str]
Key = Mapping[str, Any]  # values of columns of the data frame


class Place(NamedTuple):
    """Where rows were measured: setting, question set and split."""

    setting: str
    dataset: str
    split: str

    @property
    def title(self) -> str:
        """The set in words, as "all in-domain" or "popqa, held out"."""
        if self.dataset == IN_DOMAIN:
            return self.dataset
        return f"{self.dataset}, {names.SPLIT_LABELS[self.split]}"


class Measure(NamedTuple):
    """One number of a cell and its rank in its column."""

    row: ResultRow
    rank: Rank | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the number is undefined, and how many examples it leaves out."""
        row = self.row
        undefined = (str(row.reason),) if row.value is None else ()
        plural = "" if row.n_failed == 1 else "s"
        failed = f"{row.n_failed} example{plural} left out: no label or no score"
        return undefined + ((failed,) if row.n_failed else ())

    @property
    def is_clear(self) -> bool:
        """Whether this is a difference and its interval excludes zero."""
        return is_change(self.row) and excludes_zero(self.row)


Cell = tuple[Measure | None, ...]  # None: not measured


class Column(NamedTuple):
    """A column and its place under a group heading."""

    group: str
    label: str
    detail: str = ""

    @property
    def title(self) -> str:
        """Label and detail in one line, to print below the group's heading."""
        return ", ".join(filter(None, (self.label, self.detail)))


class Line(NamedTuple):
    """One method and its cells, in the order of the columns."""

    label: str
    cells: tuple[Cell, ...]
    is_ours: bool = False


class Table(NamedTuple):
    """A table ready to be formatted."""

    corner: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def groups(self) -> dict[str, int]:
        """The number of columns under each group heading; groups are contiguous."""
        return dict(collections.Counter(column.group for column in self.columns))

    @property
    def measures(self) -> list[Measure]:
        """All measures, in reading order."""
        return [m for line in self.lines for cell in line.cells for m in cell if m]

    @property
    def notes(self) -> tuple[str, ...]:
        """Distinct notes in reading order; a cell refers to them by number."""
        return tuple(dict.fromkeys(note for m in self.measures for note in m.notes))


def number(value: float, metric: str = "", *, is_signed: bool = False) -> str:
    """Format a value: three decimals (a cost two, a count none), no leading zero."""
    if metric in names.COSTS:
        # Below a tenth, two significant digits: milliseconds must not become 0.00.
        first = -math.floor(math.log10(abs(value))) if 0 < abs(value) < 0.1 else 1
        return f"{value:,.{first + 1}f}"
    if metric in _COUNTS:
        return f"{value:,.0f}"
    # A change keeps its sign if it rounds to zero: an end at -.0003 is below zero.
    text = f"{value + 0.0:+.3f}" if is_signed else f"{round(value, 3) + 0.0:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def is_change(row: ResultRow) -> bool:
    """Whether a row is a difference, which is printed with a sign."""
    return row.against is not None or row.metric in CHANGES


def row_value(row: ResultRow) -> str:
    """Format a row's value, a difference with its sign; n/a if it is undefined."""
    if row.value is None:
        return "n/a"
    return number(row.value, row.metric, is_signed=is_change(row))


def interval(row: ResultRow) -> str:
    """Format a row's interval; empty if there is none."""
    if row.ci_low is None or row.ci_high is None:
        return ""
    is_signed = is_change(row)
    ends = (
        number(x, row.metric, is_signed=is_signed) for x in (row.ci_low, row.ci_high)
    )
    return (" to " if is_signed else "–").join(ends)


def p_text(p_value: float | None) -> str:
    """Format a p-value; a dash if there is none."""
    return "–" if p_value is None else f"{p_value:.2g}".replace("0.", ".")


def excludes_zero(row: ResultRow) -> bool:
    """Whether a row has an interval that excludes zero."""
    return row.ci_low is not None and row.ci_low * (row.ci_high or 0.0) > 0


def results_of(rows: Iterable[ResultRow]) -> pandas.DataFrame:
    """Return rows as a data frame of typed columns, plus a column `row` of the rows."""
    rows = list(rows)
    return as_frame(rows).assign(row=pandas.Series(rows, dtype=object))


def where(results: pandas.DataFrame, **columns: Any) -> pandas.DataFrame:
    """Select rows by column values: a value, None for absent, or a tuple of values."""
    is_in = np.ones(len(results), bool)
    for name, value in columns.items():
        column, values = results[name], value if isinstance(value, tuple) else (value,)
        matches = column.isna() if value is None else column.isin(values)
        is_in &= matches.to_numpy(bool)
    return results.loc[is_in]


def find(results: pandas.DataFrame, **columns: Any) -> ResultRow | None:
    """Return the only row with these values, or None if there is none."""
    return _only(where(results, **columns)["row"].tolist(), columns)


def _only(rows: Sequence[ResultRow], columns: Key) -> ResultRow | None:
    if len(rows) > 1:
        raise ValueError(
            f"expected one row for {columns}, found {len(rows)}; the first two are "
            f"({rows[0].where}) and ({rows[1].where})"
        )
    return rows[0] if rows else None


def by_subject(results: pandas.DataFrame, **columns: Any) -> dict[Subject, ResultRow]:
    """Return the seed-mean rows with these column values, by detector."""
    return {row.subject: row for row in where(results, seed="mean", **columns)["row"]}


def by_pair(
    results: pandas.DataFrame, **columns: Any
) -> dict[tuple[Subject, Subject | None], ResultRow]:
    """Return the paired differences with these column values, by detector and rival."""
    rows = where(results, seed="mean", **columns)["row"]
    return {(row.subject, row.rival): row for row in rows}


def in_domain_or_held_out(results: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows of the pooled in-domain questions and of the held-out sets."""
    is_held_out = results["split"] == "ood"
    return results.loc[is_held_out | (results["dataset"] == IN_DOMAIN)]


def subjects_in(results: pandas.DataFrame) -> list[Subject]:
    """Return the distinct detectors of rows, in order of appearance."""
    return list(dict.fromkeys(row.subject for row in results["row"]))


def places_of(results: pandas.DataFrame, splits: Sequence[str]) -> list[Place]:
    """Return where rows were measured, by setting and split, pooled sets first.

    With a single in-domain set, the pool is left out, since it would repeat that set.
    """
    some = where(results, split=tuple(splits))[list(Place._fields)].drop_duplicates()
    places = [Place(*x) for x in some.itertuples(index=False, name=None)]
    n_sets = collections.Counter((p.setting, p.split) for p in places)
    several = [
        p for p in places if p.dataset != IN_DOMAIN or n_sets[p.setting, p.split] != 2
    ]
    settings = list(names.SETTING_LABELS)

    def order(p: Place) -> tuple[int, int, bool]:
        is_single_set = p.dataset != IN_DOMAIN
        return settings.index(p.setting), splits.index(p.split), is_single_set

    return sorted(several, key=order)


def of_rival(subject: Subject) -> Key:
    """Return the column values that select differences to a rival."""
    return {"against": subject.detector, "against_families": subject.families}


def place_columns(places: Iterable[Place]) -> list[tuple[Column, Key]]:
    """Return a column for each place, grouped by setting."""
    labels, splits = names.SETTING_LABELS, names.SPLIT_LABELS
    return [
        (Column(labels[p.setting], p.dataset, splits[p.split]), p._asdict())
        for p in places
    ]


def pivot(
    results: pandas.DataFrame,
    corner: str,
    lines: Sequence[tuple[str, Key]],
    columns: Sequence[tuple[Column, Key | Sequence[Key]]],
    unranked: Sequence[str] = (),
) -> Table:
    """Lay rows out as a table; the keys of a line and a column select a cell's rows.

    If both keys name the same field, the column's value is used. A field named by any
    key must be absent from the rows of keys that do not name it; a field that no key
    names may have any value.

    Args:
      results: see `results_of`.
      corner: what the lines are; the heading of the first column.
      lines: labels and keys of the lines; a line without a row is left out.
      columns: likewise; cells of a column with several keys have that many measures.
      unranked: labels of lines that are left out of the ranking.
    """
    ours = {name for name, key in lines if any(key.items() >= x.items() for x in _OURS)}
    parts = [[keys] if isinstance(keys, Mapping) else keys for _, keys in columns]
    cells = [key for keys in parts for key in keys]
    keys = (*(key for _, key in lines), *cells)
    named = sorted({name for key in keys for name in key})
    rows: dict[tuple, list[ResultRow]] = collections.defaultdict(list)
    for row in results["row"]:
        rows[tuple(getattr(row, name) for name in named)].append(row)

    def row_at(line: Key, cell: Key) -> ResultRow | None:
        key = {**line, **cell}
        return _only(rows[tuple(map(key.get, named))], key)

    laid = [(label, [row_at(line, cell) for cell in cells]) for label, line in lines]
    laid = [(label, measured) for label, measured in laid if any(measured)]
    compared = [measured for label, measured in laid if label not in unranked]
    ranks = [_ranks([x[i] for x in compared]) for i in range(len(cells))]
    ranked_lines = []
    for label, measured in laid:
        is_ranked = label not in unranked and len(compared) > 1
        measures = (
            row and Measure(row, rank.get(_printed(row)) if is_ranked else None)
            for row, rank in zip(measured, ranks, strict=True)
        )
        by_cell = tuple(tuple(itertools.islice(measures, len(x))) for x in parts)
        ranked_lines.append(Line(label, by_cell, is_ours=label in ours))
    return Table(corner, tuple(column for column, _ in columns), tuple(ranked_lines))


def _printed(row: ResultRow) -> float | None:
    """Return the value to rank by: the printed digits; None for unranked metrics."""
    if row.metric not in _RANKED or is_change(row) or row.value is None:
        return None
    return round(row.value, 3)


def _ranks(column: Iterable[ResultRow | None]) -> dict[float | None, Rank]:
    """Return the ranks of one metric of a column, by printed digits."""
    values = (_printed(row) for row in column if row)
    printed = {value for value in values if value is not None}
    return dict(zip(sorted(printed, reverse=True), get_args(Rank), strict=False))


def by_place(
    results: pandas.DataFrame,
    corner: str,
    lines: Sequence[tuple[str, Key]],
    splits: Sequence[str] = EVALUATED,
    parts: Sequence[Key] = ({},),
    unranked: Sequence[str] = (),
    **selected: Any,
) -> Table:
    """Lay rows out with a column for each place; `selected` is as for `where`.

    The cells of a column have a measure for each of `parts`; see also `pivot`.
    """
    results = where(results, **selected)
    columns = [
        (column, [{**key, **part} for part in parts])
        for column, key in place_columns(places_of(results, splits))
    ]
    return pivot(results, corner, lines, columns, unranked)


def title_of(subject: Subject, titles: Titles | None) -> str:
    """Return a detector's printed name, from `titles` or our own; else its id."""
    known = {**names.DETECTORS, **names.COMPARED, **(titles or {})}
    return known.get(subject, subject.detector)


def lines_of(titles: Titles) -> list[tuple[str, Key]]:
    """Return label and key of a line for each detector."""
    return [(title, x._asdict()) for x, title in titles.items()]


def detection_table(
    results: pandas.DataFrame,
    *,
    experiment: str | tuple[str, ...] = "detection",
    labels: Titles | None = None,
    splits: Sequence[str] = EVALUATED,
    metrics: Sequence[str] = METRICS,
    titles: Titles | None = None,
    corner: str = "Detector",
    unranked: Sequence[str] = (),
) -> Table:
    """Return a table of detectors by evaluation set, AUROC / AUPRC by default.

    `labels` are the detectors to show, in order, with their printed names. Without it,
    all are shown but single encoders and the permuted-label control, and `titles` adds
    printed names to those of `DETECTORS`. See `pivot` for the other arguments.
    """
    shown = where(results, experiment=experiment, seed="mean", against=None)
    shown = where(shown, split=tuple(splits), metric=tuple(metrics))
    if labels is None:
        # Single encoders are in a figure, controls in a table of their own.
        labels = {**names.DETECTORS, **(titles or {})}
        for x in subjects_in(shown):
            if x.detector != "encoder" and x not in names.CONTROLS:
                labels.setdefault(x, x.detector)
    is_shown = np.array([row.subject in labels for row in shown["row"]], bool)
    parts, lines = [{"metric": metric} for metric in metrics], lines_of(labels)
    return by_place(shown.loc[is_shown], corner, lines, splits, parts, unranked)


def paired_table(results: pandas.DataFrame, experiment: str = "paired") -> Table:
    """Return a table of paired differences: a line for each rival, a column per set.

    The experiments "paired" and "at_equal_length_paired" have differences of AUROC,
    "controller_paired" and "controller_query_paired" of exact match and F1.
    """
    is_control = experiment.startswith("controller")
    metrics, rivals = ("em", "f1") if is_control else ("auroc",), names.COMPARED
    shown = where(results, experiment=experiment, metric=metrics)
    if is_control:
        titles = titles_of(shown["against"].unique())
        rivals = {Subject(name): title for name, title in titles.items()}
    lines = [(title, of_rival(x)) for x, title in rivals.items()]
    parts = [{"metric": metric} for metric in metrics]
    return by_place(shown, "Against", lines, (*EVALUATED, "evaluated"), parts)


def floor_table(results: pandas.DataFrame) -> Table:
    """Return a table of each encoder's lead over a linear probe on the same signals."""
    titles = {**names.COMPARED, encoder("H"): names.DETECTORS[names.HIDDEN_ONLY]}
    lines = lines_of({x: titles[x] for x in names.FLOORS})
    at: Key = {"experiment": "floor_paired", "metric": "auroc"}
    return by_place(results, "Detector", lines, **at)


def equal_length_table(results: pandas.DataFrame) -> Table:
    """Return a table of AUROC at equal answer length, and of the unmatched share."""
    lines = [
        (x, {**key, "metric": "auroc"}) for x, key in lines_of(names.AT_EQUAL_LENGTH)
    ]
    share = {"detector": "answers", "metric": "unmatched"}
    lines.append(("Share of answers without a counterpart", share))
    at: Key = {"experiment": "at_equal_length", "seed": "mean"}
    return by_place(results, "Detector", lines, **at)


def noise_table(results: pandas.DataFrame) -> Table:
    """Return a table of the share of labels that a person disputes."""
    lines = [(f"Labelled {kind}", {"kind": kind}) for kind in ("right", "wrong")]
    at = ("annotated",)
    return by_place(results, "Labels", lines, at, experiment="label_noise")


def annotated_table(results: pandas.DataFrame) -> Table:
    """Return a table of AUROC by labels, by undisputed labels and by a person."""
    shown = where(results, experiment="annotated")
    columns = [
        (column._replace(label=kind, detail=column.label), {**key, "kind": kind})
        for column, key in place_columns(places_of(shown, ("annotated",)))
        for kind in ("labels", "undisputed labels", "a person")
    ]
    return pivot(shown, "Detector", lines_of(names.AT_EQUAL_LENGTH), columns)


def answer_table(results: pandas.DataFrame) -> Table:
    """Return a table of the shares of answers that are cut off, empty, or hedges."""
    splits = ("train", "validation", *EVALUATED)
    titles = {"cut_off": "Cut off", "empty": "Empty", "hedged": "Hedges"}
    lines = [
        (title, {"detector": "backbone", "metric": metric})
        for metric, title in titles.items()
    ]
    return by_place(results, "Share of answers", lines, splits, experiment="answers")


def decision_table(results: pandas.DataFrame) -> Table:
    """Return a table of the precision and coverage of trust and distrust decisions."""
    lines = [
        (f"{kind.capitalize()} at {wanted:g}", {"kind": kind, "wanted": wanted})
        for kind, wanted in itertools.product(Thresholds._fields, PRECISIONS)
    ]
    corner = "Precision / coverage"
    parts = [{"metric": metric} for metric in ("precision", "coverage")]
    return by_place(results, corner, lines, parts=parts, experiment="decision")


def optimism_table(results: pandas.DataFrame) -> Table:
    """Return a table of the optimism of validation AUROC."""
    lines = [
        ("The search's set", {"detector": "champion"}),
        ("One encoder, fixed in advance", {"detector": "early_fusion"}),
    ]
    corner = "AUROC, seen minus unseen half"
    return by_place(results, corner, lines, experiment="optimism")


def controller_table(results: pandas.DataFrame) -> Table:
    """Return a table of controllers by dataset: EM / F1, macro means and costs."""
    splits = (*EVALUATED, "evaluated")
    controllers = ("controller", "controller_macro")
    shown = where(results, experiment=controllers, seed="mean", split=splits)
    columns: list[tuple[Column, Sequence[Key]]] = []
    for p in places_of(shown, splits):
        at = {"dataset": p.dataset, "split": p.split}
        column = Column("Exact match / F1", p.dataset, names.SPLIT_LABELS[p.split])
        columns.append((column, [{**at, "metric": x} for x in ("em", "f1")]))
    metrics = shown["metric"].unique()
    for cost in (x for x in names.COSTS if x in metrics):
        key = {"dataset": MACRO, "split": "evaluated", "metric": cost}
        columns.append((Column("Cost", cost, names.COSTS[cost]), [key]))
    titles = titles_of(shown["detector"].unique()) | BOUNDS
    lines = [(label, {"detector": name}) for name, label in titles.items()]
    return pivot(shown, "Controller", lines, columns, tuple(BOUNDS.values()))


def ablation_table(results: pandas.DataFrame, labels: Titles, corner: str) -> Table:
    """Return a table of ablation variants; empty if no ablation was run.

    `labels` are the `FEATURES` of the paper's table of features and fusion, the
    `FAMILY_VARIANTS` (the search without encoders that read a family) or the
    `SPAN_VARIANTS` (the champion retrained without a token span).
    """
    if where(results, experiment="ablation").empty:
        results = results.iloc[:0]
    both, unranked = ("detection", "ablation"), (names.FEATURES[names.REFERENCE],)
    return detection_table(
        results, experiment=both, labels=labels, corner=corner, unranked=unranked
    )


def validated_table(
    results: pandas.DataFrame, experiment: str, labels: Titles, corner: str
) -> Table:
    """Return a table of detectors on validation and on the evaluation sets."""
    splits, shown = ("validation", *EVALUATED), {"labels": labels, "corner": corner}
    return detection_table(results, experiment=experiment, splits=splits, **shown)


# Titles of the variants of `beatrice evaluate --ablations`, in the order of the table.
_ABLATIONS = {"without_closed_book": names.FEATURES[Subject("without_closed_book")]}
_ABLATIONS |= zip(
    ("without_hidden", "without_prob", "without_resid", "without_attn", "champion"),
    names.FAMILY_VARIANTS.values(),
    strict=True,
)


def set_names(
    selection: Mapping[str, Mapping[str, Any]],
    ablations: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[tuple[str, ...]]:
    """Return each variant's label, and per setting the names of its encoders."""

    def text(name: str, setting: str) -> str:
        if name == "champion":
            return " ".join(selection[setting]["selected"])
        if name not in ablations[setting]:
            return "–"  # this setting has no such variant
        return " ".join(ablations[setting][name]) or "none: no better than chance"

    return [
        (label, *(text(name, setting) for setting in ablations))
        for name, label in _ABLATIONS.items()
        if name == "champion"
        or any(name in variants for variants in ablations.values())
    ]


# The paper's large tables: the selected set and all rivals, best first.

CHANCE = "Random AUPRC (error rate)"
_GUESSING = Subject("majority")


def panorama_table(
    results: pandas.DataFrame, setting: str | None = None, titles: Titles | None = None
) -> Table:
    """Return a table of the selected set and all rivals, by AUROC in the first column.

    With a setting, it has every set of that setting (the paper's tab:appendix-detection
    and tab:appendix-detection-ctx); without, the sets of both settings, with the
    in-domain sets pooled (tab:main-detection).
    """
    shown = where(results, experiment="detection", metric=METRICS)
    if setting is None:
        shown = in_domain_or_held_out(shown)
    else:
        shown = where(shown, setting=setting)
    return _panorama(shown, place_columns(places_of(shown, EVALUATED)), titles, 0)


def _panorama(
    shown: pandas.DataFrame,
    columns: Sequence[tuple[Column, Key]],
    titles: Titles | None,
    sorted_by: int,
) -> Table:
    """Return a table of the selected set, then its rivals by AUROC in a column.

    Our own encoders and fusions are not rivals; they have tables of their own. The
    first line is the AUPRC of guessing, that is, of a constant score.
    """
    shown = where(shown, seed="mean", split=EVALUATED)
    labels = {
        x: title_of(x, titles)
        for x in subjects_in(shown)
        if x == names.CHAMPION or is_rival(x.detector)
    }

    def laid(titles: Titles, *metrics: str | None) -> Table:
        parts = [
            (column, [{**key, "metric": metric} for metric in metrics])
            for column, key in columns
        ]
        return pivot(shown, "Detector", lines_of(titles), parts)

    def order(line: Line) -> tuple[bool, float]:
        measure = line.cells[sorted_by][0]
        value = None if measure is None else measure.row.value
        return not line.is_ours, 1.0 if value is None else -value

    table, chance = laid(labels, *METRICS), laid({_GUESSING: CHANCE}, None, "auprc")
    lines = sorted(table.lines, key=order)
    return table._replace(lines=(*chance.lines, *lines) if lines else ())


def retrieved_table(results: pandas.DataFrame, titles: Titles | None) -> Table:
    """Return a table of `transfer` with context, sorted by the column of all sets.

    It corresponds to the paper's tab:realrag-detection.
    """
    at = {"experiment": names.RETRIEVED, "setting": "with_context", "metric": METRICS}
    shown = where(results, **at)
    shown = shown.loc[shown["dataset"] != IN_DOMAIN]
    places = places_of(shown, EVALUATED)
    places.sort(key=lambda p: p.dataset == names.ALL_SETS)
    columns = [
        (column._replace(label="all sets", detail=""), key)
        if key["dataset"] == names.ALL_SETS
        else (column, key)
        for column, key in place_columns(places)
    ]
    return _panorama(shown, columns, titles, -1)


def main_detectors(results: pandas.DataFrame, titles: Titles) -> Table:
    """Return a table of the selected set, simple rivals and the best two published."""
    full = panorama_table(results, None, titles)
    ours = {*names.DETECTORS, Subject("linear_probe")}
    published = {title for x, title in titles.items() if x not in ours}
    rivals = [line.label for line in full.lines if line.label in published][:2]
    labels = {x: names.DETECTORS[x] for x in names.MAIN}
    labels |= {x: title for x, title in titles.items() if title in rivals}
    shown = in_domain_or_held_out(where(results, experiment="detection"))
    return detection_table(shown, labels=labels, metrics=("auroc",))


Named = dict[str, tuple[str, Table]]  # heading and table, by name in `report --print`


def panoramas(results: pandas.DataFrame, titles: Titles | None = None) -> Named:
    """Return the paper's tables of detectors, without empty ones."""
    titled = {None: "Detecting wrong answers"}
    titled |= {x: f"{names.SETTING_LABELS[x]}, every set" for x in SETTINGS}
    named = {
        (setting or "detectors").replace("_", "-"): (
            f"{heading}: AUROC / AUPRC",
            panorama_table(results, setting, titles),
        )
        for setting, heading in titled.items()
    }
    retrieved = retrieved_table(results, titles)
    named["retrieved"] = ("With retrieved passages: AUROC / AUPRC", retrieved)
    return {name: pair for name, pair in named.items() if pair[1].lines}


def named_tables(results: pandas.DataFrame, titles: Titles | None = None) -> Named:
    """Return every table that can be printed, without empty ones."""
    features = ablation_table(results, names.FEATURES, "Variant")
    gains = paired_table(results, "controller_paired")
    others = {
        "ablations": ("Ablations: AUROC / AUPRC", features),
        "decisions": ("Decisions", decision_table(results)),
        "gains": ("Gain of the selected encoders in AUROC", paired_table(results)),
        "controllers": ("Retrieval controllers", controller_table(results)),
        "controller-gains": ("Gain of PGIR in exact match / F1", gains),
    }
    printable = {name: pair for name, pair in others.items() if pair[1].lines}
    return panoramas(results, titles) | printable


def counts_of(table: Table) -> list[str]:
    """Return per column how many of our line's answers are measured and left out."""
    lines = [line for line in table.lines if line.is_ours] or list(table.lines)
    columns = zip(*(line.cells for line in lines), strict=True)
    rows = [[m.row for cell in column for m in cell if m] for column in columns]
    return [
        f"{max((r.n for r in column), default=0):,} "
        f"({max((r.n_failed for r in column), default=0):,})"
        for column in rows
    ]

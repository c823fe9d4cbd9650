"""The paper's numbers compared with a run's: the join, the signs and the ledger.

`paper.jsonl` has the numbers of the paper's seventeen tables as printed (percentages
stay percentages), in the order of print; the numbers of a cell that share a mark are on
one line. Next come, by figure or section, the numbers of the anatomy that are only in
the text or a caption, and orders that the text states without a number. Definitions
(fifteen encoders, one half) and repetitions of a table have no line.

A number has a counterpart in a run if its line names a setting, a set, a split and a
detector of ours. Otherwise its line says why, unless it is not a result (counts,
sizes). A run may be trained on a set that the paper held out: the numbers are compared
anyway, and a note says so.

A number of the paper has a sign if it is a difference or a correlation, or if the paper
compares it with another number of its table. Ours has a sign if a 95 % interval
excludes zero, or excludes the bound if the paper says "at most". The interval is that
of the paired difference if the run has one; else the difference is bounded by the two
numbers' own intervals. These are of the same answers, so the bounds are wider than a
paired interval would be.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pandas

from beatrice.benchmarks.results.names import (
    ALL_SETS,
    EVERY_FAMILY,
    RETRIEVED,
    SPLIT_LABELS,
)
from beatrice.benchmarks.results.rendering import markdown
from beatrice.benchmarks.results.tables import (
    CHANGES,
    EVALUATED,
    in_domain_or_held_out,
    number,
    p_text,
    results_of,
    where,
)
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import (
    ACROSS_SETS,
    IN_DOMAIN,
    SETTINGS,
    Example,
    Label,
    Record,
)
from beatrice.extract.run.rows import ResultRow

Mark = Literal["bold", "underlined", "dagger"]
Order = Literal["above", "below", "not above"]
# The first with a number is used: an ablation repeats some rows of the main table.
_EXPERIMENTS = ("detection", "ablation", "paired", "controller", "controller_macro")
OF_AN_INTERVAL = ("ci_low", "ci_high", "p_value")
_ELSEWHERE = {"test": "ood", "ood": "test"}
_IN_HUNDREDTHS = ("share_percent", "points")


class PaperCell(Record, frozen=True, kw_only=True):
    """One number of the paper.

    The fields from `setting` to `against_families` are those of our row; without a
    setting, a dataset, a split and a detector the number has no counterpart.
    """

    # The table's label without `tab:`; for a number in the text, that of its figure or
    # section.
    table: str
    backbone: str
    row: str  # its label as printed
    column: str  # its label as printed, with the headings above it
    metric: str  # "auroc", "ci_low", "accuracy_percent", "n", ...
    # As printed, so 50 % is 50. None if the paper states an order without a number.
    value: float | None = None
    mark: Mark | None = None  # a dagger means that the 95 % interval excludes zero
    below: bool = False  # whether the paper says "less than" or "at most" the value
    setting: str | None = None
    dataset: str | None = None
    split: str | None = None  # as the paper uses the set
    detector: str | None = None  # "backbone" for accuracies and numbers of answers
    families: str | None = None
    family: str | None = None
    span: str | None = None
    kind: str | None = None
    n_closed_book: int | None = None
    against: str | None = None
    against_families: str | None = None
    variant: str | None = None  # wording of the passages; None pools both
    experiment: str | None = None  # of our row, unless it is one of detection
    ours: str | None = None  # metric of our row, if it has another name
    # Families of our encoder if the run lacks `families`: the paper analyses the
    # encoders that its search selected, and our search may have selected others.
    instead: str | None = None
    # The row, in the same table, column and metric, that the paper compares this with.
    # None for fusing all encoders, from which the paper claims no difference.
    than: str | None = None
    # The order that the paper states without a number; to zero if there is no `than`.
    sign: Order | None = None
    departs: str | None = None  # how our row's measurement differs from the paper's
    reason: str | None = None  # why there is no counterpart

    @property
    def has_counterpart(self) -> bool:
        """Whether the line names a row of ours."""
        return None not in (self.setting, self.dataset, self.split, self.detector)


class PaperPair(NamedTuple):
    """A number of the paper and the run's row for it."""

    paper: PaperCell
    row: ResultRow

    @property
    def numbers(self) -> tuple[float | None, float | None, float | None]:
        """The run's number and both ends of its interval, in the paper's units."""
        row, metric = self.row, self.paper.metric
        if metric in OF_AN_INTERVAL:
            return getattr(row, metric), None, None
        scale = 100 if metric in _IN_HUNDREDTHS else 1
        value, low, high = (
            None if x is None else scale * x
            for x in (row.value, row.ci_low, row.ci_high)
        )
        return value, low, high

    @property
    def value(self) -> float | None:
        """The run's number; None if it is undefined."""
        return self.numbers[0]


def read_ledger() -> list[PaperCell]:
    """Return every number of the paper's tables, in the order of print."""
    lines = Path(__file__).with_name("paper.jsonl").read_bytes().splitlines()
    return [
        msgspec.convert({**cell, "metric": metric, "value": value}, PaperCell)
        for cell in map(msgspec.json.decode, lines)
        for metric, value in cell.pop("numbers").items()
    ]


# The columns to join on, besides experiment and setting.
KEY = ("dataset", "split", "metric", "detector", "families", "family", "span", "kind")
KEY += ("n_closed_book", "against", "against_families")


def _by_key(results: pandas.DataFrame) -> dict[tuple, ResultRow]:
    """Return the seed means by key, with None for the experiment in `_EXPERIMENTS`."""
    ranks = {name: rank for rank, name in enumerate(_EXPERIMENTS)}
    rows = where(results, seed="mean")["row"].tolist()
    by_key: dict[tuple, ResultRow] = {}
    for row in sorted(rows, key=lambda row: ranks.get(row.experiment, len(ranks))):
        setting = "both" if row.experiment.startswith("controller") else row.setting
        experiment = None if row.experiment in ranks else row.experiment
        columns = (getattr(row, name) for name in KEY)
        by_key.setdefault((experiment, setting, *columns), row)
    return by_key


def _keys_of(cell: PaperCell) -> Iterable[tuple]:
    """Yield the keys that our row for a number may have, the best first."""
    columns = {name: getattr(cell, name) for name in KEY}
    columns["metric"] = cell.ours or ("auroc" if cell.against else cell.metric)
    for split in _splits(cell):
        for families in (cell.families, cell.instead or cell.families):
            columns |= {"split": split, "families": families}
            yield cell.experiment, cell.setting, *columns.values()


def _splits(cell: PaperCell) -> list[str]:
    """Return the splits that the paper's set may have in a run."""
    split = str(cell.split)
    is_single_set = cell.dataset not in ACROSS_SETS and split in _ELSEWHERE
    return [split, _ELSEWHERE[split]] if is_single_set else [split]


def _counted(
    cell: PaperCell, accuracy: Sequence[Mapping[str, Any]]
) -> ResultRow | None:
    """Return the model's accuracy or number of answers as a row."""
    for split in _splits(cell):
        counts = [
            (count["n"], count["n_correct"])
            for count in accuracy
            if (count["setting"], count["split"]) == (cell.setting, split)
            and cell.dataset in (count["dataset"], IN_DOMAIN)
            and cell.variant in (count["variant"], None)
        ]
        if n := sum(n for n, _ in counts):
            share = 100 * sum(n_correct for _, n_correct in counts) / n
            value = share if cell.metric == "accuracy_percent" else float(n)
            at = {"setting": cell.setting, "dataset": cell.dataset, "split": split}
            fields = {"experiment": "answers", "detector": "backbone", **at}
            return ResultRow(metric=cell.metric, value=value, n=n, **fields)
    return None


def paper_pairs(
    cells: Sequence[PaperCell],
    results: pandas.DataFrame,
    accuracy: Sequence[Mapping[str, Any]] = (),
) -> list[PaperPair]:
    """Return the numbers of the paper that a run has too, in the paper's order."""
    by_key, numbers = _by_key(results), []
    for cell in cells:
        if not cell.has_counterpart:
            row = None
        elif cell.detector == "backbone":
            row = _counted(cell, accuracy)
        else:
            row = next((by_key[x] for x in _keys_of(cell) if x in by_key), None)
        if row is not None:
            numbers.append(PaperPair(cell, row))
    return numbers


# What the paper's text says of many numbers at once: the least, the most, the count.

SUMMARY = "anatomy_summary"


def _count(detector: str, metric: str, setting: str, value: float, n: int, **more: str):
    """Return a count, or another number without an interval, as a row."""
    fields: dict[str, Any] = {"experiment": SUMMARY, "dataset": IN_DOMAIN}
    fields |= {"split": "test", "setting": setting, "detector": detector}
    fields |= {"metric": metric, **more}
    return ResultRow(value=value, n=n, **fields)


def _renamed_row(
    row: ResultRow, metric: str, detector: str = "", **fields: Any
) -> ResultRow:
    """Return a row's value and interval under another name."""
    gone = {"against": None, "against_families": None, "p_value": None, "span": None}
    if detector:
        gone |= {"detector": detector, "families": None, "family": None}
    named = {**gone, "experiment": SUMMARY, "metric": metric, **fields}
    return msgspec.structs.replace(row, **named)


def _sorted(results: pandas.DataFrame) -> list[ResultRow]:
    known = results.loc[results["value"].notna()]
    return known.sort_values("value", kind="stable")["row"].tolist()


def better_pairs(results: pandas.DataFrame) -> pandas.DataFrame:
    """Return the lead over the better member, for every pair of families and set."""
    experiments = ("anatomy_pairs", "anatomy_other_pairs")
    rows = where(results, experiment=experiments, metric="auroc", seed="mean")
    columns = ["experiment", "families", "setting", "dataset", "split"]
    least = rows.loc[rows["value"].notna()].sort_values("value", kind="stable")
    return least.drop_duplicates(columns).sort_index()


def _best_encoder(results: pandas.DataFrame) -> Iterable[ResultRow]:
    at = {"dataset": IN_DOMAIN, "split": "validation", "metric": "auroc"}
    at |= {"experiment": "detection", "detector": "encoder", "seed": "mean"}
    for setting in SETTINGS:
        for row in _sorted(where(results, setting=setting, **at))[-1:]:
            n = float(len(row.families or ""))
            name = "best_encoder", "families", setting
            yield _count(*name, n, row.n, split=row.split)


def _extremes(results: pandas.DataFrame) -> Iterable[ResultRow]:
    """Yield extremes: hidden states' mistakes got right, loss of a span, best layer."""
    test = {"dataset": IN_DOMAIN, "split": "test", "seed": "mean"}
    rights = where(
        results, experiment="anatomy_complementarity", metric="rights", **test
    )
    rows = _sorted(where(rights, family="H"))
    for name, row in zip(("least", "most"), (rows[:1], rows[-1:]), strict=True):
        fields = {"detector": f"{name}_of_hidden", "setting": "both", "family": "H"}
        yield from (_renamed_row(x, "rights", **fields) for x in row)
    spans = where(results, experiment="anatomy_spans", metric="auroc", **test)
    gone = where(spans, families=EVERY_FAMILY, span=("question", "context"))
    for row in _sorted(gone.loc[gone["against"].notna()])[:1]:
        yield _renamed_row(row, "loss", "most_of_question_and_context", setting="both")
    for row in where(results, experiment="anatomy_backbones", metric="spearman")["row"]:
        yield _renamed_row(row, "spearman")
    at = {"metric": "auroc", "dataset": IN_DOMAIN, "split": "validation"}
    layers = where(results, experiment="anatomy_layers", seed="mean", **at)
    known = layers.loc[layers["value"].notna()]
    if not known.empty:
        # The layer with the best mean over settings, as in the sweep.
        means: Any = known.groupby("layer")["value"].mean().astype("float64")
        layer = means.idxmax()
        n = int(where(layers, layer=layer)["n"].to_numpy().sum())
        name = "best_layer", "layer", "both"
        yield _count(*name, float(layer), n, split="validation")


def _near(results: pandas.DataFrame) -> Iterable[ResultRow]:
    """Yield shares of flips near the boundary, of every run's all-family encoder."""
    rows = where(
        results,
        experiment="anatomy_flips",
        metric="flips_near_boundary",
        families=EVERY_FAMILY,
        family=("P", "R", "A"),
        dataset=IN_DOMAIN,
        split="test",
    )
    every = _sorted(rows)
    groups = {setting: _sorted(where(rows, setting=setting)) for setting in SETTINGS}
    for setting, group in (groups | {"both": every}).items():
        if group:
            yield _renamed_row(group[0], "near", "least_near", setting=setting)
            yield _renamed_row(group[-1], "near", "most_near", setting=setting)
    if len(every) > 1:
        yield _renamed_row(every[1], "near", "least_but_one_near", setting="both")
        # Eleven of the paper's twelve cases reach this share.
        n = sum((row.value or 0.0) >= 0.72 for row in every)
        yield _count("families", "near_at_72", "both", n, len(every))
        yield _count("families", "near_cases", "both", len(every), len(every))


def _gains(results: pandas.DataFrame) -> Iterable[ResultRow]:
    """Yield gains of probabilities with attention, on both backbones if known."""
    better = where(better_pairs(results), families="PA")
    here = where(better, experiment="anatomy_pairs")
    yield from (_renamed_row(row, "gain") for row in here["row"])
    # In-domain sets only pooled, so that none counts twice.
    every = _sorted(in_domain_or_held_out(where(better, split=EVALUATED)))
    if not every:
        return
    middle = every[statistics.median_low(range(len(every)))]
    pooled = {"setting": "both", "dataset": IN_DOMAIN, "split": "test"}
    yield _renamed_row(middle, "median_gain", **pooled)
    n = sum((row.value or 0.0) > 0 for row in every)
    name = {"detector": "encoder", "setting": "both", "families": "PA"}
    yield _count(metric="gains_above_zero", value=n, n=len(every), **name)
    yield _count(metric="gains", value=len(every), n=len(every), **name)


def _counts(results: pandas.DataFrame) -> Iterable[ResultRow]:
    """Yield the numbers of ranked sets, and of answers whose heads were attributed."""
    for setting in SETTINGS:
        at = {"setting": setting, "seed": "mean"}
        ranked = where(results, experiment="anatomy_combinations", **at)
        for row in where(ranked, metric="encoders_in_set")["row"][:1]:
            name = "sets_of_three_ranked", "sets", setting
            yield _count(*name, float(row.n), row.n, split="validation")
        heads = where(
            results, experiment="anatomy_heads", metric="incompleteness", **at
        )
        for row in where(heads, dataset=IN_DOMAIN, split="test")["row"][:1]:
            yield _count("heads", "answers", setting, float(row.n), row.n)


def with_summaries(results: pandas.DataFrame) -> pandas.DataFrame:
    """Add rows that summarise many numbers as the paper's text does.

    A summary is the least, the largest or the median row with its own interval, or a
    count. Summaries are not published.
    """
    summaries_of = (_best_encoder, _extremes, _near, _gains, _counts)
    rows = [row for summarise in summaries_of for row in summarise(results)]
    return results_of([*results["row"], *rows])


# Which comparisons have the paper's sign.

Verdict = Literal["agrees", "differs", "cannot be told", "no interval"]
VERDICTS: Mapping[Verdict, str] = {
    "agrees": "as in the paper",
    "differs": "opposite to the paper",
    "cannot be told": "undecided",
    "no interval": "no interval in this run",
}
_TO_ZERO = ("spearman", "points")


def number_text(cell: PaperCell, value: float | None) -> str:
    """Format a value of the paper or the run as the paper prints it; – for None."""
    metric = cell.metric
    if value is None:
        return "–"
    if metric in ("n", "count", "layer"):
        return f"{value:,.0f}"
    if metric in ("accuracy_percent", "share_percent"):
        return f"{value:.1f}"
    if metric == "points":
        return f"{value:+.1f}"
    if metric == "p_value":
        return p_text(value)
    is_end = metric in OF_AN_INTERVAL and cell.against is not None
    is_change = metric.endswith("_difference") or cell.ours in CHANGES
    return number(value, metric, is_signed=is_end or is_change)


def _printed(cell: PaperCell) -> str:
    """Format a number of the paper; a loss of at most x is a change of ≥ -x."""
    bound = "< " if cell.metric == "p_value" else "≥ "
    text = number_text(cell, cell.value)
    if str(cell.value) == "-0.0":  # the paper's −.000: an end just below zero
        text = text.replace("+", "-")
    return bound * cell.below + text


class Sign(NamedTuple):
    """A comparison of the paper, and the same comparison in a run."""

    first: PaperPair  # the number, and the run's
    second: PaperPair | None  # compared with this; None is zero, or the paper's bound
    order: Order  # the paper's
    change: float  # the run's difference, first minus second, in [low, high]
    low: float | None
    high: float | None
    is_paired: bool  # whether the interval is of a paired difference

    @property
    def verdict(self) -> Verdict:
        """Whether the run agrees with the paper, judged by the run's interval."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.order == "not above":
            return "differs" if self.low > 0 else "agrees"
        side = "above" if self.low > 0 else "below" if self.high < 0 else None
        if side is None:
            return "cannot be told"
        return "agrees" if side == self.order else "differs"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What is compared, the paper's numbers, the run's, and the verdict."""
        cell, second = self.first.paper, self.second
        to = "zero" if second is None else second.paper.row
        paper = f"{self.order} {to}"
        if cell.value is not None:
            paper = _printed(cell)
            if second is not None:
                paper += f" against {number_text(cell, second.paper.value)} ({to})"
        here = _with_ends(self.first)
        if second is not None:
            here += f" against {_with_ends(second)}"
        if self.is_paired and second is not None:
            numbers = (self.change, self.low or 0.0, self.high or 0.0)
            change, low, high = (number(x, is_signed=True) for x in numbers)
            here += f", difference {change} [{low}, {high}]"
        verdict = VERDICTS[self.verdict]
        if self.verdict == "cannot be told":
            single = self.is_paired or second is None
            covered = "our interval covers " + ("the bound" if cell.below else "zero")
            verdict += f": {covered if single else 'intervals overlap'}"
        what = f"{cell.row} ({cell.column}; {cell.backbone})"
        return what, paper, here, verdict


def _with_ends(pair: PaperPair) -> str:
    value, *ends = (number_text(pair.paper, x) for x in pair.numbers)
    return value if pair.numbers[1] is None else f"{value} [{', '.join(ends)}]"


def _order(cell: PaperCell, than: PaperCell | None) -> Order | None:
    """Return the order that the paper states; None if it states none or equality."""
    if cell.sign is not None or cell.value is None:
        return cell.sign
    if cell.below:  # "at most" this loss is an order; a p "less than" this is none
        return None if cell.metric == "p_value" else "above"
    if than is None:
        is_single = cell.metric.endswith("_difference") or cell.metric in _TO_ZERO
        change = cell.value if is_single else 0.0
    else:
        change = cell.value - (than.value or 0.0)
    return None if not change else "above" if change > 0 else "below"


Differences = Mapping[tuple, tuple[float, float, float]]


def _differences(results: pandas.DataFrame) -> Differences:
    """Return paired AUROC differences and intervals, by both sides in either order."""
    rows = where(results, metric="auroc", seed="mean")
    rows = rows.loc[rows["against"].notna() & rows["ci_low"].notna()]
    differences: dict[tuple, tuple[float, float, float]] = {}
    retrieved = where(rows, experiment=f"{RETRIEVED}_paired", dataset=ALL_SETS)
    fusion, paired = (where(rows, experiment=x) for x in ("anatomy_fusion", "paired"))
    for part in (fusion, paired, retrieved):
        for r in part["row"]:
            at = r.setting, r.dataset, r.split
            numbers = r.value, r.ci_low, r.ci_high
            differences.setdefault((r.subject, r.rival, *at), numbers)
            change, high, low = (-x for x in numbers)
            differences.setdefault((r.rival, r.subject, *at), (change, low, high))
    return differences


def _sign(
    first: PaperPair, second: PaperPair | None, differences: Differences
) -> Sign | None:
    """Compare; None if the paper states no order, or a number of ours is undefined."""
    order = _order(first.paper, None if second is None else second.paper)
    value, low, high = first.numbers
    if order is None or value is None:
        return None
    if second is None:
        bound = (first.paper.value or 0.0) if first.paper.below else 0.0
        ends = (None if x is None else x - bound for x in (low, high))
        return Sign(first, second, order, value - bound, *ends, is_paired=True)
    other, other_low, other_high = second.numbers
    if other is None:
        return None
    row = first.row
    sides = row.subject, second.row.subject, row.setting, row.dataset, row.split
    if first.paper.metric == "auroc" and sides in differences:
        return Sign(first, second, order, *differences[sides], is_paired=True)
    if low is not None and high is not None:
        # A number without an interval, such as an even share, is exact.
        low -= other if other_high is None else other_high
        high -= other if other_low is None else other_low
    return Sign(first, second, order, value - other, low, high, is_paired=False)


def signs(numbers: Sequence[PaperPair], results: pandas.DataFrame) -> list[Sign]:
    """Return every comparison of the paper that a run's numbers allow, in order."""
    differences, compared = _differences(results), []

    def key_of(cell: PaperCell, row: str) -> tuple[str, ...]:
        return cell.table, cell.backbone, row, cell.column, cell.metric

    by_cell = {key_of(b.paper, b.paper.row): b for b in numbers}
    for first in numbers:
        cell, second = first.paper, None
        if cell.than is not None:
            second = by_cell.get(key_of(cell, cell.than))
            if second is None or second.row.split != first.row.split:
                continue
        compared.append(_sign(first, second, differences))
    return [sign for sign in compared if sign is not None]


def signs_by_table(
    cells: Sequence[PaperCell], results: pandas.DataFrame
) -> dict[str, list[Sign]]:
    """Return the comparisons that a run's rows allow, by the paper's table."""
    results = with_summaries(results)
    by_table: dict[str, list[Sign]] = {}
    for sign in signs(paper_pairs(cells, results), results):
        by_table.setdefault(sign.first.paper.table, []).append(sign)
    return by_table


def verdict_counts(compared: Sequence[Sign]) -> list[tuple[str, str]]:
    """Return how many comparisons have each verdict, in words; leaves out zeros."""
    counts = collections.Counter(sign.verdict for sign in compared)
    return [(words, str(counts[v])) for v, words in VERDICTS.items() if counts[v]]


# The ledger: the paper's tables with a run's own numbers, and what differs.


_MARKS = {"bold": "**{}**", "underlined": "<u>{}</u>", "dagger": "{}†", None: "{}"}
# Settings of the paper (section 4.1, appendices A and B) that a run may not share.
_JUDGES = "three prompts to a larger model of the same family, unanimous"
PAPER = {
    "Answers judged by": _JUDGES,
    "Passages": "supporting, in two wordings where in-domain",
    "Training seeds": "3",
    "Resamples": "10,000",
}
_EVERY_WORDING = "every wording of a context; the paper uses only the original"
_MISSING = "this run has none of the table's sets or detectors"
_NO_CONTROL = "this run has no rows of `beatrice control` on the table's sets"
_NO_ANATOMY = "this run has no such rows of `beatrice anatomy`"
_NO_ROWS = {
    RETRIEVED: "this run has no rows of `beatrice transfer`",
    "exhaustive": "this run has no rows of `beatrice select --exhaustive`",
}


def _backbones(cells: Iterable[PaperCell]) -> str:
    """Name the paper's models, each once; one number may be of both."""
    names = (name for cell in cells for name in cell.backbone.split(" and "))
    return " and ".join(dict.fromkeys(names))


def experiments_differ(
    here: Mapping[str, str], cells: Sequence[PaperCell], examples: Sequence[Example]
) -> list[tuple[str, str, str]]:
    """Return how a run differs from the paper's experiment: (what, paper, run).

    `here` has each name of `PAPER` and the backbone; `cells` have the paper's sizes
    (`tab:label-dist`).
    """
    paper = {"Backbone": _backbones(cells), **PAPER}
    facts = [(name, text, here[name]) for name, text in paper.items()]
    for split in ("train", "validation", "test", "ood"):
        sizes = [
            f"{cell.dataset} {cell.value:,.0f}"
            for cell in cells
            if (cell.metric, cell.split) == ("n", split) and cell.dataset != IN_DOMAIN
        ]
        counts = collections.Counter(e.dataset for e in examples if e.split == split)
        of_run = ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"
        facts.append((f"Questions, {SPLIT_LABELS[split]}", ", ".join(sizes), of_run))
    return [fact for fact in facts if fact[1] != fact[2]]


def _pair(numbers: Sequence[PaperPair]) -> str:
    """Format one printed cell: the paper's numbers → the run's."""
    paper, here = [], []
    for b in numbers:
        paper.append(_MARKS[b.paper.mark].format(_printed(b.paper)))
        here.append("n/a" if b.value is None else number_text(b.paper, b.value))
    return f"{'/'.join(paper)} → {'/'.join(here)}"


def _note(
    label: str, numbers: Sequence[PaperPair], n_paper: Mapping[tuple, Any]
) -> str:
    """Say how a set's split and size differ from the paper's; empty if they do not."""
    first, parts = numbers[0], []
    paper, split = first.paper, first.row.split
    if split != paper.split:
        words = {"test": "in-domain", "ood": "held out"}
        parts.append(f"{words[split]} here, {words[str(paper.split)]} in the paper")
    there = n_paper.get((paper.dataset, paper.split))
    n, n_failed = (max(getattr(b.row, x) for b in numbers) for x in ("n", "n_failed"))
    is_of_answers = paper.detector != "backbone" and ":" not in paper.table
    is_of_answers &= paper.experiment != RETRIEVED  # 500 of each set, asked again
    is_of_answers &= (paper.ours or paper.metric) != "flip_precision"  # n: the flipped
    if there not in (None, n) and is_of_answers:
        parts.append(f"{n:,} answers here, {there:,.0f} questions in the paper")
    if n_failed:
        parts.append(f"up to {n_failed:,} here without a label or a score")
    return f"* {label}: {'; '.join(parts)}\n" if parts else ""


def _table(numbers: Sequence[PaperPair], n_paper: Mapping[tuple, Any]) -> str:
    """Format a table's shared numbers as in the paper, with notes on differences."""
    lines: dict[str, dict[str, list[PaperPair]]] = {}
    places = collections.defaultdict(set)
    n_backbones = len({b.paper.backbone for b in numbers})
    for b in numbers:
        row = b.paper.row + (f" ({b.paper.backbone})" if n_backbones > 1 else "")
        lines.setdefault(row, {}).setdefault(b.paper.column, []).append(b)
        places[b.paper.column].add((b.paper.setting, b.paper.dataset, b.paper.split))
    text = markdown(
        ["Paper → here", *places],
        [
            [row, *(_pair(cells[c]) if c in cells else "–" for c in places)]
            for row, cells in lines.items()
        ],
    )
    # Sets are columns in most tables and rows in some.
    is_row = max(map(len, places.values())) > 1
    by_set: dict[str, list[PaperPair]] = {}
    for b in numbers:
        by_set.setdefault(b.paper.row if is_row else b.paper.column, []).append(b)
    notes = "".join(_note(label, group, n_paper) for label, group in by_set.items())
    others = (
        f"* Here the encoder of {b.row.families} replaces that of {b.paper.families}\n"
        for b in numbers
        if b.row.families != b.paper.families
    )
    departures = (
        f"* Different here: {b.paper.departs}\n" for b in numbers if b.paper.departs
    )
    notes += "".join(dict.fromkeys((*others, *departures)))
    return text + (f"\n{notes}" if notes else "")


def _absent(cells_of_table: Sequence[PaperCell], numbers: Sequence[PaperPair]) -> str:
    """List the numbers of a table without a counterpart here, by reason."""
    have = {id(b.paper) for b in numbers}
    reasons: dict[str, list[PaperCell]] = {}
    for cell in cells_of_table:
        is_of_detection = cell.experiment in (None, RETRIEVED)
        if id(cell) in have or (cell.reason is None and is_of_detection):
            continue  # numbers of other sets and detectors are counted, not named
        missing = _NO_ROWS.get(cell.experiment or "", _NO_ANATOMY)
        reasons.setdefault(cell.reason or missing, []).append(cell)
    return "".join(
        f"* {len(cells)} of its numbers without a counterpart here: {reason} "
        f"({'; '.join(dict.fromkeys(f'{c.row}, {c.column}' for c in cells))})\n"
        for reason, cells in reasons.items()
    )


_CELLS = """\
A cell is the paper's number → this run's. If neither its row nor its column names
another measure, it is AUROC, or AUROC/AUPRC. A difference has the ends of its 95 %
interval. Bold, underlining and † are the paper's.
"""


def as_markdown(
    cells: Sequence[PaperCell],
    numbers: Sequence[PaperPair],
    differing: Sequence[tuple[str, str, str]],
    compared: Sequence[Sign] = (),
) -> str:
    """Format what differs, then each table of the paper with the run's numbers.

    Tables without a number are listed last.
    """
    parts = [markdown(("What differs", "Paper", "Here"), differing), _CELLS]
    absent = ""
    n_paper = {(c.dataset, c.split): c.value for c in cells if c.metric == "n"}
    by_table: dict[str, list[PaperCell]] = {}
    for cell in cells:
        by_table.setdefault(cell.table, []).append(cell)
    for table, cells_of_table in by_table.items():
        of_run = [b for b in numbers if b.paper.table == table]
        n_whole = sum(cell.value is not None for cell in cells_of_table)
        n_matched = sum(b.paper.value is not None for b in of_run)
        heading = table if ":" in table else f"tab:{table}"
        if not of_run:
            reasons = (
                c.reason or c.experiment and _NO_ROWS.get(c.experiment, _NO_ANATOMY)
                for c in cells_of_table
            )
            is_control = all(c.setting == "both" for c in cells_of_table)
            named = "; ".join(dict.fromkeys(filter(None, reasons)))
            named = named or (_NO_CONTROL if is_control else _MISSING)
            absent += f"* {heading}, {n_whole} numbers: {named}\n"
            continue
        parts.append(f"## {heading} ({_backbones(cells_of_table)})\n")
        parts.append(f"{n_matched} of its {n_whole} numbers have a counterpart here.\n")
        parts += [_table(of_run, n_paper), _absent(cells_of_table, of_run)]
        if of_table := [x for x in compared if x.first.paper.table == table]:
            parts.append(markdown(("Verdict", "Comparisons"), verdict_counts(of_table)))
            heads = ("Comparison", "Paper", "Here", "Sign")
            parts.append(markdown(heads, [sign.cells for sign in of_table]))
    if absent:
        parts += ["## Tables without a number in this run\n", absent]
    return "\n".join(filter(None, parts))


def _in_one_wording(cell: PaperCell) -> PaperCell:
    """Drop that our rows are of every wording, for a run that has only the paper's."""
    departs = (cell.departs or "").removeprefix(_EVERY_WORDING).removeprefix("; ")
    return msgspec.structs.replace(cell, departs=departs or None)


def ledger(
    rows: Sequence[ResultRow],
    here: Mapping[str, str],
    examples: Sequence[Example],
    labels: Mapping[tuple[str, str, str], Label],
) -> str:
    """Return the paper's tables with an evaluated run's numbers, as Markdown."""
    cells, results = read_ledger(), with_summaries(results_of(rows))
    if all(variant == "original" for _, _, variant in labels):
        cells = [_in_one_wording(cell) for cell in cells]
    numbers = paper_pairs(cells, results, count_correct(examples, labels))
    differing = experiments_differ(here, cells, examples)
    return as_markdown(cells, numbers, differing, signs(numbers, results))

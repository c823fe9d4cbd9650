"""The paper's tables with a run's own numbers beside them, and what differs."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from beatrice.benchmarks.paper.cells import (
    OF_AN_INTERVAL,
    Beside,
    Key,
    PaperCell,
    beside,
    read_ledger,
)
from beatrice.benchmarks.paper.signs import Sign, in_a_sentence, signs, spelled
from beatrice.benchmarks.paper.summaries import summaries
from beatrice.benchmarks.results.names import SPLIT_LABELS
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import IN_DOMAIN, Example, Label
from beatrice.extract.run.rows import DIFFERENCE, ResultRow

_MARKS = {"bold": "**{}**", "underlined": "<u>{}</u>", "dagger": "{}†", None: "{}"}
_WHY_NOT = {
    "realrag-detection": "needs the paper's own retrieval over Wikipedia for all sets",
}
_WHY_NOT["realrag-detection-gemma"] = _WHY_NOT["realrag-detection"]
_MISSING = "this run has none of its sets or detectors"
_NO_ANATOMY = "rows of `beatrice anatomy` that this run does not have"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What the paper and a run do not share, in words."""

    what: str
    paper: str
    here: str


def _backbones(cells: Sequence[PaperCell]) -> str:
    """Name the paper's models, each once; a number may be of both."""
    each = (name for cell in cells for name in cell.backbone.split(" and "))
    return " and ".join(dict.fromkeys(each))


def _sizes(examples: Sequence[Example], split: str) -> str:
    """Spell how many questions of each set a split has."""
    counts = collections.Counter(e.dataset for e in examples if e.split == split)
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


def _paper_sizes(cells: Sequence[PaperCell], split: str) -> str:
    return ", ".join(
        f"{cell.dataset} {cell.value:,.0f}"
        for cell in cells
        if (cell.metric, cell.split) == ("n", split) and cell.dataset != IN_DOMAIN
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What the paper's numbers are laid beside: an evaluated run.

    Attributes:
      rows: of its results.
      examples: its questions.
      labels: of its answers, by key.
      backbone: name of its model.
      label_rule: by which its answers were judged, in words.
      passages: which ones its questions have.
      n_seeds: of training.
      n_resamples: of the intervals.
    """

    rows: Sequence[ResultRow]
    examples: Sequence[Example]
    labels: Mapping[tuple[str, str, str], Label]
    backbone: str
    label_rule: str
    passages: Any
    n_seeds: int
    n_resamples: int


def differences(own: Experiment, cells: Sequence[PaperCell]) -> list[Difference]:
    """Return what differs between the paper's experiment and another, as both say it.

    Args:
      own: the other one.
      cells: of the paper; its sizes are read there (`tab:label-dist`). The rest is
        of its section 4.1 and appendix B.
    """
    variants = {label.variant for label in own.labels.values()}
    wordings = "two wordings" if "rewritten" in variants else "one wording"
    backbones = _backbones(cells)
    found = [
        Difference(
            what="Backbone",
            paper=backbones,
            here=own.backbone,
        ),
        Difference(
            what="Answers judged by",
            paper="three prompts to a larger model of the same family, unanimous",
            here=own.label_rule,
        ),
        Difference(
            what="Passages",
            paper="supporting, in two wordings where in-domain",
            here=f"{own.passages}, in {wordings}",
        ),
        Difference(what="Training seeds", paper="3", here=str(own.n_seeds)),
        Difference(
            what="Resamples",
            paper="10,000",
            here=f"{own.n_resamples:,}",
        ),
    ]
    for split in ("train", "validation", "test", "ood"):
        what = f"Questions, {SPLIT_LABELS[split]}"
        paper, here = _paper_sizes(cells, split), _sizes(own.examples, split)
        found.append(Difference(what=what, paper=paper, here=here))
    return [one for one in found if one.paper != one.here]


def _metric(cell: PaperCell) -> str:
    """Return the metric that says how a number is spelled; an end, as its value."""
    is_end = cell.metric in OF_AN_INTERVAL and cell.metric != "p_value"
    return cell.ours or f"auroc{DIFFERENCE}" if is_end else cell.metric


def _pair(own: Sequence[Beside]) -> str:
    """Spell one printed cell: what the paper has → what the run has."""
    paper = "/".join(
        _MARKS[b.paper.mark].format(
            ("< " if b.paper.below else "") + spelled(b.paper.value, _metric(b.paper))
        )
        for b in own
    )
    ours = "/".join(
        "n/a" if b.value is None else spelled(b.value, _metric(b.paper)) for b in own
    )
    return f"{paper} → {ours}"


def _note(label: str, own: Sequence[Beside], n_paper: Mapping[Key, float]) -> str:
    """Say how a set differs: its use and its size; empty where it does not."""
    one = own[0]
    parts = []
    if one.split != one.paper.split:
        words = {"test": "in-domain", "ood": "held out"}
        parts.append(f"{words[one.split]} here, {words[one.paper.split]} in the paper")
    there = n_paper.get((one.paper.dataset, one.paper.split))
    n, n_failed = (max(getattr(b, name) for b in own) for name in ("n", "n_failed"))
    is_of_answers = one.paper.detector != "backbone" and ":" not in one.paper.table
    if there not in (None, n) and is_of_answers:
        parts.append(f"{n:,} answers here, {there:,.0f} questions in the paper")
    if n_failed:
        parts.append(f"up to {n_failed:,} here without a label or a score")
    return f"* {label}: {'; '.join(parts)}" if parts else ""


def _is_instead(one: Beside) -> bool:
    """Whether the run has the paper's quantity of another encoder."""
    return one.paper.instead is not None and one.detector == one.paper.instead


def _table(own: Sequence[Beside], n_paper: Mapping[Key, float]) -> list[str]:
    """Lay a table's shared numbers out as the paper does, and how its sets differ."""
    lines: dict[str, dict[str, list[Beside]]] = {}
    places = collections.defaultdict(set)
    n_backbones = len({b.paper.backbone for b in own})
    for b in own:
        row = b.paper.row + (f" ({b.paper.backbone})" if n_backbones > 1 else "")
        lines.setdefault(row, {}).setdefault(b.paper.column, []).append(b)
        places[b.paper.column].add((b.paper.setting, b.paper.dataset, b.paper.split))
    made = ["| Paper → here | " + " | ".join(places) + " |"]
    made.append("|---" * (1 + len(places)) + "|")
    for row, found in lines.items():
        cells = (_pair(found[c]) if c in found else "–" for c in places)
        made.append(f"| {row} | " + " | ".join(cells) + " |")
    # A set is a column in most tables and a row in some.
    is_row = max(map(len, places.values())) > 1
    by_set: dict[str, list[Beside]] = {}
    for b in own:
        by_set.setdefault(b.paper.row if is_row else b.paper.column, []).append(b)
    notes = list(filter(None, (_note(x, bs, n_paper) for x, bs in by_set.items())))
    others = [f"{b.detector} for {b.paper.detector}" for b in own if _is_instead(b)]
    notes += [f"* Here {', '.join(dict.fromkeys(others))}"] if others else []
    departures = dict.fromkeys(b.paper.departs for b in own if b.paper.departs)
    notes += [f"* Measured here: {one}" for one in departures]
    return made + (["", *notes] if notes else [])


def _signs(own: Sequence[Sign]) -> list[str]:
    """Count the comparisons, say which go the other way, and list them all."""
    if not own:
        return []
    told = [f"* {sign.sentence}" for sign in own if sign.verdict == "differs"]
    lines = ["", in_a_sentence(own), *(["", *told] if told else [])]
    lines += ["", "| What is compared | Paper | Here | Sign |", "|---|---|---|---|"]
    return lines + [
        f"| {s.what} | {s.paper} | {s.here} | {s.verdict_in_words} |" for s in own
    ]


def _absent(whole: Sequence[PaperCell], own: Sequence[Beside]) -> list[str]:
    """Say which numbers of a table have none here, by the reason."""
    have = {id(b.paper) for b in own}
    reasons: dict[str, list[PaperCell]] = {}
    for cell in whole:
        if id(cell) in have or (cell.reason is None and cell.experiment is None):
            continue  # those of other sets and detectors are counted, not named
        reasons.setdefault(cell.reason or _NO_ANATOMY, []).append(cell)
    return [
        f"* {len(cells)} without a number here: {reason} "
        f"({'; '.join(dict.fromkeys(f'{c.row}, {c.column}' for c in cells))})"
        for reason, cells in reasons.items()
    ]


def _heading(table: str) -> str:
    """Name a table, or the figure or section whose text has the numbers."""
    return table if ":" in table else f"tab:{table}"


def as_markdown(
    cells: Sequence[PaperCell],
    found: Sequence[Beside],
    differing: Sequence[Difference],
    compared: Sequence[Sign] = (),
) -> str:
    """Spell what differs, and then each table of the paper with the run's numbers.

    Bold, underlined and † are the paper's marks. Rows that the run has nothing of are
    left out and counted.

    Args:
      cells: of the paper.
      found: those that the run has, of the same cells.
      differing: between the two experiments.
      compared: what is larger, in the paper and here.
    """
    lines = ["| What differs | Paper | Here |", "|---|---|---|"]
    lines += [f"| {one.what} | {one.paper} | {one.here} |" for one in differing]
    n_paper = {(c.dataset, c.split): c.value for c in cells if c.metric == "n"}
    by_table: dict[str, list[PaperCell]] = {}
    for cell in cells:
        by_table.setdefault(cell.table, []).append(cell)
    absent = []
    for table, whole in by_table.items():
        own = [b for b in found if b.paper.table == table]
        numbers = [cell for cell in whole if cell.value is not None]
        n_own = sum(b.paper.value is not None for b in own)
        if not own:
            reasons = (cell.reason or cell.experiment and _NO_ANATOMY for cell in whole)
            named = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
            why = _WHY_NOT.get(table, named or _MISSING)
            absent.append(f"* {_heading(table)}, {len(numbers)} numbers: {why}")
            continue
        backbones = _backbones(whole)
        lines += ["", f"## {_heading(table)} ({backbones})", ""]
        lines += [f"{n_own} of its {len(numbers)} numbers have one here.", ""]
        lines += _table(own, n_paper)
        lines += ["", *lacking] if (lacking := _absent(whole, own)) else []
        lines += _signs([one for one in compared if one.first.paper.table == table])
    if absent:
        lines += ["", "## Without a number of this run", "", *absent]
    return "\n".join(lines) + "\n"


def ledger(own: Experiment) -> str:
    """Return the paper's tables with the numbers of an evaluated run, as Markdown."""
    cells = read_ledger()
    accuracy = count_correct(own.examples, own.labels)
    rows = [*own.rows, *summaries(own.rows)]
    found = beside(cells, rows, accuracy)
    return as_markdown(cells, found, differences(own, cells), signs(found, rows))

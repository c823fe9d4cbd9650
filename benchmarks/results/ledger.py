"""The ledger: the paper's tables with a run's own numbers, and what differs."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from beatrice.benchmarks.results.names import SPLIT_LABELS
from beatrice.benchmarks.results.paper import (
    Beside,
    PaperCell,
    Sign,
    beside,
    number_text,
    read_ledger,
    signs,
    verdict_counts,
    with_summaries,
)
from beatrice.benchmarks.results.printing import markdown
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import IN_DOMAIN, Example, Label
from beatrice.extract.run.rows import ResultRow

_MARKS = {"bold": "**{}**", "underlined": "<u>{}</u>", "dagger": "{}†", None: "{}"}
_RETRIEVAL = "needs the paper's own retrieval over Wikipedia for all sets"
_RETRIEVED = ("realrag-detection", "realrag-detection-gemma")
_WHY_NOT: dict[str, str] = dict.fromkeys(_RETRIEVED, _RETRIEVAL)
# The paper's experiment (section 4.1 and appendix B), where a run's may differ.
_JUDGES = "three prompts to a larger model of the same family, unanimous"
PAPER = {
    "Answers judged by": _JUDGES,
    "Passages": "supporting, in two wordings where in-domain",
    "Training seeds": "3",
    "Resamples": "10,000",
}
_MISSING = "this run has none of its sets or detectors"
_NO_ANATOMY = "rows of `beatrice anatomy` that this run does not have"


def _backbones(cells: Iterable[PaperCell]) -> str:
    """Name the paper's models, each once; a number may be of both."""
    names = (name for cell in cells for name in cell.backbone.split(" and "))
    return " and ".join(dict.fromkeys(names))


def experiments_differ(
    here: Mapping[str, str], cells: Sequence[PaperCell], examples: Sequence[Example]
) -> list[tuple[str, str, str]]:
    """Return what differs between the paper's experiment and a run: what, paper, here.

    Args:
      here: of the run, for each name of `PAPER`, and its backbone.
      cells: of the paper, whose sizes are read there (`tab:label-dist`).
      examples: of the run.
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


def _pair(numbers: Sequence[Beside]) -> str:
    """Format one printed cell: what the paper has → what the run has."""
    paper, here = [], []
    for b in numbers:
        text = ("< " if b.paper.below else "") + number_text(b.paper, b.paper.value)
        paper.append(_MARKS[b.paper.mark].format(text))
        here.append("n/a" if b.value is None else number_text(b.paper, b.value))
    return f"{'/'.join(paper)} → {'/'.join(here)}"


def _note(label: str, numbers: Sequence[Beside], n_paper: Mapping[tuple, Any]) -> str:
    """Say how a set differs: its use and its size; empty where it does not."""
    first, parts = numbers[0], []
    paper, split = first.paper, first.row.split
    if split != paper.split:
        words = {"test": "in-domain", "ood": "held out"}
        parts.append(f"{words[split]} here, {words[str(paper.split)]} in the paper")
    there = n_paper.get((paper.dataset, paper.split))
    n, n_failed = (max(getattr(b.row, x) for b in numbers) for x in ("n", "n_failed"))
    is_of_answers = paper.detector != "backbone" and ":" not in paper.table
    if there not in (None, n) and is_of_answers:
        parts.append(f"{n:,} answers here, {there:,.0f} questions in the paper")
    if n_failed:
        parts.append(f"up to {n_failed:,} here without a label or a score")
    return f"* {label}: {'; '.join(parts)}\n" if parts else ""


def _table(numbers: Sequence[Beside], n_paper: Mapping[tuple, Any]) -> str:
    """Lay a table's shared numbers out as the paper does, and how its sets differ."""
    lines: dict[str, dict[str, list[Beside]]] = {}
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
    # A set is a column in most tables and a row in some.
    is_row = max(map(len, places.values())) > 1
    by_set: dict[str, list[Beside]] = {}
    for b in numbers:
        by_set.setdefault(b.paper.row if is_row else b.paper.column, []).append(b)
    notes = "".join(_note(label, group, n_paper) for label, group in by_set.items())
    others = (
        f"* Here the encoder of {b.row.families} for that of {b.paper.families}\n"
        for b in numbers
        if b.row.families != b.paper.families
    )
    departures = (
        f"* Measured here: {b.paper.departs}\n" for b in numbers if b.paper.departs
    )
    notes += "".join(dict.fromkeys((*others, *departures)))
    return text + (f"\n{notes}" if notes else "")


def _absent(cells_of_table: Sequence[PaperCell], numbers: Sequence[Beside]) -> str:
    """List which numbers of a table have none here, by the reason."""
    have = {id(b.paper) for b in numbers}
    reasons: dict[str, list[PaperCell]] = {}
    for cell in cells_of_table:
        if id(cell) in have or (cell.reason is None and cell.experiment is None):
            continue  # those of other sets and detectors are counted, not named
        reasons.setdefault(cell.reason or _NO_ANATOMY, []).append(cell)
    return "".join(
        f"* {len(cells)} without a number here: {reason} "
        f"({'; '.join(dict.fromkeys(f'{c.row}, {c.column}' for c in cells))})\n"
        for reason, cells in reasons.items()
    )


def as_markdown(
    cells: Sequence[PaperCell],
    numbers: Sequence[Beside],
    differing: Sequence[tuple[str, str, str]],
    compared: Sequence[Sign] = (),
) -> str:
    """Format what differs, and then each table of the paper with the run's numbers.

    Bold, underlined and † are the paper's marks. Rows that the run has nothing of are
    left out and counted.
    """
    parts, absent = [markdown(("What differs", "Paper", "Here"), differing)], ""
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
            reasons = (c.reason or c.experiment and _NO_ANATOMY for c in cells_of_table)
            named = "; ".join(dict.fromkeys(filter(None, reasons)))
            why = _WHY_NOT.get(table, named or _MISSING)
            absent += f"* {heading}, {n_whole} numbers: {why}\n"
            continue
        parts.append(f"## {heading} ({_backbones(cells_of_table)})\n")
        parts.append(f"{n_matched} of its {n_whole} numbers have one here.\n")
        parts += [_table(of_run, n_paper), _absent(cells_of_table, of_run)]
        if of_table := [x for x in compared if x.first.paper.table == table]:
            parts.append(markdown(("Verdict", "Comparisons"), verdict_counts(of_table)))
            heads = ("What is compared", "Paper", "Here", "Sign")
            parts.append(markdown(heads, [sign.cells for sign in of_table]))
    if absent:
        parts += ["## Without a number of this run\n", absent]
    return "\n".join(filter(None, parts))


def ledger(
    rows: Sequence[ResultRow],
    here: Mapping[str, str],
    examples: Sequence[Example],
    labels: Mapping[tuple[str, str, str], Label],
) -> str:
    """Return the paper's tables with the numbers of an evaluated run, as Markdown."""
    cells, results = read_ledger(), with_summaries(results_of(rows))
    numbers = beside(cells, results, count_correct(examples, labels))
    differing = experiments_differ(here, cells, examples)
    return as_markdown(cells, numbers, differing, signs(numbers, results))

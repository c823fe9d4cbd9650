"""The paper's numbers as data, and a run's own beside them with what differs.

`paper.jsonl` has every number of the paper's seventeen tables, a line each, in the
order of print: as printed (percentages stay percentages), with the mark that the paper
gives it. A number has a counterpart in a run where its line names a setting, a set, a
split and a detector of ours. A set that the paper held out may be one that a run was
trained on; both are laid side by side, and a note says so.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.results.tables import number
from extract.backbone.names import backbone_of
from extract.records import ACROSS_SETS, IN_DOMAIN, Example, Record, read_records
from extract.run.contents import count_correct, read_examples, read_labels
from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from extract.run.results import (
    DIFFERENCE,
    SPLIT_LABELS,
    ResultRow,
    label_rule,
    read_result_rows,
)
from jaxprobe.evaluation import bootstrap_of
from jaxprobe.settings import grid_config

Mark = Literal["bold", "underlined", "dagger"]
_MARKS = {"bold": "**{}**", "underlined": "<u>{}</u>", "dagger": "{}†", None: "{}"}
# The first that has a number gives it: an ablation repeats some rows of the main table.
_EXPERIMENTS = ("detection", "ablation", "paired", "controller", "controller_macro")
_OF_A_DIFFERENCE = ("ci_low", "ci_high", "p_value")
_ELSEWHERE = {"test": "ood", "ood": "test"}
_WHY_NOT = {
    "anatomy-flip-profile": "decision flips are not measured here",
    "case-studies": "single questions; the report shows those of the run",
    "realrag-detection": "needs the paper's own retrieval over Wikipedia for all sets",
}
_WHY_NOT["realrag-detection-gemma"] = _WHY_NOT["realrag-detection"]


class PaperCell(Record, frozen=True, kw_only=True):
    """One number of a table of the paper.

    Attributes:
      table: its label, without `tab:`.
      backbone: of the paper.
      group: heading above the row, where there is one.
      row: its label as printed.
      column: likewise, with the headings above it.
      metric: "auroc", "ci_low", "accuracy_percent", "n", ...
      value: as printed; a percentage is one of 100.
      mark: how the paper marks it. A dagger: the 95 % interval excludes zero.
      below: whether the paper says "less than" the value.
      setting: of ours; with dataset, split and detector, None without a counterpart.
      dataset: likewise.
      split: as the paper uses the set.
      detector: as in result rows; "backbone" for its accuracy and numbers of answers.
      against: of a difference.
      variant: wording of the passages, None for both together.
    """

    table: str
    backbone: str
    group: str | None = None
    row: str
    column: str
    metric: str
    value: float
    mark: Mark | None = None
    below: bool = False
    setting: str | None = None
    dataset: str | None = None
    split: str | None = None
    detector: str | None = None
    against: str | None = None
    variant: str | None = None


class Beside(Record, frozen=True, kw_only=True):
    """A number of the paper and the run's.

    Attributes:
      paper: of the paper.
      value: the run's, in the paper's units; None where it is undefined.
      reason: why it is undefined.
      n: answers that the run's is computed on.
      n_failed: answers without a label or a score.
      split: how the run uses the set.
    """

    paper: PaperCell
    value: float | None
    reason: str | None = None
    n: int
    n_failed: int = 0
    split: str


def read_ledger() -> list[PaperCell]:
    """Return every number of the paper's tables, in the order of print.

    Raises:
      ValueError: a line of the file is none.
    """
    return list(read_records(Path(__file__).with_name("paper.jsonl"), PaperCell))


Key = tuple[str | None, ...]


def _by_key(rows: Sequence[ResultRow]) -> dict[Key, ResultRow]:
    """Index the seed means; a controller uses both settings whatever it asks."""
    found: dict[Key, ResultRow] = {}
    for experiment in _EXPERIMENTS:
        for r in rows:
            if r.experiment == experiment and r.seed == "mean":
                setting = "both" if "controller" in experiment else r.setting
                key = (r.detector, setting, r.dataset, r.split, r.metric, r.against)
                found.setdefault(key, r)
    return found


def _from_row(
    cell: PaperCell, split: str, known: Mapping[Key, ResultRow]
) -> Beside | None:
    metric = f"auroc{DIFFERENCE}" if cell.against else cell.metric
    place = (cell.setting, cell.dataset, split)
    row = known.get((cell.detector, *place, metric, cell.against))
    if row is None:
        return None
    of_interval = cell.metric in _OF_A_DIFFERENCE
    value = getattr(row, cell.metric) if of_interval else row.value
    shared = {"n": row.n, "n_failed": row.n_failed, "split": split}
    return Beside(paper=cell, value=value, reason=row.reason, **shared)


def _counted(
    cell: PaperCell, split: str, accuracy: Sequence[Mapping[str, Any]]
) -> Beside | None:
    own = [
        a
        for a in accuracy
        if (a["setting"], a["split"]) == (cell.setting, split)
        and cell.dataset in (a["dataset"], IN_DOMAIN)
        and cell.variant in (a["variant"], None)
    ]
    n = sum(a["n"] for a in own)
    if not n:
        return None
    right = 100 * sum(a["n_correct"] for a in own) / n
    value = right if cell.metric == "accuracy_percent" else float(n)
    return Beside(paper=cell, value=value, n=n, split=split)


def beside(
    cells: Iterable[PaperCell],
    rows: Sequence[ResultRow],
    accuracy: Sequence[Mapping[str, Any]],
) -> list[Beside]:
    """Return the numbers of the paper that a run has too, in their order.

    Args:
      cells: of the paper.
      rows: of the run.
      accuracy: as `extract.run.contents.count_correct` gives it.
    """
    known, made = _by_key(rows), []
    for cell in cells:
        if None in (cell.setting, cell.dataset, cell.split, cell.detector):
            continue
        splits = [cell.split]
        if cell.dataset not in ACROSS_SETS and cell.split in _ELSEWHERE:
            splits.append(_ELSEWHERE[cell.split])
        of_backbone = cell.detector == "backbone"
        for split in splits:
            found = (
                _counted(cell, split, accuracy)
                if of_backbone
                else _from_row(cell, split, known)
            )
            if found is not None:
                made.append(found)
                break
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What the paper and a run do not share, in words."""

    what: str
    paper: str
    here: str


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


def differences(run: RunDir, cells: Sequence[PaperCell]) -> list[Difference]:
    """Return what differs between the paper's experiment and a run's, as both say it.

    Args:
      run: that was evaluated.
      cells: of the paper; its sizes are read there (`tab:label-dist`). The rest is
        of its section 4.1 and appendix B.
    """
    examples = read_examples(run)
    sections = read_manifest(run.path)["sections"]
    passages = sections.get("data", {}).get("context", "of the embedded world")
    variants = {label.variant for label in read_labels(run).values()}
    wordings = "two wordings" if "rewritten" in variants else "one wording"
    backbones = dict.fromkeys(cell.backbone for cell in cells)
    found = [
        Difference(
            what="Backbone",
            paper=" and ".join(backbones),
            here=Path(backbone_of(run).model).name,
        ),
        Difference(
            what="Answers judged by",
            paper="three prompts to a larger model of the same family, unanimous",
            here=label_rule(run),
        ),
        Difference(
            what="Passages",
            paper="supporting, in two wordings where in-domain",
            here=f"{passages}, in {wordings}",
        ),
        Difference(
            what="Training seeds", paper="3", here=str(grid_config(run).train.n_seeds)
        ),
        Difference(
            what="Resamples",
            paper="10,000",
            here=f"{bootstrap_of(run).n_resamples:,}",
        ),
    ]
    for split in ("train", "validation", "test", "ood"):
        what = f"Questions, {SPLIT_LABELS[split]}"
        sizes = {"paper": _paper_sizes(cells, split), "here": _sizes(examples, split)}
        found.append(Difference(what=what, **sizes))
    return [one for one in found if one.paper != one.here]


def _spelled(value: float, metric: str) -> str:
    """Spell a value as the paper prints its metric."""
    if metric == "n":
        return f"{value:,.0f}"
    if metric == "accuracy_percent":
        return f"{value:.1f}"
    if metric == "p_value":
        return f"{value:.2g}".replace("0.", ".")
    of_interval = metric in _OF_A_DIFFERENCE
    return number(value, f"auroc{DIFFERENCE}" if of_interval else metric)


def _pair(own: Sequence[Beside]) -> str:
    """Spell one printed cell: what the paper has → what the run has."""
    paper = "/".join(
        _MARKS[b.paper.mark].format(
            ("< " if b.paper.below else "") + _spelled(b.paper.value, b.paper.metric)
        )
        for b in own
    )
    ours = "/".join(
        "n/a" if b.value is None else _spelled(b.value, b.paper.metric) for b in own
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
    if there not in (None, n) and one.paper.detector != "backbone":
        parts.append(f"{n:,} answers here, {there:,.0f} questions in the paper")
    if n_failed:
        parts.append(f"up to {n_failed:,} here without a label or a score")
    return f"* {label}: {'; '.join(parts)}" if parts else ""


def _table(own: Sequence[Beside], n_paper: Mapping[Key, float]) -> list[str]:
    """Lay a table's shared numbers out as the paper does, and how its sets differ."""
    lines: dict[str, dict[str, list[Beside]]] = {}
    places = collections.defaultdict(set)
    for b in own:
        lines.setdefault(b.paper.row, {}).setdefault(b.paper.column, []).append(b)
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
    return made + (["", *notes] if notes else [])


def as_markdown(
    cells: Sequence[PaperCell],
    found: Sequence[Beside],
    differing: Sequence[Difference],
) -> str:
    """Spell what differs, and then each table of the paper with the run's numbers.

    Bold, underlined and † are the paper's marks. Rows that the run has nothing of are
    left out and counted.
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
        if not own:
            why = _WHY_NOT.get(table, "this run has none of its sets or detectors")
            absent.append(f"* tab:{table}, {len(whole)} numbers: {why}")
            continue
        backbones = " and ".join(dict.fromkeys(cell.backbone for cell in whole))
        lines += ["", f"## tab:{table} ({backbones})", ""]
        lines += [f"{len(own)} of its {len(whole)} numbers have one here.", ""]
        lines += _table(own, n_paper)
    if absent:
        lines += ["", "## Without a number of this run", "", *absent]
    return "\n".join(lines) + "\n"


def ledger(path: Path) -> str:
    """Return the paper's tables with the numbers of an evaluated run, as Markdown.

    Raises:
      ValueError: the run has not been evaluated.
    """
    run, cells = RunDir(path), read_ledger()
    accuracy = count_correct(read_examples(run), read_labels(run))
    found = beside(cells, read_result_rows(run), accuracy)
    return as_markdown(cells, found, differences(run, cells))

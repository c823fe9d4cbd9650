"""The paper's numbers as data, and which number of a run is the same quantity.

`paper.jsonl` has every number of the paper's seventeen tables, a line each, in the
order of print: as printed (percentages stay percentages), with the mark that the paper
gives it. Then come the numbers that only the text or a caption of the anatomy prints
(the figures print none), by the figure or section that they belong to, and what the
text there says of an order without a number. What is a definition (fifteen encoders,
one half) or repeats a table is no line.

A number has a counterpart in a run where its line names a setting, a set, a split and a
detector of ours; where it has none its line says why. A set that the paper held out may
be one that a run was trained on; both are laid side by side, and a note says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from beatrice.extract.records import ACROSS_SETS, IN_DOMAIN, Record, read_records
from beatrice.extract.run.rows import DIFFERENCE, ResultRow

Mark = Literal["bold", "underlined", "dagger"]
Order = Literal["above", "below", "not above"]
# The first that has a number gives it: an ablation repeats some rows of the main table.
_EXPERIMENTS = ("detection", "ablation", "paired", "controller", "controller_macro")
OF_AN_INTERVAL = ("ci_low", "ci_high", "p_value")
_ELSEWHERE = {"test": "ood", "ood": "test"}
_IN_HUNDREDTHS = ("share_percent", "points")


class PaperCell(Record, frozen=True, kw_only=True):
    """One number of the paper.

    Attributes:
      table: its label, without `tab:`; of a number in the text, that of the figure or
        the section.
      backbone: of the paper.
      group: heading above the row, where there is one.
      row: its label as printed.
      column: likewise, with the headings above it.
      metric: "auroc", "ci_low", "accuracy_percent", "n", ...
      value: as printed; a percentage is one of 100. None where the paper says what is
        larger, and prints no number.
      mark: how the paper marks it. A dagger: the 95 % interval excludes zero.
      below: whether the paper says "less than" or "at most" the value.
      setting: of ours; with dataset, split and detector, None without a counterpart.
      dataset: likewise.
      split: as the paper uses the set.
      detector: as in result rows; "backbone" for its accuracy and numbers of answers.
      against: of a difference.
      variant: wording of the passages, None for both together.
      experiment: of our row, where it is not one of detection.
      ours: metric of our row, where that has another name.
      instead: our detector where the run lacks `detector`: the paper looks into the
        encoders that its search selected, ours may have selected others.
      than: the row of this table, column and metric with which the paper compares it;
        none for fusing all encoders, from which it tells no difference.
      sign: how the paper says that it compares, where it prints no number; without
        `than`, to zero.
      departs: what our row measures otherwise than the paper.
      reason: why there is no counterpart.
    """

    table: str
    backbone: str
    group: str | None = None
    row: str
    column: str
    metric: str
    value: float | None = None
    mark: Mark | None = None
    below: bool = False
    setting: str | None = None
    dataset: str | None = None
    split: str | None = None
    detector: str | None = None
    against: str | None = None
    variant: str | None = None
    experiment: str | None = None
    ours: str | None = None
    instead: str | None = None
    than: str | None = None
    sign: Order | None = None
    departs: str | None = None
    reason: str | None = None

    @property
    def has_counterpart(self) -> bool:
        """Whether the line names a row of ours."""
        return None not in (self.setting, self.dataset, self.split, self.detector)


class Beside(Record, frozen=True, kw_only=True):
    """A number of the paper and the run's.

    Attributes:
      paper: of the paper.
      value: the run's, in the paper's units; None where it is undefined.
      low: lower end of its 95 % interval, None if it has none.
      high: upper end.
      reason: why it is undefined.
      n: answers that the run's is computed on.
      n_failed: answers without a label or a score.
      split: how the run uses the set.
      detector: whose number it is.
    """

    paper: PaperCell
    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    n: int
    n_failed: int = 0
    split: str
    detector: str = "backbone"


def read_ledger() -> list[PaperCell]:
    """Return every number of the paper's tables, in the order of print.

    Raises:
      ValueError: a line of the file is none.
    """
    return list(read_records(Path(__file__).with_name("paper.jsonl"), PaperCell))


Key = tuple[str | None, ...]


def by_key(rows: Sequence[ResultRow]) -> dict[Key, ResultRow]:
    """Index the seed means; a controller uses both settings whatever it asks.

    Rows of detection are found without the name of their experiment, in their order.
    """
    found: dict[Key, ResultRow] = {}
    ranks = {name: rank for rank, name in enumerate(_EXPERIMENTS)}
    own = [r for r in rows if r.seed == "mean"]
    for r in sorted(own, key=lambda r: ranks.get(r.experiment, len(ranks))):
        experiment = None if r.experiment in ranks else r.experiment
        setting = "both" if r.experiment.startswith("controller") else r.setting
        key = (experiment, r.detector, setting, r.dataset, r.split, r.metric, r.against)
        found.setdefault(key, r)
    return found


def _from_row(
    cell: PaperCell, detector: str, split: str, known: Mapping[Key, ResultRow]
) -> Beside | None:
    metric = f"auroc{DIFFERENCE}" if cell.against else cell.metric
    place = (cell.setting, cell.dataset, split)
    key = (cell.experiment, detector, *place, cell.ours or metric, cell.against)
    row = known.get(key)
    if row is None:
        return None
    ends = {}
    if cell.metric in OF_AN_INTERVAL:
        value = getattr(row, cell.metric)
    else:
        scale = 100 if cell.metric in _IN_HUNDREDTHS else 1
        value, low, high = (
            None if x is None else scale * x
            for x in (row.value, row.ci_low, row.ci_high)
        )
        ends = {"low": low, "high": high}
    told = {"n": row.n, "n_failed": row.n_failed, "split": split, "detector": detector}
    return Beside(paper=cell, value=value, reason=row.reason, **told, **ends)


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
    accuracy: Sequence[Mapping[str, Any]] = (),
) -> list[Beside]:
    """Return the numbers of the paper that a run has too, in their order.

    Args:
      cells: of the paper.
      rows: of the run; see `summaries` for what some of the anatomy's are made to be.
      accuracy: as `extract.label.labels.count_correct` gives it.
    """
    known, made = by_key(rows), []
    for cell in cells:
        if not cell.has_counterpart:
            continue
        splits = [cell.split]
        if cell.dataset not in ACROSS_SETS and cell.split in _ELSEWHERE:
            splits.append(_ELSEWHERE[cell.split])
        names = [name for name in (cell.detector, cell.instead) if name is not None]
        found = (
            _counted(cell, split, accuracy)
            if name == "backbone"
            else _from_row(cell, name, split, known)
            for split in splits
            for name in names
        )
        made += [one for one in found if one is not None][:1]
    return made

"""Does a run agree with the paper on what is larger? Differences, with our interval.

A number of the paper has a sign where it is a difference or a correlation, and where
the paper compares it with another of its table. Ours has one where a 95 % interval
excludes zero: that of the paired difference where the run has it, else what the two
intervals leave for the difference. They are of the same answers, so this is more
cautious than a paired interval would be.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from beatrice.benchmarks.paper.cells import (
    Beside,
    Key,
    Order,
    PaperCell,
    beside,
    by_key,
)
from beatrice.benchmarks.paper.summaries import summaries
from beatrice.benchmarks.results.tables import number
from beatrice.extract.run.rows import DIFFERENCE, ResultRow

Verdict = Literal["agrees", "differs", "cannot be told", "no interval"]
_TO_ZERO = ("spearman", "points")
_PAIRED = ("anatomy_fusion", None)
_WORDS: Mapping[Verdict, str] = {
    "agrees": "as in the paper",
    "differs": "the other way",
    "cannot be told": "cannot be told",
    "no interval": "without an interval here",
}


def spelled(value: float | None, metric: str) -> str:
    """Spell a value as the paper prints its metric; None is –."""
    if value is None:
        return "–"
    if metric in ("n", "count", "layer"):
        return f"{value:,.0f}"
    if metric in ("accuracy_percent", "share_percent"):
        return f"{value:.1f}"
    if metric == "points":
        return f"{value:+.1f}"
    if metric == "p_value":
        return f"{value:.2g}".replace("0.", ".")
    return number(value, metric)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """What is larger in the paper, and in a run.

    Attributes:
      first: the number, and the run's.
      second: what it is compared with; None is zero.
      order: of the paper.
      value: the run's difference.
      low: lower end of its interval; None where there is none.
      high: upper end.
      is_paired: whether the interval is of a difference on the same questions.
    """

    first: Beside
    second: Beside | None
    order: Order
    value: float
    low: float | None
    high: float | None
    is_paired: bool

    @property
    def verdict(self) -> Verdict:
        """Whether the run agrees, as far as its interval tells."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.order == "not above":
            return "differs" if self.low > 0 else "agrees"
        side = "above" if self.low > 0 else "below" if self.high < 0 else None
        if side is None:
            return "cannot be told"
        return "agrees" if side == self.order else "differs"

    @property
    def what(self) -> str:
        """Name what is compared."""
        cell = self.first.paper
        return f"{cell.row} ({cell.column}; {cell.backbone})"

    @property
    def paper(self) -> str:
        """Spell what the paper has."""
        cell = self.first.paper
        to = "zero" if self.second is None else self.second.paper.row
        if cell.value is None:
            return f"{self.order} {to}"
        told = ("≥ " if cell.below else "") + spelled(cell.value, cell.metric)
        if self.second is None:
            return told
        return f"{told} beside {spelled(self.second.paper.value, cell.metric)} ({to})"

    @property
    def here(self) -> str:
        """Spell what the run has, with its intervals."""
        metric = self.first.paper.metric
        told = _with_ends(self.first, metric)
        if self.second is not None:
            told += f" beside {_with_ends(self.second, metric)}"
        if self.is_paired and self.second is not None:
            change, low, high = (
                number(x or 0.0, DIFFERENCE) for x in (self.value, self.low, self.high)
            )
            told += f", difference {change} [{low}, {high}]"
        return told

    @property
    def verdict_in_words(self) -> str:
        """Spell the verdict, and why it cannot be told."""
        told = _WORDS[self.verdict]
        if self.verdict == "cannot be told":
            is_one = self.is_paired or self.second is None
            told += ": our interval covers zero" if is_one else ": intervals overlap"
        return told

    @property
    def sentence(self) -> str:
        """Say it in a sentence."""
        verdict = self.verdict_in_words
        return f"{self.what}: {self.paper} in the paper, {self.here} here; {verdict}."


def _with_ends(one: Beside, metric: str) -> str:
    value = spelled(one.value, metric)
    if one.low is None or one.high is None:
        return value
    return f"{value} [{spelled(one.low, metric)}, {spelled(one.high, metric)}]"


def _order(cell: PaperCell, than: PaperCell | None) -> Order | None:
    """Return what the paper says; None if nothing, or that both are equal."""
    if cell.sign is not None or cell.value is None:
        return cell.sign
    if than is None:
        is_one = cell.metric.endswith(DIFFERENCE) or cell.metric in _TO_ZERO
        change = cell.value if is_one else 0.0
    else:
        change = cell.value - (than.value or 0.0)
    return None if not change else "above" if change > 0 else "below"


def _paired(
    first: Beside, second: Beside, known: Mapping[Key, ResultRow]
) -> tuple[float, float, float] | None:
    """Return a paired difference of AUROC and its interval, whichever way it lies."""
    cell = first.paper
    if cell.metric != "auroc":
        return None
    for sign, one, other in ((1, first, second), (-1, second, first)):
        place = (cell.setting, cell.dataset, one.split)
        metric = f"auroc{DIFFERENCE}"
        for experiment in _PAIRED:
            row = known.get((experiment, one.detector, *place, metric, other.detector))
            if row is not None and row.value is not None and row.ci_low is not None:
                low, high = sorted((sign * row.ci_low, sign * (row.ci_high or 0.0)))
                return sign * row.value, low, high
    return None


def _sign(
    first: Beside, second: Beside | None, known: Mapping[Key, ResultRow]
) -> Sign | None:
    """Compare; None where nothing is said, or a number of ours is undefined."""
    order = _order(first.paper, None if second is None else second.paper)
    if order is None or first.value is None:
        return None
    fields = {"first": first, "second": second, "order": order}
    if second is None:
        ends = {"low": first.low, "high": first.high}
        return Sign(value=first.value, is_paired=True, **ends, **fields)
    if second.value is None:
        return None
    if (found := _paired(first, second, known)) is not None:
        value, low, high = found
        return Sign(value=value, low=low, high=high, is_paired=True, **fields)
    value, ends = first.value - second.value, {"low": None, "high": None}
    if first.low is not None and first.high is not None:
        # What has no interval is no measurement: an even share.
        low, high = (
            second.value if x is None else x for x in (second.low, second.high)
        )
        ends = {"low": first.low - high, "high": first.high - low}
    return Sign(value=value, is_paired=False, **ends, **fields)


def signs(found: Sequence[Beside], rows: Sequence[ResultRow]) -> list[Sign]:
    """Return every comparison of the paper that a run can be asked about, in order.

    Args:
      found: numbers of the paper and the run's.
      rows: of the run; paired differences are looked up there.
    """
    known, made = by_key(rows), []
    by_place = {
        (
            b.paper.table,
            b.paper.backbone,
            b.paper.row,
            b.paper.column,
            b.paper.metric,
        ): b
        for b in found
    }
    for first in found:
        cell, second = first.paper, None
        if cell.than is not None:
            place = (cell.table, cell.backbone, cell.than, cell.column, cell.metric)
            if (second := by_place.get(place)) is None or second.split != first.split:
                continue
        one = _sign(first, second, known)
        made += [] if one is None else [one]
    return made


def signs_by_table(
    cells: Sequence[PaperCell], rows: Sequence[ResultRow]
) -> dict[str, list[Sign]]:
    """Return the comparisons that a run's rows can be asked about, by table.

    Args:
      cells: of the paper.
      rows: of the run.
    """
    rows = [*rows, *summaries(rows)]
    by_table: dict[str, list[Sign]] = {}
    for sign in signs(beside(cells, rows), rows):
        by_table.setdefault(sign.first.paper.table, []).append(sign)
    return by_table


def in_a_sentence(found: Iterable[Sign]) -> str:
    """Count the verdicts and name what differs; empty where nothing is compared."""
    own = list(found)
    if not own:
        return ""
    counts = {v: sum(sign.verdict == v for sign in own) for v in _WORDS}
    told = ", ".join(f"{n} {_WORDS[v]}" for v, n in counts.items() if n)
    differing = dict.fromkeys(
        f"{s.first.paper.row} ({s.first.paper.column})"
        for s in own
        if s.verdict == "differs"
    )
    named = f" The other way: {'; '.join(differing)}." if differing else ""
    plural = "" if len(own) == 1 else "s"
    return f"Beside the paper, of {len(own)} comparison{plural}: {told}.{named}"

"""Every number of an experiment is one row; tables and figures only read rows.

A row either holds a finite value or says why there is none: a number that could
not be computed (one class only, say) is `null` with its reason, never NaN, 0.5 or
a missing line.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from beatrice.extract.records import Record, read_records
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_text_atomic

N_DECIMALS = 6

MACRO = "macro"  # what stands for a set in the mean over sets, each counted once

DIFFERENCE = "_difference"  # ends the metric of a row that compares two methods

# Of these a value lies in [0, 1], and a difference in [-1, 1].
SHARES = ("auroc", "auprc", "em", "f1", "brier", "ece", "cut", "unmatched", "disputed")
RowSetting = Literal["closed_book", "with_context", "both"]


class ResultRow(Record, frozen=True, kw_only=True):
    """One number, with what it was measured on.

    Attributes:
      experiment: "detection", "controller", "span_decision", ...
      detector: what was measured, e.g. "champion" or "encoder:HP".
      setting: "both" where one number needs both passes, as a controller does.
      metric: "auroc", "auprc" (an incorrect answer is the positive class), "em", ...
      value: None where it is undefined; then `reason` says why.
      ci_low: lower end of the 95 % interval, or None if there is none.
      ci_high: upper end of the 95 % interval, or None if there is none.
      n: examples the value is computed on.
      n_failed: examples that should have been there and have no label or no score.
      seed: training seed as a string, or "mean" over the seeds.
      label_rule: by which rule the answers were labelled, in words; `publish` fills it
        in, and an unpublished row has None.
      against: of a difference, what was measured on the same questions and taken away
        from the detector's value; the interval is that of a paired bootstrap.
      p_value: of a difference, two-sided; see `jaxprobe.metrics.two_sided_p`.
    """

    experiment: str
    detector: str
    setting: RowSetting
    dataset: str
    split: str
    metric: str
    value: float | None
    ci_low: float | None = None
    ci_high: float | None = None
    n: int
    n_failed: int = 0
    seed: str = "mean"
    reason: str | None = None
    label_rule: str | None = None
    against: str | None = None
    p_value: float | None = None

    def __post_init__(self) -> None:
        """Refuse a row that hides something.

        Raises:
          ValueError: a number is not finite or out of its range, an undefined value
            has no reason, an interval is reversed or has one end, or a seed or count
            is not one.
        """
        numbers = (self.value, self.ci_low, self.ci_high, self.p_value)
        if any(x is not None and not math.isfinite(x) for x in numbers):
            wrong = (
                f"{numbers} is not finite; write an undefined value as None with its "
                "reason"
            )
        elif self.value is None and not self.reason:
            wrong = "a value of None needs a reason"
        elif (self.ci_low is None) != (self.ci_high is None):
            wrong = "an interval needs both ends or neither"
        elif self.ci_low is not None and self.ci_low > self.ci_high:
            wrong = f"its interval is reversed: {self.ci_low} to {self.ci_high}"
        elif self.metric.removesuffix(DIFFERENCE) in SHARES and any(
            x is not None and abs(x) > 1 for x in numbers
        ):
            wrong = f"{numbers} is no share, expected numbers up to 1"
        elif self.n < 0 or self.n_failed < 0:
            wrong = "a count cannot be negative"
        elif self.seed != "mean" and not self.seed.isdecimal():
            wrong = f"seed is {self.seed!r}, expected 'mean' or '0', '1', ..."
        elif (self.against is not None) != self.metric.endswith(DIFFERENCE):
            wrong = "a difference says against what, and nothing else does"
        else:
            return
        raise ValueError(f"{self.where}: {wrong}")

    @property
    def where(self) -> str:
        """Name the row in words, for messages."""
        names = (self.experiment, self.detector, self.setting, self.dataset, self.split)
        against = () if self.against is None else (f"against {self.against}",)
        return " / ".join((*names, self.metric, *against, f"seed {self.seed}"))


def write_rows(rows: Iterable[ResultRow]) -> str:
    """Return the rows as JSON lines, floats rounded to six decimals."""
    lines = []
    for row in rows:
        fields = msgspec.structs.asdict(row)
        for name in ("value", "ci_low", "ci_high", "p_value"):
            if fields[name] is not None:
                fields[name] = round(float(fields[name]), N_DECIMALS)
        lines.append(json.dumps(fields, ensure_ascii=True, allow_nan=False) + "\n")
    return "".join(lines)


def read_rows(path: Path) -> Iterator[ResultRow]:
    """Yield the rows of a JSON-lines file.

    Raises:
      ValueError: a line is no such row; the message names the file and the line.
    """
    yield from read_records(path, ResultRow)


@dataclasses.dataclass(frozen=True)
class ResultTable:
    """Rows that can be looked up by the values of their fields; keeps their order."""

    rows: Sequence[ResultRow]

    def select(self, **fields: Any) -> tuple[ResultRow, ...]:
        """Return the rows whose fields have these values, in their order.

        Raises:
          ValueError: a name is no field of a row.
        """
        known = ResultRow.__struct_fields__
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(
                f"a result row has no field {unknown[0]!r}; it has {', '.join(known)}"
            )
        return tuple(
            row
            for row in self.rows
            if all(getattr(row, name) == wanted for name, wanted in fields.items())
        )

    def find(self, **fields: Any) -> ResultRow | None:
        """Return the only row with these values, or None if there is none.

        Raises:
          LookupError: several rows match.
        """
        matches = self.select(**fields)
        if len(matches) > 1:
            raise LookupError(
                f"{len(matches)} rows have {_in_words(fields)}, expected one; the "
                f"first two are ({matches[0].where}) and ({matches[1].where})"
            )
        return matches[0] if matches else None

    def value(self, **fields: Any) -> float | None:
        """Return the value of the only row with these fields; None if undefined.

        Raises:
          LookupError: no row matches, or several do.
        """
        row = self.find(**fields)
        if row is None:
            raise LookupError(
                f"none of {len(self.rows)} rows has {_in_words(fields)}; compute it "
                "first, or ask for what is there"
            )
        return row.value


def _in_words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={wanted!r}" for name, wanted in fields.items())


def rows_file(run: RunDir, stage: str) -> Path:
    """Return where the rows of one stage lie."""
    return run.path / "rows" / f"{stage}.jsonl"


def _stages_with_rows(run: RunDir) -> list[str]:
    """Return their names, `evaluate` before those that add to its sets."""
    files = (run.path / "rows").glob("*.jsonl")
    return sorted((file.stem for file in files), reverse=True)


def published(run: RunDir) -> list[str]:
    """Return the stages whose rows are up to date."""
    return [name for name in _stages_with_rows(run) if run.stage_done(name)]


def label_rule(run: RunDir) -> str:
    """Return in words by which rule the run's answers are labelled."""
    record = run.stage_record("label")
    return record.inputs.get("rule", "unknown") if record else "unknown"


def publish(run: RunDir, stage: str, rows: list[ResultRow], progress: Progress) -> None:
    """Write a stage's rows and, from all stages, results.jsonl.

    Every row gets the rule of the run's labels. Rows that are out of date are left out,
    and a line names their stage.
    """
    rule = label_rule(run)
    rows = [msgspec.structs.replace(row, label_rule=rule) for row in rows]
    write_text_atomic(rows_file(run, stage), write_rows(rows))
    gather(run, progress, stage)


def gather(run: RunDir, progress: Progress, stage: str | None = None) -> None:
    """Write results.jsonl from the rows of all stages, the last of their names first.

    Args:
      run: of the stages.
      progress: shows which rows are out of date.
      stage: the one that is writing its rows and has no record of them yet.

    Raises:
      ValueError: the rows of another stage have changed since it wrote them.
    """
    texts = []
    for name in _stages_with_rows(run):
        path, record = rows_file(run, name), run.stage_record(name)
        if name != stage and name in run.stage_records():
            run.hash_inputs(path)  # raises where the rows or their record have changed
        if name == stage or run.stage_done(name):
            texts.append(path.read_text(encoding="utf-8"))
        elif record is not None:
            progress.note(
                f"{name}: its rows are out of date and left out; run "
                f"`beatrice {record.verb}` again"
            )
    write_text_atomic(run.results, "".join(texts))


_MEASURED = ("value", "ci_low", "ci_high", "n", "n_failed", "reason", "p_value")


def read_result_rows(run: RunDir) -> list[ResultRow]:
    """Return every row of the run.

    Raises:
      ValueError: there is no row, a line is none, or two rows give one number twice.
    """
    found = list(read_rows(run.results))
    if not found:
        raise ValueError(f"{run.results} holds no row; evaluate the run first")
    lines: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(found, start=1):
        fields = msgspec.structs.asdict(row).items()
        identity = tuple(value for name, value in fields if name not in _MEASURED)
        if lines.setdefault(identity, number) != number:
            raise ValueError(
                f"{run.results}, lines {lines[identity]} and {number}: two rows for "
                f"({row.where}), expected one; run the stages that write them again"
            )
    return found

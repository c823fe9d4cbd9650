"""Every number of an experiment is one row; tables and figures only read rows.

A row has either a finite value or a reason for its absence: a number that could not be
computed (one class only, say) is `null` with a reason, never NaN, 0.5 or a missing row.
"""

import json
import math
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from beatrice.extract.records import Record, read_records
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_text_atomic

if TYPE_CHECKING:
    import pandas

N_DECIMALS = 6

MACRO = "macro"  # dataset of a mean over sets, in which every set counts once

# Metrics whose values lie in [0, 1], and differences in [-1, 1].
SHARES = (
    *("auroc", "auprc", "em", "f1", "brier", "ece", "cut", "unmatched", "disputed"),
    *("precision", "coverage", "right"),
)
# The columns of a measurement; the others identify what was measured.
MEASURED = ("value", "ci_low", "ci_high", "n", "n_failed", "reason", "p_value")
RowSetting = Literal["closed_book", "with_context", "both"]


class Subject(NamedTuple):
    """What a row measures: a stable id, and the columns that tell variants apart."""

    detector: str  # stable id, such as "champion", "encoder" or "probe"
    families: str | None = None  # letters of the families that it reads, such as "HPA"
    span: str | None = None  # token span that it leaves out
    layer: int | None = None  # entry of the resid axis (0 is the embedding)
    n_labels: int | None = None  # labelled answers it was trained on, if not all
    source: str | None = None  # set that it was trained on, or backbone that it reads
    kind: str | None = None  # in experiments with several kinds; see the schema

    @classmethod
    def of(cls, name: "Subject | str") -> "Subject":
        """Return a subject, or one made from an id without other columns."""
        return cls(name) if isinstance(name, str) else name


def encoder(families: str) -> Subject:
    """Return the subject of an encoder, by the letters of its families."""
    return Subject("encoder", families)


class ResultRow(Record, frozen=True, kw_only=True):
    """One number, with its measurement; docs/results/schema.md has all columns."""

    experiment: str  # "detection", "controller", "paired", ...
    detector: str  # stable id of what was measured, e.g. "champion" or "encoder"
    setting: RowSetting  # "both" if the number needs both, such as a controller's
    dataset: str
    split: str
    metric: str  # "auroc", "auprc" (an incorrect answer is the positive), "em", ...
    value: float | None  # None if it is undefined; `reason` then says why
    ci_low: float | None = None  # lower end of the 95 % interval, if any
    ci_high: float | None = None  # upper end of the 95 % interval, if any
    n: int  # examples the value is computed on
    n_failed: int = 0  # examples left out for lack of a label or a score
    seed: str = "mean"  # training seed as a string, or "mean" over the seeds
    reason: str | None = None
    label_rule: str | None = None  # of the answers, in words; `publish` fills it in
    # Id of what was measured on the same questions and subtracted from the detector's
    # value. The row is then a difference with a paired bootstrap interval.
    against: str | None = None
    against_families: str | None = None  # letters of the families that `against` reads
    p_value: float | None = None  # two-sided; see `jaxprobe.metrics.two_sided_p`
    # For the columns of a `Subject`, see there.
    families: str | None = None
    family: str | None = None  # letter of the family measured, or replaced by means
    span: str | None = None
    layer: int | None = None
    head: int | None = None  # attention head, from 0
    position: int | None = None  # token of the answer, from 1
    bin: int | None = None  # part of a ranking, from 1 (the best)
    # Centre of a cell of the boundary band: logit without the family.
    bin_x: float | None = None
    bin_y: float | None = None  # likewise: logits that the family adds
    bin_width: float | None = None  # width of those cells, in logits
    n_labels: int | None = None
    n_closed_book: int | None = None  # closed-book encoders in a set of three
    source: str | None = None
    kind: str | None = None
    wanted: float | None = None  # precision that was requested for a decision

    def __post_init__(self) -> None:
        """Check that the row's columns are complete and agree with each other."""
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
        elif (self.ci_low or 0.0) > (self.ci_high or 0.0):
            wrong = f"its interval is reversed: {self.ci_low} to {self.ci_high}"
        elif self.metric in SHARES and any(abs(x or 0.0) > 1 for x in numbers):
            wrong = f"{numbers} is not a share: expected numbers up to 1"
        elif self.n < 0 or self.n_failed < 0:
            wrong = "a count cannot be negative"
        elif self.seed != "mean" and not self.seed.isdecimal():
            wrong = f"seed is {self.seed!r}, expected 'mean' or '0', '1', ..."
        elif self.against is None and (self.against_families or self.p_value):
            wrong = "against_families and p_value need a difference; give `against`"
        else:
            return
        raise ValueError(f"{self.where}: {wrong}")

    @property
    def subject(self) -> Subject:
        """The subject that was measured."""
        return Subject(*(getattr(self, name) for name in Subject._fields))

    @property
    def rival(self) -> Subject | None:
        """The subject that was subtracted, if the row is a difference."""
        if self.against is None:
            return None
        return Subject(self.against, self.against_families)

    @property
    def where(self) -> str:
        """The columns that identify the row, for messages."""
        unnamed = (*MEASURED, "label_rule")
        fields = msgspec.structs.asdict(self).items()
        named = [(n, x) for n, x in fields if n not in unnamed and x is not None]
        return ", ".join(f"{name}={value}" for name, value in named)


_HINTS = typing.get_type_hints(ResultRow)
_FLOATS = {name for name, hint in _HINTS.items() if float in get_args(hint)}


def write_rows(rows: Iterable[ResultRow]) -> str:
    """Return rows as JSON lines: floats with six decimals, without absent columns."""
    lines = []
    for row in rows:
        fields: dict[str, Any] = {"value": None}
        for name, value in msgspec.structs.asdict(row).items():
            if value is not None:
                is_float = name in _FLOATS
                fields[name] = round(float(value), N_DECIMALS) if is_float else value
        lines.append(json.dumps(fields, allow_nan=False) + "\n")
    return "".join(lines)


def read_rows(path: Path) -> Iterator[ResultRow]:
    """Yield the rows of a JSON-lines file."""
    return read_records(path, ResultRow)


def as_frame(rows: Iterable[ResultRow]) -> "pandas.DataFrame":
    """Return rows as a table of typed, nullable columns.

    Text is `string`, whole numbers are `Int64` and others `Float64`.
    """
    import pandas  # takes half a second, and only tables need it

    rows = list(rows)
    columns = {}
    for name, hint in _HINTS.items():
        kinds = get_args(hint) or (hint,)
        dtype = "Int64" if int in kinds else "Float64" if float in kinds else "string"
        columns[name] = pandas.array([getattr(r, name) for r in rows], dtype=dtype)
    return pandas.DataFrame(columns)


def rows_file(run: RunDir, stage: str) -> Path:
    """Return the path of one stage's rows."""
    return run.path / "rows" / f"{stage}.jsonl"


def _stages_with_rows(run: RunDir) -> list[str]:
    """Return the stages with rows, `evaluate` before those that add to its sets."""
    files = (run.path / "rows").glob("*.jsonl")
    return sorted((file.stem for file in files), reverse=True)


def published(run: RunDir) -> list[str]:
    """Return the stages whose rows are up to date."""
    return [name for name in _stages_with_rows(run) if run.stage_done(name)]


def label_rule(run: RunDir) -> str:
    """Return in words the rule by which the run's answers are labelled."""
    record = run.stage_record("label")
    return record.inputs.get("rule", "unknown") if record else "unknown"


def publish(
    run: RunDir,
    stage: str,
    rows: list[ResultRow],
    progress: Progress,
    rule: str | None = None,
) -> None:
    """Write a stage's rows and, from all stages, results.jsonl.

    Every row gets the rule of its labels, by default the run's. Rows that are out of
    date are left out of results.jsonl, and a note names their stage.
    """
    rule = rule or label_rule(run)
    rows = [msgspec.structs.replace(row, label_rule=rule) for row in rows]
    write_text_atomic(rows_file(run, stage), write_rows(rows))
    gather(run, progress, stage)


def gather(run: RunDir, progress: Progress, stage: str | None = None) -> None:
    """Write results.jsonl from the rows of all stages, in reverse order of their names.

    `stage` is the one that is writing its rows and has no record of them yet.
    """
    texts = []
    for name in _stages_with_rows(run):
        path, record = rows_file(run, name), run.stage_record(name)
        if name != stage and name in run.stage_records():
            run.hash_inputs(path)  # raises if the rows or their record have changed
        if name == stage or run.stage_done(name):
            texts.append(path.read_text(encoding="utf-8"))
        elif record is not None:
            progress.note(
                f"{name}: its rows are out of date and were left out; run "
                f"`beatrice {record.verb}` again"
            )
    write_text_atomic(run.results, "".join(texts))


def check_evaluated(run: RunDir) -> None:
    """Check that a run's rows are those of its current detector."""
    if gap := run.stage_gap("evaluate"):
        raise ValueError(
            f"the rows of {run.path} are out of date ({gap}); run `beatrice evaluate` "
            "first"
        )


def read_result_rows(run: RunDir) -> list[ResultRow]:
    """Return all rows of a run, after checking that there are no duplicates."""
    rows = list(read_rows(run.results))
    if not rows:
        raise ValueError(f"{run.results} holds no rows; evaluate the run first")
    lines: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, start=1):
        fields = msgspec.structs.asdict(row).items()
        identity = tuple(value for name, value in fields if name not in MEASURED)
        if lines.setdefault(identity, number) != number:
            raise ValueError(
                f"{run.results}, lines {lines[identity]} and {number}: two rows for "
                f"({row.where}), expected one; run the stages that write them again"
            )
    return rows

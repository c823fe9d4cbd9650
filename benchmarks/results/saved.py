"""What `evaluate`, `control` and `anatomy` leave for the report, read by type."""

from pathlib import Path
from typing import Any

import msgspec

from beatrice.extract.records import Record, Setting, Share
from beatrice.extract.run.files import read_json
from beatrice.extract.run.rows import ResultRow, read_rows
from beatrice.selection.anatomy import Study

STUDIES = "anatomy/cases.json"  # in the run
N_SHOWN = 3  # answers of each kind of each set


class Bin(Record, frozen=True, kw_only=True):
    """One bin of a reliability curve that holds `n` examples."""

    lower: Share
    upper: Share
    mean_p: Share
    accuracy: Share
    n: int


class Curves(Record, frozen=True, kw_only=True):
    """A setting's reliability, of the head's own probability and the calibrated one."""

    raw: tuple[Bin, ...]
    calibrated: tuple[Bin, ...]
    brier_raw: Share
    brier_calibrated: Share
    ece_raw: Share
    ece_calibrated: Share


class Point(Record, frozen=True, kw_only=True):
    """Quality and cost of PGIR on one set at one budget; "pgir" is the paper's."""

    controller: str
    dataset: str
    budget: int
    em: Share
    f1: Share
    generations: float


class Token(Record, frozen=True, kw_only=True):
    """A token of a case; the numbers are of the position that emitted it."""

    text: str
    span: str
    p: float
    surprisal: float
    entropy: float
    margin: float


class ShownDraft(Record, frozen=True, kw_only=True):
    """A draft of a case, with the passages that it was given."""

    setting: Setting
    answer: str
    p_correct: Share
    correct: bool
    passages: tuple[str, ...]
    tokens: tuple[Token, ...]


class Case(Record, frozen=True, kw_only=True):
    """A question of the controller's run, and what was made of it."""

    dataset: str
    question: str
    golds: tuple[str, ...]
    action: str
    verdict: str
    drafts: tuple[ShownDraft, ...]


class ShownAnswer(Record, frozen=True, kw_only=True):
    """An answer of a set; `golds` are the first of `n_golds`."""

    id: str
    question: str
    golds: tuple[str, ...]
    n_golds: int
    draft: ShownDraft


class ShownKind(Record, frozen=True, kw_only=True):
    """Some of the `n` answers of one kind, see `benchmarks.results.shown.KINDS`."""

    name: str
    n: int
    answers: tuple[ShownAnswer, ...]


class ShownSet(Record, frozen=True, kw_only=True):
    """What is shown of the `n` answers of a set; trusted from P = `threshold`."""

    setting: Setting
    dataset: str
    split: str
    n: int
    threshold: Share
    kinds: tuple[ShownKind, ...]


class Control(Record, frozen=True, kw_only=True):
    """PGIR's policy, what it gives at each budget, and cases."""

    tau: Share
    budget: int
    cap: float
    frontier: tuple[Point, ...]
    cases: tuple[Case, ...]


def read_control(file: Path) -> dict[str, Any]:
    """Return what `control` found, as `ReportData` has it.

    Raises:
      ValueError: it is missing, or not as it was written.
    """
    return msgspec.to_builtins(read_json(file, Control, "run `beatrice control` again"))


def read_seconds(file: Path) -> list[ResultRow]:
    """Return what a question takes each controller, on the machine it was run on.

    Not among the rows of results.jsonl, which are the same wherever they are made.
    """
    return list(read_rows(file)) if file.exists() else []


def read_reliability(file: Path) -> dict[str, Any]:
    """Return the reliability of each setting, as `ReportData` has it.

    Raises:
      ValueError: it is missing, or not as it was written.
    """
    again = "run `beatrice evaluate` again"
    found = read_json(file, dict[Setting, Curves], again)
    return msgspec.to_builtins(found)


def read_shown(file: Path) -> list[dict[str, Any]]:
    """Return the answers to look at, as `ReportData` has them.

    Raises:
      ValueError: they are missing, or not as they were written.
    """
    again = "run `beatrice evaluate` again"
    found = read_json(file, tuple[ShownSet, ...], again)
    return msgspec.to_builtins(list(found))


def read_studies(file: Path) -> list[dict[str, Any]]:
    """Return the cases that `anatomy` found, as `ReportData` has them.

    Raises:
      ValueError: they are missing, or not as they were written.
    """
    again = "run `beatrice anatomy` again"
    found = read_json(file, tuple[Study, ...], again)
    return msgspec.to_builtins(list(found))

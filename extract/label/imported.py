"""Labels that a person brings, for answers whose truth is known already."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from extract.label.stage import answered_questions, label_inputs, note_shares
from extract.label.verdicts import text_key
from extract.records import (
    Answer,
    Example,
    Label,
    Record,
    Setting,
    Variant,
    from_json,
    write_lines,
)
from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.files import sha256_file, write_text_atomic
from extract.run.stages import once


class JudgedAnswer(Record, frozen=True, kw_only=True):
    """One line of a person's file.

    Attributes:
      question: in the words of the run; case, marks and articles do not matter.
      answer: that was judged, as the model gave it; outer white space does not matter.
      label: whether it is right.
      setting: of the answer; None means whichever gave this answer.
      variant: the same.
    """

    question: str
    answer: str
    label: bool
    setting: Setting | None = None
    variant: Variant | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """The labels of all answers, and what of the file was of no use.

    Attributes:
      labels: one for every answer; without a verdict where the file has none.
      n_lines: of the file.
      n_other_question: lines whose question the run does not have.
      n_other_answer: lines whose answer the run's model did not give.
    """

    labels: tuple[Label, ...]
    n_lines: int
    n_other_question: int
    n_other_answer: int


def _read(path: Path) -> Iterator[tuple[str, JudgedAnswer | Label]]:
    """Yield lines with their places; a line of a run's labels.jsonl is read too."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                is_ours = "example_id" in json.loads(line)
            except (ValueError, TypeError, RecursionError):
                is_ours = False  # the reader below says what is wrong
            yield where, from_json(Label if is_ours else JudgedAnswer, line, where)


def _fits(
    one: JudgedAnswer | Label, pairs: Sequence[tuple[Example, Answer]]
) -> list[Answer]:
    """Return which answers to its question a line judges."""
    if isinstance(one, Label):
        return [answer for _, answer in pairs if answer.key == one.key]
    return [
        answer
        for _, answer in pairs
        if answer.text.strip() == one.answer.strip()
        and one.setting in (None, answer.setting)
        and one.variant in (None, answer.variant)
    ]


def import_labels(path: Path, pairs: Sequence[tuple[Example, Answer]]) -> Imported:
    """Give every answer the label that a file has for it.

    A label is about a text: it holds for an answer only if that is the very answer
    that was judged. What the file does not judge stays without a label, and is left out
    of training and tests as what judges disagree on.

    Args:
      path: JSON lines, each an `JudgedAnswer`, or a `Label` as in a run's
        labels.jsonl.
      pairs: all answers of a run, with their questions.

    Raises:
      ValueError: a line is neither, two lines disagree, or none fits an answer.
    """
    by_text: dict[bytes, list[tuple[Example, Answer]]] = {}
    by_id: dict[str, list[tuple[Example, Answer]]] = {}
    for example, answer in pairs:
        by_text.setdefault(text_key(example.question), []).append((example, answer))
        by_id.setdefault(example.id, []).append((example, answer))
    found: dict[tuple[str, str, str], tuple[bool, str]] = {}
    n_lines = n_other_question = n_other_answer = 0
    for where, one in _read(path):
        n_lines += 1
        is_ours = isinstance(one, Label)
        asked = by_id.get(one.example_id) if is_ours else None
        if not is_ours:
            asked = by_text.get(text_key(one.question))
        fitting = _fits(one, asked or ())
        n_other_question += not asked
        n_other_answer += bool(asked) and not fitting
        for answer in fitting if one.label is not None else ():
            label, first = found.setdefault(answer.key, (one.label, where))
            if label != one.label:
                raise ValueError(
                    f"{where} calls the answer {answer.text[:60]!r} to question "
                    f"{answer.example_id!r} {_WORDS[one.label]}, {first} calls it "
                    f"{_WORDS[label]}; leave one of the two out"
                )
    if not found:
        raise ValueError(
            f"{path}: no line of {n_lines} labels an answer of this run "
            f"({n_other_question} are about other questions, {n_other_answer} about "
            "other answers than its model gave)"
        )
    reason = f"imported from {path.name}"
    return Imported(
        labels=tuple(_label(answer, found, reason) for _, answer in pairs),
        n_lines=n_lines,
        n_other_question=n_other_question,
        n_other_answer=n_other_answer,
    )


_WORDS = {True: "correct", False: "incorrect"}


def _label(
    answer: Answer, found: dict[tuple[str, str, str], tuple[bool, str]], reason: str
) -> Label:
    """Return the label of one answer, which may be none."""
    bare = dict(zip(("example_id", "setting", "variant"), answer.key, strict=True))
    if answer.key not in found:
        return Label(**bare, verdicts=(), label=None, reason=f"not {reason}")
    label, _ = found[answer.key]
    return Label(**bare, verdicts=(_WORDS[label],), label=label, reason=reason)


def label_by_import(run: RunDir, path: Path, progress: Progress) -> None:
    """Label the run's answers by a person's file; writes `labels.jsonl`.

    Raises:
      ValueError: see `import_labels`.
    """

    def work(update: Update) -> None:
        made = import_labels(path, answered_questions(run))
        write_text_atomic(run.labels, write_lines(made.labels))
        progress.note(
            f"label: {made.n_lines} lines of {path}; {made.n_other_question} are about "
            f"other questions, {made.n_other_answer} about other answers than this "
            "run's"
        )
        note_shares(run, made.labels, progress)

    inputs = label_inputs(run) | {
        "imported": sha256_file(path),
        "rule": f"imported from {path.name}",
    }
    once(run, "label", inputs, [run.labels], progress, work)

"""Labels of answers: by comparison with golds, by a judge, or from a person's file."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Label,
    Record,
    Setting,
    Split,
    Variant,
    from_json,
    normalise,
    text_key,
)
from beatrice.extract.run.console import Update
from beatrice.extract.run.directory import Preset

Match = Literal["exact", "containment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """The run's section `label`: how an answer is compared with golds, unjudged."""

    match: Match = "exact"  # or "containment": a gold somewhere in the answer will do


LABEL_PRESETS: dict[Preset, LabelConfig] = dict.fromkeys(
    get_args(Preset), LabelConfig()
)
RULES: dict[Match, str] = {"exact": "exact match", "containment": "containment"}


_CLOSED = ("yes", "no", "noanswer")


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the normalised answer is one of the normalised golds."""
    return normalise(answer) in {normalise(gold) for gold in golds}


def contains_gold(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the normalised answer is a gold, or has one in it.

    Whole words, unlike FlashRAG's "acc", by which "no" is in "unknown" and "1" in "10".
    A gold of which nothing is left, as of "The", is in no answer.
    """
    text = f" {normalise(answer)} "
    found = (normalise(gold) for gold in golds)
    return exact_match(answer, golds) or any(g and f" {g} " in text for g in found)


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the best token F1 against any gold, after normalising both.

    As in HotpotQA's script and FlashRAG: yes, no and noanswer have nothing in common
    with longer texts, and two texts of which nothing is left score 0.
    """
    return max(_pair_f1(normalise(answer), normalise(gold)) for gold in golds)


def _pair_f1(answer: str, gold: str) -> float:
    if answer != gold and (answer in _CLOSED or gold in _CLOSED):
        return 0.0
    words, wanted = answer.split(), gold.split()
    common = sum((collections.Counter(words) & collections.Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


# A judge of labels: True, False, or None where it cannot decide.
Judge = Callable[[Example, Answer], bool | None]
RecordT = TypeVar("RecordT", bound=Record)
_WORDS = {True: "correct", False: "incorrect"}


def pair_answers(
    answers: Iterable[Answer], examples: Iterable[Example]
) -> list[tuple[Example, Answer]]:
    """Return every answer with its question, in the order of the answers.

    Raises:
      ValueError: something else than answers or questions is given, or the question of
        an answer is missing.
    """
    by_id = {example.id: example for example in _checked(examples, Example)}
    answers = _checked(answers, Answer)
    unknown = next((a.example_id for a in answers if a.example_id not in by_id), None)
    if unknown is not None:
        raise ValueError(
            f"an answer is to the question {unknown!r}, which is not among the "
            f"{len(by_id)} questions given"
        )
    return [(by_id[answer.example_id], answer) for answer in answers]


def _checked(records: Iterable[RecordT], kind: type[RecordT]) -> list[RecordT]:
    """Return records as a list; anything else is a ValueError that names it."""
    expected = f"expected a list of {kind.__name__}"
    if isinstance(records, kind | str | bytes | dict) or hasattr(records, "columns"):
        raise ValueError(f"{expected}, found {type(records).__name__}")
    try:
        items = list(records)
    except TypeError:
        raise ValueError(f"{expected}, found {type(records).__name__}") from None
    for place, item in enumerate(items):
        if not isinstance(item, kind):
            raise ValueError(
                f"{expected}, found {type(item).__name__} at place {place}"
            )
    return items


def label_by_match(
    answers: Iterable[Answer], examples: Iterable[Example], rule: Match = "exact"
) -> list[Label]:
    """Return the labels by comparison with the golds.

    It knows no paraphrase: it suits sets whose golds list every accepted wording.

    Args:
      answers: in any order, which the labels keep.
      examples: the questions of all of them.
      rule: the answer is a gold, or has one in it as whole words; both normalised.

    Raises:
      ValueError: see `pair_answers`; or there is no such rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, found {rule!r}")
    is_right = {"exact": exact_match, "containment": contains_gold}[rule]
    return [
        _label(answer, is_right(answer.text, example.golds), "unanimous of 1")
        for example, answer in pair_answers(answers, examples)
    ]


def label_with(
    answers: Iterable[Answer],
    examples: Iterable[Example],
    judge: Judge,
    *,
    name: str | None = None,
    progress: Update = lambda done, total: None,
) -> list[Label]:
    """Return the labels that a judge in Python gives.

    Args:
      answers: in any order, which the labels keep.
      examples: the questions of all of them.
      judge: called with a question and an answer to it; returns True, False, or None
        where it cannot decide: such an answer is left out of training and tests.
      name: of the judge, for the reasons; by default its own.
      progress: called with answers judged and answers given.

    Raises:
      ValueError: see `pair_answers`; or the judge fails, or returns something else.
    """
    if not callable(judge):
        raise ValueError(
            "judge: expected a function of a question and an answer, found "
            f"{type(judge).__name__}"
        )
    import numpy as np  # here, since whoever reads labels needs none

    name = name or getattr(judge, "__name__", type(judge).__name__)
    pairs, labels = pair_answers(answers, examples), []
    for number, (example, answer) in enumerate(pairs, start=1):
        where = f"the answer {answer.text[:60]!r} to question {example.id!r}"
        try:
            verdict = judge(example, answer)
        # Whatever a person's judge raises is a mistake in that judge.
        except Exception as error:
            raise ValueError(
                f"{name} ends in {type(error).__name__} on {where}: {error}"
            ) from error
        if verdict is not None and not isinstance(verdict, bool | np.bool_):
            raise ValueError(
                f"{name}: expected True, False or None of {where}, found {verdict!r}"
            )
        verdict = None if verdict is None else bool(verdict)
        reason = f"by {name}" if verdict is not None else f"{name} cannot decide"
        labels.append(_label(answer, verdict, reason))
        progress(number, len(pairs))
    return labels


def _label(answer: Answer, verdict: bool | None, reason: str) -> Label:
    """Return the label of one answer, which may be None."""
    return Label(
        example_id=answer.example_id,
        setting=answer.setting,
        variant=answer.variant,
        verdicts=() if verdict is None else (_WORDS[verdict],),
        label=verdict,
        reason=reason,
    )


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
                is_label = "example_id" in json.loads(line)
            except (ValueError, TypeError, RecursionError):
                is_label = False  # the reader below says what is wrong
            yield where, from_json(Label if is_label else JudgedAnswer, line, where)


def _fitting(row: JudgedAnswer | Label, answers: Sequence[Answer]) -> list[Answer]:
    """Return which answers to its question a line judges."""
    if isinstance(row, Label):
        return [answer for answer in answers if answer.key == row.key]
    return [
        answer
        for answer in answers
        if answer.text.strip() == row.answer.strip()
        and row.setting in (None, answer.setting)
        and row.variant in (None, answer.variant)
    ]


def import_labels(
    path: Path, answers: Iterable[Answer], examples: Iterable[Example]
) -> Imported:
    """Give every answer the label that a file has for it.

    A label is about a text: it holds for an answer only if that is the very answer
    that was judged. What the file does not judge stays without a label, and is left out
    of training and tests as what judges disagree on.

    Args:
      path: JSON lines, each an `JudgedAnswer`, or a `Label` as in a run's
        labels.jsonl.
      answers: all that are to be labelled, in the order of the labels.
      examples: the questions of all of them.

    Raises:
      ValueError: a line is neither, two lines disagree, or none fits an answer; see
        also `pair_answers`.
    """
    pairs = pair_answers(answers, examples)
    by_question: dict[bytes | str, list[Answer]] = {}
    for example, answer in pairs:
        for key in (example.id, text_key(example.question)):
            by_question.setdefault(key, []).append(answer)
    labels: dict[tuple[str, str, str], tuple[bool, str]] = {}
    n_lines = n_other_question = n_other_answer = 0
    for where, row in _read(path):
        n_lines += 1
        key = row.example_id if isinstance(row, Label) else text_key(row.question)
        to_question = by_question.get(key, [])
        fitting = _fitting(row, to_question)
        n_other_question += not to_question
        n_other_answer += bool(to_question) and not fitting
        for answer in fitting if row.label is not None else ():
            label, first = labels.setdefault(answer.key, (row.label, where))
            if label != row.label:
                raise ValueError(
                    f"{where} calls the answer {answer.text[:60]!r} to question "
                    f"{answer.example_id!r} {_WORDS[row.label]}, {first} calls it "
                    f"{_WORDS[label]}; leave one of the two out"
                )
    if not labels:
        raise ValueError(
            f"{path}: no line of {n_lines} labels an answer of this run "
            f"({n_other_question} are about other questions, {n_other_answer} about "
            "other answers than its model gave)"
        )
    reason = f"imported from {path.name}"
    return Imported(
        labels=tuple(
            _label(answer, labels[answer.key][0], reason)
            if answer.key in labels
            else _label(answer, None, f"not {reason}")
            for _, answer in pairs
        ),
        n_lines=n_lines,
        n_other_question=n_other_question,
        n_other_answer=n_other_answer,
    )


_FEW = 10  # validation answers of the rarer class, below which numbers say little


def shares_in_words(
    examples: Sequence[Example], labels: Sequence[Label]
) -> Iterator[str]:
    """Say how many answers are correct, and where one class is rare or alone.

    Args:
      examples: the questions.
      labels: of answers to them.

    Yields:
      A line per setting, and one more for each of its training and validation sets
      that holds one class alone, or too few of one.
    """
    too_few = too_few_answers(count_correct(examples, {x.key: x for x in labels}))
    counts = class_counts(examples, labels)
    for setting in SETTINGS:
        mine = [label for label in labels if label.setting == setting]
        if not mine:
            continue
        n, n_correct = _count(mine)
        share = f" ({100 * n_correct / n:.1f} %)" if n else ""
        dropped = f", {len(mine) - n} without a label" if n < len(mine) else ""
        yield f"{setting}: {n_correct} of {n} answers correct{share}{dropped}"
        for split in ("train", "validation"):
            n, n_correct = counts.get((setting, split), (None, 0))
            if n is None:
                continue
            if n_correct in (0, n):
                yield _one_class(setting, split, n, n_correct)
            elif split == "train" and setting in too_few:
                yield f"{setting}, train: {too_few[setting]}"
            elif split == "validation" and min(n_correct, n - n_correct) < _FEW:
                yield (
                    f"{setting}, validation: {n_correct} correct and {n - n_correct} "
                    "incorrect answers; what is trained or measured on so few says "
                    "little"
                )


def check_both_classes(examples: Sequence[Example], labels: Sequence[Label]) -> None:
    """Check that training and validation answers of every setting hold both classes.

    Raises:
      ValueError: the labelled answers of one are all correct or all incorrect; says
        which, and what may help.
    """
    for (setting, split), (n, n_correct) in class_counts(examples, labels).items():
        if n_correct in (0, n):
            raise ValueError(
                f"{_one_class(setting, split, n, n_correct)}; signals for another use "
                "are read where labels.jsonl is not there"
            )


def class_counts(
    examples: Sequence[Example], labels: Sequence[Label]
) -> dict[tuple[Setting, Split], tuple[int, int]]:
    """Count labelled and correct answers for training and validation, by setting."""
    split_of = {example.id: example.split for example in examples}
    groups: dict[tuple[Setting, Split], list[Label]] = {}
    for label in labels:
        if (split := split_of[label.example_id]) in ("train", "validation"):
            groups.setdefault((label.setting, split), []).append(label)
    return {group: _count(members) for group, members in groups.items()}


def _count(labels: Sequence[Label]) -> tuple[int, int]:
    """Return how many answers have a label, and how many of them are correct."""
    kept = [label.label for label in labels if label.label is not None]
    return len(kept), sum(kept)


def _one_class(setting: Setting, split: Split, n: int, n_correct: int) -> str:
    return (
        f"{setting}, {split}: {n_correct} of {n} labelled answers are correct; with "
        "one class alone no detector can be trained, chosen or calibrated. Look at the "
        "answers; other prompts, more questions, --match containment or a judge may "
        "help"
    )


ENOUGH = 150  # right training answers of a setting, and wrong ones


def too_few_answers(counts: Sequence[Mapping[str, Any]]) -> dict[Setting, str]:
    """Say for which settings a run cannot conclude anything, whatever comes out.

    The paper names no such number. With 150 of one class and 850 of the other, the
    standard error of an AUROC of .75 is .024 (Hanley and McNeil, 1982), about what
    separates detectors in the paper; validation and test have fewer still.

    Args:
      counts: as `count_correct` gives them; the original wording of training counts.

    Returns:
      A sentence with both counts, by setting; nothing for one that has enough.
    """
    found: dict[Setting, str] = {}
    for setting in SETTINGS:
        mine = [
            row
            for row in counts
            if (row["split"], row["setting"]) == ("train", setting)
            and row["variant"] == "original"
        ]
        n_correct = sum(row["n_correct"] for row in mine)
        n_wrong = sum(row["n"] for row in mine) - n_correct
        if mine and min(n_correct, n_wrong) < ENOUGH:
            found[setting] = (
                f"{n_correct} correct and {n_wrong} incorrect training answers; with "
                f"fewer than {ENOUGH} of either this run cannot conclude for this "
                "setting"
            )
    return found


def count_correct(
    examples: Sequence[Example], labels: Mapping[tuple[str, str, str], Label]
) -> list[dict[str, Any]]:
    """Count right answers per dataset, split, setting and variant, in file order."""
    counts: dict[tuple[str, str, str, str], list[int]] = {}
    by_id = {example.id: example for example in examples}
    for label in labels.values():
        if label.example_id not in by_id:
            raise ValueError(
                f"a label is of the question {label.example_id!r}, which is not in "
                "examples.jsonl; run `beatrice label` again"
            )
        example = by_id[label.example_id]
        group = (example.dataset, example.split, label.setting, label.variant)
        tally = counts.setdefault(group, [0, 0])
        tally[0] += label.label is not None
        tally[1] += label.label is True
    names = ("dataset", "split", "setting", "variant")
    return [
        {**dict(zip(names, group, strict=True)), "n": n, "n_correct": n_correct}
        for group, (n, n_correct) in counts.items()
    ]

"""From an answer to a label: verdicts, and how they become one.

A judge returns one verdict per rubric; the label is their unanimous vote, or None.
Exact match is a judge with one rubric, which knows no paraphrase: it suits sets
whose golds list every accepted wording.
"""

import collections
import re
import string
from collections.abc import Sequence
from typing import Literal, Protocol

from extract.records import Answer, Example, Label

Verdict = Literal["correct", "incorrect", "unparsable"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


class Judge(Protocol):
    """Gives the verdicts on one answer, one per rubric."""

    def __call__(self, example: Example, answer: str) -> tuple[Verdict, ...]:
        """Return at least one verdict."""


def normalise(text: str) -> str:
    """Return the text lower-cased, without punctuation, articles or extra space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the normalised answer is one of the normalised golds."""
    return normalise(answer) in {normalise(gold) for gold in golds}


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the best token F1 against any gold, after normalising both."""
    return max(_pair_f1(normalise(answer).split(), normalise(g).split()) for g in golds)


def _pair_f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((collections.Counter(answer) & collections.Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold))


def exact_match_judge(example: Example, answer: str) -> tuple[Verdict, ...]:
    """Judge by normalised exact match over the golds."""
    return ("correct" if exact_match(answer, example.golds) else "incorrect",)


def consensus(verdicts: Sequence[Verdict]) -> tuple[bool | None, str]:
    """Return the unanimous label or None, and the reason in words.

    Raises:
      ValueError: no verdict.
    """
    if not verdicts:
        raise ValueError("a label needs at least one verdict, found none")
    if "unparsable" in verdicts:
        return None, f"{verdicts.count('unparsable')} verdicts were unparsable"
    if len(set(verdicts)) > 1:
        n_correct = verdicts.count("correct")
        return None, f"judges disagree: {n_correct} of {len(verdicts)} say correct"
    return verdicts[0] == "correct", f"unanimous of {len(verdicts)}"


def label_answer(example: Example, answer: Answer, judge: Judge) -> Label:
    """Return the label of one answer."""
    verdicts = judge(example, answer.text)
    label, reason = consensus(verdicts)
    return Label(
        example_id=answer.example_id,
        setting=answer.setting,
        variant=answer.variant,
        verdicts=tuple(verdicts),
        label=label,
        reason=reason,
    )

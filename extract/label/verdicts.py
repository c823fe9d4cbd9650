"""From an answer to a label: verdicts, and how they become one.

A judge returns one verdict per rubric; the label is their unanimous vote, or None. The
paper drops what the rubrics disagree on (appendix A) except on its set with real
retrieval, where the majority decides and every question is kept.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, get_args

from beatrice.extract.records import Answer, Label, normalise
from beatrice.extract.run.directory import Preset

Verdict = Literal["correct", "incorrect", "unparsable"]
Vote = Literal["unanimous", "majority"]
Match = Literal["exact", "containment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """The run's section `label`: how an answer is compared with golds, unjudged."""

    match: Match = "exact"  # or "containment": a gold somewhere in the answer will do


LABEL_PRESETS: dict[Preset, LabelConfig] = dict.fromkeys(
    get_args(Preset), LabelConfig()
)
RULES: dict[Match, str] = {"exact": "exact match", "containment": "containment"}

# Markup that a model may put around its one word, opening and closing. Brackets and
# strike-through are not among them: they can mean "not this".
_PAIRS = (
    *((mark, mark) for mark in ("**", "*", "__", "_", "`", '"', "'")),
    ("\u201c", "\u201d"),
    ("\u2018", "\u2019"),
)
# ASCII, or the Turkish dotless i would be folded into an i.
_WORD = re.compile(r"(in)?correct", re.IGNORECASE | re.ASCII)


def normalise_reply(text: str) -> str:
    """Return the reply without what may surround its one word.

    Taken away: white space, matching pairs of quotes or emphasis, and at most one full
    stop or exclamation mark at the end. A hyphen before the word or a question mark
    behind it stays, since it changes what is said.
    """
    text, n_stops = text.strip(), 0
    while True:
        if n_stops == 0 and text.endswith((".", "!")):
            text, n_stops = text[:-1].rstrip(), 1
            continue
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing):
                text = inner.strip()
                break
        else:
            return text


def parse_verdict(text: str) -> Verdict:
    """Return the verdict of a judge's reply.

    Returns:
      "correct" or "incorrect" if the normalised reply is that one word in any case,
      "unparsable" for everything else.
    """
    word = _WORD.fullmatch(normalise_reply(text))
    if word is None:
        return "unparsable"
    return "incorrect" if word.group(1) else "correct"


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


def consensus(
    verdicts: Sequence[Verdict], vote: Vote = "unanimous"
) -> tuple[bool | None, str]:
    """Return the label that the verdicts agree on or None, and the reason in words.

    Args:
      verdicts: one per rubric.
      vote: "unanimous", or "majority": more than half of all verdicts, an unparsable
        one included in the count.

    Raises:
      ValueError: no verdict, or no such vote.
    """
    if vote not in get_args(Vote):
        raise ValueError(
            f"vote: expected one of {', '.join(get_args(Vote))}, found {vote!r}"
        )
    if not verdicts:
        raise ValueError("a label needs at least one verdict, found none")
    n, n_yes = len(verdicts), verdicts.count("correct")
    unparsable = f"{verdicts.count('unparsable')} verdicts were unparsable"
    if vote == "majority":
        for label, word in ((True, "correct"), (False, "incorrect")):
            if 2 * verdicts.count(word) > n:
                return label, f"majority: {verdicts.count(word)} of {n} say {word}"
        return None, f"no majority: {n_yes} of {n} say correct, {unparsable}"
    if "unparsable" in verdicts:
        return None, unparsable
    if len(set(verdicts)) > 1:
        return None, f"judges disagree: {n_yes} of {n} say correct"
    return verdicts[0] == "correct", f"unanimous of {n}"


def label_by(
    answer: Answer, verdicts: Sequence[Verdict], vote: Vote = "unanimous"
) -> Label:
    """Return the label that verdicts on an answer amount to, see `consensus`."""
    label, reason = consensus(verdicts, vote)
    return Label(
        example_id=answer.example_id,
        setting=answer.setting,
        variant=answer.variant,
        verdicts=tuple(verdicts),
        label=label,
        reason=reason,
    )

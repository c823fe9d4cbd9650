"""The calls that a controller makes, what they cost, and the simplest controllers.

A controller is a generator function over one question: it yields calls and is sent
the value of each, so that it reads like its paper, and whoever runs it may serve the
calls of a thousand questions together (`pgir.controllers.waves`). The cost is counted
from the calls, the same for all; see `Cost`.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

Kind = Literal[
    "search", "answer", "score", "judge", "words", "attended", "spread", "probe"
]
T = TypeVar("T")


class Call(msgspec.Struct, frozen=True):
    """A request of a controller; equal calls have equal values, and are made once.

    Attributes:
      kind: "search" ranks passages for the text; the others take the text as the
        question: "answer" generates greedily, "score" judges that answer by the
        detector, "judge" by a person's own judge, "words" and "attended" read its words
        (DRAGIN), "spread" draws answers and measures how far they lie apart (SeaKR),
        "probe" judges it by rival probes (Probing-RAG).
      text: the question, or the query.
      passages: indices into the corpus, in the order shown; none is closed-book.
      n: of a search its depth, of a spread its draws, of a probe the answers that it
        was trained on, of a judge a number of its name.
    """

    kind: Kind
    text: str
    passages: tuple[int, ...] = ()
    n: int = 0

    @property
    def answer(self) -> "Call":
        """The call for the answer that this one judges or reads."""
        return Call("answer", self.text, self.passages)


Plan = Generator[Call, Any, T]  # a controller on one question; returns its T


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A generated answer.

    Attributes:
      log_probs: in nats, one per id and one for the stop token if it was written.
      n_prompt_tokens: that the model read.
      n_shown: passages in the prompt; the last ones asked for are left out where the
        model's window holds no more.
      entropies: with which the ids were written, in nats; None where the model cannot
        be read while it writes.
    """

    text: str
    token_ids: tuple[int, ...]
    stop_id: int | None
    log_probs: tuple[float, ...]
    n_prompt_tokens: int
    n_shown: int
    entropies: tuple[float, ...] | None = None

    @property
    def log_prob(self) -> float:
        """Return the mean log-probability in nats: minus the log of the perplexity."""
        return float(np.mean(self.log_probs))


class DraftScore(msgspec.Struct, frozen=True):
    """The score of an answer: `p_correct` in [0, 1], `raw` before calibration."""

    p_correct: float
    raw: float


class Words(msgspec.Struct, frozen=True):
    """The words of an answer, with what each gets of attention, and its entropy."""

    words: tuple[str, ...]
    attention: tuple[float, ...]
    entropy: tuple[float, ...]  # nats, mean over the word's tokens


class Attended(msgspec.Struct, frozen=True):
    """The words of a question and its answer.

    Attributes:
      words: in order, the question's first.
      rows: of every word of the answer, how much it attends to each of `words`.
    """

    words: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]


# The type of each kind of call's value, as it is read back from disk.
VALUES: dict[str, Any] = {
    "search": tuple[int, ...],
    "answer": Reply,
    "score": DraftScore,
    "judge": DraftScore,
    "words": Words,
    "attended": Attended,
    "spread": tuple[float, int],
    "probe": tuple[float, float],
}


class Cost(NamedTuple):
    """What a controller spends on a question.

    Attributes:
      generations: requests to the model to write; one may write several texts.
      sequences: texts written, those drawn included.
      tokens: read and written by them; draws of one prompt read it once.
      retrievals: searches.
      forwards: passes over text that is written already. An answer is read in the
        passes that write it, where the model allows it, and costs none.
      seconds: of the wall clock, an equal share of each batch that served it.
    """

    generations: float = 0
    sequences: float = 0
    tokens: float = 0
    retrievals: float = 0
    forwards: float = 0
    seconds: float = 0

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


COUNTED = Cost._fields[:-1]  # the same on every machine; seconds are not


@dataclasses.dataclass(frozen=True)
class Done:
    """What a controller returned for a question, and spent on it."""

    value: Any
    cost: Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What all controllers share: k passages a round, of rankings of one depth."""

    n_passages: int = 3
    depth: int = 60
    max_rounds: int = 4  # most retrievals of those that retrieve again


def no_rag(question: str) -> Plan[str]:
    """Answer closed-book."""
    reply = yield Call("answer", question)
    return reply.text


def vanilla_rag(question: str, config: SearchConfig) -> Plan[str]:
    """Retrieve once with the question, and answer."""
    ranking = yield Call("search", question, n=config.depth)
    reply = yield Call("answer", question, tuple(ranking[: config.n_passages]))
    return reply.text


def best_under_cap(
    candidates: dict[Any, tuple[np.ndarray, np.ndarray]], cap: float
) -> Any:
    """Return the setting with the best mean quality that keeps under the cap.

    Of equals the cheapest, then the first. Where none keeps under it, the cheapest:
    a rival that cannot spend less is shown with what it spends.

    Args:
      candidates: per setting, quality and generations of each question.
      cap: on the mean generations of a question.
    """
    ranked = [
        (-float(quality.mean()), float(cost.mean()), index)
        for index, (quality, cost) in enumerate(candidates.values())
    ]
    allowed = [entry for entry in ranked if entry[1] <= cap]
    best = min(allowed) if allowed else min(ranked, key=lambda entry: entry[1])
    return list(candidates)[best[2]]

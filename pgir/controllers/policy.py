"""PGIR: one calibrated score decides whether to retrieve and what to keep.

Section 4 of the paper. The model answers closed-book; a draft that clears the
threshold is returned. Otherwise passages are retrieved with the question and the
current draft, no passage twice, and the model answers again, up to a budget of
rounds; the first draft to clear the threshold is returned, else the best one.

The drafts of a question do not depend on the threshold: they are traced once, and
every threshold and budget is then decided on the same trace.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from extract.records import Example, Passage
from pgir.retrieval.bm25 import Retriever


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """How far and how wide PGIR searches (section 4)."""

    n_passages: int = 3  # k, passages a round
    max_budget: int = 4  # largest B traced
    depth: int = 60  # how deep a ranking may be paged
    thresholds: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(1, 20))
    max_generations: float = 4.0  # cap on the mean per question, for the search

    def __post_init__(self) -> None:
        """Check that a trace can be made."""
        if self.n_passages < 1 or self.max_budget < 1:
            raise ValueError(
                "PGIR needs at least one passage a round and one round, found "
                f"n_passages={self.n_passages}, max_budget={self.max_budget}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """One answer on the way.

    Attributes:
      answer: its text.
      p_correct: calibrated probability in [0, 1]; closed-book detector for round 0,
        with-context detector after.
      raw: the score before calibration.
      passages: indices into the corpus, in the order shown; empty in round 0.
    """

    answer: str
    p_correct: float
    raw: float
    passages: tuple[int, ...] = ()


Trace = tuple[Draft, ...]  # round 0 is closed-book, round r the r-th retrieval


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """The questions of one dataset and split that the controllers are given."""

    dataset: str
    split: str
    examples: tuple[Example, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced(QuestionSet):
    """One set of questions with every draft that any policy could ask for.

    Attributes:
      vanilla: answers after one retrieval with the question alone.
    """

    traces: tuple[Trace, ...]
    vanilla: tuple[str, ...]


class Reader(Protocol):
    """Answers questions and scores its own answers."""

    def closed_book(self, questions: Sequence[str]) -> list[Draft]:
        """Return one draft a question."""

    def with_context(
        self, rows: Sequence[int], contexts: Sequence[Sequence[Passage]]
    ) -> list[Draft]:
        """Return a draft for each of the questions with these indices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Accept at `threshold`, retrieve at most `budget` times."""

    threshold: float
    budget: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy returns for one question.

    Attributes:
      round: of the draft returned; 0 is closed-book.
      n_generations: answers generated until then, the closed-book one included.
      is_accepted: True if the draft cleared the threshold, False if it was only
        the best of the pool.
    """

    round: int
    n_generations: int
    is_accepted: bool


def decide(trace: Trace, policy: Policy) -> Decision:
    """Apply a policy to a trace of at least one draft.

    The first draft to clear the threshold within the budget; else the highest
    score, the earliest of equals.
    """
    pool = trace[: policy.budget + 1]
    for number, draft in enumerate(pool):
        if draft.p_correct >= policy.threshold:
            return Decision(round=number, n_generations=number + 1, is_accepted=True)
    best = int(np.argmax([draft.p_correct for draft in pool]))
    return Decision(round=best, n_generations=len(pool), is_accepted=False)


def fresh_passages(
    ranking: Sequence[int], seen: frozenset[int], n_passages: int
) -> tuple[int, ...]:
    """Return the page's passages that no earlier round has shown.

    Pages of `n_passages` are tried in turn: a page with nothing new is skipped, so
    that the search goes deeper instead of repeating itself.

    Returns:
      One to `n_passages` indices in rank order; none if the ranking is used up.
    """
    for start in range(0, len(ranking), n_passages):
        page = ranking[start : start + n_passages]
        fresh = tuple(int(p) for p in page if int(p) not in seen)
        if fresh:
            return fresh
    return ()


def trace_questions(
    questions: Sequence[str],
    reader: Reader,
    retriever: Retriever,
    passages: Sequence[Passage],
    config: ControllerConfig,
    on_round: Callable[[int], None] = lambda _: None,
) -> list[Trace]:
    """Draft every question closed-book and through all rounds, in lock-step.

    Args:
      questions: not empty strings.
      reader: the backbone with its detector.
      retriever: ranks `passages`.
      passages: the corpus.
      config: k, B and depth.
      on_round: told each finished round.

    Returns:
      A trace per question: up to `max_budget + 1` drafts, fewer where the ranking
      is used up.
    """
    traces = [[draft] for draft in reader.closed_book(questions)]
    on_round(0)
    seen: list[frozenset[int]] = [frozenset()] * len(questions)
    for number in range(1, config.max_budget + 1):
        queries = [
            f"{question} {trace[-1].answer}"
            for question, trace in zip(questions, traces, strict=True)
        ]
        rankings = retriever.search(queries, config.depth)
        chosen = [
            fresh_passages(ranking, shown, config.n_passages)
            if len(trace) == number
            else ()
            for ranking, shown, trace in zip(rankings, seen, traces, strict=True)
        ]
        rows = [i for i, indices in enumerate(chosen) if indices]
        contexts = [[passages[p] for p in chosen[i]] for i in rows]
        for i, draft in zip(rows, reader.with_context(rows, contexts), strict=True):
            traces[i].append(dataclasses.replace(draft, passages=chosen[i]))
            seen[i] = seen[i] | set(chosen[i])
        on_round(number)
    return [tuple(trace) for trace in traces]


def recalibrated(
    trace: Trace,
    closed_book: Callable[[float], float],
    with_context: Callable[[float], float],
) -> Trace:
    """Return a trace whose probabilities come from other maps of the raw scores."""
    maps = [closed_book, *[with_context] * (len(trace) - 1)]
    return tuple(
        dataclasses.replace(draft, p_correct=float(p_correct_of(draft.raw)))
        for draft, p_correct_of in zip(trace, maps, strict=True)
    )


def search_policy(
    traces: Sequence[Trace],
    is_right: Callable[[int, str], bool],
    config: ControllerConfig,
) -> Policy:
    """Choose threshold and budget by exact match on validation traces.

    Among policies under the cap on mean generations, the highest exact match; then
    the fewest generations, then the lowest budget and threshold.

    Raises:
      ValueError: no policy stays under the cap.
    """
    ranked = []
    for budget in range(1, config.max_budget + 1):
        for threshold in config.thresholds:
            policy = Policy(threshold=threshold, budget=budget)
            decisions = [decide(trace, policy) for trace in traces]
            cost = float(np.mean([d.n_generations for d in decisions]))
            if cost <= config.max_generations:
                right = np.mean(
                    [
                        is_right(i, traces[i][d.round].answer)
                        for i, d in enumerate(decisions)
                    ]
                )
                ranked.append((-float(right), cost, budget, threshold))
    if not ranked:
        raise ValueError(
            f"no policy stays under {config.max_generations} generations a question; "
            "raise the cap or lower the smallest threshold"
        )
    _, _, budget, threshold = min(ranked)
    return Policy(threshold=threshold, budget=budget)

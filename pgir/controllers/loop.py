"""What a controller is, and PGIR: one calibrated score decides when to retrieve.

A controller is a generator function over one question: it yields calls and is sent the
value of each. It therefore reads like its paper, and the calls of a thousand questions
can be served together (`pgir.controllers.waves`). Its cost is counted from its calls,
in the same way for all controllers; see `Cost`.

PGIR is section 5 of the paper. The first draft, written closed-book, is returned if it
reaches the threshold. Otherwise passages are retrieved with the question and the last
draft, none of them twice, and a new draft is judged, up to a budget of rounds; then the
best draft is returned. Drafts do not depend on the threshold, so they are traced once,
and every threshold and budget is decided on the same trace.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from beatrice.extract.records import Example, check_choices
from beatrice.pgir.retrievers import fuse

Kind = Literal[
    "search", "answer", "score", "judge", "words", "attended", "spread", "probe"
]
T = TypeVar("T")


class Call(msgspec.Struct, frozen=True):
    """A request of a controller; equal calls have equal values, and are made once."""

    # "search" ranks passages for the text. All others take the text as the question:
    # "answer" generates greedily, "score" judges that answer by the detector, "judge"
    # by a user's judge, "words" and "attended" read its words (DRAGIN), "spread"
    # samples answers and measures how far apart they are (SeaKR), and "probe" judges it
    # by rival probes (Probing-RAG).
    kind: Kind
    text: str  # the question, or the query of a search
    # Indices into the corpus, in the order shown; none is closed-book.
    passages: tuple[int, ...] = ()
    # For "search" the depth, for "spread" the number of samples, for "probe" the number
    # of training answers, for "judge" a hash of its name and code.
    n: int = 0

    @property
    def answer(self) -> "Call":
        """The call for the answer that this call judges or reads."""
        return Call("answer", self.text, self.passages)


Plan = Generator[Call, Any, T]  # a controller on one question; returns its T


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A generated answer."""

    text: str
    token_ids: tuple[int, ...]
    stop_id: int | None
    # In nats, one per id and one for the stop token if it was written.
    log_probs: tuple[float, ...]
    n_prompt_tokens: int
    # Passages in the prompt; the call's last ones are left out if the window is full.
    n_shown: int
    # In nats, one per id; None if the model cannot be read while it writes.
    entropies: tuple[float, ...] | None = None

    @property
    def log_prob(self) -> float:
        """Mean log-probability in nats: minus the log of the perplexity."""
        return float(np.mean(self.log_probs))


class DraftScore(msgspec.Struct, frozen=True):
    """The score of an answer: `p_correct` in [0, 1], `raw` before calibration."""

    p_correct: float
    raw: float


class WordReading(msgspec.Struct, frozen=True):
    """The words of an answer, with the attention that each gets, and its entropy."""

    words: tuple[str, ...]
    attention: tuple[float, ...]
    entropy: tuple[float, ...]  # nats, mean over the word's tokens


class AttentionToWords(msgspec.Struct, frozen=True):
    """The words of a question and its answer, and how the answer attends to them."""

    words: tuple[str, ...]  # in order, the question's first
    # For each word of the answer, how much it attends to each of `words`.
    rows: tuple[tuple[float, ...], ...]


# The type of the value of each kind of call, for reading it from disk.
VALUES: dict[str, Any] = {
    "search": tuple[int, ...],
    "answer": Reply,
    "score": DraftScore,
    "judge": DraftScore,
    "words": WordReading,
    "attended": AttentionToWords,
    "spread": tuple[float, int],
    "probe": tuple[float, float],
}


class Cost(NamedTuple):
    """What a controller spends on a question."""

    # Requests to the model to write; one may write several texts.
    generations: float = 0
    sequences: float = 0  # texts written, including samples
    # Read and written by these requests; samples of one prompt read it once.
    tokens: float = 0
    retrievals: float = 0  # searches
    # Passes over existing text. None for an answer whose signals are read in the passes
    # that write it, if the model allows that.
    forwards: float = 0
    seconds: float = 0  # wall-clock time, as equal shares of the batches of its calls

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


COUNTED = Cost._fields[:-1]  # equal on every machine, unlike seconds


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a controller returned for a question, and what it cost."""

    value: Any
    cost: Cost


Query = Literal["draft", "question", "question_first", "sure_draft", "fused", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """How far and how wide PGIR searches (section 5); rivals share k, B and depth."""

    n_passages: int = 3  # k, passages per round
    # Largest B traced; most retrievals of rivals that retrieve repeatedly.
    max_budget: int = 4
    depth: int = 60  # how deep a ranking may be paged
    # Values tried for tau.
    thresholds: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(1, 20))
    max_generations: float = 4.0  # cap on the mean per question in choosing settings
    # What to search with. "draft" is the paper's: the question and the last draft.
    # "question" never uses the draft, "question_first" only from the second round on,
    # "sure_draft" only if its score is at least `sure`. "fused" fuses the rankings of
    # both queries by reciprocal rank, "both" shows k passages of each.
    query: Query = "draft"
    sure: float = 0.5  # lowest score of a draft that "sure_draft" searches with

    def __post_init__(self) -> None:
        """Check the query, which callers of `run_pgir` may choose."""
        check_choices(self)


def no_rag(question: str) -> Plan[str]:
    """Answer closed-book."""
    reply = yield Call("answer", question)
    return reply.text


def vanilla_rag(question: str, config: ControllerConfig) -> Plan[str]:
    """Retrieve once with the question, and answer."""
    ranking = yield Call("search", question, n=config.depth)
    reply = yield Call("answer", question, tuple(ranking[: config.n_passages]))
    return reply.text


def best_under_cap(
    candidates: dict[Any, tuple[np.ndarray, np.ndarray]], cap: float
) -> Any:
    """Return the setting with the best mean quality within the cap on generations.

    `candidates` has each question's quality and generations, `[n]`, by setting. Ties go
    to the cheapest, then to the first. If none keeps the cap, return the cheapest: a
    rival that cannot spend less is shown with what it spends.
    """
    ranked = [
        (-float(quality.mean()), float(cost.mean()), index)
        for index, (quality, cost) in enumerate(candidates.values())
    ]
    allowed = [entry for entry in ranked if entry[1] <= cap]
    best = min(allowed) if allowed else min(ranked, key=lambda entry: entry[1])
    return list(candidates)[best[2]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedDraft:
    """One draft of a trace."""

    answer: str
    # Calibrated probability in [0, 1], by the closed-book detector in round 0 and the
    # with-context detector afterwards.
    p_correct: float
    raw: float  # the score before calibration
    # Indices into the corpus of the passages shown, in that order; empty in round 0.
    passages: tuple[int, ...] = ()


Trace = tuple[TracedDraft, ...]  # round 0 is closed-book, round r the r-th retrieval


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """The questions of one dataset and split that the controllers are given."""

    dataset: str
    split: str
    examples: tuple[Example, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedSet(QuestionSet):
    """A question set with every draft that any policy could ask for."""

    traces: tuple[Trace, ...]


Verdict = Plan[tuple[float, float]]  # P(correct), and the score before calibration
# Judges an answer, given the question and the passages that were shown.
Judge = Callable[[str, tuple[int, ...], Reply], Verdict]
Accept = Callable[[TracedDraft], bool]


def judge_by(kind: Literal["score", "judge"], number: int = 0) -> Judge:
    """Return the run's detector as a judge, or a user's judge by its number."""

    def judge(question: str, passages: tuple[int, ...], reply: Reply) -> Verdict:
        scored = yield Call(kind, question, passages, n=number)
        return scored.p_correct, scored.raw

    return judge


detector_judge = judge_by("score")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Accept at `threshold`, retrieve at most `budget` times."""

    threshold: float
    budget: int

    def accepts(self, draft: TracedDraft) -> bool:
        """Return whether a draft is returned at once."""
        return draft.p_correct >= self.threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy returns for one question."""

    draft: TracedDraft  # the draft that is returned
    round: int  # the round in which it was written; 0 is closed-book
    n_generations: int  # answers generated in all, including the closed-book one
    # Whether the draft reached the threshold; else it was only the best of all.
    is_accepted: bool


def decide(trace: Trace, policy: Policy) -> Decision:
    """Apply a policy to a trace of at least one draft.

    It returns the first draft within the budget that reaches the threshold, otherwise
    the one with the highest score, the earliest of equals. NaN is below all scores.
    """
    pool = trace[: policy.budget + 1]
    for number, draft in enumerate(pool):
        if policy.accepts(draft):
            return Decision(
                draft=draft, round=number, n_generations=number + 1, is_accepted=True
            )
    scores = [-math.inf if math.isnan(x.p_correct) else x.p_correct for x in pool]
    best = scores.index(max(scores))
    return Decision(
        draft=pool[best], round=best, n_generations=len(pool), is_accepted=False
    )


def fresh_passages(
    ranking: Sequence[int], seen: frozenset[int], n_passages: int
) -> tuple[int, ...]:
    """Return the new passages of the first page that has any, in rank order.

    A page is `n_passages` of the ranking. Pages without a passage that is not yet
    `seen` are skipped. The result is empty if the whole ranking has been seen.
    """
    for start in range(0, len(ranking), n_passages):
        page = ranking[start : start + n_passages]
        fresh = tuple(int(p) for p in page if int(p) not in seen)
        if fresh:
            return fresh
    return ()


def _fresh_of_round(
    question: str, trace: Sequence[TracedDraft], config: ControllerConfig
) -> Plan[tuple[int, ...]]:
    """Search for the passages of a round, which the trace has not shown yet."""
    seen = frozenset(passage for draft in trace for passage in draft.passages)
    with_draft = f"{question} {trace[-1].answer}"
    query = config.query
    if query in ("fused", "both"):
        queries = [question, with_draft]
    elif (
        query == "question"
        or (query == "question_first" and len(trace) == 1)
        or (query == "sure_draft" and not trace[-1].p_correct >= config.sure)  # or NaN
    ):
        queries = [question]
    else:
        queries = [with_draft]
    rankings = []
    for text in queries:
        rankings.append((yield Call("search", text, n=config.depth)))
    if query == "fused":
        rankings = [fuse(rankings).tolist()]
    passages: tuple[int, ...] = ()
    for ranking in rankings:
        passages += fresh_passages(ranking, seen | set(passages), config.n_passages)
    return passages


def drafts(
    question: str,
    config: ControllerConfig,
    judge: Judge = detector_judge,
    accept: Accept = lambda draft: False,
) -> Plan[Trace]:
    """Draft answers closed-book and round after round, until one is accepted.

    By default none is accepted, which traces the whole budget: `max_budget + 1` drafts,
    or fewer if the ranking is used up.
    """
    trace: list[TracedDraft] = []
    passages: tuple[int, ...] = ()
    while True:
        reply = yield Call("answer", question, passages)
        p_correct, raw = yield from judge(question, passages, reply)
        draft = TracedDraft(
            answer=reply.text,
            p_correct=p_correct,
            raw=raw,
            passages=passages[: reply.n_shown],
        )
        trace.append(draft)
        if accept(draft) or len(trace) > config.max_budget:
            return tuple(trace)
        passages = yield from _fresh_of_round(question, trace, config)
        if not passages:
            return tuple(trace)


def pgir(
    question: str,
    policy: Policy,
    config: ControllerConfig,
    judge: Judge = detector_judge,
) -> Plan[str]:
    """Answer a question with PGIR under a policy."""
    limited = dataclasses.replace(config, max_budget=policy.budget)
    trace = yield from drafts(question, limited, judge, policy.accepts)
    return decide(trace, policy).draft.answer


def draft_rag(question: str, config: ControllerConfig) -> Plan[str]:
    """Retrieve once, with the draft in the query as in PGIR, and judge nothing.

    Its gain over `vanilla_rag` is the query's, PGIR's gain over it the detector's.
    """
    draft = yield Call("answer", question)
    ranking = yield Call("search", f"{question} {draft.text}", n=config.depth)
    if not ranking:
        return draft.text
    reply = yield Call("answer", question, tuple(ranking[: config.n_passages]))
    return reply.text


Oracle = Literal["judge", "gate", "choice"]


def upper_bound(
    question: str,
    policy: Policy,
    config: ControllerConfig,
    oracle: Oracle,
    is_right: Callable[[str], bool],
) -> Plan[str]:
    """Answer with PGIR's drafts, making one of its decisions with the gold answers.

    This is no controller but a bound on what a better decision could gain. "judge"
    stops at the first right draft; "gate" knows whether the closed-book draft is right,
    and then follows the policy; "choice" stops when the policy does, and returns a
    right draft if there is one among those written.
    """
    limited = dataclasses.replace(config, max_budget=policy.budget)

    def right(draft: TracedDraft) -> bool:
        return is_right(draft.answer)

    accept: dict[Oracle, Accept] = {
        "judge": right,
        "gate": lambda draft: (policy.accepts if draft.passages else right)(draft),
        "choice": policy.accepts,
    }
    trace = yield from drafts(question, limited, detector_judge, accept[oracle])
    if oracle == "gate":
        return decide(trace[1:] or trace, policy).draft.answer
    rest = trace[-1] if oracle == "judge" else decide(trace, policy).draft
    return next((draft for draft in trace if right(draft)), rest).answer


def recalibrated(
    trace: Trace,
    closed_book: Callable[[float], float],
    with_context: Callable[[float], float],
) -> Trace:
    """Return a trace with its raw scores mapped to probabilities by other maps."""
    maps = [closed_book, *[with_context] * (len(trace) - 1)]
    return tuple(
        dataclasses.replace(draft, p_correct=float(p_correct_of(draft.raw)))
        for draft, p_correct_of in zip(trace, maps, strict=True)
    )

"""PGIR on questions, without a run: a model that retrieves where its score is low."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from beatrice.extract.records import Passage
from beatrice.pgir.border import as_count, as_probability, as_texts, refuse
from beatrice.pgir.controllers.policy import (
    ControllerConfig,
    Judge,
    Policy,
    Query,
    Trace,
    beatrice,
    decide,
    drafts,
    own_judge,
)
from beatrice.pgir.controllers.services import Answering, DraftJudge, open_services
from beatrice.pgir.controllers.waves import Journal, Waves
from beatrice.pgir.retrieval.retrievers import OwnRetriever
from beatrice.pgir.scoring.scorer import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagAnswer:
    """What PGIR answers a question.

    Attributes:
      question: as it was asked.
      answer: of the draft that is returned; None where a search failed.
      p_correct: in [0, 1], of that draft; None likewise.
      is_trusted: whether it reaches the threshold; else it is the best of all drafts.
      passages: that the model was shown; none for a closed-book draft.
      n_generations: drafts that were written.
      error: why there is no answer.
    """

    question: str
    answer: str | None = None
    p_correct: float | None = None
    is_trusted: bool = False
    passages: tuple[Passage, ...] = ()
    n_generations: int = 0
    error: str | None = None


def run_pgir(
    scorer: Scorer,
    questions: Sequence[str],
    retriever: Any,
    *,
    threshold: float,
    budget: int = 2,
    n_passages: int = 3,
    query: Query = "draft",
    judge: DraftJudge | None = None,
) -> list[RagAnswer]:
    """Answer questions as PGIR does, in batches (see `pgir.controllers.policy`).

    Args:
      scorer: of a model and its detector, such as `beatrice.load(run)`.
      questions: not empty.
      retriever: one's own, see `OwnRetriever`.
      threshold: least P of a draft that is returned at once, in (0, 1].
      budget: most retrievals of a question.
      n_passages: shown after each retrieval.
      query: with what is searched, see `ControllerConfig`.
      judge: of drafts, in the place of the detector: a callable of question, answer
        and passages that returns P(correct) in [0, 1].

    Raises:
      ValueError: an argument is of another type, or the retriever or judge fails.
    """
    if not isinstance(scorer, Scorer):
        refuse("scorer", "a Scorer, such as `beatrice.load(run)`", scorer)
    texts = as_texts(questions, "questions")
    policy = Policy(
        threshold=as_probability(threshold, "threshold"),
        budget=as_count(budget, "budget"),
    )
    config = ControllerConfig(
        n_passages=as_count(n_passages, "n_passages"),
        max_budget=policy.budget,
        query=query,
    )
    own = OwnRetriever(retriever)
    answering, journal = Answering(scorer.probed, own.passages), Journal(None, "")
    services = open_services(answering, own.passages, journal, own)
    draft_judge: Judge = beatrice
    if judge is not None:
        draft_judge = own_judge(services["judge"].add("judge", judge))
    waves = Waves(services, journal)
    plans = [
        drafts(text, config, draft_judge, lambda d: d.p_correct >= policy.threshold)
        for text in texts
    ]
    done = waves.run("pgir", plans)
    failed = next(iter(waves.failed.values()), None)
    return [
        RagAnswer(question=text, error=failed)
        if one is None
        else _answer_of(text, one.value, policy, own.passages)
        for text, one in zip(texts, done, strict=True)
    ]


def _answer_of(
    question: str, trace: Trace, policy: Policy, passages: Sequence[Passage]
) -> RagAnswer:
    """Return what a policy takes of a question's drafts."""
    decision = decide(trace, policy)
    draft = trace[decision.round]
    return RagAnswer(
        question=question,
        answer=draft.answer,
        p_correct=draft.p_correct,
        is_trusted=decision.is_accepted,
        passages=tuple(passages[place] for place in draft.passages),
        n_generations=decision.n_generations,
    )

"""Adaptive-RAG: a classifier of the question chooses how often to retrieve.

Jeong et al. (2024); followed: starsuzi/Adaptive-RAG 0c88670. A answers without
passages, B after one retrieval, C retrieves again with what was generated last and
adds to the passages until the answer stands. The classifier is trained on this
backbone's own outcomes: the label of a question is the cheapest strategy that answers
it, and questions that none answers are left out; of other questions of a known set the
label is B for single-hop and C for multi-hop ("inductive bias").

Departures. The classifier is a logistic regression over the question's vector, where
theirs is T5-large. Its strength is chosen on validation questions; theirs chooses
epochs on the labels of test. A step of C is an answer under the run's template and not
a sentence of a chain of thought, which that template forbids; C ends where an answer
comes twice, in the place of "the answer is".
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from beatrice.extract.records import Example
from beatrice.pgir.controllers.calls import (
    Call,
    Plan,
    SearchConfig,
    no_rag,
    vanilla_rag,
)
from beatrice.pgir.controllers.policy import fresh_passages
from beatrice.pgir.controllers.session import Session, right_of, rival

Strategy = Literal["A", "B", "C"]
STRENGTHS = (1.0, 0.1, 10.0, 100.0)  # C of the regression; scikit-learn's is the first
N_BIAS = 400  # questions of each set that get its label without being answered
# What is known of published sets: the label of their questions beside the outcomes.
SET_LABELS: Mapping[str, Strategy] = {
    **dict.fromkeys(("nq", "triviaqa", "squad", "popqa", "webquestions"), "B"),
    **dict.fromkeys(("hotpotqa", "2wiki", "2wikimultihopqa", "musique"), "C"),
}


def iterative(question: str, config: SearchConfig) -> Plan[str]:
    """Retrieve with the question, then with the last answer, keeping all passages.

    Ends where an answer is empty or comes twice, where a search finds nothing new, or
    after `max_rounds` retrievals.
    """
    passages: tuple[int, ...] = ()
    query, answer = question, None
    for _ in range(config.max_rounds):
        ranking = yield Call("search", query, n=config.depth)
        fresh = fresh_passages(ranking, frozenset(passages), config.n_passages)
        if not fresh:
            break
        passages += fresh
        reply = yield Call("answer", question, passages)
        if not reply.text or reply.text == answer:
            return reply.text or answer or ""
        query = answer = reply.text
    return answer or ""


def silver_labels(right: Mapping[Strategy, np.ndarray]) -> list[Strategy | None]:
    """Return each question's label: the cheapest strategy that is right, or None.

    Args:
      right: `[n_questions]` bool of every strategy.
    """
    order: tuple[Strategy, ...] = ("A", "B", "C")
    rows = zip(*(right[name] for name in order), strict=True)
    return [
        next((name for name, ok in zip(order, row, strict=True) if ok), None)
        for row in rows
    ]


def biased(
    examples: Sequence[Example], n_of_each: int = N_BIAS
) -> list[tuple[Example, Strategy]]:
    """Return the first questions of each known set with the label of their set."""
    taken: dict[str, int] = {}
    found = []
    for example in examples:
        label = SET_LABELS.get(example.dataset)
        if label and taken.get(example.dataset, 0) < n_of_each:
            taken[example.dataset] = taken.get(example.dataset, 0) + 1
            found.append((example, label))
    return found


def fit_router(vectors: np.ndarray, labels: Sequence[Strategy], strength: float) -> Any:
    """Return a classifier with `predict`; of one class alone it says that class."""
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression

    if len(set(labels)) < 2:
        return DummyClassifier().fit(vectors, labels)
    return LogisticRegression(C=strength, max_iter=1000).fit(vectors, labels)


def adaptive_rag(question: str, strategy: Strategy, config: SearchConfig) -> Plan[str]:
    """Answer by a strategy."""
    if strategy == "A":
        return (yield from no_rag(question))
    if strategy == "B":
        return (yield from vanilla_rag(question, config))
    return (yield from iterative(question, config))


@rival("adaptive_rag", "2024-03", "encoder")
def run_adaptive(session: Session) -> None:
    """Learn from outcomes, choose the classifier on validation, and run."""
    shared, training = session.config.search, session.training
    without, once = (right_of(training, found) for found in session.outcomes)
    again = session.run(
        "train:iterative", training, lambda e: iterative(e.question, shared)
    )
    right: dict[Strategy, np.ndarray] = {
        "A": without,
        "B": once,
        "C": right_of(training, again),
    }
    labelled = [
        (example, label)
        for example, label in zip(training, silver_labels(right), strict=True)
        if label
    ]
    labelled += biased(session.unanswered)
    if not labelled:  # nothing was ever right; retrieving once is what is cheap
        labelled = [(example, "B") for example in training]
    encoder = session.encoder()
    vectors = encoder.vectors([example.question for example, _ in labelled])
    labels = [label for _, label in labelled]
    asked = [e for one in session.sets for e in one.examples]
    asked_vectors = encoder.vectors([e.question for e in asked])
    chosen: dict[float, dict[str, Strategy]] = {}
    for strength in STRENGTHS:
        found = fit_router(vectors, labels, strength).predict(asked_vectors)
        ids = (e.id for e in asked)
        chosen[strength] = dict(zip(ids, map(str, found), strict=True))

    def plan(strength: float, example: Example) -> Plan[str]:
        return adaptive_rag(example.question, chosen[strength][example.id], shared)

    session.tune("adaptive_rag", STRENGTHS, plan)

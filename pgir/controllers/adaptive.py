"""Rivals that read only the question, and answer perplexity in PGIR's loop.

**SKR** (Wang et al., 2023; after THUNLP-MT/SKR edb63f2, `knn.py`). For each training
question it is known whether this backbone's answer is better, worse or as good with
passages. The nearest neighbours of the first two kinds vote on retrieval. Departures:
exact match of the run's own reader replaces their extractor, which returns the gold
answer itself if a sentence contains it; and the encoder, see `question_encoder`.

**Adaptive-RAG** (Jeong et al., 2024; after starsuzi/Adaptive-RAG 0c88670). A classifier
of the question chooses a strategy. A answers without passages, B after one retrieval; C
repeats retrieval with the last answer as the query and keeps all passages, until the
answer stays the same. The classifier is trained on this backbone's own outcomes: the
label of a question is the cheapest strategy that answers it, and questions that no
strategy answers are left out. Other questions of a known set are labelled B if it is
single-hop and C if it is multi-hop ("inductive bias"; published with sets of both
kinds, so sets of only one kind favour its strategy). Departures: the classifier is a
logistic regression on the question's vector (theirs: T5-large), whose strength is
chosen on validation questions (theirs chooses epochs on test labels). A step of C is an
answer under the run's template, which forbids the sentences of a chain of thought used
by theirs. C pages deeper where the first k passages are known, as PGIR does; theirs
adds none then. C ends when an answer comes twice, where theirs looks for "the answer
is", or after `max_budget` = 4 retrievals (theirs: ten sentences, up to 15 paragraphs).

**Perplexity** needs no detector: it is the mean log-probability of the answer, which
generation gives for free. A calibration map for each setting, of the detector's kind
and fitted on its validation answers, turns it into a probability, so that drafts with
and without passages can be compared under one threshold.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array

from beatrice.extract.records import UNSPACED, Example, Setting, split_words
from beatrice.jaxprobe.calibrate import FIT_MAP
from beatrice.jaxprobe.config import MapKind
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.tokens import answer_log_probs
from beatrice.pgir.controllers.loop import (
    Call,
    ControllerConfig,
    Judge,
    Plan,
    Reply,
    Verdict,
    fresh_passages,
    no_rag,
    vanilla_rag,
)
from beatrice.pgir.controllers.session import (
    QuestionEncoder,
    QuestionVectors,
    Session,
    Stores,
    right_of,
    rival,
)
from beatrice.pgir.index import TextEncoder, read_encoder_config

NEIGHBOURS = (5, 6, 7, 8, 9, 10)  # values of k that the paper tries
Strategy = Literal["A", "B", "C"]  # answer at once, after one search, or after several


def question_encoder(
    training: Sequence[str], checkpoint: Path | None = None
) -> QuestionEncoder:
    """Return the question encoder for the rivals that read only the question.

    A checkpoint folder is run by its own settings, see `read_encoder_config` (SKR uses
    SimCSE's pooler, which has an extra layer). Without one, words and pairs of words
    are counted (TF-IDF, weighted on the training questions).
    """
    if checkpoint is not None:
        encoder = TextEncoder(read_encoder_config(checkpoint, max_tokens=128))
        return lambda texts: encoder.encode(texts, "query")
    from sklearn.feature_extraction.text import TfidfVectorizer

    def words_of(text: str) -> list[str]:  # two letters or more, as in scikit-learn
        return [x for x in split_words(text) if len(x) > 1 or UNSPACED.match(x)]

    tf_idf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, tokenizer=words_of)
    tf_idf.set_params(token_pattern=None)  # else it warns that the pattern is not used
    tf_idf.fit(training)
    return lambda texts: csr_array(tf_idf.transform(texts))


def wants_retrieval(
    leads: np.ndarray, counts: tuple[int, int, int], k: int
) -> np.ndarray:
    """Return the votes of `k` neighbours, as `knn.py` counts them, `[n]` bool.

    `leads` `[n]` is how many more of them are better with passages than worse; `counts`
    are the numbers of all training questions that are better, worse, and in all.
    """
    n_better, n_worse, n_all = counts
    is_usual = n_better >= n_worse  # else the vote is on not retrieving
    leads = leads if is_usual else -leads
    wins = (leads > 0) & (leads >= abs(n_better - n_worse) * k // n_all)
    return wins if is_usual else ~wins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Training questions on which retrieval changed something."""

    vectors: QuestionVectors  # `[n, d]`, of length 1
    is_better: np.ndarray  # `[n]` bool, whether passages helped; else they hurt
    n_all: int  # all training questions, including those on which nothing changed

    def retrieves(self, questions: QuestionVectors, k: int) -> np.ndarray:
        """Return whether to retrieve for questions `[n, d]`, `[n]` bool."""
        from sklearn.utils.extmath import safe_sparse_dot

        n_better = int(self.is_better.sum())
        counts = (n_better, len(self.is_better) - n_better, self.n_all)
        products = safe_sparse_dot(questions, self.vectors.T, dense_output=True)
        order = np.argsort(-np.asarray(products), axis=1, kind="stable")[:, :k]
        leads = np.where(self.is_better[order], 1, -1).sum(axis=1)
        return wants_retrieval(leads, counts, k)


def neighbours_of(
    questions: Sequence[str],
    without: np.ndarray,
    with_passages: np.ndarray,
    encoder: QuestionEncoder,
) -> Neighbours:
    """Return the training questions whose answer `[n]` passages made right or wrong."""
    changed = np.flatnonzero(without != with_passages).tolist()
    some = [questions[i] for i in changed or [0]]  # an encoder needs at least one text
    return Neighbours(
        vectors=encoder(some)[: len(changed)],
        is_better=with_passages[changed],
        n_all=len(questions),
    )


def _tune_router(
    session: Session,
    name: str,
    grid: Sequence[Any],
    route: Callable[[Any, QuestionVectors], Sequence[Strategy]],
) -> None:
    """Tune a rival whose setting gives every question, by its vector, a strategy."""
    ids = [example.id for example in session.examples]
    vectors = session.encoder()([example.question for example in session.examples])
    routes = {x: dict(zip(ids, route(x, vectors), strict=True)) for x in grid}

    def plan(setting: Any, example: Example) -> Plan[str]:
        strategy = routes[setting][example.id]
        return adaptive_rag(example.question, strategy, session.config)

    session.tune(name, grid, plan)


@rival("skr")
def run_skr(session: Session) -> None:
    """Learn from training questions, choose k on validation, and run."""
    without, once = (right_of(session.training, done) for done in session.outcomes)
    questions = [example.question for example in session.training]
    index = neighbours_of(questions, without, once, session.encoder())

    def route(k: int, vectors: QuestionVectors) -> list[Strategy]:
        return ["B" if votes else "A" for votes in index.retrieves(vectors, k)]

    _tune_router(session, "skr", NEIGHBOURS, route)


STRENGTHS = (1.0, 0.1, 10.0, 100.0)  # C of the regression; scikit-learn's comes first
N_BIAS = 400  # questions of each set that get its label without being answered
# Labels for unanswered questions of known sets.
SINGLE_HOP: Strategy = "B"
MULTI_HOP: Strategy = "C"
SET_LABELS: Mapping[str, Strategy] = {
    **dict.fromkeys(("nq", "triviaqa", "squad", "popqa", "webquestions"), SINGLE_HOP),
    **dict.fromkeys(("hotpotqa", "2wiki", "2wikimultihopqa", "musique"), MULTI_HOP),
}


def iterative(question: str, config: ControllerConfig) -> Plan[str]:
    """Retrieve with the question, then with the last answer, keeping all passages.

    Ends when an answer is empty or comes twice, when a search finds nothing new, or
    after `max_budget` retrievals.
    """
    passages: tuple[int, ...] = ()
    query, answer = question, None
    for _ in range(config.max_budget):
        ranking = yield Call("search", query, n=config.depth)
        fresh = fresh_passages(ranking, frozenset(passages), config.n_passages)
        if not fresh:
            break
        passages += fresh
        reply = yield Call("answer", question, passages)
        if not reply.text or reply.text == answer:
            return reply.text or answer or ""
        query = answer = reply.text
    if answer is None:  # the question itself finds nothing
        return (yield from no_rag(question))
    return answer


def silver_labels(right: Mapping[Strategy, np.ndarray]) -> list[Strategy | None]:
    """Return each question's label: the cheapest strategy that is right, or None.

    Args:
      right: for each strategy, whether its answers are right, `[n_questions]` bool.
    """
    order: tuple[Strategy, ...] = ("A", "B", "C")
    rows = zip(*(right[name] for name in order), strict=True)
    return [next(itertools.compress(order, row), None) for row in rows]


def bias_labels(
    examples: Sequence[Example], n_of_each: int = N_BIAS
) -> list[tuple[Example, Strategy]]:
    """Return the first questions of each known set with the label of the set."""
    counts: collections.Counter[str] = collections.Counter()
    labelled = []
    for example in examples:
        label = SET_LABELS.get(example.dataset)
        if label and counts[example.dataset] < n_of_each:
            counts[example.dataset] += 1
            labelled.append((example, label))
    return labelled


def fit_router(vectors: QuestionVectors, labels: Sequence[str], strength: float) -> Any:
    """Return a classifier; if there is only one label, it always predicts that."""
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression

    if len(set(labels)) < 2:
        return DummyClassifier().fit(vectors, labels)
    use_one_blas_thread()
    return LogisticRegression(C=strength, max_iter=1000).fit(vectors, labels)


def adaptive_rag(
    question: str, strategy: Strategy, config: ControllerConfig
) -> Plan[str]:
    """Answer with a strategy."""
    if strategy == "A":
        return (yield from no_rag(question))
    if strategy == "B":
        return (yield from vanilla_rag(question, config))
    return (yield from iterative(question, config))


@rival("adaptive_rag")
def run_adaptive(session: Session) -> None:
    """Learn from outcomes, choose the classifier on validation, and run."""
    shared, training = session.config, session.training
    without, once = (right_of(training, done) for done in session.outcomes)
    again = session.run(
        "train:iterative", training, lambda e: iterative(e.question, shared)
    )
    right: dict[Strategy, np.ndarray] = {"A": without, "B": once}
    right["C"] = right_of(training, again)
    pairs = zip(training, silver_labels(right), strict=True)
    labelled = [(example, label) for example, label in pairs if label]
    labelled += bias_labels(session.unanswered)
    if not labelled:  # no answer was ever right: retrieve once, which is cheap
        labelled = [(example, SINGLE_HOP) for example in training]
    vectors = session.encoder()([example.question for example, _ in labelled])
    labels = [label for _, label in labelled]

    def route(strength: float, new: QuestionVectors) -> list[Strategy]:
        return fit_router(vectors, labels, strength).predict(new).tolist()

    _tune_router(session, "adaptive_rag", STRENGTHS, route)


Map = Callable[[np.ndarray], np.ndarray]


def perplexity_maps(stores: Stores, kind: MapKind) -> dict[Setting, Map]:
    """Return each setting's map from exp of a mean log-probability to P(correct).

    It is of the detector's kind: a map that makes answers equal would lose ties.
    """
    maps: dict[Setting, Map] = {}
    for setting, (store, rows) in stores.items():
        where = rows.where("validation")
        likely = np.exp(answer_log_probs(store)[where])  # in (0, 1]
        maps[setting] = FIT_MAP[kind](likely, rows.labels[where], rows.ids[where])
    return maps


def perplexity_judge(maps: Mapping[Setting, Map]) -> Judge:
    """Return a judge that maps the mean log-probability to P, and makes no calls."""

    def judge(question: str, passages: tuple[int, ...], reply: Reply) -> Verdict:
        p_correct_of = maps["with_context" if passages else "closed_book"]
        return float(p_correct_of(np.exp(reply.log_prob))), reply.log_prob
        yield  # makes this a generator, as every plan is

    return judge


@rival("perplexity_rag")
def run_perplexity(session: Session) -> None:
    """Choose threshold and budget on validation, and run without a detector."""
    judge = perplexity_judge(perplexity_maps(session.stores(), session.maps))
    session.run_loop("perplexity_rag", judge)
    if session.queries != "paper":
        session.deferred.append(
            lambda: session.run_pgir_query("perplexity_rag", judge, show_all=False)
        )

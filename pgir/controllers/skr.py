"""SKR: do as helped the questions that are most like this one (Wang et al., 2023).

Followed: THUNLP-MT/SKR edb63f2, `knn.py`. Of training questions it is known whether
this backbone's answer is better, worse or as good with passages; a question retrieves
as its nearest neighbours of the first two kinds say. Departures: exact match of the
run's one reader instead of their extractor, which returns the gold answer itself where
a sentence contains it; and the encoder, see `question_vectors`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from beatrice.pgir.controllers.calls import Plan, SearchConfig, no_rag, vanilla_rag
from beatrice.pgir.controllers.session import QuestionEncoder, Session, right_of, rival

NEIGHBOURS = (5, 6, 7, 8, 9, 10)  # k, those that the paper tries
_BATCH = 64


def question_encoder(
    training: Sequence[str], checkpoint: Path | None = None
) -> QuestionEncoder:
    """Return what encodes questions for the rivals that read questions alone.

    Args:
      training: questions that the words are weighed on, where there is no checkpoint.
      checkpoint: folder of a sentence encoder (SKR takes SimCSE). None counts words
        and pairs of words (TF-IDF), which needs no weights.
    """
    if checkpoint is not None:
        return QuestionEncoder(checkpoint.name, _transformer(checkpoint))
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(training)
    return QuestionEncoder("TF-IDF", lambda texts: words.transform(texts).toarray())


def _transformer(checkpoint: Path) -> Callable[[Sequence[str]], np.ndarray]:
    """Return the mean last state over a text's tokens, at length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint).eval()

    @torch.no_grad()
    def vectors(texts: Sequence[str]) -> np.ndarray:
        parts = []
        for first in range(0, len(texts), _BATCH):
            given = tokenizer(
                list(texts[first : first + _BATCH]),
                padding=True,
                truncation=True,
                max_length=128,
                return_tensors="pt",
            )
            states = model(**given).last_hidden_state
            mask = given["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(means, dim=-1).numpy())
        return np.concatenate(parts)

    return vectors


def wants_retrieval(
    n_near_better: int, n_near_worse: int, counts: tuple[int, int, int], k: int
) -> bool:
    """Return the vote of the neighbours, as `knn.py` counts it.

    Args:
      n_near_better: neighbours that answered better with passages.
      n_near_worse: those that answered worse.
      counts: of all training questions those better, those worse, and all.
      k: neighbours asked.
    """
    n_better, n_worse, n_all = counts
    if n_better < n_worse:
        margin = (n_worse - n_better) * k // n_all
        lead = n_near_worse - n_near_better
        return not (lead > 0 and lead >= margin)
    margin = (n_better - n_worse) * k // n_all
    lead = n_near_better - n_near_worse
    return lead > 0 and lead >= margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Training questions on which retrieval changed something.

    Attributes:
      vectors: `[n, d]`, of length 1.
      is_better: `[n]` bool, whether passages helped; else they hurt.
      n_all: training questions, those included on which nothing changed.
      encoder: of questions.
    """

    vectors: np.ndarray
    is_better: np.ndarray
    n_all: int
    encoder: QuestionEncoder

    def retrieves(self, questions: Sequence[str], k: int) -> np.ndarray:
        """Return whether each question is to retrieve, `[n_questions]` bool."""
        counts = (
            int(self.is_better.sum()),
            int((~self.is_better).sum()),
            self.n_all,
        )
        if not len(self.vectors):  # nothing ever changed: as at a tie, no vote wins
            return np.full(len(questions), wants_retrieval(0, 0, counts, k))
        near = self.encoder.vectors(questions) @ self.vectors.T
        order = np.argsort(-near, axis=1, kind="stable")[:, :k]
        votes = self.is_better[order]
        return np.array(
            [
                wants_retrieval(int(own.sum()), int((~own).sum()), counts, k)
                for own in votes
            ]
        )


def neighbours_of(
    questions: Sequence[str],
    without: np.ndarray,
    with_passages: np.ndarray,
    encoder: QuestionEncoder,
) -> Neighbours:
    """Return the index of training questions.

    Args:
      questions: of the training split.
      without: `[n]` bool, whether the closed-book answer is right.
      with_passages: the same of the answer after one retrieval.
      encoder: of questions.
    """
    changed = np.flatnonzero(without != with_passages)
    vectors = encoder.vectors([questions[i] for i in changed]) if len(changed) else []
    return Neighbours(
        vectors=np.asarray(vectors),
        is_better=with_passages[changed],
        n_all=len(questions),
        encoder=encoder,
    )


def skr(question: str, retrieves: bool, config: SearchConfig) -> Plan[str]:
    """Answer as the vote says; one generation either way."""
    if retrieves:
        return (yield from vanilla_rag(question, config))
    return (yield from no_rag(question))


@rival("skr", "2023-10", "encoder")
def run_skr(session: Session) -> None:
    """Learn from training questions, choose k on validation, and run."""
    without, with_passages = (
        right_of(session.training, found) for found in session.outcomes
    )
    questions = [example.question for example in session.training]
    index = neighbours_of(questions, without, with_passages, session.encoder())
    asked = [e for one in session.sets for e in one.examples]
    votes = {
        k: dict(
            zip(
                [e.id for e in asked],
                index.retrieves([e.question for e in asked], k),
                strict=True,
            )
        )
        for k in NEIGHBOURS
    }
    shared = session.config.search
    plan = lambda k, e: skr(e.question, bool(votes[k][e.id]), shared)  # noqa: E731
    session.tune("skr", NEIGHBOURS, plan)

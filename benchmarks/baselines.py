"""Rival detectors that score the same answers: the text alone, and its perplexity.

How far surface text goes is the question of the paper's appendix "How Far Surface Text
Alone Goes"; the linear rung of its ladder is here. A text is the question, the answer
and, with context, the passages as the model saw them. Scores are oriented as
everywhere: higher means more likely correct.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from extract.generate.requests import variants_of
from extract.run.contents import read_answers, read_examples
from extract.run.directory import RunDir
from extract.store.read import FeatureStore, read_family
from jaxprobe.features.rows import Rows

SURPRISAL = 1  # column of a prob row: p(v), -log p(v), entropy, top p, margin


def joined_text(question: str, answer: str, passages: Sequence[str] = ()) -> str:
    """Return what the detector reads of one answer: a line for each part."""
    return "\n".join((question, answer, *passages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDetector:
    """A fitted word-level TF-IDF and logistic regression."""

    pipeline: Pipeline

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Return P(answer is correct), `[n_examples]` float64 in [0, 1].

        Words that no training text had count for nothing.
        """
        if not texts:
            return np.zeros(0)
        return self.pipeline.predict_proba(texts)[:, 1]


def fit_tfidf(texts: Sequence[str], labels: Sequence[bool]) -> TextDetector:
    """Fit the text-only detector.

    Args:
      texts: `n_examples` strings, see `joined_text`.
      labels: `n_examples`, True where the answer is correct.

    Raises:
      ValueError: the lengths differ, or only one class is there.
    """
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (len(texts),):
        raise ValueError(
            f"labels have shape {is_correct.shape}, expected one per text "
            f"({len(texts)})"
        )
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"the {len(texts)} training labels hold one class only; a text detector "
            "needs correct and incorrect answers"
        )
    # One-letter words and digits are answers too; scikit-learn's own pattern drops
    # them.
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b")
    regression = LogisticRegression(C=1.0, max_iter=2000)
    pipeline = make_pipeline(vectorizer, regression).fit(texts, is_correct)
    return TextDetector(pipeline=pipeline)


def text_scores(run: RunDir, rows: Rows) -> np.ndarray:
    """Return the text-only detector's scores of every row, `[1, n_rows]`."""
    examples = {example.id: example for example in read_examples(run)}
    answers = {a.key: a for a in read_answers(run, rows.setting)}

    def text(example_id: str, variant: str) -> str:
        example = examples[example_id]
        answer = answers[example_id, rows.setting, variant]
        passages = dict(variants_of(rows.setting, example))[variant]
        shown = [p.text for i, p in enumerate(passages) if i not in answer.dropped]
        return joined_text(example.question, answer.text, shown)

    texts = list(map(text, rows.ids, rows.variants))
    where = rows.where("train")
    detector = fit_tfidf([texts[i] for i in where], rows.labels[where])
    return detector.score(texts)[None]


def perplexity_score(prob_rows: np.ndarray, answer_span: tuple[int, int]) -> float:
    """Return minus the mean surprisal of the answer, in nats; at most 0.

    This is the logarithm of the inverse perplexity, so higher means more likely
    correct. An answer without a token has an empty literal span; it is read where it
    was given, at the last prompt token, which emitted the end.

    Args:
      prob_rows: `[n_tokens, 5]`, the prob family of one example, any float dtype.
      answer_span: absolute `[start, stop)` into those rows.

    Raises:
      ValueError: the span is not inside the rows.
    """
    start, stop = answer_span
    if not 0 <= start <= stop <= len(prob_rows) or stop == 0:
        raise ValueError(
            f"answer span [{start}, {stop}) is outside the {len(prob_rows)} tokens of "
            "this example"
        )
    start = min(start, stop - 1)
    surprisal = np.asarray(prob_rows[start:stop, SURPRISAL], dtype=np.float64)
    return -float(surprisal.mean())


def perplexity_scores(store: FeatureStore) -> np.ndarray:
    """Return the score of every row of a store, `[1, n_rows]`."""
    ragged = read_family(store, "prob")
    spans = store.spec.spans[:, 2].tolist()
    return np.array(
        [[perplexity_score(ragged.example(i), span) for i, span in enumerate(spans)]]
    )

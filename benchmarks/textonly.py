"""Two detectors that need no internals: the words alone, and the answer's likelihood.

How far surface text goes is the question of the paper's appendix "How Far Surface
Text Alone Goes"; the linear rung of its ladder is here. Scores are oriented as
everywhere: higher means more likely correct.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

SURPRISAL = 1  # column of a prob row: p(v), -log p(v), entropy, top p, margin


def _texts(questions: Sequence[str], answers: Sequence[str]) -> list[str]:
    """One text per example, the answer on its own line after the question."""
    if len(questions) != len(answers):
        raise ValueError(
            f"{len(questions)} questions and {len(answers)} answers; expected one "
            "answer per question"
        )
    return [f"{q}\n{a}" for q, a in zip(questions, answers, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDetector:
    """A fitted word-level TF-IDF and logistic regression."""

    vectorizer: TfidfVectorizer
    regression: LogisticRegression

    def score(self, questions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Return P(answer is correct), `[n_examples]` float64 in [0, 1].

        Words that the training texts did not have count for nothing.
        """
        if not questions and not answers:
            return np.zeros(0)
        features = self.vectorizer.transform(_texts(questions, answers))
        return self.regression.predict_proba(features)[:, 1]


def fit_tfidf(
    questions: Sequence[str], answers: Sequence[str], labels: Sequence[bool]
) -> TextDetector:
    """Fit the text-only detector on question and answer.

    Args:
      questions: `n_examples` strings.
      answers: `n_examples` strings, the model's own answers; may be empty strings.
      labels: `n_examples`, True where the answer is correct.

    Raises:
      ValueError: the lengths differ, or only one class is there.
    """
    texts = _texts(questions, answers)
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (len(texts),):
        raise ValueError(
            f"labels have shape {is_correct.shape}, expected one per question "
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
    regression.fit(vectorizer.fit_transform(texts), is_correct)
    return TextDetector(vectorizer=vectorizer, regression=regression)


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

"""A detector that needs no internals: the words alone.

How far surface text goes is the question of the paper's appendix "How Far Surface
Text Alone Goes"; the linear rung of its ladder is here. A text is the question, the
answer and, with context, the passages as the model saw them. Scores are oriented as
everywhere: higher means more likely correct.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from extract.generate.requests import variants_of
from extract.records import Answer, Example
from extract.run.contents import read_answers, read_examples
from extract.run.directory import RunDir
from jaxprobe.features.rows import Rows


def joined_text(question: str, answer: str, passages: Sequence[str] = ()) -> str:
    """Return what the detector reads of one answer: a line for each part."""
    return "\n".join((question, answer, *passages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDetector:
    """A fitted word-level TF-IDF and logistic regression."""

    vectorizer: TfidfVectorizer
    regression: LogisticRegression

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Return P(answer is correct), `[n_examples]` float64 in [0, 1].

        Words that the training texts did not have count for nothing.
        """
        if not texts:
            return np.zeros(0)
        features = self.vectorizer.transform(texts)
        return self.regression.predict_proba(features)[:, 1]


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
    regression.fit(vectorizer.fit_transform(texts), is_correct)
    return TextDetector(vectorizer=vectorizer, regression=regression)


def _text(example: Example, answer: Answer) -> str:
    """Return question, answer, and the passages that the model was shown."""
    passages = dict(variants_of(answer.setting, example))[answer.variant]
    kept = [p.text for i, p in enumerate(passages) if i not in answer.dropped]
    return joined_text(example.question, answer.text, kept)


def text_scores(run: RunDir, rows: Rows) -> np.ndarray:
    """Return the text-only detector's scores of every row, `[1, n_rows]`."""
    examples = {example.id: example for example in read_examples(run)}
    answers = {a.key: a for a in read_answers(run, rows.setting)}
    texts = [
        _text(examples[example_id], answers[example_id, rows.setting, variant])
        for example_id, variant in zip(rows.ids, rows.variants, strict=True)
    ]
    where = rows.where("train")
    detector = fit_tfidf([texts[i] for i in where], rows.labels[where])
    return detector.score(texts)[None]

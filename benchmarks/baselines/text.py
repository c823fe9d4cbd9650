"""Text alone: TF-IDF and logistic regression, no internals.

How far surface text goes is the question of the paper's appendix "How Far Surface Text
Alone Goes"; the linear rung of its ladder is here. A text is the question, the answer
and, with context, the passages as the model saw them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from extract.generate.requests import answer_config, variants_of
from extract.run.contents import read_answers, read_examples
from extract.run.directory import RunDir
from jaxprobe.features.rows import Rows


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
    template = answer_config(run).prompt.prompt_template()

    def text(example_id: str, variant: str) -> str:
        example = examples[example_id]
        answer = answers[example_id, rows.setting, variant]
        passages = dict(variants_of(rows.setting, example))[variant]
        shown = [
            template.passage_text(passage)
            for i, passage in enumerate(passages)
            if i not in answer.dropped
        ]
        return joined_text(example.question, answer.text, shown)

    texts = list(map(text, rows.ids, rows.variants))
    where = rows.where("train")
    detector = fit_tfidf([texts[i] for i in where], rows.labels[where])
    return detector.score(texts)[None]

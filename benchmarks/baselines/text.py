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

from beatrice.benchmarks.baselines.linear import chosen_row
from beatrice.extract.generate.prompts import PromptTemplate
from beatrice.extract.generate.requests import variants_of
from beatrice.extract.records import Answer, Example
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.regression import fit_linear


def joined_text(question: str, answer: str, passages: Sequence[str] = ()) -> str:
    """Return what the detector reads of one answer: a line for each part."""
    return "\n".join((question, answer, *passages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDetector:
    """A fitted word-level TF-IDF and logistic regression.

    Attributes:
      vectorizer: fitted on the training texts.
      regression: of the chosen penalty.
      valid_auroc: AUROC on the validation texts, by which it was chosen.
    """

    vectorizer: TfidfVectorizer
    regression: LogisticRegression
    valid_auroc: float

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Return P(answer is correct), `[n_examples]` float64 in [0, 1].

        Words that no training text had count for nothing.
        """
        if not texts:
            return np.zeros(0)
        return self.regression.predict_proba(self.vectorizer.transform(texts))[:, 1]


def word_pairs() -> TfidfVectorizer:
    """Return TF-IDF of words and pairs of neighbours, to be fitted."""
    # One-letter words and digits are answers too; scikit-learn's own pattern drops
    # them.
    return TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b")


def fit_tfidf(
    texts: Sequence[str],
    labels: Sequence[bool],
    valid_texts: Sequence[str],
    valid_labels: Sequence[bool],
) -> TextDetector:
    """Fit the text-only detector; validation AUROC chooses the penalty.

    Args:
      texts: `n_examples` strings, see `joined_text`.
      labels: `n_examples`, True where the answer is correct.
      valid_texts: the same of the validation split.
      valid_labels: of the same.

    Raises:
      ValueError: the lengths differ, or only one class is there.
    """
    vectorizer = word_pairs()
    train = vectorizer.fit_transform(texts)
    valid = vectorizer.transform(valid_texts)
    found = fit_linear(train, labels, valid, valid_labels)
    return TextDetector(vectorizer=vectorizer, **found._asdict())


def texts_of(
    rows: Rows,
    examples: Sequence[Example],
    answers: Sequence[Answer],
    template: PromptTemplate,
) -> list[str]:
    """Return what a text-only detector reads of every row, see `joined_text`.

    Args:
      rows: what the rows are.
      examples: the question of every row.
      answers: the answer of every row.
      template: how passages were shown to the model.
    """

    def text(example: Example, answer: Answer) -> str:
        passages = dict(variants_of(rows.setting, example))[answer.variant]
        shown = [
            template.passage_text(passage)
            for i, passage in enumerate(passages)
            if i not in answer.dropped
        ]
        return joined_text(example.question, answer.text, shown)

    return list(map(text, examples, answers))


def text_scores(
    texts: Sequence[str], rows: Rows, others: Sequence[str] | None = None
) -> tuple[np.ndarray, ResultRow]:
    """Return the text-only detector's scores, `[1, n]`, and the penalty's row.

    Args:
      texts: of every row, see `texts_of`; validation chooses the penalty.
      rows: what the rows are.
      others: texts that are scored, by default those of the rows.
    """
    train, valid = rows.where("train"), rows.where("validation")
    detector = fit_tfidf(
        [texts[i] for i in train],
        rows.labels[train],
        [texts[i] for i in valid],
        rows.labels[valid],
    )
    chosen = chosen_row(rows, "tfidf", "inverse_penalty", detector.regression.C)
    return detector.score(texts if others is None else others)[None], chosen

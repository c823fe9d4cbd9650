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

from extract.generate.requests import answer_config, variants_of
from extract.records import IN_DOMAIN
from extract.run.contents import read_answers, read_examples
from extract.run.directory import RunDir
from extract.run.results import ResultRow
from jaxprobe.features.rows import Rows
from jaxprobe.metrics import auroc


def joined_text(question: str, answer: str, passages: Sequence[str] = ()) -> str:
    """Return what the detector reads of one answer: a line for each part."""
    return "\n".join((question, answer, *passages))


# Inverse strengths of the penalty, from which validation chooses; the paper gives none.
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


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
    is_correct, is_valid_correct = (
        _classes(*one, split)
        for split, *one in (
            ("training", texts, labels),
            ("validation", valid_texts, valid_labels),
        )
    )
    # One-letter words and digits are answers too; scikit-learn's own pattern drops
    # them.
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b")
    train = vectorizer.fit_transform(texts)
    valid = vectorizer.transform(valid_texts)

    def fitted(inverse_penalty: float) -> TextDetector:
        regression = LogisticRegression(C=inverse_penalty, max_iter=2000)
        p_correct = regression.fit(train, is_correct).predict_proba(valid)[:, 1]
        found = auroc(p_correct, is_valid_correct).value
        return TextDetector(
            vectorizer=vectorizer, regression=regression, valid_auroc=found
        )

    # Of equals, the strongest penalty: the first.
    return max(map(fitted, INVERSE_PENALTIES), key=lambda one: one.valid_auroc)


def _classes(texts: Sequence[str], labels: Sequence[bool], split: str) -> np.ndarray:
    """Return the labels as an array, or refuse them."""
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (len(texts),):
        raise ValueError(
            f"labels have shape {is_correct.shape}, expected one per text "
            f"({len(texts)})"
        )
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"the {len(texts)} {split} labels hold one class only; a text detector "
            "needs correct and incorrect answers"
        )
    return is_correct


def text_scores(run: RunDir, rows: Rows) -> tuple[np.ndarray, ResultRow]:
    """Return the text-only detector's scores of every row, `[1, n_rows]`.

    And the row of the penalty that validation chose.
    """
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
    train, valid = rows.where("train"), rows.where("validation")
    detector = fit_tfidf(
        [texts[i] for i in train],
        rows.labels[train],
        [texts[i] for i in valid],
        rows.labels[valid],
    )
    return detector.score(texts)[None], ResultRow(
        experiment="chosen",
        detector="tfidf",
        metric="inverse_penalty",
        value=detector.regression.C,
        **rows.fields_of(IN_DOMAIN, "validation"),
    )

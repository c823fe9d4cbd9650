"""Logistic regression on fixed features, its penalty chosen by validation rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import spmatrix
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from beatrice.jaxprobe.metrics import auroc

# Inverse strengths of the penalty, from which validation chooses; the paper gives none.
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


class LinearFit(NamedTuple):
    """A fitted regression, and the validation AUROC by which it was chosen."""

    regression: LogisticRegression | LinearSVC
    valid_auroc: float


def logistic_regression(inverse_penalty: float) -> LogisticRegression:
    """Return a logistic regression to be fitted."""
    return LogisticRegression(C=inverse_penalty, max_iter=2000)


def fit_linear(
    train: np.ndarray | spmatrix,
    labels: Sequence[bool],
    valid: np.ndarray | spmatrix,
    valid_labels: Sequence[bool],
    regression_of: Callable[
        [float], LogisticRegression | LinearSVC
    ] = logistic_regression,
) -> LinearFit:
    """Fit on training answers; validation AUROC chooses the penalty.

    Of equals, the strongest penalty.

    Args:
      train: `[n_train, n_features]`.
      labels: `n_train`, True where the answer is correct.
      valid: `[n_validation, n_features]`.
      valid_labels: of the same.
      regression_of: what is fitted, of an inverse penalty.

    Raises:
      ValueError: the lengths differ, or only one class is there.
    """
    is_correct = both_classes(labels, train.shape[0], "training")
    is_valid_correct = both_classes(valid_labels, valid.shape[0], "validation")

    def fitted(inverse_penalty: float) -> LinearFit:
        regression = regression_of(inverse_penalty).fit(train, is_correct)
        scores = regression.decision_function(valid)
        return LinearFit(regression, auroc(scores, is_valid_correct).value)

    return max(map(fitted, INVERSE_PENALTIES), key=lambda one: one.valid_auroc)


def block_scale(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what to subtract from a block of features, and what to divide by.

    Features then have mean 0 and one variance on the training rows, and together
    those of a row have variance 1, whatever the block's width: one range of penalties
    serves ten features and ten thousand, and blocks can stand side by side.

    Args:
      train: `[n_train, n_features]` of the training rows; a feature that is constant
        there is only centred.

    Returns:
      means and divisors, `[n_features]`, of the dtype of `train`.
    """
    spread = train.std(axis=0)
    return train.mean(axis=0), np.where(spread > 0, spread, 1) * train.shape[1] ** 0.5


def both_classes(labels: Sequence[bool], n: int, split: str) -> np.ndarray:
    """Return `n` labels of both classes as an array.

    Raises:
      ValueError: there are not `n`, or only one class is there.
    """
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (n,):
        raise ValueError(
            f"labels have shape {is_correct.shape}, expected one per answer ({n})"
        )
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"the {n} {split} labels hold one class only; logistic regression needs "
            "correct and incorrect answers"
        )
    return is_correct

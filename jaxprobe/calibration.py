"""From a score to a calibrated probability.

Isotonic regression on validation scores (the controller section of the paper), kept as
two arrays; and the measures of how well probabilities are calibrated.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Calibrator(NamedTuple):
    """A non-decreasing piecewise linear map, constant outside its range.

    Attributes:
      scores: `[n_knots]` float64, increasing.
      p_correct: `[n_knots]` float64 in [0, 1], non-decreasing.
    """

    scores: np.ndarray
    p_correct: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Calibrated probability of being correct, of the shape of `scores`."""
        return np.interp(scores, self.scores, self.p_correct)


class Reliability(NamedTuple):
    """Equal-width bins of predicted probability.

    Attributes:
      edges: `[n_bins + 1]`, from 0 to 1.
      confidence: `[n_bins]` mean prediction; NaN in an empty bin.
      accuracy: `[n_bins]` share of correct answers; NaN in an empty bin.
      n_examples: `[n_bins]`.
    """

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    n_examples: np.ndarray


def fit_calibrator(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Calibrator:
    """Isotonic regression of correctness on scores, away from certainty.

    A level that the regression fits to `k` right ones of `n` is worth (k + 1/2) / (n +
    1), the midpoint of Wilson's interval of one standard error. No probability lies
    beyond the highest and the lowest of these: ten right answers among ten are no 1.0,
    and levels with hundreds of rows stay where they are (the paper has no such bound).

    Args:
      scores: `[n_examples]`, higher means more likely correct.
      labels: `[n_examples]` bool.
      weights: `[n_examples]`, or None for ones.
    """
    # Here, since it takes a second to load, and most stages fit no map.
    from sklearn.isotonic import IsotonicRegression

    scores = np.asarray(scores, np.float64)
    if not scores.size or not np.isfinite(scores).all():
        raise ValueError(
            f"calibration needs finite scores; got {scores.size}, of which "
            f"{int((~np.isfinite(scores)).sum())} are not finite"
        )
    weights = np.ones_like(scores) if weights is None else np.asarray(weights)
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    fitted = model.fit_transform(
        scores, np.asarray(labels, np.float64), sample_weight=weights
    )
    levels, level_of = np.unique(fitted, return_inverse=True)
    n = np.bincount(level_of, weights)
    supported = (levels * n + 0.5) / (n + 1.0)
    bounded = np.clip(model.y_thresholds_, supported.min(), supported.max())
    return Calibrator(model.X_thresholds_, bounded)


def folds_of(ids: Sequence[str] | np.ndarray, n_folds: int) -> np.ndarray:
    """Put questions into folds by id alone, `[n]`: a rewording goes along."""
    digests = (hashlib.sha256(str(x).encode()).digest() for x in ids)
    return np.array([int.from_bytes(x[:8], "big") % n_folds for x in digests], int)


def cross_fit(
    scores: np.ndarray, labels: np.ndarray, folds: np.ndarray, n_folds: int
) -> tuple[Calibrator, ...]:
    """Return for every fold the map that was fitted on the other folds.

    What is searched on probabilities of rows that their own map has seen is searched
    on numbers that are too good; these have not.

    Args:
      scores: `[n_examples]`.
      labels: `[n_examples]` bool.
      folds: `[n_examples]` int, from 0.
      n_folds: how many there are; one may be empty.
    """
    return tuple(
        fit_calibrator(scores[folds != k], labels[folds != k]) for k in range(n_folds)
    )


def brier(p_correct: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared difference of probability and outcome, in [0, 1]; NaN of nothing."""
    if not len(labels):
        return float("nan")
    return float(np.mean(np.square(np.asarray(p_correct) - np.asarray(labels))))


def reliability(
    p_correct: np.ndarray, labels: np.ndarray, n_bins: int = 15
) -> Reliability:
    """Mean prediction and accuracy per equal-width bin of predicted probability."""
    p_correct, labels = np.asarray(p_correct, float), np.asarray(labels, float)
    edges = np.linspace(0.0, 1.0, n_bins + 1)
    bins = np.clip(np.searchsorted(edges, p_correct, side="right") - 1, 0, n_bins - 1)
    count = np.bincount(bins, minlength=n_bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bins, p_correct, n_bins) / count
        accuracy = np.bincount(bins, labels, n_bins) / count
    return Reliability(edges, confidence, accuracy, count)


def ece(p_correct: np.ndarray, labels: np.ndarray, n_bins: int = 15) -> float:
    """Expected calibration error over equal-width bins, in [0, 1]; NaN of nothing."""
    if not len(labels):
        return float("nan")
    bins = reliability(p_correct, labels, n_bins)
    gap = np.abs(bins.confidence - bins.accuracy)
    return float(np.nansum(gap * bins.n_examples) / bins.n_examples.sum())

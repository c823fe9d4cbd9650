"""AUROC within training, and AUROC, AUPRC and their intervals for evaluation.

Scores are oriented: higher means more likely correct. AUROC takes the correct answer as
the positive class (the sign convention does not matter to it); AUPRC takes the
incorrect one, ranked by the negated score.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 256  # resamples at a time


def masked_auroc(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """AUROC with half credit for ties; compiled and `vmap`-able.

    Args:
      scores: `[n_examples]` float.
      labels: `[n_examples]` float32, 1 correct and 0 incorrect.
      weights: `[n_examples]` float32, at least 0; 0 leaves an example out.

    Returns:
      Scalar float32 in [0, 1]; NaN where a class is missing, or a score that counts is
      NaN: sorted, it would look like a tie.
    """
    order = jnp.argsort(scores)
    ordered = scores[order]
    positive = (weights * labels)[order]
    negative = (weights * (1.0 - labels))[order]
    # Negatives strictly below, and up to the end of, each group of equal scores.
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] > ordered[:-1]])
    stops = jnp.concatenate([starts[1:], jnp.ones(1, bool)])
    total = jnp.cumsum(negative)
    below = jax.lax.cummax(jnp.where(starts, total - negative, 0.0))
    upto = jax.lax.cummin(jnp.where(stops, total, jnp.inf), reverse=True)
    credit = jnp.sum(positive * 0.5 * (below + upto))
    lost = (jnp.isnan(scores) & (weights > 0)).any()
    return jnp.where(lost, jnp.nan, credit / (positive.sum() * negative.sum()))


class Metric(NamedTuple):
    """A value, or NaN and the reason why it is undefined."""

    value: float
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """Cluster bootstrap over questions."""

    n_resamples: int = 1000
    seed: int = 0


def _undefined(scores: np.ndarray, labels: np.ndarray) -> str | None:
    """Say why no ranking metric exists for these scores, or None."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"scores {scores.shape} and labels {labels.shape} must be equally long"
        )
    if not labels.size:
        return "no labelled example"
    if labels.all():
        return "every answer is correct: one class only"
    if not labels.any():
        return "every answer is incorrect: one class only"
    if not np.isfinite(scores).all():
        return f"{int((~np.isfinite(scores)).sum())} scores are not finite"
    return None


def auroc(scores: np.ndarray, labels: np.ndarray) -> Metric:
    """Area under the ROC curve, `[n_examples]` scores against boolean labels."""
    return _point(weighted_auroc, scores, labels)


def auprc(scores: np.ndarray, labels: np.ndarray) -> Metric:
    """Average precision of finding the incorrect answers by their low scores."""
    return _point(weighted_auprc, scores, labels)


def _point(
    metric: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    scores: np.ndarray,
    labels: np.ndarray,
) -> Metric:
    """One value of a metric, every example counted once, as its intervals count."""
    scores, labels = np.asarray(scores), np.asarray(labels).astype(bool)
    if reason := _undefined(scores, labels):
        return Metric(math.nan, reason)
    return Metric(float(metric(scores, labels, np.ones((len(labels), 1)))[0]))


def _ordered(scores: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return the places `where` by rising score."""
    return where[np.argsort(scores[where], kind="stable")]


def _running(weights: np.ndarray) -> np.ndarray:
    """Return the totals before each row and after the last, `[n_rows + 1, n]`."""
    totals = np.zeros((len(weights) + 1, weights.shape[1]), weights.dtype)
    np.cumsum(weights, axis=0, out=totals[1:])
    return totals


def _by_block(
    metric: Callable[[np.ndarray], np.ndarray], weights: np.ndarray
) -> np.ndarray:
    """Apply a metric to blocks of resamples, so that running totals stay in cache."""
    starts = range(0, weights.shape[1], _BLOCK)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.concatenate([metric(weights[:, i : i + _BLOCK]) for i in starts])


def weighted_auroc(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """AUROC under many weightings of the same examples, from one sort.

    Args:
      scores: `[n_examples]`.
      labels: `[n_examples]` bool.
      weights: `[n_examples, n_resamples]`, at least 0.

    Returns:
      `[n_resamples]` float64; NaN where a resample lacks a class.
    """
    right, wrong = (_ordered(scores, np.flatnonzero(x)) for x in (labels, ~labels))
    # How many wrong answers score below each right one, and how many at most as much.
    below = np.searchsorted(scores[wrong], scores[right], "left")
    upto = np.searchsorted(scores[wrong], scores[right], "right")
    has_ties = bool((below != upto).any())

    def metric(block: np.ndarray) -> np.ndarray:
        of_right, beaten = block[right], _running(block[wrong])
        credit = np.einsum("er,er->r", of_right, beaten[below])
        if has_ties:
            credit = 0.5 * (credit + np.einsum("er,er->r", of_right, beaten[upto]))
        return credit / (of_right.sum(axis=0) * beaten[-1])

    return _by_block(metric, weights)


def weighted_auprc(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Average precision of the incorrect answers under many weightings; see above."""
    right, wrong = (_ordered(scores, np.flatnonzero(x)) for x in (labels, ~labels))
    # What is flagged with each wrong answer: all that score at most as much.
    wrong_upto = np.searchsorted(scores[wrong], scores[wrong], "right")
    right_upto = np.searchsorted(scores[right], scores[wrong], "right")

    def metric(block: np.ndarray) -> np.ndarray:
        of_wrong, of_right = _running(block[wrong]), _running(block[right])
        found = of_wrong[wrong_upto]
        flagged = of_right[right_upto]
        flagged += found
        precision = np.divide(found, flagged, out=flagged, where=flagged > 0)
        value = np.einsum("er,er->r", precision, block[wrong]) / of_wrong[-1]
        # As for AUROC, a resample without a right answer says nothing about ranking.
        return np.where(of_right[-1] > 0, value, np.nan)

    return _by_block(metric, weights)


def cluster_weights(clusters: np.ndarray, config: BootstrapConfig) -> np.ndarray:
    """How often each example is drawn when whole clusters are resampled.

    Args:
      clusters: `[n_examples]` question identifiers; the rows of one question move
        together.
      config: number of resamples and seed.

    Returns:
      `[n_examples, n_resamples]` float64 counts.
    """
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    n_clusters = int(cluster.max()) + 1
    rng = np.random.default_rng(config.seed)
    even = np.full(n_clusters, 1.0 / n_clusters)
    counts = rng.multinomial(n_clusters, even, size=config.n_resamples)
    return counts.T[cluster].astype(np.float64)


def interval_of(draws: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of a metric's resamples; undefined ones are left out."""
    low, high = np.nanpercentile(draws, (2.5, 97.5))
    return float(low), float(high)

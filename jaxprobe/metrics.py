"""AUROC within training, and AUROC, AUPRC and their intervals for evaluation.

Scores are oriented: higher means more likely correct. AUROC takes the correct answer as
the positive class (the sign convention does not matter to it); AUPRC takes the
incorrect one, ranked by the negated score.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

MetricName = Literal["auroc", "auprc"]


def masked_auroc(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """AUROC with half credit for ties; compiled and `vmap`-able.

    Args:
      scores: `[n_examples]` float.
      labels: `[n_examples]` float32, 1 correct and 0 incorrect.
      weights: `[n_examples]` float32, at least 0; 0 leaves an example out.

    Returns:
      Scalar float32 in [0, 1]; NaN where a class is missing.
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
    return credit / (positive.sum() * negative.sum())


def batched_auroc(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """AUROC of several score vectors over the same labels.

    Args:
      scores: `[n_members, n_examples]` float.
      labels: `[n_examples]` bool or float.

    Returns:
      `[n_members]` float32.
    """
    labels = labels.astype(jnp.float32)
    weights = jnp.ones_like(labels)
    return jax.vmap(masked_auroc, in_axes=(0, None, None))(scores, labels, weights)


class Metric(NamedTuple):
    """A value, or NaN and the reason why it is undefined."""

    value: float
    reason: str | None = None


class Interval(NamedTuple):
    """A value with its percentile bootstrap interval, or NaNs and the reason."""

    value: float
    low: float
    high: float
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """Cluster bootstrap over questions."""

    n_resamples: int = 1000
    level: float = 0.95
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
    labels = np.asarray(labels).astype(bool)
    if reason := _undefined(np.asarray(scores), labels):
        return Metric(math.nan, reason)
    return Metric(float(roc_auc_score(labels, scores)))


def auprc(scores: np.ndarray, labels: np.ndarray) -> Metric:
    """Average precision of finding the incorrect answers by their low scores."""
    labels = np.asarray(labels).astype(bool)
    if reason := _undefined(np.asarray(scores), labels):
        return Metric(math.nan, reason)
    return Metric(float(average_precision_score(~labels, -np.asarray(scores))))


def _group_stops(ordered: np.ndarray) -> np.ndarray:
    """Index of the last element of every run of equal values."""
    return np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))


def weighted_auroc(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """AUROC under many weightings of the same examples, from one sort.

    Args:
      scores: `[n_examples]`.
      labels: `[n_examples]` bool.
      weights: `[n_resamples, n_examples]`, at least 0.

    Returns:
      `[n_resamples]` float64; NaN where a resample lacks a class.
    """
    order = np.argsort(scores, kind="stable")
    stops = _group_stops(np.asarray(scores)[order])
    ordered, positive = weights[:, order], labels[order]
    false = np.cumsum(ordered * ~positive, axis=1)[:, stops]
    true = np.diff(np.cumsum(ordered * positive, axis=1)[:, stops], axis=1, prepend=0.0)
    below = np.concatenate([np.zeros_like(false[:, :1]), false[:, :-1]], axis=1)
    credit = (true * 0.5 * (below + false)).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return credit / (true.sum(axis=1) * false[:, -1])


def weighted_auprc(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Average precision of the incorrect answers under many weightings; see above."""
    order = np.argsort(scores, kind="stable")  # lowest score: most likely incorrect
    stops = _group_stops(np.asarray(scores)[order])
    ordered, wrong = weights[:, order], ~labels[order]
    found = np.cumsum(ordered * wrong, axis=1)[:, stops]
    flagged = np.cumsum(ordered, axis=1)[:, stops]
    gained = np.diff(found, axis=1, prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(flagged > 0, found / flagged, 0.0)
        value = (precision * gained).sum(axis=1) / found[:, -1]
    # As for AUROC, a resample without a correct answer says nothing about ranking.
    return np.where(flagged[:, -1] > found[:, -1], value, np.nan)


def cluster_weights(clusters: np.ndarray, config: BootstrapConfig) -> np.ndarray:
    """How often each example is drawn when whole clusters are resampled.

    Args:
      clusters: `[n_examples]` question identifiers; the rows of one question move
        together.
      config: number of resamples and seed.

    Returns:
      `[n_resamples, n_examples]` float64 counts.
    """
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    n_clusters = int(cluster.max()) + 1
    rng = np.random.default_rng(config.seed)
    even = np.full(n_clusters, 1.0 / n_clusters)
    counts = rng.multinomial(n_clusters, even, size=config.n_resamples)
    return counts[:, cluster].astype(np.float64)


def bootstrap_interval(
    metric: MetricName,
    scores: np.ndarray,
    labels: np.ndarray,
    clusters: np.ndarray,
    config: BootstrapConfig | None = None,
) -> Interval:
    """A metric with its percentile interval under resampling of questions.

    Resamples with one class only are left out of the percentiles.

    Args:
      metric: "auroc" or "auprc".
      scores: `[n_examples]`.
      labels: `[n_examples]` bool, True where the answer is correct.
      clusters: `[n_examples]` question identifiers.
      config: resamples, level and seed.
    """
    config = config or BootstrapConfig()
    scores, labels = np.asarray(scores), np.asarray(labels).astype(bool)
    point = {"auroc": auroc, "auprc": auprc}[metric](scores, labels)
    if point.reason is not None:
        return Interval(math.nan, math.nan, math.nan, point.reason)
    resampled = {"auroc": weighted_auroc, "auprc": weighted_auprc}[metric]
    values = resampled(scores, labels, cluster_weights(clusters, config))
    values = values[np.isfinite(values)]
    if not values.size:
        reason = "every resample has one class only"
        return Interval(point.value, math.nan, math.nan, reason)
    tail = (1.0 - config.level) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return Interval(point.value, float(low), float(high))

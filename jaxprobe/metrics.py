"""AUROC for training, and AUROC, AUPRC and their intervals for evaluation.

Higher scores mean more likely correct. AUROC takes the correct answers as positive (it
is the same either way), and AUPRC the incorrect ones, ranked by the negated score.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq
from scipy.stats import t as student


def masked_auroc(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Return AUROC with half credit for ties; can be compiled and `vmap`ped.

    Args:
      scores: `[n_examples]` float.
      labels: `[n_examples]` float32, 1 correct and 0 incorrect.
      weights: `[n_examples]` float32, at least 0; 0 leaves an example out.

    Returns:
      Scalar float32 in [0, 1]; NaN if a class is missing, or if a score that counts is
      NaN, which after sorting would look like a tie.
    """
    order = jnp.argsort(scores)
    ordered = scores[order]
    positive = (weights * labels)[order]
    negative = (weights * (1.0 - labels))[order]
    # Weight of negatives strictly below each group of equal scores, and up to its end.
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] > ordered[:-1]])
    stops = jnp.concatenate([starts[1:], jnp.ones(1, bool)])
    total = jnp.cumsum(negative)
    below = jax.lax.cummax(jnp.where(starts, total - negative, 0.0))
    upto = jax.lax.cummin(jnp.where(stops, total, jnp.inf), reverse=True)
    credit = jnp.sum(positive * 0.5 * (below + upto))
    lost = (jnp.isnan(scores) & (weights > 0)).any()
    return jnp.where(lost, jnp.nan, credit / (positive.sum() * negative.sum()))


class Metric(NamedTuple):
    """A value, or NaN with the reason why it is undefined."""

    value: float
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """Cluster bootstrap over questions."""

    n_resamples: int = 10_000
    seed: int = 0


def _undefined(scores: np.ndarray, labels: np.ndarray) -> str | None:
    """Return why ranking metrics are undefined for these scores, or None."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"expected one score per label, got shapes {scores.shape}, {labels.shape}"
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
    """Return the area under the ROC curve of scores `[n_examples]` and bool labels."""
    scores, labels = np.asarray(scores), np.asarray(labels).astype(bool)
    if reason := _undefined(scores, labels):
        return Metric(math.nan, reason)
    right, wrong = scores[labels], np.sort(scores[~labels])
    below, upto = (np.searchsorted(wrong, right, side) for side in ("left", "right"))
    return Metric(float((below + upto).mean() / (2 * len(wrong))))


def auprc(scores: np.ndarray, labels: np.ndarray) -> Metric:
    """Return the average precision of finding incorrect answers by low scores."""
    scores, labels = np.asarray(scores), np.asarray(labels).astype(bool)
    if reason := _undefined(scores, labels):
        return Metric(math.nan, reason)
    wrong, everything = np.sort(scores[~labels]), np.sort(scores)
    # Numbers of wrong and of all answers that score at most as much as each wrong one.
    n_wrong, n_flagged = (
        np.searchsorted(x, wrong, "right") for x in (wrong, everything)
    )
    return Metric(float((n_wrong / n_flagged).mean()))


def auroc_gain(
    scores: np.ndarray,
    others: np.ndarray,
    labels: np.ndarray,
    questions: np.ndarray | None = None,
) -> tuple[float, float]:
    """Return the AUROC of scores minus that of others on the same rows, and its error.

    With several seeds, AUROC is the mean over seeds. The standard error comes from the
    placement of each row among the other class (DeLong, DeLong and Clarke-Pearson,
    Biometrics 1988), summed over the rows of a question (Obuchowski, Biometrics 1997).

    Args:
      scores: `[n_examples]` or `[n_seeds, n_examples]`.
      others: like `scores`.
      labels: `[n_examples]` bool, of both classes.
      questions: `[n_examples]`, equal for rows of one question, which count as one
        piece of evidence; None if every row has its own.

    Returns:
      the gain, and its standard error: NaN if a class has only one question.
    """
    ours, theirs = (_placements(x, labels) for x in (scores, others))
    gain = ours - theirs
    variance = _placement_variance(gain, labels, _numbered(questions, labels))
    return float(gain[labels].mean()), variance**0.5


_ROUNDING = 1e-9  # the AUROC of a million pairs moves in steps of 1e-6


def auroc_gain_interval(
    scores: np.ndarray, others: np.ndarray, labels: np.ndarray, questions: np.ndarray
) -> tuple[float, float, float]:
    """Return the 95 % interval of `auroc_gain`, and its two-sided p-value.

    It uses Student's t, with one degree of freedom less than the rarer class has
    questions. With 13 right answers among 600 and no true gain, 6 % of bootstrap
    p-values were at most .05 and .6 % at most .0025; of the larger of both, 3 and 0 %.
    """
    gain, error = auroc_gain(scores, others, labels, questions)
    n_rarer = min(len(np.unique(questions[rows])) for rows in (labels, ~labels))
    if n_rarer < 2:
        return -1.0, 1.0, 1.0
    error = 0.0 if error < _ROUNDING else error  # such as of means over three seeds
    # All of the rarer class are on the same side.
    if not error and abs(gain) >= _ROUNDING:
        half, p = 1 - 0.025 ** (1 / n_rarer), 2.0 ** (1 - n_rarer)
        return max(-1.0, gain - half), min(1.0, gain + half), p
    half = float(student.ppf(0.975, n_rarer - 1)) * error
    p = 2 * float(student.sf(abs(gain) / error, n_rarer - 1)) if error else 1.0
    return max(-1.0, gain - half), min(1.0, gain + half), p


def _numbered(questions: np.ndarray | None, labels: np.ndarray) -> np.ndarray:
    """Return a number for each row's question, `[n_examples]`."""
    if questions is None:
        return np.arange(len(labels))
    return np.unique(questions, return_inverse=True)[1]


def _placement_variance(
    placed: np.ndarray, labels: np.ndarray, questions: np.ndarray
) -> float:
    """Return the variance of mean placements; NaN if a class has only one question."""
    deviations = np.zeros(len(labels))
    for rows in (labels, ~labels):
        n = len(np.unique(questions[rows]))
        if n < 2:
            return math.nan
        scale = (n / (n - 1)) ** 0.5 / rows.sum()
        deviations[rows] = scale * (placed[rows] - placed[rows].mean())
    return float((np.bincount(questions, deviations) ** 2).sum())


def auroc_interval(
    scores: np.ndarray,
    labels: np.ndarray,
    questions: np.ndarray | None = None,
    n_tried: int = 1,
) -> tuple[float, float]:
    """Return a 95 % interval of AUROC that is also valid for few answers.

    It is the union of two intervals. One has every AUROC that is at most 1.96 of its
    own standard errors (Hanley and McNeil 1982, with both classes of mean size) from
    the observed one (Newcombe, Statistics in Medicine 2006, method 5). The other is
    DeLong's on the logit scale, whose error is zero if the few right answers all rank
    on top.

    Args:
      scores: `[n_examples]`, or `[n_seeds, n_examples]` for the mean AUROC.
      labels: `[n_examples]` bool; for a single class the interval is (0, 1).
      questions: `[n_examples]`, see `auroc_gain`; questions are counted, not rows.
      n_tried: number of candidates of which these scores were the best on these
        answers; the interval is simultaneous for all of them (Bonferroni).
    """
    numbers = _numbered(questions, labels)
    n_right, n_wrong = (len(np.unique(numbers[rows])) for rows in (labels, ~labels))
    if not n_right or not n_wrong:
        return 0.0, 1.0
    placed = _placements(scores, labels)
    area, n_pairs = float(placed[labels].mean()), n_right * n_wrong
    z = NormalDist().inv_cdf(1 - 0.025 / n_tried)

    def excess(expected: float) -> float:
        """Return the squared distance from `expected`, minus z**2 variances of it."""
        pairs = expected / (2 - expected), 2 * expected**2 / (1 + expected)
        rest = ((n_right + n_wrong) / 2 - 1) * (sum(pairs) - 2 * expected**2)
        variance = (expected * (1 - expected) + rest) / n_pairs
        return (area - expected) ** 2 - z**2 * variance

    inner = min(max(area, 1e-9), 1 - 1e-9)  # at 0 and 1 the standard error is zero
    low, high = (
        x if x == area else float(cast("float", brentq(excess, x, inner)))
        for x in (0.0, 1.0)
    )
    if min(n_right, n_wrong) > 1:
        variance = _placement_variance(placed, labels, numbers)
        inner = min(max(area, 0.5 / n_pairs), 1 - 0.5 / n_pairs)
        half = z * variance**0.5 / (inner * (1 - inner))
        ends = 1 / (1 + np.exp(np.array([half, -half]) - math.log(inner / (1 - inner))))
        low, high = min(low, ends[0]), max(high, ends[1])
    return float(low), float(high)


def is_gain(
    scores: np.ndarray, others: np.ndarray, labels: np.ndarray, questions: np.ndarray
) -> bool:
    """Return whether scores rank rows better than others by more than chance explains.

    The threshold is three standard errors: dozens of candidates are compared on the
    same validation rows, each at its best epoch, and one-sided 5 % for 45 of them
    together is three. For two real models, networks that gained one to three standard
    errors on their regressions were worth +.000 to +.004 AUROC on test questions, and
    −.015 to +.026 on another dataset.
    """
    gain, error = auroc_gain(scores, others, labels, questions)
    return bool(gain > 3.0 * error)


def _placements(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the share of the other class that each row is ranked correctly against.

    The result is `[n_examples]`; of scores `[n_seeds, n_examples]`, means over seeds.
    """
    if np.ndim(scores) == 2:
        return np.mean([_placements(x, labels) for x in scores], axis=0)
    right, wrong = scores[labels], scores[~labels]
    placed = np.zeros(len(labels))

    def below(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        ordered = np.sort(others)
        below, upto = (np.searchsorted(ordered, rows, s) for s in ("left", "right"))
        return (below + upto) / (2 * len(others))

    placed[labels], placed[~labels] = below(right, wrong), below(-wrong, -right)
    return placed


def stratified_auroc(
    scores: np.ndarray, labels: np.ndarray, strata: np.ndarray
) -> Metric:
    """Return AUROC within strata: the share of right-wrong pairs that rank correctly.

    Only pairs within a stratum count, so scores that only distinguish strata have one
    half. Each pair counts once, ties half; a stratum of one class has no pair.

    Args:
      scores: `[n_examples]`.
      labels: `[n_examples]` bool.
      strata: `[n_examples]`, equal for examples that are compared.
    """
    if reason := _undefined(scores, labels):
        return Metric(math.nan, reason)
    strata_rows = paired_strata(labels, strata)
    if not strata_rows:
        return Metric(math.nan, "no stratum has right and wrong answers")
    n_pairs = [float(labels[x].sum() * (~labels[x]).sum()) for x in strata_rows]
    aurocs = (auroc(scores[x], labels[x]).value for x in strata_rows)
    credits = map(operator.mul, n_pairs, aurocs)
    return Metric(sum(credits) / sum(n_pairs))


def paired_strata(labels: np.ndarray, strata: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each stratum that has both right and wrong answers."""
    strata_rows = (np.flatnonzero(strata == stratum) for stratum in np.unique(strata))
    return [rows for rows in strata_rows if 0 < labels[rows].sum() < len(rows)]


def _rising(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    among: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray | None, np.ndarray | None]]:
    """Yield the weights of right and of wrong answers at each score, in rising order.

    Weights are `[n_resamples]`, or None if no answer of that kind has the score.
    `among` are the indices of the answers that count; None is all.
    """
    among = np.arange(len(scores)) if among is None else among
    order = among[np.argsort(scores[among], kind="stable")]
    edges = np.flatnonzero(np.diff(scores[order], prepend=np.nan, append=np.nan))
    for start, stop in itertools.pairwise(edges.tolist()):
        tied = order[start:stop]
        if stop - start == 1:
            row = weights[tied[0]]  # a view: a copy would cost as much again
            yield (row, None) if labels[tied[0]] else (None, row)
        else:
            is_right = labels[tied]
            yield (
                weights[tied[is_right]].sum(axis=0),
                weights[tied[~is_right]].sum(axis=0),
            )


def weighted_metrics(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Return AUROC and AUPRC of examples under many weightings, with a single sort.

    In one pass over the ranks, each step adds a number per resample to sums that stay
    in the cache, some ten times as fast as running totals over `[n_examples,
    n_resamples]`. Sums of counts are exact up to 2**24. Other sums and quotients are
    rounded to float32: AUPRC is off by about 1e-6, and values are clipped to one.

    Args:
      scores: `[n_examples]`, finite.
      labels: `[n_examples]` bool.
      weights: `[n_examples, n_resamples]` float32, such as the counts of `resamples`.

    Returns:
      `[n_resamples]` float32 by the metric's name; NaN if a resample lacks a class.
    """
    zeros = np.zeros((5, weights.shape[1]), np.float32)
    n_wrong, n_flagged, credit, precision, scratch = zeros
    n_flagged += np.float32(1e-30)  # avoids 0 / 0; rounded away by the first count
    for right, wrong in _rising(scores, labels, weights):
        if right is not None:
            n_flagged += right
            n_beaten = n_wrong if wrong is None else n_wrong + 0.5 * wrong
            credit += np.multiply(right, n_beaten, out=scratch)
        if wrong is not None:
            n_flagged += wrong
            n_wrong += wrong
            np.divide(n_wrong, n_flagged, out=scratch)
            precision += np.multiply(scratch, wrong, out=scratch)
    n_right = n_flagged - n_wrong
    with np.errstate(invalid="ignore"):
        return {
            "auroc": np.minimum(credit / (n_right * n_wrong), 1),
            # As for AUROC, undefined for a resample without a right answer.
            "auprc": np.where(
                n_right >= 1, np.minimum(precision / n_wrong, 1), np.float32(np.nan)
            ),
        }


def weighted_stratified(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, *, strata: np.ndarray
) -> dict[str, np.ndarray]:
    """Return `stratified_auroc` under many weightings; NaN for those without a pair."""
    credit, n_pairs, scratch = np.zeros((3, weights.shape[1]), np.float32)
    for rows in paired_strata(labels, strata):
        n_wrong, n_right = np.zeros((2, weights.shape[1]), np.float32)
        for right, wrong in _rising(scores, labels, weights, rows):
            if right is not None:
                n_right += right
                n_beaten = n_wrong if wrong is None else n_wrong + 0.5 * wrong
                credit += np.multiply(right, n_beaten, out=scratch)
            if wrong is not None:
                n_wrong += wrong
        n_pairs += n_right * n_wrong
    with np.errstate(invalid="ignore"):
        return {"auroc": np.minimum(credit / n_pairs, 1)}


def drawn_clusters(n_clusters: int, config: BootstrapConfig) -> Iterator[np.ndarray]:
    """Yield the clusters of each resample, `[n_clusters]`, drawn with replacement."""
    rng, n_left = np.random.default_rng(config.seed), config.n_resamples
    while n_left:  # many at once: the same numbers as one by one, in half of the time
        n = min(n_left, max(1, 2**20 // n_clusters))
        yield from rng.integers(n_clusters, size=(n, n_clusters))
        n_left -= n


def resamples(
    clusters: np.ndarray, config: BootstrapConfig, *, n_weights: int = 2**24
) -> Iterator[np.ndarray]:
    """Yield how often each example is drawn when whole clusters are resampled.

    Args:
      clusters: `[n_examples]` question identifiers, at least one; the rows of a
        question are drawn together.
      config: number of resamples and seed.
      n_weights: most counts in memory at once, but at least those of 256 resamples.

    Yields:
      `[n_examples, n]` float32 counts of some resamples, in order.
    """
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    n_clusters = int(cluster.max()) + 1
    draws = drawn_clusters(n_clusters, config)
    n_block = max(256, n_weights // len(cluster))
    for start in range(0, config.n_resamples, n_block):
        n = min(n_block, config.n_resamples - start)
        weights = np.empty((len(cluster), n), np.float32)
        for i, drawn in enumerate(itertools.islice(draws, n)):
            weights[:, i] = np.bincount(drawn, minlength=n_clusters)[cluster]
        yield weights


def interval_of(draws: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of a metric's resamples, NaN left out."""
    low, high = np.nanpercentile(draws, (2.5, 97.5))
    return float(low), float(high)


def wider_interval(
    draws: np.ndarray, scores: np.ndarray, labels: np.ndarray, questions: np.ndarray
) -> tuple[float, float]:
    """Return an AUROC's 95 % interval: the union of bootstrap and `auroc_interval`."""
    both = interval_of(draws), auroc_interval(scores, labels, questions)
    return min(low for low, _ in both), max(high for _, high in both)


def wider_auprc_interval(
    draws: np.ndarray, value: float, labels: np.ndarray, questions: np.ndarray
) -> tuple[float, float]:
    """Return an AUPRC's 95 % interval: the union of bootstrap and logit intervals.

    The latter (Boyd, Eng and Page, ECML 2013) takes AUPRC as a share of the questions
    with a wrong answer, on the logit scale. With 10 right answers among 100, bootstrap
    intervals covered the truth .81 of the time if AUROC is .8, .44 if it is .998.

    Args:
      draws: `[n_resamples]` of the value.
      value: of the answers, or the mean over seeds.
      labels: `[n_examples]` bool, of both classes.
      questions: `[n_examples]`, see `auroc_gain`.
    """
    n = len(np.unique(questions[~labels]))
    share = min(max(value, 0.5 / n), 1 - 0.5 / n)  # at 0 and 1 the error is zero
    half = NormalDist().inv_cdf(0.975) / math.sqrt(n * share * (1 - share))
    middle = math.log(share / (1 - share))
    ends = (1 / (1 + math.exp(x - middle)) for x in (half, -half))
    both = interval_of(draws), tuple(ends)
    return min(low for low, _ in both), max(high for _, high in both)


def wider_stratified_interval(
    draws: np.ndarray,
    value: float,
    labels: np.ndarray,
    questions: np.ndarray,
    strata: np.ndarray,
) -> tuple[float, float]:
    """Return a stratified AUROC's 95 % interval: the union of bootstrap and Wilson's.

    The latter takes AUROC as a share of as many independent pairs as have the variance
    of Hanley and McNeil (Radiology, 1982), with the larger of its two terms for both.
    Arguments are as in `wider_auprc_interval`, and `strata` as in `stratified_auroc`.
    """
    groups = paired_strata(labels, strata)
    rows, sizes = np.concatenate(groups), np.array([len(x) for x in groups])
    right = np.array([labels[x].sum() for x in groups])
    pairs, most = right * (sizes - right), max(value, 1 - value)
    variances = pairs * (1 + (sizes - 2) * most / (1 + most))
    share = len(np.unique(questions[rows])) / len(rows)
    ends = wilson_interval(value, share * pairs.sum() ** 2 / variances.sum())
    low, high = interval_of(draws)
    return min(low, ends[0]), max(high, ends[1])


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `n` (Wilson, JASA 1927), also for 0 or 1.

    Args:
      share: in [0, 1]; may be a mean over seeds.
      n: more than 0.
    """
    z2 = NormalDist().inv_cdf(0.975) ** 2 / n
    middle, half = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    low, high = (middle - half) / (1 + z2), (middle + half) / (1 + z2)
    # For shares of 0 and 1, rounding could leave the share outside.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def two_sided_p(draws: np.ndarray) -> float:
    """Return the two-sided p-value of a difference from its resamples, in (0, 1].

    It is twice the share of resamples on zero or on its rarer side. The sample itself
    counts as one, so p is never 0. Undefined resamples are left out.
    """
    defined = draws[np.isfinite(draws)]
    rarer = min((defined <= 0).sum(), (defined >= 0).sum())
    return float(min(1.0, 2 * (1 + rarer) / (1 + len(defined))))

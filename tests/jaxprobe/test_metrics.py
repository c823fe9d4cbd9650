import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from jaxprobe.metrics import (
    BootstrapConfig,
    auprc,
    auroc,
    cluster_weights,
    interval_of,
    masked_auroc,
    weighted_auprc,
    weighted_auroc,
)


def tied_scores(n=200, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.3
    return np.round(rng.standard_normal(n) + labels, 1).astype(np.float32), labels


def test_auroc_gives_ties_half_credit():
    assert auroc(np.zeros(4), np.array([0, 1, 0, 1], bool)).value == 0.5
    assert masked_auroc(jnp.zeros(4), jnp.array([0.0, 1, 0, 1]), jnp.ones(4)) == 0.5
    scores, labels = tied_scores()
    expected = roc_auc_score(labels, scores)
    for sign, value in ((1, expected), (-1, 1 - expected)):
        assert auroc(sign * scores, labels).value == pytest.approx(value)


def test_masked_auroc_equals_sklearn_with_sample_weights():
    scores, labels = tied_scores()
    weights = np.random.default_rng(1).integers(0, 4, 200).astype(np.float32)
    got = jax.jit(masked_auroc)(scores, labels.astype(np.float32), weights)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert float(got) == pytest.approx(expected, abs=1e-6)


def test_one_class_is_undefined_and_says_so():
    assert np.isnan(masked_auroc(jnp.arange(3.0), jnp.ones(3), jnp.ones(3)))
    for metric in (auroc, auprc):
        value, reason = metric(np.arange(3.0), np.ones(3, bool))
        assert np.isnan(value) and "one class" in reason
    assert "finite" in auroc(np.array([np.nan, 1.0]), np.array([True, False])).reason


def test_a_score_that_is_not_a_number_is_no_tie():
    scores = jnp.array([jnp.nan, 0.0, 1.0, jnp.nan])
    labels = jnp.array([0.0, 0.0, 1.0, 1.0])
    assert np.isnan(masked_auroc(scores, labels, jnp.ones(4)))
    assert masked_auroc(scores, labels, jnp.array([0.0, 1, 1, 0])) == 1.0


def test_auprc_takes_the_incorrect_answer_as_positive():
    scores, labels = tied_scores()
    expected = average_precision_score(1 - labels.astype(int), -scores)
    assert auprc(scores, labels).value == pytest.approx(expected)


def test_weighted_metrics_from_one_sort_equal_sklearn():
    scores, labels = tied_scores()
    weights = cluster_weights(np.arange(200) // 2, BootstrapConfig(n_resamples=20))
    assert (weights[0] == weights[1]).all() and (weights.sum(axis=0) == 200).all()
    for i, w in enumerate(weights.T):
        assert weighted_auroc(scores, labels, weights)[i] == pytest.approx(
            roc_auc_score(labels, scores, sample_weight=w)
        )
        assert weighted_auprc(scores, labels, weights)[i] == pytest.approx(
            average_precision_score(~labels, -scores, sample_weight=w)
        )


@pytest.mark.parametrize(
    ("point", "resampled"), [(auroc, weighted_auroc), (auprc, weighted_auprc)]
)
def test_interval_holds_the_value_and_widens_with_clusters(point, resampled):
    def interval(scores, labels, clusters):
        weights = cluster_weights(clusters, BootstrapConfig())
        return interval_of(resampled(scores, labels, weights))

    scores, labels = tied_scores(400)
    low, high = interval(scores, labels, np.arange(400))
    assert low < point(scores, labels).value < high
    repeated = [np.repeat(x, 4) for x in (scores, labels)]
    copies = np.subtract(*interval(*repeated, np.repeat(np.arange(400), 4)))
    naive = np.subtract(*interval(*repeated, np.arange(1600)))
    assert copies == pytest.approx(low - high, rel=0.1)
    assert abs(naive) < 0.7 * abs(copies)


def test_an_interval_leaves_undefined_resamples_out():
    assert interval_of(np.array([0.5, np.nan, 0.5])) == (0.5, 0.5)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from jaxprobe.metrics import (
    BootstrapConfig,
    auprc,
    auroc,
    drawn_clusters,
    interval_of,
    masked_auroc,
    resamples,
    two_sided_p,
    weighted_metrics,
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


def weights_of(clusters, **config):
    return np.concatenate(list(resamples(clusters, BootstrapConfig(**config))), axis=1)


def test_resampled_metrics_equal_a_plain_loop_over_the_same_draws():
    scores, labels = tied_scores()
    config = BootstrapConfig(n_resamples=40, seed=3)
    clusters = np.arange(200) // 2  # two wordings of a question
    weights = weights_of(clusters, n_resamples=40, seed=3)
    found = weighted_metrics(scores, labels, weights)
    for i, questions in enumerate(drawn_clusters(100, config)):
        rows = np.concatenate([np.flatnonzero(clusters == q) for q in questions])
        expected = roc_auc_score(labels[rows], scores[rows])
        assert found["auroc"][i] == pytest.approx(expected, abs=1e-6)
        expected = average_precision_score(~labels[rows], -scores[rows])
        assert found["auprc"][i] == pytest.approx(expected, abs=1e-5)  # float32 sums


def test_resamples_in_blocks_are_the_same_draws():
    config = BootstrapConfig(n_resamples=300, seed=0)
    blocks = list(resamples(np.arange(50), config, n_weights=1))
    assert [block.shape[1] for block in blocks] == [256, 44]
    assert (
        np.concatenate(blocks, axis=1) == weights_of(np.arange(50), n_resamples=300)
    ).all()


def test_a_resample_without_a_class_is_undefined():
    labels = np.array([True, False])
    found = weighted_metrics(np.arange(2.0), labels, np.array([[0, 2, 1], [2, 0, 1]]))
    for draws in found.values():
        assert np.isnan(draws).tolist() == [True, True, False]


@pytest.mark.parametrize(("metric", "point"), [("auroc", auroc), ("auprc", auprc)])
def test_interval_holds_the_value_and_widens_with_clusters(metric, point):
    def interval(scores, labels, clusters):
        weights = weights_of(clusters, n_resamples=1000)
        return interval_of(weighted_metrics(scores, labels, weights)[metric])

    scores, labels = tied_scores(400)
    low, high = interval(scores, labels, np.arange(400))
    assert low < point(scores, labels).value < high
    repeated = [np.repeat(x, 4) for x in (scores, labels)]
    copies = np.subtract(*interval(*repeated, np.repeat(np.arange(400), 4)))
    naive = np.subtract(*interval(*repeated, np.arange(1600)))
    assert copies == pytest.approx(low - high, rel=0.1)
    assert abs(naive) < 0.7 * abs(copies)


def test_p_is_small_far_from_zero_one_at_it_and_never_nothing():
    draws = np.random.default_rng(0).normal(size=9999)
    assert two_sided_p(draws) > 0.95 and two_sided_p(np.zeros(10)) == 1.0
    assert two_sided_p(draws + 1.96) == pytest.approx(0.05, abs=0.01)
    assert two_sided_p(draws + 9) == two_sided_p(draws - 9) == 2 / 10_000
    assert two_sided_p(np.array([np.nan, 1.0, 1.0, 1.0])) == 0.5


def test_an_interval_leaves_undefined_resamples_out():
    assert interval_of(np.array([0.5, np.nan, 0.5])) == (0.5, 0.5)

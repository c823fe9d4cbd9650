import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    auprc,
    auroc,
    auroc_gain,
    auroc_gain_interval,
    auroc_interval,
    drawn_clusters,
    interval_of,
    masked_auroc,
    resamples,
    stratified_auroc,
    two_sided_p,
    weighted_metrics,
    weighted_stratified,
    wider_stratified_interval,
    wilson_interval,
)


def tied_scores(n=200, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.3
    return np.round(rng.standard_normal(n) + labels, 1).astype(np.float32), labels


def test_auroc_equals_that_of_sklearn_and_gives_ties_half_credit():
    assert auroc(np.zeros(4), np.array([0, 1, 0, 1], bool)).value == 0.5
    assert masked_auroc(jnp.zeros(4), jnp.array([0.0, 1, 0, 1]), jnp.ones(4)) == 0.5
    scores, labels = tied_scores()
    expected = roc_auc_score(labels, scores)
    for sign, value in ((1, expected), (-1, 1 - expected)):
        assert auroc(sign * scores, labels).value == pytest.approx(value)
    weights = np.random.default_rng(1).integers(0, 4, 200).astype(np.float32)
    got = jax.jit(masked_auroc)(scores, labels.astype(np.float32), weights)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    assert float(got) == pytest.approx(expected, abs=1e-6)


def test_metrics_of_one_class_are_undefined_and_nan_scores_are_no_ties():
    assert np.isnan(masked_auroc(jnp.arange(3.0), jnp.ones(3), jnp.ones(3)))
    for metric in (auroc, auprc):
        value, reason = metric(np.arange(3.0), np.ones(3, bool))
        assert np.isnan(value) and "one class" in reason
    assert "finite" in auroc(np.array([np.nan, 1.0]), np.array([True, False])).reason
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
    result = weighted_metrics(scores, labels, weights)
    for i, questions in enumerate(drawn_clusters(100, config)):
        rows = np.concatenate([np.flatnonzero(clusters == q) for q in questions])
        expected = roc_auc_score(labels[rows], scores[rows])
        assert result["auroc"][i] == pytest.approx(expected, abs=1e-6)
        expected = average_precision_score(~labels[rows], -scores[rows])
        assert result["auprc"][i] == pytest.approx(expected, abs=1e-5)  # float32 sums


def test_rounding_never_puts_an_auroc_above_one():
    labels = np.arange(200) >= 100
    weights = np.random.default_rng(0).random((200, 500), np.float32)
    strata = np.zeros(200, int)
    for item in (
        weighted_metrics(np.arange(200.0), labels, weights),
        weighted_stratified(np.arange(200.0), labels, weights, strata=strata),
    ):
        assert item["auroc"].max() == 1.0
        assert item["auroc"].min() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("n_clusters", [1, 3, 64, 601, 400_001])  # 2 at once
def test_resamples_drawn_at_once_are_those_drawn_one_by_one(n_clusters):
    rng, config = np.random.default_rng(7), BootstrapConfig(n_resamples=9, seed=7)
    expected = [rng.integers(n_clusters, size=n_clusters) for _ in range(9)]
    np.testing.assert_array_equal([*drawn_clusters(n_clusters, config)], expected)


def test_resamples_in_blocks_are_the_same_draws():
    clusters = np.arange(50)
    blocks = list(resamples(clusters, BootstrapConfig(n_resamples=300), n_weights=1))
    assert [block.shape[1] for block in blocks] == [256, 44]
    whole = weights_of(clusters, n_resamples=300)
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole)


def test_a_resample_without_a_class_is_undefined():
    labels = np.array([True, False])
    result = weighted_metrics(np.arange(2.0), labels, np.array([[0, 2, 1], [2, 0, 1]]))
    for draws in result.values():
        assert np.isnan(draws).tolist() == [True, True, False]


@pytest.mark.parametrize(("metric", "point"), [("auroc", auroc), ("auprc", auprc)])
def test_an_interval_contains_the_value_and_ignores_repeated_rows(metric, point):
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


def test_a_p_value_is_small_far_from_zero_one_at_zero_and_never_zero():
    draws = np.random.default_rng(0).normal(size=9999)
    assert two_sided_p(draws) > 0.95 and two_sided_p(np.zeros(10)) == 1.0
    assert two_sided_p(draws + 1.96) == pytest.approx(0.05, abs=0.01)
    assert two_sided_p(draws + 9) == two_sided_p(draws - 9) == 2 / 10_000
    assert two_sided_p(np.array([np.nan, 1.0, 1.0, 1.0])) == 0.5
    assert interval_of(np.array([0.5, np.nan, 0.5])) == (0.5, 0.5)


def in_strata(n=600, n_strata=12, seed=0):
    """Labels that are likelier right in later strata, the strata, and a generator."""
    rng = np.random.default_rng(seed)
    strata = rng.integers(n_strata, size=n)
    return rng.random(n) < (strata + 1) / (n_strata + 1), strata, rng


def test_the_stratified_auroc_is_the_mean_credit_of_pairs_within_strata():
    labels, strata, rng = in_strata(n=80)
    scores = rng.integers(5, size=80).astype(float)  # many ties
    right, wrong = np.flatnonzero(labels), np.flatnonzero(~labels)
    pairs = [(i, j) for i in right for j in wrong if strata[i] == strata[j]]
    credit = [0.5 + 0.5 * np.sign(scores[i] - scores[j]) for i, j in pairs]
    result = stratified_auroc(scores, labels, strata).value
    assert result == pytest.approx(np.mean(credit))
    assert stratified_auroc(scores, labels, 0 * strata) == auroc(scores, labels)
    undefined = stratified_auroc(scores, labels, labels)  # of one class each
    assert np.isnan(undefined.value) and "no stratum" in undefined.reason


def test_a_weighted_stratified_auroc_equals_that_of_repeated_examples():
    labels, strata, rng = in_strata(n=60)
    scores = rng.integers(9, size=60).astype(float)
    weights = rng.integers(3, size=(60, 4)).astype(np.float32)
    result = weighted_stratified(scores, labels, weights, strata=strata)["auroc"]
    for value, weight in zip(result, weights.T.astype(int), strict=True):
        again = [np.repeat(x, weight) for x in (scores, labels, strata)]
        assert value == pytest.approx(stratified_auroc(*again).value, abs=1e-6)


@pytest.mark.parametrize("n_wordings", [1, 2])
def test_the_standard_error_of_a_gain_matches_a_bootstrap_of_questions(n_wordings):
    rng = np.random.default_rng(1)
    questions = np.repeat(np.arange(200), n_wordings)
    labels = np.repeat(rng.random(200) < 0.4, n_wordings)
    labels ^= rng.random(len(labels)) < 0.1
    signal = labels + np.repeat(rng.standard_normal(200), n_wordings)
    pair = (signal + a * rng.standard_normal(len(labels)) for a in (0.3, 0.9))
    scores, others = (x.astype(np.float32) for x in pair)
    weights = weights_of(questions, n_resamples=2000)
    draws = [weighted_metrics(x, labels, weights)["auroc"] for x in (scores, others)]
    gain, error = auroc_gain(scores, others, labels, questions)
    assert error == pytest.approx(np.std(draws[0] - draws[1]), rel=0.1)
    alone = [auroc(x, labels).value for x in (scores, others)]
    assert gain == pytest.approx(alone[0] - alone[1])
    assert auroc_gain(scores, scores, labels) == (0.0, 0.0)


def test_a_gain_of_zero_is_rarely_significant_if_few_answers_are_right():
    rng, questions = np.random.default_rng(0), np.arange(300)
    labels, p_values = questions < 8, []
    for _ in range(400):
        both = 1.2 * labels + 0.7 * rng.standard_normal(300)
        pair = (both + 0.7 * rng.standard_normal(300) for _ in range(2))
        low, high, p = auroc_gain_interval(*pair, labels, questions)
        assert (p < 0.05) == (low > 0 or high < 0)
        p_values.append(p)
    share = (np.array(p_values) < 0.05).mean()
    assert share < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    noise = rng.standard_normal(300)
    sure = auroc_gain_interval(labels * 1.0, noise, labels, questions)
    assert sure[2] < 0.05 and sure[0] > 0
    first = np.arange(300) < 1
    assert auroc_gain_interval(*np.eye(300)[:2], first, questions) == (-1.0, 1.0, 1.0)


@pytest.mark.parametrize("n_right", [3, 8])
@pytest.mark.parametrize("n_constant", [1, 3])  # of three seeds: a mean that rounds
def test_a_gain_without_spread_is_no_surer_than_its_few_right_answers(
    n_right, n_constant
):
    labels = np.arange(24) < n_right
    ours = np.tile(labels * 1.0, (3, 1))
    others = ours * (np.arange(3) >= n_constant)[:, None]
    low, high, p = auroc_gain_interval(ours, others, labels, np.arange(24))
    assert p == 2.0 ** (1 - n_right) and low <= n_constant / 6 <= high
    assert low < 0 if n_right == 3 else p < 0.05


def test_intervals_of_few_answers_of_equal_length_cover_the_truth():
    rng, covered = np.random.default_rng(0), np.zeros(2)
    for seed in range(60):
        strata, labels = rng.integers(0, 10, 30), rng.random(30) < 0.3
        scores, questions = 2.5 * labels + rng.standard_normal(30), np.arange(30)
        value = stratified_auroc(scores, labels, strata).value
        weights = weights_of(questions, n_resamples=200, seed=seed)
        drawn = weighted_stratified(scores, labels, weights, strata=strata)["auroc"]
        given = drawn, value, labels, questions, strata
        for i, ends in enumerate(
            (interval_of(drawn), wider_stratified_interval(*given))
        ):
            covered[i] += ends[0] <= 0.9615 <= ends[1]
    assert covered[0] < 40 and covered[1] >= 57


def test_intervals_of_seed_means_lie_between_the_seeds_and_of_a_best_are_wider():
    rng, labels = np.random.default_rng(0), np.arange(200) < 60
    scores = labels + rng.standard_normal((3, 200))
    ends = np.array([auroc_interval(x, labels) for x in scores])
    mean = auroc_interval(scores, labels)
    assert (ends.min(axis=0) <= mean).all() and (mean <= ends.max(axis=0)).all()
    assert auroc_interval(np.tile(scores[0], (2, 1)), labels) == pytest.approx(ends[0])
    low, high = auroc_interval(scores, labels, n_tried=15)
    assert low < mean[0] and high > mean[1]
    # The best of fifteen useless scores rarely appears useful.
    useless = rng.standard_normal((100, 15, 200))
    best = [max(x, key=lambda s: auroc(s, labels).value) for x in useless]
    for n_tried, most in ((1, 1.0), (15, 0.1)):
        lows = [auroc_interval(x, labels, n_tried=n_tried)[0] for x in best]
        assert np.mean(np.array(lows) > 0.5) <= most
        assert n_tried > 1 or np.mean(np.array(lows) > 0.5) > 0.15


def test_repeated_rows_are_no_new_evidence():
    rng = np.random.default_rng(0)
    labels = np.arange(100) < 20
    scores, others = labels + rng.standard_normal((2, 100))
    order = rng.permutation(200)
    twice = [np.tile(x, 2)[order] for x in (scores, others, labels, np.arange(100))]
    gain = auroc_gain(scores, others, labels)
    assert auroc_gain(*twice) == pytest.approx(gain)
    interval = auroc_interval(scores, labels)
    assert auroc_interval(twice[0], *twice[2:]) == pytest.approx(interval)


@pytest.mark.parametrize("n_right", [2, 10, 20, 190])
@pytest.mark.parametrize("apart", [0.0, 9.0])  # two kinds: DeLong's interval is wider
def test_an_interval_stays_if_classes_are_exchanged_and_is_mirrored_if_scores_are(
    n_right, apart
):
    labels = np.arange(200) < n_right
    kinds = np.where(np.arange(200) < n_right // 4, apart, -apart)
    scores = np.random.default_rng(0).standard_normal(200) + labels * (2.3 + kinds)
    low, high = auroc_interval(scores, labels)
    assert auroc_interval(-scores, ~labels) == pytest.approx((low, high))
    assert auroc_interval(-scores, labels) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize("n_right", [2, 10, 100])
def test_an_auroc_interval_covers_even_with_two_right_answers(n_right):
    """Two normal classes of AUROC .8, which the interval contains 19 times in 20."""
    rng, shift = np.random.default_rng(n_right), 1.190
    labels = np.arange(200) < n_right
    draws = rng.standard_normal((300, 200)) + shift * labels
    ends = np.array([auroc_interval(scores, labels) for scores in draws])
    covered = (ends[:, 0] <= 0.8) & (ends[:, 1] >= 0.8)
    assert covered.mean() > 0.95 - 3 * (0.05 * 0.95 / 300) ** 0.5
    assert np.diff(ends).mean() < {2: 0.95, 10: 0.5, 100: 0.2}[n_right]


@pytest.mark.parametrize("n_swapped", [0, 1])
def test_the_more_answers_a_score_separates_the_higher_its_interval_begins(n_swapped):
    lows = []
    for n in (10, 30, 100, 500):
        scores = np.arange(2.0 * n)
        if n_swapped:
            scores[[n - 1, n]] = scores[[n, n - 1]]
        low, high = auroc_interval(scores, np.arange(2 * n) >= n)
        assert low < 1 - n_swapped / n**2 <= high <= 1
        lows.append(low)
    assert lows[0] > 0.75 and lows[-1] > 0.995 and (np.diff(lows) > 0).all()


def test_an_auroc_interval_is_wide_for_two_right_answers_or_a_missing_class():
    scores = np.arange(100.0)
    low, high = auroc_interval(scores, scores > 97.5)  # DeLong's error is zero
    assert 0.5 < low < 0.9 < high
    assert auroc_interval(scores, scores > 1000) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_interval_of_a_share_of_zero_or_one_ends_there(share):
    for n in range(1, 100):
        assert wilson_interval(share, n)[int(share)] == share

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from beatrice.jaxprobe.calibration import (
    brier,
    cross_fit,
    ece,
    fit_calibrator,
    folds_of,
    reliability,
)


def test_calibration_is_monotone_and_repairs_a_distorted_probability():
    rng = np.random.default_rng(0)
    truth = rng.random(4000)
    labels = rng.random(4000) < truth
    calibrator = fit_calibrator(truth**3, labels)
    p = calibrator(np.linspace(-0.5, 1.5, 300))
    assert (np.diff(p) >= 0).all() and p.min() >= 0 and p.max() <= 1
    fresh = rng.random(4000)
    outcome = rng.random(4000) < fresh
    assert ece(calibrator(fresh**3), outcome) < 0.05 < ece(fresh**3, outcome)
    assert brier(calibrator(fresh**3), outcome) < brier(fresh**3, outcome)


def test_reliability_bins_count_every_example_and_perfect_ones_have_no_error():
    p = np.array([0.0, 0.0, 1.0, 1.0])
    bins = reliability(p, p.astype(bool), n_bins=10)
    assert bins.n_examples.sum() == 4 and np.isnan(bins.accuracy[5])
    assert ece(p, p.astype(bool)) == 0.0 and brier(p, p.astype(bool)) == 0.0


def test_calibration_refuses_nothing_and_nan():
    for scores in (np.array([]), np.array([np.nan])):
        with pytest.raises(ValueError, match="finite scores"):
            fit_calibrator(scores, np.zeros(len(scores), bool))


@pytest.mark.parametrize("right", [True, False])
def test_ten_answers_of_one_kind_are_no_certainty(right):
    p = fit_calibrator(np.linspace(0, 1, 10), np.full(10, right))(np.array([0.5]))
    assert p == pytest.approx(10.5 / 11 if right else 0.5 / 11)


def test_levels_with_many_rows_are_those_of_plain_isotonic_regression():
    rng = np.random.default_rng(0)
    scores = rng.random(20000)
    labels = rng.random(20000) < 0.1 + 0.8 * scores
    plain = IsotonicRegression(out_of_bounds="clip").fit(scores, labels)
    at = np.linspace(0.01, 0.99, 99)
    np.testing.assert_allclose(
        fit_calibrator(scores, labels)(at), plain.predict(at), atol=0.02
    )


def test_no_probability_is_beyond_what_some_level_supports():
    """Three right ones at the top do not outdo a hundred with nine of ten right."""
    scores = np.concatenate([np.zeros(20), np.ones(100), np.full(3, 2.0)])
    labels = np.concatenate([np.zeros(20), np.arange(100) % 10 > 0, np.ones(3)])
    low, middle, high = fit_calibrator(scores, labels > 0)(np.array([0.0, 1.0, 2.0]))
    assert low == pytest.approx(0.5 / 21)
    assert middle <= high == pytest.approx(90.5 / 101)


def test_a_fold_is_calibrated_by_the_others():
    ids = [f"q{i % 150}" for i in range(300)]  # every question in two wordings
    folds = folds_of(ids, 5)
    np.testing.assert_array_equal(folds[:150], folds[150:])
    assert set(folds.tolist()) == set(range(5))
    rng = np.random.default_rng(0)
    scores, labels = rng.random(300), rng.random(300) < 0.5
    before = cross_fit(scores, labels, folds, 5)
    flipped = np.where(folds == 2, ~labels, labels)
    after = cross_fit(scores, flipped, folds, 5)
    at = np.linspace(0, 1, 50)
    for k in range(5):  # only the maps that saw fold 2 have moved
        same = np.array_equal(before[k](at), after[k](at))
        assert same == (k == 2)


def test_on_noise_a_map_that_saw_the_row_promises_more_than_one_that_did_not():
    rng = np.random.default_rng(1)
    scores, labels = rng.random(400), rng.random(400) < 0.5
    folds = folds_of([str(i) for i in range(400)], 5)
    seen = fit_calibrator(scores, labels)(scores)
    maps = cross_fit(scores, labels, folds, 5)
    unseen = np.array([maps[k](s) for k, s in zip(folds, scores, strict=True)])
    assert brier(seen, labels) < 0.25 < brier(unseen, labels)

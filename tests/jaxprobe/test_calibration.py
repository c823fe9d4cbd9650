import msgspec
import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from beatrice.jaxprobe.calibrate import FIT_MAP
from beatrice.jaxprobe.calibration import (
    LEAST_OF_RARER,
    LEAST_TO_CHOOSE,
    MAPS,
    Calibrator,
    brier,
    choose_calibrator,
    cross_fit,
    ece,
    ece_by_chance,
    fit_calibrator,
    folds_of,
    log_losses,
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


def test_reliability_bins_count_all_examples_and_perfect_p_has_no_error():
    p = np.array([0.0, 0.0, 1.0, 1.0])
    some = np.array([0.5, 0.52, 0.58, 1.0]), np.array([True, False, False, True])
    bins = reliability(*some)
    assert bins.n_examples.tolist() == [0] * 5 + [3, 0, 0, 0, 1]
    assert (bins.confidence[5], bins.accuracy[5]) == pytest.approx((1.6 / 3, 1 / 3))
    assert np.isnan(bins.accuracy[6]) and ece(*some) == pytest.approx(0.15)
    assert ece(p, p.astype(bool)) == 0.0 and brier(p, p.astype(bool)) == 0.0
    p[1] = np.nan  # the error is NaN too
    assert np.isnan(ece(p, p > 0.5)) and np.isnan(brier(p, p > 0.5))


def test_chance_explains_the_error_of_true_probabilities_only():
    rng = np.random.default_rng(0)
    below = {0.0: 0, 0.2: 0}
    for shift in below:
        for _ in range(40):
            p = rng.random(300)
            labels = rng.random(300) < np.clip(p + shift, 0, 1)
            below[shift] += ece(p, labels) < ece_by_chance(p, np.arange(300))
    assert below[0.0] > 35 and below[0.2] == 0
    p, pairs = np.repeat(p, 2), np.repeat(np.arange(300), 2)  # no new evidence
    alone = ece_by_chance(p[::2], pairs[::2])
    assert ece_by_chance(p, pairs) == pytest.approx(alone)


def test_calibration_refuses_empty_and_nan_scores():
    for scores in (np.array([]), np.array([np.nan])):
        with pytest.raises(ValueError, match="all finite"):
            fit_calibrator(scores, np.zeros(len(scores), bool))


def test_with_many_rows_levels_are_close_to_plain_isotonic_regression():
    rng = np.random.default_rng(0)
    scores = rng.random(20000)
    labels = rng.random(20000) < 0.1 + 0.8 * scores
    plain = IsotonicRegression(out_of_bounds="clip").fit(scores, labels)
    calibrator, at = fit_calibrator(scores, labels), np.linspace(0.01, 0.99, 99)
    np.testing.assert_allclose(calibrator(at), plain.predict(at), atol=0.02)


def test_no_probability_exceeds_what_some_level_supports():
    """Three right answers at the top do not outdo a hundred of which 90 % are right."""
    scores = np.concatenate([np.zeros(20), np.ones(100), np.full(3, 2.0)])
    labels = np.concatenate([np.zeros(20), np.arange(100) % 10 > 0, np.ones(3)])
    low, middle, high = fit_calibrator(scores, labels > 0)(np.array([0.0, 1.0, 2.0]))
    assert low == pytest.approx(0.5 / 21)
    assert middle <= high == pytest.approx(90.5 / 101)
    for right, expected in ((True, 10.5 / 11), (False, 0.5 / 11)):  # no certainty
        p = fit_calibrator(np.linspace(0, 1, 10), np.full(10, right))(np.array([0.5]))
        assert p == pytest.approx(expected)


@pytest.mark.parametrize("fit", FIT_MAP.values(), ids=FIT_MAP)
def test_a_fold_is_calibrated_by_the_others(fit):
    ids = [f"q{i % 150}" for i in range(300)]  # every question in two wordings
    folds = folds_of(ids, 5)
    np.testing.assert_array_equal(folds[:150], folds[150:])
    assert set(folds.tolist()) == set(range(5))
    rng = np.random.default_rng(0)
    scores, labels = rng.random(300), rng.random(300) < 0.5
    flipped = np.where(folds == 2, ~labels, labels)
    before, after = (
        cross_fit(fit, scores, x, np.array(ids), folds, 5) for x in (labels, flipped)
    )
    at = np.linspace(0, 1, 50)
    for k in range(5):  # only the maps that saw fold 2 have moved
        same = np.array_equal(before[k](at), after[k](at))
        assert same == (k == 2)


LOGITS = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
RAW, RIGHT = 1 / (1 + np.exp(-LOGITS)), np.array([0, 0, 1, 0, 1], bool)


def test_maps_of_five_answers_match_formulas_worked_out_separately():
    identity = msgspec.convert({"name": "identity"}, Calibrator)  # as in a saved probe
    np.testing.assert_allclose(identity(RAW), RAW)
    # Bounded levels .167 .167 .5 .5 .75, a knot at the mean raw score of each level,
    # and straight lines between knots; then 2 % of the raw score is mixed in.
    knots = [0, RAW[:2].mean(), RAW[2:4].mean(), RAW[4], 1]
    levels = np.array([1 / 6, 1 / 6, 0.5, 0.75, 0.75])
    expected = 0.98 * np.interp(RAW, knots, levels) + 0.02 * RAW
    np.testing.assert_allclose(MAPS["centred"](RAW, RIGHT)(RAW), expected, atol=1e-12)
    # Platt's map, penalised towards the identity: the gradient of its loss is zero.
    a, _, c = MAPS["platt"](RAW, RIGHT).numbers
    residual = 1 / (1 + np.exp(-(a * LOGITS + c))) - RIGHT
    assert residual @ LOGITS + (a - 1) / 0.25 == pytest.approx(0, abs=1e-4)
    assert residual.sum() + c == pytest.approx(0, abs=1e-4)


def test_neighbouring_levels_of_equal_share_are_one_level_despite_rounding():
    rng = np.random.default_rng(77)
    raw = rng.random(100)
    right = rng.random(100) < raw
    fitted = IsotonicRegression().fit_transform(raw, right.astype(float))
    is_half = np.isclose(fitted, 0.5)  # 15 of 30, then 1 of 2
    assert len({*fitted[is_half].tolist()}) == 2
    knots = np.array(MAPS["centred"](raw, right).scores)
    inside = (knots >= raw[is_half].min()) & (knots <= raw[is_half].max())
    np.testing.assert_allclose(knots[inside], [raw[is_half].mean()])


def planted(n, kind, seed=0):
    """Raw scores of a kind, and labels whose true probability is known."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal(n) - 0.5
    truth = 1 / (1 + np.exp(-logits))
    score = {"true": logits, "over": 2 * logits + 0.8, "bent": 0.3 * logits}[kind]
    if kind == "bent":
        truth = 0.02 + 0.91 / (1 + np.exp(-4 * logits))
    return 1 / (1 + np.exp(-score)), rng.random(n) < truth


@pytest.mark.parametrize("kind", ["true", "over", "bent"])
@pytest.mark.parametrize("n", [60, 600])
def test_a_chosen_map_is_no_worse_than_the_raw_score_except_for_noise(kind, n):
    seen, fresh = planted(n, kind), planted(20000, kind, seed=1)
    chosen = choose_calibrator(*seen, np.arange(n))
    worse = log_losses(chosen(fresh[0]), fresh[1]).mean()
    worse -= log_losses(*fresh).mean()
    # A distorted score is repaired; one that is right stays nearly as good.
    assert worse < (0.02 if kind == "true" else -0.02)
    assert chosen.name == "platt" or (n, kind) == (600, "bent")


@pytest.mark.parametrize(
    ("n", "n_right"), [(199, 80), (400, LEAST_OF_RARER - 1), (400, 80)]
)
def test_few_answers_or_few_right_ones_get_platts_map(n, n_right):
    raw, labels = planted(3000, "bent")
    right, wrong = np.flatnonzero(labels)[:n_right], np.flatnonzero(~labels)
    some = np.concatenate([right, wrong[: n - n_right]])
    chosen = choose_calibrator(raw[some], labels[some], some)
    assert (chosen.name == "platt") == (n < LEAST_TO_CHOOSE or n_right < LEAST_OF_RARER)


def test_few_questions_or_a_class_of_a_single_question_get_platts_map():
    raw, labels = planted(300, "bent")
    of_classes = np.where(labels, 0, np.arange(300))
    for questions in (
        np.zeros(300),
        np.arange(300) % 2,
        np.arange(300) % 9,
        of_classes,
    ):
        assert choose_calibrator(raw, labels, questions).name == "platt"


@pytest.mark.parametrize("seed", [0, 3])
def test_more_wordings_of_a_question_are_no_reason_for_a_more_flexible_map(seed):
    rows = *planted(600, "over", seed), np.arange(600)
    often = choose_calibrator(*(np.tile(x, 25) for x in rows))
    assert (choose_calibrator(*rows).name, often.name) == ("platt", "platt")


@pytest.mark.parametrize("name", list(MAPS))
@pytest.mark.parametrize("kind", ["true", "over"])
def test_every_map_for_probes_keeps_the_ranking(name, kind):
    raw, labels = planted(300, kind)
    calibrator = MAPS[name](raw, labels)
    p = calibrator(np.linspace(1e-6, 1 - 1e-6, 5001))
    assert (np.diff(p) > 0).all() and p[0] > 0 and p[-1] < 1
    # The paper's map makes some answers equal.
    assert len(np.unique(fit_calibrator(raw, labels)(raw))) < 100


@pytest.mark.parametrize("labels", [np.arange(40) < 20, np.arange(40) >= 20])
def test_a_separating_or_reversed_score_gives_a_finite_rising_map(labels):
    raw = np.linspace(0.01, 0.99, 40)
    for fit in MAPS.values():
        p = fit(raw, labels)(raw)
        assert (np.diff(p) > 0).all() and np.isfinite(p).all()


def test_a_map_is_unchanged_by_a_round_trip_through_json():
    for fit in (*MAPS.values(), fit_calibrator):
        calibrator = fit(*planted(300, "over"))
        text = msgspec.json.encode(msgspec.to_builtins(calibrator))
        again = msgspec.json.decode(text, type=Calibrator)
        np.testing.assert_array_equal(again(RAW), calibrator(RAW))

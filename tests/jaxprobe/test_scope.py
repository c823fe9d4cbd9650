import dataclasses

import numpy as np
import pytest

from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.jaxprobe.calibrate import (
    CALIBRATE_PRESETS,
    CalibrateConfig,
    change_precision,
)
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.families import Features, paper_dims
from beatrice.jaxprobe.scope import (
    Scope,
    choose_threshold,
    fit_scope,
    scripts_of,
    share_outside,
)
from tests.jaxprobe.test_detector import made  # noqa: F401, a fixture

DIMS = paper_dims(hidden=3, prob=2, resid=2, attn=1)


def normal_features(rows, dims=DIMS, shift=0.0):
    """Two spans of answers whose values are normal around `shift`."""
    rng = np.random.default_rng(0)
    shape = (1 + int(np.max(rows)), 10, dims.total)
    tokens = tuple(
        rng.standard_normal(shape, np.float32)[rows] + np.float32(shift)
        for _ in range(2)
    )
    return Features(tokens, tuple(np.ones(t.shape[:2], bool) for t in tokens))


@pytest.fixture(scope="module")
def scope():
    lengths, rows = np.full(900, 20), np.arange(900)
    return fit_scope(normal_features, DIMS, lengths, rows[:800], rows[800:])


def test_two_in_a_thousand_training_values_lie_outside_their_range(scope):
    share = share_outside(normal_features(np.arange(800)), DIMS, *scope[:2])
    np.testing.assert_allclose(share.mean(axis=0), 0.002, atol=3e-4)


def test_a_moved_family_lies_outside_and_the_others_do_not(scope):
    features = normal_features(np.arange(50))
    for tokens in features.tokens:
        tokens[..., DIMS.slices[2]] += 10
    share = share_outside(features, DIMS, *scope[:2])
    assert (share[:, 2] == 1).all()
    # The limits come of 100 validation answers, so a few of 50 may pass them.
    assert (share[:, [0, 1, 3]] > scope.limits[[0, 1, 3]]).mean() < 0.1


def test_a_value_that_is_no_number_lies_outside(scope):
    features = normal_features(np.arange(1))
    features.tokens[1][0, 0, DIMS.slices[1]] = np.nan
    share = share_outside(features, DIMS, *scope[:2])
    assert share[0, 1] >= 1 / 20


def test_hidden_states_that_no_store_kept_are_in_no_range():
    dims = dataclasses.replace(DIMS, spans=("answer", *DIMS.spans[1:]))

    def kept(rows):
        features = normal_features(rows, dims, shift=5.0)
        features.tokens[0][..., dims.slices[0]] = 0.0
        return features

    rows = np.arange(100)
    scope = fit_scope(kept, dims, np.full(100, 20), rows, rows)
    assert (scope.low[:3] > 0).all()
    live = normal_features(rows, dims, shift=5.0)  # a live pass has them all
    np.testing.assert_array_equal(
        share_outside(live, dims, *scope[:2]),
        share_outside(kept(rows), dims, *scope[:2]),
    )


def test_scripts_are_those_of_the_letters_and_a_stray_one_is_none():
    assert scripts_of(["where?", "wo ist Köln? 42"]) == ("LATIN",)
    assert scripts_of(["где", "where"]) == ("CYRILLIC", "LATIN")
    assert scripts_of(["a" * 5000, "α"]) == ("LATIN",)
    assert scripts_of(["42"]) == ()


def test_the_threshold_trusts_most_answers_at_the_wanted_precision():
    p = np.array([0.9, 0.9, 0.8, 0.7, 0.7, 0.2])
    labels = np.array([True, True, False, True, True, False])
    chosen = choose_threshold(p, labels, 0.8)
    assert (chosen.p_correct, chosen.precision, chosen.coverage) == (0.7, 0.8, 5 / 6)
    # Wilson's interval of 4 of 5, from the formula: centre and half-width.
    z = 1.959964
    centre = (0.8 + z**2 / 10) / (1 + z**2 / 5)
    half = z * np.sqrt(0.8 * 0.2 / 5 + z**2 / 100) / (1 + z**2 / 5)
    np.testing.assert_allclose(
        [chosen.low, chosen.high], [centre - half, centre + half], atol=1e-6
    )


def test_equal_probabilities_are_trusted_together():
    p, labels = np.full(4, 0.5), np.array([True, True, True, False])
    assert choose_threshold(p, labels, 0.9).p_correct is None
    assert choose_threshold(p, labels, 0.75).p_correct == 0.5


def test_a_precision_that_no_threshold_reaches_is_said():
    chosen = choose_threshold(np.array([0.9, 0.1]), np.array([False, True]), 0.9)
    assert chosen.p_correct is None
    assert "no P reaches precision 0.9" in chosen.in_words()


def test_a_detector_keeps_its_scope_and_thresholds(made, tmp_path):  # noqa: F811
    detector, _ = made
    threshold = choose_threshold(np.array([0.9, 0.1]), np.array([True, False]), 0.9)
    dims = detector.banks["closed_book"].dims
    scope = Scope(*np.ones((2, dims.total), np.float32), np.ones(4, np.float32))
    bank = dataclasses.replace(detector.banks["closed_book"], scope=scope)
    head = dataclasses.replace(detector.heads["closed_book"], threshold=threshold)
    changed = dataclasses.replace(
        detector,
        banks={**detector.banks, "closed_book": bank},
        heads={**detector.heads, "closed_book": head},
    )
    changed.save(tmp_path / "detector")
    loaded = Detector.load(tmp_path / "detector")
    assert loaded.heads["closed_book"].threshold == threshold
    assert loaded.heads["with_context"].threshold is None
    np.testing.assert_array_equal(loaded.banks["closed_book"].scope.low, scope.low)
    assert loaded.banks["with_context"].scope is None


def test_another_precision_calibrates_again_and_the_same_does_not(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke", seed=0)) as run:
        run.mark_stage("calibrate", {}, 0.0)
        change_precision(run, 0.9)  # the default
        assert run.stage_done("calibrate")
        change_precision(run, 0.8)
        assert not run.stage_done("calibrate")
        assert run.settle("calibrate", CALIBRATE_PRESETS).precision == 0.8


@pytest.mark.parametrize("precision", [0.0, 1.5, float("nan")])
def test_a_precision_that_is_no_share_is_refused(precision):
    with pytest.raises(ValueError, match="expected a share above 0"):
        CalibrateConfig(precision=precision)

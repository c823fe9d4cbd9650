import math

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors.selfcheck import (
    official_eigenscore,
    paper_eigenscore,
)
from tests.benchmarks.baselines.drawn import inputs, scores

SAMPLE_STATES = "sample_states"
OFFICIAL = catalogue()["eigenscore"]


def with_states(states, labels=None):
    """DetectorInput with these states, `[n_rows, n_samples, d_model]`."""
    drawn = [["a"] * states.shape[1]] * len(states)
    readings = {SAMPLE_STATES: states.astype(np.float32)}
    return inputs(drawn, labels=labels, readings=readings)


def test_the_official_score_of_the_reference():
    states = (np.arange(12) ** 1.5).reshape(3, 4)
    assert official_eigenscore(states) == pytest.approx(-0.7283145391253493, abs=1e-12)


def test_the_two_formulas_are_one_where_the_ridge_is_rescaled():
    states = np.random.default_rng(0).normal(size=(10, 33))
    rescaled = paper_eigenscore(states, ridge=1e-3 * 32)
    expected = (rescaled - math.log(32)) / math.log(10)
    assert official_eigenscore(states) == pytest.approx(expected, abs=1e-12)
    assert official_eigenscore(states) != pytest.approx(paper_eigenscore(states))


def test_the_papers_score_is_the_mean_logarithm_of_the_eigenvalues():
    states = np.random.default_rng(0).normal(size=(5, 16))
    d_model = states.shape[1]
    centring = np.eye(d_model) - np.ones((d_model, d_model)) / d_model
    values = np.linalg.eigvalsh(states @ centring @ states.T + 1e-3 * np.eye(5))
    assert paper_eigenscore(states) == pytest.approx(np.log(values).mean())


def test_equal_answers_have_the_least_score_and_no_error():
    state = np.random.default_rng(0).normal(size=64)
    alike = np.tile(state, (10, 1))
    apart = np.random.default_rng(1).normal(size=(10, 64))
    for measure in (official_eigenscore, paper_eigenscore):
        assert -10 < measure(alike) < measure(apart)


def test_states_that_were_not_read_are_left_out_and_one_alone_is_undefined():
    states = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
    states[1, 3:] = states[2, 1:] = states[3] = np.nan
    found = scores(OFFICIAL, with_states(states))
    expected = -official_eigenscore(states[1, :3].astype(np.float64))
    assert found[1] == pytest.approx(expected)
    assert np.isfinite(found).tolist() == [True, True, False, False]


def test_states_of_half_precision_do_not_overflow():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(1, 10, 512)) * 100
    (large,) = scores(OFFICIAL, with_states(states))
    assert large == pytest.approx(-official_eigenscore(states[0]), rel=1e-5)


@pytest.mark.parametrize(
    ("readings", "found"),
    [({}, "missing"), ({SAMPLE_STATES: np.zeros((3, 2, 4))}, r"of shape \[3, 2, 4\]")],
)
def test_states_of_other_rows_or_none_are_refused(readings, found):
    one = inputs([["a"], ["b"]], readings=readings)
    with pytest.raises(ValueError, match=f"'sample_states' is {found}, expected 3"):
        OFFICIAL.score(one)

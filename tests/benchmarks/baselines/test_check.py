"""A detector that is made wrongly is told so, in a sentence each."""

import dataclasses
import itertools

import numpy as np
import pytest

from beatrice.benchmarks.baselines.check import violations
from beatrice.benchmarks.baselines.detector import (
    Baseline,
    DetectorInput,
    DetectorOutput,
    catalogue,
    find_detector,
)
from beatrice.benchmarks.results.names import CONTROLS, DETECTORS
from tests.benchmarks.rows import rows_of

N = 240
LABELS = np.random.default_rng(0).random(N) < 0.5
SIGNAL = 2 * LABELS + np.random.default_rng(1).normal(size=N)
SPLITS = np.array(["train", "validation", "test"])[np.arange(N) % 3]


def inputs():
    rows = rows_of(LABELS, splits=SPLITS)
    readings = {"signal": SIGNAL.astype(np.float32)}
    return DetectorInput(store=None, rows=rows, layer=0, readings=readings)


def own(score, **fields):
    found = dict(name="own", title="Own", source="here", reads=("signal",))
    return Baseline(
        **found | fields, score=lambda e: DetectorOutput(np.asarray(score(e)))
    )


def signal(given):
    return given.readings["signal"].astype(float)


def test_a_sound_detector_has_no_fault():
    assert violations(own(lambda e: signal(e)[None]), inputs()) == []


def learned(given, where):
    """Points along the difference of the means of some rows."""
    labels, values = given.rows.labels[where], signal(given)
    sign = np.sign(values[where][labels].mean() - values[where][~labels].mean())
    return (sign * values)[None]


counter = itertools.count()
CENTRED = "which other test answers"
WRONG = {
    "sign": (lambda e: -signal(e)[None], "is the sign turned?"),
    "test labels": (
        lambda e: np.where(SPLITS == "test", e.rows.labels, signal(e))[None],
        "it reads them",
    ),
    "train and test exchanged": (
        lambda e: learned(e, e.rows.where("test")),
        "it reads them",
    ),
    "not repeated": (lambda e: signal(e)[None] + next(counter), "the second time"),
    "shape": (signal, "expected floats [n_seeds, 240]"),
    "kind": (lambda e: (signal(e) > 0)[None], "scores are bool"),
    "infinite": (lambda e: np.where(signal(e) > 3, np.inf, signal(e))[None], "NaN"),
    "filled": (lambda e: np.nan_to_num(signal(e))[None], "not read has a score"),
    "of its batch": (lambda e: (signal(e) / np.nanstd(signal(e)))[None], CENTRED),
    "nothing": (lambda e: np.full((1, N), np.nan), "no answer has a score"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    score, said = WRONG[name]
    faults = violations(own(score), inputs())
    assert any(said in fault for fault in faults), faults


def test_a_score_of_chance_is_not_blamed_for_its_sign():
    noise = np.random.default_rng(3).normal(size=(1, N))
    detector = dataclasses.replace(own(lambda e: noise), reads=())
    assert violations(detector, inputs()) == []


def test_a_detector_is_found_by_its_place_or_the_place_is_named():
    assert find_detector("p_true").name == "p_true"
    place = "beatrice.benchmarks.baselines.detectors.context:p_true"
    assert find_detector(place).name == "p_true"
    with pytest.raises(ValueError, match="expected a Baseline"):
        find_detector("beatrice.benchmarks.baselines.detectors.context:reading")
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        find_detector("no_such_module:X")


def test_no_rival_has_the_name_of_another_row():
    known = catalogue()
    assert not set(known) & {x.detector for x in (*DETECTORS, *CONTROLS)}
    assert len({one.title for one in known.values()}) == len(known)
    assert all(one.source for one in known.values())

"""What a detector does wrong: shape, repetition, test labels, orientation, gaps."""

import dataclasses
import math

import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput
from beatrice.jaxprobe.evaluation import Scored
from beatrice.jaxprobe.metrics import auroc

_SPREADS = 3  # of AUROC under chance, below which a score points the wrong way


def violations(detector: Baseline, inputs: DetectorInput) -> list[str]:
    """Return what a detector does wrong on some inputs, a sentence each."""
    rows = inputs.rows
    n_rows = len(rows.ids)
    scores = np.asarray(detector.score(inputs).scores)
    if (
        scores.ndim != 2
        or scores.shape[1] != n_rows
        or not np.issubdtype(scores.dtype, np.floating)
    ):
        return [
            f"scores are {scores.dtype} {list(scores.shape)}, expected floats "
            f"[n_seeds, {n_rows}]"
        ]
    faults = []
    again = np.asarray(detector.score(inputs).scores)
    if not np.array_equal(scores, again, equal_nan=True):
        faults.append("the same inputs gives other scores the second time")
    is_tested = np.isin(rows.splits, ("test", "ood"))
    turned = dataclasses.replace(
        rows, labels=np.where(is_tested, ~rows.labels, rows.labels)
    )
    other = detector.score(dataclasses.replace(inputs, rows=turned)).scores
    if not np.array_equal(scores, other, equal_nan=True):
        faults.append("the labels of test questions change the scores: it reads them")
    if np.isinf(scores).any():
        faults.append("a score is infinite; give NaN where it is undefined")
    defined = Scored(name=detector.name, scores=scores).is_defined
    if not defined.any():
        return [*faults, "no answer has a score"]
    where = rows.where("validation")
    where = where[defined[where]]
    mean = np.mean([auroc(own[where], rows.labels[where]).value for own in scores])
    n_right, n_wrong = int(rows.labels[where].sum()), int((~rows.labels[where]).sum())
    # What chance alone rarely goes below: the rank sum of scores that tell nothing.
    spread = math.sqrt((len(where) + 1) / (12 * max(1, n_right * n_wrong)))
    if mean < 0.5 - _SPREADS * spread:
        faults.append(
            f"AUROC on validation is {mean:.3f}: higher should be likelier correct; "
            "is the sign turned?"
        )
    faults += _faults_of_readings(detector, inputs, scores)
    return faults + _faults_of_samples(detector, inputs, scores)


def _faults_of_readings(
    detector: Baseline, inputs: DetectorInput, scores: np.ndarray
) -> list[str]:
    """Return what happens to scores where every second test answer is not read."""
    if not detector.reads:
        return []
    gone = np.flatnonzero(np.isin(inputs.rows.splits, ("test", "ood")))[::2]
    readings = {name: values.copy() for name, values in inputs.readings.items()}
    for values in readings.values():
        values[gone] = np.nan
    less = dataclasses.replace(inputs, readings=readings)
    found = np.asarray(detector.score(less).scores)
    faults = []
    if np.isfinite(found[:, gone]).any():
        faults.append("an answer that was not read has a score; give NaN")
    rest = np.delete(np.arange(scores.shape[1]), gone)
    if not _same(scores[:, rest], found[:, rest]):
        faults.append("a score depends on which other test answers there are")
    return faults


def _same(scores: np.ndarray, others: np.ndarray) -> bool:
    """Whether scores are the same up to sums in the order of another number of rows."""
    return np.allclose(scores, others, rtol=1e-6, atol=1e-9, equal_nan=True)


def _faults_of_samples(
    detector: Baseline, inputs: DetectorInput, scores: np.ndarray
) -> list[str]:
    """Return what happens to scores where every second test question has no draws."""
    if "samples" not in detector.needs:
        return []
    gone = np.flatnonzero(np.isin(inputs.rows.splits, ("test", "ood")))[::2]
    drawn = list(inputs.samples)
    for i in gone:
        drawn[i] = ()
    less = dataclasses.replace(inputs, samples=drawn)
    found = np.asarray(detector.score(less).scores)
    rest = np.delete(np.arange(scores.shape[1]), gone)
    if _same(scores[:, rest], found[:, rest]):
        return []
    return ["a score depends on what was drawn to other test questions"]

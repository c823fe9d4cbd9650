"""Checks of a detector: shape, repeatability, test labels, orientation, gaps."""

import dataclasses
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput, output_of
from beatrice.jaxprobe.evaluation import DetectorScores
from beatrice.jaxprobe.metrics import auroc

_SPREADS = 3  # standard deviations below chance at which AUROC counts as reversed


def violations(detector: Baseline, inputs: DetectorInput) -> list[str]:
    """Return the faults of a detector on some inputs, one sentence each."""
    faults = []
    try:
        for fault in _faults(detector, inputs):
            faults.append(fault)
    except Exception as error:  # any exception from user code is a fault
        faults.append(f"scoring ends in {failure_in_words(error)}")
    return faults


def failure_in_words(error: Exception) -> str:
    """Describe an exception, with the file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"{type(error).__name__}: {error} ({where})"


def _scores_on(detector: Baseline, inputs: DetectorInput, **changes: Any) -> np.ndarray:
    return np.asarray(
        output_of(detector, dataclasses.replace(inputs, **changes)).scores
    )


def _faults(detector: Baseline, inputs: DetectorInput) -> Iterator[str]:
    rows, scores = inputs.rows, _scores_on(detector, inputs)
    if (
        scores.ndim != 2
        or scores.shape[1] != len(rows.ids)
        or not np.issubdtype(scores.dtype, np.floating)
    ):
        yield (
            f"scores are {scores.dtype} {list(scores.shape)}, expected floats "
            f"[n_seeds, {len(rows.ids)}]"
        )
        return
    is_stable = np.array_equal(scores, _scores_on(detector, inputs), equal_nan=True)
    if not is_stable:  # then the causes of other changes cannot be told apart
        yield "the same inputs give different scores the second time"
    is_tested = np.isin(rows.splits, ("test", "ood"))
    flipped = np.where(is_tested, ~rows.labels, rows.labels)
    other_rows = dataclasses.replace(rows, labels=flipped)
    other = _scores_on(detector, inputs, rows=other_rows)
    if is_stable and not np.array_equal(scores, other, equal_nan=True):
        yield "the labels of test questions change the scores: the detector reads them"
    if np.isinf(scores).any():
        yield "a score is infinite; return NaN if it is undefined"
    is_defined = DetectorScores(name=detector.name, scores=scores).is_defined
    if not is_defined.any():
        yield "no answer has a score"
        return
    where = rows.where("validation")
    where = where[is_defined[where]]
    labels = rows.labels[where]
    mean = np.mean([auroc(seed[where], labels).value for seed in scores])
    # The standard deviation of AUROC for uninformative scores, from their rank sum.
    n_pairs = max(1, int(labels.sum()) * int((~labels).sum()))
    spread = math.sqrt((len(where) + 1) / (12 * n_pairs))
    if mean < 0.5 - _SPREADS * spread:
        yield (
            f"AUROC on validation is {mean:.3f}, but higher scores should be likelier "
            "correct; is the sign reversed?"
        )
    yield from _faults_of_gaps(detector, inputs, scores, is_stable)


def _faults_of_gaps(
    detector: Baseline, inputs: DetectorInput, scores: np.ndarray, is_stable: bool
) -> Iterator[str]:
    """Yield faults if every second test answer has no reading or no samples."""
    hidden = np.flatnonzero(np.isin(inputs.rows.splits, ("test", "ood")))[::2]
    others = np.delete(np.arange(scores.shape[1]), hidden)

    def depends(new: np.ndarray) -> bool:
        # Equal up to float32 sums, whose order depends on the number of rows; such
        # errors are small against the spread of scores, but not for log-odds near 0.
        old = scores[:, others]
        finite = old[np.isfinite(old)]
        atol = 1e-5 * finite.std() if finite.size else 0.0
        return is_stable and not np.allclose(
            old, new[:, others], rtol=1e-6, atol=atol, equal_nan=True
        )

    if detector.reads:
        readings = {name: values.copy() for name, values in inputs.readings.items()}
        for values in readings.values():
            values[hidden] = np.nan
        new = _scores_on(detector, inputs, readings=readings)
        if np.isfinite(new[:, hidden]).any():
            yield "an answer that was not read has a score; return NaN"
        if depends(new):
            yield "a score depends on which other test answers there are"
    if "samples" in detector.needs:
        gone = set(hidden.tolist())
        samples = [() if i in gone else x for i, x in enumerate(inputs.samples)]
        if depends(_scores_on(detector, inputs, samples=samples)):
            yield "a score depends on the samples drawn for other test questions"

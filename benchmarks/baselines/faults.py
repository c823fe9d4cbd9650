"""What a detector does wrong: shape, repetition, test labels, orientation, gaps."""

import dataclasses
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput, output_of
from beatrice.jaxprobe.evaluation import Scored
from beatrice.jaxprobe.metrics import auroc

_SPREADS = 3  # of AUROC under chance, below which a score points the wrong way


def violations(detector: Baseline, inputs: DetectorInput) -> list[str]:
    """Return what a detector does wrong on some inputs, a sentence each."""
    faults = []
    try:
        for fault in _faults(detector, inputs):
            faults.append(fault)
    except Exception as error:  # whatever a person's function raises is a fault of it
        faults.append(f"scoring ends in {failure_in_words(error)}")
    return faults


def failure_in_words(error: Exception) -> str:
    """Say what was raised, and in which line of which file."""
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
    if not is_stable:  # then nothing tells what else changes the scores
        yield "the same inputs give other scores the second time"
    is_tested = np.isin(rows.splits, ("test", "ood"))
    flipped = np.where(is_tested, ~rows.labels, rows.labels)
    other_rows = dataclasses.replace(rows, labels=flipped)
    other = _scores_on(detector, inputs, rows=other_rows)
    if is_stable and not np.array_equal(scores, other, equal_nan=True):
        yield "the labels of test questions change the scores: it reads them"
    if np.isinf(scores).any():
        yield "a score is infinite; give NaN where it is undefined"
    is_defined = Scored(name=detector.name, scores=scores).is_defined
    if not is_defined.any():
        yield "no answer has a score"
        return
    where = rows.where("validation")
    where = where[is_defined[where]]
    labels = rows.labels[where]
    mean = np.mean([auroc(seed[where], labels).value for seed in scores])
    # What chance alone rarely goes below: the rank sum of scores without information.
    n_pairs = max(1, int(labels.sum()) * int((~labels).sum()))
    spread = math.sqrt((len(where) + 1) / (12 * n_pairs))
    if mean < 0.5 - _SPREADS * spread:
        yield (
            f"AUROC on validation is {mean:.3f}: higher should be likelier correct; "
            "is the sign turned?"
        )
    yield from _faults_of_gaps(detector, inputs, scores, is_stable)


def _faults_of_gaps(
    detector: Baseline, inputs: DetectorInput, scores: np.ndarray, is_stable: bool
) -> Iterator[str]:
    """Yield what happens where every second test answer was not read or drawn for."""
    hidden = np.flatnonzero(np.isin(inputs.rows.splits, ("test", "ood")))[::2]
    others = np.delete(np.arange(scores.shape[1]), hidden)

    def depends(new: np.ndarray) -> bool:
        # The same up to float32 sums in the order of another number of rows, which are
        # small beside what tells answers apart, but not beside log-odds near 0.
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
            yield "an answer that was not read has a score; give NaN"
        if depends(new):
            yield "a score depends on which other test answers there are"
    if "samples" in detector.needs:
        gone = set(hidden.tolist())
        samples = [() if i in gone else x for i, x in enumerate(inputs.samples)]
        if depends(_scores_on(detector, inputs, samples=samples)):
            yield "a score depends on what was drawn to other test questions"

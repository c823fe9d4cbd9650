"""What a detector does wrong: shape, repetition, test labels, orientation, gaps."""

import dataclasses
import importlib
import math
from pathlib import Path

import numpy as np

from benchmarks.baselines.catalogue import catalogue
from benchmarks.baselines.detector import Detector, Evidence
from benchmarks.baselines.readings import kept_readings, rows_read
from benchmarks.baselines.stage import BaselinesConfig, unmet
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from jaxprobe.evaluation import Scored
from jaxprobe.metrics import auroc
from jaxprobe.stage import chosen_layer, open_rows

_SPREADS = 3  # of AUROC under chance, below which a score points the wrong way


def find_detector(place: str) -> Detector:
    """Return the detector of a name in the catalogue, or of `module:NAME`.

    Raises:
      ValueError: there is no such detector.
    """
    if (known := catalogue().get(place)) is not None:
        return known
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"{place}: {error}; give MODULE:NAME of a detector") from None
    if not isinstance(found, Detector):
        raise ValueError(
            f"{place} is {type(found).__name__}, expected a Detector "
            "(benchmarks/baselines/detector.py); give MODULE:NAME of one"
        )
    return found


def check_detector(run_dir: Path, place: str, nli: Path | None = None) -> list[str]:
    """Return what a detector does wrong on a run's answers, a sentence each.

    Args:
      run_dir: a run whose signals are extracted, labelled and swept.
      place: see `find_detector`.
      nli: directory of an NLI model, for those that need one.

    Raises:
      ValueError: the run lacks what the detector needs.
    """
    detector = find_detector(place)
    with RunDir.open(run_dir) as run:
        if lack := unmet(detector, run, BaselinesConfig(nli=nli and str(nli))):
            raise ValueError(f"{detector.name} {lack}")
        relations = None
        if nli is not None:
            from benchmarks.baselines.sampled.entailment import load_entailment

            relations = load_entailment(nli)
        settings = [s for s in settings_of(run) if s in detector.settings]
        faults = []
        for setting in settings:
            store, rows = open_rows(run, setting)
            evidence = Evidence(
                run=run,
                store=store,
                rows=rows,
                layer=chosen_layer(run),
                relations=relations,
            )
            kept = kept_readings(evidence, rows_read(evidence, [detector]))
            evidence = dataclasses.replace(evidence, readings=kept.values)
            faults += [f"{setting}: {x}" for x in faults_of(detector, evidence)]
    return faults


def faults_of(detector: Detector, evidence: Evidence) -> list[str]:
    """Return what a detector does wrong on some evidence, a sentence each."""
    rows = evidence.rows
    n_rows = len(rows.ids)
    scores = np.asarray(detector.score(evidence).scores)
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
    again = np.asarray(detector.score(evidence).scores)
    if not np.array_equal(scores, again, equal_nan=True):
        faults.append("the same evidence gives other scores the second time")
    is_tested = np.isin(rows.splits, ("test", "ood"))
    turned = dataclasses.replace(
        rows, labels=np.where(is_tested, ~rows.labels, rows.labels)
    )
    other = detector.score(dataclasses.replace(evidence, rows=turned)).scores
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
    faults += _faults_of_readings(detector, evidence, scores)
    return faults + _faults_of_samples(detector, evidence, scores)


def _faults_of_readings(
    detector: Detector, evidence: Evidence, scores: np.ndarray
) -> list[str]:
    """Return what happens to scores where every second test answer is not read."""
    if not detector.reads:
        return []
    gone = np.flatnonzero(np.isin(evidence.rows.splits, ("test", "ood")))[::2]
    readings = {name: values.copy() for name, values in evidence.readings.items()}
    for values in readings.values():
        values[gone] = np.nan
    less = dataclasses.replace(evidence, readings=readings)
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
    detector: Detector, evidence: Evidence, scores: np.ndarray
) -> list[str]:
    """Return what happens to scores where every second test question has no draws."""
    if "samples" not in detector.needs:
        return []
    gone = np.flatnonzero(np.isin(evidence.rows.splits, ("test", "ood")))[::2]
    less = dataclasses.replace(evidence)
    drawn = list(evidence.samples)
    for i in gone:
        drawn[i] = ()
    vars(less)["samples"] = drawn  # in the place of what the run holds
    found = np.asarray(detector.score(less).scores)
    rest = np.delete(np.arange(scores.shape[1]), gone)
    if _same(scores[:, rest], found[:, rest]):
        return []
    return ["a score depends on what was drawn to other test questions"]

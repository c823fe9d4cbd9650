"""What detectors said, kept in the run until something that it depends on changes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.baselines.detector import (
    FORMAT,
    Detector,
    Evidence,
    Found,
    Need,
    identities,
)
from extract.run.contents import row_files, samples_file
from extract.run.directory import RunDir
from extract.run.files import (
    read_json,
    sha256_tree,
    write_text_atomic,
)
from extract.run.results import read_rows, write_rows
from jaxprobe.checkpoint import load_cache, save_cache


class Scores(NamedTuple):
    """What a detector said of a setting, and what that took.

    Attributes:
      found: its scores, of one seed and all NaN where it could not be fitted.
      seconds: of scoring and of its share of the readings.
      peak_bytes: most memory of the process while it was scored or read.
      reason: why there is no score, or empty.
    """

    found: Found
    seconds: float
    peak_bytes: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptScores:
    """The scores of detectors on one setting, by file in the run.

    Attributes:
      evidence: of the setting, without readings.
      shas: identities of what all detectors read, of drawn answers, and of the models
        that some ask beside the backbone; see `identities_of`.
    """

    evidence: Evidence
    shas: Mapping[str, str]

    def _path(self, name: str) -> Path:
        folder = self.evidence.run.path / "baselines" / self.evidence.rows.setting
        return folder / f"{name.replace(':', '-')}.safetensors"

    def _key(self, detector: Detector) -> str:
        """Return the identity of all that a detector's scores depend on.

        The layer of the sweep is part of it, with all of the run's rows, and so are
        its readings: P(True) is shown drawn answers, which may come later.
        """
        extra = [self.shas[need] for need in sorted(detector.needs & set(self.shas))]
        readings = identities(self.evidence, detector.reads).values()
        own = (FORMAT, detector.name, detector.variant, self.shas["run"])
        return " ".join((*own, *extra, *readings))

    def load(self, detector: Detector) -> Scores | None:
        """Return what a detector said before, if of the same things."""
        path = self._path(detector.name)
        if (held := load_cache(path, self._key(detector))) is None:
            return None
        chosen = tuple(read_rows(path.with_suffix(".jsonl")))
        reason = held["reason"].tobytes().decode()
        cost = held["seconds"].item(), held["peak_bytes"].item()
        return Scores(Found(held["scores"], chosen), *cost, reason)

    def save(self, detector: Detector, scores: Scores) -> None:
        """Keep what a detector said; the scores last, without which it said nothing."""
        path = self._path(detector.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = write_rows(scores.found.chosen)
        write_text_atomic(path.with_suffix(".jsonl"), chosen)
        arrays = {
            "scores": scores.found.scores,
            "seconds": np.float64(scores.seconds),
            "peak_bytes": np.int64(scores.peak_bytes),
            "reason": np.frombuffer(scores.reason.encode(), np.uint8),
        }
        save_cache(path, arrays, self._key(detector))


def models_beside(run: RunDir, given: Mapping[Need, str | None]) -> dict[str, str]:
    """Return by need the identity of the model that is asked beside the backbone.

    Where none is given now that is the last one that was, so that what it said stays.

    Args:
      run: whose answers are judged.
      given: directories of models.
    """
    path = models_file(run)
    what_to_do = "move it away, and give --nli and --encoder again"
    known = read_json(path, dict[str, str], what_to_do) if path.exists() else {}
    return known | {n: str(sha256_tree(Path(own))) for n, own in given.items() if own}


def models_file(run: RunDir) -> Path:
    """Return where a run remembers which models were asked."""
    return run.path / "baselines" / "models.json"


def identities_of(run: RunDir, given: Mapping[Need, str | None]) -> dict[str, str]:
    """Return the identities of what detectors read: of the run, and by need."""
    common = [*row_files(run), run.answers, run.sweep]
    return models_beside(run, given) | {
        "run": " ".join(str(sha256_tree(path)) for path in common),
        "samples": str(sha256_tree(samples_file(run))),
    }

"""Detectors judged on answers: scores, what they cost, and rows of results.

`judge` does it in a notebook; `beatrice baselines` on the answers of a run, whose
scores are in a cache until something that they depend on changes.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.catalogue import code_of, is_plug
from beatrice.benchmarks.baselines.detector import (
    Detector,
    Evidence,
    Found,
    Judged,
    Relations,
)
from beatrice.benchmarks.baselines.readings import NOTHING_READ, Kept, reading_keys
from beatrice.extract.records import Answer, Example, Label, Sample
from beatrice.extract.run.memory import begin_peak, peak_bytes
from beatrice.extract.run.rows import ResultRow, write_rows
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.features.rows import Rows, rows_of
from beatrice.jaxprobe.metrics import BootstrapConfig

if TYPE_CHECKING:
    import pandas

FORMAT = "4"  # of cached scores: 4 holds the rows of what was chosen too


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

    def scored(self, name: str) -> Scored:
        """Return the scores as they are measured."""
        reason = {"reason": self.reason} if self.reason else {}
        return Scored(name=name, scores=self.found.scores, **reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCache:
    """The scores of detectors on one setting, a file a detector.

    The layer of the sweep is part of their key, with all rows, and so are readings:
    P(True) is shown drawn answers, which may come later.

    Attributes:
      folder: of the files.
      setting: of the answers.
      identities: of what all detectors read ("run"), of answers and questions
        ("answers"), of drawn answers ("samples"), and by need of the models that some
        ask beside the backbone.
    """

    folder: Path
    setting: str
    identities: Mapping[str, str]

    def _cache(self, detector: Detector) -> Cache:
        needs = sorted(detector.needs & set(self.identities))
        readings = reading_keys(self.setting, self.identities, detector.reads)
        code = [code_of(detector)] if is_plug(detector.name) else []
        key = (FORMAT, detector.name, detector.variant, self.identities["run"], *code)
        extra = [self.identities[need] for need in needs]
        return Cache(self.folder, " ".join((*key, *extra, *readings.values())))

    def load(self, detector: Detector) -> Scores | None:
        """Return what a detector said before, if of the same things."""
        held = self._cache(detector).load(_file(detector))
        if held is None:
            return None
        lines = held["chosen"].tobytes().splitlines()
        chosen = tuple(msgspec.json.decode(line, type=ResultRow) for line in lines)
        reason = held["reason"].tobytes().decode()
        cost = held["seconds"].item(), held["peak_bytes"].item()
        return Scores(Found(held["scores"], chosen), *cost, reason)

    def save(self, detector: Detector, scores: Scores) -> None:
        """Write what a detector said and what that took, under one checksum."""
        arrays = {
            "scores": scores.found.scores,
            "seconds": np.float64(scores.seconds),
            "peak_bytes": np.int64(scores.peak_bytes),
            "reason": _as_bytes(scores.reason),
            "chosen": _as_bytes(write_rows(scores.found.chosen)),
        }
        self._cache(detector).save(_file(detector), arrays)


def _file(detector: Detector) -> str:
    return detector.name.replace(":", "-")


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


class Metered:
    """An NLI model whose time is charged to all that ask for a pair.

    It reads a pair once; the detector that asks first would pay for all others.
    """

    def __init__(self, relations: Relations) -> None:
        """Meter a model."""
        self._relations = relations
        self._seconds: dict[tuple[str, str], float] = {}
        self.owed = 0.0  # beyond what the clock shows

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs."""
        distinct = set(pairs)
        new = distinct - set(self._seconds)
        self.owed += sum(self._seconds[pair] for pair in distinct - new)
        began = time.monotonic()
        relations = self._relations(pairs)
        share = (time.monotonic() - began) / max(1, len(new))
        self._seconds.update(dict.fromkeys(new, share))
        return relations


def score(detector: Detector, evidence: Evidence, read: Kept = NOTHING_READ) -> Scores:
    """Return a detector's scores, and why there are none where it refuses.

    Args:
      detector: whose.
      evidence: with the readings that it wants.
      read: what these readings cost.
    """
    relations = evidence.relations
    owed = relations.owed if isinstance(relations, Metered) else 0.0
    begin_peak()
    began, reason, names = time.monotonic(), "", set(detector.reads)
    try:
        found = detector.score(evidence)
    except ValueError as error:  # such as a split of one class
        reason = str(error)
        found = Found(np.full((1, len(evidence.rows.ids)), np.nan))
    found = Found(np.asarray(found.scores, np.float64), tuple(found.chosen))
    seconds = time.monotonic() - began
    seconds += sum(read.seconds.get(name, 0.0) for name in names)
    if isinstance(relations, Metered):
        seconds += relations.owed - owed
    peaks = (peak_bytes(), *(read.peak_bytes.get(name, 0) for name in names))
    return Scores(found, seconds, max(peaks), reason)


def cost_of(
    detector: Detector, evidence: Evidence, scores: Scores, draw_seconds: float | None
) -> Judged:
    """Return what a detector is and cost.

    Args:
      detector: which.
      evidence: of the setting.
      scores: what it said.
      draw_seconds: of a drawn answer; None where that was not timed.
    """
    n_rows, reads = len(evidence.rows.ids), set(detector.reads)
    drawn = (
        [row for row in evidence.samples if row] if "samples" in detector.needs else []
    )
    n_samples = max(map(len, drawn), default=0)
    n_new = [sum(len(s.token_ids or ()) for s in row) for row in drawn]
    per_draw = draw_seconds if drawn else 0.0
    per_question = scores.seconds / n_rows
    # Everything of the answer behind its own prompt is read in one pass.
    is_read = bool(reads - {"p_true", "sample_states"})
    n_others = ("p_true" in reads) + ("lumina_mmd" in reads)
    return Judged(
        name=detector.name,
        title=detector.title,
        setting=evidence.rows.setting,
        source=detector.source,
        variant=detector.variant,
        needs=tuple(sorted(detector.needs)),
        is_trained=detector.is_trained,
        seconds=None if per_draw is None else per_question + per_draw * n_samples,
        peak_bytes=scores.peak_bytes,
        n_forwards=is_read + n_others + n_samples * ("sample_states" in reads),
        n_new_tokens=float(np.mean(n_new)) if n_new else 0.0,
        n_rows=n_rows,
        reason=scores.reason,
    )


def judge(
    signals: FeatureStore,
    labels: Rows | Iterable[Label] | Sequence[bool] | np.ndarray,
    detectors: Iterable[Detector],
    *,
    splits: Sequence[str] | None = None,
    layer: int | None = None,
    questions: Sequence[Example] = (),
    answers: Sequence[Answer] = (),
    samples: Sequence[Sample] = (),
    readings: Mapping[str, np.ndarray] | None = None,
    relations: Relations | None = None,
    encoder: Path | None = None,
    intervals: BootstrapConfig | None = None,
    on_score: Callable[[str], None] = lambda name: None,
) -> "pandas.DataFrame":
    """Judge detectors on answers, without a run.

    Args:
      signals: a store of one setting, on disk or in memory.
      labels: whether each answer of the store is right, in its order; or records, with
        `questions`, whose splits are then taken; or rows that are there already.
      detectors: published ones (`catalogue()`) or your own.
      splits: of every answer, where `labels` are true and false: "train", "validation",
        "test" or "ood". Detectors learn on the first, choose on the second.
      layer: of the hidden states; None takes the middle one of those that are kept.
      questions: of the answers, for detectors that read texts.
      answers: of every row, likewise.
      samples: drawn answers, for detectors that compare them.
      readings: by name, what detectors read beyond the four families, `[n_rows, ...]`.
      relations: an NLI model, see `benchmarks.baselines.entailment`.
      encoder: directory of a text encoder.
      intervals: resamples and seed of the intervals.
      on_score: told the name of every detector that has its scores.

    Returns:
      A row for each metric, set and seed, as in results.jsonl: AUROC and AUPRC with
      their intervals, and what validation chose ("chosen").

    Raises:
      ValueError: labels and answers do not fit together.
    """
    rows = _rows_of(signals, labels, questions, splits)
    kept = signals.spec.hidden_layers
    middle = kept[len(kept) // 2] if kept else 0
    evidence = Evidence.of(
        signals,
        rows,
        layer=middle if layer is None else layer,
        questions=questions,
        answers=answers,
        samples=samples,
        readings=readings or {},
        relations=relations,
        encoder=encoder,
    )
    scores: dict[str, Scores] = {}
    for detector in detectors:
        scores[detector.name] = score(detector, evidence)
        on_score(detector.name)
    scored = [own.scored(name) for name, own in scores.items()]
    chosen = [row for own in scores.values() for row in own.found.chosen]
    made = detection_rows(scored, rows, intervals or BootstrapConfig())
    return as_frame([*chosen, *made])


def as_frame(rows: Iterable[ResultRow]) -> "pandas.DataFrame":
    """Return rows of results as a table with their fields as columns."""
    import pandas

    columns = list(ResultRow.__struct_fields__)
    return pandas.DataFrame(map(msgspec.structs.asdict, rows), columns=columns)


def _rows_of(
    store: FeatureStore,
    labels: Any,
    questions: Sequence[Example],
    splits: Sequence[str] | None,
) -> Rows:
    if isinstance(labels, Rows):
        return labels
    labels = list(labels)
    if all(isinstance(label, Label) for label in labels):
        return rows_of(store, questions, labels)
    keys, n_rows = store.spec.keys, len(store.spec.keys)
    if splits is None or len(splits) != n_rows or len(labels) != n_rows:
        n_splits = "none" if splits is None else len(splits)
        raise ValueError(
            f"expected a label and a split for each of {n_rows} answers, found "
            f"{len(labels)} labels and {n_splits} splits"
        )
    return Rows(
        setting=keys[0][1],
        ids=np.array([key[0] for key in keys]),
        datasets=np.full(n_rows, "own"),
        splits=np.asarray(splits),
        variants=np.array([key[2] for key in keys]),
        labels=np.array([label is not None and bool(label) for label in labels]),
        is_labelled=np.array([label is not None for label in labels]),
    )

"""The stage that judges rival detectors on the answers of a run."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.baselines.catalogue import catalogue
from benchmarks.baselines.detector import Detector, Evidence, Found, Need
from benchmarks.baselines.readings import (
    Kept,
    kept_readings,
    parts_of,
    rows_read,
)
from benchmarks.baselines.scores import (
    KeptScores,
    Scores,
    identities_of,
    models_beside,
    models_file,
)
from benchmarks.panorama.costs import Judged, judged_file
from benchmarks.panorama.significance import is_rival
from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, samples_file, settings_of
from extract.run.directory import RunDir
from extract.run.files import (
    write_json_atomic,
)
from extract.run.manifest import Preset
from extract.run.memory import begin_peak, peak_bytes
from extract.run.results import ResultRow, publish, rows_file
from extract.run.stages import Stage
from jaxprobe.config import set_compiler
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.stage import chosen_layer, open_rows, run_bootstrap, run_selection

OURS = "champion"
Relations = Callable[[Sequence[tuple[str, str]]], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesConfig:
    """Which rivals a run is judged with.

    Attributes:
      only: names; empty takes those that need nothing beyond the run's signals and
        texts. Those that were judged before, on the same answers, stay in the rows.
      again: without names, also those that read the answers again, or read something
        else, where everything that they need is there.
      nli: directory of an NLI model; without one, those that need it are left out.
      encoder: directory of a text encoder, in the same way.
    """

    only: tuple[str, ...] = ()
    again: bool = False
    nli: str | None = None
    encoder: str | None = None

    @property
    def models(self) -> dict[Need, str | None]:
        """Directories of models by what they are needed for, None where not given."""
        return {"entailment": self.nli, "encoder": self.encoder}


BASELINES_PRESETS: dict[Preset, BaselinesConfig] = {
    "demo": BaselinesConfig(),
    "few": BaselinesConfig(),
    "smoke": BaselinesConfig(),
    "paper": BaselinesConfig(),
}


def unmet(detector: Detector, run: RunDir, config: BaselinesConfig) -> str | None:
    """Say what a detector lacks in a run, or None."""
    if "samples" in detector.needs and not samples_file(run).exists():
        return f"needs drawn answers: `beatrice sample {run.path}`"
    if "entailment" in detector.needs and config.nli is None:
        return "needs an NLI model: --nli DIRECTORY"
    if "encoder" in detector.needs and config.encoder is None:
        return "needs a text encoder: --encoder DIRECTORY"
    return None


def chosen_detectors(config: BaselinesConfig) -> list[Detector]:
    """Return the detectors asked for, in the catalogue's order.

    Raises:
      ValueError: one is not known.
    """
    known = catalogue()
    if unknown := [name for name in config.only if name not in known]:
        raise ValueError(f"no detector {unknown[0]!r}; there are {', '.join(known)}")
    if config.only:
        return [one for name, one in known.items() if name in config.only]
    every = known.values()
    return [one for one in every if config.again or not (one.needs or one.reads)]


class _Metered:
    """An NLI model whose time is charged to all that ask for a pair.

    It reads a pair once; the detector that asks first would pay for all others.
    """

    def __init__(self, relations: Relations) -> None:
        self._relations = relations
        self._seconds: dict[tuple[str, str], float] = {}
        self.owed = 0.0  # beyond what the clock shows

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs."""
        asked = set(pairs)
        new = asked - set(self._seconds)
        self.owed += sum(self._seconds[pair] for pair in asked - new)
        began = time.monotonic()
        found = self._relations(pairs)
        share = (time.monotonic() - began) / max(1, len(new))
        self._seconds.update(dict.fromkeys(new, share))
        return found


def _score(detector: Detector, evidence: Evidence, read: Kept) -> Scores:
    """Ask a detector, whose readings cost what `read` says."""
    begin_peak()
    began, reason, own = time.monotonic(), "", set(detector.reads)
    try:
        found = detector.score(evidence)
    except ValueError as error:  # such as a split of one class
        reason = str(error)
        found = Found(np.full((1, len(evidence.rows.ids)), np.nan))
    found = Found(np.asarray(found.scores, np.float64), tuple(found.chosen))
    seconds = time.monotonic() - began + sum(read.seconds[name] for name in own)
    peaks = (peak_bytes(), *(read.peak_bytes[name] for name in own))
    return Scores(found, seconds, max(peaks), reason)


def _judged(detector: Detector, evidence: Evidence, scores: Scores) -> Judged:
    """Say what a detector cost."""
    n_rows, reads = len(evidence.rows.ids), set(detector.reads)
    drawn = (
        [row for row in evidence.samples if row] if "samples" in detector.needs else []
    )
    n_samples = max(map(len, drawn), default=0)
    n_new = [sum(len(s.token_ids or ()) for s in row) for row in drawn]
    per_draw = evidence.draw_seconds if drawn else 0.0
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


class _Left(NamedTuple):
    """What earlier starts said of a setting, by name, and whom is still to be asked."""

    kept: KeptScores
    held: dict[str, Scores | None]
    new: list[Detector]


def _left(
    run: RunDir,
    setting: Setting,
    config: BaselinesConfig,
    asked: Sequence[Detector],
    relations: _Metered | None = None,
) -> _Left:
    """Find what was said before of a setting."""
    store, rows = open_rows(run, setting)
    evidence = Evidence(
        run=run,
        store=store,
        rows=rows,
        layer=chosen_layer(run),
        relations=relations,
        encoder=Path(config.encoder) if config.encoder else None,
    )
    kept = KeptScores(evidence=evidence, shas=identities_of(run, config.models))
    every = [one for one in catalogue().values() if setting in one.settings]
    held = {one.name: kept.load(one) for one in every}
    names = {one.name for one in asked}
    return _Left(kept, held, [d for d in every if d.name in names and not held[d.name]])


def _setting(
    run: RunDir,
    setting: Setting,
    config: BaselinesConfig,
    asked: Sequence[Detector],
    relations: _Metered | None,
    update: Update,
    progress: Progress,
) -> tuple[list[ResultRow], list[Judged]]:
    """Judge detectors on one setting, those of earlier starts among them."""
    kept, held, new = _left(run, setting, config, asked, relations)
    evidence = kept.evidence
    reads = rows_read(evidence, new)
    ticks = itertools.count(1)
    total = len(new) + len(parts_of(len(evidence.rows.ids))) * bool(reads)

    def tick() -> None:
        update(next(ticks), total)

    read = kept_readings(evidence, reads, tick) if reads else Kept({}, {}, {})
    evidence = dataclasses.replace(evidence, readings=read.values)
    for detector in new:
        before = relations.owed if relations else 0.0
        scores = _score(detector, evidence, read)
        if relations:
            seconds = scores.seconds + relations.owed - before
            scores = scores._replace(seconds=seconds)
        kept.save(detector, scores)
        held[detector.name] = scores
        tick()
    known = catalogue()
    found = {known[n]: scores for n, scores in held.items() if scores is not None}
    for one, scores in found.items():
        if scores.reason:
            progress.note(f"baselines: {setting}: {one.name}: {scores.reason}")
    heads, _ = run_selection(run, setting)
    ours = Scored(name=OURS, scores=heads[OURS]["scores"])
    scored = [
        Scored(name=one.name, scores=scores.found.scores)
        if not scores.reason
        else Scored(name=one.name, scores=scores.found.scores, reason=scores.reason)
        for one, scores in found.items()
    ]
    pairs = {"paired": [(OURS, one.name) for one in scored if is_rival(one.name)]}
    made = detection_rows(
        [ours, *scored], evidence.rows, run_bootstrap(run), pairs=pairs
    )
    is_told = [r.experiment != "detection" or r.detector != OURS for r in made]
    chosen = [row for scores in found.values() for row in scores.found.chosen]
    judged = [_judged(one, evidence, scores) for one, scores in found.items()]
    return [*chosen, *itertools.compress(made, is_told)], judged


def _baselines(
    run: RunDir, config: BaselinesConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    asked = chosen_detectors(config)
    lacks = {one.name: unmet(one, run, config) for one in asked}
    for name, reason in lacks.items():
        if reason is not None:
            progress.note(f"baselines: {name} {reason}")
    possible = [one for one in asked if lacks[one.name] is None]
    relations = None
    if config.nli is not None and any("entailment" in d.needs for d in possible):
        from benchmarks.baselines.sampled.entailment import load_entailment

        relations = _Metered(load_entailment(Path(config.nli), progress=update))
    if known := models_beside(run, config.models):
        write_json_atomic(models_file(run), known)
    made, judged = [], []
    for setting in settings_of(run):
        rows, own = _setting(
            run, setting, config, possible, relations, update, progress
        )
        made += rows
        judged += own
    write_json_atomic(judged_file(run), msgspec.to_builtins(judged))
    publish(run, "baselines", made, progress)


BASELINES = Stage(
    name="baselines",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.sweep,
        run.selection,
        *([run.samples] if run.samples.exists() else []),
    ],
    outputs=lambda run: [rows_file(run, "baselines"), judged_file(run)],
    work=_baselines,
    presets=BASELINES_PRESETS,
)

"""The stage that judges rival detectors on the answers of a run."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.baselines.catalogue import catalogue
from benchmarks.baselines.detector import Detector, Evidence, Found
from benchmarks.baselines.readings import Kept, kept_readings
from benchmarks.panorama.significance import is_rival
from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, samples_file, settings_of
from extract.run.directory import RunDir
from extract.run.files import (
    sha256_tree,
    write_json_atomic,
    write_text_atomic,
)
from extract.run.manifest import Preset
from extract.run.results import ResultRow, publish, read_rows, rows_file, write_rows
from extract.run.stages import Stage
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.evaluation import Scored, bootstrap_of, detection_rows
from jaxprobe.features.rows import chosen_layer, load_rows
from jaxprobe.pool import read_selection
from jaxprobe.settings import set_compiler

OURS = "champion"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesConfig:
    """Which rivals a run is judged with.

    Attributes:
      only: names; empty takes all for which everything is there.
      nli: directory of an NLI model; without one, those that need it are left out.
    """

    only: tuple[str, ...] = ()
    nli: str | None = None


BASELINES_PRESETS: dict[Preset, BaselinesConfig] = {
    "demo": BaselinesConfig(),
    "smoke": BaselinesConfig(),
    "paper": BaselinesConfig(),
}


class Judged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a detector is, and what it costs a question.

    Attributes:
      seconds: of scoring, its share of the readings, and of drawing its samples.
      n_forwards: beside the pass that gave the answer, none of which generates.
      n_new_tokens: generated beside the answer, mean.
      n_rows: answers that it was asked about.
    """

    name: str
    title: str
    setting: Setting
    source: str
    variant: str
    needs: tuple[str, ...]
    is_trained: bool
    seconds: float
    n_forwards: int
    n_new_tokens: float
    n_rows: int


def judged_file(run: RunDir) -> Path:
    """Return where what the detectors are and cost is written, for the report."""
    return run.path / "baselines" / "detectors.json"


def unmet(detector: Detector, run: RunDir, config: BaselinesConfig) -> str | None:
    """Say what a detector lacks in a run, or None."""
    if "samples" in detector.needs and not samples_file(run).exists():
        return f"needs drawn answers: `beatrice sample {run.path}`"
    if "entailment" in detector.needs and config.nli is None:
        return "needs an NLI model: --nli DIRECTORY"
    return None


def chosen_detectors(config: BaselinesConfig) -> list[Detector]:
    """Return the detectors asked for, in the catalogue's order.

    Raises:
      ValueError: one is not known.
    """
    known = catalogue()
    if unknown := [name for name in config.only if name not in known]:
        raise ValueError(f"no detector {unknown[0]!r}; there are {', '.join(known)}")
    wanted = config.only or tuple(known)
    return [one for name, one in known.items() if name in wanted]


def _key(detector: Detector, run: RunDir, config: BaselinesConfig) -> str:
    """Return the identity of all that a detector's scores depend on."""
    sources = [*row_files(run), run.answers, run.sweep]
    if "samples" in detector.needs:
        sources.append(samples_file(run))
    if "entailment" in detector.needs:
        sources.append(Path(str(config.nli)))
    shas = [str(sha256_tree(path)) for path in sources]
    return " ".join((detector.name, detector.variant, *shas))


def _scored(
    detector: Detector, evidence: Evidence, key: str, note: Callable[[str], None]
) -> tuple[Found, float]:
    """Return a detector's scores and its seconds, made now or by an earlier start."""
    folder = evidence.run.path / "baselines" / evidence.rows.setting
    path = folder / f"{detector.name.replace(':', '-')}.safetensors"
    if (held := load_cache(path, key)) is not None:
        chosen = tuple(read_rows(path.with_suffix(".jsonl")))
        return Found(held["scores"], chosen), float(held["seconds"])
    began = time.monotonic()
    try:
        found = detector.score(evidence)
    except ValueError as error:  # such as a split of one class
        note(f"baselines: {evidence.rows.setting}: {detector.name}: {error}")
        found = Found(np.full((1, len(evidence.rows.ids)), np.nan))
    seconds = time.monotonic() - began
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path.with_suffix(".jsonl"), write_rows(found.chosen))
    arrays = {"scores": np.asarray(found.scores), "seconds": np.float64(seconds)}
    save_cache(path, arrays, key)
    return found, seconds


def _judged(
    detector: Detector, evidence: Evidence, seconds: float, kept: Kept
) -> Judged:
    """Say what a detector cost."""
    n_rows, reads = len(evidence.rows.ids), set(detector.reads)
    per_question = (seconds + sum(kept.seconds[name] for name in reads)) / n_rows
    drawn = (
        [row for row in evidence.samples if row] if "samples" in detector.needs else []
    )
    n_samples = max(map(len, drawn), default=0)
    n_new = [sum(len(s.token_ids or ()) for s in row) for row in drawn]
    record = evidence.run.stage_record("sample")
    if drawn and record is not None:
        n_drawn = sum(1 for line in samples_file(evidence.run).open())
        per_question += record.seconds / n_drawn * n_samples
    own = reads - {"p_true", "sample_states", "lumina_mmd"}
    n_forwards = bool(own) + ("p_true" in reads) + 2 * ("lumina_mmd" in reads)
    return Judged(
        name=detector.name,
        title=detector.title,
        setting=evidence.rows.setting,
        source=detector.source,
        variant=detector.variant,
        needs=tuple(sorted(detector.needs)),
        is_trained=detector.is_trained,
        seconds=per_question,
        n_forwards=n_forwards + n_samples * ("sample_states" in reads),
        n_new_tokens=float(np.mean(n_new)) if n_new else 0.0,
        n_rows=n_rows,
    )


def _setting(
    run: RunDir,
    setting: Setting,
    detectors: Sequence[Detector],
    config: BaselinesConfig,
    relations: Any,
    tick: Callable[[], None],
    progress: Progress,
) -> tuple[list[ResultRow], list[Judged]]:
    """Judge detectors on one setting."""
    store, rows = load_rows(run, setting)
    evidence = Evidence(
        run=run, store=store, rows=rows, layer=chosen_layer(run), relations=relations
    )
    names = sorted({name for one in detectors for name in one.reads})
    kept = kept_readings(evidence, names, lambda n: None)
    evidence = dataclasses.replace(evidence, readings=kept.values)
    scored, made, judged = [], [], []
    for detector in detectors:
        key = _key(detector, run, config)
        found, seconds = _scored(detector, evidence, key, progress.note)
        scored.append(Scored(name=detector.name, scores=found.scores))
        made += found.chosen
        judged.append(_judged(detector, evidence, seconds, kept))
        tick()
    heads, _ = read_selection(run, setting)
    ours = Scored(name=OURS, scores=heads[OURS]["scores"])
    pairs = {"paired": [(OURS, one.name) for one in scored if is_rival(one.name)]}
    every = detection_rows([ours, *scored], rows, bootstrap_of(run), pairs=pairs)
    of_ours = [r for r in every if r.experiment == "detection" and r.detector == OURS]
    return [*made, *(r for r in every if r not in of_ours)], judged


def _baselines(
    run: RunDir, config: BaselinesConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    asked = chosen_detectors(config)
    lacks = {one.name: unmet(one, run, config) for one in asked}
    for name, reason in lacks.items():
        if reason is not None:
            progress.note(f"baselines: {name} {reason}")
    relations = None
    if config.nli is not None:
        from benchmarks.baselines.sampled.entailment import load_entailment

        relations = load_entailment(Path(config.nli))
    settings = settings_of(run)
    possible = {
        s: [d for d in asked if s in d.settings and lacks[d.name] is None]
        for s in settings
    }
    total, n_done = sum(map(len, possible.values())), 0

    def tick() -> None:
        nonlocal n_done
        n_done += 1
        update(n_done, total)

    made, judged = [], []
    for setting, detectors in possible.items():
        rows, own = _setting(run, setting, detectors, config, relations, tick, progress)
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

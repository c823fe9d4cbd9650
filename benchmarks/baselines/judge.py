"""Detectors judged on answers: scores, what they cost, and rows of results.

`judge` does it in a notebook; `beatrice baselines` on the answers of a run, whose
scores are in a cache until something that they depend on changes.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.check import violations
from beatrice.benchmarks.baselines.detector import (
    Baseline,
    DetectorCost,
    DetectorInput,
    DetectorOutput,
    Relations,
    Requirement,
    catalogue,
    code_of,
    find_detector,
    is_plug,
    is_rival,
)
from beatrice.benchmarks.baselines.readings import (
    NOTHING_READ,
    CachedReadings,
    Reading,
    cached_readings,
    parts_of,
    reading_keys,
    rows_read,
)
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.records import (
    Answer,
    Example,
    Label,
    Sample,
    Setting,
    read_records,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    answers_file,
    draw_seconds_file,
    question_files,
    read_answers,
    read_examples,
    row_files,
    samples_file,
    settings_of,
)
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.files import read_json, sha256_tree, write_json_atomic
from beatrice.extract.run.memory import begin_peak, peak_bytes
from beatrice.extract.run.rows import ResultRow, publish, rows_file, write_rows
from beatrice.extract.run.stages import Stage
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibrate import (
    chosen_layer,
    open_rows,
    run_bootstrap,
    run_selection,
)
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import Rows, rows_of

if TYPE_CHECKING:
    import pandas

    from beatrice.extract.backbone.loading import Backbone


SCORE_FORMAT = "4"  # of cached scores: 4 holds the rows of what was chosen too


class Scores(NamedTuple):
    """What a detector said of a setting, and what that took.

    Attributes:
      found: its scores, of one seed and all NaN where it could not be fitted.
      seconds: of scoring and of its share of the readings.
      peak_bytes: most memory of the process while it was scored or read.
      reason: why there is no score, or empty.
    """

    found: DetectorOutput
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

    def _cache(self, detector: Baseline) -> Cache:
        needs = sorted(detector.needs & set(self.identities))
        readings = reading_keys(self.setting, self.identities, detector.reads)
        code = [code_of(detector)] if is_plug(detector.name) else []
        key = (
            SCORE_FORMAT,
            detector.name,
            detector.variant,
            self.identities["run"],
            *code,
        )
        extra = [self.identities[need] for need in needs]
        return Cache(self.folder, " ".join((*key, *extra, *readings.values())))

    def load(self, detector: Baseline) -> Scores | None:
        """Return what a detector said before, if of the same things."""
        held = self._cache(detector).load(_file(detector))
        if held is None:
            return None
        lines = held["chosen"].tobytes().splitlines()
        chosen = tuple(msgspec.json.decode(line, type=ResultRow) for line in lines)
        reason = held["reason"].tobytes().decode()
        cost = held["seconds"].item(), held["peak_bytes"].item()
        return Scores(DetectorOutput(held["scores"], chosen), *cost, reason)

    def save(self, detector: Baseline, scores: Scores) -> None:
        """Write what a detector said and what that took, under one checksum."""
        arrays = {
            "scores": scores.found.scores,
            "seconds": np.float64(scores.seconds),
            "peak_bytes": np.int64(scores.peak_bytes),
            "reason": _as_bytes(scores.reason),
            "chosen": _as_bytes(write_rows(scores.found.chosen)),
        }
        self._cache(detector).save(_file(detector), arrays)


def _file(detector: Baseline) -> str:
    return detector.name.replace(":", "-")


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


class MeteredRelations:
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


def score(
    detector: Baseline, inputs: DetectorInput, read: CachedReadings = NOTHING_READ
) -> Scores:
    """Return a detector's scores, and why there are none where it refuses.

    Args:
      detector: whose.
      inputs: with the readings that it wants.
      read: what these readings cost.
    """
    relations = inputs.relations
    owed = relations.owed if isinstance(relations, MeteredRelations) else 0.0
    begin_peak()
    began, reason, names = time.monotonic(), "", set(detector.reads)
    try:
        found = detector.score(inputs)
    except ValueError as error:  # such as a split of one class
        reason = str(error)
        found = DetectorOutput(np.full((1, len(inputs.rows.ids)), np.nan))
    found = DetectorOutput(np.asarray(found.scores, np.float64), tuple(found.chosen))
    seconds = time.monotonic() - began
    seconds += sum(read.seconds.get(name, 0.0) for name in names)
    if isinstance(relations, MeteredRelations):
        seconds += relations.owed - owed
    peaks = (peak_bytes(), *(read.peak_bytes.get(name, 0) for name in names))
    return Scores(found, seconds, max(peaks), reason)


def cost_of(
    detector: Baseline,
    inputs: DetectorInput,
    scores: Scores,
    draw_seconds: float | None,
) -> DetectorCost:
    """Return what a detector is and cost.

    Args:
      detector: which.
      inputs: of the setting.
      scores: what it said.
      draw_seconds: of a drawn answer; None where that was not timed.
    """
    n_rows, reads = len(inputs.rows.ids), set(detector.reads)
    drawn = (
        [row for row in inputs.samples if row] if "samples" in detector.needs else []
    )
    n_samples = max(map(len, drawn), default=0)
    n_new = [sum(len(s.token_ids or ()) for s in row) for row in drawn]
    per_draw = draw_seconds if drawn else 0.0
    per_question = scores.seconds / n_rows
    # Everything of the answer behind its own prompt is read in one pass.
    is_read = bool(reads - {"p_true", "sample_states"})
    n_others = ("p_true" in reads) + ("lumina_mmd" in reads)
    return DetectorCost(
        name=detector.name,
        title=detector.title,
        setting=inputs.rows.setting,
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
    detectors: Iterable[Baseline],
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
    rows = _rows_of_labels(signals, labels, questions, splits)
    kept = signals.spec.hidden_layers
    middle = kept[len(kept) // 2] if kept else 0
    inputs = DetectorInput.of(
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
        scores[detector.name] = score(detector, inputs)
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


def _rows_of_labels(
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


OURS = "champion"


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
    def models(self) -> dict[Requirement, str | None]:
        """Directories of models by what they are needed for, None where not given."""
        return {"entailment": self.nli, "encoder": self.encoder}


BASELINES_PRESETS: dict[Preset, BaselinesConfig] = {
    "demo": BaselinesConfig(),
    "smoke": BaselinesConfig(),
    "few": BaselinesConfig(),
    "paper": BaselinesConfig(),
}


def unmet(detector: Baseline, run: RunDir, config: BaselinesConfig) -> str | None:
    """Say what a detector lacks in a run, or None."""
    if "samples" in detector.needs and not samples_file(run).exists():
        return f"needs drawn answers: `beatrice sample {run.path}`"
    if "entailment" in detector.needs and config.nli is None:
        return "needs an NLI model: --nli DIRECTORY"
    if "encoder" in detector.needs and config.encoder is None:
        return "needs a text encoder: --encoder DIRECTORY"
    return None


def chosen_detectors(config: BaselinesConfig) -> list[Baseline]:
    """Return the detectors asked for, in the catalogue's order, somebody's own last.

    Raises:
      ValueError: one is not known.
    """
    known = catalogue()
    if not config.only:
        every = known.values()
        return [one for one in every if config.again or not (one.needs or one.reads)]
    wanted = {spec: find_detector(spec) for spec in dict.fromkeys(config.only)}
    names = {detector.name for detector in wanted.values()}
    own = [detector for spec, detector in wanted.items() if is_plug(spec)]
    return _distinct([*(x for name, x in known.items() if name in names), *own])


def _distinct(detectors: Sequence[Baseline]) -> list[Baseline]:
    by_name = {detector.name: detector for detector in detectors}
    for detector in detectors:
        if by_name[detector.name] is not detector:
            raise ValueError(
                f"two detectors are named {detector.name!r}; give one another name"
            )
    return list(by_name.values())


def _plugs_file(run: RunDir) -> Path:
    """Return where a run remembers which detectors are not of the catalogue."""
    return run.path / "baselines" / "plugs.json"


def _known_detectors(
    run: RunDir, config: BaselinesConfig, progress: Progress
) -> list[Baseline]:
    """Return the catalogue and somebody's own, now asked for or by an earlier start."""
    path = _plugs_file(run)
    before = read_json(path, list[str], "delete it") if path.exists() else []
    specs = list(dict.fromkeys((*before, *filter(is_plug, config.only))))
    if specs != before:
        write_json_atomic(path, specs)
    known = list(catalogue().values())
    for spec in specs:
        try:
            known.append(find_detector(spec))
        except ValueError as error:
            if spec in config.only:
                raise
            progress.note(f"baselines: {spec} is left out: {error}")
    return _distinct(known)


def run_inputs(
    run: RunDir,
    setting: Setting,
    config: BaselinesConfig | None = None,
    relations: Relations | None = None,
    *,
    layer: int | None = None,
) -> DetectorInput:
    """Return what detectors may read of a setting of a run, without readings.

    Args:
      run: that is labelled and extracted.
      setting: of the answers.
      config: gives the text encoder.
      relations: an NLI model.
      layer: of the hidden states; None takes the one that the run's sweep chose.
    """
    store, rows = open_rows(run, setting)
    drawn = samples_file(run)
    encoder = config and config.encoder
    return DetectorInput.of(
        store,
        rows,
        layer=chosen_layer(run) if layer is None else layer,
        questions=read_examples(run),
        answers=read_answers(run, setting),
        samples=read_records(drawn, Sample) if drawn.exists() else (),
        template=answer_config(run).prompt.prompt_template(),
        relations=relations,
        encoder=Path(encoder) if encoder else None,
    )


def run_identities(
    run: RunDir, given: Mapping[Requirement, str | None]
) -> dict[str, str]:
    """Return the identities of what detectors read, see `ScoreCache.identities`."""
    common = [*row_files(run), run.answers, run.sweep]
    texts = [answers_file(run), *question_files(run)]
    return models_beside(models_file(run), given) | {
        "run": " ".join(str(sha256_tree(path)) for path in common),
        "answers": " ".join(str(sha256_tree(path)) for path in texts),
        "samples": str(sha256_tree(samples_file(run))),
    }


def models_beside(
    path: Path, given: Mapping[Requirement, str | None]
) -> dict[str, str]:
    """Return by need the identity of the model that is asked beside the backbone.

    Where none is given now that is the last one that was, so that what it said stays.

    Args:
      path: where those of earlier starts are written.
      given: directories of models.
    """
    what_to_do = "move it away, and give --nli and --encoder again"
    known = read_json(path, dict[str, str], what_to_do) if path.exists() else {}
    return known | {n: str(sha256_tree(Path(own))) for n, own in given.items() if own}


def models_file(run: RunDir) -> Path:
    """Return where a run remembers which models were asked."""
    return run.path / "baselines" / "models.json"


def costs_file(run: RunDir) -> Path:
    """Return where what the detectors are and cost is written, for the report."""
    return run.path / "baselines" / "detectors.json"


def read_costs(path: Path) -> list[DetectorCost]:
    """Return what the rivals of a run are and cost.

    Raises:
      ValueError: it is missing, or not as it was written.
    """
    return read_json(path, list[DetectorCost], "run `beatrice baselines` again")


def _open_backbone(run: RunDir) -> "Backbone":
    from beatrice.extract.backbone.loading import open_backbone, require_answering_model
    from beatrice.extract.backbone.names import BackboneConfig

    backbone = open_backbone(run.section("backbone", BackboneConfig))
    require_answering_model(run.answers, backbone)
    return backbone


def _read(
    run: RunDir,
    inputs: DetectorInput,
    detectors: Sequence[Baseline],
    identities: Mapping[str, str],
    tick: Callable[[], None] = lambda: None,
) -> CachedReadings:
    """Read what some detectors want of a setting."""
    wanted = rows_read(inputs.rows, detectors)
    if not wanted:
        return NOTHING_READ
    setting = inputs.rows.setting
    folder = run.path / "readings" / setting
    keys = reading_keys(setting, identities, wanted)
    caches = {name: Cache(folder / name, key) for name, key in keys.items()}
    reading = Reading(inputs, partial(_open_backbone, run))
    return cached_readings(reading, wanted, len(inputs.rows.ids), caches, tick)


def _draw_seconds(run: RunDir, setting: Setting) -> float | None:
    """Return what a drawn answer of a setting took; None where that was not timed."""
    path = draw_seconds_file(run)
    if not path.exists():
        return None
    seconds = read_json(path, dict[str, float | None], "run `beatrice sample` again")
    return seconds.get(setting)


def _scores(
    run: RunDir,
    inputs: DetectorInput,
    known: Sequence[Baseline],
    names: Sequence[str],
    identities: Mapping[str, str],
    update: Update,
) -> dict[Baseline, Scores]:
    """Return scores by detector, those of earlier starts among them."""
    setting = inputs.rows.setting
    cache = ScoreCache(
        folder=run.path / "baselines" / setting, setting=setting, identities=identities
    )
    held = {x: cache.load(x) for x in known if setting in x.settings}
    new = [x for x, scores in held.items() if x.name in names and scores is None]
    n_parts = len(parts_of(len(inputs.rows.ids))) * any(x.reads for x in new)
    ticks, total = itertools.count(1), len(new) + n_parts

    def tick() -> None:
        update(next(ticks), total)

    read = _read(run, inputs, new, identities, tick)
    inputs = dataclasses.replace(inputs, readings=read.values)
    for detector in new:
        held[detector] = scores = score(detector, inputs, read)
        cache.save(detector, scores)
        tick()
    return {detector: scores for detector, scores in held.items() if scores is not None}


def _rows(
    run: RunDir, inputs: DetectorInput, scores: Mapping[Baseline, Scores]
) -> list[ResultRow]:
    """Return the rows of detectors on a setting, and of the selected set's lead."""
    heads, _ = run_selection(run, inputs.rows.setting)
    ours = Scored(name=OURS, scores=heads[OURS]["scores"])
    rivals = [own.scored(detector.name) for detector, own in scores.items()]
    pairs = {"paired": [(OURS, one.name) for one in rivals if is_rival(one.name)]}
    intervals = run_bootstrap(run)
    made = detection_rows([ours, *rivals], inputs.rows, intervals, pairs=pairs)
    chosen = [row for own in scores.values() for row in own.found.chosen]
    # The selected set's own rows are those of `evaluate`.
    new = [r for r in made if r.experiment != "detection" or r.detector != OURS]
    return [*chosen, *new]


def _baselines(
    run: RunDir, config: BaselinesConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    known = _known_detectors(run, config, progress)
    lacks = {one.name: unmet(one, run, config) for one in chosen_detectors(config)}
    for name, reason in lacks.items():
        if reason is not None:
            progress.note(f"baselines: {name} {reason}")
    names = [name for name, reason in lacks.items() if reason is None]
    relations = None
    if config.nli is not None and any(
        "entailment" in x.needs for x in known if x.name in names
    ):
        from beatrice.benchmarks.baselines.entailment import load_entailment

        relations = MeteredRelations(load_entailment(Path(config.nli), progress=update))
    if models := models_beside(models_file(run), config.models):
        write_json_atomic(models_file(run), models)
    identities = run_identities(run, config.models)
    made, judged = [], []
    for setting in settings_of(run):
        inputs = run_inputs(run, setting, config, relations)
        scores = _scores(run, inputs, known, names, identities, update)
        for detector, own in scores.items():
            if own.reason:
                progress.note(f"baselines: {setting}: {detector.name}: {own.reason}")
        made += _rows(run, inputs, scores)
        per_draw = _draw_seconds(run, setting)
        judged += [cost_of(x, inputs, own, per_draw) for x, own in scores.items()]
    write_json_atomic(costs_file(run), msgspec.to_builtins(judged))
    publish(run, "baselines", made, progress)


def run_violations(run: RunDir, spec: str, config: BaselinesConfig) -> list[str]:
    """Return what a detector does wrong on a run's answers, a sentence each.

    Args:
      run: whose signals are extracted, labelled and swept.
      spec: see `find_detector`.
      config: gives the models that it needs.

    Raises:
      ValueError: the run lacks what the detector needs.
    """
    detector = find_detector(spec)
    if lack := unmet(detector, run, config):
        raise ValueError(f"{detector.name} {lack}")
    relations = None
    if config.nli is not None:
        from beatrice.benchmarks.baselines.entailment import load_entailment

        relations = load_entailment(Path(config.nli))
    identities = run_identities(run, config.models)
    faults = []
    for setting in settings_of(run):
        if setting in detector.settings:
            inputs = run_inputs(run, setting, config, relations)
            read = _read(run, inputs, [detector], identities)
            inputs = dataclasses.replace(inputs, readings=read.values)
            faults += [f"{setting}: {x}" for x in violations(detector, inputs)]
    return faults


BASELINES = Stage(
    name="baselines",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.sweep,
        run.selection,
        *([run.samples] if run.samples.exists() else []),
    ],
    outputs=lambda run: [rows_file(run, "baselines"), costs_file(run)],
    work=_baselines,
    presets=BASELINES_PRESETS,
)

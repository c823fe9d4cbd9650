"""Judging of detectors on answers, in a notebook or in a run."""

import dataclasses
import itertools
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.detector import (
    SAMPLE,
    Baseline,
    DetectorCost,
    DetectorInput,
    DetectorOutput,
    Relations,
    Requirement,
    catalogue,
    find_detector,
    is_plug,
    output_of,
)
from beatrice.benchmarks.baselines.faults import failure_in_words, violations
from beatrice.benchmarks.baselines.readings import (
    NOTHING_READ,
    AnswerReader,
    CachedReadings,
    MeteredRelations,
    cached_readings,
    chunks_of,
    reading_keys,
    rows_read,
)
from beatrice.benchmarks.results.names import CHAMPION
from beatrice.benchmarks.stages import SCORE_FORMAT, BaselinesConfig, costs_file
from beatrice.extract.generate.answers import answer_config, read_drawing
from beatrice.extract.plugs import sha256_of_code
from beatrice.extract.records import (
    SETTINGS,
    Answer,
    Example,
    Label,
    Sample,
    Setting,
    read_records,
)
from beatrice.extract.run.console import Progress, Update, shell_line, update_for_part
from beatrice.extract.run.contents import (
    question_files,
    read_answers,
    read_examples,
    row_files,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import read_json, sha256_tree, write_json_atomic
from beatrice.extract.run.process import begin_peak, peak_bytes
from beatrice.extract.run.rows import ResultRow, as_frame, publish, write_rows
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibrate import run_bootstrap, run_selection
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import set_compiler, set_library_compiler
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import StoreRows, check_groups_unsplit, rows_of
from beatrice.jaxprobe.stages import chosen_layer
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.train import open_rows
from beatrice.pgir.arguments import as_labels, as_list, as_names, as_splits

if TYPE_CHECKING:
    import pandas

    from beatrice.extract.backbone.loading import Backbone
    from beatrice.extract.generate.templates import PromptTemplate

_MODELS = "baselines/models.json"  # in the run: hashes of models besides the backbone


class JudgedOutput(NamedTuple):
    """A detector's output in a setting, and its cost."""

    output: DetectorOutput  # one seed, all NaN, if it could not be fitted
    # For scoring and its share of the readings, as if every answer had samples.
    seconds: float
    peak_bytes: int = 0  # peak memory of the process during its readings and scoring
    reason: str = ""  # why there is no score, or empty

    def scored(self, name: str) -> DetectorScores:
        """Return the scores, named, for `detection_rows`."""
        reason = self.reason or DetectorScores.reason
        return DetectorScores(name=name, scores=self.output.scores, reason=reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCache:
    """Cache of detectors' scores in one setting, with one file per detector.

    The key of a file covers all rows, the sweep's layer and the readings. Scores of the
    catalogue stay valid until the detector's `variant` or `SCORE_FORMAT` changes, those
    of user code until its file changes.
    """

    folder: Path  # of the files
    setting: str  # of the answers
    # Hashes of what all detectors read ("run"), answers and questions ("answers"),
    # sampled answers ("samples"), and models besides the backbone (by requirement).
    identities: Mapping[str, str]

    def _cache(self, detector: Baseline) -> Cache:
        needs = sorted(detector.needs & set(self.identities))
        readings = reading_keys(self.setting, self.identities, detector.reads)
        code = [sha256_of_code(detector.score)] if is_plug(detector.name) else []
        run = self.identities["run"]
        key = (SCORE_FORMAT, detector.name, detector.variant, run, *code)
        extra = [self.identities[need] for need in needs]
        return Cache(self.folder, " ".join((*key, *extra, *readings.values())))

    def load(self, detector: Baseline) -> JudgedOutput | None:
        """Return a detector's cached scores, or None if the inputs have changed."""
        arrays = self._cache(detector).load(_file(detector))
        if arrays is None:
            return None
        lines = arrays["chosen"].tobytes().splitlines()
        chosen = tuple(msgspec.json.decode(line, type=ResultRow) for line in lines)
        return JudgedOutput(
            DetectorOutput(arrays["scores"], chosen),
            arrays["seconds"].item(),
            arrays["peak_bytes"].item(),
            arrays["reason"].tobytes().decode(),
        )

    def save(self, detector: Baseline, scores: JudgedOutput) -> None:
        """Save a detector's scores and their cost, under one checksum."""
        arrays = {
            "scores": scores.output.scores,
            "seconds": np.float64(scores.seconds),
            "peak_bytes": np.int64(scores.peak_bytes),
            "reason": _as_bytes(scores.reason),
            "chosen": _as_bytes(write_rows(scores.output.chosen)),
        }
        self._cache(detector).save(_file(detector), arrays)


def _file(detector: Baseline) -> str:
    return detector.name.replace(":", "-")


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def no_scores(n_rows: int, reason: str) -> JudgedOutput:
    """Return the output of a detector that could not score: NaN for one seed."""
    return JudgedOutput(DetectorOutput(np.full((1, n_rows), np.nan)), 0.0, 0, reason)


def score(
    detector: Baseline, inputs: DetectorInput, readings: CachedReadings = NOTHING_READ
) -> JudgedOutput:
    """Return a detector's scores, or the reason for having none.

    Raises ValueError if scores are not of shape `[n_seeds, n_rows]`.
    """

    def clock() -> float:
        return time.monotonic() + getattr(inputs.relations, "owed", 0.0)

    use_one_blas_thread()
    begin_peak()
    began, reason, n_rows = clock(), "", len(inputs.rows.ids)
    try:
        scores, chosen = output_of(detector, inputs)
    except ValueError as error:  # such as a split of one class
        reason = str(error)
        scores, chosen = no_scores(n_rows, reason).output
    output = DetectorOutput(np.asarray(scores, np.float64), tuple(chosen))
    shape = list(output.scores.shape)
    if shape[1:] != [n_rows]:
        raise ValueError(
            f"{detector.name} returns scores of shape {shape}, expected "
            f"[n_seeds, {n_rows}]; for one seed, add an axis with `scores[None]`"
        )
    if not reason and np.isnan(output.scores).any(axis=0).all():
        reason = DetectorScores.reason
    seconds = clock() - began
    if "samples" in detector.needs and not detector.draws_for:
        # Rows without samples take no time to score.
        seconds *= n_rows / (sum(map(bool, inputs.samples)) or n_rows)
    seconds += sum(readings.seconds.get(name, 0.0) for name in detector.reads)
    peaks = (peak_bytes(), *(readings.peak_bytes.get(x, 0) for x in detector.reads))
    return JudgedOutput(output, seconds, max(peaks), reason)


def score_or_explain(
    detector: Baseline, inputs: DetectorInput, readings: CachedReadings = NOTHING_READ
) -> tuple[JudgedOutput, bool]:
    """Return the result of `score` and True; if user code fails, why and False."""
    try:
        return score(detector, inputs, readings), True
    except Exception as error:
        if isinstance(error, OSError | MemoryError) or not is_plug(detector.name):
            raise
        reason = f"scoring ends in {failure_in_words(error)}"
        return no_scores(len(inputs.rows.ids), reason), False


def _read_samples(
    detector: Baseline, inputs: DetectorInput
) -> list[tuple[Sample, ...]]:
    """Return the sampled answers that a detector reads; P(True)'s prompt shows some."""
    if "samples" not in detector.needs and "p_true" not in detector.reads:
        return []
    splits = detector.draws_for or set(inputs.rows.splits)
    pairs = zip(inputs.samples, inputs.rows.splits, strict=True)
    return [samples for samples, split in pairs if samples and split in splits]


def cost_of(
    detector: Baseline,
    inputs: DetectorInput,
    scores: JudgedOutput,
    draw_seconds: float | None,
) -> DetectorCost:
    """Return a detector's cost; `draw_seconds` is from `_draw_seconds`."""
    reads, n_rows = set(detector.reads), len(inputs.rows.ids)
    samples = _read_samples(detector, inputs)
    # Samples used only to learn from are a one-off cost, like fitting.
    n_paid = n_rows if detector.draws_for else max(1, len(samples))
    n_drawn = sum(map(len, samples)) / n_paid
    ids = [draw.token_ids for row in samples for draw in row]
    n_new = None if None in ids else sum(map(len, filter(None, ids)))
    per_draw = draw_seconds if samples else 0.0
    per_question = scores.seconds / n_rows
    # One pass reads everything about the answer after its own prompt. Samples' states
    # cost no pass, as published, since sampling has them; seconds count our extra pass.
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
        seconds=None if per_draw is None else per_question + per_draw * n_drawn,
        peak_bytes=scores.peak_bytes,
        n_forwards=is_read + n_others,
        n_new_tokens=None if n_new is None else n_new / n_paid,
        n_rows=n_rows,
        reason=scores.reason,
    )


class StoredSignals(Protocol):
    """The part of `beatrice.Signals` that `judge` reads."""

    store: FeatureStore  # of one setting
    indices: np.ndarray  # `[n]` indices of the answers in the store


def judge(
    signals: StoredSignals | FeatureStore,
    labels: StoreRows | Iterable[Label] | Sequence[bool | None] | np.ndarray,
    detectors: Iterable[Baseline],
    *,
    splits: Sequence[str] | np.ndarray | None = None,
    groups: Sequence[str] | np.ndarray | None = None,
    pairs: Sequence[tuple[str, str]] = (),
    layer: int | None = None,
    questions: Sequence[Example] = (),
    answers: Sequence[Answer] = (),
    samples: Sequence[Sample] = (),
    template: "PromptTemplate | None" = None,
    readings: Mapping[str, np.ndarray] | None = None,
    relations: Relations | None = None,
    encoder: Path | None = None,
    intervals: BootstrapConfig = BootstrapConfig(),
    on_score: Callable[[str], None] = lambda name: None,
) -> "pandas.DataFrame":
    """Judge detectors on answers, without a run.

    Args:
      signals: signals of answers in one setting: `beatrice.Signals` or a feature store.
      labels: whether each answer is right, in the order of the signals, None if
        unknown; or label records, with splits from `questions`; or a store's rows.
      detectors: published ones (`catalogue()`) or your own.
      splits: the split of every answer if labels are booleans: "train" to learn on,
        "validation" to choose on, "test" or "ood", or "" to leave it out.
      groups: a group name for each answer; a group must be in one split, and is
        resampled as a whole. None: questions' ids, which differ for repeated questions.
      pairs: names of two detectors, to measure the difference, first minus second.
      layer: of the hidden states; None: the middle one of the stored layers.
      questions: the answers' questions, for detectors that read texts.
      answers: the answer of every row of the store, likewise.
      samples: sampled answers, for detectors that compare them.
      template: how passages were shown, for text-only detectors.
      readings: readings beyond the four families by name, `[n_rows, ...]`.
      relations: an NLI model, see `benchmarks.baselines.detectors.clustering`.
      encoder: directory of a text encoder.
      intervals: number and seed of the bootstrap resamples.
      on_score: called with a detector's name after it has scored.

    Returns:
      Rows of results.jsonl: "detection", "chosen" (on validation) and "paired".
    """
    set_library_compiler()
    store, indices = _store_of(signals)
    rows = _rows_of_labels(store, indices, labels, questions, splits)
    grouped = _grouped(rows, indices, groups)
    known = _distinct(detectors, pairs, rows.setting)
    inputs = DetectorInput.of(
        store,
        rows,
        layer=_middle_layer(store) if layer is None else layer,
        questions=questions,
        answers=answers,
        samples=samples,
        template=template,
        readings=readings or {},
        relations=relations,
        encoder=encoder,
    )
    scored, chosen = [], []
    for detector in known:
        judged = score(detector, inputs)
        scored.append(judged.scored(detector.name))
        chosen += judged.output.chosen
        on_score(detector.name)
    measured = detection_rows(scored, grouped, intervals, pairs={"paired": pairs})
    return as_frame([*chosen, *measured])


def _middle_layer(store: FeatureStore) -> int:
    layers = store.spec.hidden_layers
    return layers[len(layers) // 2] if layers else 0


def _store_of(
    signals: StoredSignals | FeatureStore,
) -> tuple[FeatureStore, np.ndarray]:
    if isinstance(signals, FeatureStore):
        return signals, np.arange(len(signals.spec.keys))
    return signals.store, signals.indices


def _grouped(rows: StoreRows, indices: np.ndarray, groups: Any) -> StoreRows:
    """Replace the rows' ids by groups, and check that none is in two splits."""
    if groups is not None:
        names = rows.ids.astype(object)
        names[indices] = as_names(groups, "groups", len(indices))
        rows = dataclasses.replace(rows, ids=names.astype(str))
    check_groups_unsplit(rows.ids[rows.is_labelled], rows.splits[rows.is_labelled])
    return rows


def _rows_of_labels(
    store: FeatureStore,
    indices: np.ndarray,
    labels: Any,
    questions: Sequence[Example],
    splits: Sequence[str] | np.ndarray | None,
) -> StoreRows:
    """Return the rows of a store; answers outside `indices` get no split."""
    rows = labels if isinstance(labels, StoreRows) else None
    if rows is None:
        labels = as_list(labels, "labels", "records, or True, False or None per answer")
        if labels and all(isinstance(label, Label) for label in labels):
            rows = rows_of(store, questions, labels)
    if rows is not None:
        is_there = np.isin(np.arange(len(rows.ids)), indices)
        return dataclasses.replace(
            rows,
            splits=np.where(is_there, rows.splits, ""),
            is_labelled=rows.is_labelled & is_there,
        )
    keys, n_rows = store.spec.keys, len(store.spec.keys)
    truth, is_labelled = as_labels(labels, len(indices))
    known = ("train", "validation", "test", "ood", "")
    names = as_splits(splits, len(indices), known)
    rows = StoreRows(
        setting=msgspec.convert(keys[0][1], Setting),
        ids=np.array([key[0] for key in keys]),
        datasets=np.full(n_rows, "own"),
        splits=np.full(n_rows, "", names.dtype),
        variants=np.array([key[2] for key in keys]),
        labels=np.zeros(n_rows, bool),
        is_labelled=np.zeros(n_rows, bool),
    )
    rows.splits[indices] = names
    rows.labels[indices], rows.is_labelled[indices] = truth, is_labelled
    return rows


# The stage and its caches.


def unmet(detector: Baseline, run: RunDir, config: BaselinesConfig) -> str | None:
    """Describe what a detector needs and the run lacks, or return None."""
    if "samples" in detector.needs:
        if not (run.samples_file.exists() and run.stage_done("sample")):
            return f"needs samples: `{SAMPLE.format(shlex.quote(str(run.path)))}`"
        splits = read_drawing(run).get("splits", ())
        lacking = [split for split in detector.draws_for if split not in splits]
        if lacking:
            options = "".join(f" --split {split}" for split in lacking)
            line = shell_line("sample", run.path) + options
            return f"needs samples: `{line}`, with the same options as before"
    if "entailment" in detector.needs and config.nli is None:
        return "needs an NLI model: --nli DIRECTORY"
    if "encoder" in detector.needs and config.encoder is None:
        return "needs a text encoder: --encoder DIRECTORY"
    if detector.settings != SETTINGS and not {*detector.settings} & {*settings_of(run)}:
        settings = " and ".join(detector.settings)
        return f"is defined only for {settings}, and the run has no such answers"
    return None


def chosen_detectors(config: BaselinesConfig) -> list[Baseline]:
    """Return a config's detectors: the catalogue's in its order, then user code."""
    known = catalogue()
    if not config.only:
        every = known.values()
        return [x for x in every if config.again or not (x.needs or x.reads)]
    wanted = {x: find_detector(x, option="--only") for x in dict.fromkeys(config.only)}
    names = {detector.name for detector in wanted.values()}
    plugs = [detector for spec, detector in wanted.items() if is_plug(spec)]
    chosen = (x for name, x in known.items() if config.again or name in names)
    return _distinct([*chosen, *plugs])


def _distinct(
    detectors: Iterable[Baseline],
    pairs: Iterable[tuple[str, str]] = (),
    setting: Setting | None = None,
) -> list[Baseline]:
    """Return each detector once; check that names are unique and pairs are known.

    Check too that all are defined for the setting, if one is given.
    """
    by_name: dict[str, Baseline] = {}
    for detector in detectors:
        if by_name.setdefault(detector.name, detector) is not detector:
            raise ValueError(
                f"two detectors are named {detector.name!r}; rename one of them"
            )
        if setting is not None and setting not in detector.settings:
            raise ValueError(
                f"detectors: {detector.name} is defined only for "
                f"{' and '.join(detector.settings)}, and the signals are of "
                f"{setting} answers; leave it out"
            )
    if unknown := [name for pair in pairs for name in pair if name not in by_name]:
        raise ValueError(
            f"pairs: no detector is called {unknown[0]!r}; choose from "
            f"{', '.join(by_name)}"
        )
    return list(by_name.values())


def _known_detectors(
    run: RunDir, config: BaselinesConfig, progress: Progress
) -> list[Baseline]:
    """Return the catalogue, and user detectors named now or in earlier calls."""
    path = run.path / "baselines" / "plugs.json"
    before = read_json(path, list[str], "delete it") if path.exists() else []
    specs = list(dict.fromkeys((*before, *filter(is_plug, config.only))))
    if specs != before:
        write_json_atomic(path, specs)
    known = list(catalogue().values())
    for spec in specs:
        try:
            known.append(find_detector(spec, option="--only"))
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
    """Return a detector's input in a setting of an extracted run, without readings.

    Hidden states are of `layer`; default: the layer that the sweep chose.
    """
    store, rows = open_rows(run, setting)
    drawn = run.samples_file
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
    """Return hashes of everything detectors read, see `ScoreCache.identities`."""
    common = [*row_files(run), run.answers, run.sweep]
    texts = [run.answers_file, *question_files(run)]
    return models_beside(run.path / _MODELS, given) | {
        "run": " ".join(str(sha256_tree(path)) for path in common),
        "answers": " ".join(str(sha256_tree(path)) for path in texts),
        "samples": str(sha256_tree(run.samples_file)),
    }


def models_beside(
    path: Path, given: Mapping[Requirement, str | None]
) -> dict[str, str]:
    """Return the hashes of models besides the backbone, by requirement.

    If no directory is given, the last call's model counts, so its scores stay valid.
    """
    what_to_do = "move it away, and pass --nli and --encoder again"
    known = read_json(path, dict[str, str], what_to_do) if path.exists() else {}
    return known | {n: str(sha256_tree(Path(x))) for n, x in given.items() if x}


def _open_backbone(run: RunDir) -> "Backbone":
    from beatrice.extract.backbone.loading import open_backbone, require_answering_model
    from beatrice.extract.backbone.names import BackboneConfig

    backbone = open_backbone(run.section("backbone", BackboneConfig), run.answers)
    require_answering_model(run.answers, backbone)
    return backbone


def read_again(
    run: RunDir,
    inputs: DetectorInput,
    detectors: Sequence[Baseline],
    identities: Mapping[str, str],
    tick: Callable[[], None] = lambda: None,
    *,
    splits: Sequence[str] | None = None,
    cue_like: DetectorInput | None = None,
) -> CachedReadings:
    """Return the detectors' readings beyond the families, of some splits (None: all).

    With `cue_like` (see `AnswerReader`), identities need its answers' hash as "cue".
    """
    wanted = rows_read(inputs.rows, detectors)
    if splits is not None:
        is_wanted = np.isin(inputs.rows.splits, splits)
        wanted = {name: rows[is_wanted[rows]] for name, rows in wanted.items()}
    if not wanted:
        return NOTHING_READ
    setting = inputs.rows.setting
    folder = run.path / "readings" / setting
    keys = reading_keys(setting, identities, wanted)
    caches = {name: Cache(folder / name, key) for name, key in keys.items()}
    reader = AnswerReader(inputs, partial(_open_backbone, run), cue_like)
    return cached_readings(reader, wanted, len(inputs.rows.ids), caches, tick)


def _draw_seconds(run: RunDir, setting: Setting) -> float | None:
    """Return the mean seconds to sample an answer; None if they were not measured."""
    path = run.draw_seconds_file
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
) -> dict[Baseline, JudgedOutput]:
    """Return the scores of all detectors, including those cached earlier."""
    setting = inputs.rows.setting
    cache = ScoreCache(
        folder=run.path / "baselines" / setting, setting=setting, identities=identities
    )
    cached = {x: cache.load(x) for x in known if setting in x.settings}
    new = [x for x, scores in cached.items() if x.name in names and scores is None]
    n_chunks = len(chunks_of(len(inputs.rows.ids))) * any(x.reads for x in new)
    ticks, total = itertools.count(1), len(new) + n_chunks

    def tick() -> None:
        update(next(ticks), total)

    readings = read_again(run, inputs, new, identities, tick)
    inputs = dataclasses.replace(inputs, readings=readings.values)
    for detector in new:
        scores, is_valid = score_or_explain(detector, inputs, readings)
        if is_valid:
            cache.save(detector, scores)
        cached[detector] = scores
        tick()
    return {detector: scores for detector, scores in cached.items() if scores}


def _rows(
    run: RunDir, inputs: DetectorInput, scores: Mapping[Baseline, JudgedOutput]
) -> list[ResultRow]:
    """Return a setting's rows of detectors and of the selected set's lead over them."""
    heads, _ = run_selection(run, inputs.rows.setting)
    ours = DetectorScores(name=CHAMPION, scores=heads["champion"]["scores"])
    rivals = [x.scored(detector.name) for detector, x in scores.items()]
    pairs = {"paired": [(CHAMPION, detector.name) for detector in scores]}
    intervals = run_bootstrap(run)
    measured = detection_rows([ours, *rivals], inputs.rows, intervals, pairs=pairs)
    chosen = [row for x in scores.values() for row in x.output.chosen]
    # `evaluate` writes the selected set's own detection rows.
    ours_alone = ("detection", CHAMPION)
    new = [r for r in measured if (r.experiment, r.subject) != ours_alone]
    return [*chosen, *new]


def open_relations(
    run: RunDir,
    config: BaselinesConfig,
    detectors: Iterable[Baseline],
    progress: Progress,
) -> Relations | None:
    """Load a config's NLI model; None if there is none or no detector needs it.

    Its progress is shown apart from the stage's, which counts scores and readings.
    """
    if config.nli is None or not any("entailment" in x.needs for x in detectors):
        return None
    from beatrice.benchmarks.baselines.detectors.clustering import load_entailment

    path = Path(config.nli)
    return MeteredRelations(
        load_entailment(path),
        Cache(run.path / "readings" / "entailment", str(sha256_tree(path))),
        partial(progress.plain_lines, "entailment"),
    )


def judge_run(
    run: RunDir, config: BaselinesConfig, update: Update, progress: Progress
) -> None:
    """Judge detectors on a run's answers, and write their rows and costs."""
    set_compiler(run.preset)
    known = _known_detectors(run, config, progress)
    lacks = {x.name: unmet(x, run, config) for x in chosen_detectors(config)}
    for name, reason in lacks.items():
        if reason is not None:
            progress.note(f"baselines: {name} {reason}")
    names = [name for name, reason in lacks.items() if reason is None]
    chosen = [x for x in known if x.name in names]
    relations = open_relations(run, config, chosen, progress)
    identities = run_identities(run, config.models)
    if models := {x: identities[x] for x in config.models if x in identities}:
        write_json_atomic(run.path / _MODELS, models)
    rows, costs = [], []
    settings = settings_of(run)
    for index, setting in enumerate(settings):
        inputs = run_inputs(run, setting, config, relations)
        setting_update = update_for_part(update, index, len(settings))
        scores = _scores(run, inputs, known, names, identities, setting_update)
        for detector, x in scores.items():
            if x.reason:
                progress.note(f"baselines: {setting}: {detector.name}: {x.reason}")
        rows += _rows(run, inputs, scores)
        per_draw = _draw_seconds(run, setting)
        costs += [cost_of(d, inputs, x, per_draw) for d, x in scores.items()]
    write_json_atomic(costs_file(run), msgspec.to_builtins(costs))
    publish(run, "baselines", rows, progress)


def run_violations(run: RunDir, spec: str, config: BaselinesConfig) -> list[str]:
    """Return the faults of a detector on a run's answers, one sentence each."""
    detector = find_detector(spec)
    if lack := unmet(detector, run, config):
        raise ValueError(f"{detector.name} {lack}")
    relations = open_relations(run, config, [detector], Progress())
    identities = run_identities(run, config.models)
    faults = []
    for setting in settings_of(run):
        if setting in detector.settings:
            inputs = run_inputs(run, setting, config, relations)
            readings = read_again(run, inputs, [detector], identities)
            inputs = dataclasses.replace(inputs, readings=readings.values)
            faults += [f"{setting}: {x}" for x in violations(detector, inputs)]
    return faults

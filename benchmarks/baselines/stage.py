"""The stage that judges rival detectors on the answers of a run."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from beatrice.benchmarks.baselines.catalogue import catalogue, find_detector, is_plug
from beatrice.benchmarks.baselines.check import faults_of
from beatrice.benchmarks.baselines.detector import (
    Detector,
    Evidence,
    Judged,
    Need,
    Relations,
    is_rival,
)
from beatrice.benchmarks.baselines.judge import (
    Metered,
    ScoreCache,
    Scores,
    cost_of,
    score,
)
from beatrice.benchmarks.baselines.readings import (
    NOTHING_READ,
    Kept,
    Reading,
    cached_readings,
    parts_of,
    reading_keys,
    rows_read,
)
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.records import Sample, Setting, read_records
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
from beatrice.extract.run.rows import ResultRow, publish, rows_file
from beatrice.extract.run.stages import Stage
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.stage import (
    chosen_layer,
    open_rows,
    run_bootstrap,
    run_selection,
)

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone

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
    def models(self) -> dict[Need, str | None]:
        """Directories of models by what they are needed for, None where not given."""
        return {"entailment": self.nli, "encoder": self.encoder}


BASELINES_PRESETS: dict[Preset, BaselinesConfig] = {
    "demo": BaselinesConfig(),
    "smoke": BaselinesConfig(),
    "few": BaselinesConfig(),
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


def _distinct(detectors: Sequence[Detector]) -> list[Detector]:
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
) -> list[Detector]:
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


def run_evidence(
    run: RunDir,
    setting: Setting,
    config: BaselinesConfig | None = None,
    relations: Relations | None = None,
    *,
    layer: int | None = None,
) -> Evidence:
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
    return Evidence.of(
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


def run_identities(run: RunDir, given: Mapping[Need, str | None]) -> dict[str, str]:
    """Return the identities of what detectors read, see `ScoreCache.identities`."""
    common = [*row_files(run), run.answers, run.sweep]
    texts = [answers_file(run), *question_files(run)]
    return models_beside(models_file(run), given) | {
        "run": " ".join(str(sha256_tree(path)) for path in common),
        "answers": " ".join(str(sha256_tree(path)) for path in texts),
        "samples": str(sha256_tree(samples_file(run))),
    }


def models_beside(path: Path, given: Mapping[Need, str | None]) -> dict[str, str]:
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


def judged_file(run: RunDir) -> Path:
    """Return where what the detectors are and cost is written, for the report."""
    return run.path / "baselines" / "detectors.json"


def read_judged(path: Path) -> list[Judged]:
    """Return what the rivals of a run are and cost.

    Raises:
      ValueError: it is missing, or not as it was written.
    """
    return read_json(path, list[Judged], "run `beatrice baselines` again")


def _open_backbone(run: RunDir) -> "Backbone":
    from beatrice.extract.backbone.loading import open_backbone, require_answering_model
    from beatrice.extract.backbone.names import BackboneConfig

    backbone = open_backbone(run.section("backbone", BackboneConfig))
    require_answering_model(run.answers, backbone)
    return backbone


def _read(
    run: RunDir,
    evidence: Evidence,
    detectors: Sequence[Detector],
    identities: Mapping[str, str],
    tick: Callable[[], None] = lambda: None,
) -> Kept:
    """Read what some detectors want of a setting."""
    wanted = rows_read(evidence.rows, detectors)
    if not wanted:
        return NOTHING_READ
    setting = evidence.rows.setting
    folder = run.path / "readings" / setting
    keys = reading_keys(setting, identities, wanted)
    caches = {name: Cache(folder / name, key) for name, key in keys.items()}
    reading = Reading(evidence, partial(_open_backbone, run))
    return cached_readings(reading, wanted, len(evidence.rows.ids), caches, tick)


def _draw_seconds(run: RunDir, setting: Setting) -> float | None:
    """Return what a drawn answer of a setting took; None where that was not timed."""
    path = draw_seconds_file(run)
    if not path.exists():
        return None
    seconds = read_json(path, dict[str, float | None], "run `beatrice sample` again")
    return seconds.get(setting)


def _scores(
    run: RunDir,
    evidence: Evidence,
    known: Sequence[Detector],
    names: Sequence[str],
    identities: Mapping[str, str],
    update: Update,
) -> dict[Detector, Scores]:
    """Return scores by detector, those of earlier starts among them."""
    setting = evidence.rows.setting
    cache = ScoreCache(
        folder=run.path / "baselines" / setting, setting=setting, identities=identities
    )
    held = {x: cache.load(x) for x in known if setting in x.settings}
    new = [x for x, scores in held.items() if x.name in names and scores is None]
    n_parts = len(parts_of(len(evidence.rows.ids))) * any(x.reads for x in new)
    ticks, total = itertools.count(1), len(new) + n_parts

    def tick() -> None:
        update(next(ticks), total)

    read = _read(run, evidence, new, identities, tick)
    evidence = dataclasses.replace(evidence, readings=read.values)
    for detector in new:
        held[detector] = scores = score(detector, evidence, read)
        cache.save(detector, scores)
        tick()
    return {detector: scores for detector, scores in held.items() if scores is not None}


def _rows(
    run: RunDir, evidence: Evidence, scores: Mapping[Detector, Scores]
) -> list[ResultRow]:
    """Return the rows of detectors on a setting, and of the selected set's lead."""
    heads, _ = run_selection(run, evidence.rows.setting)
    ours = Scored(name=OURS, scores=heads[OURS]["scores"])
    rivals = [own.scored(detector.name) for detector, own in scores.items()]
    pairs = {"paired": [(OURS, one.name) for one in rivals if is_rival(one.name)]}
    intervals = run_bootstrap(run)
    made = detection_rows([ours, *rivals], evidence.rows, intervals, pairs=pairs)
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

        relations = Metered(load_entailment(Path(config.nli), progress=update))
    if models := models_beside(models_file(run), config.models):
        write_json_atomic(models_file(run), models)
    identities = run_identities(run, config.models)
    made, judged = [], []
    for setting in settings_of(run):
        evidence = run_evidence(run, setting, config, relations)
        scores = _scores(run, evidence, known, names, identities, update)
        for detector, own in scores.items():
            if own.reason:
                progress.note(f"baselines: {setting}: {detector.name}: {own.reason}")
        made += _rows(run, evidence, scores)
        per_draw = _draw_seconds(run, setting)
        judged += [cost_of(x, evidence, own, per_draw) for x, own in scores.items()]
    write_json_atomic(judged_file(run), msgspec.to_builtins(judged))
    publish(run, "baselines", made, progress)


def run_faults(run: RunDir, spec: str, config: BaselinesConfig) -> list[str]:
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
            evidence = run_evidence(run, setting, config, relations)
            read = _read(run, evidence, [detector], identities)
            evidence = dataclasses.replace(evidence, readings=read.values)
            faults += [f"{setting}: {x}" for x in faults_of(detector, evidence)]
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
    outputs=lambda run: [rows_file(run, "baselines"), judged_file(run)],
    work=_baselines,
    presets=BASELINES_PRESETS,
)

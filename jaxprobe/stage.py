"""The stage that calibrates the selected heads and saves the detector.

Before it: what the stages of all rooms read of a run, as the values that the functions
below a stage take.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec

from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    read_answers,
    read_examples,
    read_labels,
    row_files,
    settings_of,
)
from beatrice.extract.run.directory import Preset, RunDir, read_manifest
from beatrice.extract.run.stages import Stage
from beatrice.extract.store.store import FeatureStore, open_store
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import FusedHead, Grid, calibrated
from beatrice.jaxprobe.calibration import Calibrator, cross_fit, folds_of
from beatrice.jaxprobe.config import (
    GRID_PRESETS,
    SELECT_PRESETS,
    GridConfig,
    SelectConfig,
    set_compiler,
)
from beatrice.jaxprobe.detector import HeadName, Provenance
from beatrice.jaxprobe.evaluation import INTERVAL_PRESETS
from beatrice.jaxprobe.features.families import Standardizer
from beatrice.jaxprobe.features.reading import family_dims, stored_dtypes
from beatrice.jaxprobe.features.rows import (
    Rows,
    TrainingSet,
    read_sweep,
    rows_of,
    training_set,
)
from beatrice.jaxprobe.fit.grid import Trained, grid_members
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.model.encoder import MemberOutputs
from beatrice.jaxprobe.pool import (
    Pool,
    branch_setting,
    branches_of,
    pool_of,
    read_selection,
)
from beatrice.jaxprobe.scope import scripts_of

N_FOLDS = 5  # of `fold_calibrators`


def open_rows(run: RunDir, setting: Setting) -> tuple[FeatureStore, Rows]:
    """Open a setting's store and say what its rows are.

    Raises:
      ValueError: the store is missing, or a row has no label record.
    """
    store = open_store(run.features(setting))
    return store, rows_of(store, read_examples(run), read_labels(run).values())


def chosen_layer(run: RunDir) -> int:
    """Return the layer that the hidden family of a run is read from."""
    return read_sweep(run.sweep).layer


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the checkpoints of the run's settings."""
    return [run.encoders(setting) for setting in settings_of(run)]


def grid_config(run: RunDir) -> GridConfig:
    """Return how a run's encoders are trained, with the run's seed."""
    return run.settle("train", GRID_PRESETS).seeded(run.seed)


def select_config(run: RunDir) -> SelectConfig:
    """Return how a run's heads are trained and selected, with the run's seed."""
    return run.settle("select", SELECT_PRESETS).seeded(run.seed)


def run_branches(run: RunDir) -> tuple[HeadName, ...]:
    """Return the branches that score answers of a run's settings."""
    return branches_of(settings_of(run))


def run_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's heads and scores, and the summary of its search."""
    return read_selection(run.selection / branch)


def run_outputs(run: RunDir, setting: Setting) -> MemberOutputs:
    """Return the outputs of every trained encoder of a setting on its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return MemberOutputs(**tree["outputs"])


def run_pool(
    run: RunDir,
    setting: Setting,
    outputs_of: Callable[[Setting], MemberOutputs] | None = None,
) -> Pool:
    """Return a setting's pool.

    Args:
      run: with trained encoders.
      setting: whose answers are scored.
      outputs_of: gives the outputs of a pass; None takes the run's own encoders.
    """
    outputs_of = outputs_of or partial(run_outputs, run)
    passes: list[Setting] = [setting]
    if setting == "with_context" and "closed_book" in settings_of(run):
        passes.append("closed_book")
    return pool_of(
        {where: outputs_of(where) for where in passes},
        {where: open_rows(run, where)[1] for where in passes},
        setting,
        grid_config(run).train.n_seeds,
    )


def run_training_set(run: RunDir, setting: Setting, config: GridConfig) -> TrainingSet:
    """Return a setting's rows as a configuration trains encoders on them."""
    store, rows = open_rows(run, setting)
    return training_set(
        store,
        rows,
        layer=chosen_layer(run),
        n_batch=config.train.batch_size,
        streamed=config.stream is not None,
    )


def run_bootstrap(run: RunDir) -> BootstrapConfig:
    """Return how a run's intervals are made, with the run's seed."""
    return run.settle("intervals", INTERVAL_PRESETS).bootstrap(run.seed)


def fold_calibrators(run: RunDir, branch: HeadName) -> tuple[Calibrator, ...]:
    """Return a head's maps by fold of validation questions; see `cross_fit`."""
    _, rows = open_rows(run, branch_setting(branch))
    where = rows.where("validation")
    scores = _fused(run, branch).scores.mean(axis=0)[where]
    folds = folds_of(rows.ids[where], N_FOLDS)
    return cross_fit(scores, rows.labels[where], folds, N_FOLDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """The run's section `calibrate`.

    Attributes:
      precision: share of the trusted answers that shall be correct, on validation.
    """

    precision: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        if not 0 < self.precision <= 1:
            raise ValueError(
                f"precision: expected a share above 0 and at most 1, found "
                f"{self.precision}"
            )


CALIBRATE_PRESETS: dict[Preset, CalibrateConfig] = dict.fromkeys(
    get_args(Preset), CalibrateConfig()
)


def settle_precision(run: RunDir, precision: float) -> None:
    """Let a run have another threshold; its detector is then calibrated again.

    Unlike other settings it may change: no answer, label or weight depends on it.
    """
    asked = CalibrateConfig(precision=precision)
    if run.settle("calibrate", CALIBRATE_PRESETS, is_recorded=False) != asked:
        run.reopen_stage("calibrate")
    run.settle("calibrate", CALIBRATE_PRESETS, lambda _: asked, is_replaceable=True)


def _fused(run: RunDir, branch: HeadName) -> FusedHead:
    """Return the heads that a branch's search has chosen."""
    tree, summary = run_selection(run, branch)
    config = dataclasses.replace(select_config(run).head, n_slots=summary["n_slots"])
    champion = tree["champion"]
    return FusedHead(summary["members"], config, champion["params"], champion["scores"])


def _grid(run: RunDir, setting: Setting) -> Grid:
    """Return the trained encoders of a setting."""
    store, rows = open_rows(run, setting)
    tree, _ = checkpoint.restore(run.encoders(setting))
    config = grid_config(run)
    members = grid_members(config.train.n_seeds, family_dims(store).n_subsets)
    return Grid(
        store=store,
        rows=rows,
        layer=chosen_layer(run),
        trained=Trained(members, tree["params"], tree["info"]),
        standardizer=Standardizer(**tree["standardizer"]),
        config=config.encoder,
    )


def _training_scripts(run: RunDir) -> tuple[str, ...]:
    """Return the scripts that the training questions and passages are written in."""
    questions = (e for e in read_examples(run) if e.split == "train")
    return scripts_of(
        text for e in questions for text in (e.question, *(p.text for p in e.passages))
    )


def _provenance(run: RunDir, store: FeatureStore) -> Provenance:
    """Return what a run's detector is trained on; `store` is any of the run's."""
    sections = read_manifest(run.path)["sections"]
    ends = Counter(a.stop_id for a in read_answers(run) if a.stop_id is not None)
    return Provenance(
        model=sections["backbone"]["model"],
        revision=str(store.spec.fingerprint["model"]),
        layer=chosen_layer(run),
        dtype=sections["backbone"]["dtype"],
        stored_as=stored_dtypes(store),
        answer_span=sections["extract"]["answer_span"],
        prompt=msgspec.convert(sections["answer"]["prompt"], PromptConfig),
        stop_id=ends.most_common(1)[0][0] if ends else None,
        scripts=_training_scripts(run),
    )


def _calibrate(
    run: RunDir, config: CalibrateConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    grids = {setting: _grid(run, setting) for setting in settings_of(run)}
    detector = calibrated(
        {branch: _fused(run, branch) for branch in run_branches(run)},
        grids,
        provenance=_provenance(run, next(iter(grids.values())).store),
        precision=config.precision,
    )
    for branch, head in detector.heads.items():
        if head.threshold is not None:
            progress.note(f"{branch}: {head.threshold.in_words()}")
    detector.save(run.detector)


CALIBRATE = Stage(
    name="calibrate",
    inputs=lambda run: [
        *row_files(run),
        run.sweep,
        run.selection,
        *encoder_folders(run),
    ],
    outputs=lambda run: [run.detector],
    work=_calibrate,
    presets=CALIBRATE_PRESETS,
)

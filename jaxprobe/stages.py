"""The stages `train` and `calibrate`, and what other rooms read of a run's stages.

Importing this loads no JAX; see `extract.run.stages.deferred`.
"""

from pathlib import Path

from beatrice.extract.records import Record, Setting, Share
from beatrice.extract.run.contents import row_files, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import read_json
from beatrice.extract.run.stages import Stage, deferred
from beatrice.jaxprobe.config import (
    CALIBRATE_PRESETS,
    DETECTOR_FORMAT,
    GRID_PRESETS,
    PROTOCOL,
    SELECT_PRESETS,
    GridConfig,
    SelectConfig,
)


class LayerCurve(Record, frozen=True, kw_only=True):
    """A setting's sweep: validation AUROC per layer and seed, and the best layer."""

    layers: tuple[int, ...]
    auroc: tuple[tuple[Share, ...], ...]
    best: int
    n_train: int
    n_validation: int


class LayerSweep(Record, frozen=True, kw_only=True):
    """The result of the layer sweep; `layer` is used for all settings."""

    layer: int
    settings: dict[Setting, LayerCurve]


def read_sweep(path: Path) -> LayerSweep:
    """Read the file of a layer sweep."""
    return read_json(path, LayerSweep, "run `beatrice sweep` again")


def chosen_layer(run: RunDir) -> int:
    """Return the layer from which a run reads the hidden family."""
    return read_sweep(run.sweep).layer


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the paths of the encoder checkpoints of a run's settings."""
    return [run.encoders(setting) for setting in settings_of(run)]


def members_folder(run: RunDir, setting: Setting) -> Path:
    """Return the folder of a setting's members that wait to be joined."""
    return run.encoders(setting).with_name(f"{setting}.members")


def grid_config(run: RunDir) -> GridConfig:
    """Return how a run's encoders are trained, with the run's seed."""
    return run.resolve_section("train", GRID_PRESETS).seeded(run.seed)


def select_config(run: RunDir) -> SelectConfig:
    """Return how a run's heads are trained and selected, with the run's seed."""
    return run.resolve_section("select", SELECT_PRESETS).seeded(run.seed)


class Round(Record, frozen=True, kw_only=True):
    """An accepted round of a search; `candidates` are AUROCs by pool position."""

    added: int
    auroc: float
    candidates: dict[str, float]


class SearchSummary(Record, frozen=True, kw_only=True):
    """The course of a search, saved with its heads."""

    members: tuple[int, ...]
    n_slots: int
    stop: str
    rounds: tuple[Round, ...]


TRAIN = Stage(
    name="train",
    inputs=lambda run: [*row_files(run), run.sweep],
    outputs=encoder_folders,
    work=deferred("beatrice.jaxprobe.train:train_run"),
    leftovers=lambda run: [members_folder(run, s) for s in settings_of(run)],
    parts="encoders",
    identity=lambda config: {"protocol": str(PROTOCOL)},
    presets=GRID_PRESETS,
    is_open=True,
)
CALIBRATE = Stage(
    name="calibrate",
    inputs=lambda run: [
        *row_files(run),
        run.sweep,
        run.selection,
        *encoder_folders(run),
    ],
    outputs=lambda run: [run.detector],
    work=deferred("beatrice.jaxprobe.calibrate:calibrate_run"),
    identity=lambda config: {"format": str(DETECTOR_FORMAT)},
    presets=CALIBRATE_PRESETS,
)

"""The stage that trains every encoder of the grid, in both settings."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.stages.evaluation import permute_by_question
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import load_rows
from benchmarks.stages.sides import sides_of, tokens_of
from benchmarks.stages.stage import Progress, Stage, Update, side_by_side
from benchmarks.stages.sweep_stage import stored
from benchmarks.stages.train_sides import encode_all, fit_sides, settings_at_once
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from extract.run.files import sha256_file
from jaxprobe import checkpoint
from jaxprobe.features.subsets import subset_index
from jaxprobe.fit.grid import (
    Block,
    Member,
    Trained,
    default_blocks,
    grid_members,
    join,
)
from jaxprobe.model.encoder import Encoder, MemberOutputs

EVERY_FAMILY = subset_index("HPRA")


def _is_trained(path: Path, key: str) -> bool:
    """Tell whether an earlier, killed run has finished a setting with this data."""
    if not path.exists():
        return False
    try:
        return checkpoint.restore(path)[1]["key"] == key
    except ValueError:
        return False  # damaged: trained again and replaced


def _train_setting(
    run: RunDir, config: RunConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    store, rows = load_rows(run, setting)
    key = f"{sha256_file(run.sweep)} {sha256_file(run.labels)} {store.id}"
    if _is_trained(run.encoders(setting), key):
        return
    read = tokens_of(run, setting, store, rows, config.stream)
    sides = sides_of(read, rows, config.stream)
    encoder = Encoder(config.encoder, read.dims)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    control = tuple(Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds))

    def fit(labels: np.ndarray, blocks: tuple[Block, ...], name: str) -> list[Trained]:
        protocol = {"encoder": encoder, "config": config.train}
        kept = {"folder": folder / name, "key": key, "tick": tick}
        return fit_sides(sides, labels, blocks, **protocol, **kept)

    permuted = permute_by_question(rows, config.seed)
    grid = default_blocks(n_seeds)
    trained = join(fit(rows.labels, grid, "grid"), grid_members(n_seeds))
    chance = join(
        fit(permuted, control, "permuted"),
        [Member(EVERY_FAMILY, seed) for seed in range(n_seeds)],
    )
    n_rows = len(rows.ids)
    codes = encode_all(trained, read, n_rows, encoder)
    control_codes = encode_all(chance, read, n_rows, encoder)
    checkpoint.save(
        run.encoders(setting),
        {
            "params": trained.params,
            "info": trained.info._asdict(),
            "standardizer": read.standardizer._asdict(),
            "codes": codes._asdict(),
            "control": {"logits": control_codes.logits, "labels": permuted},
        },
        {"key": key, "layer": read.layer, "dims": dataclasses.asdict(read.dims)},
    )
    shutil.rmtree(folder, ignore_errors=True)  # the checkpoint holds all of it now


def _train(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    n_each = len(default_blocks(config.train.n_seeds)) + config.train.n_seeds
    side_by_side(
        partial(_train_setting, run, config),
        SETTINGS,
        update,
        n_each * len(SETTINGS),
        at_once=settings_at_once(config),
    )


def read_codes(run: RunDir, setting: Setting) -> MemberOutputs:
    """Return what every trained encoder of a setting says of its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return MemberOutputs(**tree["codes"])


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the checkpoints of both settings."""
    return [run.encoders(setting) for setting in SETTINGS]


TRAIN = Stage(
    name="train",
    inputs=lambda run: [run.labels, run.sweep, *stored(run)],
    outputs=encoder_folders,
    work=_train,
)

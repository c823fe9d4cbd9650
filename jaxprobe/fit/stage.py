"""The stage that trains every encoder of the grid, and what they say of every row."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import store_files
from extract.run.directory import RunDir
from extract.run.files import sha256_file
from extract.run.stages import Stage, side_by_side
from jaxprobe import checkpoint
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.compiler import set_compiler
from jaxprobe.config import TrainConfig
from jaxprobe.evaluation import permute_by_question
from jaxprobe.features.rows import (
    ROWS_AT_ONCE,
    ReadRows,
    TrainingRows,
    load_rows,
    row_reader,
    training_rows,
)
from jaxprobe.features.subsets import subset_index
from jaxprobe.fit.devices import fit_everywhere
from jaxprobe.fit.forecast import forecast_train
from jaxprobe.fit.grid import (
    Block,
    Member,
    Trained,
    default_blocks,
    grid_members,
    join,
    labelled,
    member_outputs,
)
from jaxprobe.fit.loop import FitInfo
from jaxprobe.fit.streaming import Streamed, fit_streamed
from jaxprobe.model.encoder import Encoder, MemberOutputs
from jaxprobe.settings import GRID_PRESETS, GridConfig

EVERY_FAMILY = subset_index("HPRA")


def settings_at_once(config: GridConfig) -> int:
    """Return how many settings are trained side by side.

    Both, where memory holds them: each compiles its own step on one core for as long as
    the other does, and a member's operations already share the cores among themselves.
    Streamed, one: memory holds one's groups.
    """
    return len(SETTINGS) if config.stream is None else 1


def fit_rows(
    rows: TrainingRows,
    labels: np.ndarray,
    blocks: tuple[Block, ...],
    *,
    encoder: Encoder,
    config: TrainConfig,
    folder: Path,
    key: str,
    tick: Callable[[], None],
) -> list[Trained]:
    """Train blocks; streamed members all in one pass over the store per epoch.

    Args:
      rows: what is trained on.
      labels: `[n_rows]` bool, of every row of the store.
      blocks: what is trained.
      encoder: the module.
      config: the protocol.
      folder: where blocks are kept as they are done (held rows only), and found again.
      key: identity of all that a block depends on.
      tick: called for every block that is done.
    """
    parts = [labels[where] for where in rows.where]
    if rows.in_memory is not None:
        data = tuple(map(labelled, rows.in_memory, parts))
        fit = partial(fit_everywhere, encoder=encoder, config=config)
        trained = []
        for part in _each_kept(folder, key, blocks, lambda left: fit(left, *data)):
            trained.append(part)
            tick()
        return trained
    train, valid = (
        Streamed(where=where, labels=own, read=rows.read, config=rows.stream)
        for where, own in zip(rows.where, parts, strict=True)
    )
    members = [member for block in blocks for member in block.members]
    trained = fit_streamed(members, train, valid, encoder=encoder, config=config)
    for _ in blocks:
        tick()
    return [trained]


def _each_kept(
    folder: Path,
    key: str,
    blocks: tuple[Block, ...],
    fit: Callable[[list[Block]], Iterator[Trained]],
) -> Iterator[Trained]:
    """Yield every block, trained now or by an earlier run."""
    missing = []
    for block in blocks:
        path = folder / f"{'-'.join(map(str, block.subsets + block.seeds))}.safetensors"
        found = _load_block(path, block, key)
        if found is None:
            missing.append((path, block))
        else:
            yield found
    trained = fit([block for _, block in missing])
    for (path, _), part in zip(missing, trained, strict=True):
        _save_block(path, part, key)
        yield part


def _load_block(path: Path, block: Block, key: str) -> Trained | None:
    """Return a block that an earlier, killed run has finished."""
    arrays = load_cache(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _save_block(path: Path, trained: Trained, key: str) -> None:
    arrays: dict[str, Any] = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    save_cache(path, {**arrays, **info}, key)


def outputs_of_rows(
    trained: Trained, read: ReadRows, n_rows: int, encoder: Encoder
) -> MemberOutputs:
    """Return every member's codes on every stored row, a few rows at a time.

    All parts have one shape, so that one executable serves them; the last one repeats
    its last row, which is cut off again.
    """
    size = -(-n_rows // -(-n_rows // ROWS_AT_ONCE))
    parts = []
    for start in range(0, n_rows, size):
        where = np.minimum(np.arange(start, start + size), n_rows - 1)
        parts.append(
            jax.device_get(member_outputs(trained, read(where), encoder=encoder))
        )
    return MemberOutputs(
        np.concatenate([part.logits for part in parts], axis=1)[:, :n_rows],
        np.concatenate([part.pooled for part in parts], axis=1)[:, :n_rows],
    )


def _is_trained(path: Path, key: str) -> bool:
    """Tell whether an earlier, killed run has finished a setting with this data."""
    if not path.exists():
        return False
    try:
        return checkpoint.restore(path)[1]["key"] == key
    except ValueError:
        return False  # damaged: trained again and replaced


def _train_setting(
    run: RunDir, config: GridConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    store, rows = load_rows(run, setting)
    key = f"{sha256_file(run.sweep)} {sha256_file(run.labels)} {store.id}"
    if _is_trained(run.encoders(setting), key):
        return
    read = row_reader(run, setting, store, rows, config.stream)
    training = training_rows(read, rows, config.stream)
    encoder = Encoder(config.encoder, read.dims)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    control = tuple(Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds))

    def fit(labels: np.ndarray, blocks: tuple[Block, ...], name: str) -> list[Trained]:
        return fit_rows(
            training,
            labels,
            blocks,
            encoder=encoder,
            config=config.train,
            folder=folder / name,
            key=key,
            tick=tick,
        )

    permuted = permute_by_question(rows, run.seed)
    grid = default_blocks(n_seeds)
    trained = join(fit(rows.labels, grid, "grid"), grid_members(n_seeds))
    chance = join(
        fit(permuted, control, "permuted"),
        [Member(EVERY_FAMILY, seed) for seed in range(n_seeds)],
    )
    n_rows = len(rows.ids)
    outputs = outputs_of_rows(trained, read, n_rows, encoder)
    control_outputs = outputs_of_rows(chance, read, n_rows, encoder)
    checkpoint.save(
        run.encoders(setting),
        {
            "params": trained.params,
            "info": trained.info._asdict(),
            "standardizer": read.standardizer._asdict(),
            "outputs": outputs._asdict(),
            "control": {"logits": control_outputs.logits, "labels": permuted},
        },
        {"key": key, "layer": read.layer, "dims": dataclasses.asdict(read.dims)},
    )
    shutil.rmtree(folder, ignore_errors=True)  # the checkpoint holds all of it now


def _train(run: RunDir, config: GridConfig, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    n_each = len(default_blocks(config.train.n_seeds)) + config.train.n_seeds
    side_by_side(
        partial(_train_setting, run, config),
        SETTINGS,
        update,
        n_each * len(SETTINGS),
        at_once=settings_at_once(config),
    )


def read_member_outputs(run: RunDir, setting: Setting) -> MemberOutputs:
    """Return what every trained encoder of a setting says of its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return MemberOutputs(**tree["outputs"])


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the checkpoints of both settings."""
    return [run.encoders(setting) for setting in SETTINGS]


TRAIN = Stage(
    name="train",
    inputs=lambda run: [run.labels, run.sweep, *store_files(run)],
    outputs=encoder_folders,
    work=_train,
    presets=GRID_PRESETS,
    forecast=forecast_train,
)

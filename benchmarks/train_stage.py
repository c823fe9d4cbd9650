"""The stage that trains every encoder of the grid, in both settings."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from benchmarks.evaluation import permute_by_question
from benchmarks.presets import RunConfig
from benchmarks.rows import Rows, load_rows
from benchmarks.stage import Progress, Stage, Update, side_by_side
from benchmarks.sweep_stage import chosen_layer, stored
from extract.atomic import sha256_file
from extract.records import SETTINGS, Setting
from extract.rundir import RunDir
from extract.store import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.config import StreamConfig, TrainConfig
from jaxprobe.devices import fit_everywhere
from jaxprobe.encoder import Encoder
from jaxprobe.features import (
    FamilyDims,
    FamilyTokens,
    Features,
    Standardizer,
    split_families,
)
from jaxprobe.fit import FitInfo
from jaxprobe.grid import (
    Block,
    Codes,
    Member,
    Trained,
    default_blocks,
    encode,
    grid_members,
    join,
    labelled,
)
from jaxprobe.keepsake import keep, recall
from jaxprobe.reading import (
    family_dims,
    fit_reading,
    fit_reading_of,
    longest_spans,
    read_features,
)
from jaxprobe.streaming import Streamed, fit_streamed
from jaxprobe.subsets import subset_index

ROWS_AT_ONCE = 1024  # examples standardised and encoded together, to bound memory
EVERY_FAMILY = subset_index("HPRA")

_split = jax.jit(split_families, static_argnames="dims")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Reads standardised tokens of stored rows, in one padded width."""

    store: FeatureStore
    setting: Setting
    layer: int
    dims: FamilyDims
    standardizer: Standardizer
    widths: tuple[int, ...]

    def __call__(self, where: np.ndarray) -> FamilyTokens:
        """Read rows `[n]` of the store, some at a time: one executable serves all."""
        parts = []
        for start in range(0, len(where), ROWS_AT_ONCE):
            part = where[start : start + ROWS_AT_ONCE]
            full = np.pad(part, (0, ROWS_AT_ONCE - len(part)), mode="edge")
            features = read_features(
                self.store, self.setting, self.layer, full, self.widths
            )
            tokens = _split(features, dims=self.dims, standardizer=self.standardizer)
            real = slice(len(part))
            parts.append(jax.tree.map(lambda x, r=real: np.asarray(x)[:, r], tokens))
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
        return jax.device_put(joined)


def tokens_of(
    run: RunDir,
    setting: Setting,
    store: FeatureStore,
    rows: Rows,
    stream: StreamConfig | None = None,
) -> Tokens:
    """Fit the standardisation on the training rows, some at a time if streamed."""
    layer = chosen_layer(run)
    dims = family_dims(store)
    widths = longest_spans(store.spec.spans, setting)
    where = rows.where("train")

    def features(some: np.ndarray) -> Features:
        return read_features(store, setting, layer, some, widths)

    if stream is None:
        standardizer = fit_reading(features(where), dims)
    else:
        starts = range(0, len(where), ROWS_AT_ONCE)
        parts = [where[start : start + ROWS_AT_ONCE] for start in starts]
        standardizer = fit_reading_of(lambda: map(features, parts), dims)
    return Tokens(
        store=store,
        setting=setting,
        layer=layer,
        dims=dims,
        standardizer=standardizer,
        widths=widths,
    )


def _restored(path: Path, block: Block, key: str) -> Trained | None:
    """Return a block that an earlier, killed run has finished."""
    arrays = recall(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _kept(path: Path, trained: Trained, key: str) -> None:
    arrays = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    keep(path, {**arrays, **info}, key)


def train_blocks(
    folder: Path,
    key: str,
    encoder: Encoder,
    config: TrainConfig,
    data: tuple[Any, Any],
    blocks: tuple[Block, ...],
) -> Iterator[Trained]:
    """Yield every block, trained now or by an earlier run."""
    missing = []
    for block in blocks:
        path = folder / f"{'-'.join(map(str, block.subsets + block.seeds))}.safetensors"
        found = _restored(path, block, key)
        if found is None:
            missing.append((path, block))
        else:
            yield found
    trained = fit_everywhere(
        [block for _, block in missing], *data, encoder=encoder, config=config
    )
    for (path, _), part in zip(missing, trained, strict=True):
        _kept(path, part, key)
        yield part


def _fit_streamed(
    read: Tokens,
    where: tuple[np.ndarray, np.ndarray],
    labels: Sequence[np.ndarray],
    blocks: tuple[Block, ...],
    encoder: Encoder,
    config: RunConfig,
) -> Iterator[Trained]:
    """Train all members of all blocks in one pass over the store per epoch."""
    train, valid = (
        Streamed(where=w, labels=y, read=read, config=config.stream)
        for w, y in zip(where, labels, strict=True)
    )
    members = [member for block in blocks for member in block.members]
    yield fit_streamed(members, train, valid, encoder=encoder, config=config.train)


def encode_all(
    trained: Trained,
    read: Callable[[np.ndarray], FamilyTokens],
    n_rows: int,
    encoder: Encoder,
) -> Codes:
    """Return every member's codes on every stored row, a few rows at a time.

    All parts have one shape, so that one executable serves them; the last one repeats
    its last row, which is cut off again.
    """
    size = -(-n_rows // -(-n_rows // ROWS_AT_ONCE))
    parts = []
    for start in range(0, n_rows, size):
        where = np.minimum(np.arange(start, start + size), n_rows - 1)
        parts.append(jax.device_get(encode(trained, read(where), encoder=encoder)))
    return Codes(
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
    run: RunDir, config: RunConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    store, rows = load_rows(run, setting)
    key = f"{sha256_file(run.sweep)} {sha256_file(run.labels)} {store.id}"
    if _is_trained(run.encoders(setting), key):
        return
    read = tokens_of(run, setting, store, rows, config.stream)
    train_rows, valid_rows = rows.where("train"), rows.where("validation")
    encoder = Encoder(config.encoder, read.dims)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    grid = default_blocks(n_seeds)
    control = tuple(Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds))
    # A store that memory cannot hold is not read here, but while encoders train.
    held = None if config.stream else (read(train_rows), read(valid_rows))

    def fit(labels: np.ndarray, blocks: tuple[Block, ...], name: str):
        sides = [labels[train_rows], labels[valid_rows]]
        if held is None:
            trained = _fit_streamed(
                read, (train_rows, valid_rows), sides, blocks, encoder, config
            )
        else:
            data = tuple(map(labelled, held, sides))
            trained = train_blocks(
                folder / name, key, encoder, config.train, data, blocks
            )
        parts = []
        for part in trained:
            parts.append(part)
            tick()
        return parts

    permuted = permute_by_question(rows, config.seed)
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
    work = partial(_train_setting, run, config)
    if config.stream is not None:  # one after the other: memory holds one's groups
        for number, setting in enumerate(SETTINGS):
            work(setting, lambda: None)
            update(number + 1, len(SETTINGS))
        return
    # Both settings at once: each compiles its own step on one core for as long as the
    # other does, and a member's operations already share the cores among themselves.
    n_each = len(default_blocks(config.train.n_seeds)) + config.train.n_seeds
    side_by_side(work, SETTINGS, update, n_each * len(SETTINGS))


def read_codes(run: RunDir, setting: Setting) -> Codes:
    """Return what every trained encoder of a setting says of its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return Codes(**tree["codes"])


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the checkpoints of both settings."""
    return [run.encoders(setting) for setting in SETTINGS]


TRAIN = Stage(
    name="train",
    inputs=lambda run: [run.labels, run.sweep, *stored(run)],
    outputs=encoder_folders,
    work=_train,
)

"""The training and validation rows of a setting, and training on them.

Rows lie on the device, or stay in the store and are read while encoders train: what
trains on them need not know which.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from benchmarks.presets import RunConfig
from benchmarks.rows import Rows
from benchmarks.sweep_stage import chosen_layer
from extract.records import SETTINGS, Setting
from extract.rundir import RunDir
from extract.store import FeatureStore
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
from jaxprobe.grid import Block, Codes, Trained, encode, labelled
from jaxprobe.keepsake import keep, recall
from jaxprobe.reading import (
    family_dims,
    fit_reading,
    fit_reading_of,
    longest_spans,
    read_features,
)
from jaxprobe.spans import keep_spans
from jaxprobe.streaming import Streamed, fit_streamed

ROWS_AT_ONCE = 1024  # examples standardised and encoded together, to bound memory
Read = Callable[[np.ndarray], FamilyTokens]  # of rows of the store, `[n]`


def settings_at_once(config: RunConfig) -> int:
    """Return how many settings are trained side by side.

    Both, where memory holds them: each compiles its own step on one core for as long as
    the other does, and a member's operations already share the cores among themselves.
    Streamed, one: memory holds one's groups.
    """
    return len(SETTINGS) if config.stream is None else 1


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
        """Read rows `[n]` of the store, some at a time: few executables serve all."""
        parts = []
        for start in range(0, len(where), ROWS_AT_ONCE):
            part = where[start : start + ROWS_AT_ONCE]
            n_more = (1 << (len(part) - 1).bit_length()) - len(part)
            full = np.pad(part, (0, n_more), mode="edge")
            features = read_features(
                self.store, self.setting, self.layer, full, self.widths
            )
            tokens = split_families(features, self.dims, self.standardizer)
            real = slice(len(part))
            parts.append(jax.tree.map(lambda x, r=real: np.asarray(x)[:, r], tokens))
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
        return jax.device_put(joined)


def tokens_of(
    run: RunDir,
    setting: Setting,
    store: FeatureStore,
    rows: Rows,
    stream: StreamConfig | None,
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sides:
    """What encoders of a setting are trained and validated on.

    Attributes:
      read: standardised tokens of rows of the store.
      where: training rows and validation rows, indices into the store.
      held: their tokens on the device; None where they are streamed.
      stream: how the store is parted; None where the tokens are held.
    """

    read: Read
    where: tuple[np.ndarray, np.ndarray]
    held: tuple[FamilyTokens, FamilyTokens] | None
    stream: StreamConfig | None

    def with_spans(self, span_mask: np.ndarray) -> "Sides":
        """Return the same rows with some spans left out; see `keep_spans`."""

        def read(where: np.ndarray) -> FamilyTokens:
            return keep_spans(self.read(where), span_mask)

        held = self.held and tuple(keep_spans(one, span_mask) for one in self.held)
        return dataclasses.replace(self, read=read, held=held)


def sides_of(read: Tokens, rows: Rows, stream: StreamConfig | None) -> Sides:
    """Return a setting's rows; a store that memory cannot hold is not read here."""
    where = rows.where("train"), rows.where("validation")
    held = None if stream else tuple(map(read, where))
    return Sides(read=read, where=where, held=held, stream=stream)


def fit_sides(
    sides: Sides,
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
      sides: what is trained on.
      labels: `[n_rows]` bool, of every row of the store.
      blocks: what is trained.
      encoder: the module.
      config: the protocol.
      folder: where blocks are kept as they are done (held rows only), and found again.
      key: identity of all that a block depends on.
      tick: called for every block that is done.
    """
    parts = [labels[where] for where in sides.where]
    if sides.held is not None:
        data = tuple(map(labelled, sides.held, parts))
        fit = partial(fit_everywhere, encoder=encoder, config=config)
        trained = []
        for part in _each_kept(folder, key, blocks, lambda left: fit(left, *data)):
            trained.append(part)
            tick()
        return trained
    train, valid = (
        Streamed(where=where, labels=own, read=sides.read, config=sides.stream)
        for where, own in zip(sides.where, parts, strict=True)
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
        found = _restored(path, block, key)
        if found is None:
            missing.append((path, block))
        else:
            yield found
    trained = fit([block for _, block in missing])
    for (path, _), part in zip(missing, trained, strict=True):
        _kept(path, part, key)
        yield part


def _restored(path: Path, block: Block, key: str) -> Trained | None:
    """Return a block that an earlier, killed run has finished."""
    arrays = recall(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _kept(path: Path, trained: Trained, key: str) -> None:
    arrays: dict[str, Any] = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    keep(path, {**arrays, **info}, key)


def encode_all(trained: Trained, read: Read, n_rows: int, encoder: Encoder) -> Codes:
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

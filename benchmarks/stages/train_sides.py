"""Training encoders on the rows of a setting, and what they say of every row."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.sides import ROWS_AT_ONCE, Read, Sides
from extract.records import SETTINGS
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.config import TrainConfig
from jaxprobe.fit.devices import fit_everywhere
from jaxprobe.fit.grid import Block, Trained, labelled, member_outputs
from jaxprobe.fit.loop import FitInfo
from jaxprobe.fit.streaming import Streamed, fit_streamed
from jaxprobe.model.encoder import Encoder, MemberOutputs


def settings_at_once(config: RunConfig) -> int:
    """Return how many settings are trained side by side.

    Both, where memory holds them: each compiles its own step on one core for as long as
    the other does, and a member's operations already share the cores among themselves.
    Streamed, one: memory holds one's groups.
    """
    return len(SETTINGS) if config.stream is None else 1


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
    arrays = load_cache(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _kept(path: Path, trained: Trained, key: str) -> None:
    arrays: dict[str, Any] = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    save_cache(path, {**arrays, **info}, key)


def encode_all(
    trained: Trained, read: Read, n_rows: int, encoder: Encoder
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

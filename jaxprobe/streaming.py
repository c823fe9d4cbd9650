"""Training from a store that is larger than memory.

A group of chunks of rows is what fits in memory. While the encoders train on one group
the next is read, so host memory holds two whatever the size of the store.

Every encoder of a call takes its steps on a group before the next one comes: the store
is read once per epoch, not once per epoch and encoder. On one group that holds
everything the result is that of `jaxprobe.grid`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from beatrice.jaxprobe.config import StreamConfig, TrainConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.grid import (
    Block,
    Labelled,
    Trained,
    block_learner,
    filled_block,
    join,
    labelled,
    trained_block,
)
from beatrice.jaxprobe.kernels.stored import use_one_blas_thread
from beatrice.jaxprobe.loop import fit
from beatrice.jaxprobe.tokens import FamilyTokens


class Group(NamedTuple):
    """Examples that are in memory together.

    Attributes:
      where: `[n_rows]` indices into the store; all groups of an epoch have one length,
        and what is missing repeats the group's last example.
      is_real: `[n_rows]` bool, False on repetitions.
    """

    where: np.ndarray
    is_real: np.ndarray


def epoch_groups(
    examples: np.ndarray, config: StreamConfig, seed: Sequence[int]
) -> list[Group]:
    """Split the examples into groups, every example once.

    Chunks are spread at random and evenly, so that the last group is not small.

    Args:
      examples: `[n]` indices into the store, ascending.
      config: sizes.
      seed: of the order of the chunks, such as (root seed, seed, epoch).
    """
    n_chunks = -(-len(examples) // config.n_chunk)
    n_groups = -(-n_chunks // config.n_mixed)
    n_rows = -(-n_chunks // n_groups) * config.n_chunk
    chunks = [
        examples[i * config.n_chunk : (i + 1) * config.n_chunk] for i in range(n_chunks)
    ]
    order = np.random.default_rng(list(seed)).permutation(n_chunks)
    groups = []
    for numbers in np.array_split(order, n_groups):
        where = np.concatenate([chunks[i] for i in np.sort(numbers)])  # as on disk
        is_real = np.arange(n_rows) < len(where)
        groups.append(Group(np.pad(where, (0, n_rows - len(where)), "edge"), is_real))
    return groups


def prefetched(read: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield `read(item)` of each, in order, with the next one being read meanwhile.

    One thread asks and assembles; TensorStore's own threads read and decode. Neither
    holds the interpreter's lock while it works, nor does a training step.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(read, item) for item in items[:1]]
        for number in range(len(items)):
            value = pending.pop().result()
            pending = [pool.submit(read, item) for item in items[number + 1 :][:1]]
            yield value
            del value  # or it would live until the next one is there


Read = Callable[[np.ndarray], FamilyTokens]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """Rows of a store with their labels.

    Attributes:
      where: `[n]` indices into the store, ascending.
      labels: `[n]` bool.
      read: standardised tokens of indices, in one padded width.
      config: how the rows are parted.
      offsets: `[n_subsets, n]`, see `Labelled`; None for zeros.
    """

    where: np.ndarray
    labels: np.ndarray
    read: Read
    config: StreamConfig
    offsets: np.ndarray | None = None

    def groups(self, *seed: int) -> Iterator[Labelled]:
        """Yield an epoch's groups with their signals, read one ahead."""

        def fetch(group: Group) -> Labelled:
            features = self.read(self.where[group.where])
            weights = group.is_real.astype(np.float32)
            offsets = None if self.offsets is None else self.offsets[:, group.where]
            return labelled(features, self.labels[group.where], weights, offsets)

        indices = np.arange(len(self.where))
        yield from prefetched(fetch, epoch_groups(indices, self.config, seed))


def fit_streamed(
    blocks: Sequence[Block],
    train: Streamed,
    valid: Streamed,
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> Trained:
    """Train encoders from a store, as `jaxprobe.grid` trains them from memory.

    Returns:
      Best weights of every member, in the order of the blocks.
    """
    use_one_blas_thread()
    sample = train.read(train.where[:1])
    learners = [
        block_learner(
            filled_block(block, encoder, config),
            sample,
            encoder=encoder,
            config=config,
        )
        for block in blocks
    ]
    states = fit(
        learners,
        lambda epoch: train.groups(config.root_seed, epoch),
        lambda: valid.groups(config.root_seed),
        config,
    )
    members = [member for block in blocks for member in block.members]
    return join(list(map(trained_block, blocks, states)), members)

"""Chunks of a store in the order of training, read ahead, and their statistics.

Examples that lie together on disk are read together, as a *chunk*; some chunks from all
over the store are mixed into a *group*, which is what is in memory together.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxprobe.config import StreamConfig
from jaxprobe.features.features import Features, Standardizer


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
    """Part the examples into groups, every example once.

    Chunks are dealt out at random and evenly, so that the last group is not small.

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
    for part in np.array_split(order, n_groups):
        where = np.concatenate([chunks[i] for i in np.sort(part)])  # as on disk
        is_real = np.arange(n_rows) < len(where)
        groups.append(Group(np.pad(where, (0, n_rows - len(where)), "edge"), is_real))
    return groups


def prefetched(read: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield `read(item)` of each, in order, with the next one being read meanwhile.

    One thread asks and assembles; TensorStore's own threads read and decode. Neither
    holds the interpreter's lock while it works, nor does a training step.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(read, items[0]) if items else None
        for following in [*items[1:], None]:
            found = pending.result()
            if following is not None:
                pending = pool.submit(read, following)
            yield found
            del found  # or it would live until the next one is there


class Moments(NamedTuple):
    """Sums of tokens seen so far, float64.

    Attributes:
      count: tokens.
      mean: `[d_total]`.
      square: `[d_total]`, sum of squared distances from the mean.
    """

    count: int
    mean: np.ndarray
    square: np.ndarray


def add_moments(sums: Moments | None, features: Features) -> Moments:
    """Add the real tokens of some examples (Chan, Golub and LeVeque 1979)."""
    parts = [
        np.asarray(tokens)[np.asarray(mask)]
        for tokens, mask in zip(features.tokens, features.masks, strict=True)
    ]
    rows = np.concatenate(parts).astype(np.float64)
    mean = rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
    new = Moments(len(rows), mean, np.square(rows - mean).sum(axis=0))
    if sums is None or not sums.count:
        return new
    if not new.count:
        return sums
    total = sums.count + new.count
    apart = new.mean - sums.mean
    between = np.square(apart) * (sums.count * new.count / total)
    return Moments(
        total,
        sums.mean + apart * (new.count / total),
        sums.square + new.square + between,
    )


def standardizer_of(parts: Iterator[Features]) -> Standardizer:
    """Fit the standardisation in one pass; as `fit_standardizer` on all at once.

    Raises:
      ValueError: no token is real.
    """
    sums: Moments | None = None
    for features in parts:
        sums = add_moments(sums, features)
    if sums is None or not sums.count:
        raise ValueError("cannot standardise: no span has a real token")
    std = np.sqrt(sums.square / sums.count)
    constant = std <= 1e-6 * np.maximum(1.0, np.abs(sums.mean))
    std = np.where(constant, 1.0, std)
    return Standardizer(sums.mean.astype(np.float32), std.astype(np.float32))

"""How many members train side by side, and how many rows at once: what memory allows.

The block of all members is compiled, and halved until the compiler says that its step
fits (`jaxprobe.fit.memory`). Results do not depend on the plan (`PlannedConfig`).
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from extract.run.stages import bytes_in_words
from jaxprobe.config import PlannedConfig, TrainConfig, row_choices
from jaxprobe.features.subsets import N_SUBSETS
from jaxprobe.fit.blocks import Block, Member
from jaxprobe.fit.memory import Sizes, StepBytes, compiled_step, rows_bytes

KEPT_FREE = 0.15  # of a device: fragments, libraries, and what the compiler left out
# More members share what is read of a seed's hidden states, and more rows share the
# sum of gradients, which is as large as a member's weights: at the paper's sizes it is
# a twentieth of what a step of 64 rows moves. Members come first down to here.
_FEW_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a setting's members are trained on a device.

    Attributes:
      n_subsets: of a seed side by side, on each device.
      n_seeds: side by side.
      n_rows: of which a gradient is computed at once; None for the protocol's own.
      limit: bytes that may be used, or None where nobody has counted.
      resident: bytes beside those of a step.
      needed: of a step, by the compiler.
    """

    n_subsets: int
    n_seeds: int
    n_rows: int | None = None
    limit: int | None = None
    resident: int = 0
    needed: StepBytes | None = None

    def config(self, config: TrainConfig) -> TrainConfig:
        """Return the protocol as it is carried out."""
        if self.n_rows is None:
            return config
        return PlannedConfig(**dataclasses.asdict(config), n_rows=self.n_rows)

    def blocks(self, members: Sequence[Member]) -> tuple[Block, ...]:
        """Put members into blocks, every subset of a block with every seed of it."""
        of_seed: dict[int, tuple[int, ...]] = {}
        for subset, seed in members:
            of_seed[seed] = (*of_seed.get(seed, ()), subset)
        seeds_of: dict[tuple[int, ...], list[int]] = {}
        for seed, subsets in of_seed.items():
            seeds_of.setdefault(subsets, []).append(seed)
        size = self.n_subsets * max(1, jax.device_count())
        return tuple(
            Block(part, some)
            for subsets, seeds in seeds_of.items()
            for some in _split(seeds, self.n_seeds)
            for part in _split(subsets, size)
        )


def _split(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]


def device_bytes() -> int | None:
    """Return what programs may use of this machine's accelerator; None on a CPU.

    JAX takes three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.
    """
    if jax.default_backend() == "cpu":
        return None
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def choose(sizes: Sizes, device_memory: int | None = None) -> Plan:
    """Choose blocks and microbatches for a device.

    On a CPU a block is one member, whose activations stay in cache, unless a size is
    given. Elsewhere all members and a whole batch are compiled first; what does not fit
    is halved: rows down to 64, then seeds and subsets, then rows.

    Args:
      sizes: what is trained.
      device_memory: bytes; what the device says by default.

    Raises:
      ValueError: one row of one member does not fit.
    """
    device_memory = device_memory or device_bytes()
    if device_memory is None:
        if jax.default_backend() == "cpu" and jax.device_count() == 1:
            return Plan(n_subsets=1, n_seeds=1)
        return Plan(n_subsets=_subsets_each(), n_seeds=sizes.train.n_seeds)
    limit = int((1 - KEPT_FREE) * device_memory)
    rows = sizes.resident + rows_bytes(sizes, sizes.n_train)
    if rows >= limit:
        raise ValueError(
            f"the rows that training holds take {bytes_in_words(rows)}, and of the "
            f"device's {bytes_in_words(device_memory)} {bytes_in_words(limit)} may be "
            "used; train with --streamed, or store fewer or narrower hidden states"
        )
    for n_subsets, n_seeds, n_rows in _candidates(sizes):
        needed, _ = compiled_step(sizes, n_subsets, n_seeds, n_rows)
        if sizes.resident + needed.total <= limit:
            return Plan(
                n_subsets=n_subsets,
                n_seeds=n_seeds,
                n_rows=n_rows,
                limit=limit,
                resident=sizes.resident,
                needed=needed,
            )
    raise ValueError(
        f"one member's step on one row does not fit into {bytes_in_words(limit)} "
        f"beside {bytes_in_words(rows)} of rows; train with --streamed, with a smaller "
        "`hidden` width, or on a device with more memory"
    )


def _subsets_each() -> int:
    """Subsets of a seed on each device, where all of them are side by side."""
    return -(-N_SUBSETS // jax.device_count())


def _candidates(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield subsets, seeds and rows of blocks, each about half of the one before."""
    rows = row_choices(sizes.train)
    n_many = sum(n >= _FEW_ROWS for n in rows) or 1
    n_subsets, n_seeds = _subsets_each(), sizes.train.n_seeds
    yield from ((n_subsets, n_seeds, n) for n in rows[:n_many])
    while n_subsets * n_seeds > 1:
        if n_seeds > 1:
            n_seeds = -(-n_seeds // 2)
        else:
            n_subsets = -(-n_subsets // 2)
        yield n_subsets, n_seeds, rows[n_many - 1]
    yield from ((1, 1, n) for n in rows[n_many:])

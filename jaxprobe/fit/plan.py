"""How many members train side by side, and how many rows at once: what memory allows.

A training step is compiled for arrays that do not exist, a few members on a few rows,
and the compiler says what it needs. That grows with members, with rows, and with rows
times members, so that three small compilations foretell all others; the block that is
chosen is compiled to make sure. Results do not depend on the plan (`PlannedConfig`).

Where an accelerator is there, its own compiler is asked. Where none is, this machine's
compiler stands for it: it is given the module as it is lowered for accelerators. Its
buffers are not theirs: it fuses other loops, lays arrays out otherwise, and leaves no
room for a library's scratch, which is one reason for the share that is kept free.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from extract.run.stages import bytes_in_words
from jaxprobe.config import EncoderConfig, PlannedConfig, TrainConfig, row_choices
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.subsets import N_FAMILIES, N_SUBSETS, FamilyDims
from jaxprobe.fit.blocks import Block, BlockArrays, Member
from jaxprobe.fit.grid import Labelled, block_logits, start_block, train_block
from jaxprobe.model.encoder import Encoder

KEPT_FREE = 0.15  # of a device: fragments, libraries, and what the model gets wrong
# More members share what is read of a seed's hidden states, and more rows share the
# sum of gradients, which is as large as a member's weights: at the paper's sizes it is
# a twentieth of what a step of 64 rows moves. Members come first down to here.
_FEW_ROWS = 64
_PROBED = (2, 4), (16, 32)  # members and rows of the blocks that are compiled
# Code that is never run need not be good; what it needs of memory is the same.
_FOR_SIZES_ALONE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, in sizes.

    Attributes:
      encoder: widths.
      dims: channels of the families.
      train: the protocol.
      widths: tokens of the padded spans of the longest group of rows.
      n_train: rows of this group.
      n_valid: rows that are scored together with it in memory.
      resident: bytes that lie on the device beside a step's own arguments: other
        groups, validation rows, the group of a stream that is read ahead.
    """

    encoder: EncoderConfig
    dims: FamilyDims
    train: TrainConfig
    widths: tuple[int, ...]
    n_train: int
    n_valid: int
    resident: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a compiled step needs, in bytes.

    Attributes:
      arguments: rows of the group, and the members' weights and moments.
      outputs: the members' new weights and moments.
      temporaries: of a step, or of scoring if that needs more.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.outputs + self.temporaries


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

    def in_words(self, config: TrainConfig) -> str:
        """Say it for a person."""
        n_rows = self.n_rows or config.rows_at_once()
        n = self.n_subsets * self.n_seeds
        who = f"{n} members side by side" if n > 1 else "one member at a time"
        text = f"{who}, {config.batch_size // n_rows} microbatches of {n_rows} rows"
        if self.needed is None or self.limit is None:
            return text
        parts = self.needed.temporaries, self.needed.arguments + self.needed.outputs
        words = [bytes_in_words(x) for x in (*parts, self.resident, self.limit)]
        return (
            f"{text}; compiled, a step takes {words[0]} of temporaries beside "
            f"{words[1]} of rows and weights and {words[2]} of other rows, of {words[3]}"
        )

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


def as_bytes(text: str) -> int:
    """Read a number of bytes such as "80GiB"; units are powers of 1024.

    Raises:
      ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"expected a number of bytes such as 80GiB, got {text!r}")
    return int(float(found[1]) * 2 ** _UNITS[found[2]])


def device_bytes() -> int | None:
    """Return what a program may use of this machine's accelerator; None on a CPU."""
    if jax.default_backend() == "cpu":
        return None
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def choose(sizes: Sizes, device_memory: int | None = None) -> Plan:
    """Choose blocks and microbatches for a device.

    On a CPU a block is one member, whose activations stay in cache, unless a size is
    given. Elsewhere: the most members of which at least 64 rows fit, whole seeds or
    equal parts of one, and then the most rows; fewer rows for one member alone.

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
        n_each = -(-N_SUBSETS // jax.device_count())
        return Plan(n_subsets=n_each, n_seeds=sizes.train.n_seeds)
    limit = int((1 - KEPT_FREE) * device_memory)
    held = sizes.resident + rows_bytes(sizes, sizes.n_train)
    if held >= limit:
        raise ValueError(
            f"the rows that training holds take {bytes_in_words(held)}, and of the "
            f"device's {bytes_in_words(device_memory)} {bytes_in_words(limit)} may be "
            "used; train with --streamed, or store fewer or narrower hidden states"
        )
    foretold = Foretold.of(sizes)
    for n_subsets, n_seeds, n_rows in _candidates(sizes):
        if sizes.resident + foretold.total(n_subsets, n_seeds, n_rows) > limit:
            continue
        needed = compiled_bytes(sizes, n_subsets, n_seeds, n_rows)
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
        f"beside {bytes_in_words(held)} of rows; train with --streamed, with a smaller "
        "`hidden` width, or on a device with more memory"
    )


def _candidates(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield subsets, seeds and rows, best first."""
    rows = row_choices(sizes.train)
    many = [n for n in rows if n >= _FEW_ROWS] or rows[:1]
    seeds = range(sizes.train.n_seeds, 0, -1)
    # Parts of a seed that are as equal as can be: 15, 8, 5, 4, 3, 2, 1.
    parts = sorted({-(-N_SUBSETS // n) for n in range(1, N_SUBSETS + 1)}, reverse=True)
    blocks = [(N_SUBSETS, n) for n in seeds] + [(n, 1) for n in parts[1:]]
    for n_subsets, n_seeds in blocks:
        yield from ((n_subsets, n_seeds, n) for n in many)
    yield from ((1, 1, n) for n in rows if n < many[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foretold:
    """What steps need, by least squares from those that were compiled.

    Attributes:
      rows: bytes of the group's rows.
      state: bytes of a member's weights and moments, as an argument and as an output.
      factors: of temporaries, bytes for each member, row of a seed, and row of a
        member.
    """

    rows: int
    state: float
    factors: tuple[float, ...]

    @classmethod
    def of(cls, sizes: Sizes) -> "Foretold":
        """Compile two blocks and two numbers of rows, and fit what they need."""
        (few, more), (short, long) = _PROBED
        long = max(n for n in row_choices(sizes.train) if n <= long)
        short = max(n for n in row_choices(sizes.train) if n <= min(short, long))
        points = [(few, 1, short), (few, 1, long), (more, 1, long)]
        with ThreadPoolExecutor() as pool:  # one is lowered while others are compiled
            waited = [pool.submit(_compile, _lowered(sizes, *one)) for one in points]
            found = [one.result() for one in waited]
        basis = np.array([_growth(*one) for one in points], float)
        y = np.array([one.temporaries for one in found], float)
        # A coefficient below zero would be a rounding of buffers, not a saving.
        factors = np.maximum(np.linalg.lstsq(basis, y)[0], 0.0)
        rows = rows_bytes(sizes, sizes.n_train)
        state = (found[0].arguments + found[0].outputs - rows) / few
        return cls(rows=rows, state=state, factors=tuple(factors.tolist()))

    def temporaries(self, n_subsets: int, n_seeds: int, n_rows: int) -> float:
        """Bytes of a block's temporaries."""
        return float(np.dot(_growth(n_subsets, n_seeds, n_rows), self.factors))

    def total(self, n_subsets: int, n_seeds: int, n_rows: int) -> float:
        """Bytes of a block's step."""
        temporaries = self.temporaries(n_subsets, n_seeds, n_rows)
        return self.rows + n_subsets * n_seeds * self.state + temporaries


def _growth(n_subsets: int, n_seeds: int, n_rows: int) -> tuple[int, ...]:
    """With what temporaries grow: members, a seed's gathered rows, activations."""
    n = n_subsets * n_seeds
    return n, n_seeds * n_rows, n * n_rows


def rows_bytes(sizes: Sizes, n_rows: int) -> int:
    """Return the bytes of rows on the device, labels and offsets included."""
    leaves = jax.tree.leaves(_rows(sizes, n_rows))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _rows(sizes: Sizes, n: int) -> Labelled:
    """Rows that do not exist."""
    shape, n_tokens = jax.ShapeDtypeStruct, sum(sizes.widths)
    tokens = [shape((n_tokens, n, d), jnp.float32) for d in sizes.dims.sizes]
    masks = [shape((width, n), jnp.bool_) for width in sizes.widths]
    one = shape((n,), jnp.float32)
    offsets = shape((N_SUBSETS, n), jnp.float32)
    return Labelled(FamilyTokens(tuple(tokens), tuple(masks)), one, one, offsets)


def traced_steps(sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int) -> list[Any]:
    """Return a block's training step and its scoring, traced for absent arrays."""
    plan = Plan(n_subsets=n_subsets, n_seeds=n_seeds, n_rows=n_rows)
    fixed = {
        "encoder": Encoder(sizes.encoder, sizes.dims),
        "config": plan.config(sizes.train),
    }
    shape = jax.ShapeDtypeStruct
    subsets, seeds = (shape((n,), jnp.int32) for n in (n_subsets, n_seeds))
    block = BlockArrays(shape((n_subsets, N_FAMILIES), jnp.bool_), subsets, seeds)
    rows = _rows(sizes, sizes.n_train)
    states = jax.eval_shape(lambda b, x: start_block(b, x, **fixed), block, rows[0])
    number = shape((), jnp.int32)
    valid = _rows(sizes, sizes.n_valid)
    return [
        train_block.trace(states, number, block, rows, **fixed),
        block_logits.trace(states, block, valid, **fixed),
    ]


def _lowered(sizes: Sizes, *point: int) -> list[Any]:
    """Lower a block's step for the accelerator that is here, or for any."""
    if jax.default_backend() != "cpu":
        return [traced.lower() for traced in traced_steps(sizes, *point)]
    # A TPU's lowering leaves factorisations to the compiler, which any can translate;
    # a GPU's calls a library that is not here.
    return [
        traced.lower(lowering_platforms=("tpu",))
        for traced in traced_steps(sizes, *point)
    ]


def _compile(lowered: Sequence[Any]) -> StepBytes:
    """Ask the compiler."""
    options = _FOR_SIZES_ALONE if jax.default_backend() == "cpu" else None
    found = [
        one.compile(compiler_options=options).memory_analysis() for one in lowered
    ]
    return StepBytes(
        arguments=found[0].argument_size_in_bytes,
        outputs=found[0].output_size_in_bytes,
        temporaries=max(one.temp_size_in_bytes for one in found),
    )


def compiled_bytes(
    sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int
) -> StepBytes:
    """Compile a block's step and say what it needs."""
    return _compile(_lowered(sizes, n_subsets, n_seeds, n_rows))

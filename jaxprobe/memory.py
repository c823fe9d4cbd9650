"""What training needs: FLOPs of a step, and how many members fit a device's memory.

The step of all members is compiled from shapes, without arrays, and halved until the
compiler reports that it fits: rows down to 64, then members side by side, then rows.
Results do not depend on this (`PlannedConfig`). Without an accelerator this machine's
compiler estimates the memory, from the module lowered for accelerators: it fuses other
loops, lays out arrays differently, and allows no scratch memory for libraries.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.run.process import host_bytes
from beatrice.extract.run.stages import bytes_in_words
from beatrice.extract.store.spec import Dtype, numpy_dtype
from beatrice.jaxprobe.config import (
    EncoderConfig,
    GridConfig,
    PlannedConfig,
    TrainConfig,
    old_emitter,
    row_choices,
)
from beatrice.jaxprobe.encoder import Encoder, is_folded
from beatrice.jaxprobe.families import FamilyDims, width_groups, widths_of
from beatrice.jaxprobe.grid import (
    Block,
    BlockArrays,
    LabelledFeatures,
    Member,
    block_logits,
    n_in_turn,
    start_block,
    train_block,
)
from beatrice.jaxprobe.stored import StoredTokens, words_of
from beatrice.jaxprobe.tokens import FamilyTokens


def step_flops(
    config: EncoderConfig, dims: FamilyDims, widths: Sequence[int], member: Member
) -> int:
    """Return the floating-point operations per example of one encoder's training step.

    Only matrix products count, at the encoder's own widths, over all positions
    including padding; products of weights do not (see `is_folded`). Each counts three
    times for forward and backward together, but the first projection twice, since its
    inputs need no gradient.
    """
    read = np.flatnonzero(dims.subset_masks[member.subset]).tolist()
    sizes = [dims.sizes[f] for f in read]
    hidden, n_spans = config.hidden, len(widths)
    d_out = hidden if is_folded(config) else config.projection
    projection = 2 * sum(sizes) * d_out
    entry = 0 if is_folded(config) else 2 * len(read) * config.projection * hidden
    convolutions = config.n_blocks * 2 * (2 * 3 * hidden * hidden)
    per_token = 2 * projection + 3 * (entry + convolutions)
    n_vectors = n_spans + n_spans * (n_spans - 1) // 2
    mlp = 2 * n_vectors * config.d_pooled * hidden + 2 * hidden
    return sum(widths) * per_token + 3 * mlp


# Share of a device kept free for fragmentation, libraries, and errors of the estimate.
KEPT_FREE = 0.15
# More members share one reading of a seed's hidden states. More rows share one sum of
# gradients, which is as large as a member's weights: at the paper's sizes a twentieth
# of what a step of 64 rows moves. So members are not halved before rows are down to 64.
_MANY_ROWS = 64
# This code is never run; optimising it would not change its memory.
FOR_SIZES_ALONE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    **old_emitter(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that determine the memory of training."""

    encoder: EncoderConfig  # widths
    dims: FamilyDims  # channels of the families
    train: TrainConfig  # the protocol
    widths: tuple[int, ...]  # padded span lengths of the longest group of training rows
    n_train: int  # rows of this length that are as large as the largest group
    # The same for validation rows, which are scored together.
    n_valid: int
    valid_widths: tuple[int, ...]
    device_dtypes: tuple[Dtype, ...]  # types of the families on the device
    # Bytes on the device besides a step's own arguments: other groups, validation rows,
    # and the group that a stream reads ahead.
    resident: int = 0
    n_devices: int = 1  # devices over which a block's subsets are split
    # Whether all blocks take turns on each group, so that the weights and moments of
    # every member are on the device at once.
    is_streamed: bool = False

    @classmethod
    def of(
        cls,
        config: GridConfig,
        dims: FamilyDims,
        lengths: np.ndarray,
        where: Sequence[np.ndarray],
        device_dtypes: tuple[Dtype, ...],
    ) -> "Sizes":
        """Return the sizes for a setting.

        `lengths` `[n_rows, n_spans]` are the span lengths of every row of the store,
        and `where` the indices of its training rows and its validation rows.
        """
        if config.stream is not None:
            widths = widths_of(lengths)
            groups = [[(config.stream.group_rows(len(rows)), widths)] for rows in where]
        else:
            groups = [
                [
                    (len(group), widths_of(lengths[rows][group]))
                    for group in width_groups(lengths[rows], config.train.batch_size)
                ]
                for rows in where
            ]
        (n_train, widths), (n_valid, valid_widths) = map(_largest, groups)
        sizes = cls(
            encoder=config.encoder,
            dims=dims,
            train=config.train,
            widths=widths,
            n_train=n_train,
            n_valid=n_valid,
            valid_widths=valid_widths,
            device_dtypes=device_dtypes,
            n_devices=1 if config.stream else jax.local_device_count(),
            is_streamed=config.stream is not None,
        )
        resident = sum(rows_bytes(sizes, *group) for split in groups for group in split)
        if sizes.is_streamed:
            # Two groups, as one is read while one is used; validation's may be larger.
            resident = 2 * rows_bytes(sizes, max(n_train, n_valid))
        resident -= rows_bytes(sizes, n_train)  # counted in a step's arguments
        return dataclasses.replace(sizes, resident=resident)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The memory that a compiled step needs, in bytes."""

    arguments: int  # rows of the group, and the members' weights and moments
    outputs: int  # the members' new weights and moments
    temporaries: int  # of training, or of scoring if that needs more

    @property
    def total(self) -> int:
        """Sum of all three."""
        return self.arguments + self.outputs + self.temporaries


def _largest(groups: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[int, Any]:
    """Return the rows and widths of a group that stands for all, given theirs.

    It is as long as the longest and as large as the largest: activations grow with the
    length, and copies of a group with its size.
    """
    longest = max((widths for _, widths in groups), key=sum)
    n_tokens = max(n_rows * sum(widths) for n_rows, widths in groups)
    return -(-n_tokens // sum(longest)), longest


def all_rows_bytes(sizes: Sizes) -> int:
    """Return the bytes of all rows that are on the device together."""
    return sizes.resident + rows_bytes(sizes, sizes.n_train)


def rows_bytes(sizes: Sizes, n_rows: int, widths: tuple[int, ...] | None = None) -> int:
    """Return the bytes of rows on the device, including labels and offsets."""
    leaves = jax.tree.leaves(_rows(sizes, n_rows, widths or sizes.widths))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _rows(sizes: Sizes, n: int, widths: tuple[int, ...]) -> LabelledFeatures:
    """Return the shapes of `n` rows."""
    shape, n_tokens = jax.ShapeDtypeStruct, sum(widths)

    def family(d: int, dtype: Dtype) -> jax.ShapeDtypeStruct | StoredTokens:
        codes = words_of(np.empty(0, numpy_dtype(dtype)))
        codes = shape((n_tokens, n, d), codes.dtype)
        if dtype == "float32":
            return codes
        scales = shape((n_tokens, n), jnp.float32) if dtype == "int8" else None
        moment = shape((d,), jnp.float32)
        return StoredTokens(
            codes=codes, dtype=dtype, scales=scales, mean=moment, std=moment
        )

    tokens = map(family, sizes.dims.sizes, sizes.device_dtypes)
    masks = [shape((width, n), jnp.bool_) for width in widths]
    per_row = shape((n,), jnp.float32)
    offsets = shape((sizes.dims.n_subsets, n), jnp.float32)
    features = FamilyTokens(tuple(tokens), tuple(masks))
    return LabelledFeatures(features, per_row, per_row, offsets, shape((n,), jnp.int32))


@functools.lru_cache
def traced_steps(sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int) -> list[Any]:
    """Return a block's training step and scoring, traced from shapes."""
    config = PlannedConfig(**dataclasses.asdict(sizes.train), n_rows=n_rows)
    fixed = {"encoder": Encoder(sizes.encoder, sizes.dims), "config": config}
    shape = jax.ShapeDtypeStruct
    block = BlockArrays(
        shape((n_subsets, sizes.dims.n_families), jnp.bool_),
        shape((n_subsets,), jnp.int32),
        shape((n_seeds, 2), jax.eval_shape(jax.random.key, 0).dtype),
    )
    rows = _rows(sizes, sizes.n_train, sizes.widths)
    alone = BlockArrays(*(shape((1, *x.shape[1:]), x.dtype) for x in block))
    states = jax.eval_shape(lambda b, x: start_block(b, x, **fixed), alone, rows[0])
    states = jax.tree.map(
        lambda x: shape((n_seeds, n_subsets, *x.shape[2:]), x.dtype), states
    )
    number = shape((), jnp.int32)
    valid = _rows(sizes, sizes.n_valid, sizes.valid_widths)
    return [
        train_block.trace(states, number, block, rows, **fixed),
        block_logits.trace(states, block, valid, **fixed),
    ]


@functools.lru_cache
def compiled_step(
    sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int
) -> tuple[StepBytes, dict[str, float]]:
    """Compile a block's step; return its memory, and XLA's cost analysis by name.

    The analysis counts the body of a loop once: one microbatch of one batch.
    """
    traced = traced_steps(sizes, n_subsets, n_seeds, n_rows)
    if jax.default_backend() == "cpu":
        # Lowering for TPUs leaves factorisations to the compiler, so that any compiler
        # can translate it; lowering for GPUs calls a library that is missing here.
        lowered = [step.lower(lowering_platforms=("tpu",)) for step in traced]
        compiled = [step.compile(compiler_options=FOR_SIZES_ALONE) for step in lowered]
    else:
        compiled = [step.lower().compile() for step in traced]
    bytes_of = [step.memory_analysis() for step in compiled]
    needed = StepBytes(
        arguments=bytes_of[0].argument_size_in_bytes,
        outputs=bytes_of[0].output_size_in_bytes,
        temporaries=max(step.temp_size_in_bytes for step in bytes_of),
    )
    return needed, compiled[0].cost_analysis()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a setting's members are trained on a device."""

    n_subsets: int  # subsets of a seed side by side, on each device
    n_seeds: int  # seeds side by side
    n_devices: int = 1
    n_rows: int | None = None  # rows per gradient; None: the protocol's number
    limit: int | None = None  # bytes that may be used; None without a limit
    resident: int = 0  # bytes besides those of a step
    needed: StepBytes | None = None  # by the compiler; None without a limit

    def config(self, config: TrainConfig) -> TrainConfig:
        """Return the protocol with the planned number of rows."""
        if self.n_rows is None:
            return config
        return PlannedConfig(**dataclasses.asdict(config), n_rows=self.n_rows)

    def blocks(self, members: Sequence[Member]) -> tuple[Block, ...]:
        """Split members into blocks, each of all combinations of subsets and seeds."""
        of_seed: dict[int, tuple[int, ...]] = {}
        for subset, seed in members:
            of_seed[seed] = (*of_seed.get(seed, ()), subset)
        seeds_of: dict[tuple[int, ...], list[int]] = {}
        for seed, subsets in of_seed.items():
            seeds_of.setdefault(subsets, []).append(seed)
        size = self.n_subsets * self.n_devices
        return tuple(
            Block(block_subsets, block_seeds)
            for subsets, seeds in seeds_of.items()
            for block_seeds in _split(seeds, self.n_seeds)
            for block_subsets in _split(subsets, size)
        )


def _split(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]


def device_bytes() -> int | None:
    """Return the bytes of this machine's accelerator that JAX may use; None on a CPU.

    For a GPU they are three quarters, or the share XLA_PYTHON_CLIENT_MEM_FRACTION, but
    no more than Torch's model leaves there.
    """
    if jax.default_backend() == "cpu":
        return None
    device = jax.local_devices()[0]
    return usable_bytes(device.memory_stats() or {}, device.local_hardware_id)


def usable_bytes(statistics: Mapping[str, int], gpu: int) -> int | None:
    """Return the bytes of a GPU that JAX may use, given its `memory_stats` of it.

    JAX's own limit is a share of the whole memory, whoever else uses it. If Torch is
    loaded, it says how much is free besides what JAX has allocated.
    """
    limit, torch = statistics.get("bytes_limit"), sys.modules.get("torch")
    if limit is None or torch is None or not torch.cuda.is_available():
        return limit
    free, _ = torch.cuda.mem_get_info(gpu)
    return min(limit, free + statistics.get("pool_bytes", 0))


def check_rows(
    sizes: Sizes, device_memory: int | None = None, host_memory: int | None = None
) -> None:
    """Check that memory can hold the rows of training, before any is read.

    Without an accelerator the host's memory holds all rows; with one it holds a group
    at a time, on the way to the device. Memory sizes default to this machine's.
    """
    accelerator, rows = device_bytes(), all_rows_bytes(sizes)
    _check_fits(sizes, rows, "device", device_memory or accelerator)
    if accelerator is not None:
        valid = rows_bytes(sizes, sizes.n_valid, sizes.valid_widths)
        rows = max(rows_bytes(sizes, sizes.n_train), valid)
    _check_fits(sizes, rows, "host", host_memory or host_bytes())


def rows_fit_together(
    settings: Iterable[Sizes], host_memory: int | None = None
) -> bool:
    """Return whether the host's memory holds the rows of several settings at once."""
    memory = host_memory or host_bytes()
    return memory is None or sum(map(all_rows_bytes, settings)) < _limit(memory)


_STREAMED = "with GridConfig(stream=StreamConfig()) (in a command, --set streamed=true)"


def _limit(memory: int) -> int:
    return int((1 - KEPT_FREE) * memory)


def _check_fits(sizes: Sizes, rows: int, owner: str, memory: int | None) -> None:
    if memory is not None and rows >= _limit(memory):
        smaller = "in smaller groups (`n_mixed` of `StreamConfig`)"
        advice = smaller if sizes.is_streamed else _STREAMED
        raise ValueError(
            f"training would hold {bytes_in_words(rows)} of rows, but may use only "
            f"{bytes_in_words(_limit(memory))} of the {owner}'s "
            f"{bytes_in_words(memory)}; train {advice}, or store fewer or narrower "
            "hidden states"
        )


def choose(sizes: Sizes, device_memory: int | None = None) -> Plan:
    """Choose blocks and microbatches for a device.

    On a CPU a block's members take their steps in turn (`jaxprobe.grid`), unless
    `device_memory` is given. Otherwise all members and a whole batch are compiled first
    and halved until they fit: rows down to 64, then seeds, then subsets, then rows.
    """
    device_memory = device_memory or device_bytes()
    if device_memory is None:
        if jax.default_backend() == "cpu" and sizes.n_devices == 1:
            return Plan(n_subsets=n_in_turn(sizes.dims.n_subsets), n_seeds=1)
        return Plan(
            n_subsets=_subsets_each(sizes),
            n_seeds=sizes.train.n_seeds,
            n_devices=sizes.n_devices,
        )
    limit, rows = _limit(device_memory), all_rows_bytes(sizes)
    _check_fits(sizes, rows, "device", device_memory)
    waiting = 0
    for n_subsets, n_seeds, n_rows in _candidates(sizes):
        needed, _ = compiled_step(sizes, n_subsets, n_seeds, n_rows)
        if sizes.is_streamed:
            n_members = sizes.dims.n_subsets * sizes.train.n_seeds
            n_waiting = n_members - n_subsets * n_seeds
            waiting = needed.outputs * n_waiting // (n_subsets * n_seeds)
        if sizes.resident + waiting + needed.total <= limit:
            return Plan(
                n_subsets=n_subsets,
                n_seeds=n_seeds,
                n_devices=sizes.n_devices,
                n_rows=n_rows,
                limit=limit,
                resident=sizes.resident + waiting,
                needed=needed,
            )
    others, advice = "", f"{_STREAMED}, "
    if sizes.is_streamed:
        others, advice = f" and {bytes_in_words(waiting)} of other members", ""
    raise ValueError(
        f"one member's step on one row does not fit in {bytes_in_words(limit)} next to "
        f"{bytes_in_words(rows)} of rows{others}; train {advice}with a smaller "
        "`hidden` width, or on a device with more memory"
    )


def _subsets_each(sizes: Sizes) -> int:
    """Return the subsets of a seed on each device if all are trained at once."""
    return -(-sizes.dims.n_subsets // sizes.n_devices)


def _candidates(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield subsets, seeds and rows of blocks, each about half of the one before."""
    rows = row_choices(sizes.train)
    n_many = sum(n >= _MANY_ROWS for n in rows) or 1
    n_subsets, n_seeds = _subsets_each(sizes), sizes.train.n_seeds
    yield from ((n_subsets, n_seeds, n) for n in rows[:n_many])
    while n_subsets * n_seeds > 1:
        if n_seeds > 1:
            n_seeds = -(-n_seeds // 2)
        else:
            n_subsets = -(-n_subsets // 2)
        yield n_subsets, n_seeds, rows[n_many - 1]
    yield from ((1, 1, n) for n in rows[n_many:])

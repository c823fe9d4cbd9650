"""What a training step needs of a device's memory, asked of a compiler.

A block's step is compiled for arrays that do not exist, and the compiler says what it
needs.

Where an accelerator is there, its own compiler is asked. Where none is, this machine's
compiler stands for it: it is given the module as it is lowered for accelerators. Its
buffers are not theirs: it fuses other loops, lays arrays out otherwise, and leaves no
room for a library's scratch.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from extract.store.families import Dtype, numpy_dtype
from jaxprobe.config import EncoderConfig, PlannedConfig, TrainConfig
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.subsets import FLOATS, N_FAMILIES, N_SUBSETS, FamilyDims
from jaxprobe.features.widths import width_groups, widths_of
from jaxprobe.fit.blocks import BlockArrays
from jaxprobe.fit.grid import Labelled, block_logits, start_block, train_block
from jaxprobe.kernels.stored import StoredTokens
from jaxprobe.model.encoder import Encoder
from jaxprobe.settings import GridConfig

# Code that is never run need not be good; what it needs of memory is the same.
FOR_SIZES_ALONE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


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
      held_as: types in which the device holds the families.
      resident: bytes that lie on the device beside a step's own arguments: other
        groups, validation rows, the group of a stream that is read ahead.
    """

    encoder: EncoderConfig
    dims: FamilyDims
    train: TrainConfig
    widths: tuple[int, ...]
    n_train: int
    n_valid: int
    held_as: tuple[Dtype, ...] = FLOATS
    resident: int = 0

    @classmethod
    def of(
        cls,
        config: GridConfig,
        dims: FamilyDims,
        lengths: np.ndarray,
        where: Sequence[np.ndarray],
        held_as: tuple[Dtype, ...],
    ) -> "Sizes":
        """Return the sizes of a setting's rows.

        Args:
          config: how they are trained on.
          dims: channels of the families.
          lengths: `[n_rows, n_spans]` tokens, of every row of the store.
          where: training rows and validation rows among them.
          held_as: types in which the device holds the families.
        """
        if config.stream is not None:
            n_group = config.stream.n_chunk * config.stream.n_mixed
            groups = [[(min(n_group, len(own)), widths_of(lengths))] for own in where]
        else:
            parts = [width_groups(lengths[o], config.train.batch_size) for o in where]
            groups = [
                [(len(part), widths_of(lengths[own][part])) for part in found]
                for own, found in zip(where, parts, strict=True)
            ]
        (n_train, widths), (n_valid, _) = (
            max(found, key=lambda one: sum(one[1])) for found in groups
        )
        sizes = cls(
            encoder=config.encoder,
            dims=dims,
            train=config.train,
            widths=widths,
            n_train=n_train,
            n_valid=n_valid,
            held_as=held_as,
        )
        if config.stream is not None:  # two groups: one is read while one is used
            return dataclasses.replace(sizes, resident=rows_bytes(sizes, n_train))
        held = sum(rows_bytes(sizes, *one) for found in groups for one in found)
        resident = held - rows_bytes(sizes, n_train)
        return dataclasses.replace(sizes, resident=resident)


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


def rows_bytes(sizes: Sizes, n_rows: int, widths: tuple[int, ...] | None = None) -> int:
    """Return the bytes of rows on the device, labels and offsets included."""
    if widths is not None:
        sizes = dataclasses.replace(sizes, widths=widths)
    leaves = jax.tree.leaves(_rows(sizes, n_rows))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _rows(sizes: Sizes, n: int) -> Labelled:
    """Rows that do not exist."""
    shape, n_tokens = jax.ShapeDtypeStruct, sum(sizes.widths)

    def family(d: int, dtype: Dtype) -> jax.ShapeDtypeStruct | StoredTokens:
        codes = shape((n_tokens, n, d), numpy_dtype(dtype))
        if dtype == "float32":
            return codes
        scales = shape((n_tokens, n), jnp.float32) if dtype == "int8" else None
        return StoredTokens(codes, scales, *[shape((d,), jnp.float32)] * 2)

    tokens = map(family, sizes.dims.sizes, sizes.held_as)
    masks = [shape((width, n), jnp.bool_) for width in sizes.widths]
    one = shape((n,), jnp.float32)
    offsets = shape((N_SUBSETS, n), jnp.float32)
    return Labelled(FamilyTokens(tuple(tokens), tuple(masks)), one, one, offsets)


@functools.lru_cache
def traced_steps(sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int) -> list[Any]:
    """Return a block's training step and its scoring, traced for absent arrays."""
    config = PlannedConfig(**dataclasses.asdict(sizes.train), n_rows=n_rows)
    fixed = {"encoder": Encoder(sizes.encoder, sizes.dims), "config": config}
    shape = jax.ShapeDtypeStruct
    subsets, seeds = (shape((n,), jnp.int32) for n in (n_subsets, n_seeds))
    block = BlockArrays(shape((n_subsets, N_FAMILIES), jnp.bool_), subsets, seeds)
    rows = _rows(sizes, sizes.n_train)
    alone = BlockArrays(*(shape((1, *x.shape[1:]), x.dtype) for x in block))
    states = jax.eval_shape(lambda b, x: start_block(b, x, **fixed), alone, rows[0])
    states = jax.tree.map(
        lambda x: shape((n_seeds, n_subsets, *x.shape[2:]), x.dtype), states
    )
    number = shape((), jnp.int32)
    valid = _rows(sizes, sizes.n_valid)
    return [
        train_block.trace(states, number, block, rows, **fixed),
        block_logits.trace(states, block, valid, **fixed),
    ]


def _lowered(traced: Sequence[Any]) -> list[Any]:
    """Lower a block's steps for the accelerator that is here, or for any."""
    if jax.default_backend() != "cpu":
        return [one.lower() for one in traced]
    # A TPU's lowering leaves factorisations to the compiler, which any can translate;
    # a GPU's calls a library that is not here.
    return [one.lower(lowering_platforms=("tpu",)) for one in traced]


def _compile(lowered: Sequence[Any]) -> tuple[StepBytes, dict[str, float]]:
    """Ask the compiler for the bytes, and what it counts of the training step."""
    options = FOR_SIZES_ALONE if jax.default_backend() == "cpu" else None
    compiled = [one.compile(compiler_options=options) for one in lowered]
    found = [one.memory_analysis() for one in compiled]
    needed = StepBytes(
        arguments=found[0].argument_size_in_bytes,
        outputs=found[0].output_size_in_bytes,
        temporaries=max(one.temp_size_in_bytes for one in found),
    )
    return needed, compiled[0].cost_analysis()


@functools.lru_cache
def compiled_step(
    sizes: Sizes, n_subsets: int, n_seeds: int, n_rows: int
) -> tuple[StepBytes, dict[str, float]]:
    """Compile a block's step; say what it needs, and XLA's own count of its work.

    That count, by name, has the bodies of loops once: one microbatch of one batch.
    """
    return _compile(_lowered(traced_steps(sizes, n_subsets, n_seeds, n_rows)))

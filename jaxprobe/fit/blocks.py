"""Members of the grid, subset x seed, and how a function is applied to a block of them.

Members lie side by side in a block by `vmap`, over devices by a mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxprobe.features.subsets import N_SUBSETS, SUBSETS


class Member(NamedTuple):
    """One encoder of the grid."""

    subset: int  # row of SUBSETS
    seed: int


class Block(NamedTuple):
    """Members that train together: every subset with every seed."""

    subsets: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Seed-major, as the leading axis of a trained block."""
        return tuple(Member(k, s) for s in self.seeds for k in self.subsets)


def grid_members(n_seeds: int) -> tuple[Member, ...]:
    """All subsets x seeds, seed-major: member `s * 15 + k` is subset k of seed s."""
    return Block(tuple(range(N_SUBSETS)), tuple(range(n_seeds))).members


def default_blocks(
    n_seeds: int, subsets: Sequence[int] = range(N_SUBSETS)
) -> tuple[Block, ...]:
    """Members one by one; a plan puts them together for a device.

    Args:
      n_seeds: of every subset.
      subsets: rows of SUBSETS; the whole grid unless given.
    """
    whole = Block(tuple(subsets), tuple(range(n_seeds)))
    return tuple(Block((m.subset,), (m.seed,)) for m in whole.members)


class BlockArrays(NamedTuple):
    """A block for the device.

    Attributes:
      family_masks: `[n_subsets, n_families]` bool.
      subsets: `[n_subsets]` int32, rows of SUBSETS (they decide the random keys).
      seeds: `[n_seeds]` int32.
    """

    family_masks: Any
    subsets: Any
    seeds: Any

    @classmethod
    def of(cls, block: Block) -> "BlockArrays":
        """Put a block into arrays."""
        subsets, seeds = (np.asarray(x, np.int32) for x in block)
        return cls(SUBSETS[subsets], subsets, seeds)


def over_members(
    one: Callable[..., Any],
    block: BlockArrays,
    states: tuple[Any, ...],
    shared: tuple[Any, ...],
    mesh: Mesh | None,
) -> Any:
    """Apply a function to every subset with every seed.

    Args:
      one: of `(family_mask, subset, seed)`, a member's states, and what all share.
      block: the members.
      states: leaves `[n_seeds, n_subsets, ...]`.
      shared: what every member is given.
      mesh: devices over which the subsets are split, or None for one device.

    Returns:
      What `one` returns, leaves `[n_seeds, n_subsets, ...]`.
    """

    def on_device(block: BlockArrays, states: tuple, shared: tuple) -> Any:
        if len(block.subsets) * len(block.seeds) == 1:
            # No vmap: it would turn branches into selects.
            member = tuple(x[0] for x in block)
            own = jax.tree.map(lambda x: x[0, 0], states)
            return jax.tree.map(lambda x: x[None, None], one(member, own, *shared))
        rest = (None,) * len(shared)
        over_subsets = jax.vmap(one, in_axes=((0, 0, None), 0, *rest))
        if len(block.seeds) == 1:  # one axis less to trace, and to compile
            member = block._replace(seeds=block.seeds[0])
            own = jax.tree.map(lambda x: x[0], states)
            found = over_subsets(tuple(member), own, *shared)
            return jax.tree.map(lambda x: x[None], found)
        over_seeds = jax.vmap(over_subsets, in_axes=((None, None, 0), 0, *rest))
        return over_seeds(tuple(block), states, *shared)

    if mesh is None:
        return on_device(block, states, shared)
    (axis,) = mesh.axis_names
    own, whole = PartitionSpec(None, axis), PartitionSpec()
    split = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(BlockArrays(*[PartitionSpec(axis)] * 2, whole), own, whole),
        out_specs=own,
        check_vma=False,  # branches that not every device takes
    )
    return split(block, states, shared)

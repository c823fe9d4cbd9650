"""Train the grid over several devices, and over several hosts.

Members are independent, so they lie along one mesh axis and never speak to each other:
each device trains its share of the subsets, with every seed, as `fit_block` does on one
device, and stops when its own members are done. Only what comes out is gathered.

Over several hosts, every process calls `jax.distributed.initialize()` first and then
the same function with the same arguments.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprobe.config import TrainConfig
from jaxprobe.features.subsets import SUBSETS
from jaxprobe.fit.grid import Block, Labelled, Trained, fit_block, fit_blocks
from jaxprobe.fit.loop import FitInfo
from jaxprobe.kernels.matmul import use_one_blas_thread
from jaxprobe.model.encoder import Encoder, Params

AXIS = "members"


def member_mesh() -> Mesh:
    """Return all devices of all hosts, in a row."""
    return Mesh(np.asarray(jax.devices()), (AXIS,))


@partial(jax.jit, static_argnames=("encoder", "config", "mesh"))
def _fit_parted(
    family_masks: jax.Array,
    subsets: jax.Array,
    seeds: jax.Array,
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh,
) -> tuple[Params, FitInfo]:
    """Train every subset with every seed; leaves are `[n_seeds, n_subsets, ...]`."""

    def share(family_masks, subsets, seeds, train, valid):
        trained = fit_block(
            family_masks, subsets, seeds, train, valid, encoder=encoder, config=config
        )
        shape = (len(seeds), len(subsets))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), trained)

    own, all_of_it = PartitionSpec(AXIS), PartitionSpec()
    trained = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(own, own, all_of_it, all_of_it, all_of_it),
        out_specs=PartitionSpec(None, AXIS),
        check_vma=False,  # devices differ in the number of epochs they take
    )(family_masks, subsets, seeds, train, valid)
    whole = NamedSharding(mesh, all_of_it)
    return jax.lax.with_sharding_constraint(trained, whole)


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Put host arrays, the same on every host, on the devices of the mesh."""
    sharding = NamedSharding(mesh, spec)

    def place(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])

    return jax.tree.map(place, tree)


def fit_on_mesh(
    block: Block,
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh,
) -> Trained:
    """Train a block's members over the devices of a mesh.

    Where the subsets do not come out even, the last one is trained again on the devices
    that would stand idle, and left out of the result.

    Args:
      block: every subset with every seed.
      train: training rows; the same on every host, and copied to every device.
      valid: validation rows, likewise.
      encoder: the module.
      config: the protocol.
      mesh: of one axis, "members"; see `member_mesh`.

    Returns:
      The members with all their weights, on every host.
    """
    use_one_blas_thread()
    n_subsets, n_seeds = len(block.subsets), len(block.seeds)
    n_excess = -n_subsets % mesh.size
    subsets = np.pad(np.asarray(block.subsets, np.int32), (0, n_excess), mode="edge")
    parted = _placed((SUBSETS[subsets], subsets), mesh, PartitionSpec(AXIS))
    seeds = np.asarray(block.seeds, np.int32)
    common = _placed((seeds, train, valid), mesh, PartitionSpec())
    trained = _fit_parted(*parted, *common, encoder=encoder, config=config, mesh=mesh)

    def fetch(x: jax.Array) -> np.ndarray:
        own = np.asarray(x.addressable_data(0))
        return own[:, :n_subsets].reshape(n_seeds * n_subsets, *own.shape[2:])

    return Trained(block.members, *jax.tree.map(fetch, trained))


def fit_everywhere(
    blocks: Sequence[Block],
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> Iterator[Trained]:
    """Train blocks on all devices there are, and yield each as it is done."""
    if jax.device_count() == 1:
        yield from fit_blocks(blocks, train, valid, encoder=encoder, config=config)
        return
    mesh = member_mesh()
    for block in blocks:
        yield fit_on_mesh(
            block, train, valid, encoder=encoder, config=config, mesh=mesh
        )

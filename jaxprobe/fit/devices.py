"""Train the grid over the devices that a process sees.

Members are independent, so they lie along one mesh axis and never speak to each other:
each device trains its share of the subsets, with every seed, as one device trains them
all. Only what comes out is gathered. Over several processes members are shared by
`jaxprobe.fit.shares`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprobe.config import TrainConfig
from jaxprobe.fit.blocks import Block, BlockArrays
from jaxprobe.fit.grid import (
    Labelled,
    Trained,
    block_learner,
    fit_blocks,
    trained_block,
)
from jaxprobe.fit.loop import fit, shuffled
from jaxprobe.kernels.matmul import use_one_blas_thread
from jaxprobe.model.encoder import Encoder

AXIS = "members"


def member_mesh() -> Mesh:
    """Return the devices of this process, in a row."""
    return Mesh(np.asarray(jax.local_devices()), (AXIS,))


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Put arrays on the devices of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def fit_on_mesh(
    block: Block,
    train: Sequence[Labelled],
    valid: Sequence[Labelled],
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
      train: groups of training rows; each is copied to every device.
      valid: validation rows, likewise.
      encoder: the module.
      config: the protocol.
      mesh: of one axis, "members"; see `member_mesh`.

    Returns:
      The members with all their weights, on the host.
    """
    use_one_blas_thread()
    n_excess = -len(block.subsets) % mesh.size
    subsets = np.pad(np.asarray(block.subsets), (0, n_excess), mode="edge")
    whole = Block(tuple(subsets.tolist()), block.seeds)
    family_masks, subsets, seeds = BlockArrays.of(whole)
    split = _placed((family_masks, subsets), mesh, PartitionSpec(AXIS))
    given = (seeds, list(train), list(valid))
    seeds, train, valid = _placed(given, mesh, PartitionSpec())
    learner = block_learner(
        BlockArrays(*split, seeds),
        train[0].features,
        encoder=encoder,
        config=config,
        mesh=mesh,
    )
    (state,) = fit([learner], partial(shuffled, train, config), lambda: valid, config)
    return trained_block(block, state)


def fit_everywhere(
    blocks: Sequence[Block],
    train: Sequence[Labelled],
    valid: Sequence[Labelled],
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> Iterator[Trained]:
    """Train blocks on all devices there are, and yield each as it is done."""
    if jax.local_device_count() == 1:
        yield from fit_blocks(blocks, train, valid, encoder=encoder, config=config)
        return
    mesh = member_mesh()
    for block in blocks:
        yield fit_on_mesh(
            block, train, valid, encoder=encoder, config=config, mesh=mesh
        )

"""A training over several devices, in a process of its own: `OUT`."""

import sys

import jax
import numpy as np


def main(out):
    from beatrice.jaxprobe.grid import Block, fit_on_mesh, member_mesh
    from tests.jaxprobe.test_grid import ENCODER, TRAIN, in_one_group, planted_parts

    trained = fit_on_mesh(
        Block((0, 3, 7, 11, 14), (0, 1)),
        *in_one_group(planted_parts()),
        encoder=ENCODER,
        config=TRAIN,
        mesh=member_mesh(),
    )
    leaves = {f"w{i}": x for i, x in enumerate(jax.tree.leaves(trained.params))}
    np.savez(
        out,
        n_devices=jax.device_count(),
        members=np.asarray(trained.members),
        valid_auroc=trained.info.valid_auroc,
        n_epochs=trained.info.n_epochs,
        **leaves,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

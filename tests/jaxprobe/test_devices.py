import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from beatrice.jaxprobe.grid import Block, fit_blocks, fit_everywhere
from tests.jaxprobe.test_grid import ENCODER, TRAIN, in_one_group, planted_parts

ROOT = Path(__file__).parents[2]
BLOCK = Block((0, 3, 7, 11, 14), (0, 1))  # five subsets: they come out even nowhere


@pytest.fixture(scope="module")
def alone():
    (trained,) = fit_blocks(
        [BLOCK], *in_one_group(planted_parts()), encoder=ENCODER, config=TRAIN
    )
    return trained


def check_same(found, trained):
    np.testing.assert_array_equal(found["members"], np.asarray(trained.members))
    np.testing.assert_array_equal(found["n_epochs"], trained.info.n_epochs)
    np.testing.assert_allclose(
        found["valid_auroc"], trained.info.valid_auroc, atol=2e-3
    )
    for i, leaf in enumerate(jax.tree.leaves(trained.params)):
        np.testing.assert_allclose(found[f"w{i}"], leaf, atol=2e-3)  # sums


def test_eight_devices_train_what_one_does(alone, tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.jaxprobe.mesh_worker",
            str(tmp_path / "out.npz"),
        ],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(tmp_path / "out.npz") as found:
        assert found["n_devices"] == 8
        check_same(found, alone)


def test_one_device_trains_blocks_one_by_one():
    blocks = [Block((0,), (0,)), Block((3,), (1,))]
    trained = list(
        fit_everywhere(
            blocks, *in_one_group(planted_parts()), encoder=ENCODER, config=TRAIN
        )
    )
    assert [t.members for t in trained] == [block.members for block in blocks]

import numpy as np
import pytest

from beatrice.extract.run.share import Share
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.families import N_SUBSETS, paper_dims
from beatrice.jaxprobe.grid import grid_members
from beatrice.jaxprobe.memory import Workload, step_flops
from beatrice.jaxprobe.train import EVERY_FAMILY, members_of_share

PAPER = Workload(
    encoder=EncoderConfig(),
    dims=paper_dims(hidden=4096, prob=5, resid=128, attn=512),
    spans=((1, 300), (1, 40), (1, 16)),
    batch_size=512,
    n_steps=1,
)
EVERY = range(N_SUBSETS)


def shares(world_size, subsets=EVERY):
    return [
        members_of_share(PAPER, subsets, Share(rank, world_size))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 15, 16, 48, 60])
def test_every_member_is_one_shares_in_the_order_of_the_grid(world_size):
    members = [member for share in shares(world_size) for member in share]
    assert sorted(members) == sorted(grid_members(3, 15))
    for share in shares(world_size):
        assert share == [member for member in grid_members(3, 15) if member in share]


@pytest.mark.parametrize(("world_size", "most"), [(2, 1.02), (4, 1.07), (8, 1.18)])
def test_no_process_has_much_more_to_do_than_the_mean(world_size, most):
    # With their control, which costs what its encoder does.
    pairs = zip(shares(world_size), shares(world_size, [EVERY_FAMILY]), strict=True)
    loads = [
        sum(step_flops(PAPER, m) for m in grid + control) for grid, control in pairs
    ]
    assert max(loads) < most * np.mean(loads)


def test_a_subsets_seeds_stay_together_while_there_are_subsets_enough():
    for share in shares(8):
        subsets = {member.subset for member in share}
        assert len(share) == 3 * len(subsets)

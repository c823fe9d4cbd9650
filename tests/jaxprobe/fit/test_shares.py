import numpy as np
import pytest

from jaxprobe.config import EncoderConfig
from jaxprobe.features.subsets import N_SUBSETS, FamilyDims
from jaxprobe.fit.grid import Block, Member, grid_members
from jaxprobe.fit.saved import cut
from jaxprobe.fit.shares import EVERY_FAMILY, shares_of
from jaxprobe.fit.work import Workload, step_flops

PAPER = Workload(
    encoder=EncoderConfig(),
    dims=FamilyDims(hidden=4096, prob=5, resid=128, attn=512),
    spans=((1, 300), (1, 40), (1, 16)),
    batch_size=512,
    n_steps=1,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 15, 16, 48, 60])
def test_every_member_and_every_control_is_one_workers(world_size):
    shares = shares_of(PAPER, world_size)
    assert len(shares) == world_size
    grid = [member for own, _ in shares for member in own]
    control = [member for _, own in shares for member in own]
    assert sorted(grid) == sorted(grid_members(3))
    assert sorted(control) == [Member(EVERY_FAMILY, seed) for seed in range(3)]


@pytest.mark.parametrize(("world_size", "most"), [(2, 1.02), (4, 1.07), (8, 1.18)])
def test_no_worker_has_much_more_to_do_than_the_mean(world_size, most):
    loads = [
        sum(step_flops(PAPER, member) for member in (*grid, *control))
        for grid, control in shares_of(PAPER, world_size)
    ]
    assert max(loads) < most * np.mean(loads)


def test_a_subsets_seeds_stay_together_while_there_are_subsets_enough():
    for grid, _ in shares_of(PAPER, 8):
        subsets = {member.subset for member in grid}
        assert len(grid) == 3 * len(subsets)


def test_a_cut_block_has_what_is_wanted_of_it_and_nothing_else():
    block = Block(tuple(range(N_SUBSETS)), (0, 1, 2))
    assert cut(block, block.members) == [block]
    assert cut(block, []) == []
    wanted = {*block.members} - {Member(4, 1), Member(7, 1), Member(9, 0)}
    parts = cut(block, wanted)
    assert sorted(m for part in parts for m in part.members) == sorted(wanted)
    assert len(parts) == 3

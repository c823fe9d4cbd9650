"""What memory allows, and that results do not depend on it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprobe.config import EncoderConfig, PlannedConfig, TrainConfig, row_choices
from jaxprobe.features.subsets import N_SUBSETS, FamilyDims, subset_index
from jaxprobe.fit.blocks import Block, Member, grid_members
from jaxprobe.fit.plan import (
    Foretold,
    Plan,
    Sizes,
    as_bytes,
    choose,
    compiled_bytes,
    rows_bytes,
)
from jaxprobe.kernels.random import RowKeys, hashed_bits, hashed_normal
from tests.jaxprobe.test_grid import TRAIN, planted_parts, train

SMALL = Sizes(
    encoder=EncoderConfig(projection=8, hidden=16, n_blocks=1, n_groups=2),
    dims=FamilyDims(hidden=1100, prob=5, resid=24, attn=40),
    train=TrainConfig(batch_size=256),
    widths=(9, 4),
    n_train=512,
    n_valid=256,
)


@pytest.fixture(scope="module")
def foretold():
    return Foretold.of(SMALL)


@pytest.mark.parametrize("n_rows", [4, 8, 16, 32, 48])
@pytest.mark.parametrize(("shape", "axis"), [((3, 48), -1), ((5, 48, 3), 1)])
def test_a_row_draws_the_same_in_every_microbatch(n_rows, shape, axis):
    keys = jax.random.split(jax.random.key(3), 3)  # of groups of 16 rows

    def group(key):
        own = tuple(16 if n == 48 else n for n in shape)
        return hashed_bits(key, 2, own, axis)

    whole = jnp.concatenate([group(key) for key in keys], axis=axis)
    parts = []
    for first in range(0, 48, n_rows):
        n = min(n_rows, 48 - first)
        key = keys[first // 16 :][: n // 16] if n >= 16 else keys[first // 16]
        own = tuple(n if size == 48 else size for size in shape)
        parts.append(hashed_bits(RowKeys(key, first % 16, 16), 2, own, axis))
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=axis), whole)
    other = hashed_normal(RowKeys(keys[:1], 0, 16), 2, (16,))
    assert not np.array_equal(other, hashed_normal(keys[1], 2, (16,)))


def test_members_are_the_same_whatever_the_block_and_the_microbatches():
    # Noise and dropout are on: draws do not depend on how a batch is parted. Sums of
    # float32 in another order, and Adam's division by a small second moment, drift
    # apart a little in three epochs (1e-5 of a weight here; rates are 1e-2 a step).
    parts, subsets = planted_parts(), (subset_index("R"), subset_index("HPRA"))
    own = dataclasses.replace(TRAIN, n_microbatches=2)  # groups of 32 draw together
    alone = [train([Block((k,), (s,))], parts, own)[0] for s in (0, 1) for k in subsets]
    for n_rows in (16, 32, 64):
        config = PlannedConfig(**dataclasses.asdict(own), n_rows=n_rows)
        together = train([Block(subsets, (0, 1))], parts, config)[0]
        for i, one in enumerate(alone):
            assert together.members[i] == one.members[0]
            for a, b in zip(
                jax.tree.leaves(together.params), jax.tree.leaves(one.params),
                strict=True,
            ):  # fmt: skip
                np.testing.assert_allclose(a[i], b[0], atol=2e-4)
    # The control: with other keys, results differ by far more.
    other = dataclasses.replace(TRAIN, n_microbatches=1)
    found = train([Block(subsets[:1], (0,))], parts, other)[0]
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), found.params, alone[0].params)
    assert max(jax.tree.leaves(gaps)) > 2e-3


def test_a_batch_is_parted_only_into_parts_of_what_draws_together():
    config = TrainConfig(batch_size=384)  # three groups of 128
    assert row_choices(config) == [384, 128, 64, 32, 16, 8, 4, 2, 1]
    with pytest.raises(ValueError, match="expected one of"):
        PlannedConfig(batch_size=384, n_rows=192)


def test_a_third_size_needs_what_was_foretold(foretold):
    for point in ((15, 1, 128), (8, 2, 64), (15, 2, 256)):
        needed = compiled_bytes(SMALL, *point)
        assert foretold.temporaries(*point) == pytest.approx(
            needed.temporaries, rel=0.1
        )
        assert foretold.total(*point) == pytest.approx(needed.total, rel=0.1)


@pytest.mark.parametrize("limit", [60, 120, 300, 1000])
def test_the_plan_is_the_largest_that_the_compiler_says_fits(limit):
    plan = choose(SMALL, limit << 20)
    assert plan.needed.total + plan.resident <= plan.limit == int(0.85 * (limit << 20))
    assert plan == choose(SMALL, limit << 20)
    bigger = {
        (15, n_seeds, n_rows)
        for n_seeds in (1, 2, 3)
        for n_rows in (64, 128, 256)
        if (n_seeds, n_rows) > (plan.n_seeds, plan.n_rows) or plan.n_subsets < 15
    }
    if bigger:
        least = min(bigger, key=lambda one: one)
        assert compiled_bytes(SMALL, *least).total + plan.resident > 0.95 * plan.limit


def test_without_an_accelerator_members_follow_one_another():
    plan = choose(SMALL)
    assert plan == Plan(n_subsets=1, n_seeds=1)
    assert plan.blocks(grid_members(3)) == tuple(
        Block((k,), (s,)) for s in range(3) for k in range(N_SUBSETS)
    )
    assert plan.config(SMALL.train) is SMALL.train


def test_blocks_hold_every_member_once_and_no_more_than_planned():
    members = [m for m in grid_members(3) if m != Member(4, 1)]  # one is done already
    blocks = Plan(n_subsets=8, n_seeds=2).blocks(members)
    assert sorted(m for b in blocks for m in b.members) == sorted(members)
    assert all(len(b.subsets) <= 8 and len(b.seeds) <= 2 for b in blocks)
    assert Block(tuple(range(8)), (0, 2)) in blocks


def test_what_does_not_fit_is_said_in_a_sentence():
    with pytest.raises(ValueError, match="rows that training holds .* --streamed"):
        choose(SMALL, rows_bytes(SMALL, 512))
    with pytest.raises(ValueError, match="one member's step on one row does not fit"):
        choose(SMALL, int(1.001 * rows_bytes(SMALL, 512) / 0.85))


@pytest.mark.parametrize(
    ("text", "n"), [("80GiB", 80 << 30), ("1.5 MiB", 3 << 19), ("7", 7), ("2k", 2048)]
)
def test_a_number_of_bytes_is_read(text, n):
    assert as_bytes(text) == n


@pytest.mark.parametrize("text", ["", "80 apples", "-1GiB", "0"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        as_bytes(text)


def test_a_plan_is_a_value_that_a_manifest_can_hold(foretold):
    plan = choose(SMALL, 300 << 20)
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["n_rows"] == plan.n_rows
    assert "side by side" in plan.in_words(SMALL.train)

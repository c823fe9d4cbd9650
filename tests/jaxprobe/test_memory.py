"""Plans fit into memory, and results do not depend on the plan."""

import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.extract.run.process import Share
from beatrice.jaxprobe import memory
from beatrice.jaxprobe.config import (
    EncoderConfig,
    GridConfig,
    StreamConfig,
    TrainConfig,
    as_bytes,
    row_choices,
    set_library_compiler,
)
from beatrice.jaxprobe.families import (
    FLOATS,
    N_SUBSETS,
    FamilyDims,
    paper_dims,
    subset_index,
)
from beatrice.jaxprobe.grid import Block, Member, grid_members
from beatrice.jaxprobe.random import RowKeys, hashed_bits, hashed_normal
from beatrice.jaxprobe.train import EVERY_FAMILY, epoch_groups, members_of_share
from tests.jaxprobe.samples import assert_same_leaves
from tests.jaxprobe.test_grid import TRAIN, planted_parts, train
from tests.pretended_gpu import PretendedGpu
from tests.process import run_python

# As wide as the paper's: plans are made without arrays, so width costs nothing.
PAPER_DIMS = paper_dims(hidden=4096, prob=5, resid=128, attn=512)
SIZES = memory.Sizes(
    encoder=EncoderConfig(n_blocks=1),
    dims=PAPER_DIMS,
    train=TrainConfig(),
    widths=(40, 16),
    n_train=2048,
    n_valid=512,
    valid_widths=(40, 16),
    device_dtypes=FLOATS,
)
TWO = {  # families, with fewer subsets and faster to compile
    "dims": FamilyDims(names=("a", "b"), sizes=(900, 5)),
    "device_dtypes": FLOATS[:2],
}


@pytest.mark.parametrize(
    ("n_rows", "shape", "axis"), [(8, (3, 48), -1), (16, (48,), 0), (32, (2, 48, 3), 1)]
)
def test_a_row_draws_the_same_numbers_in_every_microbatch(n_rows, shape, axis):
    keys = jax.random.split(jax.random.key(3), 3)  # one per group of 16 rows

    def group(key):
        sizes = tuple(16 if n == 48 else n for n in shape)
        return hashed_bits(key, 2, sizes, axis)

    whole = jnp.concatenate([group(key) for key in keys], axis=axis)
    parts = []
    for first in range(0, 48, n_rows):
        n = min(n_rows, 48 - first)
        key = keys[first // 16 :][: n // 16] if n >= 16 else keys[first // 16]
        sizes = tuple(n if size == 48 else size for size in shape)
        parts.append(hashed_bits(RowKeys(key, first % 16, 16), 2, sizes, axis))
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=axis), whole)
    other = hashed_normal(RowKeys(keys[:1], 0, 16), 2, (16,))
    assert not np.array_equal(other, hashed_normal(keys[1], 2, (16,)))


def test_members_do_not_depend_on_the_block_or_the_microbatches():
    # Noise and dropout are on: draws do not depend on how a batch is split. Results
    # drift apart a little in three epochs (1e-5 of a weight here; rates are 1e-2 a
    # step): float32 sums have another order, and Adam divides by a small second moment.
    parts, subsets = planted_parts(), (subset_index("R"), subset_index("HPRA"))
    config = dataclasses.replace(TRAIN, n_microbatches=2)  # 32 rows draw together
    alone = train([Block((k,), (s,)) for s in (0, 1) for k in subsets], parts, config)
    for n_rows in (16, 64):
        planned = memory.Plan(n_subsets=2, n_seeds=2, n_rows=n_rows).config(config)
        together = train([Block(subsets, (0, 1))], parts, planned)[0]
        for i, item in enumerate(alone):
            assert together.members[i] == item.members[0]
            aurocs = together.info.valid_auroc[i], item.info.valid_auroc[0]
            np.testing.assert_allclose(*aurocs, atol=2e-3)
            params = jax.tree.map(lambda x, i=i: x[i : i + 1], together.params)
            assert_same_leaves(params, item.params, atol=2e-4)


def test_a_cpu_block_is_half_a_seeds_subsets_and_several_devices_share_one():
    plan = memory.choose(SIZES)
    assert plan == memory.Plan(n_subsets=8, n_seeds=1)
    halves = tuple(range(8)), tuple(range(8, N_SUBSETS))
    assert set(plan.blocks(grid_members(3, 15))) == {
        Block(half, (s,)) for s in range(3) for half in halves
    }
    assert plan.config(SIZES.train) is SIZES.train
    plan = memory.choose(dataclasses.replace(SIZES, n_devices=4))
    assert plan == memory.Plan(n_subsets=4, n_seeds=3, n_devices=4)
    assert plan.blocks(grid_members(3, 15)) == (Block(tuple(range(15)), (0, 1, 2)),)


def test_blocks_hold_each_missing_member_once_and_are_no_larger_than_planned():
    # One member is already trained.
    members = [member for member in grid_members(3, 15) if member != Member(4, 1)]
    blocks = memory.Plan(n_subsets=8, n_seeds=2).blocks(members)
    assert sorted(m for b in blocks for m in b.members) == sorted(members)
    assert all(len(b.subsets) <= 8 and len(b.seeds) <= 2 for b in blocks)
    assert Block(tuple(range(8)), (0, 2)) in blocks


def test_memory_for_scoring_grows_with_the_widths_of_validation_rows():
    small = dataclasses.replace(SIZES, n_train=16, n_valid=16)
    wide = dataclasses.replace(small, valid_widths=(400, 160))
    narrow, wider = (
        memory.compiled_step(x, 1, 1, 4)[0].temporaries for x in (small, wide)
    )
    assert wider > 4 * narrow


def test_a_step_too_large_for_memory_gets_fewer_rows_and_then_fewer_members():
    train = TrainConfig(batch_size=128, n_microbatches=1, n_seeds=2)
    sizes = dataclasses.replace(SIZES, train=train, n_train=128, n_valid=64, **TWO)
    for before, after in (
        ((3, 2, 128), (3, 2, 64)),  # fewer rows would be too small a microbatch
        ((3, 2, 64), (3, 1, 64)),
    ):
        needed = memory.compiled_step(sizes, *before)[0].total
        for n_bytes, expected in ((needed + 9, before), (needed - 9, after)):
            plan = memory.choose(sizes, round(n_bytes / (1 - memory.KEPT_FREE)))
            assert (plan.n_subsets, plan.n_seeds, plan.n_rows) == expected
            assert plan.needed.total + plan.resident <= plan.limit


SMALLEST = dataclasses.replace(
    SIZES,
    encoder=EncoderConfig(n_blocks=1, dropout=0.0, input_noise=0.0),
    train=TrainConfig(batch_size=2, n_microbatches=1, n_seeds=1),
    widths=(4,),
    valid_widths=(4,),
    n_train=4,
    n_valid=4,
    **TWO,
)


def test_rows_or_a_smallest_step_that_do_not_fit_in_memory_are_refused():
    with pytest.raises(
        ValueError, match="training would hold .*StreamConfig.*streamed=true"
    ):
        memory.choose(SIZES, memory.rows_bytes(SIZES, 2048))
    rows = SIZES.resident + memory.rows_bytes(SIZES, 2048)
    with pytest.raises(ValueError, match="the host's .*streamed=true"):
        memory.check_rows(SIZES, host_memory=rows)
    memory.check_rows(SIZES, host_memory=2 * rows)
    streamed = dataclasses.replace(SIZES, is_streamed=True)
    with pytest.raises(ValueError, match="; train in smaller groups"):
        memory.check_rows(streamed, host_memory=rows)
    rows = memory.rows_bytes(SMALLEST, 4)
    with pytest.raises(ValueError, match="one member's step on one row does not fit"):
        memory.choose(SMALLEST, int((rows + 1000) / (1 - memory.KEPT_FREE)))


def test_a_streamed_plan_counts_the_members_that_wait_for_their_turn():
    alone = memory.compiled_step(SMALLEST, 1, 1, 2)[0]
    n_bytes = round((alone.total + 9) / (1 - memory.KEPT_FREE))
    assert memory.choose(SMALLEST, n_bytes).n_subsets == 1
    streamed = dataclasses.replace(SMALLEST, is_streamed=True)
    with pytest.raises(ValueError, match="rows and .* of other members; train with a"):
        memory.choose(streamed, n_bytes)
    others = 2 * alone.outputs
    plan = memory.choose(streamed, round(n_bytes + others / (1 - memory.KEPT_FREE)))
    assert plan.resident + plan.needed.total <= plan.limit
    n_waiting = 3 - plan.n_subsets
    assert plan.resident == plan.needed.outputs * n_waiting // plan.n_subsets


def test_a_plan_counts_two_groups_of_a_stream_or_all_groups_in_memory():
    dims, lengths = SIZES.dims, np.tile([40, 16], (5000, 1))
    lengths[4000:] = [96, 8]
    where = np.split(np.arange(5000), [4000])
    held = memory.Sizes.of(GridConfig(), dims, lengths, where, FLOATS)
    assert (held.n_train, held.n_valid) == (4000, 1000)
    assert (held.widths, held.valid_widths) == ((40, 16), (96, 8))
    assert held.resident == memory.rows_bytes(held, 1000, held.valid_widths)
    lengths[4000:] = [40, 16]
    config = GridConfig(stream=StreamConfig())
    streamed = memory.Sizes.of(config, dims, lengths, where, FLOATS)
    assert streamed.n_train == 2048
    assert streamed.resident == memory.rows_bytes(streamed, 2048)
    # A token is 4,741 float32, a row 56 tokens; in addition, its masks, label,
    # weight, question and offsets.
    assert memory.rows_bytes(held, 1) == 56 * 4741 * 4 + 56 + 3 * 4 + 15 * 4


def test_rows_of_two_settings_that_fit_one_by_one_may_not_fit_together():
    rows = memory.rows_bytes(SIZES, 2048)
    memory.check_rows(SIZES, host_memory=2 * rows)
    assert not memory.rows_fit_together([SIZES, SIZES], host_memory=2 * rows)
    assert memory.rows_fit_together([SIZES, SIZES], host_memory=3 * rows)


def test_a_group_of_many_short_rows_is_planned_at_its_size():
    lengths = np.tile([40, 16], (9000, 1))
    lengths[7488:8000] = [400, 16]
    where = np.split(np.arange(9000), [8000])
    sizes = memory.Sizes.of(GridConfig(), SIZES.dims, lengths, where, FLOATS)
    assert sizes.widths == (400, 16)
    long, *short = (512, (400, 16)), *((n, (40, 16)) for n in (4416, 1024, 2048, 1000))
    n_bytes = [memory.rows_bytes(sizes, *group) for group in (long, *short)]
    largest = memory.rows_bytes(sizes, sizes.n_train)
    assert largest == pytest.approx(max(n_bytes), rel=0.01) and largest > n_bytes[0]
    assert memory.all_rows_bytes(sizes) == sum(n_bytes)


@pytest.mark.parametrize("n_rows", [(100, 300), (2100, 130), (3000, 5000)])
def test_a_stream_is_planned_with_the_group_sizes_in_which_it_is_read(n_rows):
    lengths, stream = np.tile([40, 16], (sum(n_rows), 1)), StreamConfig()
    where = np.split(np.arange(sum(n_rows)), [n_rows[0]])
    config = GridConfig(stream=stream)
    sizes = memory.Sizes.of(config, SIZES.dims, lengths, where, FLOATS)
    groups = [epoch_groups(len(rows), stream, (0, 0)) for rows in where]
    assert [{len(group.where) for group in x} for x in groups] == [
        {sizes.n_train},
        {sizes.n_valid},
    ]
    largest = memory.rows_bytes(sizes, max(sizes.n_train, sizes.n_valid))
    assert sizes.resident + memory.rows_bytes(sizes, sizes.n_train) == 2 * largest


@pytest.mark.parametrize(("dtype", "token"), [("bfloat16", 8192), ("int8", 4096 + 4)])
def test_the_bytes_of_rows_are_counted_in_the_dtype_that_holds_them(dtype, token):
    sizes = dataclasses.replace(SIZES, device_dtypes=(dtype, *FLOATS[1:]))
    each = memory.rows_bytes(sizes, 2) - memory.rows_bytes(sizes, 1)
    assert each == 56 * (token + 645 * 4) + 56 + 3 * 4 + 15 * 4
    # In addition to the rows, the mean and deviation of every channel are held.
    assert memory.rows_bytes(sizes, 1) - each == 2 * 4 * 4096
    narrow, wide = (memory.compiled_step(x, 1, 1, 16)[0] for x in (sizes, SIZES))
    spared = memory.rows_bytes(SIZES, 2048) - memory.rows_bytes(sizes, 2048)
    assert wide.arguments - narrow.arguments == spared
    # One batch is widened, never all rows, though JAX 0.11 copies those it scores.
    widened, copied = 16 * 56 * 4096 * 4, sizes.n_valid * 56 * token
    assert narrow.temporaries < wide.temporaries + widened + copied
    assert widened + copied < sizes.n_valid * 56 * 4096 * 4


def test_a_number_of_bytes_is_parsed_and_anything_else_is_refused():
    read = {"80GiB": 80 << 30, "1.5 MiB": 3 << 19, "7": 7, "2k": 2048}
    assert {text: as_bytes(text) for text in read} == read
    for text in ("", "80 apples", "-1GiB", "0", "0.8"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            as_bytes(text)


def test_a_plan_splits_batches_into_whole_microbatches_or_parts_of_one():
    config = TrainConfig(batch_size=384)  # three groups of 128
    assert row_choices(config) == [384, 128, 64, 32, 16, 8, 4, 2, 1]
    assert {f.name for f in dataclasses.fields(TrainConfig)}.isdisjoint({"n_rows"})
    plan = memory.Plan(n_subsets=15, n_seeds=3, n_rows=64)
    assert plan.config(TrainConfig()).rows_at_once() == 64
    assert plan.config(TrainConfig()).microbatches() == 4  # draws stay per microbatch


COST = partial(memory.step_flops, EncoderConfig(), PAPER_DIMS, (300, 40, 16))
EVERY = grid_members(3, N_SUBSETS)


def shares(world_size, members=EVERY):
    ranks = (Share(rank, world_size) for rank in range(world_size))
    return [members_of_share(members, rank, COST) for rank in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 15, 16, 48, 60])
def test_every_member_is_in_one_share_and_shares_keep_the_grids_order(world_size):
    members = [member for share in shares(world_size) for member in share]
    assert sorted(members) == sorted(EVERY)
    for share in shares(world_size):
        assert share == [member for member in EVERY if member in share]
        if world_size < 16:  # enough subsets to keep their seeds together
            assert len(share) == 3 * len({member.subset for member in share})


@pytest.mark.parametrize(("world_size", "most"), [(2, 1.02), (4, 1.07), (8, 1.18)])
def test_no_process_has_much_more_work_than_the_mean(world_size, most):
    # Loads include the control's encoders, which cost as much as the grid's.
    control = [member for member in EVERY if member.subset == EVERY_FAMILY]
    pairs = zip(shares(world_size), shares(world_size, control), strict=True)
    loads = [sum(map(COST, [*g, *c])) for g, c in pairs]
    assert max(loads) < most * np.mean(loads)


def test_gpu_preallocation_is_off_unless_the_environment_sets_it():
    program = (
        "import os; from beatrice.jaxprobe.config import set_compiler\n"
        "set_compiler('paper'); print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    )
    assert run_python(program).stdout == "false\n"
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    assert run_python(program, **{name: "true"}).stdout == "true\n"


def test_a_plan_uses_only_the_gpu_memory_that_torchs_model_leaves_free():
    statistics = {"bytes_limit": 75 << 30, "pool_bytes": 3 << 30}
    with PretendedGpu():  # of 80 GiB, 70 are free
        assert memory.usable_bytes(statistics, 0) == 73 << 30
        small = {**statistics, "bytes_limit": 60 << 30}
        assert memory.usable_bytes(small, 0) == 60 << 30
    assert memory.usable_bytes(statistics, 0) == 75 << 30


def test_torch_returns_the_gpu_memory_that_it_keeps_before_jax_fits_a_probe():
    with PretendedGpu() as gpu:
        set_library_compiler()
    assert gpu.n_emptied == 1


@pytest.mark.parametrize(
    ("place", "expected"), [("free", "free/beatrice/compiled"), ("file/x", "None")]
)
def test_compiled_code_is_kept_only_in_a_cache_that_can_be_written(
    tmp_path, place, expected
):
    """Otherwise JAX would warn about each function that it compiles."""
    (tmp_path / "file").touch()
    program = (
        "import os; os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)\n"
        "import jax; from beatrice.jaxprobe.config import set_compiler\n"
        "set_compiler('paper'); print(jax.config.values['jax_compilation_cache_dir'])"
    )
    shown = run_python(program, XDG_CACHE_HOME=str(tmp_path / place)).stdout
    assert shown.removeprefix(f"{tmp_path}/") == f"{expected}\n"


def test_a_platform_that_is_missing_leaves_the_environment_as_it_was():
    program = (
        "import os; os.environ.pop('XLA_FLAGS', None)\n"
        "import jax; from beatrice.jaxprobe.config import set_library_compiler\n"
        "jax.config.update('jax_platforms', 'none')\n"
        "try: set_library_compiler()\n"
        "except RuntimeError: print({x for x in os.environ if x[:3] == 'XLA'})"
    )
    assert run_python(program).stdout == "set()\n"


def test_threads_setting_the_compiler_at_once_leave_the_environment_unchanged():
    before, interval = {**os.environ}, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: set_library_compiler(), range(20_000)))
    finally:
        sys.setswitchinterval(interval)
        left = {**os.environ}
        os.environ.clear()
        os.environ.update(before)
    assert left == before


@pytest.mark.parametrize(
    ("module", "work", "events"),
    [
        ("pgir.bm25", "_library()", "os.putenv os.unsetenv import"),
        ("benchmarks.baselines.judge", "judge([], [], [])", "os.putenv os.unsetenv"),
    ],
)
def test_gpu_preallocation_is_unset_again_in_a_users_program(module, work, events):
    program = (
        f"import sys\nfrom beatrice.{module} import {work.split('(')[0]}\n"
        "names = b'XLA_PYTHON_CLIENT_PREALLOCATE', 'bm25s'\n"
        "sys.addaudithook(lambda event, x: x and x[0] in names and print(event))\n"
        f"try: {work}\nexcept AttributeError: pass  # no signals are judged"
    )
    assert run_python(program).stdout.split() == events.split()

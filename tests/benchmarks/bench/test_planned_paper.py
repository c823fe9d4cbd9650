"""The paper's training on devices that are not here: its plans and lowered module."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from beatrice.benchmarks.bench.plan import (
    DEVICES,
    N_ROWS,
    WIDTHS,
    Product,
    Tensor,
    cuda_module,
    gathers_of_states,
    moved_activations,
    paper_sizes,
    planned,
    product_rows,
    read_module,
    work_of,
)
from beatrice.extract.datasets.splits import SplitConfig
from beatrice.jaxprobe.encoder import N_TAPS, N_WINDOW
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.memory import Plan, choose, compiled_step, step_flops

GIB = 1 << 30


plan_of = functools.cache(planned)  # planning traces and compiles a step


def of_one_block(sizes, **changes):
    """Return sizes of one block, and the module of a microbatch of 64 rows."""
    encoder = dataclasses.replace(sizes.encoder, n_blocks=1, **changes)
    sizes = dataclasses.replace(sizes, encoder=encoder)
    return sizes, cuda_module(sizes, Plan(n_subsets=15, n_seeds=1, n_rows=64))


def test_rows_are_the_papers_splits_with_context_in_two_wordings():
    splits, n_sets = SplitConfig(), 3
    n_train, n_valid = n_sets * splits.n_train, n_sets * splits.n_evaluation
    assert N_ROWS["closed_book"] == (n_train, n_valid)
    assert N_ROWS["with_context"] == (2 * n_train, 2 * n_valid)


@pytest.mark.parametrize(
    ("setting", "device", "gigabytes", "n_rows"),
    [
        ("closed_book", "h100", 80, 512),
        pytest.param("closed_book", "h200", 141, 512, marks=pytest.mark.slow),
        pytest.param("with_context", "h100", 80, 64, marks=pytest.mark.slow),
        pytest.param("with_context", "h200", 141, 128, marks=pytest.mark.slow),
    ],
)
def test_the_papers_compiled_training_fits_into_the_memory_that_jax_takes(
    setting, device, gigabytes, n_rows
):
    sizes, plan = plan_of(setting, DEVICES[device].memory)
    assert plan.limit == pytest.approx(0.85 * 0.75 * gigabytes * 1e9)
    assert plan.resident + plan.needed.total <= plan.limit
    assert (plan.n_subsets, plan.n_seeds, plan.n_rows) == (15, 3, n_rows)
    if n_rows < sizes.train.batch_size:  # twice as many do not fit
        needed, _ = compiled_step(sizes, 15, 3, 2 * n_rows)
        assert plan.resident + needed.total > plan.limit


def test_rows_with_context_held_in_memory_fit_no_device():
    whole = dataclasses.replace(paper_sizes("with_context"), n_train=60_000)
    with pytest.raises(ValueError, match="in smaller groups"):
        choose(whole, 141 * GIB)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_cuda_module_shares_states_and_multiplies_in_the_type_asked_for(is_mixed):
    sizes, module = of_one_block(paper_sizes("closed_book", is_mixed))
    n_positions = 64 * sum(WIDTHS["closed_book"])
    # Once forwards and once backwards, for all fifteen members of a microbatch.
    assert gathers_of_states(module, sizes) == {(n_positions, 4096): 2}
    # The gradient of each span's entry, which XLA folds into its product.
    assert moved_activations(module, sizes, 64) <= len(sizes.widths)
    large = [p for p in module.products if p.n_flops > 1e9]
    assert {p.result.dtype for p in large} == {"f32"}
    dtypes = {x.dtype for p in large for x in (p.left, p.right)}
    assert dtypes == {"bf16" if is_mixed else "f32"}
    # One of each family that is wider than its projection, and again backwards.
    assert module.libraries["cusolver_potrf_ffi"] <= 2 * 3


def test_the_module_multiplies_as_much_as_our_count_says():
    sizes, module = of_one_block(paper_sizes("closed_book"), input_noise=0.0)
    n_flops = sum(n * product.n_flops for product, n in module.products.items())
    alone = step_flops(sizes.encoder, sizes.dims, sizes.widths, Member(14, 0))
    # Both convolutions of a block, thrice, multiply the zeros of their windows too.
    hidden, n_zeros = sizes.encoder.hidden, N_WINDOW - N_TAPS
    alone += 3 * 2 * 2 * n_zeros * hidden**2 * sum(sizes.widths)
    # Side by side every member multiplies every family. Statistics of the groups are
    # small products that the count leaves out.
    assert n_flops == pytest.approx(15 * 64 * alone, rel=0.02)


def test_functions_that_are_called_twice_count_twice():
    # Only a product reads the second transpose, and takes it in either order.
    product = jax.jit(lambda x, y: jnp.transpose(jnp.transpose(x) + 1) @ y)
    shapes = (jnp.zeros((2, 3)), jnp.zeros((3, 4)))
    lowered = jax.jit(lambda x, y: product(x, y) + product(2 * x, y)).lower(*shapes)
    module = read_module(lowered.compiler_ir("stablehlo"))
    left, right, result = (Tensor(s, "f32") for s in ((2, 3), (3, 4), (2, 4)))
    assert module.products == {Product(left, right, result, 3): 2}
    assert next(iter(module.products)).n_flops == 2 * 2 * 4 * 3
    assert module.transposes == {Tensor((3, 2), "f32"): 2}


@pytest.mark.parametrize(
    "setting", ["closed_book", pytest.param("with_context", marks=pytest.mark.slow)]
)
def test_the_roofline_time_is_that_of_the_limiting_peak(setting):
    device = DEVICES["h100"]
    sizes, plan = plan_of(setting, device.memory)
    module = cuda_module(sizes, plan)
    timed = product_rows(setting, sizes, module, device)
    for row in timed:
        products, memory = row["GFLOP"] / 494.7, row["MB"] / 3350  # ms
        assert row["ms"] == pytest.approx(max(products, memory))
        assert (row["bound by"] == "memory") == (memory > products)
    work = work_of(setting, sizes, plan, timed, device)
    gflop = work["GFLOP a batch in products"]
    assert work["share of members' own families"] < 1
    assert gflop < work["XLA counts GFLOP"] < 1.1 * gflop
    assert work["roofline ms of a batch"] > gflop / 494.7

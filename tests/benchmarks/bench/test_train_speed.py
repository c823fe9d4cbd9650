import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import sys

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.flop_counter import FlopCounterMode

from beatrice.benchmarks.bench import select, train
from beatrice.benchmarks.bench.commands import N_THREADS, measure_fresh, preset_of
from beatrice.benchmarks.bench.grid import (
    WIDTHS,
    GridTrainer,
    Workload,
    machine,
    made_up_features,
    turn_flops,
    weights_file,
)
from beatrice.benchmarks.bench.torch_encoder import Stack, TorchData
from beatrice.jaxprobe.config import (
    GRID_PRESETS,
    EncoderConfig,
    FusionConfig,
    GridConfig,
    TrainConfig,
)
from beatrice.jaxprobe.families import paper_dims, subset_index
from beatrice.jaxprobe.grid import Member
from beatrice.selection.greedy import fit_sets
from tests.pretended_gpu import PretendedGpu

pytestmark = pytest.mark.usefixtures("threads_as_before")
TOY = Workload(
    config=GridConfig(
        encoder=EncoderConfig(projection=4, hidden=8, n_blocks=2, n_groups=2),
        train=TrainConfig(batch_size=8, n_seeds=1, learning_rate=1e-2),
    ),
    dims=paper_dims(hidden=6, prob=5, resid=4, attn=3),
    spans=((0, 5), (3, 7), (1, 4)),  # the first one is empty for some examples
    n_steps=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Initial weights of the toy encoders, of two seeds."""
    path = tmp_path_factory.mktemp("weights")
    members = [Member(*x) for x in itertools.product(range(15), (0, 1))]
    GridTrainer(TOY, members, at_once=1).save_weights(path)
    return path


def weights_of(folder, *names):
    """Initial weights of encoders of the first seed, by member."""
    members = [Member(subset_index(name), 0) for name in names]
    return {member: load_file(weights_file(folder, member)) for member in members}


@pytest.mark.parametrize("name", ["P", "HRA", "HPRA"])
def test_the_operations_of_a_step_are_those_that_pytorch_counts(folder, name):
    weights = weights_of(folder, name)
    alone = Stack(TOY.quiet(), weights, None)  # noise has products of its own
    data = TorchData.made_up(TOY, TOY.batch_size, seed=0)
    with FlopCounterMode(display=False) as counter:
        train.train_torch([alone], data, 1, TOY.batch_size)
    assert TOY.n_steps * counter.get_total_flops() == turn_flops(TOY, list(weights))


def faults_of_a_later_block(folder):
    """Return the page faults of 40 MiB that a process of PyTorch's has freed before."""
    train.TorchTrainer(TOY, TOY.members[:1], folder, "stack")
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _ = b"x" * (40 << 20)
        del _
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to")
def test_freed_blocks_of_pytorchs_process_are_kept(folder):
    n_faults = measure_fresh("its faults", faults_of_a_later_block, folder)
    assert n_faults < (40 << 20) // resource.getpagesize() // 16


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux's")
def test_the_machines_line_counts_the_cores_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        line = machine()
    finally:
        os.sched_setaffinity(0, allowed)
    assert f", 1 of {os.cpu_count()} cores of " in line


def test_members_are_split_whole_and_evenly():
    work = dataclasses.replace(
        TOY, dims=paper_dims(hidden=900, prob=5, resid=4, attn=2)
    )
    parts = train.split_members(work, [[m] for m in work.members], 2)
    assert sorted(m for members in parts for m in members) == work.members
    loads = [turn_flops(work, members) for members in parts]
    # Split by parity, one part would have all members that read the wide family.
    assert max(loads) < 1.2 * min(loads)


def test_made_up_spans_have_the_lengths_asked_for():
    features, labels = made_up_features(TOY, 400, seed=0)
    for (fewest, most), tokens, mask in zip(
        TOY.spans, features.tokens, features.masks, strict=True
    ):
        lengths = mask.sum(axis=1)
        assert (lengths.min(), lengths.max()) == (fewest, most)
        assert tokens.shape == (400, most, TOY.dims.total)
        assert not tokens[~mask].any() and tokens[mask].all()
    assert 0.4 < labels.mean() < 0.6


def test_noise_and_dropout_change_the_losses(folder):
    weights = weights_of(folder, "HPRA")
    data = TorchData.made_up(TOY, TOY.batch_size, seed=0)

    def loss(work):
        stacks = [Stack(work, weights, None)]
        ((first_loss,),) = train.train_torch(stacks, data, 1, TOY.batch_size).values()
        return first_loss

    for field in ("dropout", "input_noise"):
        difference = loss(TOY.quiet().with_encoder(**{field: 0.5})) - loss(TOY.quiet())
        assert abs(difference) > 1e-4, field


GRID = {(0, 0): [0.7, 0.6], (1, 0): [0.72, 0.65]}


@pytest.mark.parametrize(("method", "by"), [("loop", 1e-5), ("mixed", 0.01)])
def test_losses_may_differ_by_rounding_and_the_difference_is_reported(method, by):
    losses = {"grid": GRID, method: GRID | {(1, 0): [0.72, 0.65 + by]}}
    result = train.require_same_losses(losses)
    assert result["grid"] == 0.0 and result[method] == pytest.approx(by)


@pytest.mark.parametrize(
    ("method", "losses", "message"),
    [
        ("loop", GRID | {(0, 0): [0.7, 0.61]}, "'loop' differ.*cannot be compared"),
        ("loop", GRID | {(1, 0): [0.72, 0.66]}, "'loop' differ"),
        ("loop", GRID | {(0, 0): [0.7, np.nan]}, "'loop' differ"),
        ("loop", GRID | {(1, 0): [0.72, np.nan]}, "'loop' differ"),
        ("mixed", GRID | {(0, 0): [0.7, 0.66]}, "'mixed' differ"),
        ("loop", {(0, 0): [0.7, 0.6]}, "cannot be compared"),
    ],
)
def test_losses_that_differ_fail_the_benchmark(method, losses, message):
    with pytest.raises(ValueError, match=message):
        train.require_same_losses({"grid": GRID, method: losses})


def test_constant_losses_are_refused_as_a_comparison():
    still = {(0, 0): [0.7, 0.7]}
    with pytest.raises(ValueError, match="too little to compare"):
        train.require_same_losses({"grid": still, "loop": still})


def test_a_method_that_fails_says_why(tmp_path):
    with PretendedGpu():  # with which PyTorch's method is a single process
        started = train.Method("loop", TOY, TOY.members[:1], tmp_path)
    with contextlib.closing(started) as method:
        with pytest.raises(ValueError, match="'loop' has failed.*safetensors"):
            method.prepare()


def test_the_grid_and_pytorch_alone_and_stacked_take_the_same_steps(folder):
    work, subsets = TOY.quiet(), map(subset_index, ("P", "HA", "HPRA"))
    members = list(itertools.product(subsets, (0, 1)))
    results = {
        "grid": GridTrainer(TOY, members, at_once=2).losses(work, 3, n_microbatches=2)
    }
    for name in ("loop", "stack"):
        torch_side = train.TorchTrainer(TOY, members, folder, name)
        results[name] = torch_side.losses(work, 3, n_microbatches=2)
    differences = train.require_same_losses(results)
    assert max(differences.values()) < 1e-5
    assert len({round(x[-1], 4) for x in results["grid"].values()}) == len(members)
    # Steps from other weights are not the same.
    torch_side.folder = folder / "others"
    torch_side.folder.mkdir()
    others = [(subset, seed + 2) for subset, seed in members]
    GridTrainer(TOY, others, at_once=1).save_weights(torch_side.folder)
    for pair in zip(others, members, strict=True):
        other, member = (weights_file(torch_side.folder, x) for x in pair)
        other.rename(member)
    results["stack"] = torch_side.losses(work, 3, n_microbatches=2)
    with pytest.raises(ValueError, match="'stack' differ"):
        train.require_same_losses(results)


def test_pytorch_on_a_gpu_is_not_compared_with_jax_on_the_cpu():
    with PretendedGpu(), pytest.raises(ValueError, match="JAX on the cpu.*VISIBLE"):
        train.measure(TOY, n_rounds=1)


@pytest.mark.parametrize("widths", ["microworld", "paper"])
def test_widths_have_the_encoder_of_their_preset(widths):
    assert WIDTHS[widths].config == GRID_PRESETS[preset_of(widths)]


def test_rates_are_medians_of_turns_and_ratios_are_of_the_same_turn():
    seconds, products = np.array([[1, 2, 4], [3, 4, 6]]), np.array([8, 1, 2])
    grid, other = train.speeds_of(TOY, seconds, products)
    gflop = turn_flops(TOY, TOY.members) / 1e9
    assert grid["encoder-steps/s"] == TOY.n_steps * 15 / 2
    assert other["GFLOP/s"] == pytest.approx(gflop / 4)
    # Of 1/8, 1/2 and 1/8, and of 1/24, 1/4 and 1/12 of the operations.
    assert grid["share of the peak"] == pytest.approx(gflop / 8)
    assert other["share of the peak"] == pytest.approx(gflop / 12)
    assert grid["time over (a)'s"] == (1.0, 1.0, 1.0)
    assert other["time over (a)'s"] == (2.0, 1.5, 3.0)


@pytest.mark.slow
def test_the_benchmark_compares_and_times_all_methods():
    notes, work = [], TOY.with_encoder(n_blocks=1)  # compiles in less time
    work = dataclasses.replace(work, spans=TOY.spans[1:])
    rows = train.measure(work, n_rounds=1, note=notes.append)
    assert [row["method"] for row in rows] == list(train.KINDS.values())
    assert rows[0]["time over (a)'s"] == (1.0, 1.0, 1.0)
    assert rows[0]["largest loss difference"] == 0.0
    for row in rows:
        assert row["encoder-steps/s"] > 0 and row["peak MiB"] > 0
        assert row["device"] == "cpu"
        if row["method"] == train.KINDS["mixed"]:  # else single precision was timed
            assert row["largest loss difference"] > 1e-6
        else:
            assert row["largest loss difference"] < 1e-4
        share = row["GFLOP/s"] / row["peak, GFLOP/s"]
        assert row["share of the peak"] == pytest.approx(share)
    assert notes[-1] == "rounds: 1"


SMALL = select.SelectSizes(
    n_pool=4,
    n_seeds=1,
    n_train=300,
    n_valid=200,
    d_pooled=4,
    hidden=8,
    n_members=2,
    n_epochs=30,
    n_torch=2,
    n_turns=1,
)
SHAPE = FusionConfig(hidden=8)
PROTOCOL = TrainConfig(
    learning_rate=1e-2, max_epochs=2, batch_size=100, n_microbatches=1
)


def test_both_sides_of_the_benchmark_are_the_same_head():
    learned, valid = select.made_up_splits(SMALL)
    sets = [(0, 1), (1, 2, 3)]
    heads = fit_sets(sets, learned, valid, config=SHAPE, train_config=PROTOCOL)
    assert select.largest_difference(heads, sets, valid, SHAPE) < select.TOLERANCE
    moved = heads._replace(params=jax.tree.map(lambda x: x + 0.1, heads.params))
    # Weights of empty slots are moved as well, and must not count.
    assert select.largest_difference(moved, sets, valid, SHAPE) < select.TOLERANCE


def test_the_benchmark_measures_both_sides():
    result = select.measure("small", SMALL)
    assert result["heads/s"] > 0 and result["PyTorch loop, heads/s"] > 0
    assert (result["device"], result["threads of each"]) == ("cpu", N_THREADS)
    assert result["largest difference"] < select.TOLERANCE
    assert result["AUROC of heads"] == pytest.approx(result["of the loop"], abs=0.1)


def test_the_loop_has_its_outputs_in_numpy_before_it_is_timed():
    splits = select.loop_splits(SMALL)
    assert splits is select.loop_splits(SMALL)  # made once
    pairs = zip(splits, select.made_up_splits(SMALL), strict=True)
    for (pool, labels), outputs in pairs:
        assert type(pool) is type(labels) is np.ndarray
        np.testing.assert_array_equal(pool, outputs.outputs[0])
        np.testing.assert_array_equal(labels, outputs.labels)


def test_heads_do_not_depend_on_how_many_are_trained_at_once():
    splits, sets = select.made_up_splits(SMALL), [(0, 1), (0, 2), (1, 3)]
    fixed = {"config": SHAPE, "train_config": PROTOCOL}
    single, double = (
        fit_sets(sets, *splits, n_at_once=n, **fixed).params for n in (1, 2)
    )
    # Sums of batches of another size come in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, single, double)


def test_noise_after_the_projection_is_distributed_as_noise_at_the_inputs(folder):
    torch.manual_seed(0)
    weights = weights_of(folder, "H")  # six channels, of which a projection makes four
    stack = Stack(TOY.quiet().with_encoder(input_noise=0.5), weights, None)
    n = 20000
    data = TorchData(
        tokens=tuple(torch.zeros(2, n, d) for d in TOY.dims.sizes),
        real=torch.tensor([[1.0], [0.0]]).repeat(1, n),
        labels=torch.zeros(n),
    )
    with torch.no_grad():
        tokens, _, draws, _ = stack.inputs(data, torch.arange(n))
        y = stack.project(stack.weights, 0, tokens[0], draws)[0].view(-1, 2, n)
    (params,) = weights.values()
    bias = torch.tensor(params["projection_bias"][0])
    # Padding stays as it was.
    torch.testing.assert_close(y[:, 1], bias[:, None].expand(-1, n))
    kernel = torch.tensor(params["projection_0"])
    expected = 0.25 * kernel @ kernel.T
    # Deviation of a covariance of n draws: about its size times sqrt(2 / n) = 0.01.
    torch.testing.assert_close(torch.cov(y[:, 0]), expected, rtol=0.06, atol=0.06)

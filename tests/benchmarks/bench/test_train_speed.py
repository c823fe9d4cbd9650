import contextlib
import dataclasses

import pytest
from safetensors.numpy import load_file
from torch.utils.flop_counter import FlopCounterMode

from beatrice.benchmarks.bench.grid import Grid, made_up_features, weights_file
from beatrice.benchmarks.bench.torch_encoder import TorchData
from beatrice.benchmarks.bench.torch_stack import Stack
from beatrice.benchmarks.bench.train import (
    KINDS,
    CheckSize,
    Loop,
    Method,
    TorchTrainer,
    measure,
    require_same_losses,
    split_members,
    train_torch,
)
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.families import paper_dims, subset_index
from beatrice.jaxprobe.memory import (
    Workload,
    step_flops,
    turn_flops,
)

TOY = Workload(
    encoder=EncoderConfig(projection=3, hidden=4, n_blocks=1, n_groups=2),
    dims=paper_dims(hidden=6, prob=5, resid=4, attn=2),
    spans=((2, 5), (1, 3)),
    batch_size=8,
    n_steps=2,
    n_seeds=1,
    learning_rate=1e-2,
)
CHECK = CheckSize(n_examples=8, n_steps=3, n_seeds=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Initial weights of the toy encoders."""
    path = tmp_path_factory.mktemp("weights")
    Grid(TOY, TOY.members, at_once=1).save_weights(path)
    return path


def arrays_of(folder, member):
    return load_file(weights_file(folder, member))


def test_the_operations_of_a_step_are_those_counted_by_hand():
    # Families of 5 and 2 channels, projection 3, hidden 4, 5 + 3 positions.
    per_position = 2 * (2 * (5 + 2) * 3) + 3 * (2 * 2 * 3 * 4 + 2 * 2 * 3 * 4 * 4)
    # Two spans and their difference, each of twice the hidden width.
    mlp = 3 * (2 * 3 * 8 * 4 + 2 * 4)
    expected = 8 * ((5 + 3) * per_position + mlp)
    assert step_flops(TOY, (subset_index("PA"), 0)) == expected


@pytest.mark.parametrize("name", ["P", "HRA", "HPRA"])
def test_the_operations_of_a_step_are_those_that_pytorch_counts(folder, name):
    member = (subset_index(name), 0)
    weights = {member: arrays_of(folder, member)}
    loop = Loop(TOY.quiet(), weights, compiled=False)  # noise has products of its own
    data = TorchData.made_up(TOY, TOY.batch_size, seed=0)
    with FlopCounterMode(display=False) as counter:
        train_torch(loop, data, 1, TOY.batch_size)
    assert counter.get_total_flops() == step_flops(TOY, member)


def test_members_are_split_whole_and_evenly():
    work = dataclasses.replace(
        TOY, dims=paper_dims(hidden=900, prob=5, resid=4, attn=2)
    )
    parts = split_members(work, [[m] for m in work.members], 2)
    assert sorted(m for part in parts for m in part) == work.members
    loads = [turn_flops(work, part) for part in parts]
    # By parity of the subset one part would have all that read the wide family.
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


def test_stacked_members_train_as_alone(folder):
    work = TOY.quiet()
    names = ("P", "HA", "HPRA")
    members = [(subset_index(name), seed) for name in names for seed in (0, 1)]
    weights = {m: arrays_of(folder, (m[0], 0)) for m in members}
    for i, arrays in enumerate(weights.values()):  # otherwise seeds would be equal
        arrays["mlp_out/kernel"] = arrays["mlp_out/kernel"] * (1 + i)
    data = TorchData.made_up(work, work.n_examples, seed=0)
    alone, side = (
        train_torch(
            kind(work, weights, compiled=False), kind.arrange(data), 4, work.batch_size
        )
        for kind in (Loop, Stack)
    )
    assert set(side) == set(alone) == set(members)
    for member, losses in alone.items():
        assert side[member] == pytest.approx(losses, abs=1e-5), member
    assert len({round(losses[-1], 4) for losses in alone.values()}) == len(members)


def test_noise_and_dropout_change_the_losses_of_both(folder):
    member = (subset_index("HPRA"), 0)
    weights = {member: arrays_of(folder, member)}
    data = TorchData.made_up(TOY, TOY.batch_size, seed=0)
    for kind in (Loop, Stack):

        def loss(work, kind=kind):
            trainer = kind(work, weights, compiled=False)
            return train_torch(trainer, kind.arrange(data), 1, TOY.batch_size)

        for field in ("dropout", "input_noise"):
            still = dataclasses.replace(TOY.quiet().encoder, **{field: 0.5})
            loud = loss(dataclasses.replace(TOY, encoder=still))
            difference = loud[member][0] - loss(TOY.quiet())[member][0]
            assert abs(difference) > 1e-4, (kind, field)


def losses_of(change):
    grid = {(0, 0): [0.7, 0.6], (1, 0): [0.72, 0.65]}
    return {"grid": grid, "loop": change({m: list(x) for m, x in grid.items()})}


def test_equal_losses_pass_and_their_difference_is_told():
    def nearly(losses):
        losses[1, 0][1] += 1e-5
        return losses

    found = require_same_losses(losses_of(nearly))
    assert found["grid"] == 0.0 and found["loop"] == pytest.approx(1e-5)


def test_losses_that_differ_fail_the_benchmark_whichever_member_they_are_of():
    def off(by, member=(0, 0)):
        return lambda losses: {**losses, member: [losses[member][0], by]}

    for wrong in (0.61, float("nan")):
        for member in ((0, 0), (1, 0)):
            with pytest.raises(ValueError, match="'loop' differ.*compare two things"):
                require_same_losses(losses_of(off(wrong, member)))
    with pytest.raises(ValueError, match="cannot be compared"):
        require_same_losses(losses_of(lambda losses: {(0, 0): losses[0, 0]}))
    still = {"grid": {(0, 0): [0.7, 0.7]}, "loop": {(0, 0): [0.7, 0.7]}}
    with pytest.raises(ValueError, match="too little to compare"):
        require_same_losses(still)


def test_mixed_precision_may_differ_by_rounding_alone():
    def mixed(last):
        return {"grid": {(0, 0): [0.7, 0.6]}, "mixed": {(0, 0): [0.7, last]}}

    assert require_same_losses(mixed(0.61))["mixed"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="'mixed' differ"):
        require_same_losses(mixed(0.66))


def test_a_method_that_fails_says_why(tmp_path):
    method = Method("loop", TOY, TOY.members[:1], tmp_path)
    with contextlib.closing(method):
        with pytest.raises(ValueError, match="'loop' has failed.*safetensors"):
            method.prepare()


def test_the_grid_and_pytorch_take_the_same_steps(folder):
    work = TOY.quiet()
    members = [(subset_index("HA"), 0), (subset_index("HPRA"), 0)]
    found = {"grid": Grid(TOY, members, at_once=2).losses(work, 3, n_microbatches=2)}
    for name in ("loop", "stack"):
        torch_side = TorchTrainer(TOY, members, folder, name)
        found[name] = torch_side.losses(work, 3, n_microbatches=2)
    differences = require_same_losses(found)
    assert max(differences.values()) < 1e-5
    # The same from other weights is not.
    torch_side.folder = folder / "others"
    torch_side.folder.mkdir()
    Grid(TOY, [(s, 1) for s, _ in members], at_once=1).save_weights(torch_side.folder)
    for subset, _ in members:
        other = weights_file(torch_side.folder, (subset, 1))
        other.rename(weights_file(torch_side.folder, (subset, 0)))
    with pytest.raises(ValueError, match="'stack' differ"):
        require_same_losses(
            {**found, "stack": torch_side.losses(work, 3, n_microbatches=2)}
        )


@pytest.mark.slow
def test_the_benchmark_compares_and_times_all_of_them():
    notes = []
    rows = measure(TOY, n_rounds=1, check=CHECK, note=notes.append)
    assert [row.kind for row in rows] == list(KINDS)
    assert rows[0].ratio == 1.0 and rows[0].loss_difference == 0.0
    for row in rows:
        assert row.steps_per_second > 0 and row.peak_mib > 0
        if row.kind == "mixed":  # else single precision was timed
            assert row.loss_difference > 1e-6
        else:
            assert row.loss_difference < 1e-4
        assert row.peak_share == pytest.approx(row.gflops / row.peak_gflops)
    assert notes[-1] == "round 1 of 1"

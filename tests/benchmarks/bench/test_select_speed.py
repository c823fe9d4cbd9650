import jax
import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.select import (
    TOLERANCE,
    SelectSizes,
    fit_head,
    largest_difference,
    made_up_outputs,
    measure,
    rows_of_set,
)
from beatrice.jaxprobe.config import FusionConfig, TrainConfig
from beatrice.jaxprobe.fusion import head_inputs
from beatrice.selection.greedy import fit_sets

SMALL = SelectSizes(
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
    train, valid = (made_up_outputs(SMALL, n, seed) for n, seed in ((300, 1), (200, 2)))
    sets = [(0, 1), (1, 2, 3)]
    heads = fit_sets(sets, train, valid, config=SHAPE, train_config=PROTOCOL)
    assert largest_difference(heads, sets, valid, SHAPE) < TOLERANCE
    moved = heads._replace(params=jax.tree.map(lambda x: x + 0.1, heads.params))
    # Weights of empty slots are moved as well, and must not count.
    assert largest_difference(moved, sets, valid, SHAPE) < TOLERANCE


def test_the_torch_head_learns_what_can_be_learned_and_nothing_else():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    labels = rng.random(900) < 0.5
    logits = rng.standard_normal((2, 900)).astype(np.float32)
    pooled = rng.standard_normal((2, 900, 3)).astype(np.float32)
    aurocs = []
    for skill in (0.0, 2.0):
        rows = rows_of_set(
            np.asarray(head_inputs(pooled, logits + np.float32(skill) * labels))
        )
        y = torch.from_numpy(labels.astype(np.float32))
        train, valid = (rows[:600], y[:600]), (rows[600:], labels[600:])
        config = TrainConfig(learning_rate=3e-2, max_epochs=20, batch_size=100)
        aurocs.append(fit_head(train, valid, 2, SHAPE, config))
    # The best of up to 20 epochs on 300 rows (deviation 0.033) lies above a half.
    assert 0.4 < aurocs[0] < 0.65 < 0.9 < aurocs[1]


def test_the_benchmark_measures_both_sides():
    found = measure("small", SMALL)
    assert found.heads_per_second > 0 and found.torch_heads_per_second > 0
    assert found.largest_difference < TOLERANCE
    assert found.auroc == pytest.approx(found.torch_auroc, abs=0.1)

import numpy as np
import pytest

from selection.sweep import SweepConfig, sweep_layers


def states(n_examples, seed, layer=2):
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.4
    hidden = rng.standard_normal((n_examples, 5, 8)).astype(np.float32)
    hidden[:, layer, 3] += 1.5 * labels
    return 50 + 10 * hidden, labels


def test_sweep_finds_the_planted_layer_and_the_others_are_at_chance():
    config = SweepConfig(n_seeds=2)
    sweep = sweep_layers(*states(500, 0), *states(400, 1), config)
    assert sweep.best_layer == 2 and sweep.aurocs.shape == (5, 2)
    assert sweep.aurocs[2].min() > 0.8
    assert np.abs(np.delete(sweep.aurocs, 2, axis=0) - 0.5).max() < 0.12  # 4 s.e.


def test_sweep_refuses_one_class_and_other_widths():
    hidden, labels = states(50, 0)
    with pytest.raises(ValueError, match="one class"):
        sweep_layers(hidden, labels, hidden, np.ones(50, bool))
    with pytest.raises(ValueError, match="widths differ"):
        sweep_layers(hidden, labels, hidden[:, :3], labels)

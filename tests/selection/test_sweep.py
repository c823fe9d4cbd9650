import dataclasses

import numpy as np
import pytest

from beatrice.extract.store.spec import Family
from beatrice.selection.stages import PROBE, SweepSection
from beatrice.selection.sweep import choose_layer, sweep_layers, sweep_rows
from tests.jaxprobe.samples import rows_like, store_like


def states(n_examples, seed, layer=2):
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.4
    hidden = rng.standard_normal((n_examples, 5, 8)).astype(np.float32)
    hidden[:, layer, 3] += 1.5 * labels
    return 50 + 10 * hidden, labels


def test_sweep_finds_the_planted_layer_and_the_others_are_at_chance():
    config = dataclasses.replace(PROBE, n_seeds=2)
    aurocs = sweep_layers(*states(500, 0), *states(400, 1), config)
    assert aurocs.shape == (5, 2) and aurocs[2].min() > 0.8
    assert np.abs(np.delete(aurocs, 2, axis=0) - 0.5).max() < 0.12  # 4 s.e.
    small = [
        (1e-9 * (hidden - 50), y) for hidden, y in (states(500, 0), states(400, 1))
    ]
    small = sweep_layers(*small[0], *small[1], config)
    np.testing.assert_allclose(small, aurocs, atol=1e-3)  # units do not matter
    hidden, labels = states(50, 0)
    with pytest.raises(ValueError, match="one class"):
        sweep_layers(hidden, labels, hidden, np.ones(50, bool))


def several_sets():
    """Rows of three sets, one set after another, every question in two wordings."""
    sizes, rates = {"one": 600, "two": 300, "three": 100}, (0.4, 0.2, 0.9)
    ids, datasets, labels = [], [], []
    for (name, n), rate in zip(sizes.items(), rates, strict=True):
        ids += np.repeat([f"{name}-{i}" for i in range(n)], 2).tolist()
        datasets += [name] * 2 * n
        labels += np.repeat(np.arange(n) < rate * n, 2).tolist()
    variants = np.tile(["original", "rewritten"], len(ids) // 2)
    return rows_like(labels, ids=ids, datasets=datasets, variants=variants)


def test_the_rows_of_a_sweep_hold_every_dataset_and_both_labels_in_proportion():
    rows = several_sets()
    drawn = sweep_rows(rows, "train", 200, seed=0)
    assert len(drawn) == 200 and len(set(rows.ids[drawn])) == 200
    assert set(rows.variants[drawn]) == {"original"} and (np.diff(drawn) > 0).all()
    shares = {"one": (120, 48), "two": (60, 12), "three": (20, 18)}
    for name, (n, n_right) in shares.items():
        of_set = drawn[rows.datasets[drawn] == name]
        assert (len(of_set), rows.labels[of_set].sum()) == (n, n_right)
    again, other = (sweep_rows(rows, "train", 200, seed=s) for s in (0, 1))
    assert (again == drawn).all() and (other != drawn).any()
    everything = sweep_rows(rows, "train", 1000, seed=0)  # there are no more
    assert everything.tolist() == list(range(0, 2000, 2))


@pytest.mark.parametrize("is_rare_right", [True, False])
def test_a_class_that_is_rare_in_every_dataset_is_read_by_the_sweep(is_rare_right):
    n, limit = 6000, 1200
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(n)
        labels = (order < 6) == is_rare_right
        rows = rows_like(labels, datasets=[f"d{i % 3}" for i in range(n)])
        drawn = sweep_rows(rows, "train", limit, seed=0)
        assert len(drawn) == limit and len(set(labels[drawn])) == 2


def stored(setting, *loudness, n=400):
    """Answers of two tokens; `loudness` is how clearly each layer shows the label."""
    rng = np.random.default_rng(len(setting))
    labels = rng.random(n) < 0.5
    hidden = rng.standard_normal((2 * n, 3, 4)).astype(np.float32)
    hidden[..., 1] += np.outer(np.repeat(labels, 2), loudness).astype(np.float32)
    spans = np.tile([[0, 0], [0, 0], [0, 2]], (n, 1, 1))
    store = store_like(
        f"memory://sweep-{setting}",
        {"hidden": Family(shape=(3, 4), by_layer=True)},
        spans,
        {"hidden": hidden},
        keys=tuple((f"q{i}", setting, "original") for i in range(n)),
        hidden_layers=(0, 4, 8),
    )
    splits = np.where(np.arange(n) % 4, "train", "validation")
    return store, rows_like(labels, setting=setting, splits=splits)


def test_one_layer_is_chosen_for_all_settings_the_best_on_average():
    stores = {
        "closed_book": stored("closed_book", 3.0, 1.5, 0.0),
        "with_context": stored("with_context", 0.0, 1.5, 3.0),
    }
    probe = dataclasses.replace(PROBE, n_seeds=1)
    config = SweepSection(n_rows=150, probe=probe)
    done = []
    sweep = choose_layer(stores, config, lambda: done.append(1))
    assert sweep.layer == 4 and len(done) == 2
    curves = sweep.settings
    assert [curves[setting].best for setting in stores] == [0, 8]
    assert {(c.n_train, c.n_validation) for c in curves.values()} == {(150, 100)}
    only = choose_layer({"with_context": stores["with_context"]}, config)
    assert only.layer == 8 and only.settings == {"with_context": curves["with_context"]}

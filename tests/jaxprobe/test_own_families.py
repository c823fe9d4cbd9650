"""From a caller's arrays of three families to a detector, without a model or a run."""

import dataclasses

import jax
import numpy as np
import pytest

from beatrice.extract.store.families import Family
from beatrice.jaxprobe.calibrate import (
    FusedHead,
    Grid,
    calibrated,
    pool_of,
    score_store,
)
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    TrainConfig,
)
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.grid import Member
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import rows_of, training_set
from beatrice.jaxprobe.train import train_encoders
from beatrice.selection.greedy import fused_probability, select
from tests.jaxprobe.samples import assert_same_leaves, store_like
from tests.records import a_label, an_example

N, N_SEEDS = 300, 2
CONFIG = GridConfig(
    encoder=EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2),
    train=TrainConfig(learning_rate=1e-2, batch_size=32, max_epochs=6, n_seeds=N_SEEDS),
)
HEADS = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=3, n_seeds=N_SEEDS)


def answers(url, seed=0):
    """Answers alone, without a prompt; only the family `loud` knows what is right."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, N)
    is_right = rng.random(N) < 0.5
    spans = np.zeros((N, 3, 2), np.int64)
    spans[:, 2, 1] = lengths
    families = {
        "mute": Family(shape=(3,)),
        "loud": Family(shape=(2, 2)),
        "flat": Family(shape=(1,)),
    }
    values = {
        name: rng.standard_normal((lengths.sum(), *family.shape)).astype(np.float32)
        for name, family in families.items()
    }
    values["loud"][:, 1, 0] += 1.5 * np.repeat(is_right, lengths)
    store = store_like(url, families, spans, values)
    splits = ("train",) * 3 + ("validation", "test")
    examples = [
        an_example(id=f"q{i}", dataset="own", split=splits[i % 5]) for i in range(N)
    ]
    labels = [
        a_label(bool(right), example_id=f"q{i}") for i, right in enumerate(is_right)
    ]
    return store, rows_of(store, examples, labels)


@pytest.fixture(scope="module")
def trained():
    store, rows = answers("memory://own-families")
    data = training_set(store, rows, layer=None, n_batch=CONFIG.train.batch_size)
    return store, rows, data, train_encoders(data, CONFIG)


def test_every_subset_of_three_families_is_trained_with_every_seed(trained):
    *_, data, (grid, outputs) = trained
    assert data.dims.letters == "MLF" and data.dims.n_subsets == 7
    assert grid.members == tuple(Member(k, s) for s in range(N_SEEDS) for k in range(7))
    assert outputs.logits.shape == (7 * N_SEEDS, N)


def test_a_member_of_three_families_equals_its_solo_fit(trained):
    *_, data, (grid, outputs) = trained
    subset = data.dims.subset_index("LF")
    alone, solo = train_encoders(data, CONFIG, subsets=[subset])
    places = [grid.members.index(member) for member in alone.members]
    assert_same_leaves(jax.tree.map(lambda x: x[places], grid.params), alone.params)
    np.testing.assert_array_equal(outputs.logits[places], solo.logits)


def test_arrays_alone_make_a_detector_that_is_saved_and_scores(trained, tmp_path):
    store, rows, data, (grid, outputs) = trained
    pool = pool_of({"closed_book": outputs}, {"closed_book": rows}, "closed_book", 2)
    selection = select(
        pool.train,
        pool.valid,
        config=FusionConfig(hidden=8, n_slots=3),
        train_config=HEADS,
    )
    scores = fused_probability(selection, pool.all_rows, per_seed=True)
    detector = calibrated(
        {
            "closed_book": FusedHead(
                selection.members, selection.config, selection.params, scores
            )
        },
        {
            "closed_book": Grid(
                store=store,
                rows=rows,
                layer=None,
                trained=grid,
                standardizer=data.standardizer,
                config=CONFIG.encoder,
            )
        },
        precision=0.8,
    )
    assert any("L" in name for _, name in detector.heads["closed_book"].reads)
    detector.save(tmp_path / "probe")
    loaded = Detector.load(tmp_path / "probe")
    assert loaded.provenance is None
    stores = {"closed_book": store}
    output = score_store(loaded, "closed_book", stores, layer=None)
    np.testing.assert_allclose(output.raw, scores.mean(axis=0), atol=1e-5)
    test = rows.where("test")
    assert auroc(output.p_correct[test], rows.labels[test]).value > 0.85
    some = score_store(loaded, "closed_book", stores, layer=None, examples=test[::-1])
    np.testing.assert_allclose(some.p_correct, output.p_correct[test[::-1]], atol=1e-6)
    other = dataclasses.replace(
        loaded.banks["closed_book"],
        dims=dataclasses.replace(data.dims, names=("mute", "loud", "new")),
    )
    with pytest.raises(ValueError, match="was trained on"):
        score_store(
            dataclasses.replace(loaded, banks={"closed_book": other}),
            *("closed_book", stores),
            layer=None,
        )

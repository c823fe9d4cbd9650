import dataclasses
import threading

import jax
import numpy as np
import pytest

from beatrice.jaxprobe.config import StreamConfig, TrainConfig
from beatrice.jaxprobe.families import standardizer_of, subset_index
from beatrice.jaxprobe.grid import Block, fit_blocks, labelled
from beatrice.jaxprobe.tokens import split_families
from beatrice.jaxprobe.train import (
    Streamed,
    epoch_groups,
    fit_streamed,
    prefetched,
)
from tests.jaxprobe.samples import assert_same_leaves, identity_of
from tests.jaxprobe.test_grid import DIMS, ENCODER, planted

CONFIG = TrainConfig(learning_rate=1e-2, batch_size=16, max_epochs=3, patience=3)
IDENTITY = identity_of(DIMS)


def streamed(features, labels, config, counted=None):
    def read(where):
        if counted is not None:
            counted.append(where)
        return split_families(features.take(where), DIMS, IDENTITY)

    where = np.arange(features.n_examples)
    return Streamed(where=where, labels=labels, read=read, config=config)


@pytest.mark.parametrize(
    ("n", "n_chunk", "n_mixed"), [(96, 8, 4), (101, 8, 4), (5, 64, 2)]
)
def test_an_epoch_has_every_example_once_in_groups_of_one_length(n, n_chunk, n_mixed):
    config = StreamConfig(n_chunk=n_chunk, n_mixed=n_mixed)
    groups = epoch_groups(np.arange(n), config, (0, 1))
    real = np.concatenate([group.where[group.is_real] for group in groups])
    assert sorted(real.tolist()) == list(range(n))
    lengths = {len(group.where) for group in groups}
    assert len(lengths) == 1 and lengths.pop() <= n_chunk * n_mixed
    other = epoch_groups(np.arange(n), config, (0, 2))
    moved = any(
        not np.array_equal(a.where, b.where) for a, b in zip(groups, other, strict=True)
    )
    assert moved == (n > n_chunk)


def test_the_next_item_is_read_while_one_is_used_and_no_more():
    begun = [threading.Event() for _ in range(4)]

    def read(i):
        begun[i].set()
        return i

    for i in prefetched(read, range(4)):
        if i < 3:
            assert begun[i + 1].wait(timeout=60)
        if i < 2:
            assert not begun[i + 2].is_set()


def test_an_error_while_reading_ahead_is_raised():
    def read(i):
        if i == 1:
            raise ValueError("range 7 is damaged")
        return i

    seen = []
    with pytest.raises(ValueError, match="range 7"):
        for i in prefetched(read, range(3)):
            seen.append(i)
    assert seen == [0]


def test_statistics_of_parts_are_those_of_the_whole():
    features, _ = planted(300, 1, family=0)
    features.tokens[0][..., 3] = 1000.0 + 0.1 * features.tokens[0][..., 3]
    features.tokens[1][..., 3] = 1000.0
    for tokens in features.tokens:
        tokens[..., 4] = 7.0  # constant
    whole = standardizer_of([features])
    parts = (features.take(slice(i, i + 37)) for i in range(0, 300, 37))
    standardizer = standardizer_of(parts)
    np.testing.assert_allclose(standardizer.mean, whole.mean, rtol=1e-6)
    np.testing.assert_allclose(standardizer.std, whole.std, rtol=1e-6)
    assert standardizer.std[4] == 1.0
    with pytest.raises(ValueError, match="no span has a real token"):
        standardizer_of(iter([]))


def test_one_group_that_holds_everything_trains_as_the_resident_grid():
    blocks = [Block((subset_index(n),), (seed,)) for n, seed in (("P", 0), ("HA", 1))]
    data, valid = planted(64, 1, family=0), planted(48, 2, family=0)
    config = StreamConfig(n_chunk=16, n_mixed=4)
    result = fit_streamed(
        blocks,
        streamed(*data, config),
        streamed(*valid, config),
        encoder=ENCODER,
        config=CONFIG,
    )
    resident = [
        [labelled(split_families(features, DIMS, IDENTITY), labels)]
        for features, labels in (data, valid)
    ]
    parts = fit_blocks(blocks, *resident, encoder=ENCODER, config=CONFIG)
    for i, whole in enumerate(parts):
        losses = result.info.train_loss[i], whole.info.train_loss[0]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        aurocs = result.info.valid_auroc[i], whole.info.valid_auroc[0]
        np.testing.assert_allclose(*aurocs, atol=1e-6)
        alone = jax.tree.map(lambda x, i=i: x[i : i + 1], result.params)
        assert_same_leaves(alone, whole.params, rtol=1e-3, atol=1e-5)


def test_streaming_finds_what_is_planted_and_reads_each_epoch_once():
    config = StreamConfig(n_chunk=16, n_mixed=4)
    longer = dataclasses.replace(CONFIG, learning_rate=2e-2, max_epochs=6, patience=6)
    aurocs = {}
    for shift in (0.0, 2.0):
        counted = []
        train = streamed(*planted(256, 3, family=0, strength=shift), config, counted)
        valid = streamed(*planted(400, 4, family=0, strength=shift), config)
        blocks = [Block((subset_index("H"), subset_index("HPRA")), (0,))]
        result = fit_streamed(blocks, train, valid, encoder=ENCODER, config=longer)
        aurocs[shift] = result.info.best_auroc
        # Four groups an epoch whatever the number of encoders, and one sample.
        assert len(counted) == 1 + 4 * longer.max_epochs
        assert max(len(where) for where in counted) == 64
    assert (aurocs[2.0] > 0.85).all()
    # Deviation of a chance AUROC of 400 answers: 0.03; the best of six epochs.
    assert (np.abs(aurocs[0.0] - 0.5) < 0.12).all()

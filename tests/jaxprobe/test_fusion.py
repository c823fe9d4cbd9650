from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprobe.draws import words_of
from jaxprobe.fit import TrainConfig
from jaxprobe.fusion import (
    FusionConfig,
    FusionHead,
    PoolCodes,
    fit_heads,
    init_head,
    keep_encoders,
    row_mask,
    slot_rows,
    slots_of,
)

TRAIN = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=6)
N_SEEDS, N_POOL, D_POOLED = 2, 5, 6


def random_codes(n_examples, seed):
    """A pool in which encoder 2 knows the answer and the others do not."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.5
    shape = (N_SEEDS, N_POOL, n_examples)
    logits = rng.standard_normal(shape).astype(np.float32)
    logits[:, 2] += 2 * labels
    pooled = rng.standard_normal((*shape, D_POOLED)).astype(np.float32)
    pooled[..., 0] = logits
    ones = jnp.ones(n_examples)
    return PoolCodes(
        jnp.asarray(logits), jnp.asarray(pooled), jnp.asarray(labels, jnp.float32), ones
    )


CODES = random_codes(200, 0), random_codes(100, 1)


def train(sets, seeds, n_slots=4):
    slots = [slots_of(s, n_slots) for s in sets]
    return fit_heads(
        np.stack([s for s, _ in slots]),
        np.stack([m for _, m in slots]),
        np.asarray(seeds, np.int32),
        *CODES,
        head=FusionHead(FusionConfig(hidden=8, n_slots=n_slots)),
        config=TRAIN,
    )


def test_a_head_finds_the_encoder_that_knows():
    _, info = train([(2,), (0,), (0, 2)], [0, 0, 0])
    assert info.best_auroc[0] > 0.75 and info.best_auroc[2] > 0.7
    assert info.best_auroc[1] < 0.65  # 100 rows: s.e. 0.06


def test_a_head_depends_on_its_set_and_seed_only():
    params, info = train([(1, 2), (0,), (2, 1)], [1, 0, 1])
    _, alone = train([(0, 3), (2,), (1, 2)], [0, 0, 1])
    np.testing.assert_array_equal(info.valid_auroc[0], info.valid_auroc[2])
    np.testing.assert_array_equal(info.valid_auroc[0], alone.valid_auroc[2])
    assert not np.array_equal(
        info.valid_auroc[0], train([(1, 2)] * 3, [0] * 3)[1][0][0]
    )


def test_more_slots_change_nothing():
    _, few = train([(1, 2), (0,), (3,)], [1, 0, 0])
    _, many = train([(1, 2), (0,), (3,)], [1, 0, 0], n_slots=6)
    np.testing.assert_allclose(few.valid_auroc, many.valid_auroc, atol=2e-3)  # sums


def test_an_empty_set_trains_nothing():
    _, info = train([(), (), (1,)], [0, 0, 0])
    assert info.n_epochs.tolist()[:2] == [0, 0] and info.n_epochs[2] > 0


def test_encoder_dropout_hides_whole_encoders_but_never_all():
    mask = jnp.array([True, True, True, False])
    keep = np.asarray(keep_encoders(words_of(0), 20000, mask, 0.3))
    assert not keep[:, 3].any() and keep.any(axis=1).all()
    hidden = 0.3 - 0.3**3 / 3  # all three hidden: one of them, at random, stays
    np.testing.assert_allclose(1 - keep[:, :3].mean(axis=0), hidden, atol=0.015)
    alone = keep_encoders(words_of(1), 100, jnp.array([True, False]), 0.3)
    assert np.asarray(alone)[:, 0].all()


def test_dropout_acts_in_training_only():
    head = FusionHead(FusionConfig(hidden=8, n_slots=3))
    rows, mask = slot_rows(jnp.ones((3, 50, 4)), jnp.ones((3, 50))), jnp.ones(3, bool)
    params = init_head(head, words_of(0), rows, mask)
    still = head.apply(params, rows, mask)
    assert np.ptp(still) < 1e-6
    moved = head.apply(params, rows, mask, words_of(1))
    assert np.ptp(moved) > 1e-3


def test_empty_slots_have_no_influence():
    head = FusionHead(FusionConfig(hidden=8, n_slots=3))
    mask = jnp.array([True, True, False])
    pooled = jax.random.normal(jax.random.key(0), (3, 5, 4))
    logits = jax.random.normal(jax.random.key(1), (3, 5))
    rows, other = (
        slot_rows(pooled.at[2].add(moved), logits.at[2].add(moved))
        for moved in (0.0, 9.0)
    )
    params = jax.jit(partial(init_head, head))(words_of(0), rows, mask)
    params = jax.tree.map(lambda x: x + 0.1, params)
    np.testing.assert_array_equal(
        head.apply(params, rows, mask), head.apply(params, other, mask)
    )
    assert not np.array_equal(rows, other)


def test_a_pair_is_seen_only_with_both_its_slots():
    keep = jnp.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    seen = np.asarray(row_mask(keep, d_pooled=1))
    np.testing.assert_array_equal(seen[:, :6], np.repeat(keep, 2, axis=1))
    # Pairs in order: 0 and 1, 0 and 2, 1 and 2.
    np.testing.assert_array_equal(seen[:, 6:], [[1, 0, 0], [0, 0, 1], [0, 0, 0]])
    rows = np.asarray(slot_rows(jnp.zeros((3, 1, 1)), jnp.array([[0.0], [2.0], [4.0]])))
    p = 1 / (1 + np.exp(-np.array([0.0, 2.0, 4.0])))
    np.testing.assert_allclose(
        rows[0], [0, p[0], 0, p[1], 0, p[2], p[1] - p[0], p[2] - p[0], p[2] - p[1]],
        rtol=1e-6,
    )  # fmt: skip


def test_sets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cannot hold"):
        slots_of((0, 1, 2), 2)
    with pytest.raises(ValueError, match="cannot hold"):
        slots_of((1, 1), 4)

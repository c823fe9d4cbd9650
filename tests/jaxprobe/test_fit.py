import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxprobe.config import TrainConfig
from jaxprobe.fit.loop import Moments, adamw_step, fit
from jaxprobe.kernels.random import words_of
from jaxprobe.metrics import masked_auroc

RNG = np.random.default_rng(0)
ROWS = jnp.asarray(RNG.standard_normal((150, 3)), jnp.float32)
LABELS = jnp.asarray(RNG.random(150) < 1 / (1 + np.exp(-2 * ROWS[:, 0])), jnp.float32)


def logistic(config, seed=0, enabled=True, axes=()):
    """Fit a logistic regression through the shared protocol."""

    def loss(params, rows, shares, *_):
        logits = ROWS[rows] @ params["w"]
        return (optax.sigmoid_binary_cross_entropy(logits, LABELS[rows]) * shares).sum()

    def validate(params):
        return masked_auroc(ROWS @ params["w"], LABELS, jnp.ones(150))

    words = words_of(0, seed)
    return fit(
        {"w": jnp.array([-0.1, 0.2, 0.1])},
        loss,
        validate,
        weights=jnp.ones(150),
        batch_words=words,
        member_words=words,
        config=config,
        enabled=enabled,
        axes=axes,
    )


def test_training_stops_early_and_halves_the_rate():
    config = TrainConfig(
        batch_size=64, max_epochs=60, lr_patience=2, patience=5, learning_rate=0.1
    )
    params, info = jax.jit(lambda: logistic(config))()
    n_epochs, best = int(info.n_epochs), int(info.best_epoch)
    assert n_epochs < 60 and n_epochs == best + 1 + 5
    assert info.learning_rate <= 0.1 / 4 * 1.001  # halved twice since the best epoch
    assert np.isnan(info.valid_auroc[n_epochs:]).all()
    assert info.valid_auroc[best] == np.nanmax(info.valid_auroc) == info.best_auroc
    kept = masked_auroc(ROWS @ params["w"], LABELS, jnp.ones(150))
    assert float(kept) == pytest.approx(float(info.best_auroc), abs=1e-6)


def test_pieces_of_a_batch_add_up_to_its_gradient():
    one, four = (
        logistic(TrainConfig(batch_size=64, max_epochs=2, n_microbatches=n))[0]
        for n in (1, 4)
    )
    np.testing.assert_allclose(one["w"], four["w"], atol=1e-6)


def test_members_side_by_side_train_as_alone():
    config = TrainConfig(batch_size=64, max_epochs=30, patience=3, learning_rate=0.1)
    together = jax.vmap(
        lambda seed: logistic(config, seed, axes=("seeds",)), axis_name="seeds"
    )
    params, info = jax.jit(together)(jnp.arange(4))
    assert len(set(info.n_epochs.tolist())) > 1  # they stop at different epochs
    solo = jax.jit(lambda seed: logistic(config, seed))
    for seed in range(4):
        alone, alone_info = solo(seed)
        np.testing.assert_allclose(params["w"][seed], alone["w"], atol=1e-4)
        assert info.n_epochs[seed] == alone_info.n_epochs


def test_a_disabled_fit_trains_nothing():
    params, info = logistic(TrainConfig(), enabled=jnp.array(False))
    np.testing.assert_array_equal(params["w"], jnp.array([-0.1, 0.2, 0.1]))
    assert info.n_epochs == 0


def test_adamw_takes_the_steps_of_optax():
    with jax.numpy_dtype_promotion("standard"):
        params = jnp.array([1.0, -2.0, 3.0])
        tx = optax.adamw(1e-2, weight_decay=0.1)
        state, expected, ours = tx.init(params), params, params
        moments = Moments(jnp.zeros(3), jnp.zeros(3), jnp.int32(0))
        for i in range(5):
            grads = jnp.array([0.5, -1.0, 2.0]) * (i - 2)
            updates, state = tx.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
            ours, moments = adamw_step(ours, grads, moments, jnp.float32(1e-2), 0.1)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_configs_that_train_nothing_are_refused():
    with pytest.raises(ValueError, match="max_epochs"):
        TrainConfig(max_epochs=0)
    with pytest.raises(ValueError, match="equal parts"):
        TrainConfig(batch_size=100, n_microbatches=3)

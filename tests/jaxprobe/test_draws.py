import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

from beatrice.jaxprobe.config import TrainConfig
from beatrice.jaxprobe.grid import member_keys
from beatrice.jaxprobe.kernels.random import dropout, hashed_bits, hashed_normal

KEY = jax.random.key(7)


def test_hashed_draws_are_uniform_normal_and_independent_of_stream():
    bits = np.asarray(hashed_bits(KEY, 0, (100, 400)))
    unit = bits / 2**32
    assert unit.mean() == pytest.approx(0.5, abs=0.01)
    assert unit.var() == pytest.approx(1 / 12, rel=0.02)
    other = np.asarray(hashed_bits(KEY, 1, (100, 400))) / 2**32
    assert abs(np.corrcoef(unit.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(unit.ravel()[:-1], unit.ravel()[1:])[0, 1]) < 0.02
    normal = np.asarray(hashed_normal(KEY, 2, (100, 400)))
    assert normal.mean() == pytest.approx(0, abs=0.02)
    assert normal.var() == pytest.approx(1, rel=0.03)


def test_dropout_keeps_the_mean_and_is_off_outside_training():
    x = jnp.ones((200, 100))
    kept = dropout(x, 0.3, KEY, 0)
    assert float((kept == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_array_equal(dropout(x, 0.3, None, 0), x)


def test_hashed_draws_of_consecutive_steps_are_uniform_and_unrelated():
    keys = jax.random.split(KEY, 2000)
    draws = jax.vmap(lambda key: hashed_bits(key, 0, (64,)))(keys)
    steps = np.asarray(draws) / 2**32
    assert kstest(steps.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(steps[:-1].ravel(), steps[1:].ravel())[0, 1]) < 0.02


def test_members_of_a_seed_share_batches_and_nothing_else():
    def numbers(subset, seed):
        keys = member_keys(TrainConfig(), subset, seed)
        return [tuple(jax.random.key_data(key).tolist()) for key in keys]

    keys = {(k, seed): numbers(k, seed) for k in (0, 3) for seed in (0, 1)}
    assert keys[0, 0][0] == keys[3, 0][0] != keys[0, 1][0]
    assert len({key for own in keys.values() for key in own[1:]}) == 8

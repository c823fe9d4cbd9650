import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

from jaxprobe.kernels.random import (
    dropout,
    exact_normal,
    hashed_bits,
    hashed_normal,
    hashed_permutation,
    mix,
    words_of,
)


def test_hashed_draws_are_uniform_normal_and_independent_of_site():
    words = words_of(0)
    bits = np.asarray(hashed_bits(words, 0, (100, 400)))
    unit = bits / 2**32
    assert unit.mean() == pytest.approx(0.5, abs=0.01)
    assert unit.var() == pytest.approx(1 / 12, rel=0.02)
    other = np.asarray(hashed_bits(words, 1, (100, 400))) / 2**32
    assert abs(np.corrcoef(unit.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(unit.ravel()[:-1], unit.ravel()[1:])[0, 1]) < 0.02
    normal = np.asarray(hashed_normal(words, 2, (100, 400)))
    assert normal.mean() == pytest.approx(0, abs=0.02)
    assert normal.var() == pytest.approx(1, rel=0.03)


def test_dropout_keeps_the_mean_and_is_off_outside_training():
    x = jnp.ones((200, 100))
    words = words_of(1)
    kept = dropout(x, 0.3, words, 0)
    assert float((kept == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_array_equal(dropout(x, 0.3, None, 0), x)


def test_words_of_consecutive_steps_are_distinct_and_unrelated():
    words = np.asarray(jax.vmap(lambda step: mix(words_of(7), step))(jnp.arange(20000)))
    assert len({tuple(pair) for pair in words.tolist()}) == 20000
    for column in words.T / 2**32:
        assert kstest(column, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 0.03
    draws = jax.vmap(lambda step: hashed_bits(mix(words_of(7), step), 0, (64,)))
    steps = np.asarray(draws(jnp.arange(2000))) / 2**32
    assert abs(np.corrcoef(steps[:-1].ravel(), steps[1:].ravel())[0, 1]) < 0.02


def test_words_depend_on_every_number_and_on_their_order():
    pairs = [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1)]
    assert len({tuple(np.asarray(words_of(*p)).tolist()) for p in pairs}) == len(pairs)
    np.testing.assert_array_equal(words_of(3, 4), mix(words_of(3), 4))


def test_initial_weights_are_normal_and_rows_ignore_how_many_follow():
    drawn = np.asarray(exact_normal(words_of(5), 0, (300, 100)))
    assert kstest(drawn.ravel(), "norm").pvalue > 1e-3
    assert np.isfinite(drawn).all()
    fewer = exact_normal(words_of(5), 0, (10, 100))
    np.testing.assert_allclose(drawn[:10], fewer, rtol=1e-6)


def test_the_largest_bits_do_not_make_an_infinite_weight():
    words, place = words_of(109), 40718  # found by search: one word in 2**24
    bits = np.asarray(hashed_bits(words, 0, (50_000,)))
    assert bits[place] >> 8 == 2**24 - 1
    drawn = np.asarray(exact_normal(words, 0, (50_000,)))
    assert np.isfinite(drawn).all() and drawn.argmax() == place


def test_permutations_hold_every_row_once_and_put_it_anywhere():
    shuffle = jax.jit(jax.vmap(lambda step: hashed_permutation(words_of(step), 8)))
    orders = np.asarray(shuffle(jnp.arange(8000)))
    assert (np.sort(orders, axis=1) == np.arange(8)).all()
    places = np.array([(orders[:, place] == 0).mean() for place in range(8)])
    # Standard deviation of such a share: 0.0037.
    np.testing.assert_allclose(places, 1 / 8, atol=0.015)

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.config import TrainConfig
from beatrice.jaxprobe.fusion import slot_products
from beatrice.jaxprobe.heads import _head_keys, _Set

N_SLOTS, D, HIDDEN, N = 4, 5, 3, 6
MEMBERS, START, N_FILLED = jnp.array([6, 1, 3, 0]), 2, 3


def made():
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((N_SLOTS, D, HIDDEN)).astype(np.float32)
    pool = rng.standard_normal((7, D, 10)).astype(np.float32)
    keep = (rng.random((N_SLOTS, N)) < 0.7).astype(np.float32)
    return tuple(map(jnp.asarray, (kernel, pool, keep)))


def ours(kernel, pool, keep, n_filled=N_FILLED):
    counts = jnp.int32(START), keep, jnp.int32(n_filled)
    return slot_products(kernel, pool, MEMBERS, *counts)


def plain(kernel, pool, keep, n_filled=N_FILLED):
    outputs = pool[MEMBERS, :, START : START + N] * keep[:, None]
    return jnp.einsum("sdh,sdn->hn", kernel[:n_filled], outputs[:n_filled])


def test_products_are_those_of_one_product_over_the_filled_slots():
    for n_filled in range(N_SLOTS + 1):
        found = jax.jit(ours)(*made(), n_filled)
        np.testing.assert_allclose(found, plain(*made(), n_filled), atol=1e-5)


def test_the_gradient_is_that_of_one_product_and_zero_on_empty_slots():
    kernel, pool, keep = made()

    def loss(products):
        return lambda k: jnp.sin(products(k, pool, keep)).sum()

    found, expected = (jax.grad(loss(f))(kernel) for f in (ours, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not found[N_FILLED:].any() and found[:N_FILLED].any()


def test_products_of_stacked_pools_are_those_of_each():
    kernel, pool, keep = made()
    pools = np.stack([pool, -2 * pool])
    found = jax.vmap(lambda p: ours(kernel, p, keep))(pools)
    np.testing.assert_allclose(found[1], -2 * found[0], atol=1e-5)


def test_every_set_of_a_pool_has_keys_of_its_own_whatever_the_order_of_its_slots():
    def keys(members, n_pool):
        slots, mask = np.zeros(3, np.int32), np.arange(3) < len(members)
        slots[: len(members)] = members
        fused = _Set(jnp.asarray(slots), jnp.asarray(mask))
        data = jax.random.key_data(_head_keys(TrainConfig(), 0, fused, n_pool))
        return tuple(np.asarray(data).ravel().tolist())

    # A pool of more than 32, as five families in two passes make, needs two words.
    for n_pool, sets in ((30, [(1,), (29,), (1, 29)]), (62, [(1,), (33,), (1, 33)])):
        assert len({keys(members, n_pool) for members in sets}) == 3
        assert keys(sets[2][::-1], n_pool) == keys(sets[2], n_pool)
    assert keys((1, 3), 30) == keys((1, 3), 15)

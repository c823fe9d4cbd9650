"""The first layer of a fusion head: a product for every filled slot.

A head has more slots than its set has encoders, and trains on a slice of a pool that
all heads read. So the product goes slot by slot, over the filled ones alone, and takes
its rows where they lie: a slot's part of a batch stays in a core's cache between the
masking and the product, and an empty slot costs nothing.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def slot_products(
    kernel: jax.Array,
    pool: jax.Array,
    members: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    n_filled: jax.Array,
) -> jax.Array:
    """Sum over filled slots s of `kernel[s].T @ (pool[members[s]] * keep[s])`.

    Only `kernel` has a gradient: what a frozen encoder says does not change.

    Args:
      kernel: `[n_slots, d_said, hidden]`.
      pool: `[n_pool, d_said, n_all]`.
      members: `[n_slots]` int32 positions in the pool, filled slots first.
      start: int32, the first example; the batch is the `n_examples` from there.
      keep: `[n_slots, n_examples]` float32 factors.
      n_filled: int32, how many slots are filled.

    Returns:
      `[hidden, n_examples]`.
    """
    return _forward(kernel, pool, members, start, keep, n_filled)[0]


def _seen(pool, members, start, keep, slot) -> jax.Array:
    """One slot's part of the batch, `[d_said, n_examples]`."""
    at = (members[slot], 0, start)
    said = jax.lax.dynamic_slice(pool, at, (1, pool.shape[1], keep.shape[1]))[0]
    return said * keep[slot][None]


def _forward(kernel, pool, members, start, keep, n_filled):
    def add(slot, total):
        return total + kernel[slot].T @ _seen(pool, members, start, keep, slot)

    total = jnp.zeros((kernel.shape[2], keep.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, n_filled, add, total)
    return total, (kernel.shape[0], pool, members, start, keep, n_filled)


def _backward(residuals, dy):
    n_slots, pool, members, start, keep, n_filled = residuals

    def put(slot, found):
        own = _seen(pool, members, start, keep, slot) @ dy.T
        return jax.lax.dynamic_update_index_in_dim(found, own, slot, 0)

    found = jnp.zeros((n_slots, pool.shape[1], dy.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, n_filled, put, found), *[None] * 5


slot_products.defvjp(_forward, _backward)

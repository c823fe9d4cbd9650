"""Project a family of thousands of channels without copying it first.

At the paper's widths the hidden states of a batch are hundreds of megabytes. Gathered
and then multiplied they cross a CPU's memory four times a step, and a third of them is
padding. Here the real tokens alone are gathered, so few at a time that the product
finds them in the cache. Behind a closed gate no token is read.

An accelerator has no such cache, and memory fast enough to gather everything.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprobe.config import Products
from jaxprobe.kernels.products import contract, product


def rows_of_tokens(tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Where the tokens of some examples lie.

    Args:
      tokens: `[n_tokens, n_examples, d]`.
      rows: `[n]` int32, all of them among the examples.

    Returns:
      `[n_tokens, n]` int32, rows of `tokens` as one matrix.
    """
    n_tokens, n_examples, _ = tokens.shape
    return n_examples * jnp.arange(n_tokens, dtype=jnp.int32)[:, None] + rows[None]


def take_rows(tokens: jax.Array, at: jax.Array) -> jax.Array:
    """Take rows of `tokens` as one matrix: `[..., d]` for `at` of shape `[...]`."""
    matrix = tokens.reshape(-1, tokens.shape[-1])
    return matrix.at[at].get(mode="promise_in_bounds")


# Tokens at a time: at 4096 channels these are two megabytes.
_N_CHUNK = 128


class _Places(NamedTuple):
    """Where the real tokens of a batch are.

    Attributes:
      rows: `[n]` int32, every position's row among all tokens.
      order: `[n_padded]` int32, positions, the real ones first.
      rank: `[n]` int32, a real position's place in `order`.
      real: `[n]` bool.
      n_chunks: int32, chunks of `order` that hold a real one; 0 behind a closed gate.
    """

    rows: jax.Array
    order: jax.Array
    rank: jax.Array
    real: jax.Array
    n_chunks: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_product(
    products: Products,
    weight: jax.Array,
    tokens: jax.Array,
    rows: jax.Array,
    real: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    """Gather a batch and project it; zeros on padding, or where the gate is closed.

    Only `weight` has a gradient.

    Args:
      products: see `jaxprobe.kernels.products`.
      weight: `[d_projection, d_family]`.
      tokens: `[n_tokens, n_examples, d_family]`.
      rows: `[n_batch]` int32, all of them among the examples.
      real: `[n_tokens, n_batch]` bool, the batch's mask.
      gate: scalar bool.

    Returns:
      `[d_projection, n_tokens, n_batch]`.
    """
    return _forward(products, weight, tokens, rows, real, gate)[0]


def _forward(products, weight, tokens, rows, real, gate):
    """Forward rule of `wide_product`; the residuals are its own arguments."""
    given = weight, tokens, rows, real, gate
    y = jax.lax.platform_dependent(
        *given, cpu=partial(by_chunks, products), default=partial(at_once, products)
    )
    return y, given


def _backward(products, given, dy):
    """Backward rule: the tokens are gathered a second time, not kept."""
    d_weight = jax.lax.platform_dependent(
        dy,
        *given,
        cpu=partial(pull_by_chunks, products),
        default=partial(pull_at_once, products),
    )
    return d_weight, None, None, None, None


wide_product.defvjp(_forward, _backward)


def _places(tokens, rows, real, gate) -> _Places:
    """Sort the positions of a batch into real ones and padding."""
    real = real.reshape(-1)
    n_chunks = -(-real.size // _N_CHUNK)
    n_padded = n_chunks * _N_CHUNK
    rank = jnp.cumsum(real, dtype=jnp.int32) - 1
    positions = jnp.arange(real.size, dtype=jnp.int32)
    places = jnp.where(real, rank, n_padded)
    order = jnp.zeros(n_padded, jnp.int32).at[places].set(positions, mode="drop")
    n_filled = (real.sum(dtype=jnp.int32) + _N_CHUNK - 1) // _N_CHUNK
    n_filled = jnp.where(gate, n_filled, 0)
    at = rows_of_tokens(tokens, rows).reshape(-1)
    return _Places(at, order, rank, real, n_filled)


def _chunk(tokens, places: _Places, chunk) -> jax.Array:
    """One chunk's tokens, `[_N_CHUNK, d_family]`."""
    at = jax.lax.dynamic_slice(places.order, (chunk * _N_CHUNK,), (_N_CHUNK,))
    return take_rows(tokens, places.rows[at])


def by_chunks(products, weight, tokens, rows, real, gate):
    """`wide_product` where there is a cache."""
    places = _places(tokens, rows, real, gate)

    def put(chunk, found):
        y = contract(_chunk(tokens, places, chunk), weight, 1, products)
        return jax.lax.dynamic_update_slice(found, y, (chunk * _N_CHUNK, 0))

    found = jnp.zeros((len(places.order), len(weight)), jnp.float32)
    found = jax.lax.fori_loop(0, places.n_chunks, put, found)
    y = jnp.where(places.real[:, None], found[places.rank], 0.0)
    return y.T.reshape(-1, *real.shape)


def pull_by_chunks(products, dy, weight, tokens, rows, real, gate):
    """Gradient of `weight` where there is a cache."""
    places = _places(tokens, rows, real, gate)
    n_padded = len(places.order)
    turned = dy.reshape(len(weight), -1).T[places.order]
    filled = jnp.arange(n_padded) < places.real.sum()
    turned = jnp.where(filled[:, None], turned, 0.0)

    def add(chunk, total):
        at = (chunk * _N_CHUNK, 0)
        own = jax.lax.dynamic_slice(turned, at, (_N_CHUNK, len(weight)))
        return total + contract(own, _chunk(tokens, places, chunk), 0, products)

    return jax.lax.fori_loop(0, places.n_chunks, add, jnp.zeros_like(weight))


def _batch(tokens, rows) -> jax.Array:
    """All positions of a batch, `[n, d_family]`."""
    return take_rows(tokens, rows_of_tokens(tokens, rows).reshape(-1))


def at_once(products, weight, tokens, rows, real, gate):
    """`wide_product` where there is none."""

    def project():
        batch = _batch(tokens, rows)
        y = contract(weight, batch, 1, products).reshape(-1, *real.shape)
        return jnp.where(real[None], y, 0.0)

    return jax.lax.cond(
        gate, project, lambda: jnp.zeros((len(weight), *real.shape), jnp.float32)
    )


def pull_at_once(products, dy, weight, tokens, rows, real, gate):
    """Gradient of `weight` where there is none."""

    def pull():
        batch = _batch(tokens, rows)
        turned = jnp.where(real[None], dy, 0.0).reshape(len(weight), -1)
        return product(turned, batch, products)

    return jax.lax.cond(gate, pull, lambda: jnp.zeros_like(weight))

"""Gathering a batch of examples from tokens that lie before examples.

Gathered as rows of one matrix: along the middle axis XLA's CPU compiler lays the batch
out with examples outermost, and copies it twice a step to turn it.
"""

import jax
import jax.numpy as jnp


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

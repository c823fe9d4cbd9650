"""Tokens in the width in which they are stored, standardised as they are read.

Hidden states are most of what training holds, and lie on disk in bfloat16 or int8. In
float32 they would take two or four times as much of a device, and of the way there. A
batch of them is widened and standardised in the loop that gathers it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class StoredTokens(NamedTuple):
    """A family's tokens as they are stored; their values are standardised float32.

    Attributes:
      codes: `[n_tokens, n_examples, d_family]`, of the stored type; finite on padding.
      scales: `[n_tokens, n_examples]` float32, factors of int8 codes; otherwise None.
      mean: `[d_family]` float32.
      std: `[d_family]` float32.
      is_kept: `[n_tokens]` bool; values are zero where it is False. None keeps all.
    """

    codes: Any
    scales: Any
    mean: Any
    std: Any
    is_kept: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(n_tokens, n_examples, d_family)`."""
        return self.codes.shape

    def of_examples(
        self, change: Callable[..., Any], *others: "StoredTokens"
    ) -> "StoredTokens":
        """Change the arrays that have an axis of examples, along with others'."""
        scales = None
        if self.scales is not None:
            scales = change(self.scales, *(other.scales for other in others))
        codes = change(self.codes, *(other.codes for other in others))
        return self._replace(codes=codes, scales=scales)


def values_of(tokens: jax.Array | StoredTokens) -> jax.Array:
    """Return standardised values, `[n_tokens, n_examples, d_family]` float32."""
    if not isinstance(tokens, StoredTokens):
        return tokens
    kept = None if tokens.is_kept is None else tokens.is_kept[:, None]
    return _standardized(tokens, tokens.codes, tokens.scales, kept)


def take_rows(tokens: jax.Array | StoredTokens, at: jax.Array) -> jax.Array:
    """Take rows of tokens as one matrix.

    Args:
      tokens: `[n_tokens, n_examples, d_family]`.
      at: of any shape, see `rows_of_tokens`.

    Returns:
      Standardised values, `[*at.shape, d_family]` float32.
    """

    def take(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]).at[at].get(mode="promise_in_bounds")

    if not isinstance(tokens, StoredTokens):
        return take(tokens)
    scales = None if tokens.scales is None else take(tokens.scales)
    kept = None if tokens.is_kept is None else tokens.is_kept[at // tokens.shape[1]]
    return _standardized(tokens, moved(take, tokens.codes), scales, kept)


def moved(take: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `take(x)` where `take` does nothing but move values.

    Numbers of two bytes move as integers: a CPU's compiler widens an array of bfloat16,
    all of it, before it gathers from it.
    """
    if x.dtype.itemsize != 2:
        return take(x)
    words = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return jax.lax.bitcast_convert_type(take(words), x.dtype)


def rows_of_tokens(tokens: jax.Array | StoredTokens, rows: jax.Array) -> jax.Array:
    """Where the tokens of some examples lie.

    Args:
      tokens: `[n_tokens, n_examples, d]`.
      rows: `[n]` int32, all of them among the examples.

    Returns:
      `[n_tokens, n]` int32, rows of `tokens` as one matrix.
    """
    n_tokens, n_examples, _ = tokens.shape
    return n_examples * jnp.arange(n_tokens, dtype=jnp.int32)[:, None] + rows[None]


def _standardized(
    tokens: StoredTokens,
    codes: jax.Array,
    scales: jax.Array | None,
    kept: jax.Array | None,
) -> jax.Array:
    """Widen and standardise codes `[..., d_family]`."""
    axes = range(codes.ndim - 1)
    mean, std = (jnp.expand_dims(x, axes) for x in (tokens.mean, tokens.std))
    x = codes.astype(jnp.float32)
    if scales is not None:
        x = x * scales[..., None]
    x = (x - mean) * (1.0 / std)
    return x if kept is None else jnp.where(kept[..., None], x, 0.0)

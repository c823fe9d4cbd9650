"""Tokens in the width in which they are stored, and products in one or mixed precision.

Hidden states are most of what training holds, and lie on disk in bfloat16 or int8. In
float32 they would take two or four times as much of a device, and of the way there. A
batch of them is widened and standardised in the loop that gathers it.

Mixed products: operands are rounded to bfloat16, forwards and backwards, and what is
saved for the backward pass is the rounded copy (of a convolution's input its rounded
windows on an accelerator, and the input itself on a CPU); sums are float32, and so is
everything that is no product (weights, moments, normalisation, pooling, the loss).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from threadpoolctl import threadpool_limits

from beatrice.jaxprobe.config import MatmulDtype


class StoredTokens(NamedTuple):
    """A family's tokens as they are stored; their values are standardised float32."""

    # `[n_tokens, n_examples, d_family]`, of the stored type; finite on padding.
    codes: Any
    # `[n_tokens, n_examples]` float32, factors of int8 codes; otherwise None.
    scales: Any
    mean: Any  # `[d_family]` float32
    std: Any  # `[d_family]` float32
    # `[n_tokens]` bool; values are zero where it is False. None keeps all.
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
    is_kept = None if tokens.is_kept is None else tokens.is_kept[:, None]
    return _standardized(tokens, tokens.codes, tokens.scales, is_kept)


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
    is_kept = None if tokens.is_kept is None else tokens.is_kept[at // tokens.shape[1]]
    return _standardized(tokens, moved(take, tokens.codes), scales, is_kept)


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
    is_kept: jax.Array | None,
) -> jax.Array:
    """Widen and standardise codes `[..., d_family]`."""
    axes = range(codes.ndim - 1)
    mean, std = (jnp.expand_dims(x, axes) for x in (tokens.mean, tokens.std))
    x = codes.astype(jnp.float32)
    if scales is not None:
        x = x * scales[..., None]
    x = (x - mean) * (1.0 / std)
    return x if is_kept is None else jnp.where(is_kept[..., None], x, 0.0)


def product(a: jax.Array, b: jax.Array, matmul_dtype: MatmulDtype) -> jax.Array:
    """`a @ b`, float32.

    Args:
      a: `[m, k]` float32.
      b: `[k, n]` float32.
      matmul_dtype: type to which both are rounded. "float32" is not: but JAX's default
        on NVIDIA's GPUs is TF32, which keeps ten bits (`jax_default_matmul_precision`).
    """
    return a @ b if matmul_dtype == "float32" else _mixed(a, b)


def contract(
    a: jax.Array, b: jax.Array, axis: int, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Product of two matrices over the same axis of both; no gradient if mixed."""
    contraction = ((axis,), (axis,)), ((), ())
    rounded = a.astype(matmul_dtype), b.astype(matmul_dtype)
    dot = partial(jax.lax.dot_general, dimension_numbers=contraction)
    return dot(*rounded, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _mixed(a, b):
    """Product of rounded operands; autodiff would leave the incoming gradient wide."""
    return _mixed_forward(a, b)[0]


def _mixed_forward(a, b):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return _summed(a, b), (a, b)


def _mixed_backward(residuals, dy):
    a, b = residuals
    dy = dy.astype(jnp.bfloat16)
    return _summed(dy, b.T), _summed(a.T, dy)


_mixed.defvjp(_mixed_forward, _mixed_backward)


def _summed(a, b):
    """Sum in float32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def use_one_blas_thread() -> None:
    """Let linear algebra run in the thread that calls it, from now on.

    On a CPU, JAX hands a Cholesky factor and its triangular solves to SciPy's OpenBLAS,
    which spreads 64 x 64 numbers over every core and then lets its threads spin for
    some milliseconds: at the paper's widths a training step took 1.3 times as long.

    For the whole process, and not undone: several trainings may run side by side.
    Without effect where another living thread has set limits through `threadpoolctl`,
    and on accelerators, which factor on the device.
    """
    if jax.default_backend() != "cpu":
        return
    # The library that JAX will call: a limit reaches only what is loaded.
    import scipy.linalg  # noqa: F401

    threadpool_limits(1, user_api="blas")

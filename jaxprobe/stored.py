"""Tokens in the type in which they are stored, and float32 or mixed-precision products.

Hidden states are most of what training holds, and are stored in bfloat16 or int8. In
float32 they would take two or four times the device memory and transfer. A batch is
widened and standardised in the loop that gathers it.

Mixed products round their operands to bfloat16, forward and backward, and save the
rounded copy for the backward pass (for a convolution's input, its rounded windows on an
accelerator, and the input itself on a CPU). Sums are float32, and so is everything that
is not a product: weights, moments, normalisation, pooling and the loss.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

from beatrice.extract.store.spec import Dtype
from beatrice.jaxprobe.config import MatmulDtype


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "mean", "std", "is_kept"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTokens:
    """A family's tokens as they are stored; `values_of` standardises them.

    Numbers of two bytes are held as words, since they are moved before they are read:
    XLA's CPU compiler would widen a whole bfloat16 array before gathering from it, or
    copy all of it as words in every call.
    """

    # `[n_tokens, n_examples, d_family]`, int8, or uint16 words; finite on padding
    codes: Any
    dtype: Dtype  # the stored type: of the words, or int8
    scales: Any  # `[n_tokens, n_examples]` float32, factors of int8 codes; else None
    mean: Any  # `[d_family]` float32
    std: Any  # `[d_family]` float32
    is_kept: Any = None  # `[n_tokens]` bool, False: values are zero; None keeps all

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(n_tokens, n_examples, d_family)`."""
        return self.codes.shape

    def of_examples(
        self, change: Callable[..., Any], *others: "StoredTokens"
    ) -> "StoredTokens":
        """Apply `change` to each array of examples, with those of `others`."""
        scales = None
        if self.scales is not None:
            scales = change(self.scales, *(other.scales for other in others))
        codes = change(self.codes, *(other.codes for other in others))
        return dataclasses.replace(self, codes=codes, scales=scales)


def words_of(codes: np.ndarray) -> np.ndarray:
    """Return stored codes as `StoredTokens` holds them."""
    return codes.view(np.uint16) if codes.dtype.itemsize == 2 else codes


def values_of(tokens: jax.Array | StoredTokens) -> jax.Array:
    """Return the standardised values, `[n_tokens, n_examples, d_family]` float32."""
    if not isinstance(tokens, StoredTokens):
        return tokens
    is_kept = None if tokens.is_kept is None else tokens.is_kept[:, None]
    return _standardized(tokens, tokens.codes, tokens.scales, is_kept)


def take_rows(tokens: jax.Array | StoredTokens, at: jax.Array) -> jax.Array:
    """Take rows out of tokens that are seen as one matrix (see `rows_of_tokens`).

    Row numbers `at` have any shape; values are standardised, `[*at.shape, d_family]`.
    """

    def take(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]).at[at].get(mode="promise_in_bounds")

    if not isinstance(tokens, StoredTokens):
        return take(tokens)
    scales = None if tokens.scales is None else take(tokens.scales)
    is_kept = None if tokens.is_kept is None else tokens.is_kept[at // tokens.shape[1]]
    return _standardized(tokens, take(tokens.codes), scales, is_kept)


def rows_of_tokens(
    tokens: jax.Array | StoredTokens, rows: jax.Array | None
) -> jax.Array:
    """Return the rows of some examples' tokens in `tokens` seen as one matrix.

    `rows` `[n]` int32 are valid indices of examples; None takes all. The row numbers
    are `[n_tokens, n]` int32.
    """
    n_tokens, n_examples, _ = tokens.shape
    rows = jnp.arange(n_examples, dtype=jnp.int32) if rows is None else rows
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
    if tokens.dtype != "int8":
        codes = jax.lax.bitcast_convert_type(codes, tokens.dtype)
    x = codes.astype(jnp.float32)
    if scales is not None:
        x = x * scales[..., None]
    x = (x - mean) * (1.0 / std)
    return x if is_kept is None else jnp.where(is_kept[..., None], x, 0.0)


def product(a: jax.Array, b: jax.Array, matmul_dtype: MatmulDtype) -> jax.Array:
    """Return `a @ b` in float32, of float32 matrices.

    Both are rounded to `matmul_dtype`. "float32" does not round, but JAX's default on
    NVIDIA GPUs is TF32 of ten bits (`jax_default_matmul_precision`).
    """
    return a @ b if matmul_dtype == "float32" else _mixed(a, b)


def contract(
    a: jax.Array, b: jax.Array, axis: int, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Contract the same axis of two matrices; without a gradient if mixed."""
    contraction = ((axis,), (axis,)), ((), ())
    rounded = a.astype(matmul_dtype), b.astype(matmul_dtype)
    dot = partial(jax.lax.dot_general, dimension_numbers=contraction)
    return dot(*rounded, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _mixed(a, b):
    """Multiply rounded operands; autodiff would not round the incoming gradient."""
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
    """Multiply with sums in float32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def use_one_blas_thread() -> None:
    """Limit BLAS to the calling thread, for the rest of the process.

    On a CPU, JAX hands a Cholesky factor and its triangular solves to SciPy's OpenBLAS,
    which spreads 64 x 64 numbers over every core and then lets its threads spin for
    some milliseconds: at the paper's widths a training step took 1.3 times as long. A
    regression's last digits depend on the number of threads, and so would depend on
    what else the process has done.

    The limit is never undone, since several trainings may run side by side. It has no
    effect if another living thread has set limits through `threadpoolctl`, or on
    accelerators, which factor on the device.
    """
    if jax.default_backend() != "cpu":
        return
    # Load the library that JAX will call: limits apply only to loaded libraries.
    import scipy.linalg  # noqa: F401

    threadpool_limits(1, user_api="blas")

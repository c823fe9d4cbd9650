"""Matrix products of an encoder, in single or in mixed precision.

Mixed: operands are rounded to bfloat16, forwards and backwards, and what is kept for
the backward pass is the rounded copy; sums are float32, and so is everything that is no
product (weights, moments, normalisation, pooling, the loss).
"""

from functools import partial

import jax
import jax.numpy as jnp
from threadpoolctl import threadpool_limits

from jaxprobe.config import MatmulDtype


def product(a: jax.Array, b: jax.Array, matmul_dtype: MatmulDtype) -> jax.Array:
    """`a @ b`, float32.

    Args:
      a: `[m, k]` float32.
      b: `[k, n]` float32.
      matmul_dtype: type to which both are rounded.
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
    """Forward rule of `_mixed`."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return _summed(a, b), (a, b)


def _mixed_backward(kept, dy):
    """Backward rule of `_mixed`."""
    a, b = kept
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
    some milliseconds. These are the cores that the next products need: at the paper's
    widths a training step took 1.3 times as long.

    For the whole process, and not undone: several trainings may run side by side, and
    the first to end must not wake the threads for the others. Without effect where
    another living thread has set limits through `threadpoolctl`, and on accelerators,
    which factor on the device.
    """
    if jax.default_backend() != "cpu":
        return
    # The library that JAX will call: a limit reaches only what is loaded.
    import scipy.linalg  # noqa: F401

    threadpool_limits(1, user_api="blas")

"""Array functions of the encoder that know about padding.

Activations are `[d, n_span_tokens, n_examples]`: examples innermost. Masks, statistics
per example and shifts along the tokens then vary over outer axes only, so that every
element-wise loop runs over examples without a branch, and no convolution can carry one
example into the next. With channels innermost a training step took three times as long.
"""

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.config import MatmulDtype
from beatrice.jaxprobe.kernels.stored import product

N_TAPS = 3  # kernel size of the convolutions within a block


def channel_product(
    weight: jax.Array, x: jax.Array, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Map channels: `[d_out, d_in]` and `[d_in, ...]` to `[d_out, ...]`."""
    y = product(weight, x.reshape(x.shape[0], -1), matmul_dtype)
    return y.reshape(-1, *x.shape[1:])


def materialize(x: jax.Array, flag: jax.Array) -> jax.Array:
    """`x` itself, computed once and kept in memory.

    XLA's CPU compiler would otherwise compute everything before a shift three times,
    once per shifted copy. A branch that it cannot resolve is the one barrier that lasts
    until fusion.

    Args:
      x: any array.
      flag: scalar bool that is always True, but not to the compiler.
    """
    return jax.lax.cond(flag, lambda: x, lambda: jnp.zeros_like(x))


def _beside(x: jax.Array) -> jax.Array:
    """Tokens over their neighbours: `[d, n_tokens, n]` to `[3 * d, n_tokens * n]`."""
    edge = jnp.zeros((x.shape[0], 1, x.shape[2]), x.dtype)
    before = jnp.concatenate([edge, x[:, :-1]], axis=1)
    after = jnp.concatenate([x[:, 1:], edge], axis=1)
    return jnp.concatenate([before, x, after]).reshape(N_TAPS * x.shape[0], -1)


def _token_convolution(
    x: jax.Array, kernel: jax.Array, flag: jax.Array, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Convolution of kernel size 3 over tokens, as one matrix product.

    Its gradients are one product each as well: autodiff would pad and add instead.

    Args:
      x: `[d_in, n_span_tokens, n_examples]`, zero on padding.
      kernel: `[d_out, 3, d_in]`.
      flag: see `materialize`.
      matmul_dtype: see `jaxprobe.kernels.stored`.

    Returns:
      `[d_out, n_span_tokens, n_examples]`.
    """
    return _token_convolution_forward(x, kernel, flag, matmul_dtype)[0]


token_convolution = jax.custom_vjp(_token_convolution, nondiff_argnums=(3,))


def _token_convolution_forward(x, kernel, flag, matmul_dtype):
    x = materialize(x, flag)
    y = product(kernel.reshape(kernel.shape[0], -1), _beside(x), matmul_dtype)
    return y.reshape(-1, *x.shape[1:]), (x.astype(matmul_dtype), kernel, flag)


def _token_convolution_backward(matmul_dtype, residuals, dy):
    x, kernel, flag = residuals
    d_out, _, d_in = kernel.shape
    beside = _beside(materialize(dy, flag))
    flipped = kernel[:, ::-1].transpose(2, 1, 0).reshape(d_in, -1)
    d_x = product(flipped, beside, matmul_dtype).reshape(x.shape)
    d_kernel = product(beside, x.reshape(d_in, -1).T, matmul_dtype)
    d_kernel = d_kernel.reshape(N_TAPS, d_out, d_in)[::-1].transpose(1, 0, 2)
    return d_x, d_kernel, np.zeros((), jax.dtypes.float0)


token_convolution.defvjp(_token_convolution_forward, _token_convolution_backward)


def masked_group_norm(
    x: jax.Array, mask: jax.Array, n_groups: int, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """Group normalisation whose statistics see real tokens only.

    Args:
      x: `[d, n_span_tokens, n_examples]`, zero on padding.
      mask: `[n_span_tokens, n_examples]` float32.
      n_groups: divides `d`.
      scale: `[d]`.
      bias: `[d]`.

    Returns:
      `[d, n_span_tokens, n_examples]`, zero on padding.
    """
    d = x.shape[0]
    # Groups are summed and spread by small products, not by a reshape of `x`.
    members = jnp.asarray(np.kron(np.eye(n_groups), np.ones(d // n_groups)), x.dtype)
    count = jnp.maximum(mask.sum(axis=0), 1.0)[None] * (d // n_groups)
    mean = (members @ x.sum(axis=1)) / count
    square = (members @ jnp.square(x).sum(axis=1)) / count
    inv_std = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + 1e-5)
    spread = members.T * scale[:, None]
    gain = spread @ inv_std
    shift = bias[:, None] - spread @ (mean * inv_std)
    return (x * gain[:, None] + shift[:, None]) * mask[None]


def masked_pool(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Maximum and mean over the real tokens, one below the other; zeros if none is.

    Args:
      x: `[d, n_span_tokens, n_examples]`, zero on padding.
      mask: `[n_span_tokens, n_examples]` float32.

    Returns:
      `[2 * d, n_examples]`.
    """
    count = mask.sum(axis=0)[None]
    highest = jnp.where(mask[None] > 0, x, -jnp.inf).max(axis=1, initial=-1e30)
    highest = jnp.where(count > 0, highest, 0.0)
    mean = x.sum(axis=1) / jnp.maximum(count, 1.0)
    return jnp.concatenate([highest, mean])

"""Array functions of the encoder that know about padding and about gates.

They take a batch of examples, not one: under `vmap` a custom gradient would form one
weight gradient per example before summing them.
"""

import jax
import jax.numpy as jnp
import numpy as np

N_TAPS = 3  # kernel size of the convolutions within a block


@jax.custom_vjp
def gated_matmul(x: jax.Array, weight: jax.Array, gate: jax.Array) -> jax.Array:
    """`x @ weight` where the gate is open, zeros (and no work) where it is closed.

    Without a batch axis on `gate` this is a real branch, forwards and backwards; under
    `vmap` over gates it becomes a select with the same value.

    Args:
      x: `[..., d_in]`.
      weight: `[d_in, d_out]`.
      gate: scalar bool.

    Returns:
      `[..., d_out]`.
    """
    return _gated_forward(x, weight, gate)[0]


def _gated_forward(x, weight, gate):
    """Forward rule of `gated_matmul`; the residuals are its own arguments."""
    out_shape = (*x.shape[:-1], weight.shape[1])
    y = jax.lax.cond(gate, lambda: x @ weight, lambda: jnp.zeros(out_shape, x.dtype))
    return y, (x, weight, gate)


def _gated_backward(residuals, dy):
    """Backward rule of `gated_matmul`; an unused `dx` is dead code to the compiler."""
    x, weight, gate = residuals
    rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    d_weight = jax.lax.cond(
        gate, lambda: rows.T @ dy_rows, lambda: jnp.zeros_like(weight)
    )
    dx = jax.lax.cond(gate, lambda: dy @ weight.T, lambda: jnp.zeros_like(x))
    return dx, d_weight, np.zeros((), jax.dtypes.float0)


gated_matmul.defvjp(_gated_forward, _gated_backward)


def materialize(x: jax.Array, flag: jax.Array) -> jax.Array:
    """`x` itself, computed once and kept in memory.

    XLA's CPU compiler would otherwise compute everything before a shift three times,
    once per shifted copy, in a loop that it cannot vectorise (half of the forward
    pass). A branch that it cannot resolve is the one barrier that lasts until fusion.

    Args:
      x: any array.
      flag: scalar bool that is always True, but not to the compiler.
    """
    return jax.lax.cond(flag, lambda: x, lambda: jnp.zeros_like(x))


def _shifted(rows: jax.Array) -> jax.Array:
    """Rows beside their neighbours: `[n_rows, d]` to `[n_rows, 3 * d]`."""
    edge = jnp.zeros((1, rows.shape[1]), rows.dtype)
    before = jnp.concatenate([edge, rows[:-1]])
    after = jnp.concatenate([rows[1:], edge])
    return jnp.concatenate([before, rows, after], axis=-1)


@jax.custom_vjp
def row_convolution(rows: jax.Array, kernel: jax.Array, flag: jax.Array) -> jax.Array:
    """Convolution of kernel size 3 over rows, as one matrix product.

    Its gradients are one product each as well: autodiff would pad and add instead.

    Args:
      rows: `[n_rows, d_in]`; a row of zeros parts what must not meet.
      kernel: `[3, d_in, d_out]`.
      flag: see `materialize`.

    Returns:
      `[n_rows, d_out]`.
    """
    return _row_convolution_forward(rows, kernel, flag)[0]


def _row_convolution_forward(rows, kernel, flag):
    """Forward rule of `row_convolution`."""
    rows = materialize(rows, flag)
    return _shifted(rows) @ kernel.reshape(-1, kernel.shape[-1]), (rows, kernel, flag)


def _row_convolution_backward(residuals, dy):
    """Backward rule: the same convolution of `dy` with the kernel flipped."""
    rows, kernel, flag = residuals
    beside = _shifted(materialize(dy, flag))
    flipped = kernel[::-1].transpose(0, 2, 1)
    d_rows = beside @ flipped.reshape(-1, kernel.shape[1])
    d_kernel = (rows.T @ beside).reshape(kernel.shape[1], N_TAPS, -1)
    return (
        d_rows,
        d_kernel[:, ::-1].transpose(1, 0, 2),
        np.zeros((), jax.dtypes.float0),
    )


row_convolution.defvjp(_row_convolution_forward, _row_convolution_backward)


def masked_group_norm(
    x: jax.Array, mask: jax.Array, n_groups: int, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """Group normalisation whose statistics see real tokens only.

    Args:
      x: `[n_examples, n_span_tokens, d]`, zero on padding.
      mask: `[n_examples, n_span_tokens, 1]` float32.
      n_groups: divides `d`.
      scale: `[d]`.
      bias: `[d]`.

    Returns:
      `[n_examples, n_span_tokens, d]`, zero on padding.
    """
    d = x.shape[-1]
    # Groups are summed and spread by small products: a reshape to groups inside the
    # element-wise loops keeps XLA from vectorising them (3x slower on a CPU).
    spread = jnp.asarray(np.kron(np.eye(n_groups), np.ones(d // n_groups)), x.dtype)
    count = jnp.maximum(mask.sum(axis=1), 1.0) * (d // n_groups)
    mean = (x.sum(axis=1) @ spread.T) / count
    square = (jnp.square(x).sum(axis=1) @ spread.T) / count
    inv_std = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + 1e-5)
    scaled = spread * scale[None, :]
    gain = inv_std @ scaled
    shift = bias[None, :] - (mean * inv_std) @ scaled
    return (x * gain[:, None, :] + shift[:, None, :]) * mask


def masked_pool(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Maximum and mean over the real tokens, side by side; zeros for an empty span.

    Args:
      x: `[n_examples, n_span_tokens, d]`, zero on padding.
      mask: `[n_examples, n_span_tokens, 1]` float32.

    Returns:
      `[n_examples, 2 * d]`.
    """
    count = mask.sum(axis=1)
    highest = jnp.where(mask > 0, x, -jnp.inf).max(axis=1, initial=-1e30)
    highest = jnp.where(count > 0, highest, 0.0)
    mean = x.sum(axis=1) / jnp.maximum(count, 1.0)
    return jnp.concatenate([highest, mean], axis=-1)

"""What an encoder does with a family's tokens: gather a batch, add noise, project it.

None of the three is done for a family that is not read.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprobe.config import Products
from jaxprobe.kernels.products import product
from jaxprobe.kernels.random import hashed_normal
from jaxprobe.kernels.wide import rows_of_tokens, take_rows, wide_product

# Channels from which a batch is too large to be copied before it is projected.
_WIDE = 1024


class Draw(NamedTuple):
    """What training draws for one batch.

    Attributes:
      rows: `[batch_size]` int32, rows of the features that form the batch.
      noise: words of the input noise.
      dropout: words of the dropout.
    """

    rows: jax.Array
    noise: jax.Array
    dropout: jax.Array


def project(
    weight: jax.Array,
    tokens: jax.Array,
    real: jax.Array,
    gate: jax.Array,
    draw: Draw | None,
    *,
    deviation: float,
    site: int,
    products: Products,
) -> jax.Array:
    """Project a family's tokens, or zeros (and no work) where the gate is closed.

    Without a batch axis on `gate` this is a real branch, forwards and backwards; under
    `vmap` over gates it becomes a select with the same value.

    Args:
      weight: `[d_projection, d_family]`.
      tokens: `[n_tokens, n_examples, d_family]`.
      real: `[n_tokens, batch_size]` bool, the batch's mask.
      gate: scalar bool.
      draw: None outside training: all examples, no noise.
      deviation: standard deviation of the noise on each input channel.
      site: tells families apart in the noise.
      products: see `jaxprobe.kernels.products`; the noise is not rounded.

    Returns:
      `[d_projection, n_tokens, batch_size]`. Padding carries noise; mask it.
    """
    d_projection, d_family = weight.shape
    n_tokens, n_examples, _ = tokens.shape
    if d_family >= _WIDE:
        rows = jnp.arange(n_examples) if draw is None else draw.rows
        y = wide_product(products, weight, tokens, rows, real, gate)
        if draw is None or deviation == 0.0:
            return y
        noise = partial(_projected_noise, deviation, site, weight, y.shape, draw.noise)
        return y + _gated(noise, gate, y.shape)
    if draw is None:
        shape = (d_projection, n_tokens, n_examples)
        return _gated(lambda: _product(weight, tokens, products), gate, shape)
    before = d_family <= d_projection

    def gather():
        batch = take_rows(tokens, rows_of_tokens(tokens, draw.rows))
        if not before or deviation == 0.0:
            return batch
        return batch + deviation * hashed_normal(draw.noise, site, batch.shape)

    batch = _gated(gather, gate, (n_tokens, len(draw.rows), d_family))
    behind = 0.0 if before else deviation
    fixed = behind, site, products
    return _gated_product(*fixed, weight, batch, gate, draw.noise)


def _gated(
    compute: Callable[[], jax.Array], gate: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """`compute()` where the gate is open, zeros of the same shape elsewhere."""
    return jax.lax.cond(gate, compute, lambda: jnp.zeros(shape, jnp.float32))


def _product(weight: jax.Array, tokens: jax.Array, products: Products) -> jax.Array:
    """Contract the channels: `[n_tokens, n, d_family]` to `[d_projection, ...]`."""
    y = product(weight, tokens.reshape(-1, tokens.shape[-1]).T, products)
    return y.reshape(-1, *tokens.shape[:2])


def _projected_noise(deviation, site, weight, shape, words) -> jax.Array:
    """What Gaussian noise on every input channel adds to a product of that shape.

    Noise `n` on the input adds `Wn` to the projection, which is Gaussian of covariance
    `deviation**2 * WW'`. Drawn here, with the Cholesky factor of that covariance, it
    takes `d_projection` draws a token instead of `d_family` (64 instead of 4096 at the
    paper's widths). The distribution is the same, and so is the expected gradient,
    since the factor is differentiated too.
    """
    noise = hashed_normal(words, site, (shape[0], shape[1] * shape[2]))
    return (deviation * noise_factor(weight) @ noise).reshape(shape)


def _noisy_product(deviation, site, products, weight, batch, words) -> jax.Array:
    """`_product` of what would have Gaussian noise on every input channel."""
    y = _product(weight, batch, products)
    if deviation == 0.0:
        return y
    return y + _projected_noise(deviation, site, weight, y.shape, words)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gated_product(deviation, site, products, weight, batch, gate, words):
    """`_noisy_product` behind a gate; only `weight` has a gradient."""
    shape = (weight.shape[0], *batch.shape[:2])
    fixed = deviation, site, products
    compute = partial(_noisy_product, *fixed, weight, batch, words)
    return _gated(compute, gate, shape)


def _gated_product_forward(deviation, site, products, weight, batch, gate, words):
    """Forward rule of `_gated_product`; the residuals are its own arguments."""
    y = _gated_product(deviation, site, products, weight, batch, gate, words)
    return y, (weight, batch, gate, words)


def _gated_product_backward(deviation, site, products, residuals, dy):
    """Backward rule of `_gated_product`, a branch as well."""
    weight, batch, gate, words = residuals

    def pull():
        fixed = deviation, site, products
        compute = partial(_noisy_product, *fixed, batch=batch, words=words)
        return jax.vjp(compute, weight)[1](dy)[0]

    return _gated(pull, gate, weight.shape), None, None, None


_gated_product.defvjp(_gated_product_forward, _gated_product_backward)


def noise_factor(weight: jax.Array) -> jax.Array:
    """Lower triangular `L` with `L L' = WW'`, `[d_projection, d_projection]`."""
    gram = weight @ weight.T
    # Rounding may leave a projection that has died slightly indefinite.
    ridge = 1e-6 * jnp.trace(gram) / gram.shape[0] + 1e-12
    return jnp.linalg.cholesky(gram + ridge * jnp.eye(gram.shape[0], dtype=gram.dtype))

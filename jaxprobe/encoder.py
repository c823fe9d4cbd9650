"""A combination encoder: some of the signal families in, one logit out.

Paper, section 3.3 and appendix B. One module serves all fifteen subsets: a `[n_families]`
mask says which families are read, and weights start with the scale that an encoder of
those families alone would have.

Modules here take a batch of examples, not one: under `vmap` the custom gradient of
`gated_matmul` would form one weight gradient per example before summing them.
"""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxprobe.features import N_FAMILIES, FamilyDims, FamilyTokens

Params = Any
N_TAPS = 3  # kernel size of the convolutions within a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of a combination encoder; defaults give the paper's sizes at d=4096."""

    projection: int = 64  # width to which each family is projected
    hidden: int = 128
    n_blocks: int = 3
    n_groups: int = 8  # of the group normalisation
    dropout: float = 0.1
    input_noise: float = 0.05  # standard deviation, in units of a standardised channel

    def __post_init__(self):
        """Refuse widths that do not fit together."""
        if self.hidden % self.n_groups:
            raise ValueError(
                f"hidden width {self.hidden} is not a multiple of {self.n_groups} groups"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")

    @property
    def d_pooled(self) -> int:
        """Width of the pooled vector handed to the fusion head."""
        return 2 * self.hidden


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


def random_words(key: jax.Array) -> jax.Array:
    """Two uint32 words that seed the hashed draws of one training step."""
    return jax.random.bits(key, (2,), jnp.uint32)


def hashed_bits(words: jax.Array, site: int, shape: tuple[int, ...]) -> jax.Array:
    """Cheap counter-based random bits, for dropout and noise only.

    A keyed multiply-xorshift hash of the element's index (the finaliser of
    MurmurHash3). It fuses into the loop that uses it, where Threefry's rounds cost more
    than the convolution they regularise.

    Args:
      words: `[2]` uint32, from `random_words`.
      site: tells draws of the same step apart.
      shape: of the result.

    Returns:
      `shape` uint32.
    """
    index = jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    start = words[0] + jnp.uint32(site * 0x3C6EF372 % 2**32)
    step = words[1] ^ jnp.uint32(site * 0x1B873593 % 2**32)
    bits = (index + start) * jnp.uint32(0x9E3779B1)
    bits = ((bits ^ (bits >> 15)) + step) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def hashed_normal(words: jax.Array, site: int, shape: tuple[int, ...]) -> jax.Array:
    """Nearly normal float32 of mean 0 and variance 1: four random bytes, summed.

    As regularising noise it does what an exact normal does (kurtosis 2.7 instead of 3)
    at a sixth of the cost, which per token was a fifth of a training step.
    """
    bits = hashed_bits(words, site, shape)
    total = sum(((bits >> shift) & 0xFF for shift in (8, 16, 24)), bits & 0xFF)
    spread = np.sqrt(4 * (256**2 - 1) / 12)
    return (total.astype(jnp.float32) - 510.0) * np.float32(1 / spread)


def dropout(x: jax.Array, rate: float, words: jax.Array | None, site: int) -> jax.Array:
    """Zero elements with probability `rate` and rescale; the identity without words."""
    if words is None or rate == 0.0:
        return x
    keep = hashed_bits(words, site, x.shape) >= jnp.uint32(rate * 2**32)
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), 0.0)


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


def materialize(x: jax.Array, flag: jax.Array) -> jax.Array:
    """`x` itself, kept in memory once."""
    return jax.lax.cond(flag, lambda: x, lambda: jnp.zeros_like(x))


def _shifted(rows: jax.Array) -> jax.Array:
    """Rows beside their neighbours: `[n_rows, d]` to `[n_rows, 3 * d]`."""
    edge = jnp.zeros((1, rows.shape[1]), rows.dtype)
    before = jnp.concatenate([edge, rows[:-1]])
    after = jnp.concatenate([rows[1:], edge])
    return jnp.concatenate([before, rows, after], axis=-1)


@jax.custom_vjp
def row_convolution(rows: jax.Array, kernel: jax.Array, flag: jax.Array) -> jax.Array:
    """Convolution of kernel size 3 over rows, as one matrix product."""
    return _row_convolution_forward(rows, kernel, flag)[0]


def _row_convolution_forward(rows, kernel, flag):
    rows = materialize(rows, flag)
    return _shifted(rows) @ kernel.reshape(-1, kernel.shape[-1]), (rows, kernel, flag)


def _row_convolution_backward(residuals, dy):
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


def weight_deviation(key, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Standard deviation of a weight at the start, `1 / sqrt(fan-in)`; no draw yet."""
    return jnp.full(shape, np.prod(shape[:-1]) ** -0.5, dtype)


def _entry_deviation(key: jax.Array, config: EncoderConfig, family_mask: jax.Array):
    """The same for `[n_families * projection, hidden]`; 0 for families not read."""
    read = jnp.repeat(family_mask.astype(jnp.float32), config.projection)
    deviation = read * jax.lax.rsqrt(jnp.maximum(read.sum(), 1.0))
    return jnp.broadcast_to(deviation[:, None], (read.shape[0], config.hidden))


class MaskedConv(nn.Module):
    """Convolution of kernel size 3 over tokens.

    The examples are laid end to end and shifted as one long sequence, which costs no
    padding: the last position of each is padding, so zero, and parts the neighbours.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, flag: jax.Array) -> jax.Array:
        """Map `[n_examples, n_span_tokens, d_in]` to `features` channels.

        `x` is zero on padding, and its last position is padding in every example.
        """
        d_in = x.shape[-1]
        kernel = self.param("kernel", weight_deviation, (N_TAPS, d_in, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        rows = row_convolution(x.reshape(-1, d_in), kernel, flag) + bias[None]
        return rows.reshape(*x.shape[:-1], self.features)


class MaskedGroupNorm(nn.Module):
    """Learned scale and bias around `masked_group_norm`."""

    n_groups: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Normalise `[n_examples, n_span_tokens, d]` under `mask`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return masked_group_norm(x, mask, self.n_groups, scale, bias)


class SpanCNN(nn.Module):
    """Width-1 convolution, then residual blocks, then pooling, for one span."""

    config: EncoderConfig
    span: int

    @nn.compact
    def __call__(
        self,
        projected: list[jax.Array],
        mask: jax.Array,
        family_mask: jax.Array,
        words: jax.Array | None,
    ) -> jax.Array:
        """Encode one span.

        Args:
          projected: per family `[n_examples, n_span_tokens, projection]`, zero where
            the family is not read.
          mask: `[n_examples, n_span_tokens]` bool.
          family_mask: `[n_families]` bool.
          words: seed of the dropout; None outside training.

        Returns:
          `[n_examples, 2 * hidden]`.
        """
        cfg = self.config
        flag = family_mask.any()
        real = materialize(mask[..., None].astype(jnp.float32), flag)
        kernel = self.param("entry_kernel", _entry_deviation, cfg, family_mask)
        bias = self.param("entry_bias", nn.initializers.zeros, (cfg.hidden,))
        x = jnp.concatenate(projected, axis=-1) @ kernel + bias[None, None]
        x = x * real
        for block in range(cfg.n_blocks):
            site = self.span * cfg.n_blocks + block
            y = MaskedConv(cfg.hidden, name=f"conv_{block}_0")(x, flag) * real
            y = MaskedGroupNorm(cfg.n_groups, name=f"norm_{block}_0")(y, real)
            y = dropout(nn.gelu(y), cfg.dropout, words, site)
            y = MaskedConv(cfg.hidden, name=f"conv_{block}_1")(y, flag) * real
            y = MaskedGroupNorm(cfg.n_groups, name=f"norm_{block}_1")(y, real)
            x = nn.gelu(x + y)
        return masked_pool(x, real)


class Encoder(nn.Module):
    """All spans to one logit and one pooled vector (paper, appendix B)."""

    config: EncoderConfig
    dims: FamilyDims

    @nn.compact
    def __call__(
        self,
        features: FamilyTokens,
        family_mask: jax.Array,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Score a batch of answers.

        Args:
          features: standardised signals, families apart.
          family_mask: `[n_families]` bool, the subset that is read.
          key: PRNG key of dropout; None outside training.

        Returns:
          logits `[n_examples]`, and pooled vectors `[n_examples, 2 * hidden]`: those of
          the answer span, which carries nearly all of the signal (paper, appendix D).
        """
        cfg = self.config
        words = None if key is None else random_words(key)
        weights = [
            self.param(f"projection_{f}", weight_deviation, (size, cfg.projection))
            for f, size in enumerate(self.dims.sizes)
        ]
        biases = self.param(
            "projection_bias", nn.initializers.zeros, (N_FAMILIES, cfg.projection)
        )
        read = family_mask.astype(jnp.float32)
        vectors = []
        for span, mask in enumerate(features.masks):
            projected = [
                gated_matmul(tokens, weights[f], family_mask[f])
                + (biases[f] * read[f])[None, None]
                for f, tokens in enumerate(features.tokens[span])
            ]
            cnn = SpanCNN(cfg, span, name=f"span_{span}")
            vectors.append(cnn(projected, mask, family_mask, words))
        pairs = itertools.combinations(vectors, 2)
        x = jnp.concatenate([*vectors, *(a - b for a, b in pairs)], axis=-1)
        x = nn.Dense(cfg.hidden, kernel_init=weight_deviation, name="mlp_in")(x)
        x = nn.gelu(nn.LayerNorm(name="mlp_norm")(x))
        x = nn.Dense(1, kernel_init=weight_deviation, name="mlp_out")(x)
        return x[:, 0], vectors[-1]


def init_encoder(
    encoder: Encoder, key: jax.Array, features: FamilyTokens, family_mask: jax.Array
) -> Params:
    """Initial weights.

    The module's initialisers give each weight's standard deviation, and one draw gives
    all weights: some sixty generators took a quarter of the grid's compile time.

    Args:
      encoder: the module.
      key: PRNG key.
      features: any features of the right widths.
      family_mask: `[n_families]` bool.
    """
    few = jax.tree.map(lambda x: x[:1], features)
    paths, tree = jax.tree.flatten_with_path(encoder.init(key, few, family_mask))
    is_weight = [not path[-1].key.endswith(("bias", "scale")) for path, _ in paths]
    sizes = [
        leaf.size if drawn else 0
        for (_, leaf), drawn in zip(paths, is_weight, strict=True)
    ]
    draws = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    leaves = [
        leaf * draw.reshape(leaf.shape) if drawn else leaf
        for (_, leaf), draw, drawn in zip(paths, draws, is_weight, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)

"""A combination encoder: some of the signal families in, one logit out.

Paper, section 3.3 and appendix B. One module serves all fifteen subsets: a
`[n_families]` mask says which families are read, and weights start with the scale that
an encoder of those families alone would have.

Modules here take a batch of examples, not one; see `jaxprobe.masked` for the reason.
"""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxprobe.draws import draw_weights, dropout
from jaxprobe.features import N_FAMILIES, FamilyDims, FamilyTokens
from jaxprobe.masked import (
    N_TAPS,
    gated_matmul,
    masked_group_norm,
    masked_pool,
    materialize,
    row_convolution,
)

Params = Any


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
                f"hidden width {self.hidden} does not part into {self.n_groups} groups"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")

    @property
    def d_pooled(self) -> int:
        """Width of the pooled vector handed to the fusion head."""
        return 2 * self.hidden


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
        projected: jax.Array,
        mask: jax.Array,
        family_mask: jax.Array,
        words: jax.Array | None,
    ) -> jax.Array:
        """Encode one span.

        Args:
          projected: `[n_examples, n_span_tokens, n_families * projection]`, zero where
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
        x = projected @ kernel + bias[None, None]
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
        words: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Score a batch of answers.

        Args:
          features: standardised signals, families apart.
          family_mask: `[n_families]` bool, the subset that is read.
          words: of dropout's draws; None outside training.

        Returns:
          logits `[n_examples]`, and pooled vectors `[n_examples, 2 * hidden]`: those of
          the answer span, which carries nearly all of the signal (paper, appendix D).
        """
        cfg = self.config
        weights = [
            self.param(f"projection_{f}", weight_deviation, (size, cfg.projection))
            for f, size in enumerate(self.dims.sizes)
        ]
        biases = self.param(
            "projection_bias", nn.initializers.zeros, (N_FAMILIES, cfg.projection)
        )
        read = family_mask.astype(jnp.float32)
        projected = [
            gated_matmul(tokens, weights[f], family_mask[f])
            for f, tokens in enumerate(features.tokens)
        ]
        bias = (biases * read[:, None]).reshape(-1)
        rows = jnp.concatenate(projected, axis=-1) + bias[None, None]
        vectors = []
        for span, mask in enumerate(features.masks):
            cnn = SpanCNN(cfg, span, name=f"span_{span}")
            tokens = rows[:, features.span_slices[span]]
            vectors.append(cnn(tokens, mask, family_mask, words))
        pairs = itertools.combinations(vectors, 2)
        x = jnp.concatenate([*vectors, *(a - b for a, b in pairs)], axis=-1)
        x = nn.Dense(cfg.hidden, kernel_init=weight_deviation, name="mlp_in")(x)
        x = nn.gelu(nn.LayerNorm(name="mlp_norm")(x))
        x = nn.Dense(1, kernel_init=weight_deviation, name="mlp_out")(x)
        return x[:, 0], vectors[-1]


def init_encoder(
    encoder: Encoder, words: jax.Array, features: FamilyTokens, family_mask: jax.Array
) -> Params:
    """Initial weights; the module's initialisers give their standard deviations.

    Args:
      encoder: the module.
      words: of the draw, see `jaxprobe.draws`.
      features: any features of the right widths.
      family_mask: `[n_families]` bool.
    """
    few = jax.tree.map(lambda x: x[:1], features)
    # The key is for Flax only: no initialiser draws from it.
    deviations = encoder.init(jax.random.key(0), few, family_mask)
    return draw_weights(deviations, words)

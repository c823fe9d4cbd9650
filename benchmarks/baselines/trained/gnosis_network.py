"""The network of Gnosis: two streams, one of maps and one of states, and a gate.

The parts, and how they are joined, are those of Amirhosein-gh98/Gnosis f8ff11d
(models/qwen3: `AttnFeatureExtractorLite_D3` on statistics, `HiddenFeatureExtractorLite`
and `CorrectnessHeadLite`); of the paper (arXiv 2512.20578) the abstract alone could be
read.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

_N_GROUPS = 8
_N_HEADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnosisConfig:
    """How the head is built and fitted; in brackets what the official code has.

    Attributes:
      width: of a token, and of each stream's vector [192, and 256].
      head_widths: of what joins the streams [384, 128].
      n_grid: convolutions over layers and heads [6].
      n_map_seeds: learned queries that pool the heads [8].
      n_state_seeds: those that pool the steps [3].
      n_self: attention of the steps to each other, how often [3].
      dropout: everywhere [0.1].
      n_seeds: heads that are fitted [1].
      n_epochs: most passes over the training rows [2].
      patience: epochs without a better validation AUROC, after which a seed ends.
      batch_size: of a step [36].
      learning_rate: of Adam, after a tenth of all steps; it falls along a cosine to a
        tenth [1e-4, the same shape].
      root_seed: of all randomness [42].
    """

    width: int = 32
    head_widths: tuple[int, ...] = (64, 32)
    n_grid: int = 2
    n_map_seeds: int = 4
    n_state_seeds: int = 3
    n_self: int = 1
    dropout: float = 0.1
    n_seeds: int = 3
    n_epochs: int = 20
    patience: int = 5
    batch_size: int = 32
    learning_rate: float = 1e-3
    root_seed: int = 0


class _Attend(nn.Module):
    """Attention to some tokens, then a feed-forward part; norms behind both."""

    dropout: float

    @nn.compact
    def __call__(
        self, queries: jax.Array, tokens: jax.Array, is_training: bool
    ) -> jax.Array:
        width, drop = tokens.shape[-1], nn.Dropout(self.dropout)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=_N_HEADS, dropout_rate=self.dropout
        )
        found = attention(queries, tokens, deterministic=not is_training)
        found = nn.LayerNorm()(queries + found)
        inner = nn.gelu(nn.Dense(4 * width)(found))
        inner = nn.Dense(width)(drop(inner, deterministic=not is_training))
        return nn.LayerNorm()(found + inner)


class _Pool(nn.Module):
    """Learned queries attend to tokens; a small network makes one vector of them."""

    n_seeds: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, is_training: bool) -> jax.Array:
        n, _, width = tokens.shape
        scale = nn.initializers.normal(width**-0.5)
        seeds = self.param("seeds", scale, (self.n_seeds, width))
        queries = jnp.broadcast_to(seeds, (n, *seeds.shape))
        pooled = _Attend(self.dropout)(queries, tokens, is_training)
        inner = nn.gelu(nn.Dense(2 * width)(pooled.reshape(n, -1)))
        inner = nn.Dropout(self.dropout)(inner, deterministic=not is_training)
        return nn.Dense(width)(inner)


def _shifted(values: jax.Array, axis: int, by: int) -> jax.Array:
    """Move entries along an axis; what comes in is 0."""
    size = values.shape[axis]
    padding = [(0, 0)] * values.ndim
    padding[axis] = (max(by, 0), max(-by, 0))
    start = max(-by, 0)
    return jax.lax.slice_in_dim(
        jnp.pad(values, padding), start, start + size, axis=axis
    )


class _Neighbours(nn.Module):
    """A convolution of 3 along an axis, each channel for itself, without a bias."""

    axis: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width = tokens.shape[-1]
        init = nn.initializers.normal(3**-0.5)
        kernel = self.param("kernel", init, (3, *[1] * (tokens.ndim - 1), width))
        # Sums of shifted arrays: under vmap over seeds a convolution would be grouped.
        return sum(_shifted(tokens, self.axis, 1 - i) * kernel[i] for i in range(3))


class _Dilated(nn.Module):
    """A convolution of 5 spread-out steps, in groups of channels; norm and GELU."""

    spread: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        n, n_steps, width = tokens.shape
        size = width // _N_GROUPS
        parts = tokens.reshape(n, n_steps, _N_GROUPS, size)
        taps = [_shifted(parts, 1, self.spread * (2 - i)) for i in range(5)]
        init = nn.initializers.normal((5 * size) ** -0.5)
        kernel = self.param("kernel", init, (5, _N_GROUPS, size, size))
        found = jnp.einsum("kntgi,kgij->ntgj", jnp.stack(taps), kernel)
        found = found.reshape(tokens.shape)
        bias = self.param("bias", nn.initializers.zeros, (1, 1, width))
        return nn.gelu(nn.GroupNorm(_N_GROUPS)(found + bias))


class _MapEncoder(nn.Module):
    """One vector of what the maps of all heads are like."""

    config: GnosisConfig

    @nn.compact
    def __call__(self, maps: jax.Array, is_training: bool) -> jax.Array:
        n, n_layers, n_heads, _ = maps.shape
        width, near_zero = self.config.width, nn.initializers.normal(0.02)
        tokens = nn.Dense(width)(maps)
        tokens += self.param("layers", near_zero, (1, n_layers, 1, width))
        tokens += self.param("heads", near_zero, (1, 1, n_heads, width))
        grid = tokens
        for _ in range(self.config.n_grid):
            for axis in (2, 1):
                grid = nn.gelu(_Neighbours(axis)(grid))
            grid = nn.GroupNorm(_N_GROUPS)(nn.Dense(width, use_bias=False)(grid))
        tokens = (tokens + grid).reshape(n, n_layers * n_heads, width)
        pool = _Pool(self.config.n_map_seeds, self.config.dropout)
        return pool(tokens, is_training)


class _StateEncoder(nn.Module):
    """One vector of how the states go through the answer."""

    config: GnosisConfig

    @nn.compact
    def __call__(self, states: jax.Array, is_training: bool) -> jax.Array:
        config = self.config
        tokens = nn.Dense(config.width)(states)
        gates = self.param("gates", lambda _: jnp.array([0.5, 0.3, 0.2]))
        spreads = [_Dilated(2**i)(tokens) for i in range(3)]
        mixed = sum(g * x for g, x in zip(nn.softmax(gates), spreads, strict=True))
        open_ = nn.gelu(nn.Dense(max(8, config.width // 8))(mixed))
        added = mixed * nn.sigmoid(nn.Dense(config.width)(open_)) + tokens
        tokens = nn.Dropout(config.dropout)(added, deterministic=not is_training)
        init = nn.initializers.normal(config.width**-0.5)
        tokens += self.param("steps", init, (1, *tokens.shape[1:]))
        for _ in range(config.n_self):
            tokens = _Attend(config.dropout)(tokens, tokens, is_training)
        return _Pool(config.n_state_seeds, config.dropout)(tokens, is_training)


class GnosisHead(nn.Module):
    """Both streams, each weighted by a gate, and the log-odds of a right answer."""

    config: GnosisConfig

    @nn.compact
    def __call__(
        self, maps: jax.Array, states: jax.Array, is_training: bool = False
    ) -> jax.Array:
        """Return `[n]` logits.

        Args:
          maps: `[n, n_layers, n_heads, n_statistics]`.
          states: `[n, n_steps, d_model]`.
          is_training: whether to drop out.
        """
        streams = [
            _MapEncoder(self.config)(maps, is_training),
            _StateEncoder(self.config)(states, is_training),
        ]
        gates = [nn.Dense(1)(nn.LayerNorm()(stream)) for stream in streams]
        weights = nn.softmax(jnp.concatenate(gates, axis=-1))
        joined = jnp.concatenate(
            [x * weights[:, i : i + 1] for i, x in enumerate(streams)], axis=-1
        )
        joined = nn.LayerNorm()(joined)
        for width in self.config.head_widths:
            joined = nn.gelu(nn.Dense(width)(joined))
            drop = nn.Dropout(self.config.dropout)
            joined = drop(joined, deterministic=not is_training)
        return nn.Dense(1)(joined)[:, 0]

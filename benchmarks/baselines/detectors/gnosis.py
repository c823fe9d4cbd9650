"""The network of Gnosis: a stream of attention maps, a stream of states, and a gate.

The parts and how they are joined follow Amirhosein-gh98/Gnosis f8ff11d (models/qwen3:
`AttnFeatureExtractorLite_D3` on statistics, `HiddenFeatureExtractorLite` and
`CorrectnessHeadLite`); only the abstract of the paper (arXiv 2512.20578) was available.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import defined_rows, reading
from beatrice.benchmarks.baselines.detectors.probes import (
    seed_keys,
    shuffled_batches,
    take_steps,
)
from beatrice.benchmarks.baselines.plain import chosen_row
from beatrice.jaxprobe.config import usual_jax
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import StoreRows

_N_GROUPS = 8
_N_HEADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnosisConfig:
    """How the head is built and fitted; brackets show the official code's values."""

    width: int = 32  # of a token, and of each stream's vector [192 and 256]
    head_widths: tuple[int, ...] = (64, 32)  # layers on the joined streams [384, 128]
    n_grid: int = 2  # convolutions over layers and heads [6]
    n_map_seeds: int = 4  # learned queries that pool the heads [8]
    n_state_seeds: int = 3  # learned queries that pool the steps [3]
    n_self: int = 1  # self-attention blocks over the steps [3]
    dropout: float = 0.1  # everywhere [0.1]
    n_seeds: int = 3  # fitted heads [1]
    n_epochs: int = 20  # most passes over the training rows [2]
    patience: int = 5  # epochs without a better validation AUROC that end a seed
    batch_size: int = 32  # per step [36]
    # Adam's peak rate, after a tenth of all steps; then a cosine decay to a tenth of
    # it [1e-4, with the same schedule].
    learning_rate: float = 1e-3
    root_seed: int = 0  # of all randomness [42]


class _Attend(nn.Module):
    """Attention to tokens, then a feed-forward layer, each followed by a norm."""

    dropout: float

    @nn.compact
    def __call__(
        self, queries: jax.Array, tokens: jax.Array, is_training: bool
    ) -> jax.Array:
        width, drop = tokens.shape[-1], nn.Dropout(self.dropout)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=_N_HEADS, dropout_rate=self.dropout
        )
        mixed_tokens = attention(queries, tokens, deterministic=not is_training)
        mixed_tokens = nn.LayerNorm()(queries + mixed_tokens)
        inner = nn.gelu(nn.Dense(4 * width)(mixed_tokens))
        inner = nn.Dense(width)(drop(inner, deterministic=not is_training))
        return nn.LayerNorm()(mixed_tokens + inner)


class _Pool(nn.Module):
    """Pools tokens by learned queries and a small network into one vector."""

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
    """Shift entries along an axis, filling with zeros."""
    padding = [(0, 0, 0)] * values.ndim
    padding[axis] = (by, -by, 0)  # negative padding crops
    return jax.lax.pad(values, jnp.zeros((), values.dtype), padding)


class ChannelConv(nn.Module):
    """A depthwise convolution of size 3 along an axis, without a bias."""

    axis: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return an array of the shape of `tokens`, `[n, …, width]`."""
        width = tokens.shape[-1]
        init = nn.initializers.normal(3**-0.5)
        kernel = self.param("kernel", init, (3, *[1] * (tokens.ndim - 1), width))
        # A sum of shifted arrays: vmap over seeds would make a grouped convolution.
        taps = [_shifted(tokens, self.axis, 1 - i) * kernel[i] for i in range(3)]
        return taps[0] + taps[1] + taps[2]


class SpreadConv(nn.Module):
    """A dilated, grouped convolution of size 5, then a norm and GELU."""

    spread: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return an array of the shape of `tokens`, `[n, n_steps, width]`."""
        n, n_steps, width = tokens.shape
        size = width // _N_GROUPS
        parts = tokens.reshape(n, n_steps, _N_GROUPS, size)
        taps = [_shifted(parts, 1, self.spread * (2 - i)) for i in range(5)]
        init = nn.initializers.normal((5 * size) ** -0.5)
        kernel = self.param("kernel", init, (5, _N_GROUPS, size, size))
        mixed_tokens = jnp.einsum("kntgi,kgij->ntgj", jnp.stack(taps), kernel)
        mixed_tokens = mixed_tokens.reshape(tokens.shape)
        bias = self.param("bias", nn.initializers.zeros, (1, 1, width))
        return nn.gelu(nn.GroupNorm(_N_GROUPS)(mixed_tokens + bias))


class _MapEncoder(nn.Module):
    """Encodes the attention maps of all heads as one vector."""

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
                grid = nn.gelu(ChannelConv(axis)(grid))
            grid = nn.GroupNorm(_N_GROUPS)(nn.Dense(width, use_bias=False)(grid))
        tokens = (tokens + grid).reshape(n, n_layers * n_heads, width)
        pool = _Pool(self.config.n_map_seeds, self.config.dropout)
        return pool(tokens, is_training)


class _StateEncoder(nn.Module):
    """Encodes the sequence of the answer's states as one vector."""

    config: GnosisConfig

    @nn.compact
    def __call__(self, states: jax.Array, is_training: bool) -> jax.Array:
        config = self.config
        tokens = nn.Dense(config.width)(states)
        gates = self.param("gates", lambda _: jnp.array([0.5, 0.3, 0.2]))
        spreads = [SpreadConv(2**i)(tokens) for i in range(3)]
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
    """Both streams, weighted by a gate, and the log-odds of a right answer."""

    config: GnosisConfig

    @nn.compact
    def __call__(
        self, maps: jax.Array, states: jax.Array, is_training: bool = False
    ) -> jax.Array:
        """Return logits `[n]`.

        `maps` are `[n, n_layers, n_heads, n_statistics]`, `states` `[n, n_steps,
        d_model]`; dropout is applied if `is_training`.
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


# Rows scored together; few, since an answer has a token for every attention head.
_N_SCORED = 64


class Inputs(NamedTuple):
    """The head's inputs for `n` answers: standardised maps, and states."""

    maps: np.ndarray
    states: np.ndarray

    def at(self, rows: Any) -> "Inputs":
        """Return the inputs of some answers."""
        return Inputs(self.maps[rows], self.states[rows])


def _adam(config: GnosisConfig, n_train: int) -> optax.GradientTransformation:
    n_steps = config.n_epochs * math.ceil(n_train / config.batch_size)
    peak, n_warmup = config.learning_rate, max(1, n_steps // 10)
    return optax.adam(
        optax.warmup_cosine_decay_schedule(0.0, peak, n_warmup, n_steps, peak / 10)
    )


@partial(jax.jit, static_argnames="config")
def _start(inputs: Inputs, *, config: GnosisConfig) -> tuple[jax.Array, Any]:
    """Return random keys, initial weights and optimiser states of all seeds."""
    keys = seed_keys(config.root_seed, config.n_seeds)
    adam = _adam(config, len(inputs.maps))

    def start_seed(key: jax.Array) -> tuple[Any, Any]:
        params = GnosisHead(config).init(key, *inputs.at(slice(1)))
        return params, adam.init(params)

    return keys, jax.vmap(start_seed)(keys)


@partial(jax.jit, static_argnames="config")
def _epoch(
    keys: jax.Array,
    fits: Any,
    number: jax.Array,
    inputs: Inputs,
    labels: jax.Array,
    *,
    config: GnosisConfig,
) -> Any:
    """Return weights and optimiser states of all seeds after one more epoch."""
    adam = _adam(config, len(labels))

    def logits_of(params: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
        head, rngs = GnosisHead(config), {"dropout": key}
        return jnp.asarray(head.apply(params, *inputs.at(rows), True, rngs=rngs))

    def train_seed(key: jax.Array, fit: Any) -> Any:
        order_key, drop_key = jax.random.split(jax.random.fold_in(key, number))
        batches = shuffled_batches(order_key, len(labels), config.batch_size)
        steps = batches, jax.random.split(drop_key, len(batches))
        return take_steps(fit, steps, labels, logits_of, adam)

    return jax.vmap(train_seed)(keys, fits)


@partial(jax.jit, static_argnames="config")
def _logits(params: Any, inputs: Inputs, *, config: GnosisConfig) -> jax.Array:
    """Return `[n_seeds, n]` logits."""

    def score_seed(seed_params: Any) -> jax.Array:
        def of_row(row: Inputs) -> jax.Array:
            return GnosisHead(config).apply(
                seed_params, row.maps[None], row.states[None]
            )[0]

        return jax.lax.map(of_row, inputs, batch_size=_N_SCORED)

    return jax.vmap(score_seed)(params)


def fit_heads(
    train: Inputs,
    labels: np.ndarray,
    valid: Inputs,
    valid_labels: np.ndarray,
    config: GnosisConfig,
) -> tuple[Any, np.ndarray]:
    """Fit heads; return each seed's at its best epoch on validation, and the epochs.

    Labels are `[n]` bool, True if the answer is correct. Epochs count from 1.
    """
    targets, patience = np.asarray(labels, np.float32), config.patience
    config = dataclasses.replace(config, patience=0)  # compiled code does not use it
    keys, fits = _start(train, config=config)
    best, most = fits[0], np.full(config.n_seeds, -np.inf)
    epochs = np.zeros(config.n_seeds, int)
    for number in range(1, config.n_epochs + 1):
        fits = _epoch(keys, fits, jnp.int32(number), train, targets, config=config)
        logits = np.asarray(_logits(fits[0], valid, config=config), np.float64)
        values = np.array([auroc(seed, valid_labels).value for seed in logits])
        is_better = (values > most) & (number - epochs <= patience)
        most = np.where(is_better, values, most)
        epochs = np.where(is_better, number, epochs)
        best = jax.tree.map(partial(_chosen, is_better), fits[0], best)
        if (number - epochs >= patience).all():
            break
    return best, epochs


def _chosen(is_first: np.ndarray, first: jax.Array, second: jax.Array) -> jax.Array:
    """Choose each seed's leaf from the first or the second."""
    return jnp.where(is_first.reshape(-1, *[1] * (first.ndim - 1)), first, second)


@usual_jax()
def gnosis_scores(
    maps: np.ndarray,
    states: np.ndarray,
    rows: StoreRows,
    config: GnosisConfig | None = None,
) -> DetectorOutput:
    """Return log-odds of a right answer, and the mean epoch chosen on validation.

    `maps` are statistics of attention maps `[n_rows, n_layers, n_heads, n_statistics]`,
    which are standardised by the training rows. The official code does not do so,
    although one of them grows with the map and others are shares. `states` are
    `[n_rows, n_steps, d_model]`. Rows that were not read are NaN, as are their scores.
    """
    config = config or GnosisConfig()
    is_read = np.all(np.isfinite(maps), axis=(1, 2, 3))
    is_read &= np.all(np.isfinite(states), axis=(1, 2))
    train, valid = (
        defined_rows(is_read, rows, split) for split in ("train", "validation")
    )
    labels, valid_labels = rows.labels[train], rows.labels[valid]
    mean, spread = maps[train].mean(0), maps[train].std(0)
    # Statistics constant in training differ elsewhere only by rounding: not scaled up.
    scaled = (maps - mean) / np.where(spread > 1e-6, spread, 1.0)
    inputs = Inputs(scaled.astype(np.float32), np.asarray(states, np.float32))
    params, epochs = fit_heads(
        inputs.at(train), labels, inputs.at(valid), valid_labels, config
    )
    scores = np.full((config.n_seeds, len(maps)), np.nan)
    scores[:, is_read] = _logits(params, inputs.at(is_read), config=config)
    epoch = chosen_row(rows, "gnosis", "epoch", float(epochs.mean()))
    return DetectorOutput(scores, (epoch,))


@baseline(
    "gnosis",
    title="Gnosis",
    source="Ghasemabadi and Niu (2025), arXiv 2512.20578, abstract; "
    "Amirhosein-gh98/Gnosis f8ff11d, models/qwen3",
    reads=("gnosis_maps", "gnosis_states"),
    is_trained=True,
    variant="Statistics of the maps (of 32 cells a side, not 256) without the "
    "convolutions over them, standardised; 8 steps of the answer's states, not 192 of "
    "the whole sequence. Width 32 instead of 192 and stopped by validation, for some "
    "thousand answers.",
)
def gnosis(inputs: DetectorInput) -> DetectorOutput:
    """Score by heads fitted on readings of maps and states, see `gnosis_scores`."""
    maps = reading(inputs, "gnosis_maps", 4, None)
    states = reading(inputs, "gnosis_states", 3, None)
    return gnosis_scores(maps, states, inputs.rows)

"""Gnosis: a small head on maps of attention and on traces of states, and its fit.

The published head has some 5 million parameters and learns from tens of thousands of
answers, two epochs long; this one is narrow, and validation stops it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.linear import chosen_row
from beatrice.benchmarks.baselines.trained.gnosis_network import (
    GnosisConfig,
    GnosisHead,
)
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.regression import both_classes

# Rows that are scored together: an answer has a token for every head of the backbone.
_N_SCORED = 64


class Inputs(NamedTuple):
    """What the head reads of `n` answers: maps, standardised, and states."""

    maps: np.ndarray
    states: np.ndarray

    def at(self, rows: np.ndarray) -> "Inputs":
        """Return some answers."""
        return Inputs(self.maps[rows], self.states[rows])


def _adam(config: GnosisConfig, n_steps: int) -> optax.GradientTransformation:
    peak = config.learning_rate
    return optax.adam(
        optax.warmup_cosine_decay_schedule(
            0.0, peak, max(1, n_steps // 10), n_steps, peak / 10
        )
    )


def _n_batches(n: int, config: GnosisConfig) -> int:
    return -(-n // config.batch_size)


@partial(jax.jit, static_argnames="config")
def _start(inputs: Inputs, *, config: GnosisConfig) -> tuple[jax.Array, Any]:
    """Return keys, weights and moments of all seeds."""
    root = jax.random.key(config.root_seed)
    keys = jax.vmap(partial(jax.random.fold_in, root))(jnp.arange(config.n_seeds))
    first = jax.tree.map(lambda x: x[:1], inputs)
    n_steps = config.n_epochs * _n_batches(len(inputs.maps), config)

    def one(key: jax.Array) -> tuple[Any, Any]:
        params = GnosisHead(config).init(key, *first)
        return params, _adam(config, n_steps).init(params)

    return keys, jax.vmap(one)(keys)


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
    """Return weights and moments of all seeds after one more epoch."""
    n, n_batches = len(labels), _n_batches(len(labels), config)
    adam = _adam(config, config.n_epochs * n_batches)

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        own, counts = jnp.minimum(batch, n - 1), batch < n
        read = jax.tree.map(lambda x: x[own], inputs)
        logits = GnosisHead(config).apply(params, *read, True, rngs={"dropout": key})
        losses = optax.sigmoid_binary_cross_entropy(logits, labels[own])
        return losses.mean(where=counts)

    def step(carry: Any, given: Any) -> tuple[Any, None]:
        params, moments = carry
        grads = jax.grad(loss)(params, *given)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int32
            updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), None

    def one(key: jax.Array, fit: Any) -> Any:
        order_key, drop_key = jax.random.split(jax.random.fold_in(key, number))
        # The last batch of an epoch is short; place n stands for nobody.
        padding = (0, n_batches * config.batch_size - n)
        order = jax.random.permutation(order_key, n)
        batches = jnp.pad(order, padding, constant_values=n).reshape(n_batches, -1)
        given = batches, jax.random.split(drop_key, n_batches)
        return jax.lax.scan(step, fit, given)[0]

    return jax.vmap(one)(keys, fits)


@partial(jax.jit, static_argnames="config")
def _logits(params: Any, inputs: Inputs, *, config: GnosisConfig) -> jax.Array:
    """Return `[n_seeds, n]` logits."""

    def one(own: Any) -> jax.Array:
        def of_row(row: Inputs) -> jax.Array:
            return GnosisHead(config).apply(own, row.maps[None], row.states[None])[0]

        return jax.lax.map(of_row, inputs, batch_size=_N_SCORED)

    return jax.vmap(one)(params)


class Fitted(NamedTuple):
    """Heads of all seeds, and the epoch (from 1) whose weights each kept."""

    params: Any
    epochs: np.ndarray


def fit_heads(
    train: Inputs,
    labels: np.ndarray,
    valid: Inputs,
    valid_labels: np.ndarray,
    config: GnosisConfig,
) -> Fitted:
    """Fit heads; each keeps the weights of its best epoch on the validation rows.

    Args:
      train: of the training rows.
      labels: `[n_train]` bool, True where the answer is correct.
      valid: of the validation rows.
      valid_labels: of the same.
      config: of the fit.
    """
    targets = np.asarray(labels, np.float32)
    keys, fits = _start(train, config=config)
    best, most = fits[0], np.full(config.n_seeds, -np.inf)
    epochs = np.zeros(config.n_seeds, int)
    for number in range(1, config.n_epochs + 1):
        fits = _epoch(keys, fits, jnp.int32(number), train, targets, config=config)
        logits = np.asarray(_logits(fits[0], valid, config=config), np.float64)
        values = np.array([auroc(own, valid_labels).value for own in logits])
        is_better = (values > most) & (number - epochs <= config.patience)
        most = np.where(is_better, values, most)
        epochs = np.where(is_better, number, epochs)
        best = jax.tree.map(partial(_chosen, is_better), fits[0], best)
        if (number - epochs >= config.patience).all():
            break
    return Fitted(best, epochs)


def _chosen(is_first: np.ndarray, first: jax.Array, second: jax.Array) -> jax.Array:
    """Return each seed's leaf of one or the other."""
    return jnp.where(is_first.reshape(-1, *[1] * (first.ndim - 1)), first, second)


def gnosis(
    maps: np.ndarray,
    states: np.ndarray,
    rows: Rows,
    config: GnosisConfig | None = None,
) -> Found:
    """Return log-odds of a right answer.

    Args:
      maps: `[n_rows, n_layers, n_heads, n_statistics]` of the heads' attention; each is
        standardised by the training rows, where the official code projects it as it
        is: one of them grows with the map, others are shares.
      states: `[n_rows, n_steps, d_model]`; NaN in either where a row was not read.
      rows: what the rows are.
      config: of the fit.

    Returns:
      `[n_seeds, n_rows]` scores, NaN where a row was not read; the mean epoch that
      validation chose.

    Raises:
      ValueError: training or validation rows hold one class only.
    """
    config = config or GnosisConfig()
    is_read = np.isfinite(maps).all((1, 2, 3)) & np.isfinite(states).all((1, 2))
    train, valid = (
        np.array([i for i in rows.where(split) if is_read[i]], int)
        for split in ("train", "validation")
    )
    labels = both_classes(rows.labels[train], len(train), "training")
    valid_labels = both_classes(rows.labels[valid], len(valid), "validation")
    mean, spread = maps[train].mean(0), maps[train].std(0)
    # What is the same in all training rows is rounding elsewhere, and stays small.
    scaled = (maps - mean) / np.where(spread > 1e-6, spread, 1.0)
    inputs = Inputs(scaled.astype(np.float32), np.asarray(states, np.float32))
    fitted = fit_heads(inputs.at(train), labels, inputs.at(valid), valid_labels, config)
    scores = np.full((config.n_seeds, len(maps)), np.nan)
    scores[:, is_read] = _logits(fitted.params, inputs.at(is_read), config=config)
    epoch = chosen_row(rows, "gnosis", "epoch", float(fitted.epochs.mean()))
    return Found(scores, (epoch,))


def _score(evidence: Evidence) -> Found:
    read = evidence.readings
    return gnosis(read["gnosis_maps"], read["gnosis_states"], evidence.rows)


GNOSIS = Detector(
    name="gnosis",
    title="Gnosis",
    source="Ghasemabadi and Niu (2025), arXiv 2512.20578, abstract; "
    "Amirhosein-gh98/Gnosis f8ff11d, models/qwen3",
    score=_score,
    reads=("gnosis_maps", "gnosis_states"),
    is_trained=True,
    variant="Statistics of the maps (of 32 cells a side, not 256) without the "
    "convolutions over them, standardised; 8 steps of the answer's states, not 192 of "
    "the whole sequence. Width 32 instead of 192 and stopped by validation, for some "
    "thousand answers.",
)
DETECTORS = (GNOSIS,)

"""Choice of the layer to read hidden states from, with a small probe per layer.

The layer sweep of the paper (appendix B, "Layer selection"): validation AUROC of the
hidden-state signal of each layer. The probe is a logistic regression on the mean state
over the answer tokens, which ranks layers at a fraction of an encoder's cost.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_json_atomic
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.config import TrainConfig, set_compiler, usual_jax
from beatrice.jaxprobe.families import divisors_of
from beatrice.jaxprobe.linear import both_classes
from beatrice.jaxprobe.loop import (
    FitState,
    Keys,
    Learner,
    epoch_batches,
    fit,
    start_fit,
    take_steps,
)
from beatrice.jaxprobe.random import PROBES, stream_keys
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.stages import LayerCurve, LayerSweep
from beatrice.jaxprobe.tokens import mean_answer_states
from beatrice.jaxprobe.train import open_rows
from beatrice.selection.stages import PROBE, SweepSection


def sweep_layers(
    train_hidden: np.ndarray,
    train_labels: np.ndarray,
    valid_hidden: np.ndarray,
    valid_labels: np.ndarray,
    config: TrainConfig = PROBE,
) -> np.ndarray:
    """Fit a probe per layer and seed, all together; return their validation AUROC.

    Args:
      train_hidden: `[n_train, n_layers + 1, d_model]` means over the answer tokens.
      train_labels: `[n_train]` bool.
      valid_hidden: `[n_valid, n_layers + 1, d_model]`.
      valid_labels: `[n_valid]` bool.
      config: the training protocol.

    Returns:
      `[n_layers + 1, n_seeds]`; entry 0 is the embedding.
    """
    both_classes(train_labels, len(train_hidden), "training")
    both_classes(valid_labels, len(valid_hidden), "validation")
    mean = train_hidden.mean(axis=0, dtype=np.float64)
    std = divisors_of(mean, train_hidden.std(axis=0, dtype=np.float64))

    def rows(hidden: np.ndarray, labels: np.ndarray) -> _States:
        scaled = ((hidden - mean) / std).astype(np.float32).transpose(1, 0, 2)
        targets = jnp.asarray(labels, jnp.float32)
        return _States(jnp.asarray(scaled), targets, jnp.ones_like(targets))

    train, valid = rows(train_hidden, train_labels), rows(valid_hidden, valid_labels)
    keys = stream_keys(config.root_seed, PROBES, range(config.n_seeds))
    learner = Learner(
        lambda: _start(train.hidden, keys, config=config),
        lambda *step: _train(*step, keys, config=config),
        _logits,
    )
    (state,) = fit([learner], lambda _: [train], lambda: [valid], config)
    return np.asarray(state.info.best_auroc)


class _States(NamedTuple):
    """Standardised states `[n_layers + 1, n_rows, d_model]` with labels and weights."""

    hidden: jax.Array
    labels: jax.Array
    weights: jax.Array


def _of_probe(params: Any, hidden: jax.Array) -> jax.Array:
    return hidden @ params["weight"] + params["bias"][None]


@partial(jax.jit, static_argnames=("config",))
def _start(hidden: jax.Array, keys: jax.Array, *, config: TrainConfig) -> FitState:
    """Return initial states of all probes, leaves `[n_layers + 1, n_seeds, ...]`."""

    def start(_, key: jax.Array) -> FitState:
        weight = 1e-3 * jax.random.normal(key, hidden.shape[-1:])
        return start_fit({"weight": weight, "bias": jnp.zeros(())}, config)

    over_seeds = jax.vmap(start, in_axes=(None, 0))
    return jax.vmap(over_seeds, in_axes=(0, None))(jnp.arange(len(hidden)), keys)


@partial(jax.jit, static_argnames=("config",))
def _train(
    states: FitState,
    number: jax.Array,
    train: _States,
    keys: jax.Array,
    *,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Train every probe for an epoch; the probes of a seed share batches."""

    def train_probe(state: FitState, hidden: jax.Array, seed_key: jax.Array):
        def loss(params, rows, shares, *_):
            logits = _of_probe(params, hidden[rows])
            losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[rows])
            return (losses * shares).sum()

        key = jax.random.fold_in(seed_key, number)
        batches = epoch_batches(key, train.weights, config.batch_size)
        return take_steps(state, loss, batches, Keys(key, key), config)

    over_seeds = jax.vmap(train_probe, in_axes=(0, None, 0))
    over_layers = jax.vmap(over_seeds, in_axes=(0, 0, None))
    return over_layers(states, train.hidden, keys)


@jax.jit
def _logits(states: FitState, valid: _States) -> jax.Array:
    """Return the logits of every probe, `[n_layers + 1, n_seeds, n_rows]`."""
    over_seeds = jax.vmap(_of_probe, in_axes=(0, None))
    return jax.vmap(over_seeds)(states.params, valid.hidden)


def sweep_rows(rows: StoreRows, split: str, limit: int, seed: int) -> np.ndarray:
    """Return indices `[n]` of the original rows that probes read, in stored order.

    If there are more than `limit`, they are sorted by dataset and label, shuffled in
    each group, and `limit` are taken at even distances, so that each group keeps its
    share up to rounding. Only if that leaves out a class that is rare in every dataset
    are they sorted by label first, since other samples decide the layers of older runs.
    All rows' states would be 16 GB in the paper.
    """
    where = rows.where(split)
    where = where[rows.variants[where] == "original"]
    if len(where) <= limit:
        return where
    shuffled = np.random.default_rng(seed).permutation(where)
    labels, datasets, drawn = rows.labels[shuffled], rows.datasets[shuffled], where
    for keys in ((labels, datasets), (datasets, labels)):
        groups = np.lexsort(keys)
        drawn = np.sort(shuffled[groups[np.arange(limit) * len(where) // limit]])
        if len({*rows.labels[drawn]}) > 1:
            break
    return drawn


def sweep_store(
    store: FeatureStore, rows: StoreRows, config: SweepSection
) -> LayerCurve:
    """Fit probes on the mean answer states of every layer in a store."""
    layers = store.spec.hidden_layers

    def read(split: str) -> tuple[np.ndarray, np.ndarray]:
        where = sweep_rows(rows, split, config.n_rows, config.probe.root_seed)
        states = [mean_answer_states(store, where, layer) for layer in layers]
        return np.stack(states, axis=1), rows.labels[where]

    train, valid = read("train"), read("validation")
    aurocs = sweep_layers(*train, *valid, config.probe)
    return LayerCurve(
        layers=tuple(layers),
        auroc=tuple(tuple(round(float(x), 6) for x in row) for row in aurocs),
        best=layers[int(aurocs.mean(axis=1).argmax())],  # ties: the earlier layer
        n_train=len(train[1]),
        n_validation=len(valid[1]),
    )


@usual_jax()
def choose_layer(
    stores: Mapping[Setting, tuple[FeatureStore, StoreRows]],
    config: SweepSection,
    on_setting: Callable[[], None] = lambda: None,
) -> LayerSweep:
    """Choose the layer to read the hidden family from, by validation AUROC.

    As in the paper, one layer serves all settings: the one with the best mean AUROC.
    """
    curves = {}
    for setting, (store, rows) in stores.items():
        curves[setting] = sweep_store(store, rows, config)
        on_setting()
    means = [np.mean(curve.auroc, axis=1) for curve in curves.values()]
    layers = next(iter(curves.values())).layers
    best = layers[int(np.argmax(np.mean(means, axis=0)))]
    return LayerSweep(layer=best, settings=curves)


def sweep_run(
    run: RunDir, config: SweepSection, update: Update, progress: Progress
) -> None:
    """Choose a run's layer, and write the curves."""
    set_compiler(run.preset)
    settings, done = settings_of(run), itertools.count(1)
    sweep = choose_layer(
        {setting: open_rows(run, setting) for setting in settings},
        config.seeded(run.seed),
        lambda: update(next(done), len(settings)),
    )
    if len(sweep.settings[settings[0]].layers) == 1:
        progress.note(
            f"sweep: the store keeps only layer {sweep.layer}, so there is nothing to "
            "choose"
        )
    write_json_atomic(run.sweep, msgspec.to_builtins(sweep))

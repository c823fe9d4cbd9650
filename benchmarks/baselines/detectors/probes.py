"""Probes of one state: SAPLMA, a linear probe and LLMsKnow."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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
from beatrice.benchmarks.baselines.detectors.choice import (
    best_layer,
    last_steps,
    logistic_log_odds,
    scores_where_defined,
    states_at,
)
from beatrice.benchmarks.baselines.plain import chosen_row, scores_of, standardise
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.rows import Rows
from beatrice.jaxprobe.tokens import mean_answer_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaplmaConfig:
    """How the network is fitted; the paper gives widths, Adam and the epochs.

    The rest are the defaults of Keras, with which others rebuilt it
    (balevinstein/Probes a4dd8d3): no scaling, no decay, no dropout.
    """

    n_seeds: int = 3
    n_epochs: int = 5
    batch_size: int = 32
    learning_rate: float = 1e-3
    epsilon: float = 1e-7
    root_seed: int = 0


class SaplmaNetwork(nn.Module):
    """Three hidden layers, and the log-odds of a right answer."""

    widths: tuple[int, ...] = (256, 128, 64)

    @nn.compact
    def __call__(self, states: jax.Array) -> jax.Array:
        """Return `[n]` logits of `[n, d_model]` states."""
        dense = partial(nn.Dense, kernel_init=nn.initializers.glorot_uniform())
        for width in self.widths:
            states = nn.relu(dense(width)(states))
        return dense(1)(states)[:, 0]


def _fit_network(
    key: jax.Array, states: jax.Array, labels: jax.Array, *, config: SaplmaConfig
) -> Any:
    n, network = len(states), SaplmaNetwork()
    adam = optax.adam(config.learning_rate, eps=config.epsilon)
    init_key, *epoch_keys = jax.random.split(key, 1 + config.n_epochs)
    orders = jnp.stack([jax.random.permutation(k, n) for k in epoch_keys])
    # The last batch of an epoch is short; index n stands for no example.
    padding = ((0, 0), (0, -n % config.batch_size))
    batches = jnp.pad(orders, padding, constant_values=n)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        rows, is_example = jnp.minimum(batch, n - 1), batch < n
        logits = network.apply(params, states[rows])
        losses = optax.sigmoid_binary_cross_entropy(logits, labels[rows])
        return losses.mean(where=is_example)

    def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
        params, moments = carry
        grads = jax.grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int32
            updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), None

    params = network.init(init_key, states[:1])
    start = params, adam.init(params)
    steps = batches.reshape(-1, config.batch_size)
    (params, _), _ = jax.lax.scan(step, start, steps)
    return params


@partial(jax.jit, static_argnames="config")
def _fit_seeds(
    states: jax.Array, labels: jax.Array, scored: jax.Array, *, config: SaplmaConfig
) -> jax.Array:
    """Return `[n_seeds, n]` logits of `scored`, one network a seed."""
    root = jax.random.key(config.root_seed)
    keys = jax.vmap(partial(jax.random.fold_in, root))(jnp.arange(config.n_seeds))

    def logits_of(key: jax.Array) -> jax.Array:
        params = _fit_network(key, states, labels, config=config)
        return jnp.asarray(SaplmaNetwork().apply(params, scored))

    return jax.vmap(logits_of)(keys)


def saplma_logits(
    train: np.ndarray,
    labels: np.ndarray,
    states: np.ndarray,
    config: SaplmaConfig | None = None,
) -> np.ndarray:
    """Fit the networks of all seeds, and score.

    Args:
      train: `[n_train, d_model]` float32.
      labels: `[n_train]` bool, True where the answer is correct.
      states: `[n, d_model]` to be scored.
      config: of the fit.

    Returns:
      `[n_seeds, n]` float64 log-odds of a right answer.
    """
    targets = np.asarray(labels, np.float32)
    logits = _fit_seeds(train, targets, states, config=config or SaplmaConfig())
    return np.asarray(logits, np.float64)


def mean_states(store: FeatureStore, layer: int) -> np.ndarray:
    """Return the mean state of every answer span, `[n_rows, d_model]` float32.

    An answer without a token has the state that emitted its end.
    """
    return mean_answer_states(store, np.arange(len(store.spec.keys)), layer)


def last_states(store: FeatureStore, layer: int) -> np.ndarray:
    """Return the state at every answer's last token, which emitted its end.

    `[n_rows, d_model]` float32; NaN where an answer has no token.
    """
    last = last_steps(store)
    return states_at(store, np.where(last > 0, last, -1), layer)


def saplma(
    store: FeatureStore,
    rows: Rows,
    states_of: Callable[[FeatureStore, int], np.ndarray],
    name: str,
    config: SaplmaConfig | None = None,
) -> DetectorOutput:
    """Return the networks' log-odds from the layer that validation chooses.

    Args:
      store: an extracted setting; every layer in it is tried.
      rows: of the store, with labels and splits.
      states_of: `mean_states` or `last_states`.
      name: of the detector.
      config: of the fit.

    Returns:
      `[n_seeds, n_rows]` scores; NaN where an answer has no such state.
    """
    fit = partial(saplma_logits, config=config)

    def fit_at(layer: int) -> DetectorOutput:
        states, train = states_of(store, layer), rows.where("train")
        return DetectorOutput(scores_where_defined(states, rows.labels, train, fit))

    return best_layer(fit_at, store.spec.hidden_layers, rows, name)


_SAPLMA = (
    "Azaria and Mitchell (Findings of EMNLP 2023), arXiv 2304.13734; no official code, "
    "what the paper leaves open after balevinstein/Probes a4dd8d3"
)


@baseline(
    "saplma_mean",
    title="SAPLMA (mean)",
    source=_SAPLMA,
    is_trained=True,
    variant="The mean state of the answer span; the published one reads the last token "
    "alone. The layer is chosen by validation.",
)
def saplma_mean(inputs: DetectorInput) -> DetectorOutput:
    """Score by networks on the mean state of the answer."""
    return saplma(inputs.store, inputs.rows, mean_states, "saplma_mean")


@baseline(
    "saplma_last",
    title="SAPLMA (last)",
    source=_SAPLMA,
    is_trained=True,
    variant="Reads the answer behind its prompt, not a statement by itself. The layer "
    "is chosen by validation.",
)
def saplma_last(inputs: DetectorInput) -> DetectorOutput:
    """Score by networks on the state at the answer's last token."""
    return saplma(inputs.store, inputs.rows, last_states, "saplma_last")


@baseline(
    "linear_probe",
    title="Linear probe",
    source="Alain and Bengio (2017), arXiv 1610.01644; not among the paper's detectors",
    is_trained=True,
    variant="Reads the mean state of the answer span; layer and penalty by validation.",
)
def linear_probe(inputs: DetectorInput) -> DetectorOutput:
    """Return log-odds from the layer and the penalty that validation chooses.

    Every layer of the store is tried.
    """
    store, rows = inputs.store, inputs.rows

    def fit_at(layer: int) -> DetectorOutput:
        states = mean_answer_states(store, np.arange(len(rows.ids)), layer)
        standardise(states, rows.where("train"))
        scores, penalty = scores_of(states, rows)
        chosen = chosen_row(rows, "linear_probe", "inverse_penalty", penalty)
        return DetectorOutput(scores, (chosen,))

    return best_layer(fit_at, store.spec.hidden_layers, rows, "linear_probe")


@baseline(
    "llms_know",
    title="LLMsKnow",
    source="Orgad et al. (ICLR 2025), section 3; technion-cs-nlp/LLMsKnow bee3ec5, "
    "probe.py",
    reads=("mlp_exact_answer",),
    is_trained=True,
    # The official extraction finds the gold answer in right ones, at test time too.
    variant="The exact answer is the whole greedy answer, which is short after worked "
    "examples; fitted on training answers alone, not on those of validation too.",
)
def llms_know(inputs: DetectorInput) -> DetectorOutput:
    """Return log-odds of a right answer from the block that validation chooses.

    The reading is `[n_rows, n_layers, d_model]`, what the MLP of each block added at
    the exact answer's last token. Blocks count from 1 in the row of the choice, as the
    entries of the resid axis that they write to; the official code counts from 0.
    """
    rows, outputs = inputs.rows, inputs.readings["mlp_exact_answer"]

    def fit_at(layer: int) -> DetectorOutput:
        states, train = outputs[:, layer - 1], rows.where("train")
        scores = scores_where_defined(states, rows.labels, train, logistic_log_odds)
        return DetectorOutput(scores)

    return best_layer(fit_at, range(1, outputs.shape[1] + 1), rows, "llms_know")

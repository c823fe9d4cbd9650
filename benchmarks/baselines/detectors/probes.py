"""Probes of hidden states: SAPLMA, linear, LLMsKnow, semantic entropy probes."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from beatrice.benchmarks.baselines.detector import (
    SAMPLE,
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import (
    answer_lengths,
    best_layer,
    chosen_rows,
    last_steps,
    logistic_log_odds,
    reading,
    scores_where_defined,
    states_at,
    validation_auroc,
)
from beatrice.benchmarks.baselines.detectors.clustering import (
    BY_WORDS,
    Equivalences,
    by_entailment,
    by_words,
    requirements,
)
from beatrice.benchmarks.baselines.detectors.entropy import entropies_of
from beatrice.benchmarks.baselines.plain import chosen_row, linear_scores
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.config import usual_jax
from beatrice.jaxprobe.families import ANSWER
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.tokens import mean_answer_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaplmaConfig:
    """How the network is fitted; the paper gives widths, Adam and the epochs.

    The rest are defaults of Keras, in which others reimplemented it
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
        """Return logits `[n]` for states `[n, d_model]`."""
        dense = partial(nn.Dense, kernel_init=nn.initializers.glorot_uniform())
        for width in self.widths:
            states = nn.relu(dense(width)(states))
        return dense(1)(states)[:, 0]


def seed_keys(root_seed: int, n_seeds: int) -> jax.Array:
    """Return a random key for each seed."""
    root = jax.random.key(root_seed)
    return jax.vmap(partial(jax.random.fold_in, root))(jnp.arange(n_seeds))


def shuffled_batches(key: jax.Array, n: int, batch_size: int) -> jax.Array:
    """Return an epoch's batches `[n_batches, batch_size]` of indices, padded with n."""
    order = jax.random.permutation(key, n)
    padded = jnp.pad(order, (0, -n % batch_size), constant_values=n)
    return padded.reshape(-1, batch_size)


def take_steps(
    fit: Any,
    batches: tuple[jax.Array, ...],
    labels: jax.Array,
    logits_of: Callable[..., jax.Array],
    adam: optax.GradientTransformation,
) -> Any:
    """Take a step on each batch; return the updated `fit`, weights and optimiser state.

    `batches` are `shuffled_batches` and any further arguments for each call of
    `logits_of`, which maps weights and example indices to logits. Labels are `[n]` 0/1.
    """
    n = len(labels)

    def loss(params: Any, batch: jax.Array, *more: jax.Array) -> jax.Array:
        rows, is_example = jnp.minimum(batch, n - 1), batch < n
        logits = logits_of(params, rows, *more)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels[rows])
        return losses.mean(where=is_example)

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, moments = carry
        grads = jax.grad(loss)(params, *batch)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int32
            updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), None

    return jax.lax.scan(step, fit, batches)[0]


@partial(jax.jit, static_argnames="config")
def _fit_seeds(
    states: jax.Array, labels: jax.Array, scored: jax.Array, *, config: SaplmaConfig
) -> jax.Array:
    """Fit a network for each seed, and return logits of `scored`, `[n_seeds, n]`."""
    network = SaplmaNetwork()
    adam = optax.adam(config.learning_rate, eps=config.epsilon)

    def logits_of(key: jax.Array) -> jax.Array:
        init_key, *keys = jax.random.split(key, 1 + config.n_epochs)
        epochs = [shuffled_batches(k, len(states), config.batch_size) for k in keys]
        params = network.init(init_key, states[:1])
        params, _ = take_steps(
            (params, adam.init(params)),
            (jnp.concatenate(epochs),),
            labels,
            lambda params, rows: jnp.asarray(network.apply(params, states[rows])),
            adam,
        )
        return jnp.asarray(network.apply(params, scored))

    return jax.vmap(logits_of)(seed_keys(config.root_seed, config.n_seeds))


@usual_jax()
def saplma_logits(
    train: np.ndarray,
    labels: np.ndarray,
    states: np.ndarray,
    config: SaplmaConfig | None = None,
) -> np.ndarray:
    """Fit the networks of all seeds, and score states, see `choice.Fit`.

    Returns:
      `[n_seeds, n]` float64 log-odds of a right answer.
    """
    targets = np.asarray(labels, np.float32)
    logits = _fit_seeds(train, targets, states, config=config or SaplmaConfig())
    return np.asarray(logits, np.float64)


def mean_states(store: FeatureStore, layer: int) -> np.ndarray:
    """Return the mean state over every answer span, `[n_rows, d_model]` float32.

    NaN where the span is empty, as that of an empty answer is if literal.
    """
    means = mean_answer_states(store, np.arange(len(store.spec.keys)), layer)
    means[np.ptp(store.spec.spans[:, ANSWER], axis=1) == 0] = np.nan
    return means


def last_states(store: FeatureStore, layer: int) -> np.ndarray:
    """Return the state at every answer's last token, which predicts the end.

    `[n_rows, d_model]` float32; NaN for empty answers.
    """
    last = last_steps(store)
    return states_at(store, np.where(last > 0, last, -1), layer)


def _add_saplma(
    name: str,
    title: str,
    states_of: Callable[[FeatureStore, int], np.ndarray],
    variant: str,
) -> None:
    """Add SAPLMA to the catalogue, on the states that `states_of` returns per layer."""

    @baseline(
        name,
        title=title,
        source="Azaria and Mitchell (Findings of EMNLP 2023), arXiv 2304.13734; no "
        "official code, what the paper leaves open after balevinstein/Probes a4dd8d3",
        is_trained=True,
        variant=f"{variant} The layer is chosen by validation.",
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        store, rows = inputs.store, inputs.rows

        def fit_at(layer: int) -> DetectorOutput:
            states = states_of(store, layer)
            return DetectorOutput(scores_where_defined(states, rows, saplma_logits))

        return best_layer(fit_at, store.spec.hidden_layers, rows, name)


_add_saplma(
    "saplma_mean",
    "SAPLMA (mean)",
    mean_states,
    "The mean state of the answer span; the published one reads the last token alone.",
)
_add_saplma(
    "saplma_last",
    "SAPLMA (last)",
    last_states,
    "Reads the answer behind its prompt, not a statement by itself; of an answer cut "
    "at its limit the last token but one, since what the last emitted is unknown.",
)


@baseline(
    "linear_probe",
    title="Linear probe",
    source="Alain and Bengio (2017), arXiv 1610.01644; not among the paper's detectors",
    is_trained=True,
    variant="Reads the mean state of the answer span; layer and penalty by validation.",
)
def linear_probe(inputs: DetectorInput) -> DetectorOutput:
    """Return log-odds at the layer and penalty chosen on validation."""
    store, rows = inputs.store, inputs.rows

    def fit_at(layer: int) -> DetectorOutput:
        states = mean_states(store, layer)
        where = np.flatnonzero(np.isfinite(states).all(axis=1))
        defined, penalty = linear_scores([states[where]], rows.take(where))
        scores = np.full((1, len(states)), np.nan)
        scores[:, where] = defined
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
    # The official code locates the gold answer in right answers, even at test time.
    variant="The exact answer is the whole greedy answer, which is short after worked "
    "examples; fitted on training answers alone, not on those of validation too.",
)
def llms_know(inputs: DetectorInput) -> DetectorOutput:
    """Return log-odds of a right answer at the block chosen on validation.

    The reading is the MLP output of each block at the exact answer's last token,
    `[n_rows, n_layers, d_model]`. Blocks in the row of the choice count from 1, like
    the entries of the resid axis that they write; the official code counts from 0.
    """
    rows, outputs = inputs.rows, reading(inputs, "mlp_exact_answer", 3, None)

    def fit_at(layer: int) -> DetectorOutput:
        states = outputs[:, layer - 1]
        return DetectorOutput(scores_where_defined(states, rows, logistic_log_odds))

    return best_layer(fit_at, range(1, outputs.shape[1] + 1), rows, "llms_know")


# Semantic entropy probes predict from states whether sampled answers would disagree.
def entropy_threshold(entropies: np.ndarray) -> float:
    """Return the threshold that best separates entropies (section 4, eq. 3).

    Out of 100 thresholds, spaced evenly from just above 0 to the largest entropy, it
    minimises the sum of squared deviations from the means of both parts. `entropies`
    are `[n]` nats, at least one.
    """

    def deviations(threshold: float) -> float:
        parts = entropies[entropies < threshold], entropies[entropies >= threshold]
        return sum(float(((x - x.mean()) ** 2).sum()) for x in parts if len(x))

    return min(np.linspace(1e-10, entropies.max(), 100).tolist(), key=deviations)


def best_range(aurocs: Sequence[float]) -> tuple[int, int]:
    """Return the range `[start, stop)` of layers with the largest mean AUROC.

    As in the code, a range excludes the last layer and has at least five layers. With
    fewer than six layers, it is all but the last; a single layer is kept. Ties go to
    the first and shortest range.
    """
    n = max(1, len(aurocs) - 1)
    ranges = [(i, j) for i in range(n) for j in range(i + min(5, n), n + 1)]
    return max(ranges, key=lambda span: float(np.mean(aurocs[slice(*span)])))


def entropy_probe(
    states_of: Callable[[int], np.ndarray],
    layers: Sequence[int],
    entropies: np.ndarray,
    rows: StoreRows,
    name: str,
) -> DetectorOutput:
    """Return log-odds of low semantic entropy, from a range of concatenated layers.

    The threshold is chosen on the training rows of all sets together. The range of
    layers maximises the AUROC for correctness of single-layer probes on validation (in
    the code, on test rows). Thus only the samples of training rows are read.

    `states_of` returns the states of a layer `[n_rows, d_model]`, NaN for answers
    without; `layers` ascend. `entropies` are discrete semantic entropies, `[n_rows]`
    nats, NaN without samples.
    """
    is_known = rows.is_labelled & np.isfinite(entropies)
    train = np.flatnonzero(is_known & (rows.splits == "train"))
    if not len(train):
        raise ValueError(
            f"{name}: no training answer has a semantic entropy to learn from; sample "
            f"answers with `{SAMPLE.format('RUN')}`"
        )
    threshold = entropy_threshold(entropies[train])
    is_low = entropies < threshold
    learned = dataclasses.replace(rows, labels=is_low, is_labelled=is_known)

    def scores_of(*layers: int) -> np.ndarray:
        states = np.concatenate([states_of(layer) for layer in layers], axis=1)
        return scores_where_defined(states, learned, logistic_log_odds)

    start, stop = best_range([validation_auroc(scores_of(x), rows) for x in layers])
    values = {
        "threshold": threshold,
        "first_layer": layers[start],
        "last_layer": layers[stop - 1],
    }
    chosen = chosen_rows(rows, name, values)
    return DetectorOutput(scores_of(*layers[start:stop]), chosen)


StepOf = Callable[[np.ndarray, np.ndarray], np.ndarray]  # from lengths and last steps


def before_generation(lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the step TBG (token before generation) of every answer, `[n_rows]`."""
    return np.zeros_like(last)


def second_last(lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the step of the second-last answer token, as defined in the paper.

    For one-token answers, this is the prompt's last token; for empty ones, no step.
    """
    return lengths - 1


def official_second_last(lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the step SLT of the official code, two before that of the last token.

    Its index n - 2 counts from the prompt's step, so this is the third-last token. For
    an answer of one token, the index is -1, which in Python means the last step.
    """
    return np.where(lengths >= 2, lengths - 2, last)


_VARIANT = (
    "; the range of layers is chosen on validation answers, the code's on test; fitted "
    "on training answers alone; of an answer cut at its limit every token counts"
)


def _add_sep(
    name: str, title: str, step_of: StepOf, token: str, equivalences: Equivalences
) -> None:
    """Add a semantic entropy probe to the catalogue; `token` describes its token."""

    @baseline(
        name,
        title=title,
        source="Kossen et al. (2024), arXiv 2406.15927, section 4; "
        "OATML/semantic-entropy-probes 02e2167, train-latent-probe.ipynb",
        needs=requirements(equivalences),
        is_trained=True,
        draws_for=("train",),
        variant=f"{token}{_VARIANT}" + f"; {BY_WORDS}" * (equivalences is by_words),
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        store = inputs.store
        steps = step_of(answer_lengths(store), last_steps(store))
        states_of = partial(states_at, store, steps)
        # Only the samples of training rows are read.
        is_train = inputs.rows.splits == "train"
        pairs = zip(inputs.samples, is_train, strict=True)
        train = dataclasses.replace(inputs, samples=[x if y else () for x, y in pairs])
        entropies = entropies_of(train, equivalences)
        layers = store.spec.hidden_layers
        return entropy_probe(states_of, layers, entropies, inputs.rows, name)


for _name, _title, _step_of, _token in (
    (
        "sep",
        "SEP",
        official_second_last,
        "the token of the code, which stands one before the second-last",
    ),
    (
        "sep_corrected",
        "SEP, second-last token",
        second_last,
        "corrected: the second-last answer token, which the paper names and the code "
        "misses by one",
    ),
    (
        "sep_tbg",
        "SEP, before the answer",
        before_generation,
        "the last prompt token, before the answer is generated",
    ),
):
    _add_sep(_name, _title, _step_of, _token, by_entailment)
    _add_sep(f"{_name}:words", f"{_title} (words)", _step_of, _token, by_words)

"""Train fusion heads: every set of a call, with every seed of the pool.

Heads are small, so what counts is what surrounds their products. The heads of a seed
take the same batches, as its encoders do: an epoch permutes the whole pool once, and
each head then reads contiguous slices instead of gathering rows of its own. A head that
is done is skipped.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from beatrice.jaxprobe.config import TrainConfig
from beatrice.jaxprobe.encoder import Params, apply_module
from beatrice.jaxprobe.fusion import OUTPUT, FusionHead, PoolOutputs
from beatrice.jaxprobe.kernels.random import HEADS, stream_key
from beatrice.jaxprobe.loop import (
    FitInfo,
    FitState,
    Keys,
    Learner,
    epoch_batches,
    fit,
    start_fit,
    take_steps,
)
from beatrice.jaxprobe.metrics import auroc, is_gain, masked_auroc


class _Set(NamedTuple):
    """What is fused: `[n_slots]` pool positions, and which slots they fill."""

    members: Any
    slot_mask: Any


def _head_keys(
    config: TrainConfig, seed: jax.Array, fused: _Set, n_pool: int
) -> jax.Array:
    """Keys of a head's first weights and of its dropout, `[2]`.

    The set counts as the bits of its positions, so no order and no number of slots
    changes them. Bits of no set are the batches'. A pool of more than 32 encoders, as
    of five families in two passes, has several words of bits, and then their number.
    """
    n_words, position = -(-n_pool // 32), fused.members.astype(jnp.uint32)
    bits = jnp.where(fused.slot_mask, jnp.uint32(1) << (position % 32), jnp.uint32(0))
    words = [
        jnp.where(position // 32 == word, bits, jnp.uint32(0)).sum(dtype=jnp.uint32)
        for word in range(n_words)
    ]
    last = (n_words,) if n_words > 1 else ()
    return jax.random.split(stream_key(config.root_seed, HEADS, seed, *words, *last))


def _permuted(
    train: PoolOutputs, seed: jax.Array, read: jax.Array, key: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One epoch's order of a seed's pool.

    Args:
      train: outputs, labels and weights.
      seed: whose encoders.
      read: `[n_pool]` bool, the encoders that a head reads; the others become zeros.
      key: of the order.
      size: of a batch.

    Returns:
      outputs `[n_pool, d_output, n_steps * size]`, batch after batch; labels and shares
      `[n_steps, size]`.
    """
    rows, shares = epoch_batches(key, train.weights, size)
    order = rows.reshape(-1)

    d_output = train.outputs.shape[2]

    def permute(encoder: jax.Array, channel: jax.Array) -> jax.Array:
        # Checking bounds takes as long as reading, and no row is beyond them.
        values = train.outputs[seed, encoder, channel]
        return values.at[order].get(mode="promise_in_bounds")

    def permute_encoder(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        encoder, is_read = pair
        # A channel at a time: XLA would transpose an encoder to gather it at once.
        each = partial(jax.lax.map, partial(permute, encoder), jnp.arange(d_output))
        zeros = jnp.zeros((d_output, len(order)), train.outputs.dtype)
        return jax.lax.cond(is_read, each, lambda: zeros)

    permuted = jax.lax.map(permute_encoder, (jnp.arange(train.n_pool), read))
    return permuted, train.labels[rows], shares


def _kernel_and_rest(params: Params) -> tuple[Any, Callable[[Any], Params]]:
    """Return a head's weights as two leaves, and what puts them together again.

    Its kernel is nearly all of it, and is not copied into a vector with the rest.
    """
    rest = dict(params["params"])
    kernel = rest.pop("kernel")
    flat, unravel = ravel_pytree(rest)
    return (kernel, flat), lambda packed: {
        "params": {"kernel": packed[0], **unravel(packed[1])}
    }


@partial(jax.jit, static_argnames=("head", "config"))
def start_heads(
    sets: _Set,
    train: PoolOutputs,
    valid: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> FitState:
    """States before the first epoch, leaves `[n_seeds, n_sets, ...]`.

    They count as weights that may be kept: what training does not improve on the
    validation rows stays the mean logit.
    """

    def start_head(seed: jax.Array, fused: _Set) -> FitState:
        key = _head_keys(config, seed, fused, train.n_pool)[0]
        params = head.init(key, train.outputs[seed][..., :1], *fused)
        state = start_fit(params, config, _kernel_and_rest)
        logits = apply_module(head, params, valid.outputs[seed], *fused)
        first = masked_auroc(logits, valid.labels, valid.weights)
        info = state.info._replace(best_auroc=jnp.nan_to_num(first, nan=-1.0))
        state = state._replace(info=info)
        # An empty set is done before it begins.
        since_best = jnp.where(fused.slot_mask.any(), 0, config.patience)
        return state._replace(epochs_since_best=since_best)

    def start_seed(seed: jax.Array) -> FitState:
        return jax.lax.map(partial(start_head, seed), sets)

    return jax.lax.map(start_seed, jnp.arange(train.n_seeds))


@partial(jax.jit, static_argnames=("head", "config"))
def train_heads(
    states: FitState,
    number: jax.Array,
    sets: _Set,
    train: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Take an epoch's steps with every head that is not done; also the mean losses."""
    size = config.batch_size

    def train_seed(args: tuple[jax.Array, FitState]):
        seed, states = args
        batch_key = stream_key(config.root_seed, HEADS, seed, 0, number)
        order_key, noise_key = jax.random.split(batch_key)
        active = states.is_active(config)
        filled = sets.slot_mask & active[:, None]
        read = jnp.zeros(train.n_pool, bool).at[sets.members].max(filled)
        pool, labels, shares = _permuted(train, seed, read, order_key, size)
        batches = (jnp.arange(len(labels)) * size, labels, shares)

        def steps(state: FitState, fused: _Set) -> tuple[FitState, jax.Array]:
            def loss(params, start, labels, shares, _, dropout_key):
                logits = head.apply(params, pool, *fused, (start, size), dropout_key)
                losses = optax.sigmoid_binary_cross_entropy(logits, labels)
                return (losses * shares).sum()

            dropout_key = _head_keys(config, seed, fused, train.n_pool)[1]
            keys = Keys(noise_key, jax.random.fold_in(dropout_key, number))
            return take_steps(state, loss, batches, keys, config, _kernel_and_rest)

        def train_head(args):
            state, fused, is_active = args
            done = state, jnp.float32(jnp.nan)
            return jax.lax.cond(is_active, lambda: steps(state, fused), lambda: done)

        return jax.lax.map(train_head, (states, sets, active))

    return jax.lax.map(train_seed, (jnp.arange(train.n_seeds), states))


@partial(jax.jit, static_argnames=("head", "config"))
def head_logits(
    states: FitState,
    sets: _Set,
    valid: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> jax.Array:
    """Logits `[n_seeds, n_sets, n_examples]`; zeros of heads that are done."""
    # The pools of all seeds as one: a seed's own would be copied in every epoch.
    pool = valid.outputs.reshape(-1, *valid.outputs.shape[2:])
    zeros = jnp.zeros(pool.shape[-1], pool.dtype)

    def score_seed(args: tuple[jax.Array, FitState]) -> jax.Array:
        seed, states = args

        def score_head(args):
            state, (members, slot_mask) = args
            members = members + seed * valid.n_pool
            logits = partial(head.apply, state.params, pool, members, slot_mask)
            return jax.lax.cond(state.is_active(config), logits, lambda: zeros)

        return jax.lax.map(score_head, (states, sets))

    return jax.lax.map(score_seed, (jnp.arange(valid.n_seeds), states))


def fit_heads(
    sets: np.ndarray,
    slot_masks: np.ndarray,
    train: PoolOutputs,
    valid: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[Params, FitInfo]:
    """Train a head for every set and every seed; a head reads its own seed's encoders.

    Args:
      sets: `[n_sets, n_slots]` int32 positions in the pool, filled slots first.
      slot_masks: `[n_sets, n_slots]` bool; a row of False trains nothing.
      train: outputs of the pool on the training rows.
      valid: the same on the validation rows.
      head: the module.
      config: the protocol; a batch is taken whole.

    Returns:
      weights and info on the host, leaves `[n_sets, n_seeds, ...]`.
    """
    placed = jax.device_put(_Set(sets, slot_masks))
    fixed = {"head": head, "config": dataclasses.replace(config, n_microbatches=1)}
    learner = Learner(
        lambda: start_heads(placed, train, valid, **fixed),
        lambda states, number, group: train_heads(
            states, number, placed, group, **fixed
        ),
        lambda states, group: head_logits(states, placed, group, **fixed),
    )
    (state,) = fit([learner], lambda _: [train], lambda: [valid], fixed["config"])
    if head.config.is_mean_first:
        state = _fall_back_to_mean(state, lambda x: learner.logits(x, valid), valid)
    trained = jax.device_get((state.best_params, state.info))
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1), trained)


def _fall_back_to_mean(
    state: FitState, logits: Callable[[FitState], jax.Array], valid: PoolOutputs
) -> FitState:
    """Replace a head by the mean logit where what it gains on that may be chance."""
    used, shape = np.asarray(valid.weights) > 0, state.epochs_since_best.shape
    labels = np.asarray(valid.labels)[used] > 0
    unstopped = state._replace(
        epochs_since_best=jnp.zeros_like(state.epochs_since_best)
    )

    def zero_output(is_used: np.ndarray) -> Params:
        weights = state.best_params["params"]
        axes = {name: (*shape, *[1] * (weights[name].ndim - 2)) for name in OUTPUT}
        zeroed = {n: np.where(is_used.reshape(axes[n]), weights[n], 0) for n in OUTPUT}
        return {"params": {**weights, **zeroed}}

    def scores_of(params: Params) -> np.ndarray:
        scores = np.asarray(logits(unstopped._replace(params=params)))
        return scores[..., used].reshape(-1, used.sum())

    mean_scores = scores_of(zero_output(np.zeros(shape, bool)))
    pairs = zip(scores_of(state.best_params), mean_scores, strict=True)
    is_used = np.reshape([is_gain(*pair, labels) for pair in pairs], shape)
    mean_auroc = np.reshape([auroc(x, labels).value for x in mean_scores], shape)
    best = np.where(is_used, state.info.best_auroc, mean_auroc).astype(np.float32)
    return state._replace(
        best_params=zero_output(is_used), info=state.info._replace(best_auroc=best)
    )

"""Train fusion heads: every set of a call, with every seed of the pool.

Heads are small, so what counts is what surrounds their products. The heads of a seed
take the same batches, as its encoders do: an epoch shuffles the whole pool once, and
each head then reads contiguous slices instead of gathering rows of its own. Epochs are
taken in step by all heads; one that is done is skipped.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxprobe.config import TrainConfig
from jaxprobe.fit.loop import (
    FitInfo,
    FitState,
    Words,
    end_epoch,
    epoch_batches,
    run_epoch,
    start_fit,
)
from jaxprobe.kernels.random import HEADS, mix, words_of
from jaxprobe.metrics import masked_auroc
from jaxprobe.model.encoder import Params
from jaxprobe.model.fusion import FusionHead, PoolOutputs, init_head


class _Set(NamedTuple):
    """What is fused: `[n_slots]` pool positions, and which slots they fill."""

    members: Any
    slot_mask: Any


def _set_number(one: _Set) -> jax.Array:
    """A set's number among draws: a sum of hashes, which no order of slots changes."""
    bits = (one.members.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    return jnp.where(one.slot_mask, bits, jnp.uint32(0)).sum(dtype=jnp.uint32)


def _batch_words(config: TrainConfig, seed: jax.Array) -> jax.Array:
    """Words of a seed's batches, which all its heads share."""
    return mix(words_of(config.root_seed, HEADS, seed), 0)


def _own_words(config: TrainConfig, seed: jax.Array, one: _Set) -> jax.Array:
    """Words of a head's own draws; no order and no number of slots changes them."""
    return mix(mix(words_of(config.root_seed, HEADS, seed), 1), _set_number(one))


def _shuffled(
    outputs: jax.Array,
    read: jax.Array,
    train: PoolOutputs,
    words: jax.Array,
    epoch: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One epoch's order of the pool.

    Args:
      outputs: `[n_pool, d_output, n_examples]`.
      read: `[n_pool]` bool, the encoders that a head reads; the others become zeros.
      train: whose labels and weights are permuted with it.
      words: of the batches.
      epoch: its number.
      size: of a batch.

    Returns:
      outputs `[n_pool, d_output, n_steps * size]`, batch after batch; labels and
      shares `[n_steps, size]`.
    """
    rows, shares = epoch_batches(words, epoch, train.weights, size)
    order = rows.reshape(-1)

    def deal(channel: jax.Array) -> jax.Array:
        # Told that no row is out of bounds: checking takes as long as reading.
        return channel.at[order].get(mode="promise_in_bounds")

    def deal_encoder(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        outputs, is_read = one
        none = jnp.zeros((len(outputs), len(order)), outputs.dtype)
        # A channel at a time: XLA would transpose an encoder to gather it at once.
        return jax.lax.cond(is_read, lambda: jax.lax.map(deal, outputs), lambda: none)

    permuted = jax.lax.map(deal_encoder, (outputs, read))
    return permuted, train.labels[rows], shares


def _as_two_leaves(params: Params) -> tuple[Params, Callable[[Params], Params]]:
    """Return a head's weights as two leaves, and what puts them together again.

    Its kernel is nearly all of it, and is not copied into a vector with the rest.
    """
    rest = dict(params["params"])
    kernel = rest.pop("kernel")
    flat, unravel = ravel_pytree(rest)

    def whole(parts: Params) -> Params:
        kernel, flat = parts
        return {"params": {"kernel": kernel, **unravel(flat)}}

    return (kernel, flat), whole


def _fit_seed(
    sets: _Set,
    seed: jax.Array,
    train: PoolOutputs,
    valid: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[Params, FitInfo]:
    """Train every set's head with one seed; leaves are `[n_sets, ...]`."""
    outputs, valid_output = train.outputs[seed], valid.outputs[seed]
    shared = _batch_words(config, seed)
    whole = dataclasses.replace(config, n_microbatches=1)

    def initial(one: _Set) -> Params:
        words = mix(_own_words(config, seed, one), 0)
        return init_head(head, words, outputs, one.slot_mask)

    shape = jax.eval_shape(initial, jax.tree.map(lambda x: x[0], sets))
    _, whole_of = _as_two_leaves(jax.tree.map(jnp.zeros_like, shape))

    def start(one: _Set) -> FitState:
        return start_fit(_as_two_leaves(initial(one))[0], config)

    def active(state: FitState, one: _Set) -> jax.Array:
        return (state.epochs_since_best < config.patience) & one.slot_mask.any()

    def advance(state: FitState, one: _Set, batches) -> FitState:
        pool, labels, shares = batches

        def loss(parts, start, labels, shares, _, dropout_words):
            batch = (start, config.batch_size)
            logits = head.apply(whole_of(parts), pool, *one, batch, dropout_words)
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            return (losses * shares).sum()

        words = Words(shared, mix(_own_words(config, seed, one), 1))
        starts = jnp.arange(len(labels)) * config.batch_size
        state, mean_loss = run_epoch(
            state, loss, (starts, labels, shares), words, whole
        )
        logits = head.apply(whole_of(state.params), valid_output, *one)
        auroc = masked_auroc(logits, valid.labels, valid.weights)
        return end_epoch(state, mean_loss, auroc, config)

    def epoch(carry):
        number, states = carry
        filled = sets.slot_mask & jax.vmap(active)(states, sets)[:, None]
        read = jnp.zeros(len(outputs), bool).at[sets.members].max(filled)
        batches = _shuffled(outputs, read, train, shared, number, config.batch_size)

        def one_head(args):
            state, one = args
            return jax.lax.cond(
                active(state, one), lambda: advance(state, one, batches), lambda: state
            )

        states = jax.lax.map(one_head, (states, sets))
        return number + 1, states._replace(epoch=states.epoch + 1)

    def go_on(carry):
        number, states = carry
        return jax.vmap(active)(states, sets).any() & (number < config.max_epochs)

    states = jax.lax.map(start, sets)
    _, states = jax.lax.while_loop(go_on, epoch, (jnp.int32(0), states))
    return jax.vmap(whole_of)(states.best_params), states.info


@partial(jax.jit, static_argnames=("head", "config"))
def fit_heads(
    sets: jax.Array,
    slot_masks: jax.Array,
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
      train: codes of the training rows.
      valid: codes of the validation rows.
      head: the module.
      config: the protocol; a batch is taken whole.

    Returns:
      weights and info, leaves `[n_sets, n_seeds, ...]`.
    """
    one_seed = partial(_fit_seed, head=head, config=config)
    trained = jax.lax.map(
        lambda seed: one_seed(_Set(sets, slot_masks), seed, train, valid),
        jnp.arange(train.n_seeds),
    )
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trained)

"""Fusion heads: from the outputs of several frozen encoders to one logit, and training.

Paper, section 3.3 and appendix B. A head has a fixed number of slots, of which a set of
encoders fills the first few in pool order; the rest is masked. So all sets share one
compiled training run, and the result depends on (set, seed) only, not on the slots.

Heads are small, so what counts is what surrounds their products. The heads of a seed
take the same batches, as its encoders do: an epoch permutes the whole pool once, and
each head then reads contiguous slices instead of gathering rows of its own. A head that
is done is skipped.

Arrays are `[d, n_examples]`, examples innermost, as in the encoders.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from beatrice.jaxprobe.config import FusionConfig, TrainConfig
from beatrice.jaxprobe.encoder import MemberOutputs, Params, apply_module, materialize
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
from beatrice.jaxprobe.random import HEADS, hashed_bits, stream_keys

OUTPUT = ("out_kernel", "out_bias")  # where they are zero, a head is the mean logit
_SUREST = 1e-6  # a probability further from 1/2 counts as this one
LARGEST = math.log((1 - _SUREST) / _SUREST)  # logit of an encoder that counts


@jax.custom_vjp
def slot_products(
    kernel: jax.Array,
    pool: jax.Array,
    members: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    n_filled: jax.Array,
) -> jax.Array:
    """Sum over filled slots s of `kernel[s].T @ (pool[members[s]] * keep[s])`.

    Only `kernel` has a gradient: the outputs of a frozen encoder do not change.

    Args:
      kernel: `[n_slots, d_output, hidden]`.
      pool: `[n_pool, d_output, n_all]`.
      members: `[n_slots]` int32 positions in the pool, filled slots first.
      start: int32, the first example; the batch is the `n_examples` from there.
      keep: `[n_slots, n_examples]` float32 factors.
      n_filled: int32, how many slots are filled.

    Returns:
      `[hidden, n_examples]`.
    """
    return _forward(kernel, pool, members, start, keep, n_filled)[0]


def _seen(pool, members, start, keep, slot) -> jax.Array:
    """One slot's part of the batch, `[d_output, n_examples]`."""
    at = (members[slot], 0, start)
    outputs = jax.lax.dynamic_slice(pool, at, (1, pool.shape[1], keep.shape[1]))[0]
    return outputs * keep[slot][None]


def _forward(kernel, pool, members, start, keep, n_filled):
    def add(slot, total):
        return total + kernel[slot].T @ _seen(pool, members, start, keep, slot)

    total = jnp.zeros((kernel.shape[2], keep.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, n_filled, add, total)
    return total, (kernel.shape[0], pool, members, start, keep, n_filled)


def _backward(residuals, dy):
    n_slots, pool, members, start, keep, n_filled = residuals

    def set_slot(slot, d_kernel):
        d_slot = _seen(pool, members, start, keep, slot) @ dy.T
        return jax.lax.dynamic_update_index_in_dim(d_kernel, d_slot, slot, 0)

    d_kernel = jnp.zeros((n_slots, pool.shape[1], dy.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, n_filled, set_slot, d_kernel), *[None] * 5


slot_products.defvjp(_forward, _backward)


class PoolOutputs(NamedTuple):
    """Outputs of the pool of encoders for labelled examples, seed by seed."""

    # `[n_seeds, n_pool, d_pooled + 1, n_examples]` float32, see `head_inputs`.
    outputs: Any
    labels: Any  # `[n_examples]` float32, 1 where the answer is correct
    weights: Any  # `[n_examples]` float32, at least 0
    questions: Any  # `[n_examples]` int32, equal for rows of one question

    @property
    def n_seeds(self) -> int:
        """Training seeds."""
        return self.outputs.shape[0]

    @property
    def n_pool(self) -> int:
        """Encoders."""
        return self.outputs.shape[1]


def head_inputs(pooled: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the inputs of a head.

    Args:
      pooled: `[..., n_examples, d_pooled]`.
      logits: `[..., n_examples]`.

    Returns:
      `[..., d_pooled + 1, n_examples]`: the pooled vector, and the probability.
    """
    p_correct = jax.nn.sigmoid(logits)[..., None, :]
    return jnp.concatenate([jnp.swapaxes(pooled, -1, -2), p_correct], axis=-2)


def pool_outputs(
    outputs: tuple[MemberOutputs, ...],
    n_seeds: int,
    labels: np.ndarray,
    questions: np.ndarray,
) -> PoolOutputs:
    """Lay the seed-major grids of one or more passes side by side as one pool.

    Args:
      outputs: one per pass over the same examples, in pool order: with context, then
        closed-book. Each has `n_seeds * n_encoders` members.
      n_seeds: of every grid.
      labels: `[n_examples]` bool; every example counts once.
      questions: `[n_examples]` names or numbers.
    """
    numbers = np.unique(questions, return_inverse=True)[1].astype(np.int32)
    on_host = np.array(labels, np.float32), np.ones(np.shape(labels), np.float32)
    of_rows = jax.device_put((*on_host, numbers))
    return PoolOutputs(_side_by_side(outputs, n_seeds), *of_rows)


@partial(jax.jit, static_argnums=1)
def _side_by_side(outputs: tuple[MemberOutputs, ...], n_seeds: int) -> jax.Array:
    """`PoolOutputs.outputs`, in one executable instead of one for every step."""
    grids = [head_inputs(x.pooled, x.logits) for x in outputs]
    by_seed = [grid.reshape(n_seeds, -1, *grid.shape[1:]) for grid in grids]
    return jnp.concatenate(by_seed, axis=1)


def keep_encoders(
    key: jax.Array, n_examples: int, slot_mask: jax.Array, rate: float
) -> jax.Array:
    """Draw which encoders an example sees in one training step.

    Each is hidden independently with probability `rate`. Where that would hide all of
    them, one filled slot, chosen uniformly, stays: a head cannot learn from nothing.

    Args:
      key: of the draw, see `jaxprobe.random`.
      n_examples: in the batch.
      slot_mask: `[n_slots]` bool, True where a slot is filled.
      rate: probability of hiding.

    Returns:
      `[n_slots, n_examples]` bool, False on empty slots.
    """
    # Counted slot by slot, so that empty slots change nothing for the filled ones.
    bits = hashed_bits(key, 0, (slot_mask.shape[0], n_examples))
    draws = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    filled = slot_mask[:, None]
    keep = (draws >= rate) & filled
    # Given that all draws are below the rate, the largest is equally likely anywhere.
    last = jnp.argmax(jnp.where(filled, draws, -1.0), axis=0)
    only = (jnp.arange(slot_mask.shape[0])[:, None] == last[None]) & filled
    return jnp.where(keep.any(axis=0)[None], keep, only)


class FusionHead(nn.Module):
    """Two-layer MLP over pooled vectors, scores, and their absolute differences."""

    config: FusionConfig

    @nn.compact
    def __call__(
        self,
        pool: jax.Array,
        members: jax.Array,
        slot_mask: jax.Array,
        examples: tuple[jax.Array | int, int] | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Fuse a batch to `[n_examples]` logits.

        Hidden encoders are zero and the others are not rescaled: the LayerNorm after
        the first layer removes the change of scale. A difference needs both its slots.

        Args:
          pool: `[n_pool, d_pooled + 1, n_all]`, see `head_inputs`.
          members: `[n_slots]` int32 positions in the pool.
          slot_mask: `[n_slots]` bool, True on the filled slots, which come first.
          examples: the first one, and how many from there; None takes all.
          key: of encoder dropout's draws; None outside training.
        """
        cfg, n_slots, d_output = self.config, len(members), pool.shape[1]
        start, n_examples = (0, pool.shape[2]) if examples is None else examples
        first, second = np.triu_indices(n_slots, 1)
        kernel = self.param("kernel", kernel_init, cfg.hidden, d_output, slot_mask)
        # Disagreements start at zero: the head begins as one over the encoders.
        gap_kernel = self.param("gaps", nn.initializers.zeros, (len(first), cfg.hidden))
        bias = self.param("bias", nn.initializers.zeros, (cfg.hidden,))
        keep = jnp.broadcast_to(slot_mask[:, None], (n_slots, n_examples))
        if key is not None:
            keep = keep_encoders(key, n_examples, slot_mask, cfg.encoder_dropout)
        # Once per slot, not again for each of its channels.
        keep = materialize(keep.astype(jnp.float32), slot_mask.any())
        scores = jax.vmap(
            lambda member: jax.lax.dynamic_slice(
                pool, (member, d_output - 1, start), (1, 1, n_examples)
            )[0, 0]
        )(members)
        gaps = jnp.abs(scores[first] - scores[second]) * keep[first] * keep[second]
        x = slot_products(
            kernel.reshape(n_slots, d_output, cfg.hidden),
            pool,
            members,
            jnp.int32(start),
            keep,
            slot_mask.sum(dtype=jnp.int32),
        )
        x = x + gap_kernel.T @ gaps + bias[:, None]
        norm = nn.LayerNorm(reduction_axes=0, feature_axes=0, name="norm")
        weights, offset = (
            self.param(name, nn.initializers.zeros, shape)
            for name, shape in zip(OUTPUT, ((cfg.hidden,), ()), strict=True)
        )
        return _mean_logit(scores, keep) + weights @ nn.gelu(norm(x)) + offset


def _mean_logit(scores: jax.Array, keep: jax.Array) -> jax.Array:
    """Return the mean logit `[n_examples]` of the encoders that are seen.

    Of probabilities `[n_slots, n_examples]`; `keep` is 1 where one is seen, else 0.
    """
    p_correct = jnp.clip(scores, _SUREST, 1 - _SUREST)
    logits = jnp.log(p_correct) - jnp.log1p(-p_correct)
    return (logits * keep).sum(0) / jnp.maximum(keep.sum(0), 1.0)


def kernel_init(
    key: jax.Array, hidden: int, d_output: int, slot_mask: jax.Array
) -> jax.Array:
    """Draw the first layer, `[n_slots * d_output, hidden]`; zero on empty slots.

    Fan-in counts filled slots and their pairs. Each slot has a key of its own, so that
    a head does not change with the number of slots.
    """

    def draw(slot: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, slot), (d_output, hidden))

    # Not by `vmap`: a draw of several keys takes a second to compile.
    drawn = jax.lax.map(draw, jnp.arange(len(slot_mask)))
    filled = slot_mask.astype(jnp.float32)
    n = filled.sum()
    scale = jax.lax.rsqrt(jnp.maximum(n * d_output + n * (n - 1) / 2, 1.0))
    return (drawn * (filled * scale)[:, None, None]).reshape(-1, hidden)


@partial(jax.jit, static_argnames=("head",))
def apply_head(
    params: Params,
    members: jax.Array,
    slot_mask: jax.Array,
    outputs: PoolOutputs,
    seed: jax.Array,
    *,
    head: FusionHead,
) -> jax.Array:
    """Fused logits `[n_examples]` of one trained head."""
    return apply_module(head, params, outputs.outputs[seed], members, slot_mask)


def slots_of(members: tuple[int, ...], n_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill slots with a set in pool order: positions `[n_slots]`, mask `[n_slots]`."""
    if len(members) > n_slots or len(set(members)) != len(members):
        raise ValueError(f"a head of {n_slots} slots cannot hold the set {members}")
    slots = np.zeros(n_slots, np.int32)
    slots[: len(members)] = sorted(members)
    return slots, np.arange(n_slots) < len(members)


class _Set(NamedTuple):
    """What is fused: `[n_slots]` pool positions, and which slots they fill."""

    members: Any
    slot_mask: Any


def _head_keys(of_seed: jax.Array, fused: _Set, n_pool: int) -> jax.Array:
    """Keys of a head's first weights and of its dropout, `[2]`, by that of its seed.

    The set counts as the bits of its positions, in words of 32, so no order and no
    number of slots changes them. Bits of no set are the batches'.
    """
    n_words, position = -(-n_pool // 32), fused.members.astype(jnp.uint32)
    bits = jnp.where(fused.slot_mask, jnp.uint32(1) << (position % 32), jnp.uint32(0))
    words = [
        jnp.where(position // 32 == word, bits, jnp.uint32(0)).sum(dtype=jnp.uint32)
        for word in range(n_words)
    ]
    last = (n_words,) if n_words > 1 else ()
    return jax.random.split(reduce(jax.random.fold_in, (*words, *last), of_seed))


def _permuted(
    train: PoolOutputs, seed: jax.Array, read: jax.Array, key: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One epoch's order of a seed's pool, in batches of `size`.

    Encoders that no head reads become zeros: `read` is `[n_pool]` bool. Returned are
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
    """Pack a head's weights; its kernel, nearly all of it, is not copied."""
    rest = dict(params["params"])
    kernel = rest.pop("kernel")
    flat, unravel = ravel_pytree(rest)
    return (kernel, flat), lambda packed: {
        "params": {"kernel": packed[0], **unravel(packed[1])}
    }


@partial(jax.jit, static_argnames=("head", "config"))
def start_heads(
    keys: jax.Array,
    sets: _Set,
    train: PoolOutputs,
    valid: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> FitState:
    """States before the first epoch, leaves `[n_seeds, n_sets, ...]`; keys by seed.

    They count as weights that may be kept: what training does not improve on the
    validation rows stays the mean logit.
    """

    def start_head(seed: jax.Array, seed_key: jax.Array, fused: _Set) -> FitState:
        key = _head_keys(seed_key, fused, train.n_pool)[0]
        params = head.init(key, train.outputs[seed][..., :1], *fused)
        state = start_fit(params, config, _kernel_and_rest)
        logits = apply_module(head, params, valid.outputs[seed], *fused)
        first = masked_auroc(logits, valid.labels, valid.weights)
        info = state.info._replace(best_auroc=jnp.nan_to_num(first, nan=-1.0))
        state = state._replace(info=info)
        # An empty set is done before it begins.
        since_best = jnp.where(fused.slot_mask.any(), 0, config.patience)
        return state._replace(epochs_since_best=since_best)

    def start_seed(args: tuple[jax.Array, jax.Array]) -> FitState:
        return jax.lax.map(partial(start_head, *args), sets)

    return jax.lax.map(start_seed, (jnp.arange(train.n_seeds), keys))


@partial(jax.jit, static_argnames=("head", "config"))
def train_heads(
    states: FitState,
    number: jax.Array,
    keys: jax.Array,
    sets: _Set,
    train: PoolOutputs,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Take an epoch's steps with every head that is not done; also the mean losses."""
    size = config.batch_size

    def train_seed(args: tuple[jax.Array, jax.Array, FitState]):
        seed, seed_key, states = args
        batch_key = reduce(jax.random.fold_in, (0, number), seed_key)
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

            dropout_key = _head_keys(seed_key, fused, train.n_pool)[1]
            keys = Keys(noise_key, jax.random.fold_in(dropout_key, number))
            return take_steps(state, loss, batches, keys, config, _kernel_and_rest)

        def train_head(args):
            state, fused, is_active = args
            done = state, jnp.float32(jnp.nan)
            return jax.lax.cond(is_active, lambda: steps(state, fused), lambda: done)

        return jax.lax.map(train_head, (states, sets, active))

    return jax.lax.map(train_seed, (jnp.arange(train.n_seeds), keys, states))


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

    Sets are `[n_sets, n_slots]` int32 positions in the pool, filled slots first; a row
    of `slot_masks` that is False trains nothing. A batch is taken whole. Weights and
    info are on the host, leaves `[n_sets, n_seeds, ...]`.
    """
    placed = jax.device_put(_Set(sets, slot_masks))
    fixed = {"head": head, "config": dataclasses.replace(config, n_microbatches=1)}
    keys = stream_keys(config.root_seed, HEADS, range(train.n_seeds))
    learner = Learner(
        lambda: start_heads(keys, placed, train, valid, **fixed),
        lambda states, number, group: train_heads(
            states, number, keys, placed, group, **fixed
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
    questions = np.asarray(valid.questions)[used]
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
    is_used = np.reshape([is_gain(*pair, labels, questions) for pair in pairs], shape)
    mean_auroc = np.reshape([auroc(x, labels).value for x in mean_scores], shape)
    best = np.where(is_used, state.info.best_auroc, mean_auroc).astype(np.float32)
    return state._replace(
        best_params=zero_output(is_used), info=state.info._replace(best_auroc=best)
    )

"""Fusion heads and their training: from outputs of several encoders to one logit.

Paper, section 3.3 and appendix B. A head has a fixed number of slots; a set of encoders
fills the first few in pool order, and the others are masked. So all sets share one
compiled training run, and results depend only on (set, seed), not on the slots.

Heads are small, so most of the cost is outside their matrix products. The heads of a
seed share batches, as its encoders do: the pool is permuted once per epoch, and heads
read contiguous slices instead of gathering their own rows. Finished heads are skipped.

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

OUTPUT = ("out_kernel", "out_bias")  # if these are zero, a head is the mean logit
_SUREST = 1e-6  # probabilities are clipped to [_SUREST, 1 - _SUREST]
LARGEST = math.log((1 - _SUREST) / _SUREST)  # the largest logit that this allows


@jax.custom_vjp
def slot_products(
    kernel: jax.Array,
    pool: jax.Array,
    members: jax.Array,
    start: jax.Array,
    keep: jax.Array,
    n_filled: jax.Array,
) -> jax.Array:
    """Sum `kernel[s].T @ (pool[members[s]] * keep[s])` over the filled slots s.

    Only `kernel` has a gradient, since the encoders are frozen.

    Args:
      kernel: `[n_slots, d_output, hidden]`.
      pool: `[n_pool, d_output, n_all]`.
      members: `[n_slots]` int32 positions in the pool, filled slots first.
      start: int32, the first of the `n_examples` consecutive examples of the batch.
      keep: `[n_slots, n_examples]` float32 factors; the sum is `[hidden, n_examples]`.
      n_filled: int32, number of filled slots.
    """
    return _forward(kernel, pool, members, start, keep, n_filled)[0]


def _seen(pool, members, start, keep, slot) -> jax.Array:
    """Return one slot's part of the batch, `[d_output, n_examples]`."""
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
        """Number of training seeds."""
        return self.outputs.shape[0]

    @property
    def n_pool(self) -> int:
        """Number of encoders per seed."""
        return self.outputs.shape[1]


def head_inputs(pooled: jax.Array, logits: jax.Array) -> jax.Array:
    """Return a head's inputs `[..., d_pooled + 1, n_examples]`: pooled vectors and P.

    `pooled` is `[..., n_examples, d_pooled]`, and `logits` `[..., n_examples]`.
    """
    p_correct = jax.nn.sigmoid(logits)[..., None, :]
    return jnp.concatenate([jnp.swapaxes(pooled, -1, -2), p_correct], axis=-2)


def pool_outputs(
    outputs: tuple[MemberOutputs, ...],
    n_seeds: int,
    labels: np.ndarray,
    questions: np.ndarray,
) -> PoolOutputs:
    """Join the seed-major grids of one or more passes into one pool.

    The passes are over the same examples, in pool order: with context, then
    closed-book; each has `n_seeds * n_encoders` members. Labels and questions (names or
    numbers) are `[n_examples]`; every example counts once.
    """
    numbers = np.unique(questions, return_inverse=True)[1].astype(np.int32)
    on_host = np.array(labels, np.float32), np.ones(np.shape(labels), np.float32)
    of_rows = jax.device_put((*on_host, numbers))
    return PoolOutputs(_side_by_side(outputs, n_seeds), *of_rows)


@partial(jax.jit, static_argnums=1)
def _side_by_side(outputs: tuple[MemberOutputs, ...], n_seeds: int) -> jax.Array:
    """Return `PoolOutputs.outputs`, compiled as a whole instead of step by step."""
    grids = [head_inputs(x.pooled, x.logits) for x in outputs]
    by_seed = [grid.reshape(n_seeds, -1, *grid.shape[1:]) for grid in grids]
    return jnp.concatenate(by_seed, axis=1)


def keep_encoders(
    key: jax.Array, n_examples: int, slot_mask: jax.Array, rate: float
) -> jax.Array:
    """Draw which encoders each example sees in one training step (encoder dropout).

    Each is hidden independently with probability `rate`. If that would hide all of
    them, one filled slot, chosen uniformly, stays: a head cannot learn from nothing.
    `slot_mask` is `[n_slots]` bool, True for filled slots; the result is `[n_slots,
    n_examples]` bool, False on empty slots.
    """
    # Counted slot by slot, so that empty slots change nothing for the filled ones.
    bits = hashed_bits(key, 0, (slot_mask.shape[0], n_examples))
    draws = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    filled = slot_mask[:, None]
    keep = (draws >= rate) & filled
    # If all draws are below the rate, each slot is equally likely to have the largest.
    last = jnp.argmax(jnp.where(filled, draws, -1.0), axis=0)
    only = (jnp.arange(slot_mask.shape[0])[:, None] == last[None]) & filled
    return jnp.where(keep.any(axis=0)[None], keep, only)


class FusionHead(nn.Module):
    """Two-layer MLP over pooled vectors, scores and scores' absolute differences."""

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

        Hidden encoders and their differences of scores are zero. The others are not
        rescaled, since the LayerNorm after the first layer removes changes of scale.

        Args:
          pool: `[n_pool, d_pooled + 1, n_all]`, see `head_inputs`.
          members: `[n_slots]` int32 positions in the pool.
          slot_mask: `[n_slots]` bool, True for filled slots, which come first.
          examples: the first example and their number; None takes all.
          key: key of encoder dropout; None outside training.
        """
        cfg, n_slots, d_output = self.config, len(members), pool.shape[1]
        start, n_examples = (0, pool.shape[2]) if examples is None else examples
        first, second = np.triu_indices(n_slots, 1)
        kernel = self.param("kernel", kernel_init, cfg.hidden, d_output, slot_mask)
        # Weights of differences start at zero: a head begins on the encoders only.
        gap_kernel = self.param("gaps", nn.initializers.zeros, (len(first), cfg.hidden))
        bias = self.param("bias", nn.initializers.zeros, (cfg.hidden,))
        keep = jnp.broadcast_to(slot_mask[:, None], (n_slots, n_examples))
        if key is not None:
            keep = keep_encoders(key, n_examples, slot_mask, cfg.encoder_dropout)
        # Computed once per slot, not once per channel.
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
        p_correct = jnp.clip(scores, _SUREST, 1 - _SUREST)
        logits = (jnp.log(p_correct) - jnp.log1p(-p_correct)) * keep
        mean = logits.sum(0) / jnp.maximum(keep.sum(0), 1.0)  # of the encoders seen
        return mean + weights @ nn.gelu(norm(x)) + offset


def kernel_init(
    key: jax.Array, hidden: int, d_output: int, slot_mask: jax.Array
) -> jax.Array:
    """Draw the first layer, `[n_slots * d_output, hidden]`; zero for empty slots.

    The fan-in counts filled slots and their pairs. Each slot has its own key, so that a
    head does not depend on the number of slots.
    """

    def draw(slot: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, slot), (d_output, hidden))

    # Not with `vmap`, since drawing with several keys takes a second to compile.
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
    """Return the fused logits `[n_examples]` of one trained head."""
    return apply_module(head, params, outputs.outputs[seed], members, slot_mask)


def slots_of(members: tuple[int, ...], n_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a set's pool positions by slot, `[n_slots]`, and the mask of its slots."""
    if len(members) > n_slots or len(set(members)) != len(members):
        raise ValueError(f"expected at most {n_slots} distinct members, got {members}")
    slots = np.zeros(n_slots, np.int32)
    slots[: len(members)] = sorted(members)
    return slots, np.arange(n_slots) < len(members)


class _Set(NamedTuple):
    """A set to fuse: pool positions `[n_slots]`, and the mask of filled slots."""

    members: Any
    slot_mask: Any


def _head_keys(of_seed: jax.Array, fused: _Set, n_pool: int) -> jax.Array:
    """Return keys `[2]` of a head's first weights and its dropout, from its seed's key.

    Folded in are the bits of the set's positions in words of 32, so that neither order
    nor number of slots matters. The bits of the empty set are for the batches.
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
    """Return a seed's pool in the order of one epoch, in batches of `size`.

    Encoders that no head reads become zeros: `read` is `[n_pool]` bool. Returned are
    outputs `[n_pool, d_output, n_steps * size]`, batch after batch, and labels and
    shares `[n_steps, size]`.
    """
    rows, shares = epoch_batches(key, train.weights, size)
    order = rows.reshape(-1)

    d_output = train.outputs.shape[2]

    def permute(encoder: jax.Array, channel: jax.Array) -> jax.Array:
        # Checking bounds would take as long as reading; all rows are within them.
        values = train.outputs[seed, encoder, channel]
        return values.at[order].get(mode="promise_in_bounds")

    def permute_encoder(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        encoder, is_read = pair
        # One channel at a time: XLA would transpose a whole encoder to gather it.
        each = partial(jax.lax.map, partial(permute, encoder), jnp.arange(d_output))
        zeros = jnp.zeros((d_output, len(order)), train.outputs.dtype)
        return jax.lax.cond(is_read, each, lambda: zeros)

    permuted = jax.lax.map(permute_encoder, (jnp.arange(train.n_pool), read))
    return permuted, train.labels[rows], shares


def _kernel_and_rest(params: Params) -> tuple[Any, Callable[[Any], Params]]:
    """Pack a head's weights without copying the kernel, which is nearly all of them."""
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
    """Return states before the first epoch, leaves `[n_seeds, n_sets, ...]`.

    `keys` are `[n_seeds]`. The first weights may be kept, too: a head that training
    does not improve on the validation rows stays the mean logit.
    """

    def start_head(seed: jax.Array, seed_key: jax.Array, fused: _Set) -> FitState:
        key = _head_keys(seed_key, fused, train.n_pool)[0]
        params = head.init(key, train.outputs[seed][..., :1], *fused)
        state = start_fit(params, config, _kernel_and_rest)
        logits = apply_module(head, params, valid.outputs[seed], *fused)
        first = masked_auroc(logits, valid.labels, valid.weights)
        info = state.info._replace(best_auroc=jnp.nan_to_num(first, nan=-1.0))
        state = state._replace(info=info)
        # An empty set has no training to do.
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
    """Train every unfinished head for an epoch; return states and mean losses."""
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
    """Return logits `[n_seeds, n_sets, n_examples]`; zeros for finished heads."""
    # The pools of all seeds as one, since slicing a seed's would copy it every epoch.
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
    """Train a head for every set and seed, on the encoders of the same seed.

    Sets are `[n_sets, n_slots]` int32 positions in the pool, filled slots first; a row
    of `slot_masks` that is all False trains nothing. Batches are not split. Weights and
    info are returned on the host, leaves `[n_sets, n_seeds, ...]`.
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
    """Replace a head by the mean logit if its gain over that may be chance."""
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

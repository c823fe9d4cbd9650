"""The fusion head: from the outputs of several frozen encoders to one logit.

Paper, section 3.3 and appendix B. A head has a fixed number of slots, of which a set of
encoders fills the first few in pool order; the rest is masked. So all sets share one
compiled training run, and the result depends on (set, seed) only, not on the slots.

Arrays are `[d, n_examples]`, examples innermost, as in the encoders.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.config import FusionConfig
from beatrice.jaxprobe.encoder import MemberOutputs, Params, apply_module
from beatrice.jaxprobe.kernels.masked import materialize
from beatrice.jaxprobe.kernels.random import hashed_bits

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
    """Outputs of the pool of encoders for labelled examples, seed by seed.

    Attributes:
      outputs: `[n_seeds, n_pool, d_pooled + 1, n_examples]` float32, see `head_inputs`.
      labels: `[n_examples]` float32, 1 where the answer is correct.
      weights: `[n_examples]` float32, at least 0.
    """

    outputs: Any
    labels: Any
    weights: Any

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
    weights: np.ndarray | None = None,
) -> PoolOutputs:
    """Lay the seed-major grids of one or more passes side by side as one pool.

    Args:
      outputs: one per pass over the same examples, in pool order: with context, then
        closed-book. Each has `n_seeds * n_encoders` members.
      n_seeds: of every grid.
      labels: `[n_examples]` bool.
      weights: `[n_examples]`, or None for ones.
    """
    if weights is None:
        weights = np.ones(np.shape(labels))
    on_host = (np.array(x, np.float32) for x in (labels, weights))
    return PoolOutputs(_side_by_side(outputs, n_seeds), *jax.device_put(tuple(on_host)))


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
      key: of the draw, see `jaxprobe.kernels.random`.
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
        """Fuse a batch.

        Hidden encoders are zero and the others are not rescaled: the LayerNorm after
        the first layer removes the change of scale. A difference needs both its slots.

        Args:
          pool: `[n_pool, d_pooled + 1, n_all]`, see `head_inputs`.
          members: `[n_slots]` int32 positions in the pool.
          slot_mask: `[n_slots]` bool, True on the filled slots, which come first.
          examples: the first one, and how many from there; None takes all.
          key: of encoder dropout's draws; None outside training.

        Returns:
          `[n_examples]` logits.
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

    Args:
      scores: `[n_slots, n_examples]` probabilities.
      keep: `[n_slots, n_examples]` 1 where an encoder is seen, else 0.
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

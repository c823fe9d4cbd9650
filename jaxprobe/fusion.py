"""The fusion head: what several frozen encoders say, made into one logit.

Paper, section 3.3 and appendix B. A head has a fixed number of slots, of which a set of
encoders fills the first few in pool order; the rest is masked. So all sets share one
compiled training run, and the result depends on (set, seed) only, not on the slots.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxprobe.draws import HEADS, draw_weights, hashed_bits, mix, words_of
from jaxprobe.fit import FitInfo, Params, TrainConfig, fit
from jaxprobe.grid import Codes
from jaxprobe.metrics import masked_auroc


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Shape of a fusion head; defaults follow the paper, appendix B."""

    hidden: int = 128
    encoder_dropout: float = 0.3  # probability that a whole encoder is hidden
    n_slots: int = 4

    def __post_init__(self):
        """Refuse a head without slots, or one that hides every encoder."""
        if self.n_slots < 1 or not 0.0 <= self.encoder_dropout < 1.0:
            raise ValueError(f"need n_slots >= 1 and 0 <= encoder_dropout < 1: {self}")


class PoolCodes(NamedTuple):
    """What the pool of encoders says of labelled examples, seed by seed.

    Attributes:
      logits: `[n_seeds, n_pool, n_examples]` float32.
      pooled: `[n_seeds, n_pool, n_examples, d_pooled]` float32.
      labels: `[n_examples]` float32, 1 where the answer is correct.
      weights: `[n_examples]` float32, at least 0.
    """

    logits: Any
    pooled: Any
    labels: Any
    weights: Any


def pool_codes(
    codes: tuple[Codes, ...],
    n_seeds: int,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
) -> PoolCodes:
    """Lay the seed-major grids of one or more passes side by side as one pool.

    Args:
      codes: one per pass over the same examples, in pool order: with context, then
        closed-book. Each has `n_seeds * n_encoders` members.
      n_seeds: of every grid.
      labels: `[n_examples]` bool.
      weights: `[n_examples]`, or None for ones.
    """

    def by_seed(x):
        return x.reshape(n_seeds, -1, *x.shape[1:])

    labels = jnp.asarray(np.asarray(labels), jnp.float32)
    return PoolCodes(
        jnp.concatenate([by_seed(jnp.asarray(c.logits)) for c in codes], axis=1),
        jnp.concatenate([by_seed(jnp.asarray(c.pooled)) for c in codes], axis=1),
        labels,
        jnp.ones_like(labels) if weights is None else jnp.asarray(weights, jnp.float32),
    )


def keep_encoders(
    words: jax.Array, n_examples: int, slot_mask: jax.Array, rate: float
) -> jax.Array:
    """Which encoders an example sees in one training step.

    Each is hidden independently with probability `rate`. Where that would hide all of
    them, one filled slot, chosen uniformly, stays: a head cannot learn from nothing.

    Args:
      words: of the draw, see `jaxprobe.draws`.
      n_examples: in the batch.
      slot_mask: `[n_slots]` bool, True where a slot is filled.
      rate: probability of hiding.

    Returns:
      `[n_examples, n_slots]` bool, False on empty slots.
    """
    # Counted slot by slot, so that empty slots change nothing for the filled ones.
    bits = hashed_bits(words, 0, (slot_mask.shape[0], n_examples))
    draws = (bits >> 8).T.astype(jnp.float32) * np.float32(2.0**-24)
    filled = slot_mask[None, :]
    keep = (draws >= rate) & filled
    # Given that all draws are below the rate, the largest is equally likely anywhere.
    last = jnp.argmax(jnp.where(filled, draws, -1.0), axis=1)
    only = (jnp.arange(slot_mask.shape[0])[None, :] == last[:, None]) & filled
    return jnp.where(keep.any(axis=1)[:, None], keep, only)


def slot_rows(pooled: jax.Array, logits: jax.Array) -> jax.Array:
    """What the encoders in the slots say of each example, as one row.

    Laid out once per head, so that a training step gathers whole rows.

    Args:
      pooled: `[n_slots, n_examples, d_pooled]`.
      logits: `[n_slots, n_examples]`, turned into probabilities here.

    Returns:
      `[n_examples, d_row]`: slot by slot the pooled vector and the probability, then
      the absolute differences of the probabilities of each pair of slots.
    """
    n_slots, n_examples, _ = pooled.shape
    first, second = np.triu_indices(n_slots, 1)
    scores = jax.nn.sigmoid(logits)
    said = jnp.concatenate([pooled, scores[..., None]], axis=-1)
    said = jnp.moveaxis(said, 0, 1).reshape(n_examples, -1)
    return jnp.concatenate([said, jnp.abs(scores[first] - scores[second]).T], axis=-1)


def row_mask(keep: jax.Array, d_pooled: int) -> jax.Array:
    """Which entries of `slot_rows` an example sees; a pair needs both its slots.

    Args:
      keep: `[n_examples, n_slots]` float32, 1 where a slot is seen.
      d_pooled: width of a pooled vector.

    Returns:
      `[n_examples, d_row]` float32.
    """
    n_examples, n_slots = keep.shape
    pairs = np.zeros((n_slots, n_slots * (n_slots - 1) // 2), np.float32)
    for slots in np.triu_indices(n_slots, 1):
        pairs[slots, np.arange(pairs.shape[1])] = 1.0
    both = jnp.maximum(keep @ pairs - 1.0, 0.0)
    wide = jnp.broadcast_to(keep[:, :, None], (*keep.shape, d_pooled + 1))
    return jnp.concatenate([wide.reshape(n_examples, -1), both], axis=-1)


class FusionHead(nn.Module):
    """Two-layer MLP over pooled vectors, scores, and their absolute differences."""

    config: FusionConfig

    @nn.compact
    def __call__(
        self, rows: jax.Array, slot_mask: jax.Array, words: jax.Array | None = None
    ) -> jax.Array:
        """Fuse a batch.

        Hidden encoders are zero and the others are not rescaled: the LayerNorm after
        the first layer removes the change of scale.

        Args:
          rows: `[n_examples, d_row]`, see `slot_rows`.
          slot_mask: `[n_slots]` bool.
          words: of encoder dropout's draws; None outside training.

        Returns:
          `[n_examples]` logits.
        """
        cfg, n_examples, n_slots = self.config, rows.shape[0], slot_mask.shape[0]
        d_pooled = (rows.shape[1] - n_slots * (n_slots - 1) // 2) // n_slots - 1
        kernel = self.param("kernel", _row_deviation, cfg.hidden, d_pooled, slot_mask)
        bias = self.param("bias", nn.initializers.zeros, (cfg.hidden,))
        keep = jnp.broadcast_to(slot_mask[None, :], (n_examples, n_slots))
        if words is not None:
            keep = keep_encoders(words, n_examples, slot_mask, cfg.encoder_dropout)
        seen = rows * row_mask(keep.astype(jnp.float32), d_pooled)
        x = seen @ kernel + bias[None]
        x = nn.gelu(nn.LayerNorm(name="norm")(x))
        return nn.Dense(1, kernel_init=_out_deviation, name="out")(x)[:, 0]


def _out_deviation(key, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Standard deviation of the last layer's weights, `[d_in, 1]`."""
    return jnp.full(shape, shape[0] ** -0.5, dtype)


def _row_deviation(
    key: jax.Array, hidden: int, d_pooled: int, slot_mask: jax.Array
) -> jax.Array:
    """Standard deviations of the first layer, `[d_row, hidden]`; see `slot_rows`.

    Fan-in counts filled slots, and a slot's draws do not depend on the number of slots.
    Disagreements start without a say, so that the head begins as one over the encoders
    alone.
    """
    n_slots = slot_mask.shape[0]
    filled = jnp.repeat(slot_mask.astype(jnp.float32), d_pooled + 1)
    n = slot_mask.astype(jnp.float32).sum()
    scale = jax.lax.rsqrt(jnp.maximum(n * (d_pooled + 1) + n * (n - 1) / 2, 1.0))
    deviation = jnp.pad(filled * scale, (0, n_slots * (n_slots - 1) // 2))
    return jnp.broadcast_to(deviation[:, None], (deviation.shape[0], hidden))


def init_head(
    head: FusionHead, words: jax.Array, rows: jax.Array, slot_mask: jax.Array
) -> Params:
    """Initial weights; the other arguments are those of a call."""
    # The key is for Flax only: no initialiser draws from it.
    deviations = head.init(jax.random.key(0), rows[:1], slot_mask)
    return draw_weights(deviations, words)


def head_words(
    config: TrainConfig, members: jax.Array, slot_mask: jax.Array, seed: jax.Array
) -> jax.Array:
    """Words of a head's draws, from its set and its seed; empty slots do not enter.

    The set enters as a sum of hashes, which no order and no number of slots changes.
    """
    bits = (members.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    of_set = jnp.where(slot_mask, bits, jnp.uint32(0)).sum(dtype=jnp.uint32)
    return words_of(config.root_seed, HEADS, seed, of_set)


def rows_of(codes: PoolCodes, members: jax.Array, seed: jax.Array) -> jax.Array:
    """Rows of a set's slots for one seed, `[n_examples, d_row]`."""
    return slot_rows(codes.pooled[seed, members], codes.logits[seed, members])


def fit_head(
    members: jax.Array,
    slot_mask: jax.Array,
    seed: jax.Array,
    train: PoolCodes,
    valid: PoolCodes,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[Params, FitInfo]:
    """Train one head on one set; it reads the encoders of its own seed.

    Args:
      members: `[n_slots]` int32 positions in the pool.
      slot_mask: `[n_slots]` bool; all False trains nothing.
      seed: scalar int32.
      train: codes of the training rows.
      valid: codes of the validation rows.
      head: the module.
      config: the protocol.
    """
    words = head_words(config, members, slot_mask, seed)
    train_rows, valid_rows = (rows_of(part, members, seed) for part in (train, valid))
    params = init_head(head, words, train_rows, slot_mask)

    def loss(params, rows, shares, _, dropout_words):
        batch = jnp.take(train_rows, rows, axis=0)
        logits = head.apply(params, batch, slot_mask, dropout_words)
        losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[rows])
        return (losses * shares).sum()

    def validate(params):
        logits = head.apply(params, valid_rows, slot_mask)
        return masked_auroc(logits, valid.labels, valid.weights)

    return fit(
        params,
        loss,
        validate,
        weights=train.weights,
        batch_words=mix(words, 0),
        member_words=mix(words, 1),
        config=config,
        enabled=slot_mask.any(),
    )


@partial(jax.jit, static_argnames=("head", "config"))
def fit_heads(
    sets: jax.Array,
    slot_masks: jax.Array,
    seeds: jax.Array,
    train: PoolCodes,
    valid: PoolCodes,
    *,
    head: FusionHead,
    config: TrainConfig,
) -> tuple[Params, FitInfo]:
    """Train many heads in one call, one after another on the device.

    Args:
      sets: `[n_heads, n_slots]` int32 positions in the pool, filled slots first.
      slot_masks: `[n_heads, n_slots]` bool; a row of False is skipped.
      seeds: `[n_heads]` int32.
      train: codes of the training rows.
      valid: codes of the validation rows.
      head: the module.
      config: the protocol.

    Returns:
      weights and info, leaves `[n_heads, ...]`.
    """

    def one(args):
        return fit_head(*args, train, valid, head=head, config=config)

    return jax.lax.map(one, (sets, slot_masks, seeds))


@partial(jax.jit, static_argnames=("head",))
def apply_head(
    params: Params,
    members: jax.Array,
    slot_mask: jax.Array,
    codes: PoolCodes,
    seed: jax.Array,
    *,
    head: FusionHead,
) -> jax.Array:
    """Fused logits `[n_examples]` of one trained head."""
    return head.apply(params, rows_of(codes, members, seed), slot_mask)


def slots_of(members: tuple[int, ...], n_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill slots with a set in pool order: positions `[n_slots]`, mask `[n_slots]`.

    Raises:
      ValueError: if the set does not fit or repeats a member.
    """
    if len(members) > n_slots or len(set(members)) != len(members):
        raise ValueError(f"a head of {n_slots} slots cannot hold the set {members}")
    slots = np.zeros(n_slots, np.int32)
    slots[: len(members)] = sorted(members)
    return slots, np.arange(n_slots) < len(members)

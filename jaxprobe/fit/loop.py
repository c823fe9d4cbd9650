"""One training run, whole inside the compiler: encoders and fusion heads share it.

AdamW, the rate halved after some epochs without a validation gain, training stopped
after some more, the best weights kept (paper, appendix B). Epochs are a
`lax.while_loop`, steps a `lax.scan`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxprobe.config import TrainConfig
from jaxprobe.kernels.random import hashed_permutation, mix

Params = optax.Params
Loss = Callable[..., jax.Array]  # of weights, the arrays of a batch, and `Words`


class FitInfo(NamedTuple):
    """What a person wants to know of one training run.

    Attributes:
      valid_auroc: `[max_epochs]`, NaN after the last epoch.
      train_loss: `[max_epochs]` mean over the epoch's steps, NaN after the last epoch.
      best_auroc: validation AUROC of the weights that are kept; -1 where undefined.
      best_epoch: the epoch that gave them, from 0.
      n_epochs: epochs that were run.
      learning_rate: at the end, after halvings.
    """

    valid_auroc: Any
    train_loss: Any
    best_auroc: Any
    best_epoch: Any
    n_epochs: Any
    learning_rate: Any


class Moments(NamedTuple):
    """State of AdamW: moments, shaped as the weights, and the number of steps taken."""

    first: Params
    second: Params
    count: jax.Array


class FitState(NamedTuple):
    """What the next epoch needs."""

    params: Params
    moments: Moments
    best_params: Params
    epochs_since_best: jax.Array  # epochs since the last validation gain
    epoch: jax.Array
    info: FitInfo


class Words(NamedTuple):
    """Words of a run's draws: its batches, and what is the member's own."""

    batch: jax.Array
    member: jax.Array


def adamw_step(
    params: Params,
    grads: Params,
    moments: Moments,
    rate: jax.Array,
    decay: float,
) -> tuple[Params, Moments]:
    """One AdamW step (betas 0.9 and 0.999, eps 1e-8, decay decoupled).

    Give it few leaves: those of an encoder as one vector, else it is sixty small loops.
    Written out because optax 0.2 raises an integer count to a power, which JAX's strict
    dtype promotion refuses.
    """
    b1, b2 = 0.9, 0.999
    count = moments.count + 1
    steps = count.astype(jnp.float32)
    first_share, second_share = 1 - b1**steps, 1 - b2**steps

    def one(x, g, first, second):
        first = b1 * first + (1 - b1) * g
        second = b2 * second + (1 - b2) * g * g
        spread = jnp.sqrt(second / second_share) + 1e-8
        step = first / first_share / spread + decay * x
        return x - rate * step, first, second

    stepped = jax.tree.map(one, params, grads, moments.first, moments.second)
    kinds = jax.tree.structure(params), jax.tree.structure((0, 0, 0))
    params, first, second = jax.tree.transpose(*kinds, stepped)
    return params, Moments(first, second, count)


def epoch_batches(
    words: jax.Array, epoch: jax.Array, weights: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Shuffle rows into the batches of an epoch.

    Args:
      words: of the run's batches.
      epoch: its number.
      weights: `[n_rows]` row weights.
      batch_size: rows per batch; the last one may hold fewer.

    Returns:
      row numbers `[n_steps, batch_size]`, and each row's share of its batch's loss,
      `[n_steps, batch_size]`, which sum to 1 per batch and are 0 on the excess.
    """
    n_rows = weights.shape[0]
    n_steps = -(-n_rows // batch_size)
    n_excess = n_steps * batch_size - n_rows
    shuffle = mix(mix(words, epoch), 1)
    rows = jnp.pad(hashed_permutation(shuffle, n_rows), (0, n_excess))
    real = (jnp.arange(n_steps * batch_size) < n_rows).astype(jnp.float32)
    rows, real = (x.reshape(n_steps, batch_size) for x in (rows, real))
    shares = weights[rows] * real
    return rows, shares / jnp.maximum(shares.sum(axis=1, keepdims=True), 1e-6)


def _microbatched(loss, params: Params, batch, words, n_microbatches: int):
    """Loss and gradient of a batch as the sum over its pieces."""
    gradient = jax.value_and_grad(loss)
    if n_microbatches == 1:
        return gradient(params, *batch, *words)

    def add(total, piece):
        index, *arrays = piece
        piece_words = (mix(word, index) for word in words)
        new = gradient(params, *arrays, *piece_words)
        return jax.tree.map(jnp.add, total, new), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    parts = (x.reshape(n_microbatches, -1, *x.shape[1:]) for x in batch)
    return jax.lax.scan(add, zero, (jnp.arange(n_microbatches), *parts))[0]


def start_fit(params: Params, config: TrainConfig) -> FitState:
    """State before the first epoch."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    empty = jnp.full((config.max_epochs,), jnp.nan, jnp.float32)
    info = FitInfo(
        valid_auroc=empty,
        train_loss=empty,
        best_auroc=jnp.float32(-1.0),
        best_epoch=jnp.int32(0),
        n_epochs=jnp.int32(0),
        learning_rate=jnp.float32(config.learning_rate),
    )
    moments = Moments(zeros, zeros, jnp.int32(0))
    return FitState(params, moments, params, jnp.int32(0), jnp.int32(0), info)


def end_epoch(
    state: FitState, loss: jax.Array, auroc: jax.Array, config: TrainConfig
) -> FitState:
    """Keep the best weights, halve the rate, count the epoch."""
    info = state.info
    better = auroc > info.best_auroc  # False for NaN: the first weights are kept then
    epochs_since_best = jnp.where(better, 0, state.epochs_since_best + 1)
    halve = (epochs_since_best > 0) & (epochs_since_best % config.lr_patience == 0)
    best_params = jax.tree.map(
        lambda new, old: jnp.where(better, new, old), state.params, state.best_params
    )
    info = FitInfo(
        valid_auroc=info.valid_auroc.at[state.epoch].set(auroc),
        train_loss=info.train_loss.at[state.epoch].set(loss),
        best_auroc=jnp.where(better, auroc, info.best_auroc),
        best_epoch=jnp.where(better, state.epoch, info.best_epoch),
        n_epochs=state.epoch + 1,
        learning_rate=info.learning_rate * jnp.where(halve, 0.5, 1.0),
    )
    return state._replace(
        best_params=best_params, epochs_since_best=epochs_since_best, info=info
    )


def run_epoch(
    state: FitState,
    loss: Loss,
    batches: tuple[jax.Array, ...],
    words: Words,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Take the steps of one epoch; also the mean of its losses.

    Args:
      state: before it.
      loss: of weights, the arrays of a batch, and the words of a step.
      batches: arrays `[n_steps, ...]`, and `[n_steps, n_rows, ...]` where a batch is
        taken in pieces.
      words: of the run's draws.
      config: the protocol.
    """

    def step(carry, batch):
        params, moments = carry
        index, *arrays = batch
        own = (mix(words.batch, index), mix(words.member, index))
        value, grads = _microbatched(loss, params, arrays, own, config.microbatches())
        rate = state.info.learning_rate
        return adamw_step(params, grads, moments, rate, config.weight_decay), value

    n_steps = batches[0].shape[0]
    index = state.epoch * n_steps + jnp.arange(n_steps)
    start = (state.params, state.moments)
    (params, moments), losses = jax.lax.scan(step, start, (index, *batches))
    return state._replace(params=params, moments=moments), losses.mean()


def fit(
    params: Params,
    loss: Loss,
    validate: Callable[[Params], jax.Array],
    *,
    weights: jax.Array,
    batch_words: jax.Array,
    member_words: jax.Array,
    config: TrainConfig,
    axes: tuple[str, ...] = (),
    enabled: jax.Array | bool = True,
) -> tuple[Params, FitInfo]:
    """Train one member until validation AUROC stops rising; keep its best weights.

    Args:
      params: initial weights.
      loss: of `(params, rows, shares, batch_words, member_words)`: the sum of the rows'
        losses times their shares, both `[n_piece]`.
      validate: validation AUROC of weights.
      weights: `[n_rows]` weights of the training rows, at least 0.
      batch_words: decides the batches; equal for the members that share them.
      member_words: decides dropout.
      config: the protocol.
      axes: names of the `vmap` axes around this call. Members that are done wait for
        the last one, and the epoch number stays common to all, which is what lets
        members of a seed share one gathered batch.
      enabled: False trains nothing and returns the initial weights.

    Returns:
      best weights, and info.
    """
    flat, unravel = ravel_pytree(params)
    words = Words(batch_words, member_words)

    def flat_loss(flat, *batch):
        return loss(unravel(flat), *batch)

    def active(state):
        return (state.epochs_since_best < config.patience) & jnp.asarray(enabled)

    def body(state):
        batches = epoch_batches(batch_words, state.epoch, weights, config.batch_size)
        new, mean_loss = run_epoch(state, flat_loss, batches, words, config)
        new = end_epoch(new, mean_loss, validate(unravel(new.params)), config)
        if axes:  # a block waits for its last member; those that are done stand still
            go_on = active(state)
            new = jax.tree.map(lambda a, b: jnp.where(go_on, a, b), new, state)
        return new._replace(epoch=state.epoch + 1)

    def condition(state):
        running = active(state)
        if axes:
            running = jax.lax.pmax(running.astype(jnp.int32), axes) > 0
        return running & (state.epoch < config.max_epochs)

    state = jax.lax.while_loop(condition, body, start_fit(flat, config))
    return unravel(state.best_params), state.info

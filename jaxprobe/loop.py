"""The training loop, shared by encoders, fusion heads and layer probes.

It uses AdamW, halves the learning rate after some epochs without a validation gain,
stops after some more, and keeps the best weights (paper, appendix B). Rows come in
groups: the same ones every epoch if they are in memory, or read from a store. The steps
on one group are compiled; epochs are a Python loop.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from beatrice.jaxprobe.config import TrainConfig
from beatrice.jaxprobe.metrics import masked_auroc
from beatrice.jaxprobe.random import RowKeys

Params = Any


class FitInfo(NamedTuple):
    """A summary of one training run."""

    valid_auroc: Any  # `[max_epochs]`, NaN after the last epoch
    train_loss: Any  # `[max_epochs]`, likewise: mean over groups of means over steps
    best_auroc: Any  # validation AUROC of the weights that are kept; -1 if undefined
    best_epoch: Any  # epoch of these weights, from 0
    n_epochs: Any  # number of epochs run
    learning_rate: Any  # at the end, after halvings


class FitState(NamedTuple):
    """The state of training between epochs."""

    params: Params
    opt_state: optax.OptState
    best_params: Params
    epochs_since_best: jax.Array
    info: FitInfo

    def is_active(self, config: TrainConfig) -> jax.Array:
        """Return whether training continues."""
        return self.epochs_since_best < config.patience


class Keys(NamedTuple):
    """Random keys of the steps on a group: of the batch (input noise) and a member."""

    batch: Any
    member: Any


class RowGroup(Protocol):
    """A group of rows that is in memory."""

    @property
    def labels(self) -> Any:
        """`[n_rows]` float32, 1 where the answer is correct."""

    @property
    def weights(self) -> Any:
        """`[n_rows]` float32, at least 0; 0 leaves a row out."""


class Learner(NamedTuple):
    """Members that train together; their states have two leading axes `[n, m]`."""

    start: Callable[[], FitState]  # returns the state before the first epoch
    # Takes the steps on a group, given the state and the number of groups before this
    # one; returns the state and the mean losses, `[n, m]`.
    train: Callable[[FitState, np.int32, Any], tuple[FitState, jax.Array]]
    # Returns the logits `[n, m, n_rows]` of a group's rows, given the state.
    logits: Callable[[FitState, Any], jax.Array]
    # Optionally stops members after an epoch, given the state, the number of epochs
    # run, and the groups of validation rows.
    review: Callable[[FitState, int, Iterable[Any]], FitState] | None = None


def fit(
    learners: Sequence[Learner],
    train: Callable[[int], Iterable[RowGroup]],
    valid: Callable[[], Iterable[RowGroup]],
    config: TrainConfig,
    on_epoch: Callable[[int, int], None] = lambda learner, n_epochs: None,
) -> list[FitState]:
    """Train until validation AUROC stops rising; return every learner's last state.

    All learners take their steps on a group before the next group is fetched; each
    stops when its last member is done. `train` returns the groups of an epoch.
    `on_epoch` is called with the number of a learner and of the epochs it has run.
    """
    states = [learner.start() for learner in learners]
    number = 0
    for epoch in range(config.max_epochs):
        waited = [np.asarray(state.epochs_since_best) for state in states]
        active = [i for i, x in enumerate(waited) if (x < config.patience).any()]
        if not active:
            break
        losses: dict[int, tuple[jax.Array, ...]] = {i: () for i in active}
        logits: dict[int, tuple[jax.Array, ...]] = {i: () for i in active}
        truth: tuple[tuple[jax.Array, jax.Array], ...] = ()
        for group in train(epoch):
            for i in active:
                states[i], loss = learners[i].train(states[i], np.int32(number), group)
                losses[i] += (loss,)
            jax.block_until_ready(losses)
            number += 1
            del group  # frees memory before the next one is read
        for group in valid():
            for i in active:
                logits[i] += (learners[i].logits(states[i], group),)
            jax.block_until_ready(logits)
            truth += ((group.labels, group.weights),)
            del group
        for i in active:
            results = losses[i], logits[i], truth
            state = end_epoch(states[i], np.int32(epoch), *results, config=config)
            review = learners[i].review
            states[i] = state if review is None else review(state, epoch + 1, valid())
            on_epoch(i, epoch + 1)
    return states


def shuffled(
    groups: Sequence[RowGroup], config: TrainConfig, epoch: int
) -> list[RowGroup]:
    """Return the groups in an epoch's random order, the same for every member."""
    order = np.random.default_rng((config.root_seed, epoch)).permutation(len(groups))
    return [groups[i] for i in order]


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return AdamW without its learning rate, which changes during training."""
    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(optax.scale_by_adam(), decay)


def start_fit(params: Params, config: TrainConfig, pack=ravel_pytree) -> FitState:
    """Return a member's state before its first epoch; see `take_steps` for `pack`."""
    empty = jnp.full((config.max_epochs,), jnp.nan, jnp.float32)
    info = FitInfo(
        valid_auroc=empty,
        train_loss=empty,
        best_auroc=jnp.float32(-1.0),
        best_epoch=jnp.int32(0),
        n_epochs=jnp.int32(0),
        learning_rate=jnp.float32(config.learning_rate),
    )
    opt_state = optimizer(config).init(pack(params)[0])
    return FitState(params, opt_state, params, jnp.int32(0), info)


def epoch_batches(
    key: jax.Array, weights: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Shuffle rows into batches.

    Args:
      key: key of the order.
      weights: `[n_rows]` row weights.
      batch_size: rows per batch; the last one may hold fewer.

    Returns:
      row numbers `[n_steps, batch_size]`, and each row's share of its batch's loss,
      `[n_steps, batch_size]`; shares sum to 1 per batch and are 0 on padding.
    """
    n_rows = weights.shape[0]
    n_steps = -(-n_rows // batch_size)
    n_excess = n_steps * batch_size - n_rows
    rows = jnp.pad(jax.random.permutation(key, n_rows), (0, n_excess))
    real = (jnp.arange(n_steps * batch_size) < n_rows).astype(jnp.float32)
    rows, real = (x.reshape(n_steps, batch_size) for x in (rows, real))
    shares = weights[rows] * real
    return rows, shares / jnp.maximum(shares.sum(axis=1, keepdims=True), 1e-6)


def take_steps(
    state: FitState,
    loss: Callable[..., jax.Array],
    batches: tuple[jax.Array, ...],
    keys: Keys,
    config: TrainConfig,
    pack: Callable[[Params], tuple[Any, Callable]] = ravel_pytree,
) -> tuple[FitState, jax.Array]:
    """Take one member's steps on a group; return its state and the mean loss.

    Args:
      state: state before the steps.
      loss: takes weights, the arrays of a microbatch, and its two keys.
      batches: arrays `[n_steps, n_rows, ...]`.
      keys: keys of the group.
      config: the training protocol.
      pack: packs weights into few leaves, and returns them and the inverse function.
        Sixty leaves would take sixty small loops in every step.
    """
    packed, unpack = pack(state.params)
    shape = (len(batches[0]), config.microbatches())
    step_keys = Keys(*(jax.random.split(key, shape) for key in keys))

    def step(carry, step_inputs):
        return _step(
            lambda packed, *batch: loss(unpack(packed), *batch),
            carry,
            state.info.learning_rate,
            *step_inputs,
            config=config,
        )

    start = (packed, state.opt_state)
    (packed, opt_state), losses = jax.lax.scan(step, start, (batches, step_keys))
    state = state._replace(params=unpack(packed), opt_state=opt_state)
    return state, losses.mean()


def _step(loss, carry, rate, batch, keys, config):
    """Take a step; return weights and moments, and the loss before it."""
    compute = jax.value_and_grad(loss)
    keys = Keys(*(_microbatch_keys(key, config) for key in keys))
    value, grads = _summed(
        lambda microbatch: compute(carry[0], *microbatch[0], *microbatch[1]),
        batch,
        keys,
        config,
    )
    return _move(carry, grads, rate, config), value


def _move(carry, grads, rate, config):
    """Return weights and moments after a step along a gradient."""
    packed, opt_state = carry
    # Optax raises to an integer power, which strict dtype promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer(config).update(grads, opt_state, packed)
    packed = jax.tree.map(lambda x, update: x - rate * update, packed, updates)
    return packed, opt_state


class Shared(NamedTuple):
    """What the members that take steps in turn compute once for all of them."""

    # Takes a microbatch's first array and its key; returns any tree of values.
    values: Callable[..., Any]
    # Takes all members' weights (leaves `[n_members, ...]`), whether each still trains
    # (`[n_members]` bool), and these values; returns inputs of all members, leaves
    # `[n_members, ...]`, which are differentiated with respect to the weights.
    inputs: Callable[..., Any]


def take_steps_in_turn(
    states: FitState,
    members: Any,
    loss: Callable[..., jax.Array],
    batches: tuple[jax.Array, ...],
    shared: Shared,
    keys: Keys,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Take several members' steps on a group: each step by one member after another.

    Finished members are skipped.

    Args:
      states: states before the steps, leaves `[n_members, ...]`.
      members: what distinguishes members, leaves `[n_members, ...]`.
      loss: takes a member, its weights and inputs, the arrays and the shared values of
        a microbatch, and its two keys.
      batches: arrays `[n_steps, n_rows, ...]`.
      shared: what is computed once for all members.
      keys: key of the group, and keys `[n_members]` of the members.
      config: the protocol; no more rows at once than draw together.

    Returns:
      the states, and the mean losses `[n_members]`.
    """
    _, unpack = ravel_pytree(jax.tree.map(lambda x: x[0], states.params))
    packed = jax.vmap(lambda params: ravel_pytree(params)[0])(states.params)
    is_active = states.is_active(config)
    shape = (len(batches[0]), config.microbatches())
    of_members = jax.vmap(lambda key: jax.random.split(key, shape), out_axes=1)
    step_keys = Keys(jax.random.split(keys.batch, shape), of_members(keys.member))
    split, move = (partial(f, config=config) for f in (_microbatch_keys, _move))

    def gradient(packed, microbatch):
        """Return losses `[n_members]` and the gradients of all members."""
        arrays, keys = microbatch
        values = shared.values(arrays[0], keys.batch)
        inputs, pull = jax.vjp(
            lambda x: shared.inputs(jax.vmap(unpack)(x), is_active, values), packed
        )

        def member_gradient(_, of_member):
            packed, inputs, member, is_active, key = of_member

            def member_loss(packed, inputs):
                fixed = *arrays, values, keys.batch, key
                return loss(member, unpack(packed), inputs, *fixed)

            compute = jax.value_and_grad(member_loss, argnums=(0, 1))
            nothing = jnp.float32(jnp.nan), jax.tree.map(jnp.zeros_like, of_member[:2])
            return None, jax.lax.cond(
                is_active, lambda: compute(packed, inputs), lambda: nothing
            )

        each = packed, inputs, members, is_active, keys.member
        losses, (direct, of_inputs) = jax.lax.scan(member_gradient, None, each)[1]
        return losses, direct + pull(of_inputs)[0]

    def step(carry, step_inputs):
        packed, opt_state = carry
        arrays, keys = step_inputs
        keys = Keys(split(keys.batch), jax.vmap(split, out_axes=1)(keys.member))
        losses, grads = _summed(partial(gradient, packed), arrays, keys, config)
        moved = jax.vmap(move)(carry, grads, states.info.learning_rate)
        return jax.vmap(_where)(is_active, moved, carry), losses

    carry, losses = jax.lax.scan(step, (packed, states.opt_state), (batches, step_keys))
    states = states._replace(params=jax.vmap(unpack)(carry[0]), opt_state=carry[1])
    return states, losses.mean(axis=0)


def _summed(
    compute: Callable[..., Any], batch: tuple[Any, ...], keys: Keys, config: TrainConfig
) -> Any:
    """Return `compute` of a batch, summed over its microbatches.

    `compute` takes a microbatch's arrays and its keys; `keys` are of all microbatches.
    """
    n_microbatches = config.batch_size // config.rows_at_once()
    if n_microbatches == 1:
        return compute((batch, jax.tree.map(lambda key: key[0], keys)))

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, compute(microbatch)), None

    microbatches = jax.tree.map(
        lambda x: x.reshape(n_microbatches, -1, *x.shape[1:]), batch
    )
    every = microbatches, keys
    shapes = jax.eval_shape(lambda x: compute(jax.tree.map(lambda y: y[0], x)), every)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zero, every)[0]


def _microbatch_keys(keys: jax.Array, config: TrainConfig) -> jax.Array | RowKeys:
    """Return the keys of microbatches, from those of the rows that draw together."""
    size, n_rows = config.batch_size // config.microbatches(), config.rows_at_once()
    if n_rows == size:
        return keys
    if n_rows > size:
        n_microbatches = config.batch_size // n_rows
        first = jnp.zeros(n_microbatches, jnp.int32)
        return RowKeys(keys.reshape(n_microbatches, -1), first, size)
    first = jnp.arange(0, config.batch_size, n_rows, dtype=jnp.int32)
    return RowKeys(keys[first // size], first % size, size)


@partial(jax.jit, static_argnames="config")
def end_epoch(
    states: FitState,
    epoch: jax.Array,
    losses: tuple[jax.Array, ...],
    logits: tuple[jax.Array, ...],
    truth: tuple[tuple[jax.Array, jax.Array], ...],
    *,
    config: TrainConfig,
) -> FitState:
    """Keep the best weights, halve the rate and count the epoch of unfinished members.

    `losses` `[n, m]` are of every training group; `logits` `[n, m, n_rows]` and
    `truth` (labels and weights, `[n_rows]`) of every validation group.
    """
    labels, weights = (jnp.concatenate(x) for x in zip(*truth, strict=True))

    def end_member(state: FitState, loss: jax.Array, logits: jax.Array) -> FitState:
        info, active = state.info, state.is_active(config)
        auroc = masked_auroc(logits, labels, weights)
        better = active & (auroc > info.best_auroc)  # False for NaN: keeps the first
        since_best = jnp.where(better, 0, state.epochs_since_best + 1)
        lr_patience = config.lr_patience or config.max_epochs + 1  # None: never
        halve = (since_best > 0) & (since_best % lr_patience == 0)
        new = FitInfo(
            valid_auroc=info.valid_auroc.at[epoch].set(auroc),
            train_loss=info.train_loss.at[epoch].set(loss),
            best_auroc=jnp.where(better, auroc, info.best_auroc),
            best_epoch=jnp.where(better, epoch, info.best_epoch),
            n_epochs=epoch + 1,
            learning_rate=info.learning_rate * jnp.where(halve, 0.5, 1.0),
        )
        return state._replace(
            best_params=_where(better, state.params, state.best_params),
            epochs_since_best=_where(active, since_best, state.epochs_since_best),
            info=_where(active, new, info),
        )

    loss, scores = jnp.stack(losses).mean(axis=0), jnp.concatenate(logits, axis=-1)
    return jax.vmap(jax.vmap(end_member))(states, loss, scores)


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)

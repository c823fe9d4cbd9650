"""Training from a store that is larger than memory.

A group of chunks (see `fit.streaming`) is what fits in memory. While the encoders
train on one group the next is read, so host memory holds two whatever the size of the
store.

Every encoder of a call takes its steps on a group before the next one comes: the store
is read once per epoch, not once per epoch and encoder. On one group that holds
everything the result is that of `jaxprobe.fit.grid`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxprobe.config import StreamConfig, TrainConfig
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.subsets import SUBSETS
from jaxprobe.fit.grid import (
    Labelled,
    Member,
    Trained,
    in_chunks,
    labelled,
    member_words,
)
from jaxprobe.fit.loop import (
    FitState,
    Words,
    end_epoch,
    epoch_batches,
    run_epoch,
    start_fit,
)
from jaxprobe.kernels.matmul import use_one_blas_thread
from jaxprobe.kernels.projection import Draw
from jaxprobe.kernels.random import words_of
from jaxprobe.metrics import masked_auroc
from jaxprobe.model.encoder import Encoder, Params, init_encoder


class Group(NamedTuple):
    """Examples that are in memory together.

    Attributes:
      where: `[n_rows]` indices into the store; all groups of an epoch have one length,
        and what is missing repeats the group's last example.
      is_real: `[n_rows]` bool, False on repetitions.
    """

    where: np.ndarray
    is_real: np.ndarray


def epoch_groups(
    examples: np.ndarray, config: StreamConfig, seed: Sequence[int]
) -> list[Group]:
    """Part the examples into groups, every example once.

    Chunks are permuted out at random and evenly, so that the last group is not small.

    Args:
      examples: `[n]` indices into the store, ascending.
      config: sizes.
      seed: of the order of the chunks, such as (root seed, seed, epoch).
    """
    n_chunks = -(-len(examples) // config.n_chunk)
    n_groups = -(-n_chunks // config.n_mixed)
    n_rows = -(-n_chunks // n_groups) * config.n_chunk
    chunks = [
        examples[i * config.n_chunk : (i + 1) * config.n_chunk] for i in range(n_chunks)
    ]
    order = np.random.default_rng(list(seed)).permutation(n_chunks)
    groups = []
    for part in np.array_split(order, n_groups):
        where = np.concatenate([chunks[i] for i in np.sort(part)])  # as on disk
        is_real = np.arange(n_rows) < len(where)
        groups.append(Group(np.pad(where, (0, n_rows - len(where)), "edge"), is_real))
    return groups


def prefetched(read: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield `read(item)` of each, in order, with the next one being read meanwhile.

    One thread asks and assembles; TensorStore's own threads read and decode. Neither
    holds the interpreter's lock while it works, nor does a training step.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(read, items[0]) if items else None
        for following in [*items[1:], None]:
            found = pending.result()
            if following is not None:
                pending = pool.submit(read, following)
            yield found
            del found  # or it would live until the next one is there


Read = Callable[[np.ndarray], FamilyTokens]


@partial(jax.jit, static_argnames=("encoder", "config"))
def _begin(
    member: jax.Array,
    family_mask: jax.Array,
    features: FamilyTokens,
    *,
    encoder,
    config,
) -> FitState:
    """State of one encoder before its first step."""
    own = member_words(config, member[0], member[1])[1]
    params = init_encoder(encoder, own, features, family_mask)
    return start_fit(ravel_pytree(params)[0], config)


def _unravel(
    flat: jax.Array, encoder: Encoder, features: FamilyTokens, family_mask: jax.Array
) -> Params:
    """Part a vector into the encoder's weights."""
    words = words_of(0)
    shapes = jax.eval_shape(
        partial(init_encoder, encoder), words, features, family_mask
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return ravel_pytree(zeros)[1](flat)


@partial(jax.jit, static_argnames=("encoder", "config"))
def _take_group(
    state: FitState,
    group: jax.Array,
    member: jax.Array,
    family_mask: jax.Array,
    train: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> tuple[FitState, jax.Array]:
    """Let one encoder take its steps on a group, as `fit` does on an epoch.

    Args:
      state: of the encoder.
      group: number of groups before this one in the whole training.
      member: `[2]` int32, subset and seed.
      family_mask: `[n_families]` bool.
      train: the group's rows.
      encoder: the module.
      config: the protocol.

    Returns:
      The state, and the mean loss of the steps.
    """

    def loss(flat, rows, shares, noise_words, dropout_words):
        params = _unravel(flat, encoder, train.features, family_mask)
        draw = Draw(rows, noise_words, dropout_words)
        logits, _ = encoder.apply(params, train.features, family_mask, draw)
        losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[rows])
        return (losses * shares).sum()

    words = Words(*member_words(config, member[0], member[1]))
    # Shuffle and draws of a group are those of an epoch with the group's number.
    numbered = state._replace(epoch=group)
    batches = epoch_batches(words.batch, group, train.weights, config.batch_size)
    new, value = run_epoch(numbered, loss, batches, words, config)
    return new._replace(epoch=state.epoch), value


@partial(jax.jit, static_argnames=("encoder", "n_chunk"))
def _logits(flat, family_mask, features, *, encoder, n_chunk):
    params = _unravel(flat, encoder, features, family_mask)
    return in_chunks(
        lambda batch: encoder.apply(params, batch, family_mask)[0], features, n_chunk
    )


@partial(jax.jit, static_argnames="config")
def _close(state, loss, logits, labels, config):
    """End an epoch, as `fit` does."""
    auroc = masked_auroc(logits, labels, jnp.ones_like(labels))
    state = end_epoch(state, loss, auroc, config)
    return state._replace(epoch=state.epoch + 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """Rows of a store with their labels.

    Attributes:
      where: `[n]` indices into the store, ascending.
      labels: `[n]` bool.
      read: standardised tokens of indices, in one padded width.
      config: how the rows are parted.
    """

    where: np.ndarray
    labels: np.ndarray
    read: Read
    config: StreamConfig

    def groups(self, *seed: int) -> Iterator[tuple[Group, Labelled]]:
        """Yield an epoch's groups with their signals, read one ahead."""
        place = np.arange(len(self.where))

        def fetch(group: Group) -> tuple[Group, Labelled]:
            features = self.read(self.where[group.where])
            weights = group.is_real.astype(np.float32)
            return group, labelled(features, self.labels[group.where], weights)

        yield from prefetched(fetch, epoch_groups(place, self.config, seed))


def fit_streamed(
    members: Sequence[Member],
    train: Streamed,
    valid: Streamed,
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> Trained:
    """Train encoders from a store; the protocol is that of `jaxprobe.fit.loop`.

    Args:
      members: what is trained; each waits for the others at the end of a group.
      train: training rows.
      valid: validation rows, read in the same way after every epoch.
      encoder: the module.
      config: the protocol; `root_seed` also orders the chunks.

    Returns:
      Best weights of every member, in order.
    """
    use_one_blas_thread()
    masks = [jnp.asarray(SUBSETS[m.subset]) for m in members]
    numbers = [jnp.asarray(m, jnp.int32) for m in members]
    sample = train.read(train.where[:1])
    fixed = {"encoder": encoder, "config": config}
    states = [
        _begin(number, mask, sample, **fixed)
        for number, mask in zip(numbers, masks, strict=True)
    ]
    n_groups = 0
    for epoch in range(config.max_epochs):
        active = [
            i
            for i, s in enumerate(states)
            if int(s.epochs_since_best) < config.patience
        ]
        if not active:
            break
        losses = {i: [] for i in active}
        for _, group in train.groups(config.root_seed, epoch):
            for i in active:
                states[i], value = _take_group(
                    states[i], jnp.int32(n_groups), numbers[i], masks[i], group, **fixed
                )
                losses[i].append(value)
            jax.block_until_ready([states[i].params for i in active])
            n_groups += 1
            del group
        for i, logits in _validation(states, active, masks, valid, **fixed).items():
            mean = jnp.stack(losses[i]).mean()
            labels = jnp.asarray(valid.labels, jnp.float32)
            states[i] = _close(states[i], mean, logits, labels, config)
    trained = [
        (_unravel(s.best_params, encoder, sample, mask), s.info)
        for s, mask in zip(states, masks, strict=True)
    ]
    host = [jax.tree.map(np.asarray, jax.device_get(one)) for one in trained]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *host)
    return Trained(tuple(members), *stacked)


def _validation(states, active, masks, valid: Streamed, *, encoder, config):
    """Logits of every active encoder, `[n_valid]` each, in the order of the labels."""
    found = {i: np.zeros(len(valid.where), np.float32) for i in active}
    for group, part in valid.groups(config.root_seed):
        for i in active:
            logits = _logits(
                states[i].params,
                masks[i],
                part.features,
                encoder=encoder,
                n_chunk=config.batch_size,
            )
            real = group.is_real
            found[i][group.where[real]] = np.asarray(logits)[real]
        del part
    return {i: jnp.asarray(logits) for i, logits in found.items()}

"""Train every encoder of the grid: members are subset x seed.

A member is trained whole by `fit`. Members lie side by side in blocks by `vmap`; blocks
follow one another in a Python loop, so that results can be saved and progress shown. On
a CPU a block is one member: its activations stay in cache, it stops when it is done,
and the families that it does not read cost nothing. On a GPU it is the whole grid.

Batches and input noise depend on the seed alone, so the members of a seed share them;
initial weights and dropout depend on (subset, seed), never on the block.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxprobe.config import TrainConfig
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.subsets import N_SUBSETS, SUBSETS
from jaxprobe.fit.loop import FitInfo, fit
from jaxprobe.kernels.matmul import use_one_blas_thread
from jaxprobe.kernels.projection import Draw
from jaxprobe.kernels.random import BATCHES, MEMBERS, words_of
from jaxprobe.metrics import masked_auroc
from jaxprobe.model.encoder import Encoder, MemberOutputs, Params, init_encoder

_CORES = threading.BoundedSemaphore(os.cpu_count() or 1)


class Labelled(NamedTuple):
    """Standardised features with their labels.

    Attributes:
      features: families apart, `n_examples` rows.
      labels: `[n_examples]` float32, 1 where the answer is correct.
      weights: `[n_examples]` float32, at least 0; 0 leaves a row out.
    """

    features: FamilyTokens
    labels: jax.Array
    weights: jax.Array


class Member(NamedTuple):
    """One encoder of the grid."""

    subset: int  # row of SUBSETS
    seed: int


class Block(NamedTuple):
    """Members that train together: every subset with every seed."""

    subsets: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Seed-major, as the leading axis of a trained block."""
        return tuple(Member(k, s) for s in self.seeds for k in self.subsets)


class Trained(NamedTuple):
    """Trained members; every leaf of `params` and `info` is `[n_members, ...]`."""

    members: tuple[Member, ...]
    params: Params
    info: FitInfo


def labelled(
    features: FamilyTokens, labels: np.ndarray, weights: np.ndarray | None = None
) -> Labelled:
    """Put features and boolean labels together; every row must have a label."""
    labels = np.asarray(labels)
    if labels.dtype != bool or labels.shape != (features.n_examples,):
        raise ValueError(
            f"expected one boolean label for each of {features.n_examples} "
            f"examples, got {labels.dtype} {labels.shape}; leave rows without a label "
            "out beforehand"
        )
    if weights is None:
        weights = np.ones(labels.shape)
    as_floats = (jnp.asarray(x, jnp.float32) for x in (labels, weights))
    return Labelled(features, *as_floats)


def grid_members(n_seeds: int) -> tuple[Member, ...]:
    """All subsets x seeds, seed-major: member `s * 15 + k` is subset k of seed s."""
    return Block(tuple(range(N_SUBSETS)), tuple(range(n_seeds))).members


def default_blocks(
    n_seeds: int, subsets: Sequence[int] = range(N_SUBSETS)
) -> tuple[Block, ...]:
    """Everything at once on accelerators, member by member on a CPU.

    Args:
      n_seeds: of every subset.
      subsets: rows of SUBSETS; the whole grid unless given.
    """
    whole = Block(tuple(subsets), tuple(range(n_seeds)))
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return (whole,) if whole.members else ()
    return tuple(Block((m.subset,), (m.seed,)) for m in whole.members)


def member_words(
    config: TrainConfig, subset: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Words of a member's draws: its batches (seed only), its own (subset, seed)."""
    root = config.root_seed
    return words_of(root, BATCHES, seed), words_of(root, MEMBERS, seed, subset)


def in_chunks(
    apply: Callable[[FamilyTokens], Any], features: FamilyTokens, n_chunk: int
) -> Any:
    """Apply to `n_chunk` examples at a time; results are `[n_examples, ...]`."""
    n_rows = features.n_examples
    n_chunk = min(n_chunk, n_rows)
    rows = jnp.minimum(jnp.arange(-(-n_rows // n_chunk) * n_chunk), n_rows - 1)

    def one(rows):
        return apply(features.take(rows))

    chunks = jax.lax.map(one, rows.reshape(-1, n_chunk))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n_rows], chunks)


def fit_member(
    family_mask: jax.Array,
    subset: jax.Array,
    seed: jax.Array,
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    axes: tuple[str, ...] = (),
) -> tuple[Params, FitInfo]:
    """Train one encoder; `axes` names the `vmap` axes around it (see `fit`)."""
    batch_words, own_words = member_words(config, subset, seed)
    params = init_encoder(encoder, own_words, train.features, family_mask)

    def loss(params, rows, shares, noise_words, dropout_words):
        draw = Draw(rows, noise_words, dropout_words)
        logits, _ = encoder.apply(params, train.features, family_mask, draw)
        losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[rows])
        return (losses * shares).sum()

    def validate(params):
        logits = in_chunks(
            lambda batch: encoder.apply(params, batch, family_mask)[0],
            valid.features,
            config.batch_size,
        )
        return masked_auroc(logits, valid.labels, valid.weights)

    return fit(
        params,
        loss,
        validate,
        weights=train.weights,
        batch_words=batch_words,
        member_words=own_words,
        config=config,
        axes=axes,
    )


@partial(jax.jit, static_argnames=("encoder", "config"))
def fit_block(
    family_masks: jax.Array,
    subsets: jax.Array,
    seeds: jax.Array,
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> tuple[Params, FitInfo]:
    """Train every subset with every seed; leaves are `[n_seeds * n_subsets, ...]`.

    Args:
      family_masks: `[n_subsets, n_families]` bool.
      subsets: `[n_subsets]` int32, rows of SUBSETS (they decide the random keys).
      seeds: `[n_seeds]` int32.
      train: training rows, on the device.
      valid: validation rows.
      encoder: the module.
      config: the protocol.
    """
    single = partial(fit_member, encoder=encoder, config=config)
    if len(subsets) * len(seeds) == 1:  # no vmap: it would turn branches into selects
        trained = single(family_masks[0], subsets[0], seeds[0], train, valid)
        return jax.tree.map(lambda x: x[None], trained)
    single = partial(single, axes=("subsets", "seeds"))
    over_subsets = jax.vmap(
        single, in_axes=(0, 0, None, None, None), axis_name="subsets"
    )
    over_seeds = jax.vmap(
        over_subsets, in_axes=(None, None, 0, None, None), axis_name="seeds"
    )
    trained = over_seeds(family_masks, subsets, seeds, train, valid)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trained)


def fit_blocks(
    blocks: Sequence[Block],
    train: Labelled,
    valid: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    n_threads: int | None = None,
) -> Iterator[Trained]:
    """Train blocks and yield each as it is done, in order.

    To continue an interrupted run, pass the blocks that are still missing. On a CPU as
    many blocks run at once as there are cores (or `n_threads`), each in a thread of its
    own: one alone keeps all cores awake for little more than one core's work. Calls
    that train side by side share the cores: with twice as many blocks as cores, each in
    the others' caches, training takes longer.
    """

    def one(block: Block) -> Trained:
        with _CORES:
            return alone(block)

    def alone(block: Block) -> Trained:
        subsets, seeds = (jnp.asarray(x, jnp.int32) for x in block)
        masks = jnp.asarray(SUBSETS[list(block.subsets)])
        trained = fit_block(
            masks, subsets, seeds, train, valid, encoder=encoder, config=config
        )
        return Trained(block.members, *jax.tree.map(np.asarray, trained))

    use_one_blas_thread()
    for block in blocks[:1]:  # alone: the others use what it compiles
        yield one(block)
    if n_threads is None:
        n_threads = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(n_threads) as pool:
        yield from pool.map(one, blocks[1:])


def join(parts: Sequence[Trained], order: Sequence[Member]) -> Trained:
    """Put trained blocks together in the order of `order`.

    Raises:
      ValueError: if a member is missing.
    """
    position = {m: i for i, m in enumerate(m for part in parts for m in part.members)}
    missing = [m for m in order if m not in position]
    if missing:
        raise ValueError(f"{len(missing)} members are not trained, first {missing[0]}")
    rows = np.asarray([position[m] for m in order])
    stacked = jax.tree.map(
        lambda *leaves: np.concatenate(leaves)[rows],
        *[(part.params, part.info) for part in parts],
    )
    return Trained(tuple(order), *stacked)


@partial(jax.jit, static_argnames=("encoder", "n_chunk"))
def apply_member(
    params: Params,
    family_mask: jax.Array,
    features: FamilyTokens,
    *,
    encoder: Encoder,
    n_chunk: int = 256,
) -> tuple[jax.Array, jax.Array]:
    """Logits `[n_examples]` and pooled `[n_examples, 2 * hidden]` of one encoder."""
    return in_chunks(
        lambda batch: encoder.apply(params, batch, family_mask), features, n_chunk
    )


def member_outputs(
    trained: Trained, features: FamilyTokens, *, encoder: Encoder, n_chunk: int = 256
) -> MemberOutputs:
    """What every trained member says of every example (see `MemberOutputs`)."""
    logits, pooled = [], []
    for i, member in enumerate(trained.members):
        params = jax.tree.map(lambda x, i=i: x[i], trained.params)
        mask = jnp.asarray(SUBSETS[member.subset])
        out = apply_member(params, mask, features, encoder=encoder, n_chunk=n_chunk)
        logits.append(out[0])
        pooled.append(out[1])
    return MemberOutputs(jnp.stack(logits), jnp.stack(pooled))

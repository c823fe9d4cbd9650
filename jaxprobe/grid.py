"""Train every encoder of the grid: members are subset x seed.

Members lie side by side in blocks by `vmap`; a block is trained whole by `fit`, and
blocks follow one another, so that results can be saved and progress shown. On a CPU a
block is one member: its activations stay in cache, it stops when it is done, and the
families that it does not read cost nothing. On a GPU it is the whole grid. Over several
devices the subsets of a block lie along one mesh axis: each device trains its share of
them, with every seed, as one device trains them all; only what comes out is gathered.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from beatrice.jaxprobe.config import TrainConfig
from beatrice.jaxprobe.encoder import (
    COLLECTION,
    Encoder,
    MemberOutputs,
    Params,
    linear_logits,
    pooled_signals,
)
from beatrice.jaxprobe.families import subset_masks
from beatrice.jaxprobe.family_tokens import FamilyTokens
from beatrice.jaxprobe.kernels.projection import Draw
from beatrice.jaxprobe.kernels.random import BATCHES, MEMBERS, stream_key
from beatrice.jaxprobe.kernels.stored import use_one_blas_thread
from beatrice.jaxprobe.loop import (
    FitInfo,
    FitState,
    Keys,
    Learner,
    epoch_batches,
    fit,
    shuffled,
    start_fit,
    take_steps,
)

AXIS = "members"  # of the mesh of devices
_CORES = threading.BoundedSemaphore(os.cpu_count() or 1)


class Member(NamedTuple):
    """One encoder of the grid."""

    subset: int  # see `jaxprobe.families`
    seed: int


class Block(NamedTuple):
    """Members that train together: every subset with every seed."""

    subsets: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Seed-major, as the leading axis of a trained block."""
        return tuple(Member(k, s) for s in self.seeds for k in self.subsets)


def grid_members(n_seeds: int, n_subsets: int) -> tuple[Member, ...]:
    """All subsets x seeds, seed-major: `s * n_subsets + k` is subset k of seed s."""
    return Block(tuple(range(n_subsets)), tuple(range(n_seeds))).members


class BlockArrays(NamedTuple):
    """A block for the device.

    Attributes:
      family_masks: `[n_subsets, n_families]` bool.
      subsets: `[n_subsets]` int32 numbers of subsets, which decide the random keys.
      seeds: `[n_seeds]` int32.
    """

    family_masks: Any
    subsets: Any
    seeds: Any

    @classmethod
    def of(cls, block: Block, n_families: int) -> "BlockArrays":
        """Put a block into arrays."""
        subsets, seeds = (np.asarray(x, np.int32) for x in block)
        return cls(subset_masks(n_families)[subsets], subsets, seeds)


def over_members(
    apply: Callable[..., Any],
    block: BlockArrays,
    states: tuple[Any, ...],
    shared: tuple[Any, ...],
    mesh: Mesh | None,
) -> Any:
    """Apply a function to every subset with every seed.

    Args:
      apply: of `(family_mask, subset, seed)`, a member's states, and what all share.
      block: the members.
      states: leaves `[n_seeds, n_subsets, ...]`.
      shared: arguments that all members share.
      mesh: devices over which the subsets are split, or None for one device.

    Returns:
      What `apply` returns, leaves `[n_seeds, n_subsets, ...]`.
    """

    def on_device(block: BlockArrays, states: tuple, shared: tuple) -> Any:
        if len(block.subsets) * len(block.seeds) == 1:
            # No vmap: it would turn branches into selects.
            member = tuple(x[0] for x in block)
            state = jax.tree.map(lambda x: x[0, 0], states)
            results = apply(member, state, *shared)
            return jax.tree.map(lambda x: x[None, None], results)
        rest = (None,) * len(shared)
        over_subsets = jax.vmap(apply, in_axes=((0, 0, None), 0, *rest))
        if len(block.seeds) == 1:  # one axis less to trace, and to compile
            member = block._replace(seeds=block.seeds[0])
            state = jax.tree.map(lambda x: x[0], states)
            results = over_subsets(tuple(member), state, *shared)
            return jax.tree.map(lambda x: x[None], results)
        over_seeds = jax.vmap(over_subsets, in_axes=((None, None, 0), 0, *rest))
        return over_seeds(tuple(block), states, *shared)

    if mesh is None:
        return on_device(block, states, shared)
    (axis,) = mesh.axis_names
    by_subset, replicated = PartitionSpec(None, axis), PartitionSpec()
    specs = BlockArrays(PartitionSpec(axis), PartitionSpec(axis), replicated)
    split = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, by_subset, replicated),
        out_specs=by_subset,
        check_vma=False,  # branches that not every device takes
    )
    return split(block, states, shared)


class Labelled(NamedTuple):
    """Features with their labels.

    Attributes:
      features: families apart, `n_examples` rows.
      labels: `[n_examples]` float32, 1 where the answer is correct.
      weights: `[n_examples]` float32, at least 0; 0 leaves a row out.
      offsets: `[n_subsets, n_examples]` float32, the linear parts' logits, on which
        networks are trained; see `jaxprobe.linear`. Zeros where there are none.
    """

    features: FamilyTokens
    labels: Any
    weights: Any
    offsets: Any


class Trained(NamedTuple):
    """Trained members; every leaf of `params` and `info` is `[n_members, ...]`."""

    members: tuple[Member, ...]
    params: Params
    info: FitInfo


def labelled(
    features: FamilyTokens,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
) -> Labelled:
    """Put features and boolean labels together; every row must have a label."""
    labels = np.asarray(labels)
    if labels.dtype != bool or labels.shape != (features.n_examples,):
        raise ValueError(
            f"expected one boolean label for each of {features.n_examples} "
            f"examples, got {labels.dtype} {labels.shape}; drop unlabelled rows first"
        )
    if weights is None:
        weights = np.ones(labels.shape)
    if offsets is None:
        offsets = np.zeros((2 ** len(features.tokens) - 1, *labels.shape))
    # Converted on the host: for the device every shape would be compiled by itself.
    on_host = tuple(np.array(x, np.float32) for x in (labels, weights, offsets))
    return Labelled(features, *jax.device_put(on_host))


def in_chunks(
    apply: Callable[[FamilyTokens], Any], features: FamilyTokens, n_chunk: int
) -> Any:
    """Apply to `n_chunk` examples at a time; results are `[n_examples, ...]`."""
    n_rows = features.n_examples
    n_chunk = min(n_chunk, n_rows)
    rows = jnp.minimum(jnp.arange(-(-n_rows // n_chunk) * n_chunk), n_rows - 1)

    chunks = jax.lax.map(
        lambda rows: apply(features.take(rows)), rows.reshape(-1, n_chunk)
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n_rows], chunks)


def member_keys(
    config: TrainConfig, subset: jax.Array | int, seed: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys of a member: of its batches (by seed only), first weights, and dropout."""
    member = stream_key(config.root_seed, MEMBERS, seed, subset)
    return stream_key(config.root_seed, BATCHES, seed), *jax.random.split(member)


_STATIC = ("encoder", "config", "mesh")


@partial(jax.jit, static_argnames=_STATIC)
def start_block(
    block: BlockArrays,
    features: FamilyTokens,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> FitState:
    """States before the first step; of `features` only the widths matter."""

    def start(member, _, few: FamilyTokens) -> FitState:
        family_mask, subset, seed = member
        _, init_key, _ = member_keys(config, subset, seed)
        return start_fit(encoder.init(init_key, few, family_mask), config)

    few = features.of_examples(lambda x: x[:, :1])
    return over_members(start, block, (), (few,), mesh)


@partial(jax.jit, static_argnames=_STATIC)
def train_block(
    states: FitState,
    number: jax.Array,
    block: BlockArrays,
    train: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> tuple[FitState, jax.Array]:
    """Take the steps of every member on a group of rows; also their mean losses."""

    def train_member(member, state: FitState, number: jax.Array, train: Labelled):
        family_mask, subset, seed = member

        def loss(params, rows, shares, noise_key, dropout_key):
            draw = Draw(rows, noise_key, dropout_key)
            logits, _ = encoder.apply(params, train.features, family_mask, draw)
            if encoder.config.is_linear_first:
                logits += train.offsets[subset, rows]
            losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[rows])
            return (losses * shares).sum()

        batch_key, _, dropout_key = member_keys(config, subset, seed)
        order_key, noise_key = jax.random.split(jax.random.fold_in(batch_key, number))
        keys = Keys(noise_key, jax.random.fold_in(dropout_key, number))
        batches = epoch_batches(order_key, train.weights, config.batch_size)
        return take_steps(state, loss, batches, keys, config)

    return over_members(train_member, block, states, (number, train), mesh)


@partial(jax.jit, static_argnames=_STATIC)
def block_logits(
    states: FitState,
    block: BlockArrays,
    group: Labelled,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Logits of every member, `[n_seeds, n_subsets, n_examples]`."""

    def score(member, state: FitState, group: Labelled) -> jax.Array:
        logits = in_chunks(
            lambda batch: encoder.apply(state.params, batch, member[0])[0],
            group.features,
            config.rows_scored(),
        )
        if encoder.config.is_linear_first:
            logits += group.offsets[member[1]]
        return logits

    return over_members(score, block, states, (group,), mesh)


def block_learner(
    block: BlockArrays,
    sample: FamilyTokens,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> Learner:
    """Make what `fit` trains out of a block; `sample` is any row of features."""
    fixed = {"encoder": encoder, "config": config, "mesh": mesh}
    return Learner(
        lambda: start_block(block, sample, **fixed),
        lambda states, number, group: train_block(
            states, number, block, group, **fixed
        ),
        lambda states, group: block_logits(states, block, group, **fixed),
    )


def trained_block(block: Block, state: FitState) -> Trained:
    """Fetch the best weights of a block."""
    n_subsets = len(block.subsets)  # of which a mesh may have trained more

    def fetch(x: jax.Array) -> np.ndarray:
        trained = np.asarray(x)[:, :n_subsets]
        return trained.reshape(-1, *trained.shape[2:])

    return Trained(block.members, *jax.tree.map(fetch, (state.best_params, state.info)))


def fit_blocks(
    blocks: Sequence[Block],
    train: Sequence[Labelled],
    valid: Sequence[Labelled],
    *,
    encoder: Encoder,
    config: TrainConfig,
    n_threads: int | None = None,
) -> Iterator[Trained]:
    """Train blocks and yield each as it is done, in order.

    Rows come in groups of similar length, most often one; a batch is of one group.
    To continue an interrupted run, pass the blocks that are still missing. On a CPU as
    many blocks run at once as there are cores (or `n_threads`), each in a thread of its
    own: one alone keeps all cores awake for little more than one core's work. Calls
    that train side by side share the cores: with twice as many blocks as cores, each in
    the others' caches, training takes longer.
    """

    def train_one(block: Block) -> Trained:
        with _CORES:
            learner = block_learner(
                BlockArrays.of(block, encoder.dims.n_families),
                train[0].features,
                encoder=encoder,
                config=config,
            )
            (state,) = fit(
                [learner], partial(shuffled, train, config), lambda: valid, config
            )
            return trained_block(block, state)

    use_one_blas_thread()
    for block in blocks[:1]:  # alone: the others use what it compiles
        yield train_one(block)
    if n_threads is None:
        n_threads = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(n_threads) as pool:
        yield from pool.map(train_one, blocks[1:])


def member_mesh() -> Mesh:
    """Return the devices of this process, in a row."""
    return Mesh(np.asarray(jax.local_devices()), (AXIS,))


def fit_on_mesh(
    block: Block,
    train: Sequence[Labelled],
    valid: Sequence[Labelled],
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh,
) -> Trained:
    """Train a block's members over the devices of a mesh.

    Where the subsets do not come out even, the last one is trained again on the devices
    that would stand idle, and left out of the result.

    Returns:
      The members with all their weights, on the host.
    """
    use_one_blas_thread()
    n_excess = -len(block.subsets) % mesh.size
    subsets = np.pad(np.asarray(block.subsets), (0, n_excess), mode="edge")
    padded = Block(tuple(subsets.tolist()), block.seeds)
    family_masks, subsets, seeds = BlockArrays.of(padded, encoder.dims.n_families)
    family_masks, subsets = jax.device_put(
        (family_masks, subsets), NamedSharding(mesh, PartitionSpec(AXIS))
    )
    seeds, train, valid = jax.device_put(
        (seeds, list(train), list(valid)), NamedSharding(mesh, PartitionSpec())
    )
    learner = block_learner(
        BlockArrays(family_masks, subsets, seeds),
        train[0].features,
        encoder=encoder,
        config=config,
        mesh=mesh,
    )
    (state,) = fit([learner], partial(shuffled, train, config), lambda: valid, config)
    return trained_block(block, state)


def fit_everywhere(
    blocks: Sequence[Block],
    train: Sequence[Labelled],
    valid: Sequence[Labelled],
    *,
    encoder: Encoder,
    config: TrainConfig,
) -> Iterator[Trained]:
    """Train blocks on all devices there are, and yield each as it is done."""
    if jax.local_device_count() == 1:
        yield from fit_blocks(blocks, train, valid, encoder=encoder, config=config)
        return
    mesh = member_mesh()
    for block in blocks:
        yield fit_on_mesh(
            block, train, valid, encoder=encoder, config=config, mesh=mesh
        )


def join(blocks: Sequence[Trained], order: Sequence[Member]) -> Trained:
    """Put trained blocks together in the order of `order`."""
    position = {
        m: i for i, m in enumerate(m for block in blocks for m in block.members)
    }
    missing = [m for m in order if m not in position]
    if missing:
        raise ValueError(f"{len(missing)} members are not trained, first {missing[0]}")
    rows = np.asarray([position[m] for m in order])
    stacked = jax.tree.map(
        lambda *leaves: np.concatenate(leaves)[rows],
        *[(block.params, block.info) for block in blocks],
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


@jax.jit
def _linear_logits(parts: dict[str, jax.Array], features: FamilyTokens) -> jax.Array:
    """Logits `[n_members, n_examples]` of linear parts, leaves `[n_members, ...]`."""
    pooled = pooled_signals(features)  # once for all
    return jax.vmap(lambda part: linear_logits(part, pooled))(parts)


def _network(params: Params) -> Params:
    return {"params": params["params"]}


def is_linear_only(params: Params) -> bool:
    """Return whether a member is its linear part, to which its network adds nothing."""
    last = jax.tree.leaves(params["params"]["mlp_out"])
    return COLLECTION in params and not any(np.any(x) for x in last)


def member_logits(
    members: Sequence[tuple[Params, jax.Array]],
    features: FamilyTokens,
    *,
    encoder: Encoder,
) -> np.ndarray:
    """Logits `[n_members, n_examples]`; a network that adds nothing is not run.

    Args:
      members: of each its weights, and `[n_families]` bool which families it reads.
      features: standardised signals.
      encoder: the module.
    """
    logits = np.zeros((len(members), features.n_examples), np.float32)
    for row, (params, mask) in zip(logits, members, strict=True):
        if not is_linear_only(params):
            outputs = apply_member(_network(params), mask, features, encoder=encoder)
            row += np.asarray(outputs[0])
    if members and COLLECTION in members[0][0]:
        parts = [params[COLLECTION] for params, _ in members]
        stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
        logits += np.asarray(_linear_logits(stacked, features))
    return logits


def member_outputs(
    trained: Trained, features: FamilyTokens, *, encoder: Encoder, n_chunk: int = 256
) -> MemberOutputs:
    """Apply every trained member to every example (see `MemberOutputs`)."""
    outputs, masks = [], encoder.dims.subset_masks
    for i, member in enumerate(trained.members):
        params = jax.tree.map(lambda x, i=i: x[i], _network(trained.params))
        mask = jnp.asarray(masks[member.subset])
        outputs.append(
            apply_member(params, mask, features, encoder=encoder, n_chunk=n_chunk)
        )
    logits, pooled = map(np.stack, zip(*jax.device_get(outputs), strict=True))
    if COLLECTION in trained.params:
        logits = logits + _linear_logits(trained.params[COLLECTION], features)
    return MemberOutputs(logits, pooled)

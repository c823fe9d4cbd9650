"""Train the grid of encoders: one member for each subset and seed.

Members are grouped in blocks, and `fit` trains a block at a time. On a GPU a block is
the whole grid, vectorised by `vmap`. On a CPU it is half the subsets of a seed, which
take each step in turn: a member's activations stay in cache, finished members and
unread families cost nothing, and for encoders no wider than their projections a batch
is gathered, its noise drawn and its broad families projected once for all of them.
Several devices split the subsets of a block; only results are gathered.

Batches and input noise depend only on the seed, so the members of a seed share them.
Initial weights and dropout depend on (subset, seed), never on the block.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from beatrice.extract.run.process import StoppablePool, n_cores
from beatrice.jaxprobe.config import (
    EncoderConfig,
    PlannedConfig,
    TrainConfig,
    row_choices,
    usual_jax,
)
from beatrice.jaxprobe.encoder import (
    COLLECTION,
    Encoder,
    MemberOutputs,
    Params,
    apply_module,
    folded_weights,
    is_folded,
    linear_logits,
    pooled_signals,
)
from beatrice.jaxprobe.loop import (
    FitInfo,
    FitState,
    Keys,
    Learner,
    Shared,
    epoch_batches,
    fit,
    shuffled,
    start_fit,
    take_steps,
    take_steps_in_turn,
)
from beatrice.jaxprobe.metrics import auroc_gain
from beatrice.jaxprobe.projection import Draw, SpanBatch, gather_span
from beatrice.jaxprobe.random import BATCHES, MEMBERS, stream_keys
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.tokens import FamilyTokens

AXIS = "members"  # of the mesh of devices
# Networks with a linear part are dropped in the end unless they gain three standard
# errors (`jaxprobe.linear`). In protocols of `_LONG` epochs or more, those with less
# than `LEAST_GAIN` of them after `_REVIEWED` epochs are stopped.
LEAST_GAIN, _REVIEWED, _LONG = 1.5, 8, 24
_AT_ONCE = 256  # examples that a trained encoder scores together
# On a CPU, at most so many tokens: copies of more leave the cache, and zeroing new
# pages for them takes as long as an encoder's work (docs/measurements.md, "New pages").
_TOKENS_AT_ONCE = 4096
# On a CPU training takes so many numbers of projections at once: 16,384 tokens at
# `make real`'s widths. Whole batches of long contexts leave the cache.
_PROJECTED_AT_ONCE = 1 << 21
_CORES = threading.BoundedSemaphore(n_cores())


class Member(NamedTuple):
    """One encoder of the grid."""

    subset: int  # see `jaxprobe.families`
    seed: int


class Block(NamedTuple):
    """Members that train together: every subset with every seed of the block."""

    subsets: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, seed-major as on the leading axis of a trained block."""
        return tuple(Member(k, s) for s in self.seeds for k in self.subsets)


# Takes a block that has run another epoch, and how many it has run.
OnEpoch = Callable[[Block, int], None]


def grid_members(n_seeds: int, n_subsets: int) -> tuple[Member, ...]:
    """Return all members, seed-major: subset k of seed s is at `s * n_subsets + k`."""
    return Block(tuple(range(n_subsets)), tuple(range(n_seeds))).members


class BlockArrays(NamedTuple):
    """A block as arrays for the device."""

    family_masks: Any  # `[n_subsets, n_families]` bool
    subsets: Any  # `[n_subsets]` int32 numbers of subsets, used in the random keys
    keys: Any  # `[n_seeds, 2]` keys of a seed's batches and members


def over_members(
    apply: Callable[..., Any],
    block: BlockArrays,
    states: tuple[Any, ...],
    shared: tuple[Any, ...],
    config: TrainConfig,
    mesh: Mesh | None,
) -> Any:
    """Apply a function to every member of a block, in turn or vectorised.

    `apply` takes `(family_mask, subset, keys)`, the member's states, and the shared
    arguments. States and results are `[n_seeds, n_subsets, ...]`; meshes split subsets.
    """
    if takes_turns(block, config, mesh):
        members = _members_of(block), jax.tree.map(lambda x: x[0], states)
        results = jax.lax.map(lambda x: apply(*x, *shared), members)
        return jax.tree.map(lambda x: x[None], results)

    def on_device(block: BlockArrays, states: tuple, shared: tuple) -> Any:
        if len(block.subsets) * len(block.keys) == 1:
            # No vmap, which would turn branches into selects.
            member = tuple(x[0] for x in block)
            state = jax.tree.map(lambda x: x[0, 0], states)
            results = apply(member, state, *shared)
            return jax.tree.map(lambda x: x[None, None], results)
        rest = (None,) * len(shared)
        over_subsets = jax.vmap(apply, in_axes=((0, 0, None), 0, *rest))
        if len(block.keys) == 1:  # one axis less to trace and compile
            member = block._replace(keys=block.keys[0])
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
        check_vma=False,  # not every device takes the same branches
    )
    return split(block, states, shared)


def _members_of(block: BlockArrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the members of a block of one seed, leaves `[n_subsets, ...]`."""
    keys = jnp.broadcast_to(block.keys, (len(block.subsets), 2))
    return jnp.asarray(block.family_masks), jnp.asarray(block.subsets), keys


class LabelledFeatures(NamedTuple):
    """Features with their labels."""

    features: FamilyTokens  # `n_examples` rows
    labels: Any  # `[n_examples]` float32, 1 where the answer is correct
    weights: Any  # `[n_examples]` float32, at least 0; 0 leaves a row out
    # `[n_subsets, n_examples]` float32, the linear parts' logits, to which networks add
    # theirs; see `jaxprobe.linear`. Zeros without linear parts.
    offsets: Any
    questions: Any  # `[n_examples]` int32, equal for rows of one question


class TrainedMembers(NamedTuple):
    """Trained members; every leaf of `params` and `info` is `[n_members, ...]`."""

    members: tuple[Member, ...]
    params: Params
    info: FitInfo


def labelled(
    features: FamilyTokens,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
    questions: np.ndarray | None = None,
) -> LabelledFeatures:
    """Combine features with their labels, `[n_examples]` bool, on the device."""
    if weights is None:
        weights = np.ones(labels.shape)
    if offsets is None:
        offsets = np.zeros((2 ** len(features.tokens) - 1, *labels.shape))
    if questions is None:
        questions = np.arange(len(labels))
    # Converted on the host: on the device every shape would be compiled.
    on_host = [np.array(x, np.float32) for x in (labels, weights, offsets)]
    numbers = np.array(questions, np.int32)
    return LabelledFeatures(features, *jax.device_put([*on_host, numbers]))


def in_chunks(
    apply: Callable[[FamilyTokens], Any], features: FamilyTokens, n_chunk: int
) -> Any:
    """Apply a function to at most `n_chunk` examples at a time: `[n_examples, ...]`."""
    return _in_chunks(lambda rows: apply(features.take(rows)), features, n_chunk)


def _in_chunks(
    apply: Callable[[jax.Array], Any], features: FamilyTokens, n_chunk: int
) -> Any:
    """Apply a function to at most `n_chunk` rows `[n]` at a time, as `in_chunks`."""
    n_rows = features.n_examples
    n_chunk = min(n_chunk, n_rows)
    if jax.default_backend() == "cpu":
        n_chunk = min(n_chunk, max(1, _TOKENS_AT_ONCE // features.n_tokens))
    rows = jnp.minimum(jnp.arange(-(-n_rows // n_chunk) * n_chunk), n_rows - 1)
    chunks = jax.lax.map(apply, rows.reshape(-1, n_chunk))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n_rows], chunks)


def seed_keys(root_seed: int, seeds: Sequence[int]) -> jax.Array:
    """Return the keys of seeds, `[n_seeds, 2]`: of their batches and members."""
    streams = BATCHES, MEMBERS
    return jnp.stack([stream_keys(root_seed, x, seeds) for x in streams], axis=1)


def member_keys(
    keys: jax.Array, subset: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a member's keys, for batches, first weights and dropout, by its seed's."""
    batches, members = keys
    return batches, *jax.random.split(jax.random.fold_in(members, subset))


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
    """Return states before the first step, by the shapes of `features` only."""

    def start(member, _, sample: FamilyTokens) -> FitState:
        family_mask, subset, keys = member
        _, init_key, _ = member_keys(keys, subset)
        state = start_fit(encoder.init(init_key, sample, family_mask), config)
        # What reads nothing is done. int32 as after a review, else training recompiles.
        since_best = jnp.where(family_mask.any(), jnp.int32(0), config.patience)
        return state._replace(epochs_since_best=since_best)

    sample = features.of_examples(lambda x: x[:, :1])
    return over_members(start, block, (), (sample,), config, mesh)


@partial(jax.jit, static_argnames=_STATIC)
def train_block(
    states: FitState,
    number: jax.Array,
    block: BlockArrays,
    train: LabelledFeatures,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> tuple[FitState, jax.Array]:
    """Take every member's steps on a group of rows; return states and mean losses."""
    if takes_turns(block, config, mesh):
        return _train_in_turn(states, number, block, train, encoder, config)

    def train_member(
        member, state: FitState, number: jax.Array, train: LabelledFeatures
    ):
        _, subset, keys = member

        def loss(params, rows, shares, noise_key, dropout_key):
            draw = Draw(rows, noise_key, dropout_key)
            return _loss(encoder, train, member, params, shares, draw)

        order_key, *step_keys = _group_keys(keys, subset, number)
        batches = epoch_batches(order_key, train.weights, config.batch_size)
        return take_steps(state, loss, batches, Keys(*step_keys), config)

    return over_members(train_member, block, states, (number, train), config, mesh)


def _group_keys(keys, subset, number):
    """Return a member's keys on a group: of batches, their noise, and its dropout."""
    batch_key, _, dropout_key = member_keys(keys, subset)
    order_key, noise_key = jax.random.split(jax.random.fold_in(batch_key, number))
    return order_key, noise_key, jax.random.fold_in(dropout_key, number)


def _loss(
    encoder, train: LabelledFeatures, member, params, shares, draw: Draw
) -> jax.Array:
    """Return a member's loss on the rows of a draw."""
    family_mask, subset, _ = member
    logits, _ = encoder.apply(params, train.features, family_mask, draw)
    if encoder.config.is_linear_first:
        logits += train.offsets[subset, draw.rows]
    losses = optax.sigmoid_binary_cross_entropy(logits, train.labels[draw.rows])
    return (losses * shares).sum()


def rows_in_turn(encoder: Encoder, n_tokens: int, config: TrainConfig) -> int:
    """Return how many rows to take at once, at most those that draw together.

    Projections of all families would take at most eight megabytes, and so the rows of
    long contexts pass in parts; but 16 rows fill a register.
    """
    d_projected = encoder.dims.n_families * encoder.config.projection
    choices = [n for n in row_choices(config) if n <= config.rows_at_once()]
    short = [n for n in choices if n * n_tokens * d_projected <= _PROJECTED_AT_ONCE]
    filled = [n for n in choices if n >= min(16, choices[0])]
    return max(short[0] if short else 1, filled[-1])


def _gather(
    encoder: Encoder, features: FamilyTokens, rows: jax.Array, key: Any = None
) -> tuple[SpanBatch, ...]:
    """Gather rows for all members of a seed, with noise if a key is given.

    Empty for encoders that are not folded, which gather for themselves.
    """
    config, n_spans = encoder.config, len(features.masks)
    key = key if config.input_noise else None
    batches = []
    for span, at in enumerate(features.span_slices if is_folded(config) else ()):
        is_read = encoder.dims.read_in(span, n_spans)
        pairs = zip(features.tokens, is_read, strict=True)
        tokens = [family if is_read else None for family, is_read in pairs]
        given = tokens, at.start, features.masks[span][:, rows], rows, key
        shape = {"d_out": config.hidden, "deviation": config.input_noise}
        batches.append(gather_span(*given, **shape, span=span))
    return tuple(batches)


def _products(
    encoder: Encoder,
    params: Params,
    is_read: jax.Array,
    batches: tuple[SpanBatch, ...],
) -> tuple[Any, ...]:
    """Return the broad families' products for all members, per span.

    Leaves of `params` are `[n_members, ...]`; `is_read` is `[n_families, n_members]`.
    """
    config, dims, values = encoder.config, encoder.dims, params["params"]
    weights = [values[f"projection_{f}"] for f in range(dims.n_families)]
    products = []
    for span, batch in enumerate(batches):
        kernel = values[f"span_{span}"]["entry_kernel"]
        of_span = folded_weights(kernel, weights, dims.read_in(span, len(batches)))
        products.append(batch.products_of(of_span, is_read, config.matmul_dtype))
    return tuple(products)


def _train_in_turn(states, number, block, train, encoder, config):
    """Take the steps of a seed's members, which share batches, products and noise."""
    members = _members_of(block)
    order_key, noise_key, _ = _group_keys(block.keys[0], 0, number)
    dropout_keys = jax.vmap(lambda subset, keys: _group_keys(keys, subset, number)[2])(
        *members[1:]
    )

    def products(params: Params, is_active: jax.Array, batches: tuple[SpanBatch, ...]):
        return _products(encoder, params, members[0].T & is_active[None], batches)

    def loss(member, params, products, rows, shares, batches, noise_key, dropout_key):
        spans = tuple(map(SpanBatch.of_member, batches, products))
        draw = Draw(rows, noise_key, dropout_key, spans)
        return _loss(encoder, train, member, params, shares, draw)

    n_rows = rows_in_turn(encoder, train.features.n_tokens, config)
    states, losses = take_steps_in_turn(
        jax.tree.map(lambda x: x[0], states),
        members,
        loss,
        epoch_batches(order_key, train.weights, config.batch_size),
        Shared(partial(_gather, encoder, train.features), products),
        Keys(noise_key, dropout_keys),
        PlannedConfig(**dataclasses.asdict(config), n_rows=n_rows),
    )
    return jax.tree.map(lambda x: x[None], (states, losses))


@partial(jax.jit, static_argnames=_STATIC)
def block_logits(
    states: FitState,
    block: BlockArrays,
    group: LabelledFeatures,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return every member's logits, `[n_seeds, n_subsets, n_examples]`."""
    if takes_turns(block, config, mesh) and is_folded(encoder.config):
        return _score_in_turn(states, block, group, encoder, config)

    def score(member, state: FitState, group: LabelledFeatures) -> jax.Array:
        logits = in_chunks(
            lambda batch: encoder.apply(state.params, batch, member[0])[0],
            group.features,
            config.rows_scored(),
        )
        if encoder.config.is_linear_first:
            logits += group.offsets[member[1]]
        return logits

    def score_active(member, state: FitState, group: LabelledFeatures) -> jax.Array:
        zeros = jnp.zeros(group.features.n_examples)
        return jax.lax.cond(
            state.is_active(config), lambda: score(member, state, group), lambda: zeros
        )

    # Under `vmap` a branch would copy the group for every member.
    apply = score_active if takes_turns(block, config, mesh) else score
    return over_members(apply, block, states, (group,), config, mesh)


def _score_in_turn(states, block, group, encoder, config) -> jax.Array:
    """Score with a seed's members, which share gathered rows and products."""
    masks, subsets, _ = _members_of(block)
    params, is_active = (
        jax.tree.map(lambda x: x[0], x)
        for x in (states.params, states.is_active(config))
    )
    members = params, masks, is_active
    logits, _ = _apply_in_turn(
        members, group.features, encoder=encoder, n_chunk=config.rows_scored()
    )
    if encoder.config.is_linear_first:
        logits += group.offsets[subsets]
    return logits[None]


@partial(jax.jit, static_argnames=("encoder", "n_chunk"))
def _apply_in_turn(
    members: tuple[Params, jax.Array, jax.Array],
    features: FamilyTokens,
    *,
    encoder: Encoder,
    n_chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply members that share gathered rows and products to every example.

    Members are weights, `[n_members, n_families]` masks of families, and which of them
    to apply, `[n_members]`. Returns logits `[n_members, n_examples]` and pooled vectors
    (`Encoder`), zeros for members that are not applied.
    """
    params, masks, is_active = members
    is_read = masks.T & is_active[None]

    def apply(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        batches = _gather(encoder, features, rows)
        products = _products(encoder, params, is_read, batches)

        def apply_member(member) -> tuple[jax.Array, jax.Array]:
            params, mask, is_active, products = member
            spans = tuple(map(SpanBatch.of_member, batches, products))
            draw = Draw(rows, None, None, spans)
            outputs = partial(encoder.apply, params, features, mask, draw)
            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(outputs))
            return jax.lax.cond(is_active, outputs, lambda: nothing)

        outputs = jax.lax.map(apply_member, (*members, products))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)

    outputs = _in_chunks(apply, features, n_chunk)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), outputs)


def reviewed_after(encoder: EncoderConfig, config: TrainConfig) -> int | None:
    """Return the epoch after which networks without a gain are stopped, or None.

    Short protocols have no review: its saving was measured on 24 epochs.
    """
    is_long = config.max_epochs >= _LONG
    return _REVIEWED if encoder.is_linear_first and is_long else None


def expected_epochs(encoder: EncoderConfig, config: TrainConfig) -> int:
    """Return how many epochs an encoder is expected to take: a review stops most."""
    return reviewed_after(encoder, config) or config.max_epochs


def n_stopped_by_review(info: FitInfo, n_epochs: int, config: TrainConfig) -> int:
    """Count the members that a review after `n_epochs` stopped with patience left."""
    is_last = np.asarray(info.n_epochs) == n_epochs
    waited = n_epochs - 1 - np.asarray(info.best_epoch)
    return int((is_last & (waited < config.patience)).sum())


def is_in_turn(config: TrainConfig) -> bool:
    """Return whether a seed's members step in turn: on a CPU, without a plan."""
    return jax.default_backend() == "cpu" and not isinstance(config, PlannedConfig)


def takes_turns(block: BlockArrays, config: TrainConfig, mesh: Mesh | None) -> bool:
    """Return whether the members of a block take their steps in turn."""
    return is_in_turn(config) and mesh is None and len(block.keys) == 1


def n_in_turn(n_subsets: int) -> int:
    """Return how many subsets take their steps in turn: half, but at most eight."""
    return min(8, -(-n_subsets // 2))


def filled_block(
    block: Block, encoder: Encoder, config: TrainConfig, mesh: Mesh | None = None
) -> BlockArrays:
    """Return a block's arrays, padded with subsets that read no family.

    On a CPU all blocks then have one shape, and so share an executable; on a mesh every
    device has the same number of subsets.
    """
    subsets, n_excess = np.asarray(block.subsets, np.int32), 0
    if mesh is not None:
        n_excess = -len(subsets) % mesh.size
    elif is_in_turn(config) and len(block.seeds) == 1:
        n_excess = max(0, n_in_turn(encoder.dims.n_subsets) - len(subsets))
    masks = np.pad(encoder.dims.subset_masks[subsets], ((0, n_excess), (0, 0)))
    keys = seed_keys(config.root_seed, block.seeds)
    return BlockArrays(masks, np.pad(subsets, (0, n_excess)), keys)


def _stopped_without_gain(state, block, groups, logits, patience) -> FitState:
    """Stop the members whose best weights gain too little over their linear parts."""
    best, parts = state._replace(params=state.best_params), []
    for group in groups:
        used = np.asarray(group.weights) > 0
        of_rows = logits(best, group), group.offsets, group.labels, group.questions
        parts.append([np.asarray(x)[..., used] for x in of_rows])
        del group  # frees memory before the next one is read
    scores, offsets, labels, questions = (
        np.concatenate(x, axis=-1) for x in zip(*parts, strict=True)
    )
    waited = np.array(state.epochs_since_best)
    for i, j in np.ndindex(waited.shape):
        pair = scores[i, j], offsets[np.asarray(block.subsets)[j]]
        gain, error = auroc_gain(*pair, labels > 0, questions)
        if gain < LEAST_GAIN * error or gain <= 0:
            waited[i, j] = patience
    return state._replace(epochs_since_best=jnp.asarray(waited))


def block_learner(
    block: BlockArrays,
    sample: FamilyTokens,
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> Learner:
    """Return the learner of a block, for `fit`; `sample` is any row of features."""
    fixed = {"encoder": encoder, "config": config, "mesh": mesh}

    def logits(states: FitState, group: LabelledFeatures) -> jax.Array:
        return block_logits(states, block, group, **fixed)

    def review(state: FitState, n_epochs: int, groups: Iterable[Any]) -> FitState:
        if n_epochs != reviewed_after(encoder.config, config):
            return state
        return _stopped_without_gain(state, block, groups, logits, config.patience)

    return Learner(
        lambda: start_block(block, sample, **fixed),
        lambda states, number, group: train_block(
            states, number, block, group, **fixed
        ),
        logits,
        review,
    )


def trained_block(block: Block, state: FitState) -> TrainedMembers:
    """Fetch the best weights of a block from the device."""
    n_subsets = len(block.subsets)  # without the padding of `filled_block`

    def fetch(x: np.ndarray) -> np.ndarray:
        trained = x[:, :n_subsets]
        return trained.reshape(-1, *trained.shape[2:])

    on_host = jax.device_get((state.best_params, state.info))  # all at once
    return TrainedMembers(block.members, *jax.tree.map(fetch, on_host))


def fit_block(
    block: Block,
    train: Sequence[LabelledFeatures],
    valid: Sequence[LabelledFeatures],
    *,
    encoder: Encoder,
    config: TrainConfig,
    mesh: Mesh | None = None,
    on_epoch: OnEpoch = lambda block, n_epochs: None,
) -> TrainedMembers:
    """Train a block's members, split over the devices of a mesh if one is given.

    Devices with fewer subsets train members that read no family, which are left out of
    the result. The result is on the host.
    """
    use_one_blas_thread()
    arrays = filled_block(block, encoder, config, mesh)
    if mesh is not None:
        split = NamedSharding(mesh, PartitionSpec(AXIS))
        copied = NamedSharding(mesh, PartitionSpec())
        arrays, train, valid = jax.device_put(
            (arrays, list(train), list(valid)),
            (BlockArrays(split, split, copied), copied, copied),
        )
    fixed = {"encoder": encoder, "config": config, "mesh": mesh}
    learner = block_learner(arrays, train[0].features, **fixed)
    groups = partial(shuffled, train, config), lambda: valid
    (state,) = fit([learner], *groups, config, lambda _, n: on_epoch(block, n))
    return trained_block(block, state)


def fit_blocks(
    blocks: Sequence[Block],
    train: Sequence[LabelledFeatures],
    valid: Sequence[LabelledFeatures],
    *,
    encoder: Encoder,
    config: TrainConfig,
    n_threads: int | None = None,
    on_epoch: OnEpoch = lambda block, n_epochs: None,
) -> Iterator[TrainedMembers]:
    """Train blocks and yield each as it finishes, in any order.

    Rows come in groups of similar length, most often one; a batch is drawn from one
    group. To resume an interrupted run, pass the blocks that are still missing. Several
    devices split the subsets of each block, unless `n_threads` is given. On a CPU as
    many blocks run at once as there are cores (or `n_threads`), each in its own thread:
    a single block occupies all cores for little more than one core's work. With a plan
    one runs at a time, as planned. Concurrent calls share the cores: with twice as many
    blocks as cores, training takes longer. `on_epoch` is called in these threads.
    """
    fixed: dict[str, Any] = {"encoder": encoder, "config": config}

    def train_alone(block: Block, on_epoch: OnEpoch = on_epoch) -> TrainedMembers:
        with usual_jax(), _CORES:
            return fit_block(block, train, valid, **fixed, on_epoch=on_epoch)

    if n_threads is None and jax.local_device_count() > 1:
        mesh = Mesh(np.asarray(jax.local_devices()), (AXIS,))
        for block in blocks:
            yield fit_block(block, train, valid, **fixed, mesh=mesh, on_epoch=on_epoch)
        return
    use_one_blas_thread()
    if is_in_turn(config) and len(blocks) > 1:
        # Compile with members that read nothing, and so are done before they begin.
        arrays = filled_block(blocks[0], encoder, config)
        nothing = arrays._replace(family_masks=arrays.family_masks & False)
        learner = block_learner(nothing, train[0].features, **fixed)
        state = learner.start()
        for group in train:
            learner.train(state, np.int32(0), group)
        for group in valid:
            learner.logits(state, group)
    else:
        for block in blocks[:1]:  # the first alone: the others use what it compiles
            yield train_alone(block)
        blocks = blocks[1:]
    if n_threads is None:
        n_threads = n_cores() if is_in_turn(config) else 1
    with StoppablePool(n_threads) as pool:
        checked = pool.checked(on_epoch)
        futures = [pool.submit(train_alone, block, checked) for block in blocks]
        for future in as_completed(futures):
            yield future.result()


def join(blocks: Sequence[TrainedMembers], order: Sequence[Member]) -> TrainedMembers:
    """Join trained blocks, with members in the order of `order`."""
    position = {
        m: i for i, m in enumerate(m for block in blocks for m in block.members)
    }
    rows = np.asarray([position[m] for m in order])
    stacked = jax.tree.map(
        lambda *leaves: np.concatenate(leaves)[rows],
        *[(block.params, block.info) for block in blocks],
    )
    return TrainedMembers(tuple(order), *stacked)


@partial(jax.jit, static_argnames="encoder")
def apply_member(
    params: Params, family_mask: jax.Array, features: FamilyTokens, *, encoder: Encoder
) -> tuple[jax.Array, jax.Array]:
    """Return one encoder's logits `[n_examples]` and pooled vectors (`Encoder`)."""
    return in_chunks(
        lambda batch: apply_module(encoder, params, batch, family_mask),
        features,
        _AT_ONCE,
    )


@jax.jit
def _linear_logits(parts: dict[str, jax.Array], features: FamilyTokens) -> jax.Array:
    """Return `[n_members, n_examples]` logits of linear parts `[n_members, ...]`."""

    def apply(batch: FamilyTokens) -> jax.Array:
        pooled = pooled_signals(batch)  # once for all members
        return jax.vmap(lambda linear: linear_logits(linear, pooled))(parts).T

    return in_chunks(apply, features, _AT_ONCE).T


@jax.jit
def pooled_rows(features: FamilyTokens) -> tuple[jax.Array, ...]:
    """Return `pooled_signals` of every example, each `[n_examples, n_features]`."""
    return in_chunks(
        lambda batch: tuple(x.T for x in pooled_signals(batch)), features, _AT_ONCE
    )


def is_linear_only(params: Params) -> bool:
    """Return whether a member is only its linear part: its network adds nothing."""
    last = jax.tree.leaves(params["params"]["mlp_out"])
    return COLLECTION in params and not any(np.any(x) for x in last)


def member_logits(
    members: Sequence[tuple[Params, jax.Array]],
    features: FamilyTokens,
    *,
    encoder: Encoder,
) -> np.ndarray:
    """Return logits `[n_members, n_examples]`; networks that add nothing are not run.

    A member is given by its weights and its mask of families, `[n_families]` bool.
    """
    logits = np.zeros((len(members), features.n_examples), np.float32)
    for row, (params, mask) in zip(logits, members, strict=True):
        if not is_linear_only(params):
            network = {"params": params["params"]}
            outputs = apply_member(network, mask, features, encoder=encoder)
            row += np.asarray(outputs[0])
    if members and COLLECTION in members[0][0]:
        parts = [params[COLLECTION] for params, _ in members]
        stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
        logits += np.asarray(_linear_logits(stacked, features))
    return logits


def member_outputs(
    trained: TrainedMembers, features: FamilyTokens, *, encoder: Encoder
) -> MemberOutputs:
    """Apply every trained member to every example."""
    params, n = {"params": trained.params["params"]}, len(trained.members)
    masks = encoder.dims.subset_masks[[member.subset for member in trained.members]]
    used = [np.any(x.reshape(n, -1), axis=1) for x in jax.tree.leaves(params)]
    where = np.flatnonzero(np.any(used, axis=0))  # of the others all outputs are zeros
    logits = np.zeros((n, features.n_examples), np.float32)
    pooled = np.zeros((*logits.shape, encoder.config.d_pooled), np.float32)
    is_shared = jax.default_backend() == "cpu" and is_folded(encoder.config)
    size = n_in_turn(encoder.dims.n_subsets) if is_shared else 1

    def outputs_of(some: np.ndarray) -> Any:
        at = np.pad(some, (0, size - len(some)), "edge")
        weights = jax.tree.map(lambda x: x[at], params)
        if is_shared:
            members = weights, masks[at], np.arange(size) < len(some)
            with usual_jax(), _CORES:
                return jax.device_get(
                    _apply_in_turn(members, features, encoder=encoder, n_chunk=_AT_ONCE)
                )
        member = jax.tree.map(lambda x: x[0], (weights, masks[at]))
        outputs = apply_member(*member, features, encoder=encoder)
        return [x[None] for x in jax.device_get(outputs)]

    groups = [where[i : i + size] for i in range(0, len(where), size)]
    with ThreadPoolExecutor(n_cores()) as pool:
        results = (pool.map if is_shared else map)(outputs_of, groups)
        for some, outputs in zip(groups, results, strict=True):
            logits[some], pooled[some] = (x[: len(some)] for x in outputs)
    if COLLECTION in trained.params:
        logits += np.asarray(_linear_logits(trained.params[COLLECTION], features))
    return MemberOutputs(logits, pooled)

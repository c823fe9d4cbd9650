"""Train every encoder of a setting and apply it to every row: the stage `train`.

Several processes may train one grid, each a share of the members. Each saves its
finished members, and the process that finds none missing joins them as a single process
would. Rows are not split over processes: a setting has 48 members, six for each of
eight GPUs, and splitting rows would synchronise gradients in every step.

A store that is larger than memory is streamed in groups of chunks of rows. All encoders
take their steps on a group while the next is read, so the store is read once per epoch.
With a single group of all rows the result is that of `jaxprobe.grid`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    question_files,
    read_examples,
    read_labels,
    settings_of,
)
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import sha256_file
from beatrice.extract.run.process import Share, gpu_of_process, return_freed_memory
from beatrice.extract.run.stages import side_by_side
from beatrice.extract.store.store import FeatureStore, open_store
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    PROTOCOL,
    EncoderConfig,
    GridConfig,
    StreamConfig,
    TrainConfig,
    set_compiler,
    usual_jax,
)
from beatrice.jaxprobe.encoder import COLLECTION, Encoder, MemberOutputs
from beatrice.jaxprobe.evaluation import permute_by_question
from beatrice.jaxprobe.families import N_SUBSETS, FamilyDims, subset_index, widths_of
from beatrice.jaxprobe.grid import (
    LEAST_GAIN,
    Block,
    LabelledFeatures,
    Member,
    OnEpoch,
    TrainedMembers,
    block_learner,
    expected_epochs,
    filled_block,
    fit_blocks,
    join,
    labelled,
    member_outputs,
    n_stopped_by_review,
    reviewed_after,
    trained_block,
)
from beatrice.jaxprobe.linear import (
    LinearGrid,
    Pooled,
    drop_networks_without_gain,
    fit_linear_parts,
    fit_ridge,
    load_linear,
    n_networks_kept,
    save_linear,
    with_linear_parts,
)
from beatrice.jaxprobe.loop import FitInfo, fit
from beatrice.jaxprobe.memory import (
    Sizes,
    check_rows,
    choose,
    rows_fit_together,
    step_flops,
)
from beatrice.jaxprobe.rows import (
    ReadRows,
    StoreRows,
    TrainingSet,
    check_classes,
    rows_of,
    training_set,
)
from beatrice.jaxprobe.stages import chosen_layer, members_folder
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.tokens import (
    FamilyTokens,
    family_dims,
    stored_dtypes,
    stored_lengths,
)

EVERY_FAMILY = subset_index("HPRA")


def open_rows(run: RunDir, setting: Setting) -> tuple[FeatureStore, StoreRows]:
    """Open a setting's store; return it and its rows."""
    store = open_store(run.features(setting))
    return store, rows_of(store, read_examples(run), read_labels(run).values())


def run_outputs(run: RunDir, setting: Setting) -> MemberOutputs:
    """Return the outputs of every trained encoder of a setting on its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return MemberOutputs(**tree["outputs"])


def check_protocol(run: RunDir, what: str) -> None:
    """Check that a run's encoders were trained by this version's protocol."""
    record = run.stage_record("train")
    if record is None or record.inputs.get("protocol") != str(PROTOCOL):
        raise ValueError(
            f"{what} must be compared with encoders trained in the same way, but "
            f"another version trained those of {run.path}; run `beatrice train` again, "
            "and then the later stages"
        )


def _sizes(store: FeatureStore, rows: StoreRows, config: GridConfig) -> Sizes:
    where = rows.where("train"), rows.where("validation")
    shapes = family_dims(store), stored_lengths(store), where, stored_dtypes(store)
    return Sizes.of(config, *shapes)


def check_plan(store: FeatureStore, rows: StoreRows, config: GridConfig) -> None:
    """Check labels and memory from shapes only, before any row is read."""
    check_classes(rows, (rows.where("train"), rows.where("validation")))
    check_rows(_sizes(store, rows, config), config.device_memory)


def run_training_set(run: RunDir, setting: Setting, config: GridConfig) -> TrainingSet:
    """Return a setting's training set, as a configuration reads it."""
    store, rows = open_rows(run, setting)
    check_plan(store, rows, config)
    return training_set(
        store,
        rows,
        layer=chosen_layer(run),
        n_batch=config.train.batch_size,
        streamed=config.stream is not None,
    )


class Group(NamedTuple):
    """Examples that are in memory together."""

    # `[n_rows]` numbers of examples; all groups of an epoch have one length, padded by
    # repeating the group's last example.
    where: np.ndarray
    is_real: np.ndarray  # `[n_rows]` bool, False for padding


def epoch_groups(
    n_examples: int, config: StreamConfig, seed: Sequence[int]
) -> list[Group]:
    """Split examples, numbered in the order of the store, into groups.

    Chunks are distributed at random and evenly, so that the last group is not small.
    `seed` determines their order; it is a sequence such as (root seed, epoch).
    """
    n_rows, n_chunk = config.group_rows(n_examples), config.n_chunk
    chunks = np.split(np.arange(n_examples), range(n_chunk, n_examples, n_chunk))
    order = np.random.default_rng(list(seed)).permutation(len(chunks))
    groups = []
    for numbers in np.array_split(order, config.n_groups(n_examples)):
        where = np.concatenate([chunks[i] for i in np.sort(numbers)])  # as on disk
        is_real = np.arange(n_rows) < len(where)
        groups.append(Group(np.pad(where, (0, n_rows - len(where)), "edge"), is_real))
    return groups


def prefetched(read: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield `read(item)` for each item in order, reading one ahead in the background.

    One thread requests and assembles; TensorStore's own threads read and decode. None
    of them holds the interpreter's lock while it works, nor does a training step.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(read, item) for item in items[:1]]
        for number in range(len(items)):
            value = pending.pop().result()
            pending = [pool.submit(read, item) for item in items[number + 1 :][:1]]
            yield value
            del value  # else it would stay alive until the next one is read


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """Labelled rows of a store, to be streamed."""

    n_rows: int
    # Reads rows by their numbers `[n]`, in one padded width, with weights `[n]`.
    read: Callable[[np.ndarray, np.ndarray], LabelledFeatures]
    config: StreamConfig  # how the rows are split into groups

    def groups(self, *seed: int) -> Iterator[LabelledFeatures]:
        """Yield an epoch's groups with their signals, reading one ahead."""
        groups = epoch_groups(self.n_rows, self.config, seed)
        yield from prefetched(lambda x: self.read(x.where, x.is_real), groups)


def fit_streamed(
    blocks: Sequence[Block],
    train: Streamed,
    valid: Streamed,
    *,
    encoder: Encoder,
    config: TrainConfig,
    on_epoch: OnEpoch = lambda block, n_epochs: None,
) -> Iterator[TrainedMembers]:
    """Train blocks from a store as `jaxprobe.grid` does with rows in memory."""
    use_one_blas_thread()
    fixed = {"encoder": encoder, "config": config}
    sample = train.read(np.arange(1), np.ones(1)).features
    learners = [
        block_learner(filled_block(block, **fixed), sample, **fixed) for block in blocks
    ]
    states = fit(
        learners,
        lambda epoch: train.groups(config.root_seed, epoch),
        lambda: valid.groups(config.root_seed),
        config,
        lambda i, n_epochs: on_epoch(blocks[i], n_epochs),
    )
    yield from map(trained_block, blocks, states)


@usual_jax()
def train_encoders(
    data: TrainingSet,
    config: GridConfig,
    *,
    subsets: Iterable[int] | None = None,
    cache: Cache = Cache(),
    share: Share = Share(),
    on_epochs: Callable[[int], None] = lambda n: None,
) -> tuple[TrainedMembers, MemberOutputs] | None:
    """Train encoders on the rows of a setting, and apply them to all of its rows.

    Args:
      data: the rows, with the labels to learn.
      config: widths, protocol, and how rows are streamed.
      subsets: numbers of the subsets to train, each with every seed; None trains all.
      cache: saves finished members, and has those of earlier runs and other processes;
        its key must identify the data and the configuration, and nothing else. Streamed
        members are all finished at once.
      share: which of the members this process trains.
      on_epochs: called with numbers of epochs that have been run, or will not be, 0
        before each linear part; each member of the share has `expected_epochs`. To stop
        the call it may raise.

    Returns:
      All members, seed-major with the subsets of a seed in order, and their outputs on
      every row of the store. A training row's logit contains the linear part that has
      not seen its question, for training fusion heads. None for a partial share, whose
      members are in the cache.
    """
    subsets = sorted(range(data.dims.n_subsets) if subsets is None else subsets)
    linear = _linear_parts(data, config, subsets, cache, partial(on_epochs, 0))
    mine = _members_of_share(config, data.dims, data.lengths, subsets, share)
    trained_blocks = [*_trained(data, config, mine, linear, cache, on_epochs)]
    if not share.is_whole:
        return None
    trained = join(trained_blocks, mine)
    every = np.arange(len(data.lengths))
    if linear is None:
        return trained, _outputs(data, config, trained, every)
    train, valid = data.where
    trained = with_linear_parts(trained, linear)
    logits = _outputs(data, config, trained, valid).logits
    of_rows = data.rows.take(valid)
    trained = drop_networks_without_gain(
        trained, logits, linear, of_rows.labels, of_rows.ids
    )
    outputs = _outputs(data, config, trained, every)
    read = [member.subset for member in trained.members]
    outputs.logits[:, train] += (linear.train - linear.fitted)[read]
    return trained, outputs


# Shape of encoders that are only regressions: the smallest networks, of all zeros.
LINEAR_ONLY = EncoderConfig(
    projection=1, hidden=1, n_blocks=1, n_groups=1, is_linear_first=True
)


@usual_jax()
def train_regression(data: TrainingSet) -> tuple[TrainedMembers, MemberOutputs]:
    """Fit a regression on all families as an encoder whose network is zero.

    Validation rows are not used; see `jaxprobe.linear.fit_ridge`. Returns one member,
    of the shape `LINEAR_ONLY`, and its outputs on every row of the store; a training
    row's logit is from a regression that has not seen its question.
    """
    train = data.where[0]
    pooled = Pooled.of(data.splits()[0], data.rows.labels[train])
    regression, unseen = fit_ridge(pooled, data.rows.ids[train])
    every = data.dims.n_subsets - 1
    mask = jnp.asarray(data.dims.subset_masks[every])
    # Only shapes: drawing weights would compile the network operation by operation.
    init = Encoder(LINEAR_ONLY, data.dims).init
    shapes = jax.eval_shape(init, jax.random.key(0), data.read_train(train[:1]), mask)
    params = {
        "params": jax.tree.map(
            lambda x: np.zeros((1, *x.shape), x.dtype), shapes["params"]
        ),
        COLLECTION: jax.tree.map(lambda x: np.asarray(x)[None], regression),
    }
    nothing = FitInfo(*np.full((len(FitInfo._fields), 1), np.nan))
    trained = TrainedMembers((Member(every, 0),), params, nothing)
    config = GridConfig(encoder=LINEAR_ONLY, train=TrainConfig(n_seeds=1))
    outputs = _outputs(data, config, trained, np.arange(len(data.lengths)))
    outputs.logits[0, train] = unseen
    return trained, outputs


def _members(config: GridConfig, subsets: Sequence[int]) -> list[Member]:
    return [Member(k, s) for s in range(config.train.n_seeds) for k in subsets]


def members_of_share(
    members: Sequence[Member], share: Share, cost: Callable[[Member], int]
) -> list[Member]:
    """Return the members of a share, in their order; all shares cost about the same.

    The seeds of a subset stay together, since they train side by side, unless there are
    more processes than subsets.
    """
    subsets = dict.fromkeys(member.subset for member in members)
    groups = [[m for m in members if m.subset == k] for k in subsets]
    if share.world_size > len(subsets):
        groups = [[member] for member in members]
    mine = share.mine(groups, lambda group: sum(map(cost, group)))
    return sorted(chain(*mine), key=members.index)


def _members_of_share(
    config: GridConfig,
    dims: FamilyDims,
    lengths: np.ndarray,
    subsets: Sequence[int],
    share: Share,
) -> list[Member]:
    cost = partial(step_flops, config.encoder, dims, widths_of(lengths))
    return members_of_share(_members(config, subsets), share, cost)


def _cache_name(member: Member) -> str:
    """Return the name of a member's part in the cache."""
    return f"{member.subset}-{member.seed}"


def _load(cache: Cache, member: Member) -> TrainedMembers | None:
    arrays = cache.load(_cache_name(member))
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    return TrainedMembers(
        (member,), flax.traverse_util.unflatten_dict(arrays, sep="/"), info
    )


def _save(cache: Cache, trained: TrainedMembers) -> None:
    """Save every member of a block as a separate part."""
    for i, member in enumerate(trained.members):
        params, info = jax.tree.map(
            lambda x, i=i: x[i : i + 1], (trained.params, trained.info)
        )
        arrays: dict[str, Any] = flax.traverse_util.flatten_dict(params, sep="/")
        infos = {f"info.{name}": value for name, value in info._asdict().items()}
        cache.save(_cache_name(member), {**arrays, **infos})


def _trained(
    data: TrainingSet,
    config: GridConfig,
    members: Sequence[Member],
    linear: LinearGrid | None,
    cache: Cache,
    on_epochs: Callable[[int], None],
) -> Iterator[TrainedMembers]:
    """Yield members: first the saved ones, then others, saved as they finish."""
    missing, n_expected = [], expected_epochs(config.encoder, config.train)
    for member in members:
        if (trained := _load(cache, member)) is None:
            missing.append(member)
        else:
            on_epochs(n_expected)
            yield trained
    if not missing:
        return

    def on_epoch(block: Block, n_epochs: int) -> None:
        if n_epochs <= n_expected:
            on_epochs(len(block.members))

    for trained in _fit(data, config, missing, linear, on_epoch):
        _save(cache, trained)
        n_left = max(0, n_expected - int(trained.info.n_epochs.max()))
        on_epochs(n_left * len(trained.members))
        yield trained


def _fit(
    data: TrainingSet,
    config: GridConfig,
    members: Sequence[Member],
    linear: LinearGrid | None,
    on_epoch: OnEpoch,
) -> Iterator[TrainedMembers]:
    """Train members; streamed ones all share one pass over the store per epoch."""
    sizes = Sizes.of(config, data.dims, data.lengths, data.where, data.device_dtypes)
    plan = choose(sizes, config.device_memory)
    blocks = plan.blocks(members)
    encoder = Encoder(config.encoder, data.dims)
    protocol: dict[str, Any] = {
        "encoder": encoder,
        "config": plan.config(config.train),
        "on_epoch": on_epoch,
    }
    offsets = (linear.train, linear.valid) if linear else (None, None)
    label = list(map(partial(_labels_of, data.rows), data.where, offsets))
    if data.in_memory is not None:
        groups = (
            [of_split(x.indices, x.tokens) for x in buckets]
            for buckets, of_split in zip(data.in_memory, label, strict=True)
        )
        yield from fit_blocks(blocks, *groups, **protocol)
        return

    def streamed(where: np.ndarray, read: ReadRows, label: Any) -> Streamed:
        return Streamed(
            n_rows=len(where),
            read=lambda at, weights: label(at, read(where[at]), weights),
            config=config.stream or StreamConfig(),
        )

    splits = map(streamed, data.where, (data.read_train, data.read), label)
    yield from fit_streamed(blocks, *splits, **protocol)


def _labels_of(
    rows: StoreRows, where: np.ndarray, offsets: np.ndarray | None
) -> Callable[..., LabelledFeatures]:
    """Return a function that labels the tokens of some rows `where` of a store.

    `offsets` `[n_subsets, n]` are as in `LabelledFeatures`.
    """
    labels = rows.labels[where]
    questions = np.unique(rows.ids[where], return_inverse=True)[1]

    def label(
        at: np.ndarray, tokens: FamilyTokens, weights: np.ndarray | None = None
    ) -> LabelledFeatures:
        of_rows = None if offsets is None else offsets[:, at]
        return labelled(tokens, labels[at], weights, of_rows, questions[at])

    return label


def _linear_parts(
    data: TrainingSet,
    config: GridConfig,
    subsets: Sequence[int],
    cache: Cache,
    on_subset: Callable[[], None],
) -> LinearGrid | None:
    """Fit the linear parts, or load those that an interrupted call has saved."""
    if not config.encoder.is_linear_first:
        return None
    saved = load_linear(cache, subsets)
    if saved is not None:
        return saved
    train, valid = (
        Pooled.of(split, data.rows.labels[where])
        for split, where in zip(data.splits(), data.where, strict=True)
    )
    questions = data.rows.ids[data.where[0]]
    linear = fit_linear_parts(train, valid, questions, subsets, on_subset)
    save_linear(cache, linear)
    return linear


def _outputs(
    data: TrainingSet, config: GridConfig, trained: TrainedMembers, where: np.ndarray
) -> MemberOutputs:
    """Return every member's outputs on rows of the store, computed in batches."""
    encoder = Encoder(config.encoder, data.dims)
    indices, outputs = [], []
    for rows, tokens in data.batches(where):
        logits, pooled = jax.device_get(
            member_outputs(trained, tokens, encoder=encoder)
        )
        indices.append(rows)
        outputs.append(MemberOutputs(logits[:, : len(rows)], pooled[:, : len(rows)]))
    order = np.argsort(np.concatenate(indices))
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, order], *outputs)


def settings_at_once(run: RunDir, config: GridConfig) -> int:
    """Return how many settings of a run are trained at once.

    All if memory holds the rows of all, since compiling a setting uses only one core.
    One if rows are streamed, since memory holds the groups of one setting, and one on
    an accelerator or with a given memory size, since training is planned to fill it.
    """
    is_planned = config.device_memory is not None or jax.default_backend() != "cpu"
    if is_planned or config.stream is not None:
        return 1
    settings = settings_of(run)
    sizes = [_sizes(*open_rows(run, setting), config) for setting in settings]
    return len(sizes) if rows_fit_together(sizes) else 1


def _key(run: RunDir, config: GridConfig, store_id: str) -> str:
    """Return the identity of everything that a setting's members depend on."""
    sources = (*question_files(run), run.labels, run.sweep)
    config = dataclasses.replace(config, device_memory=None)  # only rounding
    text = json.dumps([PROTOCOL, dataclasses.asdict(config)])
    protocol = hashlib.sha256(text.encode()).hexdigest()
    return " ".join((*map(sha256_file, sources), store_id, protocol))


def _caches(run: RunDir, config: GridConfig, setting: Setting) -> tuple[Cache, Cache]:
    """Return the caches of a setting's grid and of its permuted-label control."""
    key = _key(run, config, open_store(run.features(setting)).id)
    folder = members_folder(run, setting)
    return Cache(folder / "grid", key), Cache(folder / "permuted", key)


_SUBSETS = range(N_SUBSETS), [EVERY_FAMILY]  # of a setting's grid and its control


def _n_missing(run: RunDir, config: GridConfig, setting: Setting) -> int:
    """Return how many members of a setting have not been trained by any process."""
    caches = _caches(run, config, setting)
    if checkpoint.is_saved(run.encoders(setting), caches[0].key):
        return 0
    return sum(
        len(cache.missing(map(_cache_name, _members(config, subsets))))
        for cache, subsets in zip(caches, _SUBSETS, strict=True)
    )


def _train_setting(
    run: RunDir,
    config: GridConfig,
    note: Callable[[str], None],
    setting: Setting,
    tick: Callable[..., None],
) -> None:
    """Train this process's share of a setting and of its permuted-label control."""
    caches = _caches(run, config, setting)
    if checkpoint.is_saved(run.encoders(setting), caches[0].key):
        return
    if config.stream is not None:
        return_freed_memory()
    data = run_training_set(run, setting, config)
    permuted = permute_by_question(data.rows, run.seed)
    rows = dataclasses.replace(data.rows, labels=permuted)
    control_data = dataclasses.replace(data, rows=rows)
    fit = partial(train_encoders, config=config, share=run.share, on_epochs=tick)
    grid = fit(data, cache=caches[0])
    control = fit(control_data, subsets=[EVERY_FAMILY], cache=caches[1])
    if grid is None or control is None:
        return
    trained, outputs = grid
    if config.encoder.is_linear_first:
        counts = f"{n_networks_kept(trained)} of {len(trained.members)}"
        note(
            f"train: {setting}: {counts} networks improved on the logistic regression "
            "of their signals; the others were dropped for that regression"
        )
        n_epochs = reviewed_after(config.encoder, config.train)
        if n_epochs is not None and (
            n_stopped := n_stopped_by_review(trained.info, n_epochs, config.train)
        ):
            note(
                f"train: {setting}: after {n_epochs} epochs the gain over the "
                f"regression was less than {LEAST_GAIN} standard errors for "
                f"{n_stopped} of {len(trained.members)} networks, which were stopped"
            )
    checkpoint.save(
        run.encoders(setting),
        {
            "params": trained.params,
            "info": trained.info._asdict(),
            "standardizer": data.standardizer._asdict(),
            "outputs": outputs._asdict(),
            "control": {"logits": control[1].logits, "labels": permuted},
        },
        {
            "key": caches[0].key,
            "layer": data.layer,
            "dims": dataclasses.asdict(data.dims),
        },
    )


def train_run(
    run: RunDir, config: GridConfig, update: Update, progress: Progress
) -> int:
    """Train a share of the members; return how many of other shares are missing."""
    gpu = None if run.share.is_whole else gpu_of_process()
    if gpu is not None:  # before JAX looks for GPUs
        jax.config.update("jax_cuda_visible_devices", str(gpu))
    set_compiler(run.preset)
    config, settings = config.seeded(run.seed), settings_of(run)
    total = 0
    for setting in settings:  # check before hours are spent on another setting
        key = _caches(run, config, setting)[0].key
        if not checkpoint.is_saved(run.encoders(setting), key):
            store, rows = open_rows(run, setting)
            check_plan(store, rows, config)
            shapes = family_dims(store), stored_lengths(store)
            for subsets in _SUBSETS:
                total += len(_members_of_share(config, *shapes, subsets, run.share))
    total *= expected_epochs(config.encoder, config.train)

    def work(setting: Setting, tick: Callable[..., None]) -> None:
        _train_setting(run, config, progress.note, setting, tick)

    at_once = settings_at_once(run, config)
    side_by_side(work, settings, update, total, at_once=at_once)
    if run.share.is_whole:
        return 0
    # Count after the last setting: one process may be ahead in the first setting and
    # another in the second, so that each would leave the joining to the other.
    return sum(_n_missing(run, config, setting) for setting in settings)

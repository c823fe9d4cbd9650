"""The stage that trains every encoder of the grid, and applies them to every row."""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import question_files, row_files, settings_of
from extract.run.directory import RunDir
from extract.run.files import sha256_file
from extract.run.memory import return_freed_memory
from extract.run.stages import Stage, side_by_side
from jaxprobe import checkpoint
from jaxprobe.evaluation import permute_by_question
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.rows import (
    ReadRows,
    TrainingSet,
    rows_at_once,
    training_set,
)
from jaxprobe.features.subsets import subset_index
from jaxprobe.features.widths import width_groups, widths_of
from jaxprobe.fit.grid import (
    Block,
    Member,
    Trained,
    default_blocks,
    fit_everywhere,
    join,
    labelled,
    member_outputs,
)
from jaxprobe.fit.linear import (
    LinearGrid,
    Pooled,
    count_heard,
    fit_linear_parts,
    load_linear,
    save_linear,
    silence,
    with_linear_parts,
)
from jaxprobe.fit.memory import Sizes, choose
from jaxprobe.fit.saved import (
    cut,
    load_members,
    save_members,
)
from jaxprobe.fit.streaming import Streamed, fit_streamed
from jaxprobe.model.encoder import Encoder, MemberOutputs
from jaxprobe.settings import GRID_PRESETS, GridConfig, set_compiler
from jaxprobe.stage import chosen_layer, encoder_folders, open_rows

EVERY_FAMILY = subset_index("HPRA")


def settings_at_once(config: GridConfig) -> int:
    """Return how many settings are trained side by side.

    Both, where memory holds them: each compiles its own step on one core for as long as
    the other does, and a member's operations already share the cores among themselves.
    Streamed, one: memory holds one's groups. On an accelerator, or where memory is
    given, one: it is planned to be full.
    """
    is_planned = config.device_memory is not None or jax.default_backend() != "cpu"
    return 1 if is_planned or config.stream is not None else len(SETTINGS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MemberTrainer:
    """Trains members on the rows of one setting, and applies them to all of its rows.

    Attributes:
      data: the rows.
      config: widths, protocol, and how rows are streamed.
      key: identity of all that a member depends on.
      tick: called for every block that is done.
    """

    data: TrainingSet
    config: GridConfig
    key: str
    tick: Callable[[], None]

    def fit(
        self, labels: np.ndarray, blocks: Sequence[Block], folder: Path
    ) -> tuple[Trained, MemberOutputs]:
        """Train blocks; streamed members all in one pass over the store per epoch.

        Args:
          labels: `[n_rows]` bool, of every row of the store.
          blocks: what is trained.
          folder: where finished members are saved for a run that continues; streamed
            ones not before all are done.

        Returns:
          All members, seed-major, the subsets of a seed in the order of SUBSETS; and
          their outputs on every row. A training row's logit has in it the linear part
          that has not seen its question: fusion heads are trained on these.
        """
        subsets = {subset for block in blocks for subset in block.subsets}
        linear = self._linear_parts(labels, subsets, folder)
        parts = list(self._trained(labels, blocks, folder, linear))
        members = [member for part in parts for member in part.members]
        trained = join(parts, sorted(members, key=lambda m: (m.seed, m.subset)))
        if linear is None:
            return trained, self._outputs(trained, self._every)
        trained = with_linear_parts(trained, linear)
        valid = self.data.where[1]
        logits = self._outputs(trained, valid).logits
        trained = silence(trained, logits, linear, labels[valid])
        outputs = self._outputs(trained, self._every)
        own = [member.subset for member in trained.members]
        outputs.logits[:, self.data.where[0]] += (linear.train - linear.fitted)[own]
        return trained, outputs

    def fit_share(
        self,
        labels: np.ndarray,
        blocks: Sequence[Block],
        folder: Path,
        share: Sequence[Block],
    ) -> None:
        """Train a share of blocks into the folder, where `fit` of all looks for it."""
        subsets = {subset for block in blocks for subset in block.subsets}
        linear = self._linear_parts(labels, subsets, folder)
        for _ in self._trained(labels, share, folder, linear):
            pass

    def _trained(
        self,
        labels: np.ndarray,
        blocks: Sequence[Block],
        folder: Path,
        linear: LinearGrid | None,
    ) -> Iterator[Trained]:
        """Yield all members, trained now or by an earlier or another process."""
        members = [member for block in blocks for member in block.members]
        saved = load_members(folder, members, self.key)
        missing = {*members} - {member for part in saved for member in part.members}
        left = [part for block in blocks for part in cut(block, missing)]
        done: set[Member] = set()
        n_done = 0
        for part in chain(saved, self._train(labels, left, linear)):
            if missing.issuperset(part.members):
                save_members(folder, part, self.key)
            done.update(part.members)
            n_before = n_done
            n_done = sum(done.issuperset(block.members) for block in blocks)
            for _ in range(n_done - n_before):
                self.tick()
            yield part

    def _train(
        self, labels: np.ndarray, blocks: Sequence[Block], linear: LinearGrid | None
    ) -> Iterator[Trained]:
        if not blocks:
            return
        config, data = self.config, self.data
        sizes = Sizes.of(config, data.dims, data.lengths, data.where, data.held_as)
        plan = choose(sizes, config.device_memory)
        blocks = plan.blocks([m for block in blocks for m in block.members])
        protocol = {"encoder": self._encoder, "config": plan.config(config.train)}
        labels_of = [labels[where] for where in self.data.where]
        offsets = (linear.train, linear.valid) if linear else (None, None)
        if self.data.in_memory is not None:
            held = [
                [
                    labelled(tokens, own[at], offsets=None if o is None else o[:, at])
                    for at, tokens in part
                ]
                for part, own, o in zip(
                    self.data.in_memory, labels_of, offsets, strict=True
                )
            ]
            yield from fit_everywhere(blocks, *held, **protocol)
            return
        stream, reads = self.config.stream, (self.data.read_train, self.data.read)
        parts = (
            Streamed(where=where, labels=own, read=read, config=stream, offsets=o)
            for where, own, read, o in zip(
                self.data.where, labels_of, reads, offsets, strict=True
            )
        )
        yield fit_streamed(blocks, *parts, **protocol)

    def _linear_parts(
        self, labels: np.ndarray, subsets: Iterable[int], folder: Path
    ) -> LinearGrid | None:
        """Fit the linear parts, or take those of an earlier, interrupted run."""
        if not self.config.encoder.is_linear_first:
            return None
        path, wanted = folder / "linear.safetensors", sorted(subsets)
        saved = load_linear(path, self.key, wanted)
        if saved is not None:
            return saved
        data = self.data
        parts = data.in_memory or map(
            self._in_parts, data.where, (data.read_train, data.read)
        )
        train, valid = (
            Pooled.of(part, labels[where])
            for part, where in zip(parts, data.where, strict=True)
        )
        questions = data.rows.ids[data.where[0]]
        linear = fit_linear_parts(train, valid, questions, wanted)
        save_linear(path, linear, self.key)
        return linear

    @property
    def _encoder(self) -> Encoder:
        return Encoder(self.config.encoder, self.data.dims)

    @property
    def _every(self) -> np.ndarray:
        return np.arange(len(self.data.lengths))

    def _outputs(self, trained: Trained, where: np.ndarray) -> MemberOutputs:
        """Return every member's outputs on rows of the store, a few at a time."""
        order, parts = [], []
        for rows, tokens in self._in_parts(where, self.data.read):
            outputs = member_outputs(trained, tokens, encoder=self._encoder)
            order.append(rows)
            logits, pooled = jax.device_get(outputs)
            n_real = len(rows)
            parts.append(MemberOutputs(logits[:, :n_real], pooled[:, :n_real]))
        place = np.argsort(np.concatenate(order))
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, place], *parts)

    def _in_parts(
        self, where: np.ndarray, read: ReadRows
    ) -> Iterator[tuple[np.ndarray, FamilyTokens]]:
        """Yield places in `where`, and the tokens there, a few rows at a time.

        All parts of rows of similar length have one shape, so that one executable
        serves them; the last one repeats its last row.
        """
        lengths = self.data.lengths[where]
        for group in width_groups(lengths, self.config.train.batch_size):
            widths = widths_of(lengths[group])
            n_parts = -(-len(group) // rows_at_once(widths, self.data.dims))
            size = -(-len(group) // n_parts)
            for start in range(0, len(group), size):
                rows = group[start : start + size]
                padded = np.pad(rows, (0, size - len(rows)), "edge")
                yield rows, read(where[padded], widths)


class Task(NamedTuple):
    """What of a setting is trained together: the grid, or its control."""

    labels: np.ndarray  # `[n_rows]` bool, of every row of the store
    blocks: Sequence[Block]
    folder: Path  # of finished members


def open_setting(
    run: RunDir,
    config: GridConfig,
    setting: Setting,
    tick: Callable[[], None],
) -> tuple[MemberTrainer, Task, Task] | None:
    """Return what trains a setting, its grid, and its control with permuted labels.

    Returns:
      None where an earlier run has finished the setting with this data.
    """
    store, rows = open_rows(run, setting)
    sources = (*question_files(run), run.labels, run.sweep)
    key = " ".join((*map(sha256_file, sources), store.id))
    if checkpoint.is_saved(run.encoders(setting), key):
        return None
    if config.stream is not None:
        return_freed_memory()
    data = training_set(
        store,
        rows,
        layer=chosen_layer(run),
        n_batch=config.train.batch_size,
        streamed=config.stream is not None,
    )
    trainer = MemberTrainer(data=data, config=config, key=key, tick=tick)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    control = [Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds)]
    permuted = permute_by_question(data.rows, run.seed)
    return (
        trainer,
        Task(data.rows.labels, default_blocks(n_seeds), folder / "grid"),
        Task(permuted, control, folder / "permuted"),
    )


def _train_setting(
    run: RunDir,
    config: GridConfig,
    note: Callable[[str], None],
    setting: Setting,
    tick: Callable[[], None],
) -> None:
    opened = open_setting(run, config, setting, tick)
    if opened is None:
        return
    trainer, *tasks = opened
    (grid, outputs), (_, control) = (trainer.fit(*task) for task in tasks)
    if config.encoder.is_linear_first:
        counts = f"{count_heard(grid)} of {len(grid.members)}"
        note(
            f"train: {setting}: {counts} networks add to the logistic regression of "
            "their signals, which the others are"
        )
    data = trainer.data
    checkpoint.save(
        run.encoders(setting),
        {
            "params": grid.params,
            "info": grid.info._asdict(),
            "standardizer": data.standardizer._asdict(),
            "outputs": outputs._asdict(),
            "control": {"logits": control.logits, "labels": tasks[1].labels},
        },
        {
            "key": trainer.key,
            "layer": data.layer,
            "dims": dataclasses.asdict(data.dims),
        },
    )
    shutil.rmtree(tasks[0].folder.parent, ignore_errors=True)  # no longer needed


def _train(run: RunDir, config: GridConfig, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    config, settings = config.seeded(run.seed), settings_of(run)
    n_each = len(default_blocks(config.train.n_seeds)) + config.train.n_seeds
    side_by_side(
        partial(_train_setting, run, config, progress.note),
        settings,
        update,
        n_each * len(settings),
        at_once=settings_at_once(config),
    )


TRAIN = Stage(
    name="train",
    inputs=lambda run: [*row_files(run), run.sweep],
    outputs=encoder_folders,
    work=_train,
    presets=GRID_PRESETS,
)

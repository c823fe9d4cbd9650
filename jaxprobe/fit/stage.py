"""The stage that trains every encoder of the grid, and applies them to every row."""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.contents import question_files, row_files, settings_of
from extract.run.directory import RunDir
from extract.run.files import sha256_file
from extract.run.stages import Forecast, Stage, side_by_side
from extract.store.read import open_store
from jaxprobe import checkpoint
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.evaluation import permute_by_question
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.reading import family_dims, longest_spans
from jaxprobe.features.rows import (
    ReadRows,
    TrainingRows,
    load_rows,
    rows_at_once,
    training_rows,
)
from jaxprobe.features.subsets import N_SUBSETS, subset_index
from jaxprobe.features.widths import width_groups, widths_of
from jaxprobe.fit.blocks import Block, default_blocks
from jaxprobe.fit.devices import fit_everywhere
from jaxprobe.fit.grid import Labelled, Trained, join, labelled, member_outputs
from jaxprobe.fit.linear import (
    LinearGrid,
    Pooled,
    fit_linear_parts,
    load_linear,
    save_linear,
    silence,
    with_linear_parts,
)
from jaxprobe.fit.loop import FitInfo
from jaxprobe.fit.streaming import Streamed, fit_streamed
from jaxprobe.fit.work import Workload, turn_flops
from jaxprobe.model.encoder import Encoder, MemberOutputs
from jaxprobe.settings import GRID_PRESETS, GridConfig, set_compiler

EVERY_FAMILY = subset_index("HPRA")
_FLOAT = 4  # bytes


def settings_at_once(config: GridConfig) -> int:
    """Return how many settings are trained side by side.

    Both, where memory holds them: each compiles its own step on one core for as long as
    the other does, and a member's operations already share the cores among themselves.
    Streamed, one: memory holds one's groups.
    """
    return len(SETTINGS) if config.stream is None else 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MemberTrainer:
    """Trains members on the rows of one setting, and applies them to all of its rows.

    Attributes:
      data: the rows.
      config: widths, protocol, and how rows are streamed.
      key: identity of all that a member depends on.
      tick: called for every block that is done.
    """

    data: TrainingRows
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
          folder: where finished blocks are saved for a run that continues; streamed
            members are not saved before all are done.

        Returns:
          All members, seed-major, the subsets of a seed in the order of SUBSETS; and
          their outputs on every row. A training row's logit has in it the linear part
          that has not seen its question: fusion heads are trained on these.
        """
        members = [member for block in blocks for member in block.members]
        if not self.config.encoder.is_linear_first:
            trained = self._train(labels, blocks, folder, None)
            return trained, self._outputs(trained, self._every)
        linear = self._linear_parts(labels, {m.subset for m in members}, folder)
        trained = with_linear_parts(self._train(labels, blocks, folder, linear), linear)
        valid = self.data.where[1]
        logits = self._outputs(trained, valid).logits
        trained = silence(trained, logits, linear, labels[valid])
        outputs = self._outputs(trained, self._every)
        subsets = [member.subset for member in trained.members]
        outputs.logits[:, self.data.where[0]] += (linear.train - linear.fitted)[subsets]
        return trained, outputs

    def _train(
        self,
        labels: np.ndarray,
        blocks: Sequence[Block],
        folder: Path,
        linear: LinearGrid | None,
    ) -> Trained:
        members = [member for block in blocks for member in block.members]
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
            trained = list(self._train_missing(blocks, folder, *held))
        else:
            reads = self.data.read_train, self.data.read
            parts = (
                Streamed(
                    where=where,
                    labels=own,
                    read=read,
                    config=self.config.stream,
                    offsets=o,
                )
                for where, own, read, o in zip(
                    self.data.where, labels_of, reads, offsets, strict=True
                )
            )
            trained = [fit_streamed(members, *parts, **self._protocol)]
            for _ in blocks:
                self.tick()
        return join(trained, sorted(members, key=lambda m: (m.seed, m.subset)))

    def _linear_parts(
        self, labels: np.ndarray, subsets: Iterable[int], folder: Path
    ) -> LinearGrid:
        """Fit the linear parts, or take those of an earlier, interrupted run."""
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
    def _protocol(self) -> dict[str, Any]:
        encoder = Encoder(self.config.encoder, self.data.dims)
        return {"encoder": encoder, "config": self.config.train}

    def _train_missing(
        self,
        blocks: Sequence[Block],
        folder: Path,
        train: Sequence[Labelled],
        valid: Sequence[Labelled],
    ) -> Iterator[Trained]:
        """Yield every block, trained now or by an earlier, interrupted run."""
        missing = {}
        for block in blocks:
            name = "-".join(map(str, block.subsets + block.seeds))
            path = folder / f"{name}.safetensors"
            saved = _load_block(path, block, self.key)
            if saved is None:
                missing[path] = block
            else:
                self.tick()
                yield saved
        left = list(missing.values())
        trained = fit_everywhere(left, train, valid, **self._protocol)
        for path, block in zip(missing, trained, strict=True):
            _save_block(path, block, self.key)
            self.tick()
            yield block

    @property
    def _every(self) -> np.ndarray:
        return np.arange(len(self.data.lengths))

    def _outputs(self, trained: Trained, where: np.ndarray) -> MemberOutputs:
        """Return every member's outputs on rows of the store, a few at a time."""
        encoder = Encoder(self.config.encoder, self.data.dims)
        order, parts = [], []
        for rows, tokens in self._in_parts(where, self.data.read):
            outputs = member_outputs(trained, tokens, encoder=encoder)
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


def _load_block(path: Path, block: Block, key: str) -> Trained | None:
    arrays = load_cache(path, key)
    if arrays is None:
        return None
    info = FitInfo(**{name: arrays.pop(f"info.{name}") for name in FitInfo._fields})
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return Trained(block.members, tree, info)


def _save_block(path: Path, trained: Trained, key: str) -> None:
    arrays: dict[str, Any] = flax.traverse_util.flatten_dict(trained.params, sep="/")
    info = {f"info.{name}": value for name, value in trained.info._asdict().items()}
    save_cache(path, {**arrays, **info}, key)


def _is_trained(path: Path, key: str) -> bool:
    """Tell whether an earlier run has finished a setting with this data."""
    if not path.exists():
        return False
    try:
        return checkpoint.restore(path)[1].get("key") == key
    except ValueError:
        return False  # damaged: trained again and replaced


def _train_setting(
    run: RunDir, config: GridConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    store_id = open_store(run.features(setting)).id
    sources = (*question_files(run), run.labels, run.sweep)
    key = " ".join((*map(sha256_file, sources), store_id))
    if _is_trained(run.encoders(setting), key):
        return
    data = training_rows(
        run,
        setting,
        streamed=config.stream is not None,
        n_batch=config.train.batch_size,
    )
    trainer = MemberTrainer(data=data, config=config, key=key, tick=tick)
    folder = run.encoders(setting).with_name(f"{setting}.members")
    n_seeds = config.train.n_seeds
    permuted = permute_by_question(data.rows, run.seed)
    control_blocks = [Block((EVERY_FAMILY,), (seed,)) for seed in range(n_seeds)]
    blocks = default_blocks(n_seeds)
    grid, outputs = trainer.fit(data.rows.labels, blocks, folder / "grid")
    _, control = trainer.fit(permuted, control_blocks, folder / "permuted")
    checkpoint.save(
        run.encoders(setting),
        {
            "params": grid.params,
            "info": grid.info._asdict(),
            "standardizer": data.standardizer._asdict(),
            "outputs": outputs._asdict(),
            "control": {"logits": control.logits, "labels": permuted},
        },
        {"key": key, "layer": data.layer, "dims": dataclasses.asdict(data.dims)},
    )
    shutil.rmtree(folder, ignore_errors=True)  # the checkpoint holds all of it now


def _train(run: RunDir, config: GridConfig, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    settings = settings_of(run)
    n_each = len(default_blocks(config.train.n_seeds)) + config.train.n_seeds
    side_by_side(
        partial(_train_setting, run, config),
        settings,
        update,
        n_each * len(settings),
        at_once=settings_at_once(config),
    )


def read_member_outputs(run: RunDir, setting: Setting) -> MemberOutputs:
    """Return the outputs of every trained encoder of a setting on its rows."""
    tree, _ = checkpoint.restore(run.encoders(setting))
    return MemberOutputs(**tree["outputs"])


def encoder_folders(run: RunDir) -> list[Path]:
    """Return the checkpoints of the run's settings."""
    return [run.encoders(setting) for setting in settings_of(run)]


def _forecast(run: RunDir, config: GridConfig) -> Forecast:
    """Return what training takes if no member stops early.

    Operations are those of matrix products over all positions of the batches, padded
    ones included; memory is that of the tokens in memory, or of two groups of a stream.
    """
    n_flops = in_memory = outputs = 0
    settings = settings_of(run)
    for setting in settings:
        store, rows = load_rows(run, setting)
        widths, dims = longest_spans(store.spec.spans, setting), family_dims(store)
        n_train = len(rows.where("train"))
        workload = Workload(
            encoder=config.encoder,
            dims=dims,
            spans=tuple((1, width) for width in widths),
            batch_size=config.train.batch_size,
            n_steps=-(-n_train // config.train.batch_size) * config.train.max_epochs,
            n_seeds=config.train.n_seeds,
        )
        control = [(EVERY_FAMILY, seed) for seed in range(config.train.n_seeds)]
        n_flops += turn_flops(workload, [*workload.members, *control])
        row_bytes = sum(widths) * dims.total * _FLOAT
        n_rows = n_train + len(rows.where("validation"))
        if config.stream is not None:
            n_rows = 2 * config.stream.n_chunk * config.stream.n_mixed
        in_memory += n_rows * row_bytes
        pooled = 1 + config.encoder.d_pooled
        outputs += len(workload.members) * len(rows.ids) * pooled * _FLOAT
    n_members = (N_SUBSETS + 1) * config.train.n_seeds
    return Forecast(
        stage="train",
        n_flops=n_flops,
        memory_bytes=in_memory,
        disk_bytes=outputs,
        basis=(
            f"{n_members} members for {' and '.join(settings)} each, at most "
            f"{config.train.max_epochs} epochs each (early stopping makes them fewer); "
            "disk is that of their outputs, weights come on top"
        ),
    )


TRAIN = Stage(
    name="train",
    inputs=lambda run: [*row_files(run), run.sweep],
    outputs=encoder_folders,
    work=_train,
    presets=GRID_PRESETS,
    forecast=_forecast,
)

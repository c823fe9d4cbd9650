"""`beatrice bench precision` and `mixed`: what fewer bits cost in AUROC.

`precision` asks of hidden states as they are stored: the answers of a finished run are
read again in float32 at the layer it chose; each choice rounds those rows with the code
that the store writes with, and trains encoders anew. `mixed` asks of training: every
encoder once more, the operands of its matrix products rounded to bfloat16. Both keep
the run's own widths, protocol and seeds. A difference is taken on the same questions
and seeds, and its interval resamples questions.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.speed.commands import AS_JSON, RowPrinter
from extract.backbone.loading import open_backbone
from extract.backbone.names import backbone_of
from extract.records import Setting
from extract.run.console import Progress, Update, quiet
from extract.run.contents import read_answers, settings_of
from extract.run.directory import RunDir
from extract.run.verbs import RUN_DIR
from extract.signals.extraction import extract
from extract.signals.reader import SignalReader
from extract.signals.stage import extract_config
from extract.store.config import StoreConfig, stored_families
from extract.store.families import SHORT_NAMES, as_written
from extract.store.read import open_store, read_family
from jaxprobe import metrics
from jaxprobe.evaluation import bootstrap_of
from jaxprobe.features.families import FamilyTokens, split_families
from jaxprobe.features.reading import assemble, family_dims, fit_reading, longest_spans
from jaxprobe.features.rows import (
    Rows,
    chosen_layer,
    load_rows,
    training_rows,
)
from jaxprobe.features.subsets import FAMILIES, N_SUBSETS, SUBSET_NAMES, subset_index
from jaxprobe.fit import grid
from jaxprobe.fit.blocks import Block, default_blocks
from jaxprobe.fit.saved import read_member_outputs
from jaxprobe.fit.stage import MemberTrainer
from jaxprobe.model.encoder import Encoder
from jaxprobe.settings import GridConfig, grid_config, set_compiler

SPLITS = ("train", "validation", "test")
ALL = "mean of all"
# The first is what the others are compared with.
CHOICES = (
    StoreConfig(dtype="float32"),
    StoreConfig(dtype="bfloat16"),
    StoreConfig(dtype="float16"),
    StoreConfig(dtype="int8"),
    StoreConfig(dtype="bfloat16", hidden_spans="answer", scalars="bfloat16"),
)
_SHORT = {dtype: short for short, dtype in SHORT_NAMES.items()}
PRECISION_HEAD = (
    "setting|encoder|hidden|spans|others|bytes per answer|AUROC validation|AUROC test|"
    "test, against fp32 [95 %]|std over seeds"
).split("|")
MIXED_HEAD = (
    "setting|encoder|AUROC test, fp32|mixed|difference [95 %]|std of fp32 over seeds"
).split("|")


class Difference(NamedTuple):
    """Difference of two mean AUROCs, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Spell it as the tables do."""
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def aurocs(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the AUROC of every member, `[n_members]` of `[n_members, n]`."""
    return np.array([metrics.auroc(one, labels).value for one in logits])


class Resamples:
    """Answers with their labels, and resamples of their questions."""

    def __init__(self, rows: Rows, config: metrics.BootstrapConfig) -> None:
        """Draw the resamples of a setting's test rows."""
        where = rows.where("test")
        self.labels = rows.labels[where]
        self._weights = list(metrics.resamples(rows.ids[where], config))

    def compare(self, before: np.ndarray, after: np.ndarray) -> Difference:
        """Compare the same members, `[n_members, n]` each, by their mean."""
        draws, means = [], [aurocs(x, self.labels).mean() for x in (before, after)]
        for logits in (before, after):
            weighted = [
                [metrics.weighted_metrics(one, self.labels, block) for one in logits]
                for block in self._weights
            ]
            parts = [np.mean([x["auroc"] for x in own], axis=0) for own in weighted]
            draws.append(np.concatenate(parts))
        low, high = metrics.interval_of(draws[1] - draws[0])
        return Difference(float(means[1] - means[0]), low, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionCost:
    """One row of the table of `precision`: an encoder on one choice of what is stored.

    `bytes_per_answer` is of everything kept of one layer, mean over the sequences;
    `auroc` by split, mean over seeds; the difference is of test AUROC, to the first
    choice.
    """

    setting: Setting
    encoder: str
    kept: StoreConfig
    bytes_per_answer: float
    auroc: Mapping[str, float]
    seed_std: float
    difference: Difference

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `PRECISION_HEAD`."""
        return [
            self.setting,
            self.encoder,
            _SHORT[self.kept.dtype],
            self.kept.hidden_spans,
            _SHORT[self.kept.scalars],
            f"{self.bytes_per_answer:.0f}",
            *(f"{self.auroc[split]:.4f}" for split in SPLITS[1:]),
            str(self.difference),
            f"{self.seed_std:.4f}",
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedCost:
    """One row of the table of `mixed`: test AUROC of an encoder, or of `ALL`.

    Means over seeds, as the run trained it (`single`) and in mixed precision;
    `seed_std` is the run's own, over seeds.
    """

    setting: Setting
    encoder: str
    single: float
    mixed: float
    difference: Difference
    seed_std: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `MIXED_HEAD`."""
        return [
            self.setting,
            self.encoder,
            f"{self.single:.4f}",
            f"{self.mixed:.4f}",
            str(self.difference),
            f"{self.seed_std:.4f}",
        ]


class Reread:
    """One setting's answers, read again in float32 into a store in memory."""

    def __init__(self, run: RunDir, setting: Setting, reader: SignalReader) -> None:
        """Read them; `rows` says which they are, and `where` the splits' indices."""
        _, self.rows = load_rows(run, setting)
        self.where = {split: self.rows.where(split) for split in SPLITS}
        url = f"memory://precision-{setting}/"
        wide = dataclasses.replace(
            extract_config(run),
            hidden_layers=reader.hidden_layers,
            hidden_spans="all",
            dtype="float32",
            scalars="float32",
        )
        extract(reader, read_answers(run, setting), url, wide)
        self.store = open_store(url)

    def tokens(self, kept: StoreConfig) -> dict[str, FamilyTokens]:
        """Return the standardised tokens of each split as a choice would leave them."""
        spec, setting = self.store.spec, self.rows.setting
        dims = family_dims(self.store)
        dims = dataclasses.replace(dims, hidden_spans=kept.hidden_spans)
        widths = longest_spans(spec.spans, setting)

        def features(where: np.ndarray):
            rows = {}
            for name in FAMILIES:
                layer = spec.hidden_layers[0] if name == "hidden" else None
                ragged = read_family(self.store, name, where, layer=layer)
                dtype = kept.dtype if name == "hidden" else kept.scalars
                rows[name] = as_written(ragged.values, dtype)
            starts = ragged.starts - ragged.first_tokens
            return assemble(rows, starts, spec.spans[where], setting, widths)

        split = {name: features(where) for name, where in self.where.items()}
        standardizer = fit_reading(split["train"], dims)
        return {
            name: split_families(one, dims, standardizer) for name, one in split.items()
        }

    def bytes_per_answer(self, kept: StoreConfig) -> float:
        """Return what a choice would store of a sequence, in the mean."""
        spec = self.store.spec
        n_answer = (spec.spans[:, 2, 1] - spec.spans[:, 2, 0]).mean()
        n_rows = {"all": spec.n_read.mean(), "answer": n_answer}
        shapes = {name: spec.families[name].shape for name in FAMILIES}
        families = stored_families(shapes, kept).values()
        return float(sum(one.row_bytes * n_rows[one.spans] for one in families))


def _trained_logits(
    data: Reread, config: GridConfig, name: str, kept: StoreConfig
) -> dict[str, np.ndarray]:
    """Train one encoder, every seed; return logits `[n_seeds, n]` by split."""
    tokens = data.tokens(kept)
    encoder = Encoder(config.encoder, family_dims(data.store))
    train, valid = (
        grid.labelled(tokens[split], data.rows.labels[data.where[split]])
        for split in SPLITS[:2]
    )
    subset = subset_index(name)
    blocks = [Block((subset,), (seed,)) for seed in range(config.train.n_seeds)]
    parts = list(
        grid.fit_blocks(blocks, [train], [valid], encoder=encoder, config=config.train)
    )

    def logits(split: str) -> np.ndarray:
        every = (grid.member_outputs(x, tokens[split], encoder=encoder) for x in parts)
        return np.concatenate([one.logits for one in every])

    return {split: logits(split) for split in SPLITS}


def measure_precision(
    run: RunDir, encoders: Sequence[str], update: Update
) -> Iterator[PrecisionCost]:
    """Train encoders, such as "H" and "HPRA", on every choice; the run is only read.

    Raises:
      ValueError: the run is not swept, or a type cannot hold its hidden states.
    """
    config = grid_config(run)
    reader = SignalReader(open_backbone(backbone_of(run)), (chosen_layer(run),))
    settings = settings_of(run)
    done, total = itertools.count(1), len(settings) * len(encoders) * len(CHOICES)
    for setting in settings:
        data = Reread(run, setting, reader)
        resamples = Resamples(data.rows, bootstrap_of(run))
        for name in encoders:
            reference: dict[str, np.ndarray] = {}
            for kept in CHOICES:
                logits = _trained_logits(data, config, name, kept)
                reference = reference or logits
                seeds = {
                    split: aurocs(logits[split], data.rows.labels[where])
                    for split, where in data.where.items()
                }
                yield PrecisionCost(
                    setting=setting,
                    encoder=name,
                    kept=kept,
                    bytes_per_answer=data.bytes_per_answer(kept),
                    auroc={split: float(x.mean()) for split, x in seeds.items()},
                    seed_std=float(seeds["test"].std()),
                    difference=resamples.compare(reference["test"], logits["test"]),
                )
                update(next(done), total)


def measure_mixed(run: RunDir, update: Update) -> Iterator[MixedCost]:
    """Train every encoder in mixed precision; the run is only read.

    Raises:
      ValueError: the run is not trained, or was trained in mixed precision itself.
    """
    config = grid_config(run)
    if config.encoder.matmul_dtype != "float32":
        raise ValueError(
            "expected a run whose encoders were trained in single precision, found one "
            "made with --mixed; name another run"
        )
    blocks, done = default_blocks(config.train.n_seeds), itertools.count(1)
    total = len(settings_of(run)) * len(blocks)
    for setting in settings_of(run):
        single = read_member_outputs(run, setting).logits  # before minutes of training
        data = training_rows(
            run,
            setting,
            streamed=config.stream is not None,
            n_batch=config.train.batch_size,
        )
        trainer = MemberTrainer(
            data=data,
            config=config.mixed(),
            key="",
            tick=lambda: update(next(done), total),
        )
        with tempfile.TemporaryDirectory() as folder:
            _, mixed = trainer.fit(data.rows.labels, blocks, Path(folder))
        yield from compare(bootstrap_of(run), data.rows, single, mixed.logits)


def compare(
    config: metrics.BootstrapConfig, rows: Rows, single: np.ndarray, mixed: np.ndarray
) -> Iterator[MixedCost]:
    """Compare all encoders in the mean, then every one.

    Args:
      config: of the intervals.
      rows: of a setting.
      single: `[n_members, n_rows]`, seed-major.
      mixed: the same.
    """
    where = rows.where("test")
    resamples = Resamples(rows, config)
    both = [x[:, where].reshape(-1, N_SUBSETS, len(where)) for x in (single, mixed)]
    every = list(range(N_SUBSETS))
    for name, subsets in [(ALL, every), *((SUBSET_NAMES[k], [k]) for k in every)]:
        before, after = (x[:, subsets].reshape(-1, len(where)) for x in both)
        own = aurocs(before, resamples.labels).reshape(-1, len(subsets))
        difference = resamples.compare(before, after)
        yield MixedCost(
            setting=rows.setting,
            encoder=name,
            single=float(own.mean()),
            mixed=float(own.mean() + difference.value),
            difference=difference,
            seed_std=float(own.mean(axis=1).std()),
        )


@click.command()
@RUN_DIR
@click.option(
    "--encoders",
    default="H",
    help="Families that are read together, such as H,HPRA.",
)
@AS_JSON
def precision(run_dir: Path, encoders: str, as_json: bool) -> None:
    """Train encoders on the hidden states as each --dtype would store them.

    RUN_DIR is a finished run; it is only read. Its answers are read again in fp32.

    Example: beatrice bench precision runs/demo --encoders H,HPRA
    """
    run, names = RunDir(run_dir), [name.strip() for name in encoders.split(",")]
    for name in names:
        try:
            subset_index(name)  # a wrong one is found before anything runs
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--encoders") from None
    _print(run, PRECISION_HEAD, as_json, lambda x: measure_precision(run, names, x))


@click.command()
@RUN_DIR
@AS_JSON
def mixed(run_dir: Path, as_json: bool) -> None:
    """Train a run's encoders once more, in mixed precision.

    RUN_DIR is a finished run; it is only read.

    Example: beatrice bench mixed runs/demo
    """
    run = RunDir(run_dir)
    _print(run, MIXED_HEAD, as_json, lambda update: measure_mixed(run, update))


def _print(run: RunDir, head: list[str], as_json: bool, measure: Callable) -> None:
    """Print rows as they are measured, compiled as the run's own code is."""
    set_compiler(run.preset)
    quiet()
    printer = RowPrinter(as_json)
    printer.head(head)
    with Progress().stage(click.get_current_context().info_name) as update:
        for row in measure(update):
            printer.row(row)

"""What a narrower type, or fewer spans, of the hidden states costs in AUROC.

The answers of a finished run are read again in float32 at the layer it chose. Each
choice rounds those rows with the code that the store writes with, and trains the
encoders anew, with the run's own widths, protocol and seeds. A difference is taken on
the same questions and seeds, and its interval resamples questions.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from extract.pipeline import read_answers

from benchmarks.speed.pairing import Pairing, aurocs
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.sweep_stage import chosen_layer
from benchmarks.stages.torch_stages import open_backbone
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from extract.signals.extraction import extract
from extract.signals.reader import SignalReader
from extract.store.config import StoreConfig, stored_families
from extract.store.families import SHORT_NAMES, Spans, as_written
from extract.store.read import FeatureStore, open_store, read_family
from jaxprobe.features.families import FamilyTokens, split_families
from jaxprobe.features.reading import assemble, family_dims, fit_reading, longest_spans
from jaxprobe.features.subsets import FAMILIES, subset_index
from jaxprobe.fit.grid import Block, fit_blocks, labelled, member_outputs
from jaxprobe.model.encoder import Encoder

SPLITS = ("train", "validation", "test")
_SHORT = {dtype: short for short, dtype in SHORT_NAMES.items()}
# The first is what the others are compared with.
CHOICES = (
    StoreConfig(dtype="float32"),
    StoreConfig(dtype="bfloat16"),
    StoreConfig(dtype="float16"),
    StoreConfig(dtype="int8"),
    StoreConfig(dtype="bfloat16", hidden_spans="answer", scalars="bfloat16"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionCost:
    """One row of the table.

    Attributes:
      setting: whose answers.
      encoder: families it reads, such as "H".
      dtype: of the hidden states.
      hidden_spans: where they are kept.
      scalars: type of the other families.
      bytes_per_answer: of everything kept of one layer, mean over the sequences.
      auroc: by split, mean over seeds.
      seed_std: of the test AUROC over seeds.
      difference: of the test AUROC to the first choice.
      low: lower end of its 95 % interval.
      high: upper end.
      n: test answers.
    """

    setting: Setting
    encoder: str
    dtype: str
    hidden_spans: Spans
    scalars: str
    bytes_per_answer: float
    auroc: Mapping[str, float]
    seed_std: float
    difference: float
    low: float
    high: float
    n: int

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        return [
            self.setting,
            self.encoder,
            _SHORT[self.dtype],
            self.hidden_spans,
            _SHORT[self.scalars],
            f"{self.bytes_per_answer:.0f}",
            *(f"{self.auroc[split]:.4f}" for split in SPLITS[1:]),
            f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]",
            f"{self.seed_std:.4f}",
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """One setting's answers, read in float32.

    Attributes:
      store: holds them.
      rows: which of the run's rows they are, and their labels.
      where: by split, indices into the store.
    """

    store: FeatureStore
    rows: Rows
    where: Mapping[str, np.ndarray]


def measure(
    run: RunDir,
    config: RunConfig,
    encoders: Sequence[str],
    progress: Callable[[int, int], None],
    choices: Sequence[StoreConfig] = CHOICES,
) -> Iterator[PrecisionCost]:
    """Train every encoder on every choice, and yield each row; the run is only read.

    Args:
      run: swept, so that it has a layer.
      config: its own.
      encoders: subsets, such as "H" and "HPRA".
      progress: told what is done and to do.
      choices: the first is the reference.

    Raises:
      ValueError: the run is not swept, or a type cannot hold its hidden states.
    """
    reader = SignalReader(open_backbone(config), (chosen_layer(run),))
    done, total = itertools.count(1), len(SETTINGS) * len(encoders) * len(choices)
    for setting in SETTINGS:
        data = _read(run, config, setting, reader)
        for name in encoders:
            reference: np.ndarray | None = None
            for kept in choices:
                logits = _trained_logits(data, config, name, kept)
                reference = logits if reference is None else reference
                yield _row(data, config, name, kept, logits, reference)
                progress(next(done), total)


def _read(
    run: RunDir, config: RunConfig, setting: Setting, reader: SignalReader
) -> _Data:
    """Read a setting's answers into a store in memory."""
    _, rows = load_rows(run, setting)
    url = f"memory://precision-{setting}/"
    wide = dataclasses.replace(
        config.extract,
        hidden_layers=reader.hidden_layers,
        hidden_spans="all",
        dtype="float32",
        scalars="float32",
    )
    extract(reader, read_answers(run, setting), url, wide)
    where = {split: rows.where(split) for split in SPLITS}
    return _Data(store=open_store(url), rows=rows, where=where)


def _tokens(data: _Data, kept: StoreConfig) -> dict[str, FamilyTokens]:
    """Return the standardised tokens of each split as a choice would leave them."""
    spec, setting = data.store.spec, data.rows.setting
    dims = dataclasses.replace(family_dims(data.store), hidden_spans=kept.hidden_spans)
    widths = longest_spans(spec.spans, setting)

    def features(where: np.ndarray):
        rows = {}
        for name in FAMILIES:
            layer = spec.hidden_layers[0] if name == "hidden" else None
            ragged = read_family(data.store, name, where, layer=layer)
            dtype = kept.dtype if name == "hidden" else kept.scalars
            rows[name] = as_written(ragged.values, dtype)
        return assemble(rows, ragged.starts, spec.spans[where], setting, widths)

    split = {name: features(where) for name, where in data.where.items()}
    standardizer = fit_reading(split["train"], dims)
    return {
        name: split_families(one, dims, standardizer) for name, one in split.items()
    }


def _trained_logits(
    data: _Data, config: RunConfig, name: str, kept: StoreConfig
) -> np.ndarray:
    """Train one encoder, every seed; return logits of all splits `[n_seeds, n]`."""
    tokens = _tokens(data, kept)
    encoder = Encoder(config.encoder, family_dims(data.store))
    train, valid = (
        labelled(tokens[split], data.rows.labels[data.where[split]])
        for split in SPLITS[:2]
    )
    subset = subset_index(name)
    blocks = [Block((subset,), (seed,)) for seed in range(config.train.n_seeds)]
    parts = fit_blocks(blocks, train, valid, encoder=encoder, config=config.train)
    say = partial(member_outputs, encoder=encoder)
    return np.concatenate(
        [
            np.concatenate([say(part, tokens[split]).logits for split in SPLITS], 1)
            for part in parts
        ]
    )


def _row(
    data: _Data,
    config: RunConfig,
    name: str,
    kept: StoreConfig,
    logits: np.ndarray,
    reference: np.ndarray,
) -> PrecisionCost:
    """Compare one choice with the reference."""
    stops = np.cumsum([len(data.where[split]) for split in SPLITS])
    parts = dict(zip(SPLITS, np.split(np.arange(stops[-1]), stops[:-1]), strict=True))
    seeds = {
        split: aurocs(logits[:, parts[split]], data.rows.labels[data.where[split]])
        for split in SPLITS
    }
    test, where = parts["test"], data.where["test"]
    pairing = Pairing(data.rows.ids[where], data.rows.labels[where], config)
    difference = pairing.compare(reference[:, test], logits[:, test])
    return PrecisionCost(
        setting=data.rows.setting,
        encoder=name,
        dtype=kept.dtype,
        hidden_spans=kept.hidden_spans,
        scalars=kept.scalars,
        bytes_per_answer=_bytes_per_answer(data.store, kept),
        auroc={split: float(np.mean(values)) for split, values in seeds.items()},
        seed_std=float(np.std(seeds["test"])),
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        n=len(test),
    )


def _bytes_per_answer(store: FeatureStore, kept: StoreConfig) -> float:
    """Return what a choice would store of a sequence, in the mean."""
    spec = store.spec
    n_answer = (spec.spans[:, 2, 1] - spec.spans[:, 2, 0]).mean()
    n_rows = {"all": spec.lengths.mean(), "answer": n_answer}
    shapes = {name: spec.families[name].shape for name in FAMILIES}
    families = stored_families(shapes, kept).values()
    return float(sum(family.row_bytes * n_rows[family.spans] for family in families))

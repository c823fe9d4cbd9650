"""`beatrice bench store`: training from a store beside training on resident data.

Memory, rate and AUROC. The store is made up, written range by range, with the share of
right answers falling along it, as when data sets follow one another: reading it in
order would be a bad shuffle. Every figure comes from a process of its own.
"""

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Literal

import click
import jax
import numpy as np

from benchmarks.speed.commands import AS_JSON, MIB, measure_fresh
from benchmarks.speed.scaling import microworld
from extract.run.console import Progress, quiet, table_head, table_row
from extract.run.memory import (
    begin_peak,
    held_bytes,
    peak_bytes,
    return_freed_memory,
)
from extract.store.read import FeatureStore, open_store
from extract.store.spec import Family, StoreSpec
from extract.store.write import create_store, write_range
from jaxprobe.config import StreamConfig, TrainConfig
from jaxprobe.features.families import standardizer_of
from jaxprobe.features.reading import (
    read_families,
    read_features,
    read_tokens,
    stored_dtypes,
)
from jaxprobe.features.subsets import FAMILIES, subset_index
from jaxprobe.fit.blocks import Block, Member
from jaxprobe.fit.grid import Trained, fit_blocks, labelled
from jaxprobe.fit.streaming import Streamed, epoch_groups, fit_streamed, prefetched
from jaxprobe.fit.work import Workload
from jaxprobe.model.encoder import Encoder
from jaxprobe.settings import XLA_FLAGS

Mode = Literal["streamed", "resident", "reading"]
SUBSETS_TRAINED = ("H", "P", "HP", "RA", "HPRA")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedWork:
    """Sizes of the benchmark.

    Attributes:
      work: encoders and widths; `n_steps` is not read.
      stream: how the store is split into groups.
      n_train: examples trained on.
      n_valid: examples validated on.
      n_epochs: of each training.
      signal: how far a right answer moves its channels, in deviations.
    """

    work: Workload
    stream: StreamConfig
    n_train: int
    n_valid: int
    n_epochs: int = 3
    signal: float = 0.25

    @property
    def members(self) -> list[Member]:
        """Five encoders; a run trains nine times as many on what is read once."""
        return [Member(subset_index(name), 0) for name in SUBSETS_TRAINED]

    @property
    def protocol(self) -> TrainConfig:
        """Every epoch is run."""
        return TrainConfig(
            learning_rate=self.work.learning_rate,
            batch_size=self.work.batch_size,
            max_epochs=self.n_epochs,
            patience=self.n_epochs,
        )


def labels_of(n_examples: int) -> np.ndarray:
    """Return `[n_examples]` bool, right less and less often along the store."""
    rng = np.random.default_rng(1)
    return rng.random(n_examples) < np.linspace(0.8, 0.2, n_examples)


def make_store(where: Path, config: StreamedWork, n_examples: int) -> FeatureStore:
    """Write a closed-book store; labels move the first channels of every family."""
    rng = np.random.default_rng(0)
    work, none = config.work, np.zeros(n_examples, np.int64)
    (q_low, q_high), (a_low, a_high) = work.spans
    question = rng.integers(q_low, q_high + 1, n_examples)
    lengths = question + rng.integers(a_low, a_high + 1, n_examples)
    bounds = [(none, none), (none, question), (question, lengths)]
    families = {
        name: Family(shape=(size,))
        for name, size in zip(FAMILIES, work.dims.sizes, strict=True)
    }
    families["hidden"] = Family(
        shape=(1, work.dims.hidden), dtype="bfloat16", by_layer=True
    )
    spec = StoreSpec(
        families=families,
        keys=tuple((f"q{i}", "closed_book", "original") for i in range(n_examples)),
        lengths=lengths,
        spans=np.stack([np.stack(pair, axis=-1) for pair in bounds], axis=1),
        rows_per_shard=4096,
        hidden_layers=(0,),
        fingerprint={"model": "made up"},
    )
    store, labels = create_store(where, spec), labels_of(n_examples)
    for range_id in range(spec.n_ranges):
        first, last = spec.range_examples[range_id : range_id + 2].tolist()
        right = np.repeat(labels[first:last], lengths[first:last]).astype(np.float32)
        signals = {}
        for name, family in families.items():
            x = rng.standard_normal((len(right), *family.shape), dtype=np.float32)
            x[..., :2] += config.signal * right.reshape(-1, *[1] * len(family.shape))
            signals[name] = x.astype(family.numpy_dtype)
        write_range(store, range_id, signals)
    return store


def _datasets(store: FeatureStore, config: StreamedWork) -> tuple[Streamed, Streamed]:
    """Training and validation rows: every so many examples one is validated on."""
    work, n = config.work, config.n_train + config.n_valid
    labels, place = labels_of(n), np.arange(n)
    is_valid = np.zeros(n, bool)
    is_valid[np.linspace(0, n - 1, config.n_valid).astype(np.int64)] = True
    widths = tuple(most for _, most in work.spans)

    def raw(where: np.ndarray):
        return read_features(store, "closed_book", 0, where, widths)

    train = place[~is_valid]
    groups = epoch_groups(train, config.stream, (0,))
    parts = prefetched(lambda group: raw(group.where[group.is_real]), groups)
    standardizer = standardizer_of(parts)

    def read(where: np.ndarray):
        fixed = {"standardizer": standardizer, "held_as": stored_dtypes(store)}
        tokens = read_tokens(store, "closed_book", 0, where, widths, **fixed)
        return jax.device_put(tokens)

    return tuple(
        Streamed(where=w, labels=labels[w], read=read, config=config.stream)
        for w in (train, place[is_valid])
    )


def _train(mode: Mode, store: FeatureStore, config: StreamedWork) -> dict[str, float]:
    """Train twice, of which the first one compiles; return rate and AUROC."""
    train, valid = _datasets(store, config)
    fixed = {
        "encoder": Encoder(config.work.encoder, config.work.dims),
        "config": config.protocol,
    }
    blocks = [Block((m.subset,), (m.seed,)) for m in config.members]
    if mode == "streamed":

        def run() -> list[Trained]:
            return [fit_streamed(blocks, train, valid, **fixed)]

    else:
        data = [[labelled(x.read(x.where), x.labels)] for x in (train, valid)]

        def run() -> list[Trained]:
            return list(fit_blocks(blocks, *data, **fixed))

    run()
    began = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - began
    n_batches = -(-config.n_train // config.work.batch_size)
    n_steps = n_batches * config.n_epochs * len(config.members)
    aurocs = [float(x) for one in found for x in one.info.best_auroc]
    return {"steps_per_second": n_steps / seconds, "auroc": float(np.mean(aurocs))}


def _files(store: FeatureStore) -> list[Path]:
    """Every file that holds signals."""
    root = Path(store.url.removeprefix("file://"))
    return sorted(p for f in FAMILIES for p in (root / f).rglob("*") if p.is_file())


def _forget(files: list[Path]) -> None:
    """Let the system drop what it caches of these files, where it can."""
    if hasattr(os, "posix_fadvise"):
        os.sync()
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_raw(files: list[Path]) -> None:
    block = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def _reading(store: FeatureStore, config: StreamedWork) -> dict[str, float]:
    """Read everything in order and shuffled, in MiB of files per second.

    The best of three times each.
    """
    files = _files(store)
    n_mib = sum(path.stat().st_size for path in files) / MIB
    groups = epoch_groups(np.arange(len(store.spec.keys)), config.stream, (0,))

    def families(group) -> None:
        read_families(store, 0, group.where[group.is_real])

    def chunks() -> None:
        for _ in prefetched(families, groups):
            pass

    found = {}
    for name, read in (("raw", lambda: _read_raw(files)), ("chunks", chunks)):
        seconds = []
        for _ in range(3):
            _forget(files)
            began = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - began)
        found[f"{name}_mib_per_second"] = n_mib / min(seconds)
    return found


def measure(mode: Mode, where: Path, config: StreamedWork) -> dict[str, float]:
    """Measure one mode on one store, and memory; for a fresh process."""
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS["demo"])  # as a run does
    store = open_store(where)
    begin_peak()
    held = held_bytes()
    if mode == "streamed":
        return_freed_memory()  # as a run does
    if mode == "reading":
        found = _reading(store, config)
    else:
        found = _train(mode, store, config)
    return {**found, "peak_mib": peak_bytes() / MIB, "libraries_mib": held / MIB}


@click.command()
@click.option(
    "--examples",
    default=16384,
    type=click.IntRange(min=1024),
    help="Trained on.",
)
@AS_JSON
def store(examples: int, as_json: bool) -> None:
    """Train from a store of one and of two sizes, and with everything in memory.

    Five encoders at microworld widths, on a store that is made up in a temporary
    folder (TMPDIR); reads start from the disk, not from the system's cache.

    Example: beatrice bench store --examples 65536
    """
    quiet()
    note = Progress().note
    once = StreamedWork(
        work=microworld(1),
        # Short sequences: a chunk of fewer rows reads much that it does not want.
        stream=StreamConfig(n_chunk=128),
        n_train=examples,
        n_valid=examples // 8,
    )
    twice = dataclasses.replace(once, n_train=2 * examples, n_valid=2 * once.n_valid)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for size, config in (("once", once), ("twice", twice)):
            where = Path(name) / size
            note(f"writes {config.n_train + config.n_valid} examples")
            make_store(where, config, config.n_train + config.n_valid)
            for mode in ("streamed", "resident"):
                note(f"{mode}, data {size}")
                found[mode, size] = measure_fresh(mode, measure, mode, where, config)
        note("reading")
        found["reading", "twice"] = measure_fresh(
            "reading", measure, "reading", where, twice
        )
    if as_json:
        click.echo(json.dumps({" ".join(key): row for key, row in found.items()}))
    else:
        _print(found)


def _print(found: dict[tuple[str, str], dict[str, float]]) -> None:
    click.echo(table_head(["", "streamed", "resident", "streamed / resident"]))
    for size, label in (("once", "1x"), ("twice", "2x")):
        for name, field, digits in (
            ("encoder-steps/s", "steps_per_second", 1),
            ("peak memory of the process, MiB", "peak_mib", 0),
            ("validation AUROC", "auroc", 4),
        ):
            both = [found[mode, size][field] for mode in ("streamed", "resident")]
            cells = [f"{value:.{digits}f}" for value in both]
            ratio = f"{both[0] / both[1]:.3f}"
            click.echo(table_row([f"{name}, {label} the data", *cells, ratio]))
    peaks = {key: row["peak_mib"] for key, row in found.items()}
    grown = [
        f"{peaks[mode, 'twice'] / peaks[mode, 'once'] - 1:+.1%}"
        for mode in ("streamed", "resident")
    ]
    click.echo(table_row(["growth of memory, 1x to 2x", *grown, ""]))
    rates = found["reading", "twice"]
    raw, chunks = (rates[f"{name}_mib_per_second"] for name in ("raw", "chunks"))
    click.echo(
        f"\nReading alone: files in order {raw:.0f} MiB/s, families of shuffled chunks "
        f"{chunks:.0f} MiB/s ({chunks / raw:.0%})."
    )

"""Training from a store beside training on resident data: memory, rate, AUROC.

The store is made up, written range by range, with the share of right answers falling
along it, as when data sets follow one another: reading it in order would be a bad
shuffle. Every figure comes from a process of its own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.forecasts.train_work import Workload
from benchmarks.speed.memory import MIB, held_bytes, peak_bytes, reset_peak
from extract.store.read import FeatureStore, open_store, read_family
from extract.store.spec import Family, StoreSpec
from extract.store.write import create_store, write_range
from jaxprobe.config import StreamConfig, TrainConfig
from jaxprobe.features.families import split_families, standardizer_of
from jaxprobe.features.reading import read_features
from jaxprobe.features.subsets import FAMILIES, subset_index
from jaxprobe.fit.grid import Block, Member, Trained, fit_blocks, labelled
from jaxprobe.fit.streaming import Streamed, epoch_groups, fit_streamed, prefetched
from jaxprobe.model.encoder import Encoder

Mode = Literal["streamed", "resident", "reading"]
SUBSETS_TRAINED = ("H", "P", "HP", "RA", "HPRA")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreCost:
    """Sizes of the benchmark.

    Attributes:
      work: encoders and widths; `n_steps` is not read.
      stream: how the store is parted.
      n_train: examples trained on.
      n_valid: examples validated on.
      n_epochs: of each training.
      signal: how far a right answer moves its channels, in deviations.
    """

    work: Workload
    stream: StreamConfig
    n_train: int
    n_valid: int
    n_epochs: int
    signal: float = 0.25

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "StoreCost":
        """Return what `dataclasses.asdict` has taken apart."""
        parts = {
            "work": Workload.from_json(found["work"]),
            "stream": StreamConfig(**found["stream"]),
        }
        return cls(**{**found, **parts})

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


def make_store(where: Path, config: StoreCost, n_examples: int) -> FeatureStore:
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


def _sides(store: FeatureStore, config: StoreCost) -> tuple[Streamed, Streamed]:
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
        return split_families(raw(where), work.dims, standardizer)

    both = [
        Streamed(where=w, labels=labels[w], read=read, config=config.stream)
        for w in (train, place[is_valid])
    ]
    return both[0], both[1]


def _timed(train: Callable[[], list[Trained]], n_steps: int) -> dict[str, float]:
    """Train twice; the first one compiles."""
    train()
    began = time.perf_counter()
    found = train()
    seconds = time.perf_counter() - began
    aurocs = [float(x) for one in found for x in one.info.best_auroc]
    return {"steps_per_second": n_steps / seconds, "auroc": float(np.mean(aurocs))}


def _train(mode: Mode, store: FeatureStore, config: StoreCost) -> dict[str, float]:
    train, valid = _sides(store, config)
    fixed = {
        "encoder": Encoder(config.work.encoder, config.work.dims),
        "config": config.protocol,
    }
    if mode == "streamed":

        def run() -> list[Trained]:
            return [fit_streamed(config.members, train, valid, **fixed)]

    else:
        data = [labelled(x.read(x.where), x.labels) for x in (train, valid)]
        blocks = [Block((m.subset,), (m.seed,)) for m in config.members]

        def run() -> list[Trained]:
            return list(fit_blocks(blocks, *data, **fixed))

    n_batches = -(-config.n_train // config.work.batch_size)
    return _timed(run, n_batches * config.n_epochs * len(config.members))


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


def _reading(store: FeatureStore, config: StoreCost) -> dict[str, float]:
    """Read everything three ways, in MiB of files per second; the best of three."""
    files = _files(store)
    n_mib = sum(path.stat().st_size for path in files) / MIB
    widths = tuple(most for _, most in config.work.spans)
    groups = epoch_groups(np.arange(len(store.spec.keys)), config.stream, (0,))

    def families(group) -> None:
        for name in FAMILIES:
            read_family(store, name, group.where[group.is_real])

    def padded(group) -> None:
        read_features(store, "closed_book", 0, group.where[group.is_real], widths)

    def chunks() -> None:
        for _ in prefetched(families, groups):
            pass

    def spans() -> None:
        for _ in prefetched(padded, groups):
            pass

    found = {}
    for name, read in (
        ("raw", lambda: _read_raw(files)),
        ("chunks", chunks),
        ("padded", spans),
    ):
        seconds = []
        for _ in range(3):
            _forget(files)
            began = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - began)
        found[f"{name}_mib_per_second"] = n_mib / min(seconds)
    return found


def measure_in_process(mode: Mode, where: Path, config: StoreCost) -> dict[str, float]:
    """Measure one mode on one store in a process of its own.

    Raises:
      ValueError: the process has failed; the message is its last line.
    """
    job = json.dumps([mode, str(where), dataclasses.asdict(config)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.store_cost", job],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the process that measures {mode!r} has failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _main(job: str) -> None:
    """Measure one mode; what `measure_in_process` runs."""
    mode, where, given = json.loads(job)
    store, config = open_store(where), StoreCost.from_json(given)
    reset_peak()
    held = held_bytes()
    if mode == "reading":
        found = _reading(store, config)
    else:
        found = _train(mode, store, config)
    memory = {"peak_mib": peak_bytes() / MIB, "libraries_mib": held / MIB}
    sys.stdout.write(json.dumps({**found, **memory}) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])

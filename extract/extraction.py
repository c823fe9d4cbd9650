"""The extraction stage: from answers to a feature store.

The plan fixes ranges and batches from the answers alone. Rank, world size and what
was done before only choose which ranges are done here, so the bytes of a store
depend on neither.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from extract.records import Answer
from extract.store import FeatureStore, done_ranges
from extract.storespec import Family, StoreSpec
from extract.storewrite import StoreWriter, create_store

# Names of rank and world size, per launcher, most specific first. In a SLURM batch
# script outside srun, SLURM_PROCID is 0 and SLURM_NTASKS may be many although one
# process runs: only the step's own count says how many were started.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
_SHARD_BYTES = 128 << 20
_FEWEST_ROWS = 256
_WANTED_RANGES = 64


class TokenSequence(Protocol):
    """What is read of one answer, see `extract.signals.Sequence`."""

    @property
    def ids(self) -> np.ndarray:
        """Return `[n_tokens]` int64."""

    @property
    def targets(self) -> np.ndarray:
        """Return `[n_tokens]` int64."""

    @property
    def spans(self) -> np.ndarray:
        """Return `[3, 2]` int64."""


class Reader(Protocol):
    """What reads signals, see `extract.signals.SignalReader`."""

    hidden_layers: tuple[int, ...]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""

    def read(self, sequences: list[Any]) -> list[Any]:
        """Return one object per sequence, with `[n_tokens, …]` for each family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """How answers are read.

    Attributes:
      hidden_layers: entries of the resid axis to keep (0 is the embedding); None
        keeps what the reader was built with.
      dtype: how `hidden` is stored; the other families are float32. bfloat16 keeps
        the range of the residual stream, float16 overflows at 65504.
      answer_span: see `extract.signals.sequence_of`.
      tokens_per_batch: most tokens of a batch, padding included; a longer sequence
        is a batch of its own.
      rows_per_shard: tokens per file, a power of two; None chooses by `n_rows_of`.
    """

    hidden_layers: tuple[int, ...] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    answer_span: Literal["emitting", "literal"] = "emitting"
    tokens_per_batch: int = 16384
    rows_per_shard: int | None = None

    def __post_init__(self) -> None:
        """Check the fields that nobody else checks."""
        if self.tokens_per_batch < 1:
            raise ValueError(
                f"tokens_per_batch must be at least 1, found {self.tokens_per_batch}"
            )
        if self.answer_span not in ("emitting", "literal"):
            raise ValueError(
                f"answer_span is emitting or literal, not {self.answer_span!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExtractionPlan:
    """What is read together and where it goes.

    Attributes:
      spec: the store.
      batches: per range, batches of example indices; each example once.
    """

    spec: StoreSpec
    batches: tuple[tuple[tuple[int, ...], ...], ...]

    def ranges_of(self, rank: int, world_size: int) -> list[int]:
        """Return the ranges one worker does, in order."""
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} is not below the world size {world_size}; ranks count "
                "from 0"
            )
        return list(range(rank, self.spec.n_ranges, world_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractionReport:
    """What one call of `extract` did.

    Attributes:
      n_written: ranges written by this worker now.
      n_skipped: ranges of this worker that were there before.
      n_missing: ranges of any worker that are not there yet.
      n_tokens: tokens read by this worker now.
      seconds: wall time.
    """

    n_written: int
    n_skipped: int
    n_missing: int
    n_tokens: int
    seconds: float


def rank_and_world_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Read this worker's rank and the number of workers from the launcher.

    Knows torchrun, srun, SLURM arrays, Open MPI, and Kubernetes indexed jobs (where
    the manifest must set JOB_COMPLETIONS). Without a launcher: (0, 1).

    Raises:
      ValueError: half of a pair is set, or the numbers do not fit.
    """
    for rank_name, world_name in _LAUNCHERS:
        # A batch script without srun has a SLURM_PROCID but no step, see above.
        if rank_name not in environ or (
            rank_name == "SLURM_PROCID" and world_name not in environ
        ):
            continue
        if world_name not in environ:
            raise ValueError(
                f"{rank_name}={environ[rank_name]} is set without {world_name}; set "
                f"{world_name} to the number of workers"
            )
        rank, world_size = int(environ[rank_name]), int(environ[world_name])
        rank -= int(environ.get("SLURM_ARRAY_TASK_MIN", "0")) * (
            rank_name == "SLURM_ARRAY_TASK_ID"
        )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"{rank_name} gives rank {rank}, {world_name} gives {world_size} "
                "workers; ranks must be 0 to workers - 1 without gaps"
            )
        return rank, world_size
    return 0, 1


def n_rows_of(lengths: np.ndarray, families: Mapping[str, Family]) -> int:
    """Choose the rows of a shard: a power of two, from the answers alone.

    As many as fit in 128 MiB of the widest family, but few enough for 64 ranges, so
    that workers share the load and an interruption costs little; at least 256.
    """
    widest = max(family.row_bytes for family in families.values())
    most = max(1, min(_SHARD_BYTES // widest, int(lengths.sum()) // _WANTED_RANGES))
    return max(_FEWEST_ROWS, 1 << (most.bit_length() - 1))


def _batches(
    lengths: np.ndarray, examples: range, tokens_per_batch: int
) -> tuple[tuple[int, ...], ...]:
    """Group one range's examples by length, padding included in the budget."""
    order = sorted(examples, key=lambda example: (-lengths[example], example))
    batches: list[list[int]] = []
    for example in order:
        # The first of a batch is its longest, so it sets the padded width.
        is_full = not batches or (
            (len(batches[-1]) + 1) * lengths[batches[-1][0]] > tokens_per_batch
        )
        if is_full:
            batches.append([])
        batches[-1].append(example)
    return tuple(map(tuple, batches))


def _hash_sequences(sequences: Sequence[TokenSequence]) -> str:
    """Hash what the model reads, so that a store never mixes two sets of answers."""
    digest = hashlib.sha256()
    for item in sequences:
        for part in (item.ids, item.targets, item.spans):
            digest.update(np.ascontiguousarray(part, dtype="<i8").data)
    return digest.hexdigest()


def _store_spec(
    sequences: Sequence[TokenSequence],
    keys: Sequence[tuple[str, ...]],
    reader: Reader,
    config: ExtractConfig,
    fingerprint: Mapping[str, Any],
) -> StoreSpec:
    """Fix the store; see `plan_extraction`."""
    lengths = np.array([len(item.ids) for item in sequences], dtype=np.int64)
    families = {
        name: Family(
            shape=tuple(shape),
            dtype=config.dtype if name == "hidden" else "float32",
            by_layer=name == "hidden",
        )
        for name, shape in reader.shapes.items()
    }
    return StoreSpec(
        families=families,
        keys=tuple(keys),
        lengths=lengths,
        spans=np.stack([item.spans for item in sequences]).astype(np.int64),
        rows_per_shard=config.rows_per_shard or n_rows_of(lengths, families),
        hidden_layers=tuple(reader.hidden_layers),
        fingerprint={
            **fingerprint,
            "answer_span": config.answer_span,
            "tokens_per_batch": config.tokens_per_batch,
            "sequences_sha256": _hash_sequences(sequences),
        },
    )


def plan_extraction(
    sequences: Sequence[TokenSequence],
    keys: Sequence[tuple[str, ...]],
    reader: Reader,
    config: ExtractConfig,
    fingerprint: Mapping[str, Any],
) -> ExtractionPlan:
    """Fix the store, its ranges and the batches.

    Args:
      sequences: one per answer.
      keys: one per answer, unique.
      reader: says what it reads; nothing is read here.
      config: how the answers are read.
      fingerprint: what the values depend on beside the answers and `config`.
    """
    wanted = config.hidden_layers
    if wanted is not None and tuple(wanted) != tuple(reader.hidden_layers):
        raise ValueError(
            f"the reader keeps layers {list(reader.hidden_layers)}, the config wants "
            f"{list(wanted)}; build the reader with the config's hidden_layers"
        )
    spec = _store_spec(sequences, keys, reader, config, fingerprint)
    edges = spec.range_examples.tolist()
    return ExtractionPlan(
        spec=spec,
        batches=tuple(
            _batches(spec.lengths, range(first, last), config.tokens_per_batch)
            for first, last in zip(edges[:-1], edges[1:], strict=True)
        ),
    )


def _is_finite(values: np.ndarray) -> bool:
    """Tell whether nothing is NaN or infinite (`np.isfinite` is slow on bfloat16)."""
    if values.dtype.itemsize == 2:
        exponent = 0x7C00 if values.dtype == np.float16 else 0x7F80
        return bool(((values.view(np.uint16) & exponent) != exponent).all())
    return bool(np.isfinite(values).all())


def _read_range(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    range_id: int,
) -> dict[str, np.ndarray]:
    """Read one range; returns `[n_rows, …]` per family in the stored type."""
    spec = plan.spec
    start, stop = spec.range_rows(range_id)
    rows = {
        name: np.empty((stop - start, *family.shape), family.numpy_dtype)
        for name, family in spec.families.items()
    }
    for batch in plan.batches[range_id]:
        readings = reader.read([sequences[example] for example in batch])
        for example, reading in zip(batch, readings, strict=True):
            first, last = (spec.offsets[example : example + 2] - start).tolist()
            for name, values in rows.items():
                with np.errstate(over="ignore"):  # found below, with the answer's name
                    values[first:last] = getattr(reading, name)
                if not _is_finite(values[first:last]):
                    raise ValueError(
                        f"family {name!r} of answer {spec.keys[example]} has values "
                        f"that {values.dtype} cannot hold or that are not numbers; "
                        "read with a wider dtype, or leave this answer out"
                    )
    return rows


def _write_ranges(
    read: Callable[[int], dict[str, np.ndarray]],
    store: FeatureStore,
    ranges: Sequence[int],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write each range while the next one is read; at most two are in memory."""
    writer = StoreWriter(store)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        pending: concurrent.futures.Future[None] | None = None
        for count, range_id in enumerate(ranges):
            rows = read(range_id)
            if pending is not None:
                pending.result()
                if progress is not None:
                    progress(count, len(ranges))
            pending = pool.submit(writer.write_range, range_id, rows)
        if pending is not None:
            pending.result()
            if progress is not None:
                progress(len(ranges), len(ranges))


def run_plan(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    url: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Do, or continue, one worker's part of a plan; see `extract`."""
    began = time.perf_counter()
    mine = plan.ranges_of(rank, world_size)
    store = create_store(url, plan.spec)
    before = done_ranges(store)
    todo = [range_id for range_id in mine if range_id not in before]
    _write_ranges(
        lambda range_id: _read_range(reader, sequences, plan, range_id),
        store,
        todo,
        progress,
    )
    edges = [plan.spec.range_rows(range_id) for range_id in todo]
    return ExtractionReport(
        n_written=len(todo),
        n_skipped=len(mine) - len(todo),
        n_missing=plan.spec.n_ranges - len(done_ranges(store)),
        n_tokens=sum(stop - start for start, stop in edges),
        seconds=time.perf_counter() - began,
    )


def extract(
    reader: Reader,
    answers: Sequence[Answer],
    url: str | Path,
    config: ExtractConfig,
    *,
    fingerprint: Mapping[str, Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Read the answers' signals into the store at `url`, or continue doing so.

    Every worker creates the store, which is the same for all of them, so that none
    waits for another. Ranges that are committed are skipped.

    Args:
      reader: the backbone's signal reader.
      answers: in the order the store keeps them.
      url: kvstore URL or path of the store.
      config: how the answers are read.
      fingerprint: what the values depend on beside the answers and `config`: model,
        revision, precision; JSON values.
      rank: which worker this is; it does the ranges `rank::world_size`.
      world_size: number of workers, see `rank_and_world_size`.
      progress: called with (ranges done now, ranges to do now).

    Raises:
      ValueError: the store at `url` is another one, or cannot be written there.
    """
    # Here, not above: a plan and its ranges need no Torch.
    from extract.signals import sequence_of

    sequences = [sequence_of(a, answer_span=config.answer_span) for a in answers]
    keys = [answer.key for answer in answers]
    plan = plan_extraction(sequences, keys, reader, config, fingerprint or {})
    return run_plan(
        reader,
        sequences,
        plan,
        url,
        rank=rank,
        world_size=world_size,
        progress=progress,
    )

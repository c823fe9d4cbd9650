"""The extraction stage: from answers to a feature store, range by range."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.plan import (
    ExtractConfig,
    ExtractionPlan,
    Reader,
    TokenSequence,
    plan_extraction,
)
from extract.records import Answer
from extract.store import FeatureStore, done_ranges
from extract.storewrite import StoreWriter, create_store


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

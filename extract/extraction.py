"""The extraction stage: from answers to a feature store, range by range."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.family import scale_name
from extract.plan import (
    ExtractConfig,
    ExtractionPlan,
    Reader,
    TokenSequence,
    plan_extraction,
)
from extract.precision import Encoded, encode
from extract.records import Answer
from extract.store import FeatureStore, done_ranges
from extract.storespec import StoreSpec
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


@dataclasses.dataclass
class _Losses:
    """What the stored type cannot hold, counted over one family of one range."""

    n_invalid: int = 0
    n_overflowed: int = 0
    answers: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    def add(self, encoded: Encoded, key: tuple[str, ...]) -> None:
        """Count those of one answer."""
        self.n_invalid += encoded.n_invalid
        self.n_overflowed += encoded.n_overflowed
        if encoded.n_invalid or encoded.n_overflowed:
            self.answers.append(key)

    def refuse(self, name: str, dtype: str, where: str) -> None:
        """Raise if there are any."""
        if not self.answers:
            return
        raise ValueError(
            f"family {name!r} of answer {self.answers[0]} (and {len(self.answers) - 1} "
            f"more in {where}) has values that {dtype} cannot hold or that are not "
            f"numbers: {self.n_overflowed} overflow, {self.n_invalid} were NaN or "
            "infinite when read; nothing of this range is stored; use a wider "
            "dtype (bf16, fp32), or leave these answers out"
        )


class _RangeRows:
    """One family of one range, as it is stored, filled answer by answer."""

    def __init__(self, spec: StoreSpec, name: str, range_id: int) -> None:
        """Make room for the family, and for its scales if it is int8."""
        self._spec, self._name = spec, name
        self._start, stop = spec.range_rows(range_id, name)
        names = [name, scale_name(name)]
        self.arrays = {
            part: np.empty(
                (stop - self._start, *spec.families[part].shape),
                spec.families[part].numpy_dtype,
            )
            for part in names[: 1 + (spec.families[name].dtype == "int8")]
        }
        self.losses = _Losses()

    def put(self, example: int, reading: np.ndarray) -> None:
        """Keep of an answer's reading `[n_tokens, …]` what the family keeps."""
        offsets = self._spec.family_offsets(self._name)[example : example + 2]
        token = int(self._spec.first_tokens(self._name)[example])
        first, last = (offsets - self._start).tolist()
        encoded = encode(
            reading[token : token + last - first],
            self._spec.families[self._name].dtype,
        )
        self.arrays[self._name][first:last] = encoded.codes
        if encoded.scales is not None:
            self.arrays[scale_name(self._name)][first:last] = encoded.scales
        self.losses.add(encoded, self._spec.keys[example])


def _read_range(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    range_id: int,
) -> dict[str, np.ndarray]:
    """Read one range; returns `[n_rows, …]` per family in the stored type."""
    spec = plan.spec
    rows = {name: _RangeRows(spec, name, range_id) for name in reader.shapes}
    for batch in plan.batches[range_id]:
        readings = reader.read([sequences[example] for example in batch])
        for example, reading in zip(batch, readings, strict=True):
            for name, kept in rows.items():
                kept.put(example, getattr(reading, name))
    for name, kept in rows.items():
        kept.losses.refuse(name, spec.families[name].dtype, f"range {range_id}")
    return {part: a for kept in rows.values() for part, a in kept.arrays.items()}


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

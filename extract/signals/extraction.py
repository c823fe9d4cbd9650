"""The extraction stage: from answers to a feature store, unit by unit.

A unit is read in batches of similar lengths and written range by range, each with a
commit record of its own. A unit that was interrupted is read again, but only the
batches that its missing ranges need; the batches are the plan's, so that what comes
out does not depend on what was there.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.records import Answer
from extract.signals.plan import (
    ExtractConfig,
    ExtractionPlan,
    PendingReading,
    Reader,
    TokenSequence,
    Unit,
    plan_extraction,
    sequence_of,
)
from extract.store.families import Encoded, encode, scale_name
from extract.store.read import FeatureStore, done_ranges
from extract.store.spec import StoreSpec
from extract.store.write import create_store, write_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractionReport:
    """What one call of `extract` did.

    Attributes:
      n_written: ranges written by this worker now.
      n_skipped: ranges of this worker that were there before.
      n_missing: ranges of any worker that are not there yet.
      n_tokens: tokens of the ranges written now.
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
        """Keep of an answer's reading what the family keeps.

        Args:
          example: which answer.
          reading: `[n_tokens, …]`, or no more than the rows that are kept.
        """
        offsets = self._spec.family_offsets(self._name)[example : example + 2]
        first, last = (offsets - self._start).tolist()
        if len(reading) > last - first:
            token = int(self._spec.first_tokens(self._name)[example])
            reading = reading[token : token + last - first]
        # Written where they stay: what lies between is a pass over cold memory.
        room = self.arrays[self._name][first:last]
        encoded = encode(reading, self._spec.families[self._name].dtype, room)
        if encoded.scales is not None:
            self.arrays[scale_name(self._name)][first:last] = encoded.scales
        self.losses.add(encoded, self._spec.keys[example])


def read_batches(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    batches: Sequence[Sequence[int]],
) -> Iterator[tuple[int, Any]]:
    """Read batch after batch; yields each example and what was read of it.

    The next batch is begun before one is taken from the device: there the copies of
    one and the work of the other overlap, and meanwhile the caller keeps what it got.
    """
    before: tuple[Sequence[int], PendingReading] | None = None
    for batch in batches:
        begun = reader.start([sequences[example] for example in batch])
        if before is not None:
            yield from zip(before[0], before[1].result(), strict=True)
        before = (batch, begun)
    if before is not None:
        yield from zip(before[0], before[1].result(), strict=True)


def _read_unit(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    unit: Unit,
    missing: Sequence[int],
) -> dict[int, dict[str, np.ndarray]]:
    """Read the missing ranges of one unit.

    Returns:
      For each missing range `[n_rows, …]` per family, in the stored type.
    """
    spec = plan.spec
    rows = {
        range_id: {name: _RangeRows(spec, name, range_id) for name in reader.shapes}
        for range_id in missing
    }
    first, last = spec.range_examples[[unit.ranges.start, unit.ranges.stop]].tolist()
    lookup = np.searchsorted(spec.range_examples, np.arange(first, last), "right") - 1
    range_of = dict(zip(range(first, last), lookup.tolist(), strict=True))
    needed = [
        batch for batch in unit.batches if any(range_of[i] in rows for i in batch)
    ]
    for example, reading in read_batches(reader, sequences, needed):
        for name, kept in rows.get(range_of[example], {}).items():
            kept.put(example, getattr(reading, name))
    for range_id, families in rows.items():
        for name, kept in families.items():
            dtype = spec.families[name].dtype
            kept.losses.refuse(name, dtype, f"range {range_id}")
    return {
        range_id: {
            part: array
            for kept in families.values()
            for part, array in kept.arrays.items()
        }
        for range_id, families in rows.items()
    }


def _write_unit(store: FeatureStore, rows: dict[int, dict[str, np.ndarray]]) -> None:
    """Write ranges in order, letting go of each as soon as it is written."""
    for range_id in sorted(rows):
        write_range(store, range_id, rows.pop(range_id))


def _write_units(
    read: Callable[[Unit, Sequence[int]], dict[int, dict[str, np.ndarray]]],
    store: FeatureStore,
    todo: Sequence[tuple[Unit, Sequence[int]]],
    progress: Callable[[int, int], None],
) -> None:
    """Write each unit while the next one is read; at most two are in memory."""
    counts = np.cumsum([len(missing) for _, missing in todo]).tolist()
    pending: concurrent.futures.Future[None] | None = None
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        for number, (unit, missing) in enumerate(todo):
            rows = read(unit, missing)
            if pending is not None:
                pending.result()
                progress(counts[number - 1], counts[-1])
            pending = pool.submit(_write_unit, store, rows)
            del rows  # the writer's alone, which lets go of it range by range
        if pending is not None:
            pending.result()
            progress(counts[-1], counts[-1])


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
    """Do, or continue, one worker's part of a plan; see `extract`.

    Held in host memory at most: the rows of two units as they are stored, one being
    read and one being written (`tokens_per_unit`: at most 8 GiB each, or
    one range where that is larger, which is at least one example), and the readings
    of two batches.
    """
    began = time.perf_counter()
    mine = plan.units_of(rank, world_size)
    store = create_store(url, plan.spec)
    done = done_ranges(store)
    found = [(unit, [r for r in unit.ranges if r not in done]) for unit in mine]
    todo = [(unit, missing) for unit, missing in found if missing]
    _write_units(
        lambda unit, missing: _read_unit(reader, sequences, plan, unit, missing),
        store,
        todo,
        progress or (lambda done, total: None),
    )
    written = [range_id for _, missing in todo for range_id in missing]
    edges = [plan.spec.range_rows(range_id) for range_id in written]
    return ExtractionReport(
        n_written=len(written),
        n_skipped=sum(len(unit.ranges) for unit in mine) - len(written),
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
      rank: which worker this is; it does the units `rank::world_size`.
      world_size: number of workers, see `rank_and_world_size`.
      progress: called with (ranges done now, ranges to do now).

    Raises:
      ValueError: the store at `url` is another one, or cannot be written there.
    """
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

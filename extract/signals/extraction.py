"""From answers to a feature store, unit by unit.

A unit is read in batches of similar lengths and written range by range, each with a
commit record of its own. Of a unit that was interrupted only the batches that its
missing ranges need are read again; they are the plan's, so that what comes out does
not depend on what was there.
"""

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.extract.records import Answer
from beatrice.extract.run.share import Share
from beatrice.extract.signals.plan import (
    ExtractConfig,
    ExtractionPlan,
    Reader,
    TokenSequence,
    Unit,
    plan_extraction,
    sequence_of,
)
from beatrice.extract.store.families import encode, scale_name
from beatrice.extract.store.read import FeatureStore, done_ranges
from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.write import create_store, write_range


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


class _RangeRows:
    """One family of one range, as it is stored, filled answer by answer."""

    def __init__(self, spec: StoreSpec, name: str, range_id: int) -> None:
        """Make room for the family, and for its scales if it is int8."""
        self._spec, self._name, self._range_id = spec, name, range_id
        self._start, stop = spec.range_rows(range_id, name)
        names = [name, scale_name(name)]
        self.arrays = {
            part: np.empty(
                (stop - self._start, *spec.families[part].shape),
                spec.families[part].numpy_dtype,
            )
            for part in names[: 1 + (spec.families[name].dtype == "int8")]
        }
        self._n_invalid = self._n_overflowed = 0
        self._bad_keys: list[tuple[str, ...]] = []

    def put(self, example: int, reading: np.ndarray) -> None:
        """Keep of an answer's reading what the family keeps.

        Args:
          example: which answer.
          reading: of the last tokens `[n_rows, …]`, or of those that are kept alone.
        """
        offsets = self._spec.family_offsets(self._name)[example : example + 2]
        first, last = (offsets - self._start).tolist()
        if len(reading) > last - first:
            token = int(self._spec.first_tokens(self._name)[example])
            row = token - (int(self._spec.lengths[example]) - len(reading))
            reading = reading[row : row + last - first]
        # Written where they stay: what lies between is a pass over cold memory.
        out = self.arrays[self._name][first:last]
        encoded = encode(reading, self._spec.families[self._name].dtype, out)
        if encoded.scales is not None:
            self.arrays[scale_name(self._name)][first:last] = encoded.scales
        self._n_invalid += encoded.n_invalid
        self._n_overflowed += encoded.n_overflowed
        if encoded.n_invalid or encoded.n_overflowed:
            self._bad_keys.append(self._spec.keys[example])

    def check(self) -> None:
        """Raise if there are values that the stored type cannot hold."""
        if not self._bad_keys:
            return
        raise ValueError(
            f"family {self._name!r} of answer {self._bad_keys[0]} (and "
            f"{len(self._bad_keys) - 1} more in range {self._range_id}) has values "
            f"that {self._spec.families[self._name].dtype} cannot hold or that are not "
            f"numbers: {self._n_overflowed} overflow, {self._n_invalid} were NaN or "
            "infinite when read; nothing of this range is stored; use a wider "
            "dtype (bf16, fp32), or leave these answers out"
        )


def read_batches(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    batches: Sequence[Sequence[int]],
) -> Iterator[tuple[int, Any]]:
    """Read batch after batch; yields each example and what was read of it.

    The next batch is begun before one is taken from the device, where the copies of
    one and the work of the other overlap; meanwhile the caller stores what it got.
    """
    before: tuple[Sequence[int], Any] | None = None
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
    tick: Callable[[], None],
) -> dict[int, dict[str, np.ndarray]]:
    """Read the missing ranges of one unit; `tick` is called for each of their answers.

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
    needed = [b for b in unit.batches if any(range_of[i] in rows for i in b)]
    for example, reading in read_batches(reader, sequences, needed):
        if range_of[example] not in rows:
            continue
        for name, kept in rows[range_of[example]].items():
            kept.put(example, getattr(reading, name))
        tick()
    found: dict[int, dict[str, np.ndarray]] = {}
    for range_id, families in rows.items():
        found[range_id] = {}
        for kept in families.values():
            kept.check()
            found[range_id] |= kept.arrays
    return found


def _write_unit(store: FeatureStore, rows: dict[int, dict[str, np.ndarray]]) -> None:
    """Write ranges in order, letting go of each as soon as it is written."""
    for range_id in sorted(rows):
        write_range(store, range_id, rows.pop(range_id))


def _write_units(
    read: Callable[[Unit, Sequence[int]], dict[int, dict[str, np.ndarray]]],
    store: FeatureStore,
    todo: Sequence[tuple[Unit, Sequence[int]]],
) -> None:
    """Write each unit while the next one is read; at most two are in memory."""
    pending: concurrent.futures.Future[None] | None = None
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        for unit, missing in todo:
            rows = read(unit, missing)
            if pending is not None:
                pending.result()
            pending = pool.submit(_write_unit, store, rows)
            del rows  # the writer's alone, which lets go of it range by range
        if pending is not None:
            pending.result()


def run_plan(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    url: str | Path,
    *,
    share: Share = Share(),
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Do, or continue, one share of a plan; see `extract`.

    In host memory are at most the rows of two units as they are stored, one being
    read and one being written (`tokens_per_unit`: at most 8 GiB each, or one range
    where that is larger), and the readings of two batches.
    """
    began = time.perf_counter()
    mine = share.mine(plan.units)
    store = create_store(url, plan.spec)
    done = done_ranges(store)
    every = [(unit, [r for r in unit.ranges if r not in done]) for unit in mine]
    todo = [(unit, missing) for unit, missing in every if missing]
    written = [range_id for _, missing in todo for range_id in missing]
    n_answers = int(np.diff(plan.spec.range_examples)[written].sum())
    n_read = itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(n_read), n_answers)

    def read(unit: Unit, missing: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
        return _read_unit(reader, sequences, plan, unit, missing, tick)

    _write_units(read, store, todo)
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
    about: Mapping[str, Any] | None = None,
    share: Share = Share(),
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Read the answers' signals into the store at `url`, or continue doing so.

    Every worker creates the same store, so that none waits for another. Ranges that
    are committed are skipped.

    Args:
      reader: a backbone's signal reader, or another engine's.
      answers: in the order the store keeps them.
      url: kvstore URL or path of the store.
      config: how the answers are read.
      about: what else the store says of them, such as how questions were put; JSON
        values, which become part of its fingerprint.
      share: of the units that this process does.
      progress: called with (answers read now, answers to read now).

    Raises:
      ValueError: the store at `url` is another one, or cannot be written there.
    """
    sequences = [sequence_of(a, answer_span=config.answer_span) for a in answers]
    keys = [answer.key for answer in answers]
    fingerprint = {**reader.fingerprint, **(about or {})}
    plan = plan_extraction(sequences, keys, reader, config, fingerprint)
    return run_plan(
        reader,
        sequences,
        plan,
        url,
        share=share,
        progress=progress,
    )

"""Readings of detectors beyond the four families, cached chunk by chunk.

A chunk is a few hundred answers, with one file per reading, so that an interrupted run
can resume, and another detector only adds the readings that are missing.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput, Relations
from beatrice.extract.run.console import Update
from beatrice.extract.run.files import sha256_json
from beatrice.extract.run.process import begin_peak, peak_bytes
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.rows import StoreRows

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone
    from beatrice.extract.readings.reader import Neighbours

FORMAT = "3"  # of cached readings: 3 stores their rows
# Reading -> what it depends on besides the answers.
_BESIDE = {"sample_states": "samples", "p_true": "samples", "lookback": "cue"}
_ANSWERS_PER_CHUNK = 256
_PAIRS_PER_CHUNK = 1024
_Arrays = dict[str, np.ndarray]
Wanted = Mapping[str, np.ndarray]  # reading -> `[n]` indices of rows


class CachedReadings(NamedTuple):
    """Readings of all rows and their cost, each by name."""

    values: dict[str, np.ndarray]  # `[n_rows, ...]` float32; NaN if undefined
    # Time over all runs, scaled up as if all rows had been read; readings of one pass
    # share its time equally.
    seconds: dict[str, float]
    # Peak memory of the process in any pass with this reading, including the backbone.
    peak_bytes: dict[str, int]


NOTHING_READ = CachedReadings({}, {}, {})


def reading_keys(
    setting: str, identities: Mapping[str, str], names: Iterable[str]
) -> dict[str, str]:
    """Return the cache key of each reading, which omits labels and the sweep's layer.

    Identities have a "cue" if other answers determine it, see `AnswerReader.cue_like`.
    """
    keys = {name: [FORMAT, name, setting, identities["answers"]] for name in names}
    for name, key in keys.items():
        if identity := identities.get(_BESIDE.get(name, "")):
            key.append(identity)
    return {name: " ".join(key) for name, key in keys.items()}


@dataclasses.dataclass
class MeteredRelations:
    """An NLI model that charges the time for a pair to every detector that uses it.

    Pairs are read and cached in chunks, so that an interrupted run can resume.
    """

    relations: Relations  # the model
    cache: Cache = dataclasses.field(default_factory=Cache)  # of chunks, by their pairs
    progress: Callable[[], Update] = lambda: lambda done, total: None  # one per call
    owed: float = 0.0  # seconds to charge in addition to those that passed
    # Pair -> its relations `[3]`, and the seconds that they took.
    known: dict[tuple[str, str], tuple[np.ndarray, float]] = dataclasses.field(
        default_factory=dict
    )

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs, `[n_pairs, 3]` float64."""
        # The longest first, so that running out of memory happens at once.
        ordered = sorted(set(pairs), key=lambda x: (-len(x[0]) - len(x[1]), x))
        update = self.progress()
        for start in range(0, len(ordered), _PAIRS_PER_CHUNK):
            chunk = ordered[start : start + _PAIRS_PER_CHUNK]
            self._read(chunk)
            update(start + len(chunk), len(ordered))
        return np.array([self.known[pair][0] for pair in pairs]).reshape(-1, 3)

    def _read(self, chunk: list[tuple[str, str]]) -> None:
        """Read the unknown pairs of a chunk, and charge for those already known."""
        seconds = {pair: self.known[pair][1] for pair in chunk if pair in self.known}
        self.owed += sum(seconds.values())
        if len(seconds) == len(chunk):
            return
        name = sha256_json(chunk)[:32]
        if (arrays := self.cache.load(name)) is None:
            began = time.monotonic()
            relations = self.relations(chunk)
            each = (time.monotonic() - began) / (len(chunk) - len(seconds))
            took = np.array([seconds.get(pair, each) for pair in chunk])
            arrays = {"relations": relations, "seconds": took}
            self.cache.save(name, arrays)
        else:
            self.owed += float(arrays["seconds"].sum()) - sum(seconds.values())
        rows = zip(arrays["relations"], arrays["seconds"].tolist(), strict=True)
        self.known |= zip(chunk, rows, strict=True)


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerReader:
    """Reads answers in another pass; loads the model when the first is read."""

    inputs: DetectorInput  # the answers
    open_backbone: "Callable[[], Backbone]"  # loads the model that gave them
    cue_like: DetectorInput | None = None  # answers that show the cue; None: `inputs`

    @cached_property
    def _backbone(self) -> "Backbone":
        return self.open_backbone()

    @cached_property
    def _n_cue(self) -> int:
        from beatrice.extract.readings.batch import cue_length

        return cue_length((self.cue_like or self.inputs).answers)

    @cached_property
    def _neighbours(self) -> "Neighbours":
        from beatrice.extract.readings.reader import neighbours_of

        return neighbours_of(self.inputs.questions)

    def read(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the named readings of some rows, `[n, ...]` float32."""
        from beatrice.extract.readings.reader import read, swapped_prompt, truth_prompt

        inputs, model = self.inputs, self._backbone
        pairs = [(inputs.examples[i], inputs.answers[i]) for i in rows]
        drawn = [inputs.samples[i] for i in rows]
        extra: dict[str, Any] = {}
        if "sample_states" in names:
            extra["drawn"] = [[sample.token_ids for sample in row] for row in drawn]
        if "p_true" in names:
            extra["truth_prompts"] = [
                truth_prompt(model, x.question, answer.text, [s.text for s in row])
                for (x, answer), row in zip(pairs, drawn, strict=True)
            ]
        if "lumina_mmd" in names:
            template, beside = inputs.known_template, self._neighbours
            extra["swapped"] = [
                swapped_prompt(model, template, *pair, beside) for pair in pairs
            ]
        answers = [answer for _, answer in pairs]
        readings = [*read(model, answers, names, n_cue=self._n_cue, **extra)]
        return {name: stacked([row[name] for row in readings]) for name in names}


def stacked(values: Sequence[np.ndarray]) -> np.ndarray:
    """Stack readings, padded with NaN at the end if they have fewer samples."""
    shape = np.max([value.shape for value in values], axis=0).astype(int)
    together = np.full((len(values), *shape), np.nan, np.float32)
    for i, value in enumerate(values):
        together[(i, *map(slice, value.shape))] = value
    return together


def rows_read(rows: StoreRows, detectors: Iterable[Baseline]) -> Wanted:
    """Return the rows to read for each reading that some detector uses.

    Rows are `[n]` indices. Training answers are read only for trained detectors.
    """
    everywhere = np.arange(len(rows.ids))
    elsewhere = np.flatnonzero(rows.splits != "train")
    detectors = list(detectors)
    learned = {name for x in detectors if x.is_trained for name in x.reads}
    names = sorted({name for x in detectors for name in x.reads})
    return {name: everywhere if name in learned else elsewhere for name in names}


def cached_readings(
    reader: AnswerReader,
    wanted: Wanted,
    n_rows: int,
    caches: Mapping[str, Cache],
    tick: Callable[[], None] = lambda: None,
) -> CachedReadings:
    """Return readings, cached or new; `tick` is called after each chunk."""
    values: dict[str, np.ndarray] = {}
    seconds, peaks = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0)
    n_there, n_read = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    for chunk in chunks_of(n_rows):
        cached, missing = load_chunk(wanted, caches, chunk)
        for name, arrays in _read_chunk(reader, missing).items():
            caches[name].save(_file(chunk), arrays)
            cached[name] = arrays
        for name, arrays in cached.items():
            values[name] = _lay_out(values.get(name), arrays, n_rows)
            is_finite = np.isfinite(arrays["values"])
            is_read = is_finite.any(axis=tuple(range(1, is_finite.ndim)))
            n_read[name] += int(is_read.sum())
            n_there[name] += len(is_finite)
            seconds[name] += arrays["seconds"].item()
            peaks[name] = max(peaks[name], arrays["peak_bytes"].item())
        tick()
    for name in wanted:
        # Rows without samples have nothing to read and take no time.
        seconds[name] *= n_rows / max(1, n_read[name] or n_there[name])
        values.setdefault(name, np.full(n_rows, np.nan, np.float32))
    return CachedReadings(values, seconds, peaks)


def load_chunk(
    wanted: Wanted, caches: Mapping[str, Cache], chunk: slice
) -> tuple[dict[str, _Arrays], dict[str, list[int]]]:
    """Return a chunk's cached readings, and the rows to read for the others."""
    cached, missing = {}, {}
    for name, rows in wanted.items():
        rows = rows[(rows >= chunk.start) & (rows < chunk.stop)]
        arrays = caches[name].load(_file(chunk))
        if arrays is not None and np.isin(rows, arrays["rows"]).all():
            cached[name] = arrays
        elif len(rows):
            missing[name] = rows.tolist()
    return cached, missing


def _file(chunk: slice) -> str:
    return f"{chunk.start:07d}"


def _read_chunk(
    reader: AnswerReader, missing: Mapping[str, Sequence[int]]
) -> dict[str, _Arrays]:
    """Read each row once, with all readings that are missing for it."""
    rows_of: dict[tuple[str, ...], list[int]] = {}
    for row in sorted({row for rows in missing.values() for row in rows}):
        names = tuple(name for name, rows in missing.items() if row in rows)
        rows_of.setdefault(names, []).append(row)
    values: dict[str, dict[int, np.ndarray]] = {name: {} for name in missing}
    seconds = dict.fromkeys(missing, 0.0)
    begin_peak()
    for names, rows in rows_of.items():
        began = time.monotonic()
        readings = reader.read(rows, names)
        for name in names:
            values[name] |= zip(rows, readings[name], strict=True)
            seconds[name] += (time.monotonic() - began) / len(names)
    return {
        name: {
            "values": stacked(list(by_row.values())),
            "rows": np.array(list(by_row)),
            "seconds": np.asarray(seconds[name]),
            "peak_bytes": np.asarray(peak_bytes()),
        }
        for name, by_row in values.items()
    }


def _lay_out(laid_out: np.ndarray | None, arrays: _Arrays, n_rows: int) -> np.ndarray:
    """Write a chunk into the values of all rows, NaN for rows that were not read.

    Values grow if a chunk has more samples than earlier ones. Collecting chunks before
    joining them would need twice the memory.
    """
    values = arrays["values"]
    if laid_out is None:
        laid_out = np.full((n_rows, *values.shape[1:]), np.nan, np.float32)
    gaps = np.subtract(values.shape[1:], laid_out.shape[1:]).clip(0)
    if gaps.any():
        widths = [(0, 0), *((0, gap) for gap in gaps)]
        laid_out = np.pad(laid_out, widths, constant_values=np.nan)
    laid_out[(arrays["rows"], *map(slice, values.shape[1:]))] = values
    return laid_out


def chunks_of(n_rows: int) -> list[slice]:
    """Split rows into chunks that are read and cached together."""
    starts = range(0, n_rows, _ANSWERS_PER_CHUNK)
    return [slice(start, min(start + _ANSWERS_PER_CHUNK, n_rows)) for start in starts]

"""What detectors read beyond the four families, in a cache chunk by chunk.

A chunk is some hundred answers; its readings are files, one a name, so that
an interrupted start continues, and another detector's reading is read alone.
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
from beatrice.jaxprobe.rows import Rows

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone
    from beatrice.extract.readings.reader import Neighbours

FORMAT = "3"  # of cached readings: 3 says of which rows
# What readings depend on beside the answers.
_BESIDE = {"sample_states": "samples", "p_true": "samples", "lookback": "cue"}
_ANSWERS_PER_CHUNK = 256
_PAIRS_PER_CHUNK = 1024
_Arrays = dict[str, np.ndarray]
Wanted = Mapping[str, np.ndarray]  # by name of a reading, `[n]` indices of rows


class CachedReadings(NamedTuple):
    """Readings of all rows, and what they cost."""

    # by name, `[n_rows, ...]` float32; NaN where a reading is undefined
    values: dict[str, np.ndarray]
    # by name, over all starts, as if all rows had been read; what is read in one pass
    # shares its time evenly
    seconds: dict[str, float]
    # by name, most memory of the process in a pass that read it, the backbone included
    peak_bytes: dict[str, int]


NOTHING_READ = CachedReadings({}, {}, {})


def reading_keys(
    setting: str, identities: Mapping[str, str], names: Iterable[str]
) -> dict[str, str]:
    """Return what each reading depends on: not on labels, nor the sweep's layer.

    Identities have a "cue" where other answers show it, see `AnswerReader.cue_like`.
    """
    keys = {name: [FORMAT, name, setting, identities["answers"]] for name in names}
    for name, key in keys.items():
        if identity := identities.get(_BESIDE.get(name, "")):
            key.append(identity)
    return {name: " ".join(key) for name, key in keys.items()}


@dataclasses.dataclass
class MeteredRelations:
    """An NLI model whose time for a pair is charged to every detector that reads it.

    Pairs are read a chunk at a time, so that an interrupted start continues.
    """

    relations: Relations  # the model
    cache: Cache = dataclasses.field(default_factory=Cache)  # of chunks, by their pairs
    # opens what is told how far a call is
    progress: Callable[[], Update] = lambda: lambda done, total: None
    owed: float = 0.0  # seconds beyond what the clock shows
    # of each pair its relations, `[3]`, and the seconds that they took
    known: dict[tuple[str, str], tuple[np.ndarray, float]] = dataclasses.field(
        default_factory=dict
    )

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs, `[n_pairs, 3]` float64."""
        # The longest first: what does not fit in memory shows at once.
        ordered = sorted(set(pairs), key=lambda x: (-len(x[0]) - len(x[1]), x))
        update = self.progress()
        for start in range(0, len(ordered), _PAIRS_PER_CHUNK):
            chunk = ordered[start : start + _PAIRS_PER_CHUNK]
            self._read(chunk)
            update(start + len(chunk), len(ordered))
        return np.array([self.known[pair][0] for pair in pairs]).reshape(-1, 3)

    def _read(self, chunk: list[tuple[str, str]]) -> None:
        """Read the pairs of a chunk that are not known, and charge for the others."""
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
    """Reads answers again; the model is loaded when the first one is read."""

    inputs: DetectorInput  # the answers
    open_backbone: "Callable[[], Backbone]"  # opens the model that gave them
    cue_like: DetectorInput | None = None  # whose prompts show the cue; None: these

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
        """Return readings of some rows by name, `[n, ...]` float32."""
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
    """Stack readings; those of fewer samples get rows of NaN behind."""
    shape = np.max([value.shape for value in values], axis=0).astype(int)
    together = np.full((len(values), *shape), np.nan, np.float32)
    for i, value in enumerate(values):
        together[(i, *map(slice, value.shape))] = value
    return together


def rows_read(rows: Rows, detectors: Iterable[Baseline]) -> Wanted:
    """Return by name the rows whose reading some detector wants, `[n]` indices.

    Training answers are read only for detectors that learn from them.
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
    """Return readings of rows, of now or of an earlier start; a tick for each chunk."""
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
        # Where nothing was drawn there is nothing to read, and it takes no time.
        seconds[name] *= n_rows / max(1, n_read[name] or n_there[name])
        values.setdefault(name, np.full(n_rows, np.nan, np.float32))
    return CachedReadings(values, seconds, peaks)


def load_chunk(
    wanted: Wanted, caches: Mapping[str, Cache], chunk: slice
) -> tuple[dict[str, _Arrays], dict[str, list[int]]]:
    """Return what is cached of a chunk by name, and the rows of what is not."""
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
    """Read rows, each once with all the readings that are wanted of it."""
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
    """Write a chunk among the values of all rows, NaN where a row was not read.

    They grow where a chunk has more samples than those before; all chunks apart and
    together would be in memory twice.
    """
    values = arrays["values"]
    before = values.shape[1:] if laid_out is None else laid_out.shape[1:]
    shape = tuple(map(max, before, values.shape[1:]))
    if laid_out is None or shape != before:
        grown = np.full((n_rows, *shape), np.nan, np.float32)
        if laid_out is not None:
            grown[(slice(None), *map(slice, before))] = laid_out
        laid_out = grown
    laid_out[(arrays["rows"], *map(slice, values.shape[1:]))] = values
    return laid_out


def chunks_of(n_rows: int) -> list[slice]:
    """Return the rows that are read and cached together."""
    starts = range(0, n_rows, _ANSWERS_PER_CHUNK)
    return [slice(start, min(start + _ANSWERS_PER_CHUNK, n_rows)) for start in starts]

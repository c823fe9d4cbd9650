"""What detectors read beyond the four families, in a cache part by part.

A part is some hundred answers; its readings are files of their own, one a name, so that
what is stopped continues and what another detector asks for later is read alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput
from beatrice.extract.run.memory import begin_peak, peak_bytes
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.rows import Rows

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone

FORMAT = "3"  # of cached readings: 3 says of which rows
_OF_SAMPLES = ("sample_states", "p_true")  # readings of drawn answers too
_ANSWERS_PER_PART = 256
_Arrays = dict[str, np.ndarray]
Wanted = Mapping[str, np.ndarray]  # by name of a reading, `[n]` places of rows


class CachedReadings(NamedTuple):
    """Readings of all rows, and what they cost.

    Attributes:
      values: by name, `[n_rows, ...]` float32; NaN where a reading is undefined.
      seconds: by name, over all starts, as if all rows had been read; what is read in
        one pass shares its time evenly.
      peak_bytes: by name, most memory of the process in a pass that read it, the
        backbone and what else it holds included.
    """

    values: dict[str, np.ndarray]
    seconds: dict[str, float]
    peak_bytes: dict[str, int]


NOTHING_READ = CachedReadings({}, {}, {})


def reading_keys(
    setting: str, identities: Mapping[str, str], names: Iterable[str]
) -> dict[str, str]:
    """Return the identity of all that each reading depends on, by name.

    Of the answers, the questions and, where the drawn answers are read too, of these.
    Labels and the layer of the sweep are no part of it.

    Args:
      setting: of the answers.
      identities: of answers and questions ("answers"), and of drawn answers
        ("samples").
      names: of readings.
    """
    answers, samples = identities["answers"], identities["samples"]
    drawn = {name: (samples,) if name in _OF_SAMPLES else () for name in names}
    return {
        name: " ".join((FORMAT, name, setting, answers, *drawn[name])) for name in drawn
    }


class Reading:
    """Reads answers; the model is loaded when the first one is read."""

    def __init__(
        self, inputs: DetectorInput, open_backbone: "Callable[[], Backbone]"
    ) -> None:
        """Say whose answers are read, and by which model."""
        self._evidence = inputs
        self._open_backbone = open_backbone

    @cached_property
    def _backbone(self) -> "Backbone":
        return self._open_backbone()

    @cached_property
    def _n_cue(self) -> int:
        from beatrice.extract.readings.batch import cue_length

        return cue_length(self._evidence.answers)

    def some(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the answers of some rows."""
        from beatrice.extract.readings.reader import read

        given = {
            argument: [one(i) for i in rows]
            for name, (argument, one) in self._given().items()
            if name in names
        }
        answers = [self._evidence.answers[i] for i in rows]
        found = list(read(self._backbone, answers, names, n_cue=self._n_cue, **given))
        stacked = {name: [one[name] for one in found] for name in names}
        return {name: _stack(values) for name, values in stacked.items()}

    def _given(self) -> Mapping[str, tuple[str, Callable[[int], Any]]]:
        """Return by name what else `read` is to be given, of each row."""
        return {
            "lumina_mmd": ("swapped", self._swapped),
            "p_true": ("truth_prompts", self._truth_prompt),
            "sample_states": (
                "drawn",
                lambda i: [sample.token_ids for sample in self._evidence.samples[i]],
            ),
        }

    def _swapped(self, i: int) -> tuple[int, ...] | None:
        from beatrice.extract.readings.prompts import swapped_prompt

        inputs = self._evidence
        if inputs.template is None:
            raise ValueError("how passages were shown is not known: give a template")
        return swapped_prompt(
            self._backbone,
            inputs.template,
            inputs.examples[i],
            inputs.answers[i],
            inputs.questions,
        )

    def _truth_prompt(self, i: int) -> tuple[int, ...] | None:
        from beatrice.extract.readings.prompts import truth_prompt

        inputs = self._evidence
        ideas = [sample.text for sample in inputs.samples[i]]
        question, answer = inputs.examples[i].question, inputs.answers[i].text
        return truth_prompt(self._backbone, question, answer, ideas)


def _stack(values: Sequence[np.ndarray]) -> np.ndarray:
    """Stack readings; those of fewer samples get rows of NaN behind."""
    shape = np.max([value.shape for value in values], axis=0).astype(int)
    found = np.full((len(values), *shape), np.nan, np.float32)
    for i, value in enumerate(values):
        found[(i, *map(slice, value.shape))] = value
    return found


def rows_read(rows: Rows, detectors: Iterable[Baseline]) -> Wanted:
    """Return by name the rows whose reading some detector asks for, `[n]` places.

    Training answers are read for those that learn from them alone.
    """
    everywhere = np.arange(len(rows.ids))
    elsewhere = np.flatnonzero(rows.splits != "train")
    learned = {n for one in detectors if one.is_trained for n in one.reads}
    names = sorted({name for one in detectors for name in one.reads})
    return {name: everywhere if name in learned else elsewhere for name in names}


def cached_readings(
    reading: Reading,
    wanted: Wanted,
    n_rows: int,
    caches: Mapping[str, Cache],
    tick: Callable[[], None] = lambda: None,
) -> CachedReadings:
    """Return readings of rows, read now or by an earlier, interrupted start.

    Args:
      reading: reads what is missing.
      wanted: of `extract.readings.reader.READINGS`, each with its rows.
      n_rows: of the setting.
      caches: of each name.
      tick: called once for each of `parts_of`, when it is there.

    Raises:
      ValueError: other weights gave the answers, or a prompt is longer than the window.
    """
    every: dict[str, dict[int, np.ndarray]] = {name: {} for name in wanted}
    seconds, peaks = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0)
    for part in parts_of(n_rows):
        held, missing = read_before(wanted, caches, part)
        for name, own in _read(reading, missing).items():
            caches[name].save(_file(part), own)
            held[name] = own
        for name, own in held.items():
            every[name] |= zip(own["rows"].tolist(), own["values"], strict=True)
            seconds[name] += own["seconds"].item()
            peaks[name] = max(peaks[name], own["peak_bytes"].item())
        tick()
    for name, own in every.items():
        seconds[name] *= n_rows / max(1, len(own))
    values = {name: _laid_out(own, n_rows) for name, own in every.items()}
    return CachedReadings(values, seconds, peaks)


def read_before(
    wanted: Wanted, caches: Mapping[str, Cache], part: slice
) -> tuple[dict[str, _Arrays], dict[str, list[int]]]:
    """Return what is cached of a part by name, and the rows of what is not."""
    held, missing = {}, {}
    for name, rows in wanted.items():
        own = rows[(rows >= part.start) & (rows < part.stop)]
        found = caches[name].load(_file(part))
        if found is not None and np.isin(own, found["rows"]).all():
            held[name] = found
        elif len(own):
            missing[name] = own.tolist()
    return held, missing


def _file(part: slice) -> str:
    return f"{part.start:07d}"


def _read(reading: Reading, missing: Mapping[str, Sequence[int]]) -> dict[str, _Arrays]:
    """Read rows, each once with all that is asked of it."""
    asked: dict[tuple[str, ...], list[int]] = {}
    for row in sorted({row for rows in missing.values() for row in rows}):
        names = tuple(name for name, rows in missing.items() if row in rows)
        asked.setdefault(names, []).append(row)
    values: dict[str, dict[int, np.ndarray]] = {name: {} for name in missing}
    seconds = dict.fromkeys(missing, 0.0)
    begin_peak()
    for names, rows in asked.items():
        began = time.monotonic()
        made = reading.some(rows, names)
        for name in names:
            values[name] |= zip(rows, made[name], strict=True)
            seconds[name] += (time.monotonic() - began) / len(names)
    return {
        name: {
            "values": _stack(list(own.values())),
            "rows": np.array(list(own)),
            "seconds": np.float64(seconds[name]),
            "peak_bytes": np.int64(peak_bytes()),
        }
        for name, own in values.items()
    }


def _laid_out(values: Mapping[int, np.ndarray], n_rows: int) -> np.ndarray:
    """Return the values of all rows, NaN where a row was not read."""
    n_axes = np.ndim(next(iter(values.values()), np.nan))
    nothing = np.full((0,) * n_axes, np.nan, np.float32)
    return _stack([values.get(row, nothing) for row in range(n_rows)])


def parts_of(n_rows: int) -> list[slice]:
    """Return the rows that are read and kept together."""
    starts = range(0, n_rows, _ANSWERS_PER_PART)
    return [slice(start, min(start + _ANSWERS_PER_PART, n_rows)) for start in starts]

"""What detectors read beyond the four families, kept in the run part by part.

A part is some hundred answers; its readings are files of their own, one a name, so that
what is stopped continues and what another detector asks for later is read alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.baselines.detector import Evidence
from benchmarks.real.costs import begin_peak, peak_bytes
from extract.generate.requests import answer_config
from extract.run.contents import answers_file, question_files, samples_file
from extract.run.files import sha256_tree
from jaxprobe.checkpoint import load_cache, save_cache

if TYPE_CHECKING:
    from extract.backbone.loading import Backbone

_ANSWERS_PER_PART = 256
FORMAT = "2"  # of what is kept: 2 holds the peak of memory too
_OF_SAMPLES = ("sample_states", "p_true")


class Kept(NamedTuple):
    """Readings of all rows, and what they cost.

    Attributes:
      values: by name, `[n_rows, ...]` float32; NaN where a reading is undefined.
      seconds: by name, of all rows and over all starts; what is read in one pass
        shares its time evenly.
      peak_bytes: by name, most memory of the process in a pass that read it, the
        backbone and what else it holds included.
    """

    values: dict[str, np.ndarray]
    seconds: dict[str, float]
    peak_bytes: dict[str, int]


class Reading:
    """Reads parts of a setting's answers; the model is loaded when one is missing."""

    def __init__(self, evidence: Evidence) -> None:
        """Say whose answers are read."""
        self._evidence = evidence

    @cached_property
    def _backbone(self) -> "Backbone":
        from extract.backbone.loading import open_backbone, require_answering_model
        from extract.backbone.names import backbone_of

        run = self._evidence.run
        backbone = open_backbone(backbone_of(run))
        require_answering_model(run.answers, backbone)
        return backbone

    @cached_property
    def _n_cue(self) -> int:
        from extract.readings.part import cue_length

        return cue_length(self._evidence.answers)

    def part(self, rows: slice, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read answers that follow each other."""
        return self.some(range(rows.start, rows.stop), names)

    def some(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the answers of some rows."""
        from extract.readings.reader import read

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
        from extract.readings.prompts import swapped_prompt

        evidence = self._evidence
        template = answer_config(evidence.run).prompt.prompt_template()
        return swapped_prompt(
            self._backbone,
            template,
            evidence.examples[i],
            evidence.answers[i],
            evidence.questions,
        )

    def _truth_prompt(self, i: int) -> tuple[int, ...] | None:
        from extract.readings.prompts import truth_prompt

        evidence = self._evidence
        ideas = [sample.text for sample in evidence.samples[i]]
        question, answer = evidence.examples[i].question, evidence.answers[i].text
        return truth_prompt(self._backbone, question, answer, ideas)


def _stack(values: Sequence[np.ndarray]) -> np.ndarray:
    """Stack readings; those of fewer samples get rows of NaN behind."""
    shape = np.max([value.shape for value in values], axis=0).astype(int)
    found = np.full((len(values), *shape), np.nan, np.float32)
    for i, value in enumerate(values):
        found[(i, *map(slice, value.shape))] = value
    return found


def kept_readings(
    evidence: Evidence, names: Sequence[str], tick: Callable[[], None] = lambda: None
) -> Kept:
    """Return readings of every row, read now or by an earlier, interrupted run.

    Args:
      evidence: whose answers are read, and where they are kept.
      names: of `extract.readings.reader.READINGS`.
      tick: called once for each of `parts_of`, when it is there.

    Raises:
      ValueError: other weights gave the answers, or a prompt is longer than the window.
    """
    reading = Reading(evidence)
    parts: list[dict[str, np.ndarray]] = []
    keys = identities(evidence, names)
    seconds, peaks = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for rows in parts_of(len(evidence.rows.ids)):
        paths = {name: _path(evidence, name, rows) for name in names}
        held = {name: load_cache(paths[name], keys[name]) for name in names}
        missing = [name for name in names if held[name] is None]
        if missing:
            begin_peak()
            began = time.monotonic()
            made = reading.part(rows, missing)
            share = np.float64((time.monotonic() - began) / len(missing))
            cost = {"seconds": share, "peak_bytes": np.int64(peak_bytes())}
            for name in missing:
                held[name] = {"values": made[name], **cost}
                save_cache(paths[name], held[name], keys[name])
        parts.append({name: own["values"] for name, own in held.items()})
        for name, own in held.items():
            seconds[name] += own["seconds"].item()
            peaks[name] = max(peaks[name], own["peak_bytes"].item())
        tick()
    every = {name: [x for part in parts for x in part[name]] for name in names}
    stacked = {name: _stack(values) for name, values in every.items()}
    return Kept(stacked, seconds, peaks)


def _path(evidence: Evidence, name: str, rows: slice) -> Path:
    folder = evidence.run.path / "readings" / evidence.rows.setting / name
    return folder / f"{rows.start:07d}.safetensors"


def unread(evidence: Evidence, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return by name the places of the rows that `kept_readings` would read now."""
    keys, places = identities(evidence, names), np.arange(len(evidence.rows.ids))
    parts = parts_of(len(places))
    found = {}
    for name in names:
        left = [
            places[rows]
            for rows in parts
            if load_cache(_path(evidence, name, rows), keys[name]) is None
        ]
        found[name] = np.concatenate(left) if left else places[:0]
    return found


def parts_of(n_rows: int) -> list[slice]:
    """Return the rows that are read and kept together."""
    starts = range(0, n_rows, _ANSWERS_PER_PART)
    return [slice(start, min(start + _ANSWERS_PER_PART, n_rows)) for start in starts]


def identities(evidence: Evidence, names: Iterable[str]) -> dict[str, str]:
    """Return the identity of all that each reading depends on, by name.

    Of the answers, the questions and, where the drawn answers are read too, of these.
    Labels and the layer of the sweep are no part of it.
    """
    run = evidence.run
    files = [answers_file(run), *question_files(run)]
    shas = [str(sha256_tree(file)) for file in files]
    drawn = str(sha256_tree(samples_file(run)))
    return {
        name: " ".join(
            (FORMAT, name, evidence.rows.setting, *shas, *_drawn(name, drawn))
        )
        for name in names
    }


def _drawn(name: str, sha: str) -> tuple[str, ...]:
    return (sha,) if name in _OF_SAMPLES else ()

"""What a rival detector is, what it may read of a run, and what it gives back.

A detector is a value: a name, what it needs, where it was published, and a function
from `Evidence` to scores of every row of a setting.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from extract.records import SETTINGS, Answer, Example, Sample, Setting, read_records
from extract.run.contents import (
    answers_file,
    draw_seconds_file,
    question_files,
    read_answers,
    read_examples,
    samples_file,
)
from extract.run.directory import RunDir
from extract.run.files import read_json, sha256_tree
from extract.run.results import ResultRow
from extract.store.read import FeatureStore
from jaxprobe.features.rows import Rows

# Beyond the pass that gave the answer and its four families:
#   samples        answers drawn to the same prompt (`beatrice sample`)
#   entailment     an NLI model, which tells what follows from what
#   second_prompt  a question about the answer is put to the backbone
#   swapped        the answer is read behind another question's passages
#   encoder        a text encoder, which is fine-tuned
Need = Literal["samples", "entailment", "second_prompt", "swapped", "encoder"]
FORMAT = "3"  # of what is kept: 3 says of which rows
_OF_SAMPLES = ("sample_states", "p_true")  # readings of drawn answers too


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What a detector may read of one setting of a run.

    Everything is in the order of `rows`.

    Attributes:
      run: holds it all.
      store: the four families.
      rows: what the rows are, with labels and splits.
      layer: that the sweep chose.
      readings: by name, `[n_rows, ...]` float32; NaN where a row was not read.
      relations: P(entailment), P(neutral), P(contradiction) of pairs of texts,
        `[n_pairs, 3]`, or None without an NLI model.
      encoder: directory of a text encoder, or None without one.
    """

    run: RunDir
    store: FeatureStore
    rows: Rows
    layer: int
    readings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    relations: Callable[[Sequence[tuple[str, str]]], np.ndarray] | None = None
    encoder: Path | None = None

    @cached_property
    def questions(self) -> list[Example]:
        """All questions of the run, in its order."""
        return read_examples(self.run)

    @cached_property
    def examples(self) -> list[Example]:
        """The question of every row."""
        known = {example.id: example for example in self.questions}
        return [known[i] for i in self.rows.ids]

    @cached_property
    def answers(self) -> list[Answer]:
        """The greedy answer of every row."""
        known = {a.key: a for a in read_answers(self.run, self.rows.setting)}
        return [known[key] for key in self._keys]

    @cached_property
    def samples(self) -> list[tuple[Sample, ...]]:
        """The drawn answers of every row; empty where none was drawn."""
        found: dict[tuple[str, str, str], list[Sample]] = {}
        path = samples_file(self.run)
        if path.exists():
            for sample in read_records(path, Sample):
                key = sample.example_id, sample.setting, sample.variant
                found.setdefault(key, []).append(sample)
        return [tuple(found.get(key, ())) for key in self._keys]

    @property
    def draw_seconds(self) -> float | None:
        """What a drawn answer of the setting took; None where that was not timed."""
        path = draw_seconds_file(self.run)
        if not path.exists():
            return None
        known = read_json(path, dict[str, float | None], "run `beatrice sample` again")
        return known.get(self.rows.setting)

    @property
    def _keys(self) -> list[tuple[str, str, str]]:
        pairs = zip(self.rows.ids, self.rows.variants, strict=True)
        return [(i, self.rows.setting, variant) for i, variant in pairs]


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


class Found(NamedTuple):
    """What a detector says.

    Attributes:
      scores: `[n_seeds, n_rows]` float64, higher = more likely correct; NaN where the
        detector is undefined, which is counted and never filled.
      chosen: rows of what validation chose for it (experiment "chosen").
    """

    scores: np.ndarray
    chosen: tuple[ResultRow, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detector:
    """A detector, published or plain.

    Attributes:
      name: as in the rows, such as "semantic_entropy".
      title: as in the tables.
      source: paper and section, and the official code that was followed.
      score: gives every row its score.
      needs: beyond the pass that gave the answer.
      reads: names of `extract.readings.reader.READINGS`, which `beatrice baselines`
        reads in a pass of its own.
      is_trained: whether it learns from labels of the training split.
      variant: what differs from the published one, in a sentence; empty where nothing.
      settings: where it is defined.
    """

    name: str
    title: str
    source: str
    score: Callable[[Evidence], Found]
    needs: frozenset[Need] = frozenset()
    reads: tuple[str, ...] = ()
    is_trained: bool = False
    variant: str = ""
    settings: tuple[Setting, ...] = SETTINGS

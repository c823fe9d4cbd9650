"""Tracing questions for the controllers, and choosing PGIR's policy.

Every question is traced once to the full budget and the trace is saved; threshold and
budget are chosen on the validation traces and used unchanged everywhere else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from extract.label.verdicts import exact_match
from extract.records import Example, Passage
from extract.run.console import Update
from extract.run.files import read_sealed, seal, write_json_atomic
from pgir.bridge import ProbedBackbone, ProbedReader
from pgir.controllers.policy import (
    ControllerConfig,
    Policy,
    QuestionSet,
    Trace,
    Traced,
    search_policy,
    trace_questions,
)
from pgir.retrieval.bm25 import Retriever

GROUP_SIZE = 200  # questions; fewer of them leave batches half empty


class SavedTraces(msgspec.Struct, frozen=True, kw_only=True):
    """A set's traces on disk; `key` is the identity of everything they depend on."""

    key: str
    traces: tuple[Trace, ...]
    vanilla: tuple[str, ...]


def question_sets(examples: Sequence[Example], limit: int | None) -> list[QuestionSet]:
    """Return the evaluated sets that have passages, in file order, validation first.

    Of a set without, the corpus that is searched has none either.

    Args:
      examples: of the run, of all splits.
      limit: most questions of each set; None for all.
    """
    sets: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split != "train":
            sets.setdefault((example.dataset, example.split), []).append(example)
    return [
        QuestionSet(dataset=dataset, split=split, examples=tuple(own[:limit]))
        for (dataset, split), own in sets.items()
        if any(example.passages for example in own)
    ]


def _groups(sets: Sequence[QuestionSet]) -> list[list[QuestionSet]]:
    """Put sets together until a group has questions enough to fill batches.

    Groups depend on the sets alone, so a run that continues makes the same ones.
    """
    groups: list[list[QuestionSet]] = [[]]
    for one in sets:
        if sum(len(other.examples) for other in groups[-1]) >= GROUP_SIZE:
            groups.append([])
        groups[-1].append(one)
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracer:
    """Traces sets of questions, and saves the traces.

    Attributes:
      folder: of the traces, one file per set.
      key: identity of everything they depend on.
      probed: the backbone with the run's detector.
      passages: to search in.
      retriever: ranks them.
      config: how far the controller searches.
    """

    folder: Path
    key: str
    probed: ProbedBackbone
    passages: Sequence[Passage]
    retriever: Retriever
    config: ControllerConfig

    def trace_all(self, sets: Sequence[QuestionSet], update: Update) -> list[Traced]:
        """Trace every set; what was traced before is read from its file.

        Args:
          sets: what is traced.
          update: told rounds done and to do.
        """
        groups = _groups(sets)
        n_rounds = self.config.max_budget + 1
        traced: list[Traced] = []
        for i, group in enumerate(groups):
            saved = [self._load(one) for one in group]
            if None in saved:

                def on_round(number: int, i: int = i) -> None:
                    update(i * n_rounds + number + 1, len(groups) * n_rounds)

                saved = self._trace(group, on_round)
            traced += [
                Traced(**vars(one), traces=own.traces, vanilla=own.vanilla)
                for one, own in zip(group, saved, strict=True)
            ]
        return traced

    def _file(self, one: QuestionSet) -> Path:
        return self.folder / f"traces-{one.dataset}-{one.split}.json"

    def _load(self, one: QuestionSet) -> SavedTraces | None:
        """Return saved traces, or None if there are none made from these inputs."""
        try:
            saved = msgspec.convert(read_sealed(self._file(one), ""), SavedTraces)
        except (ValueError, msgspec.ValidationError):
            return None  # not there, or damaged: traced again
        return saved if saved.key == self.key else None

    def _trace(
        self,
        group: Sequence[QuestionSet],
        on_round: Callable[[int], None],
    ) -> list[SavedTraces]:
        """Trace the questions of several sets together, and save each set's traces."""
        questions = [example.question for one in group for example in one.examples]
        reader = ProbedReader(self.probed, questions)
        traces = trace_questions(
            questions, reader, self.retriever, self.passages, self.config, on_round
        )
        ranking = self.retriever.search(questions, self.config.n_passages)
        contexts = [[self.passages[p] for p in row] for row in ranking]
        requests = self.probed.requests("with_context", questions, contexts)
        vanilla = [answer.text for answer in self.probed.answer(requests)]
        saved, start = [], 0
        for one in group:
            own = slice(start, start + len(one.examples))
            start = own.stop
            saved.append(
                SavedTraces(
                    key=self.key,
                    traces=tuple(traces[own]),
                    vanilla=tuple(vanilla[own]),
                )
            )
            found = seal(msgspec.to_builtins(saved[-1]))
            write_json_atomic(self._file(one), found)
        return saved


Recalibrate = Callable[[Example, Trace], Trace]


def choose_policy(
    traced: Sequence[Traced],
    config: ControllerConfig,
    recalibrate: Recalibrate = lambda example, trace: trace,
) -> Policy:
    """Choose threshold and budget on the validation traces of all sets together.

    Args:
      traced: of all sets.
      config: what is searched.
      recalibrate: gives each question's trace its probabilities for the search.
    """
    validation = [one for one in traced if one.split == "validation"]
    examples = [example for one in validation for example in one.examples]
    traces = [trace for one in validation for trace in one.traces]
    return search_policy(
        tuple(map(recalibrate, examples, traces)),
        lambda i, answer: exact_match(answer, examples[i].golds),
        config,
    )

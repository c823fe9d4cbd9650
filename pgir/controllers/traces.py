"""Tracing questions for the controllers, and choosing PGIR's policy.

Every question is traced once to the full budget and the trace is kept; threshold and
budget are chosen on the validation traces and used unchanged everywhere else.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from extract.backbone.loading import open_backbone
from extract.backbone.names import backbone_of
from extract.generate.requests import answer_config
from extract.label.verdicts import exact_match
from extract.records import Example, Passage
from extract.run.console import Update
from extract.run.contents import read_examples
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.manifest import Preset
from extract.signals.stage import extract_config
from jaxprobe.detector import Detector
from pgir.bridge import ProbedBackbone, ProbedReader
from pgir.controllers.policy import (
    ControllerConfig,
    Draft,
    Policy,
    Trace,
    search_policy,
    trace_questions,
)
from pgir.retrieval.bm25 import Bm25Retriever

GROUP_SIZE = 200  # questions; fewer of them leave batches half empty


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """One set of questions with every draft that any policy could ask for.

    Attributes:
      vanilla: answers after one retrieval with the question alone.
    """

    dataset: str
    split: str
    examples: tuple[Example, ...]
    traces: tuple[Trace, ...]
    vanilla: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """The run's section `control`.

    Attributes:
      max_budget: most retrieval rounds traced.
      n_questions: of each set that are given to the controllers; None for all.
    """

    max_budget: int = 4
    n_questions: int | None = None

    @property
    def controller(self) -> ControllerConfig:
        """How far the controller searches."""
        return ControllerConfig(max_budget=self.max_budget)


CONTROL_PRESETS: dict[Preset, ControlConfig] = {
    "demo": ControlConfig(n_questions=250),
    "smoke": ControlConfig(max_budget=2, n_questions=8),
    "paper": ControlConfig(),
}


def open_probed(run: RunDir) -> ProbedBackbone:
    """Load the run's backbone together with its detector."""
    config = answer_config(run)
    return ProbedBackbone(
        open_backbone(backbone_of(run)),
        Detector.load(run.detector),
        config.prompt.prompt_template(),
        config.generation,
        answer_span=extract_config(run).answer_span,
    )


def question_sets(
    examples: Sequence[Example], limit: int | None
) -> list[tuple[str, str, tuple[Example, ...]]]:
    """Return the evaluated sets in file order, validation first."""
    sets: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split != "train":
            sets.setdefault((example.dataset, example.split), []).append(example)
    return [(d, s, tuple(found[:limit])) for (d, s), found in sets.items()]


def _to_file(path: Path, traced: Traced, key: str) -> None:
    write_json_atomic(
        path,
        {
            "key": key,
            "traces": [[dataclasses.asdict(d) for d in t] for t in traced.traces],
            "vanilla": list(traced.vanilla),
        },
    )


def _from_file(
    path: Path, key: str
) -> tuple[tuple[Trace, ...], tuple[str, ...]] | None:
    """Return kept traces, or None if there are none made from these inputs."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    if kept["key"] != key:
        return None
    traces = tuple(
        tuple(Draft(**{**d, "passages": tuple(d["passages"])}) for d in trace)
        for trace in kept["traces"]
    )
    return traces, tuple(kept["vanilla"])


def trace_sets(
    probed: ProbedBackbone,
    retriever: Bm25Retriever,
    passages: Sequence[Passage],
    examples: Sequence[Example],
    config: ControllerConfig,
    on_round: Callable[[int], None],
) -> tuple[tuple[Trace, ...], tuple[str, ...]]:
    """Return the questions' traces and their answers after one plain retrieval."""
    questions = [example.question for example in examples]
    reader = ProbedReader(probed, questions)
    traces = trace_questions(questions, reader, retriever, passages, config, on_round)
    ranking = retriever.search(questions, config.n_passages)
    contexts = [[passages[p] for p in row] for row in ranking]
    vanilla = probed.answer(probed.requests("with_context", questions, contexts))
    return tuple(traces), tuple(answer.text for answer in vanilla)


def _groups(
    sets: Sequence[tuple[str, str, tuple[Example, ...]]],
) -> list[list[tuple[str, str, tuple[Example, ...]]]]:
    """Put sets together until a group has questions enough to fill batches.

    Groups depend on the sets alone, so a run that was killed makes them again.
    """
    groups: list[list[tuple[str, str, tuple[Example, ...]]]] = [[]]
    for one in sets:
        if sum(len(examples) for _, _, examples in groups[-1]) >= GROUP_SIZE:
            groups.append([])
        groups[-1].append(one)
    return groups


def trace_all(
    run: RunDir,
    config: ControlConfig,
    probed: ProbedBackbone,
    passages: Sequence[Passage],
    update: Update,
    key: str,
) -> list[Traced]:
    """Trace every set; what was traced before is read from its file.

    Args:
      run: holds the questions.
      config: how many questions, and how far.
      probed: the backbone with the run's detector.
      passages: of the run, to search in.
      update: told rounds done and to do.
      key: identity of everything the traces depend on.
    """
    controller = config.controller
    retriever = Bm25Retriever(passages)
    groups = _groups(question_sets(read_examples(run), config.n_questions))
    n_rounds = controller.max_budget + 1
    traced: list[Traced] = []
    for i, group in enumerate(groups):
        paths = [run.control / f"traces-{d}-{s}.json" for d, s, _ in group]
        kept = [_from_file(path, key) for path in paths]
        if None in kept:
            traces, vanilla = trace_sets(
                probed,
                retriever,
                passages,
                [example for _, _, examples in group for example in examples],
                controller,
                lambda r, i=i: update(i * n_rounds + r + 1, len(groups) * n_rounds),
            )
            stops = np.cumsum([len(examples) for _, _, examples in group])
            starts = [0, *stops[:-1]]
            kept = [
                (traces[a:b], vanilla[a:b]) for a, b in zip(starts, stops, strict=True)
            ]
        for (dataset, split, examples), path, (own, plain) in zip(
            group, paths, kept, strict=True
        ):
            one = Traced(
                dataset=dataset,
                split=split,
                examples=examples,
                traces=own,
                vanilla=plain,
            )
            path.parent.mkdir(exist_ok=True)
            _to_file(path, one, key)
            traced.append(one)
    return traced


def choose_policy(traced: Sequence[Traced], config: ControllerConfig) -> Policy:
    """Choose threshold and budget on the validation traces of all sets together."""
    validation = [one for one in traced if one.split == "validation"]
    examples = [example for one in validation for example in one.examples]
    return search_policy(
        tuple(trace for one in validation for trace in one.traces),
        lambda i, answer: exact_match(answer, examples[i].golds),
        config,
    )


def inputs_key(*parts: str) -> str:
    """Return one identity for several."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

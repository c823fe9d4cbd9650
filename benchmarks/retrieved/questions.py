"""The questions of a run with retrieved passages, as a run inside the run.

The inner run is answered, labelled and extracted by the stages of any run, so it stops
and continues as they do, and `beatrice label RUN/retrieved --judge …` puts judges in
the place of exact match.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from extract.backbone.names import backbone_of
from extract.datasets.loading import Loaded, open_dataset
from extract.generate.requests import answer_config
from extract.generate.templates import PromptTemplate
from extract.label.verdicts import text_key
from extract.records import SETTINGS, Answer, Example, Passage, read_records, to_json
from extract.run.contents import answers_file, read_examples
from extract.run.directory import RunDir
from extract.run.files import write_text_atomic
from extract.run.manifest import NewRun, Preset
from extract.signals.stage import extract_config
from jaxprobe.stage import chosen_layer
from pgir.controllers.services import showable
from pgir.retrieval.retrievers import Retrieval, RetrievalFailed

Failed = dict[str, str]  # why a question got no passages, by its id


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The run's section `transfer`.

    Attributes:
      limit: questions of each set, the first in its order; None takes all.
      n_passages: retrieved for each.
      questions: sets that the run does not have, as (name, file); held out.
    """

    limit: int | None = 500
    n_passages: int = 3
    questions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        for name in ("limit", "n_passages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")


TRANSFER_PRESETS: dict[Preset, TransferConfig] = {
    "demo": TransferConfig(),
    "few": TransferConfig(),
    "smoke": TransferConfig(limit=20),
    "paper": TransferConfig(),
}


def asked_questions(run: RunDir, config: TransferConfig) -> list[Example]:
    """Return the questions that are asked again, without passages.

    The run's test and held-out questions, and the first of other files whose text is
    not among the run's own.

    Raises:
      ValueError: a file holds no questions, or nothing is left to ask.
    """
    examples = read_examples(run)
    known = {text_key(example.question) for example in examples}
    pools: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        if example.split in ("test", "ood"):
            pools.setdefault((example.dataset, example.split), []).append(example)
    for name, file in config.questions:
        own = pools.setdefault((name, "ood"), [])
        for found in open_dataset(Path(file), dataset=name).read():
            if not isinstance(found, Loaded):
                continue
            key = text_key(found.question.question)
            if key not in known:
                known.add(key)
                own.append(found.question.as_example("ood", ()))
    asked = [one for pool in pools.values() for one in pool[: config.limit]]
    if not asked:
        raise ValueError(f"{run.path} has neither test nor held-out questions")
    return [msgspec.structs.replace(e, passages=(), rewritten=()) for e in asked]


def with_passages(
    asked: Sequence[Example],
    found: Retrieval,
    n_passages: int,
    prompts: tuple[Any, PromptTemplate] | None = None,
) -> tuple[list[Example], Failed]:
    """Return the questions with retrieved passages, and those that got none.

    Args:
      asked: without passages.
      found: ranks passages.
      n_passages: of each question.
      prompts: tokenizer and template; passages that hold control tokens of the model,
        which no prompt can, are escaped. None takes all as they are.
    """
    queries = [example.question for example in asked]
    try:
        rows = enumerate(found.retriever.search(queries, n_passages))
        ranked, reasons = dict(rows), {}
    except RetrievalFailed as error:
        ranked, reasons = error.rankings, error.reasons

    examples = []
    for i, example in enumerate(asked):
        if i in ranked:
            every = (found.passages[int(place)] for place in ranked[i])
            passages = [Passage(title=p.title, text=p.text) for p in every]
            if prompts is not None:
                passages = showable(*prompts, example.question, passages)
            example = msgspec.structs.replace(example, passages=tuple(passages))
            examples.append(example)
    return examples, {asked[i].id: why for i, why in reasons.items()}


def inner_run(run: RunDir) -> RunDir:
    """Open the run inside a run, of the same model, prompts and labels.

    One layer of hidden states is kept: the one that the detectors read. Passages that
    do not fit are left out from the last on, since nobody chose them for their length.
    """
    answer, extract = answer_config(run), extract_config(run)
    prompt = dataclasses.replace(answer.prompt, overlong="drop-passages")
    sections: Mapping[str, object] = {
        "backbone": backbone_of(run),
        "answer": dataclasses.replace(answer, settings=SETTINGS, prompt=prompt),
        "extract": dataclasses.replace(extract, hidden_layers=(chosen_layer(run),)),
    }
    asked = NewRun(preset=run.preset, seed=run.seed, sections=sections)
    return RunDir.open(run.path / "retrieved", asked)


def write_questions(
    inner: RunDir, run: RunDir, examples: Sequence[Example], note: Callable[[str], None]
) -> None:
    """Put questions into an inner run; what other passages were shown is done again.

    Closed-book answers that the run has to the same questions are taken over.
    """
    content = "".join(f"{to_json(example)}\n" for example in examples)
    if inner.examples.exists() and inner.examples.read_text("utf-8") == content:
        return
    if inner.examples.exists():
        note("retrieved: other passages or questions than before")
        shutil.rmtree(inner.path / "features", ignore_errors=True)
        for stage in ("answer", "label", "extract"):
            inner.reopen_stage(stage)
    elif answers_file(run).exists():
        ids = {example.id for example in examples}
        lines = [
            f"{to_json(answer)}\n"
            for answer in read_records(answers_file(run), Answer)
            if answer.setting == "closed_book" and answer.example_id in ids
        ]
        answers_file(inner).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(answers_file(inner), "".join(lines))
    write_text_atomic(inner.examples, content)

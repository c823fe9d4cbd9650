"""Which questions are asked again with retrieved passages."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from beatrice.extract.datasets.loading import Loaded, open_dataset
from beatrice.extract.generate.prompts import PromptTemplate
from beatrice.extract.records import Example, Passage, text_key
from beatrice.extract.run.directory import Preset
from beatrice.pgir.controllers.waves import showable
from beatrice.pgir.retrievers import Retrieval, RetrievalFailed

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
        """Check that counts are positive."""
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


def asked_questions(
    examples: Sequence[Example], config: TransferConfig
) -> list[Example]:
    """Return the questions that are asked again, without passages.

    The test and held-out ones of a run's questions, and the first of other files whose
    text is not among the run's own.

    Raises:
      ValueError: a file holds no questions, or nothing is left to ask.
    """
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
        raise ValueError("there are neither test nor held-out questions to ask again")
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

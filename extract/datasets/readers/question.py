"""A question as a published file has it, before it belongs to a split."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from extract.records import Example, Passage, Split

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A page of evidence that lies in a file of its own (TriviaQA).

    Attributes:
      kind: folder below the evidence directory.
      filename: path below that folder.
    """

    kind: Literal["wikipedia", "web"]
    filename: str
    title: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question, its accepted answers, and the passages that came with it.

    Attributes:
      id: the file's own, or None where it has none.
      dataset: name of the question set, or None where the record does not tell.
      golds: accepted answers as published, without repetitions; at least one.
      passages: in file order; `is_supporting` marks the gold ones.
      documents: evidence on the side.
      meta: what else is worth keeping (JSON values only).
      has_made_id: the id was made of the question's text.
    """

    id: str | None
    dataset: str | None
    question: str
    golds: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    documents: tuple[Document, ...] = ()
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_made_id: bool = False

    def as_example(self, split: Split, passages: tuple[Passage, ...]) -> Example:
        """Return the example of a split, with the passages chosen as its context."""
        if self.id is None or self.dataset is None:
            raise ValueError(
                f"the question {self.question[:60]!r} has no id or no dataset yet; "
                "read it through `open_dataset`"
            )
        return Example(
            id=f"{self.dataset}-{self.id}",
            dataset=self.dataset,
            split=split,
            question=self.question,
            golds=self.golds,
            passages=passages,
            meta=self.meta,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One published layout of a record.

    Attributes:
      name: in words, as shown to a person.
      fits: tells from a record's keys whether it is of this layout.
      read: turns a record into a question; a ValueError says why it cannot. None for
        a layout that holds no questions, which `refusal` then explains.
      dataset: the only question set that is published so, if there is only one.
      is_weak: so few keys that a damaged record of a richer layout fits it too.
    """

    name: str
    fits: Callable[[Record], bool]
    read: Callable[[Record], Question] | None = None
    refusal: str = ""
    dataset: str | None = None
    is_weak: bool = False

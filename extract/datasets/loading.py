"""A recognised file of questions, read record by record.

Nothing is dropped in silence: a record comes out as a question or as a refusal with
its number and the reason.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from extract.datasets.files.kinds import FileType
from extract.datasets.files.streams import RawRecord, RecordStream
from extract.datasets.readers import (
    community,
    dpr,
    multihop,
    neutral,
    nq,
    popqa,
    triviaqa,
)
from extract.datasets.readers.fields import has_answers
from extract.datasets.readers.passages import check_all_read
from extract.datasets.readers.question import Format, Question, Record
from extract.datasets.readers.triviaqa import attach


def _read_document(record: Record) -> Question | None:
    """Read the source record inside a log; None where it is of no layout."""
    found = recognise_record(record)
    if found is None or found.read is None:
        return None
    if found.is_weak and not has_answers(record):
        return None  # the log's `target` then holds the answer
    return found.read(record)


LM_EVAL = Format(
    name="lm-eval samples",
    fits=lambda r: (
        "doc" in r and bool({"target", "resps", "filtered_resps", "doc_id"} & r.keys())
    ),
    read=functools.partial(neutral.read_lm_eval, read_document=_read_document),
)

FORMATS: tuple[Format, ...] = (
    LM_EVAL,
    *triviaqa.FORMATS,
    *popqa.FORMATS,
    *dpr.FORMATS,
    *nq.FORMATS,
    *neutral.FORMATS,
    *multihop.FORMATS,
    *community.FORMATS,
    *multihop.WEAK_FORMATS,
    *neutral.WEAK_FORMATS,
)


def recognise_record(record: Record) -> Format | None:
    """Return the layout of one record: the first strong one that fits, or a weak."""
    fitting = [known for known in FORMATS if known.fits(record)]
    strong = [known for known in fitting if not known.is_weak]
    return next(iter(strong or fitting), None)


def choose_format(records: Sequence[Record]) -> Format | None:
    """Return the layout of a file from its first records.

    The most frequent one, where a layout that any damaged record fits (a question and
    an answer) only counts if there is no other.
    """
    found = [known for record in records if (known := recognise_record(record))]
    strong = [known for known in found if not known.is_weak]
    counts = collections.Counter(FORMATS.index(known) for known in strong or found)
    if not counts:
        return None
    index, _ = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return FORMATS[index]


# A layout tells less than marks in the records: others may have written so too.
DatasetSource = Literal[
    "given", "records", "layout", "style of the questions", "file name"
]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A record that is a question.

    Attributes:
      number: of the record in the file, from 1.
      at: where it lies, in words.
    """

    number: int
    at: str
    question: Question
    format: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A record that is none, and why."""

    number: int
    at: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetFile:
    """A recognised file.

    Attributes:
      dataset: question set of most records, or None where nothing tells.
      dataset_from: what told it.
      evidence: TriviaQA's folder of pages, if there is one.
      envelope: what an object around the records says, after they were read.
    """

    path: Path
    type: FileType
    format: Format
    dataset: str | None
    dataset_from: DatasetSource | None
    evidence: Path | None
    envelope: dict[str, object] = dataclasses.field(default_factory=dict)

    def read(self) -> Iterator[Loaded | Refusal]:
        """Yield every record, in file order.

        Raises:
          ValueError: the file turns out to be cut off or damaged.
        """
        seen: dict[int, int] = {}
        filters: list[Any] = []
        stream = RecordStream(self.path, self.type)
        for raw in stream:
            found = self.read_one(raw)
            if isinstance(found, Loaded):
                reason = _other_filter(found.question, filters) or _taken_id(
                    found.question, raw.number, seen
                )
                found = Refusal(raw.number, raw.at, reason) if reason else found
            yield found
        self.envelope.update(stream.envelope)

    def read_one(self, raw: RawRecord) -> Loaded | Refusal:
        """Turn one raw record into a question or a refusal."""
        if raw.value is None:
            return Refusal(raw.number, raw.at, raw.problem or "no record")
        known = self.format
        if not known.fits(raw.value):
            known = self._other_format(raw.value)
        if known.read is None:
            return Refusal(raw.number, raw.at, f"is of another kind ({known.name})")
        try:
            question = known.read(raw.value)
            check_all_read(raw.value, question)
            if question.documents or known.dataset == "triviaqa":
                question = attach(question, self.evidence)
        except ValueError as error:
            return Refusal(raw.number, raw.at, str(error))
        return Loaded(raw.number, raw.at, self._completed(question), known.name)

    def _other_format(self, record: Record) -> Format:
        """Return the layout of a record that is not of the file's.

        One that says less than the file's (a question and an answer, where others have
        their paragraphs) is a damaged record: the file's own reader says what it lacks.
        """
        other = recognise_record(record)
        if other is None or (other.is_weak and not self.format.is_weak):
            return self.format
        return other

    def _completed(self, question: Question) -> Question:
        """Add what the record does not say, and leave out passages without a word.

        An id that is missing is made of the question's text, so that it does not
        depend on the order of the file.
        """
        changes: dict[str, Any] = {}
        if question.dataset is None or self.dataset_from == "given":
            changes["dataset"] = self.dataset
        if question.id is None:
            digest = hashlib.sha256(question.question.encode()).hexdigest()[:24]
            changes |= {"id": f"q{digest}", "has_made_id": True}
        if "" in [passage.text for passage in question.passages]:
            kept = tuple(passage for passage in question.passages if passage.text)
            n_empty = len(question.passages) - len(kept)
            meta = {**question.meta, "n_empty_passages": n_empty}
            changes |= {"passages": kept, "meta": meta}
        return dataclasses.replace(question, **changes) if changes else question


def _taken_id(question: Question, number: int, seen: dict[int, int]) -> str | None:
    """Say that another record of the file has the id; `seen` grows."""
    first = seen.setdefault(_id_key(question), number)
    if first == number or question.has_made_id:
        return None
    return f"the id {question.id!r} is that of record {first} already"


def _other_filter(question: Question, filters: list[Any]) -> str | None:
    """Say that a log's record went through another filter than its first.

    A log with two filters has every question twice, with two answers of the model.
    """
    name = question.meta.get("filter")
    if name is None or not filters:
        filters += [] if name is None else [name]
        return None
    if name == filters[0]:
        return None
    return (
        f"the same questions again through the filter {name!r}: only the first "
        f"filter's records, {filters[0]!r}, are read"
    )


def _id_key(question: Question) -> int:
    """Return a short stand-in for a question's id."""
    return hash((question.dataset, question.id))

"""Natural Questions: the open version's questions, and the simplified pages."""

import re
from typing import Any

from extract.datasets.fields import (
    Record,
    any_answers,
    distinct,
    identity,
    kind_of,
    objects,
    text,
)
from extract.datasets.readers.question import (
    Format,
    Question,
    dataset_named,
    dataset_of_id,
    dataset_tagged,
)
from extract.records import Passage

_PARAGRAPHS = {"context", "ctxs", "paragraphs", "supporting_facts"}
_TAG = re.compile(r"^<[^>]+>$")


def _fits_open(record: Record) -> bool:
    """Tell NQ-open's lines from those of others with a mark of their own.

    An id of hexadecimal digits is one: NQ-open has no ids, EfficientQA neither.
    """
    if not isinstance(record.get("answer"), list) or "question" not in record:
        return False
    if _PARAGRAPHS & record.keys():
        return False
    if dataset_named(record.get("dataset")) not in (None, "nq"):
        return False
    name = record.get("_id", record.get("id"))
    marked = dataset_of_id(name) if isinstance(name, str) else None
    return marked in (None, "nq") and not {"prop", "subj"} <= record.keys()


def read_open(record: Record) -> Question:
    """Read one line of NQ-open: `answer` is a list under a singular name.

    The layout is so plain that a file's name may say otherwise, so the set stays open.
    """
    return Question(
        id=identity(record, "id", "example_id"),
        dataset=dataset_tagged(record),
        question=text(record, "question"),
        golds=any_answers(record),
    )


def _span(holder: Any, name: str, n_tokens: int) -> tuple[int, int]:
    """Return `[start, stop)` of an answer in tokens; (-1, -1) where there is none."""
    if not isinstance(holder, dict):
        raise ValueError(f"{name!r}: expected an object, found {kind_of(holder)}")
    start, stop = holder.get("start_token"), holder.get("end_token")
    for value in (start, stop):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name!r}: expected token numbers, found {value!r}")
    if start == -1:
        return -1, -1
    if not 0 <= start < stop <= n_tokens:
        raise ValueError(
            f"{name!r}: tokens {start} to {stop} of a document of {n_tokens}"
        )
    return start, stop


def _words(tokens: list[str], start: int, stop: int) -> str:
    """Return tokens as text, without HTML tags."""
    return " ".join(t for t in tokens[start:stop] if not _TAG.match(t)).strip()


def read_simplified(record: Record) -> Question:
    """Read one page of simplified NQ: the gold passage is its long answer.

    Answers are the short answers of all annotators, and yes or no.
    """
    question = text(record, "question_text")
    # One space is one boundary: token numbers count the empty tokens between two.
    # At its beginning as well, so the document is not stripped.
    text(record, "document_text")
    tokens = record["document_text"].split(" ")
    long_answers, short, notes = [], [], objects(record, "annotations")
    for i, note in enumerate(notes):
        within = f"annotations[{i}]."
        start, stop = _span(
            note.get("long_answer"), f"{within}long_answer", len(tokens)
        )
        if start < 0:
            continue
        long_answers.append(_words(tokens, start, stop))
        for j, item in enumerate(objects(note, "short_answers", within=within)):
            name = f"{within}short_answers[{j}]"
            short.append(_words(tokens, *_span(item, name, len(tokens))))
        if note.get("yes_no_answer") in ("YES", "NO"):
            short.append(str(note["yes_no_answer"]).lower())
    if not long_answers:
        raise ValueError(
            f"no long answer in any of {len(notes)} annotations: there is neither a "
            "gold passage nor an answer"
        )
    golds = distinct(short)
    if not golds:
        raise ValueError("a long answer but no short one: there is no answer to match")
    title = _words(tokens, 0, 64).split(" - wikipedia")[0].split(" - Wikipedia")[0]
    return Question(
        id=identity(record, "example_id"),
        dataset="nq",
        question=question,
        golds=golds,
        passages=tuple(
            Passage(title=title, text=body, is_supporting=True)
            for body in distinct(long_answers)
        ),
        meta={"n_annotations": len(notes)},
    )


def _is_original(record: Record) -> bool:
    return "document_html" in record or (
        isinstance(record.get("document"), dict) and "annotations" in record
    )


FORMATS = (
    Format(
        name="NQ original",
        fits=_is_original,
        refusal=(
            "holds whole HTML pages of Natural Questions in the original release; "
            "give the simplified release, or NQ-open, or DPR's files"
        ),
    ),
    Format(
        name="NQ simplified",
        dataset="nq",
        fits=lambda r: {"document_text", "question_text"} <= r.keys(),
        read=read_simplified,
    ),
    Format(
        name="NQ-open",
        dataset="nq",
        fits=_fits_open,
        read=read_open,
        is_weak=True,
    ),
)

"""Natural Questions, also as Dense Passage Retrieval has it, and PopQA."""

import decimal
import itertools
import math
import re
from typing import Any

import msgspec

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import (
    Record,
    any_passages,
    optional_passages,
    titled_passages,
)
from beatrice.extract.datasets.question import (
    Format,
    Question,
    dataset_marked,
    dataset_named,
    dataset_of_id,
    dataset_tagged,
    reader,
)
from beatrice.extract.records import Passage

# Scores of the positive that comes from the annotated page.
_GOLD_SCORES = (1000, "1000", "1000.0")


def _listed_answers(record: Record) -> tuple[str, ...]:
    value = fields.text(record, fields.HEADERLESS[1])
    golds = fields.unfold(value, fields.HEADERLESS[1])
    if not isinstance(golds, list):
        raise ValueError(
            f"expected a list of answers in the second column, found {value[:40]!r}"
        )
    return fields.answers(golds, "answers")


def _positives(record: Record, key: str) -> tuple[Passage, ...]:
    """Return the positive passages, those from the annotated page marked as gold.

    The others were retrieved and merely contain the answer. In files without that
    score the first positive is the gold one.
    """
    items = fields.objects(record, key)
    is_gold = [item.get("score") in _GOLD_SCORES for item in items]
    passages = titled_passages(record, key, is_supporting=False)
    if not any(is_gold):
        is_gold = [i == 0 for i in range(len(passages))]
    return tuple(
        msgspec.structs.replace(passage, is_supporting=gold)
        for passage, gold in zip(passages, is_gold, strict=True)
    )


def _with_negatives(record: Record, key: str, *others: str) -> tuple[Passage, ...]:
    """Return the positive passages of a field, then the negative ones of others."""
    negatives = (
        optional_passages(record, other, is_supporting=False) for other in others
    )
    return *_positives(record, key), *itertools.chain(*negatives)


def _biencoder_set(record: Record) -> str | None:
    positives = record["positive_ctxs"]
    if record.get("dataset") is not None or not positives:
        return dataset_tagged(record)
    return "nq" if "passage_id" in positives[0] else None


def _contexts_set(record: Record) -> str | None:
    is_nq = record.get("nq_annotated_gold") is not None
    return "nq" if is_nq else dataset_marked(record)


def _gold_passage(record: Record) -> tuple[Passage, ...]:
    body = fields.expect(fields.required(record, "context"), str, "context")
    title = fields.text_or_empty(record.get("title"))
    passage = Passage(title=title, text=body, is_supporting=True)
    return (passage,) if body.strip() else ()


def _fits_gold_info(record: Record) -> bool:
    """Return whether a record is no row of SQuAD, with a title and a context too."""
    if "question_tokens" in record:
        return "context" in record and fields.has_answers(record)
    return {"question", "context", "title", "short_answers"} <= record.keys()


DPR_FORMATS = (
    Format("DPR question file (qa.csv)",
           lambda r: r.keys() == set(fields.HEADERLESS),
           reader(ids=(), questions=fields.HEADERLESS[:1], golds=_listed_answers)),
    Format("DPR biencoder", lambda r: "positive_ctxs" in r,
           reader(ids=("question_id", "id"), dataset=_biencoder_set,
                  passages=lambda r: _with_negatives(
                      r, "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"))),
    Format("Tevatron", lambda r: {"query", "positive_passages"} <= r.keys(),
           reader(ids=("query_id",), questions=("query",), dataset=dataset_tagged,
                  passages=lambda r: _with_negatives(
                      r, "positive_passages", "negative_passages"))),
    # Only `isgold` marks a gold passage: `has_answer` says that a string occurs.
    Format("questions with contexts (FiD, NQ oracle)",
           lambda r: {"question", "ctxs"} <= r.keys(),
           reader(ids=("id", "question_id", "q_id"), dataset=_contexts_set,
                  passages=lambda r: titled_passages(r, "ctxs"))),
    Format("DPR gold passages (gold_info)", _fits_gold_info,
           reader(ids=("example_id", "id"),
                  dataset=lambda r: dataset_tagged(r) or "nq",
                  passages=_gold_passage)),
)  # fmt: skip


_PARAGRAPHS = {"context", "ctxs", "paragraphs", "supporting_facts"}
_TAG = re.compile(r"^<[^>]+>$")


def _fits_open(record: Record) -> bool:
    """Return whether a line is NQ-open's, without a mark of another set.

    An id of hexadecimal digits is one: NQ-open has no ids, EfficientQA neither.
    """
    if not isinstance(record.get("answer"), list) or "question" not in record:
        return False
    if _PARAGRAPHS & record.keys():
        return False
    if dataset_named(record.get("dataset")) not in (None, "nq"):
        return False
    marked = dataset_of_id(record.get("_id", record.get("id")))
    return marked in (None, "nq") and not {"prop", "subj"} <= record.keys()


def _span(holder: Any, name: str, n_tokens: int) -> tuple[int, int]:
    """Return `[start, stop)` of an answer in tokens; (-1, -1) where there is none."""
    fields.expect(holder, dict, name)
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
    question = fields.text(record, "question_text")
    # One space is one boundary: token numbers count the empty tokens between two.
    # At its beginning as well, so the document is not stripped.
    fields.text(record, "document_text")
    tokens = record["document_text"].split(" ")
    long_answers, short, notes = [], [], fields.objects(record, "annotations")
    for i, note in enumerate(notes):
        within = f"annotations[{i}]."
        start, stop = _span(
            note.get("long_answer"), f"{within}long_answer", len(tokens)
        )
        if start < 0:
            continue
        long_answers.append(_words(tokens, start, stop))
        for j, item in enumerate(fields.objects(note, "short_answers", within=within)):
            name = f"{within}short_answers[{j}]"
            short.append(_words(tokens, *_span(item, name, len(tokens))))
        if note.get("yes_no_answer") in ("YES", "NO"):
            short.append(str(note["yes_no_answer"]).lower())
    if not long_answers:
        raise ValueError(
            f"no long answer in any of {len(notes)} annotations: there is neither a "
            "gold passage nor an answer"
        )
    golds = fields.distinct(short)
    if not golds:
        raise ValueError("a long answer but no short one: there is no answer to match")
    title = _words(tokens, 0, 64).split(" - wikipedia")[0].split(" - Wikipedia")[0]
    return Question(
        id=fields.identity(record, "example_id"),
        dataset="nq",
        question=question,
        golds=golds,
        passages=tuple(
            Passage(title=title, text=body, is_supporting=True)
            for body in fields.distinct(long_answers)
        ),
    )


_COLUMNS = ("subj", "prop", "obj", "s_wiki_title", "o_wiki_title", "s_pop", "o_pop")


def _plain(value: Any, name: str) -> str | int | float | None:
    """Return a cell as a JSON value: Parquet has decimals, pandas NaN for nothing."""
    if isinstance(value, decimal.Decimal):
        value = float(value) if value % 1 else int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(
        f"{name!r}: expected text or a number, found {fields.kind_of(value)}"
    )


def _popqa_answers(record: Record) -> tuple[str, ...]:
    name = "possible_answers"  # a JSON list written as text
    return fields.field_answers(fields.required(record, name), name)


def _popqa_passages(record: Record) -> tuple[Passage, ...]:
    if record.get("paragraphs") is not None:
        return titled_passages(record, "paragraphs")
    return any_passages(record)


# The same question occurs in several rows, on subjects of the same name: the id tells
# them apart, the text does not.
_read_popqa = reader(
    dataset=lambda record: "popqa",
    golds=_popqa_answers,
    passages=_popqa_passages,
    meta=lambda r: {key: _plain(r[key], key) for key in _COLUMNS if key in r},
)


def _is_original(record: Record) -> bool:
    return "document_html" in record or (
        isinstance(record.get("document"), dict) and "annotations" in record
    )


def _fits_popqa(record: Record) -> bool:
    return "possible_answers" in record or {"s_wiki_title", "prop"} <= record.keys()


POPQA_FORMATS = (
    Format("PopQA with paragraphs",
           lambda r: {"possible_answers", "paragraphs"} <= r.keys(),
           _read_popqa, "popqa"),
    Format("PopQA", _fits_popqa, _read_popqa, "popqa"),
)  # fmt: skip
NQ_FORMATS = (
    Format("NQ original", _is_original,
           refusal="holds whole HTML pages of Natural Questions in the original "
           "release; give the simplified release, or NQ-open, or DPR's files"),
    Format("NQ simplified",
           lambda r: {"document_text", "question_text"} <= r.keys(),
           read_simplified, "nq"),
    # `answer` is a list under a singular name. The layout is so plain that a file's
    # name may say otherwise, so the set stays open.
    Format("NQ-open", _fits_open,
           reader(ids=("id", "example_id"), dataset=dataset_tagged,
                  passages=any_passages), "nq", is_weak=True),
)  # fmt: skip

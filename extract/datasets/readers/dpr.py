"""The files of Dense Passage Retrieval, for NQ and TriviaQA, and those shaped alike."""

import math
from typing import Any

import msgspec

from extract.datasets.files.streams import HEADERLESS
from extract.datasets.readers.fields import (
    answers,
    any_answers,
    has_answers,
    identity,
    kind_of,
    listed,
    text,
    unfold,
)
from extract.datasets.readers.passages import titled_passages
from extract.datasets.readers.question import (
    Format,
    Question,
    Record,
    dataset_marked,
    dataset_tagged,
)
from extract.records import Passage

GOLD_SCORE = 1000  # of the positive that comes from the annotated page


def unquote(question: str) -> str:
    """Remove the layer of CSV quotes that is left on some TriviaQA questions."""
    inner = question[1:-1]
    is_quoted = len(question) > 2 and question[0] == question[-1] == '"'
    return inner.replace('""', '"') if is_quoted and '""' in inner else question


def read_qa_row(record: Record) -> Question:
    """Read one row of `{nq,trivia}-*.qa.csv`: a question and a Python list."""
    question = text(record, HEADERLESS[0])
    value = text(record, HEADERLESS[1])
    found = unfold(value, HEADERLESS[1])
    if not isinstance(found, list):
        raise ValueError(
            f"expected a list of answers in the second column, found {value[:40]!r}"
        )
    return Question(
        id=None,
        dataset=None,
        question=unquote(question),
        golds=answers(found, "answers"),
    )


def _score(item: Any) -> float:
    """Return a passage's score, which some files write as text; NaN if none."""
    try:
        return float(item.get("score"))
    except (TypeError, ValueError):
        return math.nan


def mark_gold(items: list[Any], passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Mark the positives from the annotated page.

    The others were retrieved and merely contain the answer. In files without that
    score the first positive is the gold one.
    """
    is_gold = [_score(item) == GOLD_SCORE for item in items]
    if not any(is_gold):
        is_gold = [i == 0 for i in range(len(items))]
    return tuple(
        msgspec.structs.replace(passage, is_supporting=gold)
        for passage, gold in zip(passages, is_gold, strict=True)
    )


def read_biencoder(record: Record) -> Question:
    """Read one record of `biencoder-*.json`: positives, negatives, hard negatives."""
    question, golds = text(record, "question"), any_answers(record)
    items = list(listed(record, "positive_ctxs"))
    positives = titled_passages(record, "positive_ctxs", is_supporting=False)
    others = tuple(
        passage
        for key in ("hard_negative_ctxs", "negative_ctxs")
        if record.get(key)
        for passage in titled_passages(record, key, is_supporting=False)
    )
    dataset = dataset_tagged(record)
    if (
        record.get("dataset") is None
        and items
        and isinstance(items[0], dict)
        and "passage_id" in items[0]
    ):
        dataset = "nq"
    return Question(
        id=identity(record, "question_id", "id"),
        dataset=dataset,
        question=unquote(question),
        golds=golds,
        passages=(*mark_gold(items, positives), *others),
        meta={"n_positive": len(positives)},
    )


def read_contexts(record: Record) -> Question:
    """Read retrieved contexts (FiD, DPR output, "lost in the middle").

    Only `isgold` marks a gold passage: `has_answer` says that a string occurs.
    """
    gold = record.get("nq_annotated_gold")
    return Question(
        id=identity(record, "id", "question_id", "q_id"),
        dataset="nq" if gold is not None else dataset_marked(record),
        question=unquote(text(record, "question")),
        golds=any_answers(record),
        passages=titled_passages(record, "ctxs"),
    )


def read_gold_info(record: Record) -> Question:
    """Read one record of `nq-*_gold_info.json`: the question and its gold passage."""
    if "context" not in record:
        raise ValueError("no 'context'")
    body = record["context"]
    if not isinstance(body, str):
        raise ValueError(f"'context': expected text, found {kind_of(body)}")
    title = record.get("title")
    passage = Passage(
        title=title if isinstance(title, str) else "", text=body, is_supporting=True
    )
    return Question(
        id=identity(record, "example_id", "id"),
        dataset=dataset_tagged(record) or "nq",
        question=text(record, "question"),
        golds=any_answers(record),
        passages=(passage,) if body.strip() else (),
    )


def read_tevatron(record: Record) -> Question:
    """Read one record of Tevatron's `wikipedia-nq` or `wikipedia-trivia`."""
    golds = any_answers(record)
    return Question(
        id=identity(record, "query_id"),
        dataset=dataset_tagged(record),
        question=unquote(text(record, "query")),
        golds=golds,
        passages=(
            *mark_gold(
                list(listed(record, "positive_passages")),
                titled_passages(record, "positive_passages", is_supporting=False),
            ),
            *(
                titled_passages(record, "negative_passages", is_supporting=False)
                if record.get("negative_passages")
                else ()
            ),
        ),
    )


def _fits_gold_info(record: Record) -> bool:
    """Tell gold passages from SQuAD's rows, which have a title and a context too."""
    if "question_tokens" in record:
        return "context" in record and has_answers(record)
    return {"question", "context", "title", "short_answers"} <= record.keys()


FORMATS = (
    Format(
        name="DPR question file (qa.csv)",
        fits=lambda r: r.keys() == set(HEADERLESS),
        read=read_qa_row,
    ),
    Format(
        name="DPR biencoder", fits=lambda r: "positive_ctxs" in r, read=read_biencoder
    ),
    Format(
        name="Tevatron",
        fits=lambda r: {"query", "positive_passages"} <= r.keys(),
        read=read_tevatron,
    ),
    Format(
        name="questions with contexts (FiD, NQ oracle)",
        fits=lambda r: {"question", "ctxs"} <= r.keys(),
        read=read_contexts,
    ),
    Format(
        name="DPR gold passages (gold_info)",
        fits=_fits_gold_info,
        read=read_gold_info,
    ),
)

"""The files of Dense Passage Retrieval, for NQ and TriviaQA, and those shaped alike."""

from collections.abc import Iterator

import msgspec

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import Record
from beatrice.extract.datasets.readers.passages import titled_passages
from beatrice.extract.datasets.readers.question import (
    Format,
    Question,
    dataset_marked,
    dataset_tagged,
    unquote,
)
from beatrice.extract.records import Passage

GOLD_SCORE = 1000  # of the positive that comes from the annotated page


def read_qa_row(record: Record) -> Question:
    """Read one row of `{nq,trivia}-*.qa.csv`: a question and a Python list."""
    question = fields.text(record, fields.HEADERLESS[0])
    value = fields.text(record, fields.HEADERLESS[1])
    found = fields.unfold(value, fields.HEADERLESS[1])
    if not isinstance(found, list):
        raise ValueError(
            f"expected a list of answers in the second column, found {value[:40]!r}"
        )
    return Question(
        id=None,
        dataset=None,
        question=unquote(question),
        golds=fields.answers(found, "answers"),
    )


def _is_annotated(item: Record) -> bool:
    """Tell a positive that comes from the annotated page; scores may be text."""
    try:
        return float(item.get("score", "nan")) == GOLD_SCORE
    except (TypeError, ValueError):
        return False


def _positives(record: Record, key: str) -> tuple[Passage, ...]:
    """Return the positive passages, those from the annotated page marked as gold.

    The others were retrieved and merely contain the answer. In files without that
    score the first positive is the gold one.
    """
    is_gold = [_is_annotated(item) for item in fields.objects(record, key)]
    passages = titled_passages(record, key, is_supporting=False)
    if not any(is_gold):
        is_gold = [i == 0 for i in range(len(passages))]
    return tuple(
        msgspec.structs.replace(passage, is_supporting=gold)
        for passage, gold in zip(passages, is_gold, strict=True)
    )


def _negatives(record: Record, *keys: str) -> Iterator[Passage]:
    for key in keys:
        if record.get(key):
            yield from titled_passages(record, key, is_supporting=False)


def read_biencoder(record: Record) -> Question:
    """Read one record of `biencoder-*.json`: positives, negatives, hard negatives."""
    question, golds = fields.text(record, "question"), fields.any_answers(record)
    positives = _positives(record, "positive_ctxs")
    others = _negatives(record, "hard_negative_ctxs", "negative_ctxs")
    dataset = dataset_tagged(record)
    if record.get("dataset") is None and positives:
        dataset = "nq" if "passage_id" in record["positive_ctxs"][0] else None
    return Question(
        id=fields.identity(record, "question_id", "id"),
        dataset=dataset,
        question=unquote(question),
        golds=golds,
        passages=(*positives, *others),
        meta={"n_positive": len(positives)},
    )


def read_contexts(record: Record) -> Question:
    """Read retrieved contexts (FiD, DPR output, "lost in the middle").

    Only `isgold` marks a gold passage: `has_answer` says that a string occurs.
    """
    is_nq = record.get("nq_annotated_gold") is not None
    return Question(
        id=fields.identity(record, "id", "question_id", "q_id"),
        dataset="nq" if is_nq else dataset_marked(record),
        question=unquote(fields.text(record, "question")),
        golds=fields.any_answers(record),
        passages=titled_passages(record, "ctxs"),
    )


def read_gold_info(record: Record) -> Question:
    """Read one record of `nq-*_gold_info.json`: the question and its gold passage."""
    body = fields.expect(fields.required(record, "context"), str, "context")
    title = fields.text_or_empty(record.get("title"))
    passage = Passage(title=title, text=body, is_supporting=True)
    return Question(
        id=fields.identity(record, "example_id", "id"),
        dataset=dataset_tagged(record) or "nq",
        question=fields.text(record, "question"),
        golds=fields.any_answers(record),
        passages=(passage,) if body.strip() else (),
    )


def read_tevatron(record: Record) -> Question:
    """Read one record of Tevatron's `wikipedia-nq` or `wikipedia-trivia`."""
    golds = fields.any_answers(record)
    positives = _positives(record, "positive_passages")
    return Question(
        id=fields.identity(record, "query_id"),
        dataset=dataset_tagged(record),
        question=unquote(fields.text(record, "query")),
        golds=golds,
        passages=(*positives, *_negatives(record, "negative_passages")),
    )


def _fits_gold_info(record: Record) -> bool:
    """Tell gold passages from SQuAD's rows, which have a title and a context too."""
    if "question_tokens" in record:
        return "context" in record and fields.has_answers(record)
    return {"question", "context", "title", "short_answers"} <= record.keys()


FORMATS = (
    Format("DPR question file (qa.csv)",
           lambda r: r.keys() == set(fields.HEADERLESS), read_qa_row),
    Format("DPR biencoder", lambda r: "positive_ctxs" in r, read_biencoder),
    Format("Tevatron", lambda r: {"query", "positive_passages"} <= r.keys(),
           read_tevatron),
    Format("questions with contexts (FiD, NQ oracle)",
           lambda r: {"question", "ctxs"} <= r.keys(), read_contexts),
    Format("DPR gold passages (gold_info)", _fits_gold_info, read_gold_info),
)  # fmt: skip

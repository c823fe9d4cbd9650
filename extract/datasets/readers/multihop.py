"""HotpotQA, 2WikiMultihopQA and MuSiQue: records with their gold paragraphs."""

from typing import Any

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import Record
from beatrice.extract.datasets.question import (
    Format,
    Question,
    dataset_of_id,
    reader,
)
from beatrice.extract.records import Passage

# Tuples: a damaged record may have a list here, which no set can be asked about.
_TWOWIKI_TYPES = ("compositional", "inference", "bridge_comparison")
_BARE_TYPES = ("bridge", "comparison", *_TWOWIKI_TYPES)
_LEVELS = ("easy", "medium", "hard")
_TWOWIKI_KEYS = {"evidences", "evidence", "entity_ids", "evidences_id", "answer_id"}


def is_twowiki(record: Record) -> bool:
    """Return whether a record is of 2WikiMultihopQA and not of HotpotQA.

    What the sets write themselves goes first: a type, an id, a level. Keys that a
    third party may have added to HotpotQA tell only where nothing else does.
    """
    kind = record.get("type")
    if kind == "bridge" or kind in _TWOWIKI_TYPES:
        return kind != "bridge"
    by_id = dataset_of_id(record.get("_id", record.get("id")))
    if by_id in ("hotpotqa", "2wikimultihopqa"):
        return by_id == "2wikimultihopqa"
    if record.get("level") in _LEVELS:
        return False
    return not _TWOWIKI_KEYS.isdisjoint(record)


def _has_paragraphs(record: Record) -> bool:
    """Return whether a record has, or ought to have, paragraphs of titled sentences.

    What lacks the facts, or has them beside another kind of context, is refused by the
    reader: taken for a plain question it would lose its passages in silence.
    """
    if "question" not in record:
        return False
    if "supporting_facts" in record:
        return True
    if "context" not in record:
        return False
    context = record["context"]
    if fields.is_titled(context):
        return True
    is_prose = isinstance(context, str) and context.lstrip()[:1] not in ("[", "{")
    return "_id" in record and not is_prose and not fields.is_list_of_objects(context)


def _multihop_set(record: Record) -> str:
    return "2wikimultihopqa" if is_twowiki(record) else "hotpotqa"


def read_titled(record: Record) -> Question:
    """Read one record of HotpotQA or 2WikiMultihopQA, in any of its layouts."""
    question, golds = fields.text(record, "question"), _answer(record)
    titles = fields.supporting_titles(fields.required(record, "supporting_facts"))
    passages = fields.read_context(fields.required(record, "context"), titles)
    meta: dict[str, Any] = {
        key: record[key]
        for key in ("type", "level")
        if isinstance(record.get(key), str)
    }
    missing = set(titles) - {p.title for p in passages if p.is_supporting}
    if missing:  # fullwiki: what was retrieved need not hold the gold paragraphs
        meta["missing_titles"] = sorted(missing)
    return Question(
        id=fields.identity(record, "_id", "id"),
        dataset=_multihop_set(record),
        question=question,
        golds=golds,
        passages=passages,
        meta=meta,
    )


def _answer(record: Record) -> tuple[str, ...]:
    why = " (a test set without answers?)"
    return fields.answers(fields.required(record, "answer", why=why), "answer")


# Of MuSiQue's mark, which copies write as text or as a number; MuSiQue-Ans has none.
_ANSWERABLE = {"none": True, "true": True, "1": True, "false": False, "0": False}


def _paragraph(item: Record, within: str) -> Passage:
    """Return a paragraph, which must have its title and its mark."""
    mark, title = item.get("is_supporting"), item.get("title")
    return Passage(
        is_supporting=fields.expect(mark, bool, f"{within}is_supporting"),
        title=fields.expect(title, str, f"{within}title"),
        text=fields.body_of(item, within),
    )


def read_musique(record: Record) -> Question:
    """Read one record of MuSiQue.

    Only `is_supporting` marks gold paragraphs: distractors share their titles.
    """
    mark = record.get("answerable")
    is_answerable = _ANSWERABLE.get(str(mark).strip().lower())
    if is_answerable is None:
        raise ValueError(f"'answerable': expected true or false, found {mark!r}")
    if not is_answerable:
        raise ValueError(
            "unanswerable on purpose (MuSiQue-Full): its paragraphs do not hold the "
            "answer; use the file musique_ans, or leave such records out"
        )
    question = fields.text(record, "question")
    golds = _answer(record)
    if "answer_aliases" in record:
        aliases = fields.listed(record, "answer_aliases")
        golds = fields.answers([*golds, *aliases], "answer_aliases")
    passages = tuple(
        _paragraph(item, f"paragraphs[{i}].")
        for i, item in enumerate(fields.objects(record, "paragraphs"))
    )
    if not passages:
        raise ValueError("'paragraphs' is an empty list")
    name = fields.identity(record, "id")
    return Question(
        id=name,
        dataset="musique",
        question=question,
        golds=golds,
        passages=passages,
        meta={"hops": name.partition("__")[0]} if name and "__" in name else {},
    )


def _fits_musique(record: Record) -> bool:
    paragraphs = record.get("paragraphs")
    return "question_decomposition" in record or (
        fields.is_list_of_objects(paragraphs) and "paragraph_text" in paragraphs[0]
    )


def _fits_bare(record: Record) -> bool:
    return (
        {"question", "answer"} <= record.keys()
        and not {"context", "paragraphs", "ctxs"} & record.keys()
        and record.get("type") in _BARE_TYPES
    )


def _fits_twowiki(record: Record) -> bool:
    return _has_paragraphs(record) and is_twowiki(record)


FORMATS = (
    Format("MuSiQue", _fits_musique, read_musique, "musique"),
    Format("2WikiMultihopQA", _fits_twowiki, read_titled, "2wikimultihopqa"),
    Format("HotpotQA", _has_paragraphs, read_titled, "hotpotqa"),
)
WEAK_FORMATS = (
    Format("HotpotQA, questions and answers only", _fits_bare,
           reader(ids=("_id", "id"), dataset=_multihop_set, golds=_answer,
                  meta=lambda r: {"type": r["type"]}), is_weak=True),
)  # fmt: skip

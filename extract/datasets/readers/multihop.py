"""HotpotQA, 2WikiMultihopQA and MuSiQue: records with their gold paragraphs."""

from typing import Any

from beatrice.extract.datasets.fields import (
    Record,
    answers,
    identity,
    is_list_of_objects,
    is_titled,
    listed,
    marked_passages,
    read_context,
    required,
    supporting_titles,
    text,
)
from beatrice.extract.datasets.question import (
    TWOWIKI_TYPES,
    Format,
    Question,
    is_twowiki,
)

_BARE_TYPES = ("bridge", "comparison", *TWOWIKI_TYPES)


def _has_paragraphs(record: Record) -> bool:
    """Tell whether a record has, or ought to have, paragraphs of titled sentences.

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
    if is_titled(context):
        return True
    is_prose = isinstance(context, str) and context.lstrip()[:1] not in ("[", "{")
    return "_id" in record and not is_prose and not is_list_of_objects(context)


def _multihop_set(record: Record) -> str:
    return "2wikimultihopqa" if is_twowiki(record) else "hotpotqa"


def read_titled(record: Record) -> Question:
    """Read one record of HotpotQA or 2WikiMultihopQA, in any of its layouts."""
    question, golds = text(record, "question"), _answer(record)
    titles = supporting_titles(required(record, "supporting_facts"))
    passages = read_context(required(record, "context"), titles)
    meta: dict[str, Any] = {
        key: record[key]
        for key in ("type", "level")
        if isinstance(record.get(key), str)
    }
    missing = set(titles) - {p.title for p in passages if p.is_supporting}
    if missing:  # fullwiki: what was retrieved need not hold the gold paragraphs
        meta["missing_titles"] = sorted(missing)
    return Question(
        id=identity(record, "_id", "id"),
        dataset=_multihop_set(record),
        question=question,
        golds=golds,
        passages=passages,
        meta=meta,
    )


def _answer(record: Record) -> tuple[str, ...]:
    why = " (a test set without answers?)"
    return answers(required(record, "answer", why=why), "answer")


def _is_answerable(mark: Any) -> bool:
    """Return a mark as true or false; copies write it as text or as a number.

    Raises:
      ValueError: it is neither.
    """
    known = {"none": True, "true": True, "1": True, "false": False, "0": False}
    found = known.get(str(mark).strip().lower())  # MuSiQue-Ans needs no mark
    if found is None:
        raise ValueError(f"'answerable': expected true or false, found {mark!r}")
    return found


def read_musique(record: Record) -> Question:
    """Read one record of MuSiQue.

    Only `is_supporting` marks gold paragraphs: distractors share their titles.
    """
    if not _is_answerable(record.get("answerable")):
        raise ValueError(
            "unanswerable on purpose (MuSiQue-Full): its paragraphs do not hold the "
            "answer; use the file musique_ans, or leave such records out"
        )
    question = text(record, "question")
    aliases = listed(record, "answer_aliases") if "answer_aliases" in record else []
    golds = answers([*_answer(record), *aliases], "answer_aliases")
    passages = marked_passages(record, "paragraphs")
    name = identity(record, "id")
    return Question(
        id=name,
        dataset="musique",
        question=question,
        golds=golds,
        passages=passages,
        meta={"hops": name.split("__")[0]} if name and "__" in name else {},
    )


def _fits_musique(record: Record) -> bool:
    paragraphs = record.get("paragraphs")
    return "question_decomposition" in record or (
        is_list_of_objects(paragraphs) and "paragraph_text" in paragraphs[0]
    )


def _fits_bare(record: Record) -> bool:
    return (
        {"question", "answer"} <= record.keys()
        and not {"context", "paragraphs", "ctxs"} & record.keys()
        and record.get("type") in _BARE_TYPES
    )


def read_bare(record: Record) -> Question:
    """Read a copy of HotpotQA that kept question and answer only."""
    return Question(
        id=identity(record, "_id", "id"),
        dataset=_multihop_set(record),
        question=text(record, "question"),
        golds=_answer(record),
        meta={"type": record["type"]},
    )


def _fits_twowiki(record: Record) -> bool:
    return _has_paragraphs(record) and is_twowiki(record)


FORMATS = (
    Format("MuSiQue", _fits_musique, read_musique, "musique"),
    Format("2WikiMultihopQA", _fits_twowiki, read_titled, "2wikimultihopqa"),
    Format("HotpotQA", _has_paragraphs, read_titled, "hotpotqa"),
)
WEAK_FORMATS = (
    Format("HotpotQA, questions and answers only", _fits_bare, read_bare, is_weak=True),
)

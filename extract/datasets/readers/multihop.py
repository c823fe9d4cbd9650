"""HotpotQA, 2WikiMultihopQA and MuSiQue: records with their gold paragraphs."""

from typing import Any

from extract.datasets.fields import (
    Record,
    answers,
    identity,
    kind_of,
    listed,
    objects,
    text,
)
from extract.datasets.readers.passages import (
    body_of,
    is_list_of_objects,
    is_titled,
    read_context,
    supporting_titles,
)
from extract.datasets.readers.question import Format, Question, dataset_of_id
from extract.records import Passage

# Tuples: a damaged record may have a list here, which no set can be asked about.
_TWOWIKI_TYPES = ("compositional", "inference", "bridge_comparison")
_HOTPOT_TYPES = ("bridge", "comparison")
_LEVELS = ("easy", "medium", "hard")
_TWOWIKI_KEYS = {"evidences", "evidence", "entity_ids", "evidences_id", "answer_id"}


def is_twowiki(record: Record) -> bool:
    """Tell 2WikiMultihopQA from HotpotQA, whose records are nearly the same.

    What the sets write themselves goes first: a type, an id, a level. Keys that a
    third party may have added to HotpotQA tell only where nothing else does.
    """
    kind = record.get("type")
    if kind == "bridge" or kind in _TWOWIKI_TYPES:
        return kind != "bridge"
    name = record.get("_id", record.get("id"))
    by_id = dataset_of_id(name) if isinstance(name, str) else None
    if by_id in ("hotpotqa", "2wikimultihopqa"):
        return by_id == "2wikimultihopqa"
    if record.get("level") in _LEVELS:
        return False
    return not _TWOWIKI_KEYS.isdisjoint(record)


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


def read_titled(record: Record) -> Question:
    """Read one record of HotpotQA or 2WikiMultihopQA, in any of its layouts."""
    gold = text(record, "question"), answers(_required(record, "answer"), "answer")
    titles = supporting_titles(_required(record, "supporting_facts"))
    passages = read_context(_required(record, "context"), titles)
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
        dataset="2wikimultihopqa" if is_twowiki(record) else "hotpotqa",
        question=gold[0],
        golds=gold[1],
        passages=passages,
        meta=meta,
    )


def _required(record: Record, key: str) -> Any:
    """Return a field that must be there."""
    if key not in record:
        why = " (a test set without answers?)" if key == "answer" else ""
        raise ValueError(f"no {key!r}{why}")
    return record[key]


def _is_answerable(mark: Any) -> bool:
    """Return a mark as true or false; copies write it as text or as a number.

    Raises:
      ValueError: it is neither.
    """
    if mark is None or isinstance(mark, bool):
        return mark is not False  # MuSiQue-Ans has no need of the mark
    found = {"true": True, "1": True, "false": False, "0": False}.get(
        str(mark).strip().lower()
    )
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
    main = answers(_required(record, "answer"), "answer")
    golds = answers([*main, *aliases], "answer_aliases")
    passages = []
    for i, paragraph in enumerate(objects(record, "paragraphs")):
        within = f"paragraphs[{i}]."
        mark = paragraph.get("is_supporting")
        if not isinstance(mark, bool):
            what = "nothing" if mark is None else kind_of(mark)
            raise ValueError(
                f"'{within}is_supporting': expected true or false, found {what}"
            )
        title = paragraph.get("title")
        if not isinstance(title, str):
            raise ValueError(f"'{within}title': expected text, found {kind_of(title)}")
        body = body_of(paragraph, within)
        passages.append(Passage(title=title, text=body, is_supporting=mark))
    if not passages:
        raise ValueError("'paragraphs' is an empty list")
    name = identity(record, "id")
    meta = {"hops": name.split("__")[0]} if name and "__" in name else {}
    return Question(
        id=name,
        dataset="musique",
        question=question,
        golds=golds,
        passages=tuple(passages),
        meta=meta,
    )


def _fits_musique(record: Record) -> bool:
    paragraphs = record.get("paragraphs")
    first = paragraphs[0] if isinstance(paragraphs, list) and paragraphs else None
    return "question_decomposition" in record or (
        isinstance(first, dict) and "paragraph_text" in first
    )


def read_hotpot_words(record: Record) -> Question:
    """Read a copy of HotpotQA that kept question and answer only."""
    return Question(
        id=identity(record, "_id", "id"),
        dataset="2wikimultihopqa" if is_twowiki(record) else "hotpotqa",
        question=text(record, "question"),
        golds=answers(_required(record, "answer"), "answer"),
        meta={"type": record["type"]},
    )


FORMATS = (
    Format(
        name="MuSiQue",
        dataset="musique",
        fits=_fits_musique,
        read=read_musique,
    ),
    Format(
        name="2WikiMultihopQA",
        dataset="2wikimultihopqa",
        fits=lambda r: _has_paragraphs(r) and is_twowiki(r),
        read=read_titled,
    ),
    Format(
        name="HotpotQA",
        dataset="hotpotqa",
        fits=_has_paragraphs,
        read=read_titled,
    ),
)
WEAK_FORMATS = (
    Format(
        name="HotpotQA, questions and answers only",
        fits=lambda r: (
            {"question", "answer"} <= r.keys()
            and not {"context", "paragraphs", "ctxs"} & r.keys()
            and r.get("type") in (*_HOTPOT_TYPES, *_TWOWIKI_TYPES)
        ),
        read=read_hotpot_words,
        is_weak=True,
    ),
)

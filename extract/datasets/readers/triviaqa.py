"""TriviaQA: the authors' objects, and the hub's columnar rows.

Evidence lies in files of its own; `extract.datasets.readers.evidence` reads it.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from extract.datasets.readers.fields import (
    distinct,
    kind_of,
    listed,
    objects,
    text,
    unfold,
)
from extract.datasets.readers.question import Document, Format, Question, Record
from extract.records import Passage


def _alias_golds(
    answer: Any, names: tuple[str, ...], field: str = "Answer"
) -> tuple[str, ...]:
    """Return the canonical answer and its aliases.

    Args:
      answer: an object.
      field: its name, for the message.
      names: of its value, its aliases, its human answers, its normalised aliases;
        the last are used only where there are no others.
    """
    if not isinstance(answer, dict):
        raise ValueError(f"{field!r}: expected an object, found {kind_of(answer)}")
    value, *lists = names
    found: list[str] = []
    if value in answer and answer[value] is not None:
        if not isinstance(answer[value], str):
            raise ValueError(
                f"'{field}.{value}': expected text, found {kind_of(answer[value])}"
            )
        found.append(answer[value])
    for i, name in enumerate(lists):
        if answer.get(name) is None or (i == len(lists) - 1 and any(found)):
            continue
        for j, alias in enumerate(listed(answer, name, within=f"{field}.")):
            if not isinstance(alias, str):
                raise ValueError(
                    f"'{field}.{name}[{j}]': expected text, found {kind_of(alias)}"
                )
            found.append(alias)
    golds = distinct(found)
    if not golds or golds == ("<unk>",):  # the hub's mark of a hidden answer
        raise ValueError(f"{field!r} holds no word: there is no answer")
    return golds


def _documents(record: Record) -> Iterator[Document]:
    """Yield the evidence of a record; a document without a file is left out."""
    for key, kind in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
        if record.get(key) is None:
            continue
        for page in objects(record, key):
            filename = page.get("Filename")
            if isinstance(filename, str) and filename:
                title = page.get("Title")
                title = title if isinstance(title, str) else ""
                yield Document(
                    kind="wikipedia" if kind == "wikipedia" else "web",
                    filename=filename,
                    title=title,
                )


def read_official(record: Record) -> Question:
    """Read one entry of `Data`."""
    question = text(record, "Question")
    if record.get("Answer") is None:
        raise ValueError("no 'Answer' (a test set without answers?)")
    names = ("Value", "Aliases", "HumanAnswers", "NormalizedAliases")
    meta: dict[str, Any] = {}
    if record.get("QuestionPartOfVerifiedEval") is not None:
        meta["verified"] = bool(record["QuestionPartOfVerifiedEval"])
    return Question(
        id=text(record, "QuestionId"),
        dataset="triviaqa",
        question=question,
        golds=_alias_golds(record["Answer"], names),
        documents=tuple(_documents(record)),
        meta=meta,
    )


def _columns(holder: Any, body: str) -> Iterator[Passage]:
    """Yield the pages of the hub's lists side by side."""
    holder = unfold(holder, body)
    if isinstance(holder, list):
        rows = [(row.get("title"), row.get(body)) for row in holder
                if isinstance(row, dict)]  # fmt: skip
    elif isinstance(holder, dict):
        pages, titles = holder.get(body), holder.get("title")
        if not isinstance(pages, list):
            return
        titles = titles if isinstance(titles, list) else []
        rows = itertools.zip_longest(titles, pages)
    else:
        return
    for title, page in rows:
        if isinstance(page, str) and page.strip():
            yield Passage(title=title if isinstance(title, str) else "", text=page)


def read_hub(record: Record) -> Question:
    """Read one row of the hub copy: snake case, lists side by side."""
    if record.get("answer") is None:
        raise ValueError("no 'answer' (a test set without answers?)")
    names = ("value", "aliases", "human_answers", "normalized_aliases")
    return Question(
        id=text(record, "question_id"),
        dataset="triviaqa",
        question=text(record, "question"),
        golds=_alias_golds(unfold(record["answer"], "answer"), names, "answer"),
        passages=(
            *_columns(record.get("entity_pages"), "wiki_context"),
            *_columns(record.get("search_results"), "search_context"),
        ),
    )


FORMATS = (
    Format(
        name="TriviaQA",
        dataset="triviaqa",
        fits=lambda r: (
            "QuestionId" in r
            or ("Question" in r and bool({"Answer", "EntityPages"} & r.keys()))
        ),
        read=read_official,
    ),
    Format(
        name="TriviaQA (hub rows)",
        dataset="triviaqa",
        fits=lambda r: (
            {"question", "question_id"} <= r.keys()
            and (
                bool({"entity_pages", "search_results"} & r.keys())
                or (isinstance(r.get("answer"), dict) and "aliases" in r["answer"])
            )
        ),
        read=read_hub,
    ),
)

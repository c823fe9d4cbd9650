"""TriviaQA: the authors' objects, and the hub's columnar rows.

Evidence lies in files of its own; `extract.datasets.readers.triviaqa` reads it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.datasets.fields import (
    Record,
    distinct,
    kind_of,
    listed,
    objects,
    text,
    unfold,
)
from extract.datasets.readers.question import Document, Format, Question
from extract.label.verdicts import normalise
from extract.records import Passage

N_WORDS = 100  # a passage, as in DPR's psgs_w100


def find_evidence(path: Path) -> Path | None:
    """Return the folder `evidence` beside a question file or above it, or None."""
    for folder in path.absolute().parents[:3]:
        if (folder / "evidence").is_dir():
            return folder / "evidence"
    return None


def read_page(folder: Path, document: Document) -> str | None:
    """Return the text of one page, or None if it is not there or is no UTF-8.

    Raises:
      ValueError: the file name leads out of the evidence folder.
    """
    base = (folder / document.kind).resolve()
    path = (base / document.filename).resolve()
    if not path.is_relative_to(base):
        raise ValueError(
            f"the evidence file {document.filename!r} leads out of the folder {base}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def chunks(page: str) -> Iterator[str]:
    """Yield a page in passages of 100 words."""
    words = page.split()
    for start in range(0, len(words), N_WORDS):
        yield " ".join(words[start : start + N_WORDS])


def mark_first(texts: Sequence[str], golds: Sequence[str]) -> int | None:
    """Return which text is the first to hold a gold answer as whole words, or None."""
    wanted = [f" {found} " for gold in golds if (found := normalise(gold))]
    for i, part in enumerate(texts):
        padded = f" {normalise(part)} "
        if any(gold in padded for gold in wanted):
            return i
    return None


def _passages(title: str, page: str, golds: Sequence[str]) -> Iterator[Passage]:
    """Yield the passages of one page, the first with an answer marked."""
    texts = list(chunks(page))
    first = mark_first(texts, golds)
    for i, part in enumerate(texts):
        yield Passage(title=title, text=part, is_supporting=i == first)


def attach(question: Question, folder: Path | None) -> Question:
    """Return the question with the passages of its pages.

    Whole pages that came with the record (hub rows) are cut up the same way. Pages
    that are not there are counted in `meta`, as TriviaQA's own readers skip them.

    Args:
      question: of TriviaQA.
      folder: holds `wikipedia` and `web`; None if there is none.
    """
    passages = [p for page in question.passages
                for p in _passages(page.title, page.text, question.golds)]  # fmt: skip
    n_missing = 0
    for document in question.documents:
        page = None if folder is None else read_page(folder, document)
        if page is None or not page.strip():
            n_missing += 1
        else:
            passages += _passages(document.title, page, question.golds)
    if not passages and not n_missing:
        return question
    meta = {**question.meta, "evidence": "distant"} if passages else question.meta
    return dataclasses.replace(
        question,
        passages=tuple(passages),
        meta={**meta, "n_missing_documents": n_missing} if n_missing else meta,
    )


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

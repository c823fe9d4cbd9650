"""TriviaQA: the authors' objects with evidence on the side, and the hub's rows."""

import dataclasses
import itertools
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import Record
from beatrice.extract.datasets.question import Document, Format, Question
from beatrice.extract.records import Passage, normalise

N_WORDS = 100  # a passage, as in DPR's psgs_w100
# In running text a mark often stands between two words ("Boulevard (1950)", "a-ha"), so
# it becomes a space, as in TriviaQA's own script; exact match deletes it.
_MARKS = str.maketrans(dict.fromkeys(string.punctuation, " "))


def find_evidence(path: Path) -> Path | None:
    """Return the folder `evidence` beside a question file or above it, or None."""
    for folder in path.absolute().parents[:3]:
        if (folder / "evidence").is_dir():
            return folder / "evidence"
    return None


def read_page(folder: Path, document: Document) -> str | None:
    """Return the text of one page, or None if it is not there or is no UTF-8."""
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


def _words(text: str) -> str:
    return normalise(text.translate(_MARKS))


def _passages(title: str, page: str, golds: Sequence[str]) -> Iterator[Passage]:
    """Yield a page in passages of 100 words.

    The first that holds a gold answer as whole words is marked: distant supervision.
    """
    wanted = [f" {words} " for gold in golds if (words := _words(gold))]
    words = page.split()
    for start in range(0, len(words), N_WORDS):
        body = " ".join(words[start : start + N_WORDS])
        padded = f" {_words(body)} " if wanted else ""
        holds_gold = any(gold in padded for gold in wanted)
        wanted = [] if holds_gold else wanted
        yield Passage(title=title, text=body, is_supporting=holds_gold)


def attach(question: Question, folder: Path | None) -> Question:
    """Return a question of TriviaQA with the passages of its pages in a folder.

    Whole pages that came with the record (hub rows) are cut up the same way. Pages
    that are not there are counted in `meta`, as TriviaQA's own readers skip them.
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


def _golds(answer: Any, names: tuple[str, ...], field: str) -> tuple[str, ...]:
    """Return the canonical answer and its aliases; `field` is the answer's name.

    `names` are those of its value, its aliases, its human answers and its normalised
    aliases; the last are used only where there are no others.
    """
    value, *lists, normalised = names
    texts: list[Any] = [fields.expect(answer, dict, field).get(value) or ""]
    fields.expect(texts[0], str, f"{field}.{value}")
    for name in (*lists, normalised):
        if answer.get(name) is None or (name == normalised and any(texts)):
            continue
        for j, alias in enumerate(fields.listed(answer, name, within=f"{field}.")):
            texts.append(fields.expect(alias, str, f"{field}.{name}[{j}]"))
    golds = fields.distinct(texts)
    if not golds or golds == ("<unk>",):  # the hub's mark of a hidden answer
        raise ValueError(f"{field!r} holds no word: there is no answer")
    return golds


_PAGES: dict[str, Literal["wikipedia", "web"]]
_PAGES = {"EntityPages": "wikipedia", "SearchResults": "web"}


def _documents(record: Record) -> Iterator[Document]:
    """Yield the evidence of a record; a document without a file is left out."""
    for key, kind in _PAGES.items():
        for page in fields.objects(record, key) if record.get(key) is not None else ():
            filename = fields.text_or_empty(page.get("Filename"))
            if filename:
                title = fields.text_or_empty(page.get("Title"))
                yield Document(kind=kind, filename=filename, title=title)


def read_official(record: Record) -> Question:
    """Read one entry of `Data`."""
    question = fields.text(record, "Question")
    if record.get("Answer") is None:
        raise ValueError("no 'Answer' (a test set without answers?)")
    names = ("Value", "Aliases", "HumanAnswers", "NormalizedAliases")
    meta: dict[str, Any] = {}
    if record.get("QuestionPartOfVerifiedEval") is not None:
        meta["verified"] = bool(record["QuestionPartOfVerifiedEval"])
    return Question(
        id=fields.text(record, "QuestionId"),
        dataset="triviaqa",
        question=question,
        golds=_golds(record["Answer"], names, "Answer"),
        documents=tuple(_documents(record)),
        meta=meta,
    )


def _columns(holder: Any, body: str) -> Iterator[Passage]:
    """Yield the pages of the hub's lists side by side."""
    holder = fields.unfold(holder, body)
    rows: Iterable[tuple[Any, Any]] = ()
    if isinstance(holder, list):
        pages = (row for row in holder if isinstance(row, dict))
        rows = ((page.get("title"), page.get(body)) for page in pages)
    elif isinstance(holder, dict) and isinstance(holder.get(body), list):
        titles = holder.get("title")
        titles = titles if isinstance(titles, list) else []
        rows = itertools.zip_longest(titles, holder[body])
    for title, page in rows:
        text = fields.text_or_empty(page)
        if text.strip():
            yield Passage(title=fields.text_or_empty(title), text=text)


def read_hub(record: Record) -> Question:
    """Read one row of the hub copy: snake case, lists side by side."""
    if record.get("answer") is None:
        raise ValueError("no 'answer' (a test set without answers?)")
    names = ("value", "aliases", "human_answers", "normalized_aliases")
    return Question(
        id=fields.text(record, "question_id"),
        dataset="triviaqa",
        question=fields.text(record, "question"),
        golds=_golds(fields.unfold(record["answer"], "answer"), names, "answer"),
        passages=(
            *_columns(record.get("entity_pages"), "wiki_context"),
            *_columns(record.get("search_results"), "search_context"),
        ),
    )


def _fits_official(record: Record) -> bool:
    has_question = "Question" in record and {"Answer", "EntityPages"} & record.keys()
    return "QuestionId" in record or bool(has_question)


def _fits_hub(record: Record) -> bool:
    answer = record.get("answer")
    return {"question", "question_id"} <= record.keys() and (
        bool({"entity_pages", "search_results"} & record.keys())
        or (isinstance(answer, dict) and "aliases" in answer)
    )


FORMATS = (
    Format("TriviaQA", _fits_official, read_official, "triviaqa"),
    Format("TriviaQA (hub rows)", _fits_hub, read_hub, "triviaqa"),
)

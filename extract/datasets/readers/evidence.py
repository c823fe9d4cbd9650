"""TriviaQA's evidence: whole pages beside the questions, cut into passages.

Evidence is distant: a page was kept because an alias occurs in it, which does not make
it support the answer. Of each page the first passage with an alias is marked; the
others are kept unmarked.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from extract.datasets.readers.question import Document, Question
from extract.label.judge import normalise
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
    for i, text in enumerate(texts):
        padded = f" {normalise(text)} "
        if any(gold in padded for gold in wanted):
            return i
    return None


def _passages(title: str, page: str, golds: Sequence[str]) -> Iterator[Passage]:
    """Yield the passages of one page, the first with an answer marked."""
    texts = list(chunks(page))
    first = mark_first(texts, golds)
    for i, text in enumerate(texts):
        yield Passage(title=title, text=text, is_supporting=i == first)


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

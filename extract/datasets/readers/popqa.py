"""PopQA: the published table, its hub copy, and the copies that carry paragraphs."""

import decimal
import math
from typing import Any

from extract.datasets.fields import Record, any_answers, identity, kind_of, text
from extract.datasets.readers.passages import any_passages, titled_passages
from extract.datasets.readers.question import Format, Question

_KEPT = ("subj", "prop", "obj", "s_wiki_title", "o_wiki_title", "s_pop", "o_pop")


def _plain(value: Any, name: str) -> str | int | float | None:
    """Return a cell as a JSON value: Parquet has decimals, pandas NaN for none.

    Raises:
      ValueError: it is neither text nor a number.
    """
    if isinstance(value, decimal.Decimal):
        value = float(value) if value % 1 else int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"{name!r}: expected text or a number, found {kind_of(value)}")


def read_popqa(record: Record) -> Question:
    """Read one row; `possible_answers` is a JSON list written as text.

    The same question occurs in several rows, on subjects of the same name: the id
    tells them apart, the text does not.
    """
    question = text(record, "question")
    if "possible_answers" not in record:
        raise ValueError("no 'possible_answers'")
    golds = any_answers({"possible_answers": record["possible_answers"]})
    found = "paragraphs" in record
    passages = titled_passages(record, "paragraphs") if found else any_passages(record)
    return Question(
        id=identity(record, "id"),
        dataset="popqa",
        question=question,
        golds=golds,
        passages=passages,
        meta={key: _plain(record[key], key) for key in _KEPT if key in record},
    )


FORMATS = (
    Format(
        name="PopQA with paragraphs",
        dataset="popqa",
        fits=lambda r: "possible_answers" in r and "paragraphs" in r,
        read=read_popqa,
    ),
    Format(
        name="PopQA",
        dataset="popqa",
        fits=lambda r: "possible_answers" in r or {"s_wiki_title", "prop"} <= r.keys(),
        read=read_popqa,
    ),
)

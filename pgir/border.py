"""What a user hands in, as checked values: the one place that accepts or refuses it.

The public names (`Scorer`, `Gate`, the adapters) and files pass what they were given
through these functions; what lies behind them holds texts, passages and numbers. Each
raises a ValueError of one sentence that names the argument, what was expected and what
came.
"""

import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from beatrice.extract.records import Passage

_PASSAGE = (
    "a text (str), a mapping with a text under 'text' or 'contents', or a document "
    "with 'page_content'"
)
# How tables give their rows: polars; pyarrow; pandas.
_TABLES = (("to_dicts", ()), ("to_pylist", ()), ("to_dict", ("records",)))


def refuse(name: str, expected: str, value: Any) -> NoReturn:
    """Raise the error of an argument that is not what was expected."""
    shown = type(value).__name__
    if isinstance(value, numbers.Number) or (
        isinstance(value, str) and len(value) <= 40
    ):
        shown = f"{value!r} ({shown})"
    raise ValueError(f"{name}: expected {expected}, found {shown}")


def as_text(value: Any, name: str) -> str:
    """Return a text; it may be empty, which only its reader can judge."""
    if not isinstance(value, str):
        refuse(name, "a text (str)", value)
    return str(value)


def as_texts(values: Any, name: str) -> list[str]:
    """Return a list of texts; one text alone would be read letter by letter."""
    if isinstance(values, str):
        refuse(name, "a list of texts, such as [text]", values)
    if not _is_list(values):
        refuse(name, "a list of texts, such as one column of a table", values)
    return [as_text(value, f"{name}[{i}]") for i, value in enumerate(values)]


def as_count(value: Any, name: str) -> int:
    """Return a whole number from 1 on."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < 1:
        refuse(name, "a whole number from 1 on", value)
    return int(value)


def as_probability(value: Any, name: str) -> float:
    """Return a probability in (0, 1]."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:
        refuse(name, "a probability above 0 and at most 1", value)
    return float(value)


def as_path(value: Any, name: str) -> Path:
    """Return a path."""
    if not isinstance(value, (str, os.PathLike)):
        refuse(name, "a path (str or Path)", value)
    return Path(value)


def as_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return whole numbers, such as token ids; arrays and tensors are read too."""
    values = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(values, (list, tuple)) and all(
        isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in values
    )
    if not is_list:
        refuse(name, "a list of whole numbers", value)
    return tuple(int(n) for n in values)


def as_range(value: Any, name: str) -> tuple[int, int]:
    """Return characters `[start, stop)`, at least one."""
    ids = as_ids(value, name)
    if len(ids) != 2 or not 0 <= ids[0] < ids[1]:
        raise ValueError(
            f"{name}: expected [start, stop) with 0 <= start < stop, found {list(ids)}"
        )
    return ids[0], ids[1]


def as_messages(value: Any, name: str) -> tuple[Mapping[str, str], ...]:
    """Return chat messages, at least one, each with texts `role` and `content`."""
    if not isinstance(value, (list, tuple)) or not value:
        refuse(name, "a list of at least one message", value)
    for i, message in enumerate(value):
        is_message = isinstance(message, Mapping) and all(
            isinstance(message.get(field), str) for field in ("role", "content")
        )
        if not is_message:
            expected = "a mapping with texts role and content"
            refuse(f"{name}[{i}]", expected, message)
    return tuple(value)


def from_document(contents: str) -> Passage:
    """Return the passage of a document: title, in quotes or not, line end, text."""
    first, end, rest = contents.partition("\n")
    if not end:
        return Passage(title="", text=contents)
    is_quoted = len(first) > 1 and first[0] == first[-1] == '"'
    return Passage(title=first[1:-1] if is_quoted else first, text=rest)


def as_passage(value: Any, name: str) -> Passage:
    """Return a passage.

    Args:
      value: a text; a mapping with `text` and perhaps `title`, or with `contents` as
        FlashRAG and Search-R1 write it (see `from_document`); a document with
        `page_content` and perhaps a `title` in its `metadata`, as LangChain's; or a
        `Passage`.
      name: of the argument, for the message.
    """
    if isinstance(value, str):
        return Passage(title="", text=str(value))
    if isinstance(value, Passage):
        return Passage(title=value.title, text=value.text)
    title: Any = ""
    if isinstance(value, Mapping):
        if isinstance(value.get("contents"), str) and "text" not in value:
            return from_document(value["contents"])
        title, text = value.get("title"), value.get("text")
    else:
        text = getattr(value, "page_content", None)
        metadata = getattr(value, "metadata", None)
        if isinstance(metadata, Mapping):
            title = metadata.get("title")
    if not isinstance(text, str):
        refuse(name, _PASSAGE, value)
    if title is not None and not isinstance(title, str):
        refuse(f"the title of {name}", "a text (str)", title)
    return Passage(title=title or "", text=text)


def _is_passage(value: Any) -> bool:
    return isinstance(value, (str, Mapping, Passage)) or hasattr(value, "page_content")


def as_passages(value: Any, name: str) -> tuple[Passage, ...]:
    """Return the passages of a context: None has none, one alone is a context of one.

    Args:
      value: None, what `as_passage` reads, or several of these.
      name: of the argument, for the message.
    """
    if value is None:
        return ()
    if _is_passage(value):
        return (as_passage(value, name),)
    if _is_table(value):
        value = _table_rows(value)
    if not _is_list(value):
        refuse(name, f"{_PASSAGE}, a list of these, or None for closed-book", value)
    return tuple(as_passage(one, f"{name}[{i}]") for i, one in enumerate(value))


def as_rows(value: Any, name: str) -> list[Any]:
    """Return the rows of a table or list; what a row holds is checked row by row.

    A missing cell of a table (NaN, NA) is left out of its row.

    Args:
      value: a data frame (pandas, polars, pyarrow), or any iterable of rows.
      name: of the argument, for the message.
    """
    if _is_table(value):
        return _table_rows(value)
    if not _is_list(value):
        refuse(name, "a list of rows or a data frame", value)
    return list(value)


def _is_list(value: Any) -> bool:
    """Tell whether a value is several of something, and neither a text nor a table."""
    is_one = isinstance(value, (str, bytes, Mapping)) or _is_table(value)
    return isinstance(value, Iterable) and not is_one


def _is_table(value: Any) -> bool:
    return hasattr(value, "columns") and any(hasattr(value, m) for m, _ in _TABLES)


def _table_rows(table: Any) -> list[dict[str, Any]]:
    method, arguments = next((m, a) for m, a in _TABLES if hasattr(table, m))
    return [_without_missing(row) for row in getattr(table, method)(*arguments)]


def _without_missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the cells that hold nothing."""
    return {key: value for key, value in row.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    if isinstance(value, float):
        return value != value
    return value is None or type(value).__name__ in ("NAType", "NaTType")

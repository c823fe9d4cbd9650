"""Checks and converts users' arguments: the one place that accepts or rejects them.

The public classes (`Scorer`, `Gate`, the adapters) and the readers of files pass their
input through these functions, so that all other code can rely on texts, passages and
numbers. Each function raises a ValueError of one sentence that names the argument, what
was expected and what was found.
"""

import math
import numbers
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.extract.datasets.fields import as_listed
from beatrice.extract.records import Passage

_PASSAGE = (
    "a text (str), a mapping with a text under 'text', 'contents' or 'page_content', "
    "or a document with 'page_content'"
)
_OF_DOCUMENT = ("page_content", "metadata")
# The methods that return a table's rows, in polars, pyarrow, datasets and pandas.
_TABLES = (
    ("to_dicts", ()),
    ("to_pylist", ()),
    ("to_list", ()),
    ("to_dict", ("records",)),
)


def argument_error(name: str, expected: str, value: Any) -> ValueError:
    """Return the error for an argument that is not what was expected."""
    shown = type(value).__name__
    is_short = isinstance(value, str) and len(value) <= 40
    if is_short or isinstance(value, numbers.Number):
        shown = f"{value!r} ({shown})"
    return ValueError(f"{name}: expected {expected}, found {shown}")


def as_text(value: Any, name: str) -> str:
    """Return a text; it may be empty, since only the caller knows if that is wrong."""
    if not isinstance(value, str):
        raise argument_error(name, "a text (str)", value)
    return str(value)


def as_list(values: Any, name: str, expected: str) -> list[Any]:
    """Return a list; a single text is refused, as it would be read letter by letter."""
    # `tolist` of an array or tensor gives Python numbers, and None for masked values.
    several = values.tolist() if hasattr(values, "tolist") else values
    if not _is_several(several):
        raise argument_error(name, expected, values)
    return list(several)


def as_list_of_length(
    values: Any, name: str, kind: str, n: int, what: str = "answer"
) -> list[Any]:
    """Return a list with one entry for each of `n` answers, or what `what` names."""
    entries = as_list(values, name, f"a list of {kind}, one for each {what}")
    if len(entries) != n:
        raise ValueError(
            f"{name}: expected one for each of {n} {what}s, found {len(entries)}"
        )
    return entries


def as_labels(values: Any, n_answers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each answer is right, and whether that is known, `[n_answers]`."""
    kind = "True, False or None"
    labels = as_list_of_length(values, "labels", kind, n_answers)
    for number, label in enumerate(labels):
        if not is_missing(label) and (np.ndim(label) or label not in (0, 1)):
            raise argument_error(f"labels[{number}]", kind, label)
    is_labelled = np.array([not is_missing(label) for label in labels], bool)
    return np.array([not is_missing(x) and bool(x) for x in labels], bool), is_labelled


def as_names(values: Any, name: str, n_answers: int) -> np.ndarray:
    """Return a name for each answer, such as its group's, `[n_answers]`.

    A float such as 1.0, as in a column that had gaps, is read as 1.
    """
    names = as_list_of_length(values, name, "names", n_answers)
    for number, value in enumerate(names):
        if is_missing(value):  # all missing names would form one group
            raise argument_error(f"{name}[{number}]", "a name", value)
        if isinstance(value, float) and value.is_integer():
            names[number] = int(value)
    return np.array([*map(str, names)])


def as_splits(values: Any, n_answers: int, known: Sequence[str]) -> np.ndarray:
    """Return the split of each answer, `[n_answers]`; "" leaves an answer out."""
    kind = ", ".join(map(repr, known))
    names = [*map(str, as_list_of_length(values, "splits", kind, n_answers))]
    if odd := [name for name in names if name not in known]:
        raise ValueError(f"splits: expected {kind}, found {odd[0]!r}")
    return np.array(names)


def as_texts(values: Any, name: str) -> list[str]:
    """Return a list of texts."""
    expected = "a list of texts, such as [text] or one column of a table"
    texts = as_list(values, name, expected)
    return [as_text(value, f"{name}[{i}]") for i, value in enumerate(texts)]


def as_contexts(values: Any, n_questions: int) -> list[tuple[Passage, ...]]:
    """Return every question's passages (see `as_passages`); None gives none to any."""
    if values is None:
        return [()] * n_questions
    contexts = as_list_of_length(
        values, "contexts", "passages", n_questions, "question"
    )
    if hasattr(values, "to_list"):  # a column of a table (pandas, polars)
        contexts = [Cell(c) if isinstance(c, str) else c for c in contexts]
    shown = [as_passages(c, f"contexts[{i}]") for i, c in enumerate(contexts)]
    for i, passages in enumerate(shown):
        if not passages:
            raise ValueError(
                f"contexts[{i}]: expected at least one passage, found none; leave "
                "contexts out to ask closed-book"
            )
    return shown


def as_count(value: Any, name: str, least: int = 1) -> int:
    """Return a whole number of at least `least`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise argument_error(name, f"a whole number of at least {least}", value)
    return int(value)


def as_temperature(value: Any, name: str) -> float:
    """Return a finite number of at least 0."""
    temperature = _as_float(value)
    if not 0 <= temperature < math.inf:
        raise argument_error(name, "a finite number of at least 0", value)
    return temperature


def as_probability(value: Any, name: str) -> float:
    """Return a probability in (0, 1]."""
    probability = _as_float(value)
    if not 0 < probability <= 1:
        raise argument_error(name, "a probability above 0 and at most 1", value)
    return probability


def _as_float(value: Any) -> float:
    """Return a number as a float, and NaN for anything else."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def as_path(value: Any, name: str) -> Path:
    """Return a path, with ~ replaced by the user's home."""
    if not isinstance(value, (str, os.PathLike)) or value == "":
        raise argument_error(name, "a path (str or Path)", value)
    return Path(os.path.expanduser(value))  # Path.expanduser raises for unknown users


def as_place(value: Any, name: str) -> str | Path:
    """Return a URL as it is, and anything else as a path, see `as_path`."""
    is_url = isinstance(value, str) and "://" in value
    return value if is_url else as_path(value, name)


def as_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return whole numbers, such as token ids, from a list, an array or a tensor."""
    values = as_list(value, name, "a list of whole numbers")
    for i, n in enumerate(values):
        if not isinstance(n, numbers.Integral) or isinstance(n, bool):
            raise argument_error(f"{name}[{i}]", "a whole number", n)
    return tuple(int(n) for n in values)


def as_range(value: Any, name: str) -> tuple[int, int]:
    """Return a range `[start, stop)` of at least one character."""
    ids = as_ids(value, name)
    if len(ids) != 2 or not 0 <= ids[0] < ids[1]:
        raise ValueError(
            f"{name}: expected [start, stop) with 0 <= start < stop, found {list(ids)}"
        )
    return ids[0], ids[1]


def as_messages(value: Any, name: str) -> tuple[Mapping[str, str], ...]:
    """Return chat messages, at least one, each with texts `role` and `content`.

    A content may also be a list of a single text part, as servers accept it. Several
    parts are refused, since every server joins them in another way.
    """
    expected = "a list of at least one message"
    messages = [_with_text(message) for message in as_list(value, name, expected)]
    if not messages:
        raise argument_error(name, expected, value)
    for i, message in enumerate(messages):
        is_message = isinstance(message, Mapping) and all(
            isinstance(message.get(field), str) for field in ("role", "content")
        )
        if not is_message:
            expected = "a mapping with texts role and content"
            raise argument_error(f"{name}[{i}]", expected, message)
    return tuple(messages)


def _with_text(message: Any) -> Any:
    """Return a message, replacing a content of one text part with its text."""
    match message:
        case {"content": [{"type": "text", "text": text}]}:
            return {**message, "content": text}
    return message


def from_document(contents: str) -> Passage:
    """Return a document's passage: the first line is its title, quoted or not."""
    first, end, rest = contents.partition("\n")
    if not end:
        return Passage(title="", text=contents)
    is_quoted = len(first) > 1 and first[0] == first[-1] == '"'
    return Passage(title=first[1:-1] if is_quoted else first, text=rest)


def as_passage(value: Any, name: str) -> Passage:
    """Return a passage; `name` is the argument's name for error messages.

    The value is a text; a mapping with `text` and perhaps `title`, or with `contents`
    as FlashRAG and Search-R1 write it (see `from_document`); a document or mapping with
    `page_content` and perhaps a `title` in its `metadata`, as in LangChain; or a
    `Passage`. A title may be a number, or missing in any way that tables mark it.
    """
    if isinstance(value, str):
        return Passage(title="", text=str(value))
    fields = value
    if not isinstance(value, Mapping):
        names = ("title", "text") if isinstance(value, Passage) else _OF_DOCUMENT
        fields = {field: getattr(value, field, None) for field in names}
    title, text = fields.get("title"), fields.get("text")
    if "text" not in fields:
        if isinstance(contents := fields.get("contents"), str):
            return from_document(contents)
        text, metadata = fields.get("page_content"), fields.get("metadata")
        if (is_missing(title) or title == "") and isinstance(metadata, Mapping):
            title = metadata.get("title")
    if not isinstance(text, str):
        raise argument_error(name, _PASSAGE, value)
    title = "" if is_missing(title) else title
    if not isinstance(title, (str, numbers.Real)):
        raise argument_error(f"the title of {name}", "a text (str)", title)
    return Passage(title=str(title), text=text)


def is_passage(value: Any) -> bool:
    """Return whether a value represents a single passage."""
    kinds = (str, Mapping, Passage)
    return isinstance(value, kinds) or hasattr(value, "page_content")


class Cell(str):
    """A text in a table, which may hold a list as JSON; a blank one is missing."""


def as_passages(value: Any, name: str) -> tuple[Passage, ...]:
    """Return the passages of a context: a list, a single passage, or None for none."""
    if isinstance(value, Cell):
        value = as_listed(str(value), name)
    if value is None:
        return ()
    if is_passage(value):
        return (as_passage(value, name),)
    if _is_table(value):
        value = _table_rows(value)
    if not _is_several(value):
        expected = f"{_PASSAGE}, a list of these, or None for closed-book"
        raise argument_error(name, expected, value)
    return tuple(as_passage(item, f"{name}[{i}]") for i, item in enumerate(value))


def as_rows(value: Any, columns: Collection[str]) -> list[Any]:
    """Return the rows of a table (pandas, polars, pyarrow, datasets) or any iterable.

    Named tuples and series count as rows of a frame (pandas' `itertuples`, `iloc`).
    Missing cells (NaN, NA) are left out of a frame's rows; a cell of `context` may hold
    a list as JSON, as in a file of answers. A warning names the columns that are not
    read, except `id`, which is left out of mappings too. The contents of rows are not
    checked here.
    """
    if _is_table(value):
        rows: list[Any] = _table_rows(value)
        of_frame = dict(enumerate(rows))
    else:
        rows = as_list(value, "rows", "a list of rows or a data frame")
        of_frame = {}
        for i, row in enumerate(rows):
            cells_of = getattr(row, "_asdict", None) or getattr(row, "to_dict", None)
            if cells_of is not None and not _is_table(row):
                of_frame[i] = _present_cells(cells_of())
                of_frame[i].pop("Index", None)  # of pandas
    columns_there = {key: None for row in of_frame.values() for key in row}
    if unread := [key for key in columns_there if key not in (*columns, "id")]:
        names = ", ".join(map(repr, unread))
        warnings.warn(f"rows: columns not read: {names}", stacklevel=3)
    for i, row in of_frame.items():
        rows[i] = {key: row[key] for key in row if key in columns}
        if isinstance(context := row.get("context"), str):
            rows[i]["context"] = Cell(context)
    for i, row in enumerate(rows):
        if isinstance(row, Mapping) and "id" in row:
            rows[i] = {key: row[key] for key in row if key != "id"}
    return rows


def _is_several(value: Any) -> bool:
    """Return whether a value is an iterable, and neither a text nor a table."""
    is_single = isinstance(value, (str, bytes, Mapping)) or _is_table(value)
    return isinstance(value, Iterable) and not is_single


def _is_table(value: Any) -> bool:
    methods = (method for method, _ in _TABLES)
    has_columns = hasattr(value, "columns") or hasattr(value, "column_names")
    return has_columns and any(hasattr(value, method) for method in methods)


def _table_rows(table: Any) -> list[dict[str, Any]]:
    method, arguments = next((m, a) for m, a in _TABLES if hasattr(table, m))
    return [_present_cells(row) for row in getattr(table, method)(*arguments)]


def _present_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not is_missing(value)}


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or NA, as tables mark missing cells."""
    if isinstance(value, numbers.Real):
        return value != value
    return value is None or type(value).__name__ in ("NAType", "NaTType")

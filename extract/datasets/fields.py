"""Values out of a raw record.

What cannot be had is a ValueError; its text is why the record is refused.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Record = Mapping[str, Any]  # as it lies in a file
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# The one known table without a header is DPR's: question, list of answers.
HEADERLESS = ("column 1", "column 2")
_LITERAL_CHARACTERS = 1 << 20  # of a list written as text; the longest known is 20 kB
# A Python list of texts without quotes or backslashes inside: most of DPR's rows,
# which are read nearly twice as fast as by the parser of the language alone.
_ENTRY = re.compile(r"'([^'\\\n]*)'")
_PLAIN_LIST = re.compile(r"\['[^'\\\n]*'(?:, '[^'\\\n]*')*+\]")
# A text ends and another begins, which Python would join.
_NO_COMMA = re.compile(r"""[^\\\s\[,](['"])\s+['"]""")
_OPENS_A_LIST = re.compile(r"""[\[{]\s*['"\]}]""")
_MISSING = ("null", "NULL", "nan", "NaN", "None", "<NA>")  # as tables and logs write it
_SINGULAR = ("answer", "reference", "target")  # names under which a plain text is usual
_IN_ORDER = ("answers", "answer", "golden_answers", "ground_truth", "short_answers",
             "possible_answers", "gold_answers", "golds", "reference")  # fmt: skip


def kind_of(value: Any) -> str:
    """Return a value's kind in words."""
    return _KINDS.get(type(value), type(value).__name__)


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return a value of a kind; `name` is the field's, for the message."""
    if isinstance(value, kind):
        return value
    raise ValueError(f"{name!r}: expected {_KINDS[kind]}, found {kind_of(value)}")


def required(record: Record, key: str, *, within: str = "", why: str = "") -> Any:
    """Return a field that must be there; `within` says in which object it lies."""
    if key not in record:
        raise ValueError(f"no {within + key!r}{why}")
    return record[key]


def text(record: Record, key: str, *, within: str = "") -> str:
    """Return a text that must be there and not empty, without outer white space."""
    value = required(record, key, within=within)
    if value is None:
        raise ValueError(f"{within + key!r} is null")
    value = expect(value, str, within + key).strip()
    if not value:
        raise ValueError(f"{within + key!r} is empty")
    return value


def text_or_empty(value: Any) -> str:
    """Return a text; of anything else, which is not worth a refusal, nothing."""
    return value if isinstance(value, str) else ""


def listed(record: Record, key: str, *, within: str = "") -> list[Any]:
    """Return a list that must be there; it may be empty."""
    return expect(required(record, key, within=within), list, within + key)


def objects(record: Record, key: str, *, within: str = "") -> list[Record]:
    """Return a list of objects that must be there."""
    items = listed(record, key, within=within)
    return [expect(one, dict, f"{within}{key}[{i}]") for i, one in enumerate(items)]


def identity(record: Record, *keys: str) -> str | None:
    """Return the first id that is there as text; ids may be whole numbers."""
    for key in keys:
        value = record.get(key)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"{key!r}: expected an id, found {kind_of(value)}")
        return str(value).strip() or None
    return None


def unfold(value: Any, name: str) -> Any:
    """Return what a text holds that begins like a list or an object.

    JSON, or a Python literal as DPR's files and copies of PopQA have it; anything else
    is returned as it is.

    Raises:
      ValueError: it is neither.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] not in ("[", "{"):
        return value
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _literal(text, name)


def _literal(text: str, name: str) -> Any:
    """Return a Python literal; NumPy prints arrays like one, without its commas."""
    if _PLAIN_LIST.fullmatch(text):
        return _ENTRY.findall(text)
    if len(text) <= _LITERAL_CHARACTERS and not _NO_COMMA.search(text):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of "\ " and the like inside a string
                return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    raise ValueError(
        f"{name!r}: expected a list as JSON or as a Python literal, commas between "
        f"its texts, found {text[:40]!r}"
    )


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts in order, stripped, without empty and repeated ones."""
    stripped = (text.strip() for text in texts)
    return tuple(dict.fromkeys(text for text in stripped if text))


def answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a field's value, one text or a list of texts.

    Repetitions and empty entries are left out: an empty answer accepts everything.
    """
    if value is None:
        raise ValueError(f"{name!r} is null: there is no answer")
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(
            f"{name!r}: expected text or a list of texts, found {kind_of(value)}"
        )
    found = distinct(expect(one, str, f"{name}[{i}]") for i, one in enumerate(items))
    if not found:
        what = "is an empty list" if not items else "holds no word"
        raise ValueError(f"{name!r} {what}: there is no answer")
    return found


def any_answers(record: Record) -> tuple[str, ...]:
    """Return the accepted answers under whichever of their names is there."""
    name = next((name for name in _IN_ORDER if name in record), None)
    if name is None:
        raise ValueError("no answer field (a test set without answers?)")
    return field_answers(record[name], name)


def field_answers(value: Any, name: str) -> tuple[str, ...]:
    """Return the accepted answers in a field that may hold a list written as text."""
    return answers(_answers_of_text(value, name), name)


def _answers_of_text(value: Any, name: str) -> Any:
    """Return the list that a text holds; a plain answer as it is.

    Under a singular name a text may begin with a bracket ("[Chorus] hey").
    """
    text = value.strip() if isinstance(value, str) else ""
    if text in _MISSING:
        raise ValueError(
            f"{name!r}: expected an answer, found {text!r}, the sign of a missing value"
        )
    is_plural = name not in _SINGULAR
    if "|" in text and is_plural and text[0] != "[":
        raise ValueError(
            f"{name!r}: expected a list, found {text[:40]!r}; whether the bars part "
            "several answers cannot be told, save the list as JSON"
        )
    return unfold(value, name) if is_plural or _OPENS_A_LIST.match(text) else value


def has_answers(record: Record) -> bool:
    """Tell whether any known name of an answer field is there."""
    return any(name in record for name in _IN_ORDER)

"""What is known of a question: the example, the model's answer, and its label.

Records are frozen dataclasses and live on disk as one JSON object per line. An
unknown or missing field is an error that names the file and the line, so that a
renamed column cannot turn into an empty one.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

Setting = Literal["closed_book", "with_context"]
Variant = Literal["original", "rewritten"]
Split = Literal["train", "validation", "test", "ood"]

SETTINGS: tuple[Setting, ...] = ("closed_book", "with_context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """One retrieved or supplied passage."""

    title: str
    text: str
    is_supporting: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its gold answers and, where supplied, its passages.

    Attributes:
      id: unique over the whole run.
      dataset: name of the question set; in-domain sets share the splits train,
        validation and test, held-out sets have the split `ood`.
      golds: accepted answers (aliases); at least one.
      passages: the context of the with-context setting, original wording.
      rewritten: the same context in other words, or empty where there is none.
      meta: what the generator or the source knows beside (JSON values only).
    """

    id: str
    dataset: str
    split: Split
    question: str
    golds: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    rewritten: tuple[Passage, ...] = ()
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def context(self, variant: Variant) -> tuple[Passage, ...]:
        """Return the passages of one variant."""
        return self.passages if variant == "original" else self.rewritten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said, with the exact ids it read and wrote.

    Attributes:
      prompt_ids: the ids the model read, special tokens included.
      token_ids: the ids it wrote, without the stop token; may be empty.
      stop_id: the stop token it emitted, or None if the answer was cut at the
        length limit.
      context_span: `[start, stop)` of the passages inside `prompt_ids`; equal
        numbers where there is no context.
      dropped: places (from 0) of the passages that were left out of the context
        because the prompt would not have fitted the model's window.
    """

    example_id: str
    setting: Setting
    variant: Variant
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    stop_id: int | None
    context_span: tuple[int, int]
    dropped: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies this row: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label:
    """Whether an answer is right.

    Attributes:
      verdicts: one entry per judge, in the judges' order.
      label: True, False, or None where the judges do not agree.
      reason: how the label came about, in words.
    """

    example_id: str
    setting: Setting
    variant: Variant
    verdicts: tuple[str, ...]
    label: bool | None
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies this row: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)


RecordT = TypeVar("RecordT", Example, Answer, Label, Passage)


def to_json(record: RecordT) -> str:
    """Return the record as one line of JSON, without the line end."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=True)


def _revive(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON value into a field value of the annotated type."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _from_object(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {type(value).__name__}")
        element = typing.get_args(kind)[0]
        if element in (int, str) and all(type(item) is element for item in value):
            return tuple(value)  # token ids: the bulk of every file
        return tuple(_revive(element, item, where) for item in value)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise ValueError(
                f"{where}: expected one of {', '.join(typing.get_args(kind))}, "
                f"found {value!r}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return _revive(inner[0], value, where)
    expected = origin if origin is not None else kind
    if not isinstance(value, expected) or (expected is int and value is True):
        raise ValueError(
            f"{where}: expected {expected.__name__}, found {type(value).__name__}"
        )
    return value


@functools.cache
def _schema(kind: type) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """Return a record's fields and their types; resolving them is slow."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return fields, typing.get_type_hints(kind)


def _from_object(kind: type, value: Any, where: str) -> Any:
    """Build one dataclass from a JSON object; names what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {type(value).__name__}")
    fields, hints = _schema(kind)
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ValueError(
            f"{where}: unknown field {unknown[0]!r} in a {kind.__name__}; "
            f"known fields are {', '.join(fields)}"
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: a {kind.__name__} needs the field {missing[0]!r}")
    return kind(
        **{
            name: _revive(hints[name], item, f"{where}, field {name!r}")
            for name, item in value.items()
        }
    )


class _NotSo(Exception):
    """A value is not what its annotation says."""


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what `_revive` does for one type, without a word on what is wrong.

    Files hold tens of thousands of records and are read by every stage: this is four
    times as fast, and `_revive` explains what this refuses.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _object_reader(kind)
    if origin is tuple:
        return _tuple_reader(args[0])
    if origin is Literal:
        return lambda value: _only(value, value in args)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(k for k in args if k is not type(None)))
        return lambda value: None if value is None else inner(value)
    expected = origin if origin is not None else kind
    return lambda value: _only(value, type(value) is expected)


def _only(value: Any, is_so: bool) -> Any:
    if not is_so:
        raise _NotSo
    return value


def _tuple_reader(element: Any) -> Callable[[Any], tuple]:
    if element in (int, str):
        kinds = {element}
        return lambda value: tuple(
            _only(value, type(value) is list and set(map(type, value)) <= kinds)
        )
    inner = _reader(element)
    return lambda value: tuple(map(inner, _only(value, type(value) is list)))


def _object_reader(kind: type) -> Callable[[Any], Any]:
    fields, hints = _schema(kind)
    readers = {name: _reader(hints[name]) for name in fields}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        _only(value, type(value) is dict and required <= value.keys() <= fields.keys())
        return kind(**{name: readers[name](item) for name, item in value.items()})

    return read


def from_json(kind: type[RecordT], line: str, where: str) -> RecordT:
    """Parse one line.

    Args:
      kind: the record's class.
      line: one JSON object.
      where: file and line number, for the message.

    Raises:
      ValueError: the line is not such a record; the message says where and why.
    """
    try:
        return _reader(kind)(orjson.loads(line))
    except (orjson.JSONDecodeError, _NotSo):
        pass  # it is wrong, or something that the slower way knows and this does not
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object ({error.msg})") from None
    return _from_object(kind, value, where)


def read_records(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Yield the records of a JSON-lines file; blank lines are an error."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            yield from_json(kind, line, f"{path}, line {number}")


def write_lines(records: Iterable[RecordT]) -> str:
    """Return the records as JSON lines."""
    return "".join(to_json(record) + "\n" for record in records)

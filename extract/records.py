"""What is known of a question: the example, the model's answer, and its label.

Records are frozen structs and live on disk as one JSON object per line. An unknown or
missing field is an error that names the file and the line, so that a renamed column
cannot turn into an empty one. To change a field: `msgspec.structs.replace`.
"""

import functools
import json
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

Setting = Literal["closed_book", "with_context"]
Variant = Literal["original", "rewritten"]
Split = Literal["train", "validation", "test", "ood"]

SETTINGS: tuple[Setting, ...] = ("closed_book", "with_context")
# No vocabulary is larger; whether an id is one of the model's is seen at its tokenizer.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all records are: they do not change, and have no fields but their own."""


class Passage(Record, frozen=True, kw_only=True):
    """One retrieved or supplied passage."""

    title: str
    text: str
    is_supporting: bool = False


class Example(Record, frozen=True, kw_only=True):
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
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def context(self, variant: Variant) -> tuple[Passage, ...]:
        """Return the passages of one variant."""
        return self.passages if variant == "original" else self.rewritten


class Answer(Record, frozen=True, kw_only=True):
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
    prompt_ids: tuple[TokenId, ...]
    token_ids: tuple[TokenId, ...]
    stop_id: TokenId | None
    context_span: tuple[int, int]
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a context that does not lie in the prompt."""
        start, stop = self.context_span
        if not 0 <= start <= stop <= len(self.prompt_ids):
            raise ValueError(
                f"context_span is [{start}, {stop}], expected [start, stop) inside the "
                f"{len(self.prompt_ids)} ids of the prompt"
            )

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies this row: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)


class Label(Record, frozen=True, kw_only=True):
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


RecordT = TypeVar("RecordT", bound=Record)
Decoded = TypeVar("Decoded")


def to_json(record: Record) -> str:
    """Return the record as one line of JSON, without the line end.

    Python's own writer, not msgspec's: manifests hold hashes of its very bytes.
    """
    return json.dumps(record, default=msgspec.structs.asdict)


@functools.cache
def _decoder(kind: type[Decoded]) -> msgspec.json.Decoder[Decoded]:
    return msgspec.json.Decoder(kind)


def from_json(
    kind: type[Decoded], line: str | bytes, where: str, what_to_do: str = ""
) -> Decoded:
    """Parse one JSON value as a type.

    Args:
      kind: a record's class, or another type that msgspec knows.
      line: the JSON text.
      where: file, and line number where it has several, for the message.
      what_to_do: ends the message.

    Raises:
      ValueError: the text is not such a value; the message says where and why.
    """
    try:
        return _decoder(kind).decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # it is wrong, or has a NaN in `meta`, which Python writes and reads
    try:
        return msgspec.convert(json.loads(line), kind)
    except msgspec.ValidationError as error:
        wrong = _in_words(kind, str(error))
    except UnicodeDecodeError:
        wrong = ": not a JSON object (not UTF-8)"
    except RecursionError:
        wrong = ": not a JSON object (nested too deeply)"
    except ValueError as error:
        wrong = f": not a JSON object ({getattr(error, 'msg', error)})"
    raise ValueError(f"{where}{wrong}{what_to_do and '; '}{what_to_do}")


def _in_words(kind: Any, complaint: str) -> str:
    """Return what msgspec says ("Expected `int`, got `str` - at `$.stop_id`")."""
    what, _, path = complaint.partition(" - at `$")
    path = path.strip(".`")
    # A record that lies inside another one is told apart where there is one such.
    holder = kind if not path else Passage if kind is Example else None
    holder = holder if hasattr(holder, "__struct_fields__") else None
    a_holder = f"a {holder.__name__}" if holder else "an object"
    name = what.split("`")[1] if "`" in what else ""
    if what.startswith("Object contains"):
        what = f"unknown field {name!r} in {a_holder}"
        if holder:
            what += f"; known fields are {', '.join(holder.__struct_fields__)}"
    elif what.startswith("Object missing"):
        what = f"{a_holder} needs the field {name!r}"
    elif what.startswith("Invalid enum value "):
        found = what.removeprefix("Invalid enum value ")
        hints = typing.get_type_hints(kind) if isinstance(kind, type) else {}
        choices = typing.get_args(hints.get(path))
        known = f"one of {', '.join(map(str, choices))}" if choices else "another value"
        what = f"expected {known}, found {found}"
    else:
        what = what.replace("`", "").replace("Expected", "expected")
        what = what.replace(", got", ", found")
    return f", field {path!r}: {what}" if path else f": {what}"


def read_json(path: Path, kind: type[Decoded], what_to_do: str) -> Decoded:
    """Return what a JSON file of a run holds.

    Args:
      path: the file.
      kind: what it is expected to hold.
      what_to_do: where it does not, in words.

    Raises:
      ValueError: it is missing or holds something else; names file and field.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing; {what_to_do}") from None
    return from_json(kind, content, str(path), what_to_do)


def read_records(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Yield the records of a JSON-lines file; blank lines are an error."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield from_json(kind, line, f"{path}, line {number}")


def write_lines(records: Iterable[Record]) -> str:
    """Return the records as JSON lines."""
    return "".join(to_json(record) + "\n" for record in records)

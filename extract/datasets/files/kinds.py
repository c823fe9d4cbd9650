"""What a file is, told by its bytes and never by its name.

Published copies carry JSON lines in `.json`, tabs in `.csv` and arrays in `.jsonl`,
so the first bytes decide: gzip or not, then Parquet, a JSON array, a JSON object
around a list, JSON lines, or a table. Everything else is refused with what it is.
"""

import contextlib
import csv
import dataclasses
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import msgspec

# A list under one of these names, in an object around it, is the list of records.
LIST_KEYS = ("Data", "data", "rows", "examples", "questions", "instances")
# An object with one of these is a record, not something around records.
_RECORD_KEYS = {"question", "Question", "question_text", "query", "golden_answers"}
# Text here holds a character for each byte (Latin-1), and may end anywhere.
_KEY = re.compile(r'[\s,{]*+("(?:[^"\\]++|\\.)*+")\s*+:\s*+', re.ASCII | re.DOTALL)
_LIST_OF_OBJECTS = re.compile(r"\[\s*[{\]]", re.ASCII)
_decode = json.JSONDecoder().raw_decode


def _list_key_of(text: str) -> str | None:
    """Return the name of the list of records that the object at 0 is around.

    A record is no such object, though a third party gave it a list under one of the
    names.
    """
    at, list_key = 0, None
    while key := _KEY.match(text, at):
        name, at = key[1][1:-1], key.end()
        if name in _RECORD_KEYS:
            return None
        if name in LIST_KEYS and _LIST_OF_OBJECTS.match(text, at):
            list_key = list_key or name
        try:
            _, at = _decode(text, at)
        except (ValueError, RecursionError):
            break  # longer than the text, or damaged
    return list_key


def _is_cut(text: str) -> bool:
    """Tell whether the object at 0 does not end in the text."""
    try:
        _decode(text)
    except (ValueError, RecursionError):
        return True
    return False


Container = Literal[
    "json array", "json object", "json lines", "json values", "table", "parquet"
]
HEAD = 1 << 20  # bytes looked at; the first record of every known format fits
# A first row with one of these names in it is a header.
COLUMNS = {"question", "query", "possible_answers", "text", "title", "contents"}

_FOREIGN = (
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"BZh", "bzip2 data; unpack it first"),
    (b"\xfd7zXZ\x00", "xz data; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data; unpack it first"),
    (b"ARROW1", "an Arrow IPC file; save it as Parquet"),
    (b"\xff\xfe\0\0", "UTF-32 text; save it as UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32 text; save it as UTF-8"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
    (b"\x1f\x8b", "gzip inside gzip; unpack it once"),
    (b"%PDF", "a PDF document"),
    (b"SQLite format 3", "an SQLite database"),
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, not the data; fetch it with `git lfs pull`",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileType:
    """How the records lie in a file.

    Attributes:
      container: `json lines` holds one value a line, `json values` one after
        another over several lines, `json object` a list under `list_key`.
      is_gzipped: the above is compressed.
      has_bom: the text starts with a byte order mark.
      list_key: name of the list in a `json object`.
      delimiter: between the columns of a table.
    """

    container: Container
    is_gzipped: bool = False
    has_bom: bool = False
    list_key: str | None = None
    delimiter: str | None = None


class Readable(Protocol):
    """Gives bytes in order."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""

    def close(self) -> None:
        """Let go of the file."""


class Gunzip:
    """Reads gzip; delivers every byte before the damage, then says what it is."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        """Read from `stream`; `name` is for messages."""
        self._stream, self._name = stream, name
        self._unpacked = gzip.GzipFile(fileobj=stream)
        self._damage: ValueError | None = None

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises:
          ValueError: the compressed data are cut off or damaged.
        """
        parts, n_read = [], 0
        try:
            while self._damage is None and n_read < size:
                parts.append(self._unpacked.read1(size - n_read))
                n_read += len(parts[-1])
                if not parts[-1]:
                    break
        except EOFError:
            self._damage = ValueError(
                f"{self._name}: the gzip data end after {self._stream.tell()} bytes "
                "without their end mark, the download was cut off; fetch it again"
            )
        except (OSError, zlib.error) as error:
            self._damage = ValueError(
                f"{self._name}: the gzip data are damaged, or followed by other bytes, "
                f"before byte {self._stream.tell()} ({error}); fetch the file again"
            )
        if self._damage is not None and not n_read:
            raise self._damage
        return b"".join(parts)


def open_bytes(path: Path, is_gzipped: bool) -> Readable:
    """Open a file for reading in order, unpacked."""
    stream = path.open("rb")
    return Gunzip(stream, str(path)) if is_gzipped else stream


def recognise(path: Path) -> FileType:
    """Tell how a file holds its records.

    Raises:
      ValueError: there is no such file, or it is of no kind that holds records.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give one file in it")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file; give a file with records")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); fetch it again")
    with path.open("rb") as stream:
        is_gzipped = stream.read(2) == b"\x1f\x8b"
    with contextlib.closing(open_bytes(path, is_gzipped)) as unpacked:
        head = unpacked.read(HEAD)
    what = "the unpacked file" if is_gzipped else "the file"
    if head.startswith(b"PAR1"):
        return FileType(container="parquet", is_gzipped=is_gzipped)
    has_bom = head.startswith(b"\xef\xbb\xbf")
    text = head[3:] if has_bom else head
    kind = _kind_of_text(text, f"{path}: {what}")
    return dataclasses.replace(kind, is_gzipped=is_gzipped, has_bom=has_bom)


_PYTHON = re.compile(rb"\[\s*\{\s*'")  # single quotes around the first key


def _kind_of_text(text: bytes, name: str) -> FileType:
    """Tell the kinds of text apart; `name` begins the message of a refusal."""
    for magic, what in _FOREIGN:
        if text.startswith(magic):
            raise ValueError(f"{name} is {what}")
    start = text.lstrip(b" \t\r\n")
    if not start:
        raise ValueError(f"{name} holds nothing but white space; fetch it again")
    if text[257:262] == b"ustar":
        raise ValueError(f"{name} is a tar archive; unpack it first")
    if b"\0" in text:
        raise ValueError(f"{name} is binary, of no known kind")
    if _PYTHON.match(start):
        raise ValueError(
            f"{name} is a list in Python's notation, not JSON; save it with json.dumps"
        )
    if start.startswith(b"[") and not _is_row(text):
        return FileType(container="json array")
    if start.startswith(b"{"):
        return _kind_of_objects(start.decode("latin-1"))
    if start.startswith(b"["):
        return FileType(container="table", delimiter="\t")
    if start.startswith(b"<"):
        raise ValueError(
            f"{name} is an HTML or XML page, as a failed download leaves; "
            "fetch it again"
        )
    return _kind_of_table(start, name)


def _is_row(text: bytes) -> bool:
    """Tell a first row without its first cell from an array that is indented."""
    is_tabbed = text.lstrip(b" \r\n").startswith(b"\t")
    return is_tabbed and text.lstrip()[1:2] in (b"'", b'"')


def _is_object(line: str) -> bool:
    """Tell whether a line alone is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _kind_of_objects(text: str) -> FileType:
    """Tell an object around a list from one object a line, and from the rest."""
    key = _list_key_of(text)
    if key is not None:
        return FileType(container="json object", list_key=key)
    first, _, rest = text.partition("\n")
    # A first line that is damaged does not change what the others are.
    if _is_object(first) or (len(first) > 2 and rest.startswith("{")):
        return FileType(container="json lines")
    if not rest and len(text) >= HEAD - 8 and _is_cut(text):
        return FileType(container="json lines")  # one record, longer than the head
    return FileType(container="json values")


def _kind_of_table(text: bytes, name: str) -> FileType:
    """Accept columns with tabs between, or with commas under a header."""
    line = text.partition(b"\n")[0].decode("utf-8", "replace").strip("\r")
    if any(b"\t" in early for early in text.split(b"\n", 3)[:3]):
        return FileType(container="table", delimiter="\t")
    cells = next(csv.reader([line]), [])
    if len(cells) > 1 and COLUMNS & {cell.strip().lower() for cell in cells}:
        return FileType(container="table", delimiter=",")
    raise ValueError(
        f"{name} is plain text: neither JSON nor a table with tabs between its columns"
    )

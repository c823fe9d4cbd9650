"""What a file is, by its bytes and never by its name, and its records one by one."""

import contextlib
import csv
import dataclasses
import gzip
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec

from beatrice.extract.datasets.fields import HEADERLESS, kind_of

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


CHUNK = 1 << 20
MAX_RECORD = 32 << 20  # bytes; the largest published records (NQ pages) are below 5 MB
_PARTIAL = 16  # characters; an escape or a literal may be cut by the window's end
_SPACE = re.compile(r"\s*+", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD]")  # a lone one is no JSON, and Python reads it
_PYTHON_OBJECT = re.compile(r"\s*\{\s*'")  # single quotes around the first key
_decode = json.JSONDecoder().raw_decode


class Window:
    """The part of a file that is looked at, and where it lies in the file."""

    def __init__(self, stream: Readable) -> None:
        """Begin before the first byte."""
        self._stream = stream
        self.text = ""  # a character for each byte
        self.start = 0  # offset of text[0] in the file

    def advance(self, keep: int, size: int = CHUNK) -> bool:
        """Forget what lies before `keep` and read on; at the end do neither.

        Returns:
          Whether there was more: positions in `text` are then smaller by `keep`.
        """
        more = self._stream.read(size).decode("latin-1")
        if more:
            self.text = self.text[keep:] + more
            self.start += keep
        return bool(more)

    def widen(self, at: int) -> bool:
        """Read on for the value at `at`, then at 0; False where it is too long already.

        Twice as much each time: a long value is not parsed again and again.
        """
        size = len(self.text) - at
        return size <= MAX_RECORD and self.advance(at, max(CHUNK, size))

    def skip_space(self, at: int) -> int:
        """Return the position of the next byte that is no space; may be the end."""
        while True:
            at = _SPACE.match(self.text, at).end()
            if at < len(self.text) or not self.advance(at):
                return at
            at = 0


def parse_object(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Parse one JSON object; returns it, or None and what is wrong."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value, problem = _parse_slowly(raw)
        if problem is not None:
            return None, problem
    if not isinstance(value, dict):
        return None, f"expected a JSON object, found {kind_of(value)}"
    return value, None


def _parse_slowly(raw: bytes) -> tuple[Any, str | None]:
    """Say why text is no JSON; accept the NaN and Infinity that Python writes."""
    try:
        text = raw.decode()
        value = json.loads(text)
        msgspec.json.encode(value)  # refuses lone surrogates, which json lets through
        return value, None
    except UnicodeDecodeError as error:
        return None, (
            f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start} "
            "of the record"
        )
    except UnicodeEncodeError:
        return None, "not valid JSON (half of a surrogate pair)"
    except RecursionError:
        return None, "not valid JSON (too many objects or lists inside each other)"
    except json.JSONDecodeError as error:
        if _PYTHON_OBJECT.match(text):
            return None, "not valid JSON (Python's notation; save it with json.dumps)"
        what = error.msg.removesuffix(" at")
        return None, f"not valid JSON ({what}, at character {error.pos})"
    except ValueError as error:  # a number of thousands of digits
        return None, f"not valid JSON ({error})"


@dataclasses.dataclass(frozen=True)
class RawRecord:
    """One record as it lies in the file, or what is wrong with it.

    Attributes:
      number: from 1, in file order; damaged ones count.
      at: where it lies, in words.
      value: its fields, or None if it is no record.
      problem: why it is not one.
    """

    number: int
    at: str
    value: dict[str, Any] | None
    problem: str | None = None


class JsonValues:
    """Walks over the values of an array, or over values with no array around."""

    def __init__(self, window: Window, name: str, *, in_array: bool = True) -> None:
        """Begin where `walk` is called for; `name` is the file's, for messages."""
        self._window, self._name, self._in_array = window, name, in_array
        self.end = 0  # after the walk: behind the closing bracket, in the window
        self.n_values = 0

    def walk(self, at: int) -> Iterator[RawRecord]:
        """Yield the values from position `at`, behind the opening bracket.

        Raises:
          ValueError: the array has no end, a value is no JSON, or something stands
            between two values that is no comma.
        """
        window = self._window
        while True:
            at = window.skip_space(at)
            byte = window.text[at : at + 1]
            if not byte and not self._in_array:
                return
            if byte == "]" and self._in_array:
                self.end = at + 1
                return
            if self.n_values and self._in_array:
                if byte != ",":
                    raise self._damage(at, "expected a comma or the end of the array")
                at = window.skip_space(at + 1)
            record, at = self._value(at)
            yield record

    def _value(self, at: int) -> tuple[RawRecord, int]:
        """Return the value at `at`, and the position behind it."""
        window, problem, end = self._window, "", None
        while True:
            try:
                value, end = _decode(window.text, at)
                may_go_on = end == len(window.text)  # a number has no end of its own
            except json.JSONDecodeError as error:
                problem = f"{error.msg}, at byte {window.start + error.pos}"
                if _PYTHON_OBJECT.match(window.text, at):
                    problem = "Python's notation; save it with json.dumps"
                may_go_on = _is_at_end(error, window.text)
            except (ValueError, RecursionError) as error:
                problem, may_go_on = str(error), False
            if not may_go_on or not window.widen(at):
                break
            at = 0
        if end is None:
            raise self._damage(at, problem, is_cut=may_go_on)
        self.n_values += 1
        raw, place = window.text[at:end], f"byte {window.start + at}"
        problem = None
        if len(raw) > MAX_RECORD:
            value, problem = None, f"longer than {MAX_RECORD >> 20} MiB"
        elif not (raw.isascii() and isinstance(value, dict)) or _SURROGATE.search(raw):
            value, problem = parse_object(raw.encode("latin-1"))
        return RawRecord(self.n_values, place, value, problem), end

    def _damage(self, at: int, what: str, *, is_cut: bool = False) -> ValueError:
        """Say what is wrong with the next record, and where it is."""
        window = self._window
        if len(window.text) - at > MAX_RECORD:
            what = f"it is longer than {MAX_RECORD >> 20} MiB"
        elif is_cut or at == len(window.text):
            what = "the file is cut off, or a quote or a bracket is left open"
        return ValueError(
            f"{self._name}: record {self.n_values + 1}, which begins at byte "
            f"{window.start + at}, cannot be read ({what}), nor can any behind it; "
            "fetch or mend the file"
        )


def _is_at_end(error: json.JSONDecodeError, text: str) -> bool:
    """Tell whether a value may be cut off by the window's end and not be damaged."""
    is_text = error.msg.startswith("Unterminated string")
    return is_text or error.pos >= len(text.rstrip()) - _PARTIAL


_PARQUET_ROWS = 64  # per batch: HotpotQA rows are 6 kB, DPR rows 100 kB
Row = tuple[dict[str, Any] | None, str | None]  # the row, or what is wrong with it


def _parquet_rows(path: Path, is_gzipped: bool) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a few at a time."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    with path.open("rb") as packed, tempfile.TemporaryFile() as unpacked:
        if is_gzipped:  # Parquet is read from its end
            with contextlib.closing(open_bytes(path, True)) as source:
                shutil.copyfileobj(source, unpacked, CHUNK)
        stream = unpacked if is_gzipped else packed
        try:
            # Neither threads nor a buffer for the whole row group: memory stays flat.
            file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK)
            for batch in file.iter_batches(_PARQUET_ROWS, use_threads=False):
                for row, problem in _batch_rows(batch):
                    number += 1
                    yield row, problem
        except (pyarrow.ArrowException, OSError) as error:
            detail = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: the Parquet file is cut off or damaged after {number} rows "
                f"({detail}); fetch it again"
            ) from None


def _batch_rows(batch: Any) -> Iterator[Row]:
    """Yield the rows of one batch; a row that Python cannot hold spoils no other.

    Dates and times are left out: no layout has one, Python holds fewer dates than
    Parquet, and a zone that it does not know must not cost a record its question.
    """
    from pyarrow.types import is_temporal

    batch = batch.select([c.name for c in batch.schema if not is_temporal(c.type)])
    try:
        yield from ((row, None) for row in batch.to_pylist())
        return
    except (ValueError, OverflowError):  # UnicodeDecodeError is one
        pass
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0], None
        except UnicodeDecodeError as error:
            yield None, f"not UTF-8: byte 0x{error.object[error.start]:02x}"
        except (ValueError, OverflowError) as error:
            yield None, f"a value that cannot be read ({error})"


class RecordStream:
    """The records of one file; iterate over it once.

    Attributes:
      envelope: after the last record, what a `json object` says beside its list.
    """

    def __init__(self, path: Path, file_type: FileType) -> None:
        """Name the file; nothing is opened yet."""
        self._path, self._type = path, file_type
        self.envelope: dict[str, Any] = {}

    def __iter__(self) -> Iterator[RawRecord]:
        """Yield the records.

        Raises:
          ValueError: the file is cut off or damaged.
        """
        if self._type.container == "parquet":
            rows = _parquet_rows(self._path, self._type.is_gzipped)
            for number, (row, problem) in enumerate(rows, start=1):
                yield RawRecord(number, f"row {number}", row, problem)
            return
        with contextlib.closing(
            open_bytes(self._path, self._type.is_gzipped)
        ) as stream:
            if self._type.has_bom:
                stream.read(3)
            if self._type.container == "json lines":
                yield from _json_lines(stream)
            elif self._type.container == "table":
                yield from _table_rows(stream, self._path, self._type.delimiter or "\t")
            else:
                yield from self._values(stream)

    def _values(self, stream: Readable) -> Iterator[RawRecord]:
        """Yield the values of JSON that is not one value a line."""
        window, name = Window(stream), str(self._path)
        at = window.skip_space(0)
        if self._type.container == "json values":
            yield from JsonValues(window, name, in_array=False).walk(at)
            return
        at, before = at + 1, ""
        if self._type.list_key is not None:
            at = _list_start(window, self._type.list_key)
            before = window.text[:at]
        scanner = JsonValues(window, name)
        yield from scanner.walk(at)
        rest = window.text[scanner.end :]  # it is short in every known format
        while len(rest) <= CHUNK and window.advance(len(window.text)):
            rest += window.text
        if self._type.list_key is not None:
            self._read_envelope(f"{before}]{rest}".encode("latin-1"))
        elif rest.strip():
            found = rest.strip()[:20].encode("latin-1").decode("utf-8", "replace")
            raise ValueError(
                f"{name}: other text follows the end of the JSON array ({found!r}); "
                "the file is no valid JSON"
            )

    def _read_envelope(self, raw: bytes) -> None:
        """Parse what stands around the list, given with an empty list."""
        try:
            around = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeError):
            raise ValueError(
                f"{self._path}: the JSON object around the list of records is cut off "
                "or no valid JSON; fetch the file again"
            ) from None
        self.envelope = {k: v for k, v in around.items() if k != self._type.list_key}


def _list_start(window: Window, key: str) -> int:
    """Return the position behind the bracket that opens the list named `key`."""
    opening = re.compile(rf'"{re.escape(key)}"\s*+:\s*+\[', re.ASCII)
    while (found := opening.search(window.text)) is None:
        if not window.advance(0):
            raise ValueError(f"the list {key!r} is not in the file any more")
    return found.end()


def _lines(stream: Readable) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number, line without its end, whether it is too long to be kept).

    Only line feeds end a line: U+0085 and U+2028 occur inside published strings.
    """
    number, parts, size = 1, [], 0
    while chunk := stream.read(CHUNK):
        *whole, last = chunk.split(b"\n")
        for part in whole:
            line = b"".join((*parts, part)) if parts else part
            yield number, line, size + len(part) > MAX_RECORD
            number, parts, size = number + 1, [], 0
        size += len(last)
        if size <= MAX_RECORD:
            parts.append(last)
    if size:
        yield number, b"".join(parts), size > MAX_RECORD


def _json_lines(stream: Readable) -> Iterator[RawRecord]:
    """Yield one record a line; blank lines are skipped."""
    n_records = 0
    for number, line, is_long in _lines(stream):
        if line.strip():
            n_records += 1
            row = parse_object(line)
            if is_long:
                row = None, f"the line is longer than {MAX_RECORD >> 20} MiB"
            yield RawRecord(n_records, f"line {number}", *row)


def _table_rows(stream: Readable, path: Path, delimiter: str) -> Iterator[RawRecord]:
    """Yield one record a row, under the header's names or `column 1`, `column 2`.

    Quoting is CSV's: cells of PopQA and of DPR's question files hold doubled quotes.

    Raises:
      ValueError: a row of several lines is damaged: a quote that is left open takes in
        the rows behind it.
    """

    def lines() -> Iterator[str]:
        for number, line, is_long in _lines(stream):
            if is_long:
                raise ValueError(
                    f"{path}, line {number}: longer than {MAX_RECORD >> 20} MiB; the "
                    "file is no table of questions"
                )
            yield line.decode("utf-8", "surrogateescape") + "\n"

    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    n_records = 0
    while True:
        first = reader.line_num + 1
        try:
            cells, problem = next(reader, None), None
        except csv.Error as error:
            cells, problem = [], f"the row is no valid CSV ({error})"
        if cells is None:
            return
        if not cells and problem is None:
            continue  # a blank line
        if names is None and problem is None:
            names = [cell.strip() for cell in cells]
            if COLUMNS & {name.lower() for name in names}:
                continue
            names = list(HEADERLESS)
        n_records += 1
        problem = problem or _row_problem(cells, names or [])
        at = f"line {first}"
        if reader.line_num > first:
            at = f"lines {first}-{reader.line_num}"
            if problem is not None:
                raise ValueError(
                    f"{path}, {at}: {problem}; perhaps a quote is left open on line "
                    f"{first}: close it, nothing behind it can be read"
                )
        value = None if problem else dict(zip(names or [], cells, strict=True))
        yield RawRecord(n_records, at, value, problem)


def _row_problem(cells: list[str], names: list[str]) -> str | None:
    """Say what is wrong with a row, if anything."""
    if len(cells) != len(names):
        what = f"{len(names)} columns"
        if tuple(names) == HEADERLESS:
            what = (
                "two columns (question, list of answers), or a header with known names"
            )
        return f"expected {what}, found {len(cells)}"
    for name, cell in zip(names, cells, strict=True):
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            byte = ord(cell[error.start]) - 0xDC00
            return f"not UTF-8: byte 0x{byte:02x} in the column {name!r}"
    is_header = [cell.strip() for cell in cells] == names
    return "the row of column names again" if is_header else None

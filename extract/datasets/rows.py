"""Recognise a file by its bytes, never by its name, and read its records.

Published copies carry JSON lines in `.json`, tabs in `.csv` and arrays in `.jsonl`,
so the first bytes decide: gzip or not, then Parquet, a JSON array, a JSON object
around a list, JSON lines, or a table. Any other file is refused, with what it is.

Memory does not grow with the file. A line, row or value that is not a record is passed
on with its number and the reason. Reading stops with an error at a value of an array
that is not valid JSON, and where the file as a whole is cut off or damaged.
"""

import collections
import csv
import dataclasses
import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec

from beatrice.extract.datasets.fields import HEADERLESS, kind_of
from beatrice.extract.run.files import from_json

Container = Literal[
    "json array", "json object", "json lines", "json values", "table", "parquet"
]
# In an object around the records, their list has one of these names.
LIST_KEYS = ("Data", "data", "rows", "examples", "questions", "instances")
# An object with one of these keys is a record, not an object around records.
_RECORD_KEYS = {"question", "Question", "question_text", "query", "golden_answers"}
# A first row that contains one of these names is a header.
COLUMNS = {"question", "query", "possible_answers", "text", "title", "contents"}
COLUMNS |= {"prompt", "messages", "prompt_ids"}  # of answers to score
CHUNK = 1 << 20  # bytes read at once; holds the first record of every known format
MAX_RECORD = 32 << 20  # bytes; the largest published records (NQ pages) are below 5 MB
_PARQUET_ROWS = 64  # per batch: HotpotQA rows are 6 kB, DPR rows 100 kB

# Other kinds of files, by their first bytes.
_FOREIGN = (
    (rb"\s*\Z", "empty or only white space; fetch it again"),
    (
        rb"PK\x03\x04",
        "a zip archive, unpack it first; or a spreadsheet, save it as CSV",
    ),
    (rb"BZh", "bzip2 data; unpack it first"),
    (rb"\xfd7zXZ\0", "xz data; unpack it first"),
    (rb"\x28\xb5\x2f\xfd", "Zstandard data; unpack it first"),
    (rb".{257}ustar", "a tar archive; unpack it first"),
    (rb"ARROW1", "an Arrow IPC file; save it as Parquet"),
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32 text; save it as UTF-8"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text; save it as UTF-8"),
    (rb"\x1f\x8b", "gzip inside gzip; unpack it once"),
    (rb"%PDF", "a PDF document"),
    (rb"SQLite format 3", "an SQLite database"),
    (rb"version https://git-lfs", "a Git LFS pointer; fetch it with `git lfs pull`"),
    (rb".*\0", "binary, of no known kind"),
    (rb"\s*\[\s*\{\s*'", "a list in Python's notation; save it with json.dumps"),
    (rb"\s*<", "an HTML or XML page, as a failed download leaves; fetch it again"),
)
# These patterns match text decoded as Latin-1, one character per byte.
_KEY = re.compile(r'[\s,{]*+("(?:[^"\\]++|\\.)*+")\s*+:\s*+', re.ASCII | re.DOTALL)
_LIST_OF_OBJECTS = re.compile(r"\[\s*[{\]]", re.ASCII)
_PYTHON = re.compile(r"\s*\{\s*'")  # single quotes around the first key
_SPACE = re.compile(r"\s*+", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD]")  # a lone one is invalid, but Python accepts it
_AT_END = 16  # characters; the window's end may cut an escape or a literal
_decode = json.JSONDecoder().raw_decode
OnRead = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileType:
    """How a file stores its records."""

    # `json lines` has one value per line, `json values` values that may span several
    # lines, `json object` a list under `list_key`.
    container: Container
    is_gzipped: bool = False  # the container is compressed
    has_bom: bool = False  # the text starts with a byte order mark
    list_key: str | None = None  # name of the list in a `json object`
    list_start: int = 0  # offset of its bracket, in bytes after the byte order mark
    delimiter: str = "\t"  # between the columns of a table


@dataclasses.dataclass(frozen=True)
class RawRecord:
    """One record as stored in the file, or what is wrong with it."""

    number: int  # from 1, in file order, damaged records included
    at: str  # its place in the file, in words
    value: dict[str, Any] | None  # its fields, or None if it is not a record
    problem: str | None = None  # why it is not a record
    line: int | None = None  # first line, if the file is made of lines


def ignore_bytes(n_bytes: int) -> None:
    """Stand in where nobody asks how many bytes were read."""


def _chunks(
    path: Path, is_gzipped: bool, on_read: OnRead = ignore_bytes
) -> Iterator[bytes]:
    with path.open("rb") as packed:
        stream = gzip.GzipFile(fileobj=packed) if is_gzipped else packed
        try:
            while chunk := stream.read(CHUNK):
                on_read(packed.tell())
                yield chunk
        except EOFError:
            raise ValueError(
                f"{path}: the gzip data end after {packed.tell()} bytes without their "
                "end mark, so the download was cut off; fetch it again"
            ) from None
        except (OSError, zlib.error) as error:
            raise ValueError(
                f"{path}: the gzip data are damaged, or followed by other bytes, "
                f"before byte {packed.tell()} ({error}); fetch the file again"
            ) from None


def allow_long_cells() -> None:
    """Let `csv` read cells as long as a record; its default limit is 128 KiB."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))


def recognise(path: Path) -> FileType:
    """Return how a file stores its records."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "no such file"
        what = "is a directory" if path.is_dir() else what
        raise ValueError(f"{path}: {what}; give one file with records")
    with path.open("rb") as stream:
        is_gzipped = stream.read(2) == b"\x1f\x8b"
    head = next(_chunks(path, is_gzipped), b"")
    if head.startswith(b"PAR1"):
        return FileType(container="parquet", is_gzipped=is_gzipped)
    has_bom = head.startswith(b"\xef\xbb\xbf")
    name = f"{path}: the {'unpacked ' if is_gzipped else ''}file"
    kind = _kind_of_text(head[3:] if has_bom else head, name)
    return dataclasses.replace(kind, is_gzipped=is_gzipped, has_bom=has_bom)


def _kind_of_text(head: bytes, name: str) -> FileType:
    """Return the type of a text file; an error message begins with `name`."""
    for pattern, what in _FOREIGN:
        if re.match(pattern, head, re.DOTALL):
            raise ValueError(f"{name} is {what}")
    start = head.lstrip(b" \t\r\n")
    if start.startswith(b"["):
        return FileType(container="json array")
    if start.startswith(b"{"):
        return _kind_of_objects(head.decode("latin-1"), len(head) - len(start))
    lines = start.split(b"\n", 3)[:3]
    header = lines[0].decode("utf-8", "replace").strip("\r")
    allow_long_cells()
    for delimiter in "\t,;":  # the last where a comma is a decimal mark
        cells = next(csv.reader(header.splitlines(), delimiter=delimiter), [])
        if len(cells) > 1 and COLUMNS & set(_names_in(cells)):
            return FileType(container="table", delimiter=delimiter)
    if any(b"\t" in line for line in lines):  # no header, as in DPR's files
        return FileType(container="table")
    raise ValueError(
        f"{name} is plain text: neither JSON nor a table with tabs between columns, or "
        "commas or semicolons and a header of known names"
    )


def _kind_of_objects(text: str, at: int) -> FileType:
    key, list_start = _list_of(text, at)
    if key is not None:
        return FileType(container="json object", list_key=key, list_start=list_start)
    first, _, rest = text[at:].partition("\n")
    try:
        is_line = isinstance(msgspec.json.decode(first), dict)
    except (msgspec.DecodeError, RecursionError):
        # A damaged first line does not change what the others are.
        is_line = len(first) > 2 and rest.startswith("{")
    return FileType(container="json lines" if is_line else "json values")


def _list_of(text: str, at: int) -> tuple[str | None, int]:
    """Return name and start of the records' list in an object; None for a record."""
    list_key, list_start = None, 0
    while key := _KEY.match(text, at):
        name, at = key[1][1:-1], key.end()
        if name in _RECORD_KEYS:
            return None, 0
        if list_key is None and name in LIST_KEYS and _LIST_OF_OBJECTS.match(text, at):
            list_key, list_start = name, at
        try:
            _, at = _decode(text, at)
        except (ValueError, RecursionError):
            break  # longer than the text, or damaged
    return list_key, list_start


def read_raw(
    path: Path,
    file_type: FileType,
    envelope: dict[str, Any] | None = None,
    on_read: OnRead = ignore_bytes,
) -> Iterator[RawRecord]:
    """Yield the records of a file; then add what surrounds their list to `envelope`.

    `on_read` is called with how many bytes of the file were read so far.
    """
    if file_type.container == "parquet":
        yield from _parquet_rows(path, file_type.is_gzipped, on_read)
        return
    chunks = _chunks(path, file_type.is_gzipped, on_read)
    if file_type.has_bom:
        chunks = (c[3:] if i == 0 else c for i, c in enumerate(chunks))
    if file_type.container == "json lines":
        yield from _json_lines(chunks)
    elif file_type.container == "table":
        yield from _table_rows(chunks, path, file_type.delimiter)
    else:
        outside = yield from json_values(Window(chunks), path, file_type)
        if envelope is not None:
            envelope.update(outside)


_TOO_LONG_ROW = f"the row is longer than {MAX_RECORD >> 20} MiB"


def _parquet_rows(path: Path, is_gzipped: bool, on_read: OnRead) -> Iterator[RawRecord]:
    """Yield the rows of a Parquet file, a few at a time.

    A column of dates or times holds one day or null: no layout reads one, Parquet has
    dates that Python lacks, and an unknown time zone must not cost a question.
    """
    try:
        import pyarrow
        from pyarrow import parquet
        from pyarrow.types import is_temporal
    except ImportError as error:
        raise ImportError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; run "
            "`pip install pyarrow`, or give JSON lines or a table",
            name=error.name,
        ) from error

    number = 0
    with path.open("rb") as packed, tempfile.TemporaryFile() as unpacked:
        if is_gzipped:  # Parquet is read from its end
            unpacked.writelines(_chunks(path, True))
        stream = unpacked if is_gzipped else packed
        try:
            # Neither threads nor a buffer for the whole row group: memory stays flat.
            file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK)
            for batch in file.iter_batches(_PARQUET_ROWS, use_threads=False):
                batch = batch.select(batch.schema.names)  # refuses a name used twice
                for i, column in enumerate(batch.schema):
                    if is_temporal(column.type):
                        is_null = batch[i].is_null().to_pylist()
                        days = [None if null else date.min for null in is_null]
                        batch = batch.set_column(i, column.name, days)
                for row in _parquet_values(batch):
                    number += 1
                    problem = _TOO_LONG_ROW if row is None else None
                    yield RawRecord(number, f"row {number}", row, problem)
                n_bytes = path.stat().st_size  # counted by rows: columns lie apart
                on_read(n_bytes * number // file.metadata.num_rows)
        except KeyError as error:
            raise ValueError(
                f"{path}: two columns have the same name ({error.args[0]}); rename one"
            ) from None
        # ValueError and OverflowError are raised for values that Python cannot hold.
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            detail = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: the Parquet file is cut off or damaged after {number} rows "
                f"({detail}); fetch it again"
            ) from None


def _parquet_values(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield rows, or None for a row longer than `MAX_RECORD`."""
    if batch.nbytes <= MAX_RECORD:
        yield from batch.to_pylist()
        return
    for i in range(len(batch)):  # one by one, which is slower
        row = batch.slice(i, 1)
        yield row.to_pylist()[0] if row.nbytes <= MAX_RECORD else None


def _parse_object(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = from_json(object, raw, "")
        if b"\\u" in raw:
            msgspec.json.encode(value)  # fails on half a pair, which Python accepts
    except UnicodeEncodeError:
        return None, "half of a surrogate pair"
    except ValueError as error:
        if _PYTHON.match(raw.decode("latin-1")):
            return None, "Python's notation; save it with json.dumps"
        return None, str(error).removeprefix(": ")
    if not isinstance(value, dict):
        return None, f"expected a JSON object, found {kind_of(value)}"
    return value, None


@dataclasses.dataclass(eq=False)
class Window:
    """A sliding window over a file's text, and its offset in the file.

    The text is decoded as Latin-1, one character per byte, so that positions in it are
    byte offsets; values that are not ASCII are decoded again as UTF-8.
    """

    chunks: Iterator[bytes]  # the file's bytes
    text: str = ""
    start: int = 0  # offset of text[0] in the file

    def advance(self, keep: int, n_bytes: int = 1) -> bool:
        """Drop the text before `keep`, read on, and return whether there was more.

        Positions in `text` then shrink by `keep`; at the file's end nothing changes.
        """
        more: list[str] = []
        while n_bytes > 0 and (chunk := next(self.chunks, b"")):
            more.append(chunk.decode("latin-1"))
            n_bytes -= len(chunk)
        if more:
            self.text = self.text[keep:] + "".join(more)
            self.start += keep
        return bool(more)

    def skip_space(self, at: int) -> int:
        """Return the position of the next byte that is not white space, or the end."""
        while True:
            space = _SPACE.match(self.text, at)
            at = at if space is None else space.end()
            if at < len(self.text) or not self.advance(at):
                return at
            at = 0


def json_values(
    window: Window, path: Path, file_type: FileType
) -> Generator[RawRecord, None, dict[str, Any]]:
    """Yield the values of an array, or bare values; returns what is around the array.

    HotpotQA is one array of half a gigabyte. Python's own decoder reads one value from
    the window: 28,000 records of 6 kB a second on one core; ijson's C backend 32,000.
    """
    at, number, before = window.skip_space(0), 0, ""
    in_array = file_type.container != "json values"
    if file_type.list_key is not None:
        at = file_type.list_start
        before = window.text[: at + 1]
    at += in_array
    while (at := window.skip_space(at)) < len(window.text) or in_array:
        byte = window.text[at : at + 1]
        if byte == "]" and in_array:
            break
        if number and in_array:
            if byte != ",":
                what = "expected a comma or the end of the array"
                raise _damage(window, path, number + 1, at, what)
            at = window.skip_space(at + 1)
        number += 1
        record, at = _json_value(window, path, number, at)
        yield record
    if not in_array:
        return {}
    rest = window.text[at + 1 :]  # it is short in every known format
    while len(rest) <= CHUNK and window.advance(len(window.text)):
        rest += window.text
    if file_type.list_key is None:
        if rest.strip():
            other = rest.strip()[:20].encode("latin-1").decode("utf-8", "replace")
            raise ValueError(
                f"{path}: other text follows the end of the JSON array ({other!r}), so "
                "the file is not valid JSON"
            )
        return {}
    try:
        around = msgspec.json.decode(f"{before}]{rest}".encode("latin-1"))
    except (msgspec.DecodeError, UnicodeError):
        raise ValueError(
            f"{path}: the JSON object around the list of records is cut off or not "
            "valid JSON; fetch the file again"
        ) from None
    return {key: x for key, x in around.items() if key != file_type.list_key}


def _json_value(
    window: Window, path: Path, number: int, at: int
) -> tuple[RawRecord, int]:
    value, problem, end = None, "", None
    while True:
        try:
            value, end = _decode(window.text, at)
            may_go_on = end == len(window.text)  # a number has no end mark
        except json.JSONDecodeError as error:
            problem = f"{error.msg}, at byte {window.start + error.pos}"
            last = len(window.text.rstrip()) - _AT_END
            is_open = error.msg.startswith("Unterminated string")
            may_go_on = is_open or error.pos >= last
            if _PYTHON.match(window.text, at):
                problem, may_go_on = "Python's notation; save it with json.dumps", False
        except (ValueError, RecursionError) as error:
            problem, may_go_on = str(error), False
        # The window doubles, so that a long value is not parsed again and again.
        size = len(window.text) - at
        if not may_go_on or size > MAX_RECORD or not window.advance(at, size):
            break
        at = 0
    if end is None:
        if may_go_on:
            problem = "the file is cut off, or a quote or a bracket is left open"
        raise _damage(window, path, number, at, problem)
    raw, row = window.text[at:end], (value, None)
    if len(raw) > MAX_RECORD:
        row = None, f"longer than {MAX_RECORD >> 20} MiB"
    elif not (raw.isascii() and isinstance(value, dict)) or _SURROGATE.search(raw):
        row = _parse_object(raw.encode("latin-1"))
    return RawRecord(number, f"byte {window.start + at}", *row), end


def _damage(window: Window, path: Path, number: int, at: int, what: str) -> ValueError:
    if len(window.text) - at > MAX_RECORD:
        what = f"it is longer than {MAX_RECORD >> 20} MiB"
    elif at == len(window.text):
        what = "the file is cut off, or a quote or a bracket is left open"
    return ValueError(
        f"{path}: record {number}, which begins at byte {window.start + at}, cannot be "
        f"read ({what}), nor can any after it; fetch the file again or repair it"
    )


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line; lines that are too long are cut.

    Only line feeds end a line: U+0085 and U+2028 occur inside published strings.
    """
    number, parts, size = 1, [], 0
    for chunk in chunks:
        *ends, last = chunk.split(b"\n")
        for end in ends:
            yield number, b"".join((*parts, end))
            number, parts, size = number + 1, [], 0
        if size <= MAX_RECORD:
            parts.append(last)
            size += len(last)
    if size:
        yield number, b"".join(parts)


def _json_lines(chunks: Iterator[bytes]) -> Iterator[RawRecord]:
    """Yield one record per line; blank lines are skipped."""
    n_records = 0
    for number, line in _lines(chunks):
        if line.strip():
            n_records += 1
            row = _parse_object(line) if len(line) <= MAX_RECORD else _TOO_LONG
            yield RawRecord(n_records, f"line {number}", *row, line=number)


_TOO_LONG = None, f"the line is longer than {MAX_RECORD >> 20} MiB"


def _table_rows(
    chunks: Iterator[bytes], path: Path, delimiter: str
) -> Iterator[RawRecord]:
    """Yield one record per row, keyed by the header's names or `column 1`, `column 2`.

    Quoting is CSV's: cells of PopQA and of DPR's question files hold doubled quotes.
    """
    n_bytes = 0  # since the last row

    def lines() -> Iterator[str]:
        nonlocal n_bytes
        for number, line in _lines(chunks):
            if n_bytes and n_bytes + len(line) > MAX_RECORD:
                raise ValueError(
                    f"{path}, line {number}: {_TOO_LONG_ROW}, perhaps as a quote is "
                    "left open before it; close it, since nothing after it can be read"
                )
            n_bytes += len(line)
            yield line.decode("utf-8", "surrogateescape") + "\n"

    allow_long_cells()
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] = []
    names: list[str] = []
    n_records = 0
    while True:
        first = reader.line_num + 1
        try:
            cells, problem = next(reader, None), None
        except csv.Error as error:
            cells, problem = ["unread"], f"the row is not valid CSV ({error})"
        if cells is None:
            return
        n_bytes = 0
        if not cells:
            continue  # a blank line
        if not names and problem is None:
            names = _names_in(cells)
            if COLUMNS & set(names):
                header, counts = cells, collections.Counter(filter(None, names))
                if twice := [name for name, n in counts.items() if n > 1]:
                    raise ValueError(
                        f"{path}: two columns are named {twice[0]!r}; rename one"
                    )
                continue
            names = list(HEADERLESS)
        n_records += 1
        if cells == header:
            problem = "the column names again"
        problem = problem or _row_problem(cells, names)
        at = f"line {first}"
        if reader.line_num > first:
            at = f"lines {first}-{reader.line_num}"
            if problem is not None:
                raise ValueError(
                    f"{path}, {at}: {problem}; perhaps a quote is left open on line "
                    f"{first}; close it, since nothing after it can be read"
                )
        value = None if problem else dict(zip(names, cells, strict=True))
        yield RawRecord(n_records, at, value, problem, first)


def _names_in(header: list[str]) -> list[str]:
    """Return the names of a table's columns in lower case, as in published tables."""
    return [cell.strip().lower() for cell in header]


def _row_problem(cells: list[str], names: list[str]) -> str | None:
    if len(cells) != len(names):
        what = f"{len(names)} columns"
        if names == list(HEADERLESS):
            what = "two columns (question, list of answers) or a header of known names"
        return f"expected {what}, found {len(cells)}"
    try:
        "".join(cells).encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: byte 0x{ord(error.object[error.start]) - 0xDC00:02x}"
    return None

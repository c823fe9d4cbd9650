"""The records of a file one after another, numbered, whatever the container.

Memory is flat in the file's size: arrays are scanned in chunks, lines and table rows
are read one by one, Parquet in small batches. What is no record is passed on with its
number and the reason; only a file that is cut off or damaged as a whole ends reading.
"""

import collections
import contextlib
import csv
import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from extract.datasets.fields import HEADERLESS
from extract.datasets.files.json_stream import (
    CHUNK,
    MAX_RECORD,
    ArrayScanner,
    Value,
    Window,
    parse_object,
)
from extract.datasets.files.kinds import COLUMNS, FileType, Readable, open_bytes

_PARQUET_ROWS = 64  # per batch: HotpotQA rows are 6 kB, DPR rows 100 kB
Row = tuple[dict[str, Any] | None, str | None]  # the row, or what is wrong with it


def _unpacked(path: Path, folder: str) -> Path:
    """Unpack gzip beside other temporary files: Parquet is read from its end."""
    target = Path(folder) / "unpacked.parquet"
    source = open_bytes(path, True)
    with contextlib.closing(source), target.open("wb") as out:
        while chunk := source.read(CHUNK):
            out.write(chunk)
    return target


def parquet_rows(path: Path, is_gzipped: bool) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a few at a time.

    Raises:
      ValueError: the file is cut off or damaged.
    """
    with contextlib.ExitStack() as stack:
        source = path
        if is_gzipped:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            source = _unpacked(path, folder)
        yield from _rows_of(stack.enter_context(source.open("rb")), path)


def _rows_of(stream: IO[bytes], path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file; `path` is for messages."""
    import pyarrow
    from pyarrow import parquet

    number = 0
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


def _without_times(batch: Any) -> Any:
    """Return a batch with its dates and times as bare numbers.

    No layout has one. Python holds fewer dates than Parquet, and times in a zone need
    a table of zones, which must not cost a record its question.
    """
    import pyarrow

    widths = {32: pyarrow.int32(), 64: pyarrow.int64()}
    for i, field in enumerate(batch.schema):
        if pyarrow.types.is_temporal(field.type) and field.type.bit_width in widths:
            bare = batch.column(i).view(widths[field.type.bit_width])
            batch = batch.set_column(i, field.name, bare)
    return batch


def _batch_rows(batch: Any) -> Iterator[Row]:
    """Yield the rows of one batch; a row that Python cannot hold spoils no other."""
    batch = _without_times(batch)
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


@dataclasses.dataclass(frozen=True)
class RawRecord:
    """One record as it lies in the file, or what is wrong with it.

    Attributes:
      number: from 1, in file order; refused ones count.
      at: where it lies, in words.
      value: its fields, or None if it is no record.
      problem: why it is none.
    """

    number: int
    at: str
    value: dict[str, Any] | None
    problem: str | None = None


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
            rows = parquet_rows(self._path, self._type.is_gzipped)
            for number, (row, problem) in enumerate(rows, start=1):
                yield RawRecord(number, f"row {number}", row, problem)
            return
        stream = open_bytes(self._path, self._type.is_gzipped)
        with contextlib.closing(stream):
            if self._type.has_bom:
                stream.read(3)
            if self._type.container == "json lines":
                yield from _json_lines(stream, self._path)
            elif self._type.container == "table":
                yield from _table_rows(stream, self._path, self._type.delimiter or "\t")
            else:
                values = self._values(stream)
                for number, value in enumerate(values, start=1):
                    at = f"byte {value.offset}"
                    yield RawRecord(number, at, value.object, value.problem)

    def _values(self, stream: Readable) -> Iterator[Value]:
        """Yield the values of JSON that is not one value a line."""
        window = Window(stream)
        at = window.skip_space(0)
        if self._type.container == "json values":
            yield from ArrayScanner(window, str(self._path), in_array=False).walk(at)
            return
        before = ""
        if self._type.container == "json object":
            at = _list_start(window, self._type.list_key or "")
            before = window.text[:at]
        else:
            at += 1
        scanner = ArrayScanner(window, str(self._path))
        yield from scanner.walk(at)
        rest = _rest(window, scanner.end)
        if self._type.container == "json object":
            self.envelope = self._read_envelope(before, rest)
        elif rest.strip():
            raise ValueError(
                f"{self._path}: other text follows the end of the JSON array "
                f"({rest.strip()[:20]!r}); the file is no valid JSON"
            )

    def _read_envelope(self, before: str, after: str) -> dict[str, Any]:
        """Parse what stands around the list."""
        try:
            around = msgspec.json.decode(f"{before}]{after}".encode("latin-1"))
        except (msgspec.DecodeError, UnicodeError):
            raise ValueError(
                f"{self._path}: the JSON object around the list of records is cut off "
                "or no valid JSON; fetch the file again"
            ) from None
        return {k: v for k, v in around.items() if k != self._type.list_key}


def _list_start(window: Window, key: str) -> int:
    """Return the position behind the bracket that opens the list named `key`."""
    opening = re.compile(rf'"{re.escape(key)}"\s*+:\s*+\[', re.ASCII)
    while (found := opening.search(window.text)) is None:
        if not window.advance(0):
            raise ValueError(f"the list {key!r} is not in the file any more")
    return found.end()


def _rest(window: Window, at: int) -> str:
    """Return what follows the list; it is short in every known format."""
    rest = window.text[at:]
    while len(rest) <= CHUNK and window.advance(len(window.text)):
        rest += window.text
    return rest


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


def _json_lines(stream: Readable, path: Path) -> Iterator[RawRecord]:
    """Yield one record a line; blank lines are none."""
    n_records = 0
    for number, line, is_long in _lines(stream):
        if not is_long and not line.strip():
            continue
        n_records += 1
        at = f"line {number}"
        if is_long:
            problem = f"the line is longer than {MAX_RECORD >> 20} MiB"
            yield RawRecord(n_records, at, None, problem)
        else:
            yield RawRecord(n_records, at, *parse_object(line))


class _Rows:
    """Feeds lines to a CSV reader, and takes those back that a bad row swallowed."""

    def __init__(self, stream: Readable, path: Path) -> None:
        self._lines, self._path = _lines(stream), path
        self._again: collections.deque[tuple[int, str]] = collections.deque()
        self._row: list[tuple[int, str]] = []
        self._size = 0  # bytes since the last row

    def begin(self) -> None:
        """Forget the lines of the last row."""
        self._row, self._size = [], 0

    def give_back(self) -> None:
        """Have all lines of this row but its first read again."""
        self._again.extendleft(reversed(self._row[1:]))
        del self._row[1:]

    def place(self) -> str:
        """Return in words where the row lies."""
        first, last = self._row[0][0], self._row[-1][0]
        return f"line {first}" if first == last else f"lines {first}-{last}"

    def is_spread(self) -> bool:
        """Tell whether the row took more than one line."""
        return len(self._row) > 1

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = self._again.popleft() if self._again else self._next_line()
        self._row.append((number, line))
        return line + "\n"

    def _next_line(self) -> tuple[int, str]:
        number, line, is_long = next(self._lines)
        self._size += len(line)
        if is_long or self._size > MAX_RECORD:
            raise ValueError(
                f"{self._path}, line {number}: a row of more than "
                f"{MAX_RECORD >> 20} MiB, perhaps for a quote that is left open; "
                "the file is no table of questions"
            )
        return number, line.decode("utf-8", "surrogateescape")


def _table_rows(stream: Readable, path: Path, delimiter: str) -> Iterator[RawRecord]:
    """Yield one record a row, under the header's names or `column 1`, `column 2`.

    Quoting is CSV's: cells of PopQA and of DPR's question files hold doubled quotes.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))
    rows = _Rows(stream, path)
    reader = csv.reader(rows, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    n_records = 0
    while True:
        rows.begin()
        try:
            cells, problem = next(reader, None), None
        except csv.Error as error:
            cells, problem = [], f"the row is no valid CSV ({error})"
        if cells is None:
            return
        if not cells and problem is None:
            continue  # a blank line
        if names is None and problem is None:
            lowered = {cell.strip().lower() for cell in cells}
            names = list(HEADERLESS)
            if lowered & COLUMNS:
                names = [cell.strip() for cell in cells]
                continue
        n_records += 1
        if rows.is_spread() and (problem or len(cells) != len(names or HEADERLESS)):
            # A quote left open takes the rows behind it in, to the end of the file.
            rows.give_back()
            problem = (problem or "the row has another number of columns") + (
                ": a quote is left open on this line"
            )
        problem = problem or _row_problem(cells, names or [])
        if problem is None and [cell.strip() for cell in cells] == names:
            problem = "the row of column names again"
        value = dict(zip(names or [], cells, strict=True)) if problem is None else None
        yield RawRecord(n_records, rows.place(), value, problem)


def _row_problem(cells: list[str], names: list[str]) -> str | None:
    """Say what is wrong with a row, if anything."""
    if len(cells) != len(names) and tuple(names) == HEADERLESS:
        return (
            "expected two columns (question, list of answers), or a header with known "
            f"names, found {len(cells)}"
        )
    if len(cells) != len(names):
        return f"expected {len(names)} columns, found {len(cells)}"
    for name, cell in zip(names, cells, strict=True):
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            byte = ord(cell[error.start]) - 0xDC00
            return f"not UTF-8: byte 0x{byte:02x} in the column {name!r}"
    return None

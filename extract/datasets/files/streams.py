"""The records of a file one after another, numbered, whatever the container.

Memory is flat in the file's size: arrays are scanned in chunks, lines and table rows
are read one by one, Parquet in small batches. What is no record is passed on with its
number and the reason; only a file that is cut off or damaged as a whole ends reading.
"""

import contextlib
import csv
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from beatrice.extract.datasets.fields import HEADERLESS
from beatrice.extract.datasets.files.json_stream import (
    CHUNK,
    MAX_RECORD,
    JsonValues,
    RawRecord,
    Window,
    parse_object,
)
from beatrice.extract.datasets.files.kinds import (
    COLUMNS,
    FileType,
    Readable,
    open_bytes,
)

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

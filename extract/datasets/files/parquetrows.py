"""The rows of a Parquet file as Python holds them, or why one of them cannot be."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from extract.datasets.files.bytewindow import CHUNK
from extract.datasets.files.filetypes import open_bytes

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

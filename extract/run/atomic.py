"""Files that are whole: replaced in one step, and told apart by their SHA-256.

A file written here is the old one or the new one, never half of either.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_temporary(path: Path, content: bytes) -> str:
    """Write `content` durably beside `path`; return the temporary's name."""
    handle, name = tempfile.mkstemp(
        prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
    )
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp keeps the group out, a result file need not
    except BaseException:
        os.unlink(name)
        raise
    return name


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file in one step; a crash leaves the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = write_temporary(path, text.encode())
    try:
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def write_stream_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file in one step when the block ends.

    For content that does not fit in memory; an error inside leaves the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = write_temporary(path, b"")
    try:
        with open(name, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, since JSON has none."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_tree(path: Path) -> str | None:
    """Hash a file, or a folder by names and contents; None if there is neither."""
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        return None
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256_file(f)}  {f.relative_to(path).as_posix()}\n" for f in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()

"""Files that are whole or grow by whole lines, told apart by SHA-256, read by type.

A file written here is the old one or the new one, never half of either.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import tempfile
import time
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import msgspec

Decoded = TypeVar("Decoded")


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


@contextlib.contextmanager
def write_stream_atomic(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file in one step when the block ends.

    For content that does not fit in memory; an error inside leaves the old file.

    Args:
      path: the file.
      is_new: raise `OtherContent` instead of replacing what is there and differs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = write_temporary(path, b"")
    try:
        with open(name, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if is_new and sha256_tree(path) not in (None, sha256_file(Path(name))):
            raise OtherContent(path)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file in one step; a crash leaves the old content or the new."""
    with write_stream_atomic(path) as stream:
        stream.write(text.encode())


def write_new_text(path: Path, text: str) -> None:
    """Write a file that is not there yet, or has this very content.

    Raises:
      ValueError: a file of other content is there; somebody else's is not replaced.
    """
    if not path.exists():
        write_text_atomic(path, text)
    elif path.read_bytes() != text.encode():
        raise OtherContent(path)


class OtherContent(ValueError):
    """A file is in the way that this program did not write."""

    def __init__(self, path: Path) -> None:
        """Say which, and what to do."""
        super().__init__(
            f"{path} is there already with other content, and is not replaced: move it "
            "elsewhere, or choose another run directory"
        )


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, since JSON has none."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


_SETTLED = 5.0  # seconds; a file that was changed later than that is hashed again
_hashed: dict[tuple[str, int, int, int], str] = {}


@functools.cache
def _decoder(kind: type[Decoded]) -> msgspec.json.Decoder[Decoded]:
    return msgspec.json.Decoder(kind)


def from_json(
    kind: type[Decoded], text: str | bytes, where: str, what_to_do: str = ""
) -> Decoded:
    """Read one JSON value as a type.

    Args:
      kind: a record's class, or another type that msgspec knows.
      text: the JSON.
      where: file, and line number where it has several, for the message.
      what_to_do: ends the message.

    Raises:
      ValueError: the text is not such a value; the message says where and why.
    """
    try:
        return _decoder(kind).decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # it is wrong, or holds a NaN, which Python writes and reads
    try:
        return msgspec.convert(json.loads(text), kind)
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
    name = what.split("`")[1] if "`" in what else ""
    holder = _type_at(kind, path)
    a_holder = f"a {holder.__name__}" if _is_struct(holder) else "an object"
    if what.startswith("Object contains"):
        what = f"unknown field {name!r} in {a_holder}"
        if _is_struct(holder):
            what += f"; known fields are {', '.join(holder.__struct_fields__)}"
    elif what.startswith("Object missing"):
        what = f"{a_holder} needs the field {name!r}"
    elif what.startswith("Invalid enum value "):
        choices = ", ".join(map(str, typing.get_args(holder)))
        found = what.removeprefix("Invalid enum value ")
        what = f"expected one of {choices or 'the known names'}, found {found}"
    else:
        what = what.replace("`", "").replace("Expected", "expected")
        what = what.replace(", got", ", found")
    return f", field {path!r}: {what}" if path else f": {what}"


def _is_struct(kind: Any) -> bool:
    return hasattr(kind, "__struct_fields__")


def _type_at(kind: Any, path: str) -> Any:
    """Return the type of a field, such as that of an element of `passages[...]`."""
    for part in re.findall(r"\w+|\[", path):
        if part == "[":
            inner = [one for one in typing.get_args(kind) if one is not Ellipsis]
            kind = inner[-1] if inner else None
        elif _is_struct(kind):
            kind = typing.get_type_hints(kind).get(part)
    return kind


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


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own SHA-256 as the entry `sha256`."""
    return value | {"sha256": sha256_json(value)}


def read_sealed(path: Path, what_to_do: str) -> dict[str, Any]:
    """Return the object that `seal` made, without its SHA-256, after checking it.

    Args:
      path: a JSON file.
      what_to_do: where it is damaged, in words.

    Raises:
      ValueError: it is missing, is no such object, or was changed since.
    """
    found = read_json(path, dict[str, Any], what_to_do)
    if found.pop("sha256", None) != sha256_json(found):
        raise ValueError(
            f"{path} is damaged or edited: its own SHA-256 does not match; {what_to_do}"
        )
    return found


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as hex.

    A stage asks about all that its inputs were made of, so every file is asked about
    by many stages of one process. Its bytes are read once as long as it does not
    change: one changed a moment ago may change again within a tick of its clock.
    """
    at = path.stat()
    key = (str(path), at.st_ino, at.st_size, at.st_mtime_ns)
    if key not in _hashed:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time() - at.st_mtime < _SETTLED:
            return found
        _hashed[key] = found
    return _hashed[key]


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def sha256_tree(path: Path) -> str | None:
    """Hash a file, or a folder by names and contents; None if there is neither."""
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        return None
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256_file(f)}  {f.relative_to(path).as_posix()}\n" for f in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Write down the SHA-256 of every file below a folder, beside them."""
    sums = {name: sha256_file(folder / name) for name in _names(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1, sort_keys=True))


def verify_checksums(folder: Path) -> None:
    """Check every file of a folder against its checksums.

    Raises:
      ValueError: a file is missing, added or changed, or there are no checksums.
    """
    what_to_do = "copy the folder again or do the stage again"
    expected = read_json(folder / CHECKSUMS, dict[str, str], what_to_do)
    found = _names(folder)
    if odd := sorted(set(expected) ^ set(found)):
        what = "missing" if odd[0] in expected else f"not in {CHECKSUMS}"
        raise ValueError(f"{folder} is damaged: {odd[0]} is {what}; {what_to_do}")
    for name in found:
        if sha256_file(folder / name) != expected[name]:
            raise ValueError(
                f"{folder} is damaged: {name} does not match its SHA-256; {what_to_do}"
            )


def _names(folder: Path) -> list[str]:
    """Relative names of all files below a folder, but the checksums."""
    files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(str(name) for name in files if str(name) != CHECKSUMS)


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line that only grows.

    Attributes:
      truncated: says what was set aside when the file was opened, or None.
    """

    path: Path
    truncated: str | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for appending; an unfinished last line goes to `<name>.truncated`.

        Only the last line can be unfinished, since rows are appended in order; a bad
        line before it is left for the reader to refuse.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return cls(path)
        keep, last = 0, b""
        with path.open("rb") as stream:
            for line in stream:
                keep, last = keep + len(last), line
        if not last or _is_whole(last):
            return cls(path)
        aside = path.with_name(path.name + ".truncated")
        _append(aside, last if last.endswith(b"\n") else last + b"\n")
        with path.open("r+b") as stream:
            stream.truncate(keep)
            os.fsync(stream.fileno())
        return cls(
            path,
            f"{path}: the last line was unfinished ({len(last)} bytes) and is now in "
            f"{aside.name}; its row is done again",
        )

    def append(self, lines: Iterable[str]) -> None:
        """Add rows durably, all or none unless the machine stops in between.

        Args:
          lines: one JSON object each, without the line end.
        """
        batch = list(lines)
        for line in batch:
            if "\n" in line or not line.startswith("{"):
                raise ValueError(
                    f"{self.path}: a row is one JSON object on one line, "
                    f"found {line[:40]!r}"
                )
        if batch:
            _append(self.path, "".join(line + "\n" for line in batch).encode())

    def whole_rows(self, kind: type[Decoded]) -> Iterator[Decoded]:
        """Yield a file's rows as a type, up to the first that is none, as is a cut one.

        Nothing is set aside, nor the file held; who goes on with it opens it.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as lines:
            for line in lines:
                try:
                    yield from_json(kind, line, "")
                except ValueError:
                    return  # its reader refuses what is damaged before the end

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that are there."""
        if not self.path.exists():
            return
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{self.path}, line {number}"
                again = "restore the file, or delete it to do the stage again"
                yield from_json(dict[str, Any], line, where, again)


def _is_whole(line: bytes) -> bool:
    """Tell whether a last line is a finished JSON object."""
    try:
        return line.endswith(b"\n") and bool(from_json(dict[str, Any], line, ""))
    except ValueError:
        return False


def _append(path: Path, content: bytes) -> None:
    """Append and sync; if that fails, cut back to what was there."""
    is_new = not path.exists()
    with path.open("ab", buffering=0) as stream:
        size = stream.tell()
        try:
            written = 0
            while written < len(content):
                written += stream.write(content[written:])
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(size)
            raise
    if is_new:
        sync_folder(path.parent)

"""Files that are replaced whole or grow by whole lines, with checksums and typed rows.

Checksums of large files, and checks whose result follows from a model's bytes,
are done once per machine and remembered in the user's cache under everything that they
depend on. Only successes are remembered; any of these cache files may be deleted.
"""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import socket
import tempfile
import time
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Self, TypeVar

import msgspec

from beatrice.extract.run.process import Share

Decoded = TypeVar("Decoded")
# Names that `temporary` makes, which people are unlikely to choose.
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}(?:\.tmp)?", re.DOTALL)
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL
# Errors of a disk without locks; the last two differ only on a Mac.
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP
# In a folder with checksums: what people edit, and what a Hub, git or a Mac adds.
UNCHECKED = (
    *("README.md", ".cache", ".git", ".gitattributes", ".DS_Store"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"),
)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder`, or the content of a file, survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(
    file: int | BinaryIO, kind: int, flock: Callable[[Any, int], None] = fcntl.flock
) -> bool:
    """Lock a file as `flock` does; return False if its disk has no locks."""
    try:
        flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@functools.cache
def _left_in(folder: Path) -> dict[str, list[Path]]:
    """Return paths with names that `temporary` makes, by the name of their target."""
    left: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        if match := _TEMPORARY.fullmatch(path.name):
            left.setdefault(match[1], []).append(path)
    return left


def _remove_left(path: Path) -> None:
    """Remove temporary files and folders for `path` that killed processes left."""
    for left in _left_in(path.parent).pop(path.name, ()):
        is_file = left.suffix == ".tmp"
        flags = os.O_RDWR | os.O_NONBLOCK if is_file else os.O_DIRECTORY
        with contextlib.suppress(OSError):  # it is locked by a live process, or gone
            handle = os.open(left, flags | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink() if is_file else shutil.rmtree(left)
            finally:
                os.close(handle)


@contextlib.contextmanager
def temporary(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Make an empty file or folder next to `path`; remove it at the end unless renamed.

    It is locked until then: one that is not locked was left by a killed process, and
    the next call for the same `path` removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    while True:
        end = "" if is_folder else ".tmp"
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}{end}")
        # Permissions follow the user's umask, which `tempfile` ignores.
        if is_folder:
            name.mkdir()
        handle = os.open(name, os.O_DIRECTORY if is_folder else _NEW_FILE, 0o666)
        try:
            with contextlib.suppress(OSError):  # a disk may have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if name.exists():  # another process may have removed it before the lock
                yield name
                return
        finally:
            with contextlib.suppress(OSError):  # it has been renamed
                shutil.rmtree(name) if is_folder else name.unlink()
            os.close(handle)


@contextlib.contextmanager
def write_stream_atomic(
    path: Path, *, is_new: bool = False, link: Callable[[Path, Path], None] = os.link
) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file in one step when the block ends.

    For content that does not fit in memory; an error in the block leaves the old file.
    With `is_new`, an existing file with other content is a ValueError.
    """
    with temporary(path) as name:
        with name.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if is_new:
            try:
                link(name, path)  # unlike a rename, this never replaces another's file
            except OSError as error:  # it is there; exFAT and buckets have no links
                if sha256_tree(path) not in (None, sha256_file(name)):
                    raise ValueError(
                        f"{path} is there already with other content, and is not "
                        "replaced: move it elsewhere, or choose another run directory"
                    ) from error
        os.replace(name, path)
    sync_folder(path.parent)


def write_text_atomic(path: Path, text: str, *, is_new: bool = False) -> None:
    """Replace a file in one step, as `write_stream_atomic` does."""
    with write_stream_atomic(path, is_new=is_new) as stream:
        stream.write(text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, since JSON has none."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


SETTLED = 5.0  # seconds; the hash of a file that changed more recently is not kept
_hashed: dict[tuple[str, int, int, int, int], str] = {}


def from_json(
    kind: type[Decoded], text: str | bytes, where: str, what_to_do: str = ""
) -> Decoded:
    """Decode a JSON value as a type; messages begin with `where`, file and line."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # it is invalid, or has a NaN, which Python's `json` accepts
    try:
        return msgspec.convert(json.loads(text), kind)
    except msgspec.ValidationError as error:
        wrong = _in_words(kind, str(error))
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        wrong = f": not a JSON object ({byte} is not UTF-8)"
    except RecursionError:
        wrong = ": not a JSON object (nested too deeply)"
    except ValueError as error:  # also raised for a number of thousands of digits
        wrong = f": not a JSON object ({error})"
    raise ValueError(f"{where}{wrong}{what_to_do and '; '}{what_to_do}")


def _in_words(kind: Any, complaint: str) -> str:
    """Return msgspec's complaint, with the field first and the names expected."""
    what, _, path = complaint.partition(" - at `$")
    path, known = path.strip(".`"), getattr(kind, "__struct_fields__", ())
    names: Sequence[str] = ()
    if what.startswith("Object") and not path:
        names = known
    elif what.startswith("Invalid enum") and path in known:
        names = _names_of(typing.get_type_hints(kind)[path])
    what = what.replace("Expected", "expected").replace(", got", ", found")
    right = f"; expected one of {', '.join(names)}" if names else ""
    return f"{f', field {path!r}' if path else ''}: {what.replace('`', '')}{right}"


def _names_of(hint: Any) -> list[str]:
    """Return the names in a `Literal`, which may be in an optional type."""
    inner = typing.get_args(hint)
    return [
        name for x in inner for name in (_names_of(x) or [x]) if isinstance(name, str)
    ]


def read_json(path: Path, kind: type[Decoded], what_to_do: str) -> Decoded:
    """Return the content of a JSON file as a type."""
    if not path.is_file():  # opening a pipe would block
        what = "not a file" if path.exists() else "missing"
        raise ValueError(f"{path} is {what}; {what_to_do}")
    return from_json(kind, path.read_bytes(), str(path), what_to_do)


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its SHA-256 as the entry `sha256`."""
    return value | {"sha256": sha256_json(value)}


def read_sealed(path: Path, what_to_do: str) -> dict[str, Any]:
    """Return the object that `seal` made, without its SHA-256, after checking it."""
    fields = read_json(path, dict[str, Any], what_to_do)
    if fields.pop("sha256", None) != sha256_json(fields):
        raise ValueError(
            f"{path} is damaged or edited: its own SHA-256 does not match; {what_to_do}"
        )
    return fields


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as hex.

    Many stages of a process need the same hash, so it is kept until the file changes;
    but not right after a change, since more may follow within a tick of the clock.
    """
    at = path.stat()
    # A program can set back the content's time, but not the time of the last change.
    key = (str(path), at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
    if key not in _hashed:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time() - max(at.st_mtime, at.st_ctime) < SETTLED:
            return digest
        _hashed[key] = digest
    return _hashed[key]


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value; the order of its keys does not matter."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, except those that macOS or NFS put there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    of_system = re.compile(r"\.DS_Store$|\._|\.nfs")
    return [path for path in paths if not of_system.match(path.name)]


def sha256_tree(path: Path) -> str | None:
    """Hash a file, or a folder by names and contents; None if there is neither."""
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        return None
    lines = [
        f"{sha256_file(f)}  {f.relative_to(path).as_posix()}\n" for f in _files_in(path)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


CHECKSUMS = "checksums.json"
_COPY_AGAIN = "copy the folder again or do the stage again"


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file below a folder to a file in it."""
    sums = {name: sha256_file(folder / name) for name in _names(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1, sort_keys=True))


def _rename_folder(path: Path, target: Path) -> None:
    """Rename a folder, or copy it if overlayfs refuses (in a container's image)."""
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        try:
            shutil.copytree(path, target, symlinks=True)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        shutil.rmtree(path)


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that replaces `path`, with checksums, if the block succeeds.

    Files in `UNCHECKED` (of git or a Hub, say) that the block does not write are kept.
    """
    path = path.absolute()
    with temporary(path, is_folder=True) as work:
        yield work
        write_checksums(work)
        for part in (*work.rglob("*"), work):  # before the old one is removed
            sync_folder(part)
        if path.exists():
            # Not `temporary`: if the process is killed here, this is the only copy.
            aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            old = aside / path.name
            try:
                _rename_folder(path, old)
                work.rename(path)
            except OSError:
                if old.exists() and not path.exists():
                    old.rename(path)
                aside.rmdir()
                raise
            for name in () if old.is_symlink() else UNCHECKED:
                if (old / name).exists() and not (path / name).exists():
                    (old / name).rename(path / name)
            sync_folder(path.parent)
            # What cannot be removed (open files on NFS) stays next to the new folder.
            shutil.rmtree(aside, ignore_errors=True)
        else:
            work.rename(path)
            sync_folder(path.parent)


def verify_checksums(
    folder: Path,
    sha256_of: Callable[[Path], str] = sha256_file,
    files: Sequence[str] | None = None,
) -> None:
    """Check every file of a folder against its checksum by `write_checksums`.

    With `files`, the folder is a snapshot in the Hub's cache, where other tools may add
    files: only these names are checked.
    """
    again = _COPY_AGAIN
    if files is not None:  # a snapshot only links to the repository's files
        again = f"delete {folder.parents[1]}, and load it again"
    expected = read_json(folder / CHECKSUMS, dict[str, str], again)
    names = [n for n in _names(folder) if files is None or n in files]
    if odd := sorted(set(expected) ^ set(names)):
        what = "missing" if odd[0] in expected else f"not in {CHECKSUMS}"
        raise ValueError(f"{folder} is damaged: {odd[0]} is {what}; {again}")
    for name in names:
        if sha256_of(folder / name) != expected[name]:
            raise ValueError(
                f"{folder} is damaged: {name} does not match its SHA-256; {again}"
            )


@contextlib.contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """Check that a folder with checksums is not replaced while the block reads it.

    Otherwise its files may be those of two folders, each of which is intact.
    """
    before = read_json(folder / CHECKSUMS, dict[str, str], _COPY_AGAIN)
    try:
        yield
    finally:
        if read_json(folder / CHECKSUMS, dict[str, str], _COPY_AGAIN) != before:
            raise ValueError(
                f"{folder} was replaced by another while it was read; load it again"
            )


def _names(folder: Path) -> list[str]:
    """Return relative names of all files below a folder that have a checksum."""
    files = (path.relative_to(folder) for path in _files_in(folder))
    return sorted(str(n) for n in files if n.parts[0] not in (*UNCHECKED, CHECKSUMS))


def open_unlinked(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file as `os.open` does, but refuse a symbolic link.

    A folder from somebody else may contain a link to any of the user's files.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(
            f"{path} is a link, but it is written to and has to be a file; delete the "
            "link, or put the file there"
        ) from None


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line that only grows."""

    path: Path
    truncated: str | None = None  # note on what was set aside when it was opened

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for appending; an unfinished last line goes to `<name>.truncated`.

        Only the last line can be unfinished, since rows are appended in order; a bad
        line before it is left, and an error when it is read.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return cls(path)
        with path.open("rb") as stream:
            last = b"".join(collections.deque(stream, maxlen=1))
        if not last or _is_whole(last):
            return cls(path)
        aside = path.with_name(path.name + ".truncated")
        _append(aside, last if last.endswith(b"\n") else last + b"\n")
        with open(path, "r+b", opener=open_unlinked) as stream:
            stream.truncate(path.stat().st_size - len(last))
            os.fsync(stream.fileno())
        return cls(
            path,
            f"{path}: the last line was unfinished ({len(last)} bytes) and is now in "
            f"{aside.name}; its row is done again",
        )

    def append(self, lines: Iterable[str]) -> int:
        """Append rows, each a JSON object, all or none; return the first's offset."""
        content = "".join(f"{line}\n" for line in lines).encode()
        return _append(self.path, content) if content else 0

    def intact_rows(self, kind: type[Decoded]) -> Iterator[Decoded]:
        """Yield rows as a type, up to the first damaged or unfinished line."""
        return (row for row, _ in _rows(self.path, kind, is_strict=False))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows; a damaged one is a ValueError."""
        return (row for row, _ in _rows(self.path, dict[str, Any], is_strict=True))


class _Location(NamedTuple):
    """Where a line lies, since growing files are too large to keep in memory."""

    path: Path
    start: int
    n_bytes: int


def _rows(
    path: Path, kind: type[Decoded], *, is_strict: bool
) -> Iterator[tuple[Decoded, _Location]]:
    """Yield a file's rows and places up to a damaged line, which raises if strict."""
    if not path.exists():
        return
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                again = "restore the file, or delete it to do the stage again"
                row = from_json(kind, line, f"{path}, line {number}", again)
            except ValueError:
                if is_strict:
                    raise
                return
            if not line.endswith(b"\n") and not is_strict:
                return
            yield row, _Location(path, start, len(line))
            start += len(line)


Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class JournalFiles(Generic[Key, Decoded]):
    """Where the rows of a journal are stored, and which of them count."""

    path: Path  # the file of all rows
    kind: type[Decoded]  # their type
    # Returns a row's key. Of equal keys the first counts; the file precedes the parts.
    key: Callable[[Decoded], Key]
    # Folder in which each process that shares the work writes a file, until one that
    # works alone merges them; None if the work is not shared.
    parts: Path | None = None
    # Whether a row is still valid, such as an answer to the current prompt.
    holds: Callable[[Decoded], bool] = lambda row: True

    def part_files(self) -> list[Path]:
        """Return the files of processes that have not been merged yet."""
        return sorted(self.parts.glob("*.jsonl")) if self.parts else []

    def places(self) -> dict[Key, _Location]:
        """Return by key where the current rows lie, in the file or its parts.

        Changes nothing; each file counts up to its first damaged or unfinished line.
        """
        of_parts: dict[Key, _Location] = {}
        of_file: dict[Key, _Location] = {}
        # Parts are read first: they are deleted only after the file has their rows.
        for file in (*self.part_files(), self.path):
            places = of_file if file == self.path else of_parts
            for row, location in _rows(file, self.kind, is_strict=False):
                if self.holds(row):
                    places.setdefault(self.key(row), location)
        return of_parts | of_file


@dataclasses.dataclass(eq=False)
class Journal(Mapping[Key, Decoded]):
    """Rows by key in a file that only grows, so that a killed stage can continue.

    Memory holds only the rows' places; a row is read from disk when it is needed.
    """

    files: JournalFiles[Key, Decoded]
    lines: JsonLines  # where rows are appended
    notes: list[str]  # what the user should know about opening it, a sentence each
    _places: dict[Key, _Location]

    @classmethod
    def open(
        cls, files: JournalFiles[Key, Decoded], share: Share = Share()
    ) -> "Journal[Key, Decoded]":
        """Open a journal to continue it.

        A process that does all the work merges the parts, and moves invalid rows to
        `<name>.stale`. One that does a share of the work appends to a part of its own;
        the rows of all parts count as present.
        """
        if not share.is_whole and files.parts is not None:
            name = f"{share.rank}-of-{share.world_size}@{socket.gethostname()}"
            share_file = JsonLines.open(files.parts / f"{name}.{os.getpid()}.jsonl")
            return cls(files, share_file, [], files.places())
        path, lines = files.path, JsonLines.open(files.path)
        notes = [lines.truncated] if lines.truncated else []
        places: dict[Key, _Location] = {}
        stale: list[_Location] = []
        for file in (path, *files.part_files()):
            for row, location in _rows(file, files.kind, is_strict=file == path):
                key = files.key(row)
                if key not in places and files.holds(row):
                    places[key] = location
                elif key not in places or file == path:  # else a duplicate in parts
                    stale.append(location)
        journal = cls(files, lines, notes, places)
        if stale:
            aside = path.with_name(path.name + ".stale")
            _append(aside, b"".join(_lines_at(stale)))
            notes.append(
                f"{path}: rows that are no longer asked for, or are duplicates, were "
                f"moved to {aside.name}: {len(stale)}"
            )
        if stale or any(location.path != path for location in places.values()):
            journal._rewrite(list(places))
        if files.parts is not None:
            shutil.rmtree(files.parts, ignore_errors=True)
        return journal

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._places)

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys, in the order of the file."""
        return iter(self._places)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a row for a key, without reading it."""
        return key in self._places

    def __getitem__(self, key: Key) -> Decoded:
        """Read a row."""
        return self.read([key])[0]

    def read(self, keys: Iterable[Key]) -> list[Decoded]:
        """Read the rows of some keys, in their order."""
        places = [self._places[key] for key in keys]
        pairs = zip(places, _lines_at(places), strict=True)
        return [from_json(self.files.kind, x, str(at.path)) for at, x in pairs]

    def append(self, rows: Mapping[Key, str]) -> None:
        """Append rows durably, given as lines of JSON by key: all or none of them."""
        start = self.lines.append(rows.values())
        for key, line in rows.items():
            n_bytes = len(line.encode()) + 1
            self._places[key] = _Location(self.lines.path, start, n_bytes)
            start += n_bytes

    def arrange(self, order: Sequence[Key]) -> None:
        """Put the rows in an order; write nothing if they are in it already."""
        present = [key for key in order if key in self._places]
        if present != list(self._places):
            self._rewrite(present)

    def _rewrite(self, order: Sequence[Key]) -> None:
        """Replace the file in one step by these rows, which may lie in parts."""
        path, places = self.files.path, {}
        with write_stream_atomic(path) as stream:
            lines = _lines_at(self._places[key] for key in order)
            for key, line in zip(order, lines, strict=True):
                places[key] = _Location(path, stream.tell(), len(line))
                stream.write(line)
        self._places = places


def _lines_at(locations: Iterable[_Location]) -> Iterator[bytes]:
    """Yield the lines at some locations, which may be in many files."""
    with contextlib.ExitStack() as opened:
        # Files are kept open, since opening one on another machine's disk is slow.
        sources: dict[Path, BinaryIO] = {}
        for path, start, n_bytes in locations:
            if path not in sources:
                if len(sources) == _MOST_OPEN:
                    opened.close()
                    sources.clear()
                sources[path] = opened.enter_context(path.open("rb"))
            sources[path].seek(start)
            yield sources[path].read(n_bytes)


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and bool(from_json(dict[str, Any], line, ""))
    except ValueError:
        return False


def _append(path: Path, content: bytes) -> int:
    """Append and sync, or restore the file on failure; return its size before."""
    is_new = not path.exists()
    with open(path, "ab", buffering=0, opener=open_unlinked) as stream:
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
    return size


_MOST_OPEN = 64  # most files of a journal's parts that are open at once
_SMALL = 1 << 20  # bytes; a smaller file is hashed in a millisecond
# The code that checks depend on: a checkout changes without a new version.
_SOURCES = ("api", "extract", "jaxprobe", "pgir")
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def user_cache(name: str) -> Path:
    """Return a folder of the user's cache, shared by all runs; it may be deleted."""
    home = os.path.expanduser("~")
    if home == "~":  # no HOME and no account: `/`, which containers set for such users
        home = "/"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return Path(cache, "beatrice", name)


def cached_result(what: str, key: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """Return the result remembered under a key, or compute it with `find` and store it.

    `what` begins the name of the file, such as "parity"; `key` holds all that the
    result depends on. Key and result are JSON values. None and errors are not stored.
    `BEATRICE_REMEMBERED` names a folder to use instead of the user's cache.
    """
    folder = os.environ.get("BEATRICE_REMEMBERED") or user_cache("remembered")
    path = Path(folder) / f"{what}-{sha256_json(key)[:32]}.json"
    with contextlib.suppress(ValueError, OSError):
        entry = read_sealed(path, "delete it")
        if entry["key"] == dict(key):
            return entry["value"]
    value = find()
    if value is not None:
        with contextlib.suppress(OSError):
            write_json_atomic(path, seal({"key": dict(key), "value": value}))
    return value


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a file that may be large, by `cached_result`.

    It is read again if its device, inode, size or one of its times has changed.
    """
    at = path.stat()
    is_settled = time.time() - max(at.st_mtime, at.st_ctime) > SETTLED
    if at.st_size < _SMALL or not is_settled:
        return sha256_file(path)
    key = {
        "path": str(path.resolve()),
        "inode": [at.st_dev, at.st_ino],
        "bytes": at.st_size,
        "times": [at.st_mtime_ns, at.st_ctime_ns],
    }
    return cached_result("sha256", key, lambda: sha256_file(path))


@cache
def software() -> dict[str, str]:
    """Return versions of libraries and Python, a hash of sources, and the machine."""
    root = Path(__file__).parents[2]
    files = [*root.glob("*.py")]
    for room in _SOURCES:
        files += (root / room).rglob("*.py")
    stats = [(str(p.relative_to(root)), p.stat()) for p in sorted(files)]
    sources = [(name, at.st_size, at.st_mtime_ns) for name, at in stats]
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {
        **versions,
        "beatrice": sha256_json(sources),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.node()}",
    }

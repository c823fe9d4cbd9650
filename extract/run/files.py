"""Files that are whole or grow by whole lines, told apart by SHA-256, read by type.

A checksum of a model's file, or a check of a model that comes out alike for the same
bytes, is done once a machine and remembered in the user's cache, under all that it
depends on. Only what was right is remembered; any of these files may be deleted.
"""

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
# What `temporary` makes; a person's own files are hardly called so.
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}(?:\.tmp)?", re.DOTALL)
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL
# What a disk without locks answers; on a Mac the last two are two.
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP
# Of a folder with checksums: what a person edits, and what a Hub, git or a Mac adds.
UNCHECKED = (
    *("README.md", ".cache", ".git", ".gitattributes", ".DS_Store"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"),
)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder`, or what a file holds, survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(
    file: int | BinaryIO, kind: int, flock: Callable[[Any, int], None] = fcntl.flock
) -> bool:
    """Lock a file as `flock` does; return False where its disk has no locks."""
    try:
        flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@functools.cache
def _left_in(folder: Path) -> dict[str, list[Path]]:
    """Return what looks as `temporary` makes it, by what it was to become."""
    left: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        if match := _TEMPORARY.fullmatch(path.name):
            left.setdefault(match[1], []).append(path)
    return left


def _remove_left(path: Path) -> None:
    """Remove what killed processes left that was to become `path`."""
    for left in _left_in(path.parent).pop(path.name, ()):
        is_file = left.suffix == ".tmp"
        flags = os.O_RDWR | os.O_NONBLOCK if is_file else os.O_DIRECTORY
        with contextlib.suppress(OSError):  # a live process holds it, or it is gone
            handle = os.open(left, flags | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink() if is_file else shutil.rmtree(left)
            finally:
                os.close(handle)


@contextlib.contextmanager
def temporary(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Make an empty file or folder beside `path`, which is gone at the end or renamed.

    It is locked until then: where one has no lock, its process was killed, and whoever
    makes the next for the same `path` removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    while True:
        end = "" if is_folder else ".tmp"
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}{end}")
        # Who may read it is the user's umask, which `tempfile` passes over.
        if is_folder:
            name.mkdir()
        handle = os.open(name, os.O_DIRECTORY if is_folder else _NEW_FILE, 0o666)
        try:
            with contextlib.suppress(OSError):  # a disk may have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if name.exists():  # nobody had it before the lock
                yield name
                return
        finally:
            with contextlib.suppress(OSError):  # it has its own name by now
                shutil.rmtree(name) if is_folder else name.unlink()
            os.close(handle)


@contextlib.contextmanager
def write_stream_atomic(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces a file in one step when the block ends.

    For content that does not fit in memory; an error inside leaves the old file. A file
    that is to be new is a ValueError where there is one with other content.
    """
    with temporary(path) as name:
        with name.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if is_new and sha256_tree(path) not in (None, sha256_file(name)):
            raise ValueError(
                f"{path} is there already with other content, and is not replaced: "
                "move it elsewhere, or choose another run directory"
            )
        os.replace(name, path)
    sync_folder(path.parent)


def write_text_atomic(path: Path, text: str, *, is_new: bool = False) -> None:
    """Replace a file in one step, as `write_stream_atomic` does."""
    with write_stream_atomic(path, is_new=is_new) as stream:
        stream.write(text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, since JSON has none."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


SETTLED = 5.0  # seconds; a file that was changed later than that is hashed again
_hashed: dict[tuple[str, int, int, int, int], str] = {}


def from_json(
    kind: type[Decoded], text: str | bytes, where: str, what_to_do: str = ""
) -> Decoded:
    """Read a JSON value as a type; messages begin with `where`, file and line."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # it is wrong, or holds a NaN, which Python writes and reads
    try:
        return msgspec.convert(json.loads(text), kind)
    except msgspec.ValidationError as error:
        wrong = _in_words(kind, str(error))
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        wrong = f": not a JSON object ({byte} is no UTF-8)"
    except RecursionError:
        wrong = ": not a JSON object (nested too deeply)"
    except ValueError as error:  # a number of thousands of digits is one, too
        wrong = f": not a JSON object ({error})"
    raise ValueError(f"{where}{wrong}{what_to_do and '; '}{what_to_do}")


def _in_words(kind: Any, complaint: str) -> str:
    """Return what msgspec says, the field first, and which names would be right."""
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
    """Return the names in a `Literal`, which may be optional."""
    inner = typing.get_args(hint)
    return [
        name for x in inner for name in (_names_of(x) or [x]) if isinstance(name, str)
    ]


def read_json(path: Path, kind: type[Decoded], what_to_do: str) -> Decoded:
    """Return what a JSON file of a run holds."""
    if not path.is_file():  # a pipe would be waited for
        what = "no file" if path.exists() else "missing"
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

    Many stages of one process ask about the same file: its bytes are read once as long
    as it does not change. One changed a moment ago may change again within a tick.
    """
    at = path.stat()
    # A program can set back the time of the content, not that of the change.
    key = (str(path), at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
    if key not in _hashed:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time() - max(at.st_mtime, at.st_ctime) < SETTLED:
            return digest
        _hashed[key] = digest
    return _hashed[key]


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _is_of_system(path: Path) -> bool:
    """Tell whether macOS (`.DS_Store`, `._x`) or NFS (`.nfs…`) puts such a file."""
    return path.name == ".DS_Store" or path.name.startswith(("._", ".nfs"))


def _files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, but those that the system put there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if not _is_of_system(path)]


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


def write_checksums(folder: Path) -> None:
    """Write down the SHA-256 of every file below a folder, beside them."""
    sums = {name: sha256_file(folder / name) for name in _names(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1, sort_keys=True))


def _rename_folder(path: Path, target: Path) -> None:
    """Rename a folder, also one of a container's image, which overlayfs refuses."""
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
    """Give a folder that replaces `path`, with checksums, if the block ends well.

    What git or a Hub put there (`UNCHECKED`), and the block does not write, stays.
    """
    path = path.absolute()
    with temporary(path, is_folder=True) as work:
        yield work
        write_checksums(work)
        for part in (*work.rglob("*"), work):  # before the old one goes
            sync_folder(part)
        if path.exists():
            # No `temporary`: of a process killed here it is all that is left.
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
            # The new folder is there: what cannot go, as what others have open on NFS,
            # stays beside it.
            shutil.rmtree(aside, ignore_errors=True)
        else:
            work.rename(path)
            sync_folder(path.parent)


def verify_checksums(
    folder: Path,
    sha256_of: Callable[[Path], str] = sha256_file,
    files: Sequence[str] | None = None,
) -> None:
    """Check every file of a folder against those that `write_checksums` wrote.

    `files` are those of a folder that others fill too, as the Hub's cache is.
    """
    what_to_do = "copy the folder again or do the stage again"
    expected = read_json(folder / CHECKSUMS, dict[str, str], what_to_do)
    names = [n for n in _names(folder) if files is None or n in files]
    if odd := sorted(set(expected) ^ set(names)):
        what = "missing" if odd[0] in expected else f"not in {CHECKSUMS}"
        raise ValueError(f"{folder} is damaged: {odd[0]} is {what}; {what_to_do}")
    for name in names:
        if sha256_of(folder / name) != expected[name]:
            raise ValueError(
                f"{folder} is damaged: {name} does not match its SHA-256; {what_to_do}"
            )


def _names(folder: Path) -> list[str]:
    """Relative names of all files below a folder, but those that may change."""
    files = (path.relative_to(folder) for path in _files_in(folder))
    return sorted(str(n) for n in files if n.parts[0] not in (*UNCHECKED, CHECKSUMS))


def open_unlinked(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file as `os.open` does, but none that a link of that name points to.

    A folder from somebody else may hold such a link, to any file of whoever opens it.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(
            f"{path} is a link, expected a file, since it is written to; delete the "
            "link, or put the file there"
        ) from None


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line that only grows."""

    path: Path
    truncated: str | None = None  # what was set aside when it was opened, in words

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
        with open(path, "r+b", opener=open_unlinked) as stream:
            stream.truncate(keep)
            os.fsync(stream.fileno())
        return cls(
            path,
            f"{path}: the last line was unfinished ({len(last)} bytes) and is now in "
            f"{aside.name}; its row is done again",
        )

    def append(self, lines: Iterable[str]) -> int:
        """Add rows, an object each, all or none; returns where the first begins."""
        content = "".join(f"{line}\n" for line in lines).encode()
        return _append(self.path, content) if content else 0

    def intact_rows(self, kind: type[Decoded]) -> Iterator[Decoded]:
        """Yield rows as a type, up to the first damaged or unfinished line."""
        return (row for row, _ in _rows(self.path, kind, is_strict=False))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that are there."""
        return (row for row, _ in _rows(self.path, dict[str, Any], is_strict=True))


class _Location(NamedTuple):
    """Where a line lies: growing files are larger than memory should hold."""

    path: Path
    start: int
    n_bytes: int


def _rows(
    path: Path, kind: type[Decoded], *, is_strict: bool
) -> Iterator[tuple[Decoded, _Location]]:
    """Yield each row of a file and its place, up to the first line that is damaged."""
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
    """Where the rows of a journal lie, and which of them count."""

    path: Path  # the file of all rows
    kind: type[Decoded]  # their type
    # Of a row; the first of a key counts, that of the file before those of parts.
    key: Callable[[Decoded], Key]
    # Folder in which processes that share the work write a file each, until one that
    # works alone takes them in; None where nobody shares it.
    parts: Path | None = None
    # Whether a row still belongs here, such as an answer to the prompt of now.
    holds: Callable[[Decoded], bool] = lambda row: True

    def part_files(self) -> list[Path]:
        """Return what processes have written that nobody has taken in yet."""
        return sorted(self.parts.glob("*.jsonl")) if self.parts else []

    def places(self) -> dict[Key, _Location]:
        """Return by key where the rows lie, in the file or a part of it, by now.

        Changes nothing; of a damaged or unfinished line on, a file counts no more.
        """
        of_parts: dict[Key, _Location] = {}
        of_file: dict[Key, _Location] = {}
        # Parts are read first: they go only after the file has their rows.
        for file in (*self.part_files(), self.path):
            places = of_file if file == self.path else of_parts
            for row, location in _rows(file, self.kind, is_strict=False):
                if self.holds(row):
                    places.setdefault(self.key(row), location)
        return of_parts | of_file


@dataclasses.dataclass(eq=False)
class Journal(Mapping[Key, Decoded]):
    """Rows by key in a file that only grows, so that a killed stage continues.

    In memory are places alone; a row is read again when it is asked for.
    """

    files: JournalFiles[Key, Decoded]
    lines: JsonLines  # where rows are appended
    notes: list[str]  # what a person should know of the opening, a sentence each
    _places: dict[Key, _Location]

    @classmethod
    def open(
        cls, files: JournalFiles[Key, Decoded], share: Share = Share()
    ) -> "Journal[Key, Decoded]":
        """Open a journal to go on with it.

        Whoever does all the work takes in what is in parts, and moves rows that do not
        hold to `<name>.stale`. Whoever does a share of it appends to a part of its own,
        and the rows of all parts count as there.
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
                elif key not in places or file == path:  # else done twice, in parts
                    stale.append(location)
        journal = cls(files, lines, notes, places)
        if stale:
            aside = path.with_name(path.name + ".stale")
            _append(aside, b"".join(_lines_at(stale)))
            notes.append(
                f"{path}: {len(stale)} rows are no longer asked for, or are there "
                f"twice, and now lie in {aside.name}"
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
        """Return whether there is a row, without reading it."""
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
        """Add rows durably, as lines of JSON by key; all or none of them."""
        start = self.lines.append(rows.values())
        for key, line in rows.items():
            n_bytes = len(line.encode()) + 1
            self._places[key] = _Location(self.lines.path, start, n_bytes)
            start += n_bytes

    def arrange(self, order: Sequence[Key]) -> None:
        """Put the rows into an order; nothing is written if they have it."""
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
    """Yield lines, in any order; parts of a journal may be many files."""
    with contextlib.ExitStack() as opened:
        # Kept open: to open a file is slow on another machine's disk.
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
    """Append and sync; if that fails, cut back. Returns the file's size before."""
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


_MOST_OPEN = 64  # files of a journal's parts at once
_SMALL = 1 << 20  # bytes; a smaller file is hashed in a millisecond
# What the checks run: a release has one version, a checkout changes under it.
_SOURCES = ("api", "extract", "jaxprobe", "pgir")
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def user_cache(name: str) -> Path:
    """Return a folder of the user's cache, once for all runs; it may be deleted."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "beatrice" / name


def remembered(what: str, key: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """Return what was found under a key before, or find it and remember it.

    `what` names its files, such as "parity"; the key holds all that the result depends
    on. Both are JSON values. None, or an error, is not remembered.
    `BEATRICE_REMEMBERED` names another place than the user's cache.
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


def sha256_of_model(path: Path) -> str:
    """Return the SHA-256 of a model's file; of a large one once until it changes.

    Whoever writes to a file changes its time of change, which no program sets. So a
    file is hashed again unless device, inode, size and both times are as they were.
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
    return remembered("sha256", key, lambda: sha256_file(path))


@cache
def software() -> dict[str, str]:
    """Return what computes: this package's sources, libraries and the processor."""
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

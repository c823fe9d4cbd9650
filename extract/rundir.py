"""One directory per experiment: where things lie, who holds it, what is finished.

Standard library only, so that every room may import it. Three promises:

  * a file written here is the old one or the new one, never half of either;
  * a directory holds one configuration, and one process changes it at a time;
  * a stage counts as finished only while its inputs and outputs are the files it
    was finished with.
"""

import dataclasses
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from extract.records import SETTINGS, Setting

_PACKAGES = (
    "beatrice-probe",
    "flax",
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tensorstore",
    "tokenizers",
    "torch",
    "transformers",
)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_temporary(path: Path, content: bytes) -> str:
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
    name = _write_temporary(path, text.encode())
    try:
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    _sync_folder(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, since JSON has none."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_tree(path: Path) -> str | None:
    """Hash a file, or a folder by names and contents; None if there is neither."""
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        return None
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256_file(f)}  {f.relative_to(path).as_posix()}\n" for f in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What a finished stage leaves behind.

    Attributes:
      inputs: SHA-256 (or another identity) of what it read, by name. A name that is
        a path in the run directory is hashed again when the stage is asked about.
      outputs: SHA-256 of the files and folders it wrote, by path in the run
        directory.
      seconds: wall time.
      finished: UTC.
      versions: of Python and packages, as they were then.
    """

    stage: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    seconds: float
    finished: str
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one experiment.

    `RunDir(path)` only names paths. `RunDir.open` creates or continues a run and
    holds it until `close`, or the end of a `with` block.
    """

    path: Path
    _lock: BinaryIO | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def examples(self) -> Path:
        """Questions, one `Example` per line."""
        return self.path / "examples.jsonl"

    @property
    def passages(self) -> Path:
        """What the retrievers search, one passage per line."""
        return self.path / "passages.jsonl"

    @property
    def answers(self) -> Path:
        """Folder of `Answer` lines."""
        return self.path / "answers"

    @property
    def labels(self) -> Path:
        """Verdicts, one `Label` per line."""
        return self.path / "labels.jsonl"

    def features(self, setting: Setting) -> Path:
        """Feature store of one setting."""
        return self.path / "features" / _known(setting)

    @property
    def sweep(self) -> Path:
        """Layer sweep."""
        return self.path / "sweep.json"

    def encoders(self, setting: Setting) -> Path:
        """Trained combination encoders of one setting."""
        return self.path / "encoders" / _known(setting)

    def selection(self, setting: Setting) -> Path:
        """Selected encoders of one setting."""
        return self.path / "selection" / f"{_known(setting)}.json"

    @property
    def detector(self) -> Path:
        """Folder of the calibrated detector."""
        return self.path / "detector"

    @property
    def control(self) -> Path:
        """Folder of the retrieval controllers."""
        return self.path / "control"

    @property
    def results(self) -> Path:
        """Every number, one row per line."""
        return self.path / "results.jsonl"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    @property
    def manifest(self) -> Path:
        """Configuration and versions; a folder without it is no run directory."""
        return self.path / "manifest.json"

    @property
    def stages(self) -> Path:
        """Folder of stage records."""
        return self.path / "stages"

    @classmethod
    def open(
        cls, path: Path | str, config: Mapping[str, Any], *, exclusive: bool = True
    ) -> Self:
        """Create a run directory, or continue one of the same configuration.

        Args:
          path: the directory; created if absent, taken if empty.
          config: what the run's numbers depend on; JSON values.
          exclusive: hold the directory alone. False for the workers of one stage
            that a launcher starts together (each writes files of its own).

        Raises:
          ValueError: the path is something else, holds another configuration, or
            another live process holds it.
        """
        path = Path(path)
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path / "lock") if exclusive else None
        run = cls(path, lock)
        try:
            run._agree_on(config)
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None and not self._lock.closed:
            self._lock.truncate(0)
            self._lock.close()

    def __enter__(self) -> Self:
        """Return the run itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of the directory."""
        self.close()

    def _agree_on(self, config: Mapping[str, Any]) -> None:
        """Write the manifest, or compare with the one that is there."""
        asked = json.loads(json.dumps(config, allow_nan=False))
        manifest = {
            "format": "beatrice-run",
            "version": 1,
            "config": asked,
            "created": _now(),
            "versions": package_versions(),
        }
        if not self.manifest.exists():
            text = json.dumps(manifest, indent=2) + "\n"
            name = _write_temporary(self.manifest, text.encode())
            try:
                os.link(name, self.manifest)  # unlike a rename, never over another's
                _sync_folder(self.path)
            except FileExistsError:
                pass  # a worker started beside this one was first; compare with it
            finally:
                os.unlink(name)
        held = read_manifest(self.path)["config"]
        if held != asked:
            here, there = _differences(held, asked)
            raise ValueError(
                f"{self.path} holds a run with {here}; you asked for {there}; "
                "choose another directory, or repeat that run's options"
            )

    def mark_stage(
        self,
        name: str,
        inputs: Mapping[str, str],
        seconds: float,
        outputs: Iterable[Path | str] = (),
    ) -> StageRecord:
        """Record that a stage is finished; call it after its last file is written.

        Args:
          name: the stage's name.
          inputs: identity of everything the stage read, see `StageRecord`.
          seconds: wall time.
          outputs: files and folders it wrote, inside the run directory.
        """
        found = {
            self._relative(path): _sha256_tree(self.path / path) for path in outputs
        }
        missing = [path for path, sha in found.items() if sha is None]
        if missing:
            raise ValueError(
                f"stage {name!r} says it wrote {missing[0]}, which is not in "
                f"{self.path}; mark a stage after its files are written"
            )
        record = StageRecord(
            stage=name,
            inputs=dict(inputs),
            outputs={path: str(sha) for path, sha in found.items()},
            seconds=round(seconds, 3),
            finished=_now(),
            versions=package_versions(),
        )
        write_json_atomic(self._stage_file(name), dataclasses.asdict(record))
        return record

    def stage_record(self, name: str) -> StageRecord | None:
        """Return what a stage left behind, or None if it is not finished."""
        path = self._stage_file(name)
        if not path.exists():
            return None
        try:
            return StageRecord(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            return None  # of an older program or damaged: the stage is done again

    def stage_gap(
        self, name: str, inputs: Mapping[str, str] | None = None
    ) -> str | None:
        """Say why a stage must be done (again), or return None if it is done.

        Args:
          name: the stage's name.
          inputs: identities as they are now. Without them, recorded inputs that are
            paths in the run directory are hashed again and the others are believed.
        """
        record = self.stage_record(name)
        if record is None:
            return f"stage {name} has no record yet"
        now = self._rehash(record.inputs) if inputs is None else dict(inputs)
        for kind, then, current in (
            ("input", record.inputs, now),
            ("output", record.outputs, self._rehash(record.outputs, gone="")),
        ):
            changed = sorted(
                key
                for key in then.keys() | current.keys()
                if then.get(key) != current.get(key)
            )
            if changed:
                return f"stage {name}: its {kind} {changed[0]} has changed since"
        return None

    def stage_done(self, name: str, inputs: Mapping[str, str] | None = None) -> bool:
        """Tell whether a stage is finished and nothing under it has changed."""
        return self.stage_gap(name, inputs) is None

    def hash_inputs(self, *paths: Path | str) -> dict[str, str]:
        """Return the identities of files and folders of this run, for a stage."""
        hashes = {
            self._relative(path): _sha256_tree(self.path / path) for path in paths
        }
        for path, sha in hashes.items():
            if sha is None:
                raise ValueError(
                    f"{self.path / path} is missing; run the stage that writes it first"
                )
        return {path: str(sha) for path, sha in hashes.items()}

    def _rehash(
        self, recorded: Mapping[str, str], gone: str | None = None
    ) -> dict[str, str]:
        """Hash recorded paths again; what is no path keeps its value, or `gone`."""
        return {
            path: _sha256_tree(self.path / path) or (sha if gone is None else gone)
            for path, sha in recorded.items()
        }

    def _stage_file(self, name: str) -> Path:
        """Path of one stage record."""
        return self.stages / f"{name}.json"

    def _relative(self, path: Path | str) -> str:
        """Path inside the run directory."""
        return (self.path / path).relative_to(self.path).as_posix()


def _known(setting: Setting) -> Setting:
    """Check a setting's name."""
    if setting not in SETTINGS:
        raise ValueError(f"a setting is one of {', '.join(SETTINGS)}, not {setting!r}")
    return setting


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory.

    Raises:
      ValueError: there is none, or it is no manifest of ours.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise ValueError(f"{path} is no run directory: it has no manifest.json")
    try:
        manifest = json.loads(file.read_text())
        ours = manifest["format"] == "beatrice-run" and manifest["version"] == 1
        manifest["config"]
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(
            f"{file} is not a manifest this program reads (beatrice-run, version 1); "
            "choose another directory"
        )
    return manifest


def _refuse_foreign(path: Path) -> None:
    """Raise if `path` is a file, or a folder with other people's things in it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a directory of its own")
    if (path / "manifest.json").exists():
        return
    ours = ("lock", ".manifest.json.")  # of a run that was killed while being created
    others = sorted(p.name for p in path.iterdir() if not p.name.startswith(ours))
    # Looked up again: a worker beside this one may have created the run meanwhile.
    if others and not (path / "manifest.json").exists():
        raise ValueError(
            f"{path} is not empty and no run directory (it holds {others[0]!r}, and no "
            "manifest.json); choose another directory"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to dotted names."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value}
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _differences(held: Any, asked: Any) -> tuple[str, str]:
    """Spell out, for both sides, the entries that differ."""
    sides = _flat(held), _flat(asked)
    both = list(dict.fromkeys([*sides[0], *sides[1]]))
    differ = [
        key
        for key in both
        if any(key not in side for side in sides) or sides[0][key] != sides[1][key]
    ]
    first, second = (
        ", ".join(f"{k}={side[k]!r}" if k in side else f"no {k}" for k in differ)
        for side in sides
    )
    return first, second


def _boot_id() -> str:
    """Identify the running kernel, which containers on one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _take_lock(path: Path) -> BinaryIO:
    """Hold the lock file; closing what is returned lets go.

    The kernel's lock ends with its owner, so a dead owner on this machine is no
    obstacle. It may not reach across machines (network file systems), therefore the
    file also says who holds it, and an owner on another machine is believed.
    """
    here = {"host": socket.gethostname(), "boot": _boot_id()}
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", 0)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_held = False
    except BlockingIOError:
        is_held = True
    owner = _lock_owner(stream)
    same_kernel = here["boot"] and owner.get("boot") == here["boot"]
    is_away = bool(owner) and owner.get("host") != here["host"] and not same_kernel
    if is_held or is_away:
        stream.close()
        do = f"if that process is gone, delete {path}" if is_away else "wait or end it"
        raise ValueError(
            f"{path.parent} is in use by process {owner.get('pid', 'unknown')} on "
            f"{owner.get('host', here['host'])} since {owner.get('started', '?')}; {do}"
        )
    stream.truncate(0)
    mine = {"pid": os.getpid(), **here, "started": _now()}
    stream.write(json.dumps(mine).encode() + b"\n")
    os.fsync(stream.fileno())
    return stream


def _lock_owner(stream: BinaryIO) -> dict[str, Any]:
    """Read who wrote the lock file; empty if nobody did, or was killed doing it."""
    try:
        owner = json.loads(stream.read())
    except ValueError:
        return {}
    finally:
        stream.seek(0)
    return owner if isinstance(owner, dict) else {}


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file of one JSON object per line that only grows.

    Attributes:
      torn: says what was set aside when the file was opened, or None.
    """

    path: Path
    torn: str | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for appending; an unfinished last line goes to `<name>.torn`.

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
        aside = path.with_name(path.name + ".torn")
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

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that are there."""
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(
                        f"{self.path}, line {number}: not a JSON object ({error}); "
                        "restore the file, or delete it to do the stage again"
                    ) from None


def _is_whole(line: bytes) -> bool:
    """Tell whether a last line is a finished JSON object."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
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
        _sync_folder(path.parent)

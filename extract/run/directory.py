"""One directory per experiment: where things lie, who holds it, what is finished.

Neither Torch nor JAX, as in the modules imported here, so that every room may import
it. Three promises:

  * a file written here is the old one or the new one, never half of either;
  * a directory holds one run's settings, and one process changes it at a time;
  * a stage counts as finished only while its inputs and outputs are the files it
    was finished with.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar, get_args

import msgspec

from beatrice.extract.records import Record, Setting
from beatrice.extract.run.files import (
    lock_file,
    open_unlinked,
    read_json,
    read_sealed,
    seal,
    sha256_tree,
    sync_folder,
    temporary,
    write_json_atomic,
)
from beatrice.extract.run.process import Share

MAKE_A_RUN = (
    "questions of your own become a run with `beatrice data NEW_RUN --train NAME=FILE`"
)
# What people write and correct by hand, and the answers, which their stage goes on
# from: never replaced, or taken for its own, where it was changed. If that was meant:
FOR_PEOPLE = {
    "examples.jsonl": f"start a new run ({MAKE_A_RUN})",
    "passages.jsonl": f"start a new run ({MAKE_A_RUN})",
    "rewrites.jsonl": "delete it to have the contexts rewritten again",
    "answers": "delete the folder to have all questions answered again",
    "labels.jsonl": "move it elsewhere and give it to `beatrice label --import FILE`",
}


class NotWritten(ValueError):
    """A file or folder that a stage reads is missing."""

    def __init__(self, run: Path, name: str) -> None:
        """Name what is missing; which verb writes it, the command line knows."""
        self.run, self.name = run, name
        super().__init__(f"{run / name} is missing")


def utc_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class InUse(ValueError):
    """A live process holds the directory."""


def _boot_id() -> str:
    """Identify the running kernel, which containers on one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def acquire_lock(
    path: Path,
    *,
    shared: bool = False,
    flock: Callable[[Any, int], None] = fcntl.flock,
) -> BinaryIO:
    """Lock a file until the returned stream is closed; raises `InUse`.

    The kernel's lock ends with its owner. It may not reach across machines (network
    file systems), therefore the file also says who holds it, and an owner on another
    machine is believed. A shared lock writes nothing into the file. Where the disk has
    no locks nobody is kept out, and a shared one is a ValueError.
    """
    here = {"host": socket.gethostname(), "boot": _boot_id()}
    file = open_unlinked(path, os.O_RDWR | os.O_CREAT)
    stream = os.fdopen(file, "r+b", 0)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        has_locks = lock_file(stream, kind | fcntl.LOCK_NB, flock)
        is_held = False
    except BlockingIOError:
        has_locks = is_held = True
    if shared and not has_locks:
        stream.close()
        raise ValueError(
            f"{path.parent} lies on a disk without locks, by which processes that "
            "share the work keep others out; put it on another disk, or let one "
            "process do all of the work"
        )
    owner = _lock_owner(stream)
    same_kernel = here["boot"] and owner.get("boot") == here["boot"]
    is_away = bool(owner) and owner.get("host") != here["host"] and not same_kernel
    if is_held or is_away:
        stream.close()
        # Whoever has the kernel's lock lives, whatever the machine was called then.
        do = "wait or end it" if is_held else f"if that process is gone, delete {path}"
        who = (
            f"process {owner.get('pid', 'unknown')} on "
            f"{owner.get('host', here['host'])} since {owner.get('started', '?')}"
            if owner
            else "workers that a launcher started, or a process that just began"
        )
        raise InUse(f"{path.parent} is in use by {who}; {do}")
    stream.truncate(0)
    if shared:
        return stream
    mine = {"pid": os.getpid(), **here, "started": utc_now()}
    stream.write(json.dumps(mine).encode() + b"\n")
    os.fsync(stream.fileno())
    return stream


def _lock_owner(stream: BinaryIO) -> dict[str, Any]:
    """Read who wrote the lock file; empty if nobody did, or was killed doing it."""
    try:
        owner = json.loads(stream.read())
    except (ValueError, RecursionError):
        return {}
    finally:
        stream.seek(0)
    return owner if isinstance(owner, dict) else {}


Preset = Literal["demo", "few", "smoke", "paper"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
FORMAT, VERSION = "beatrice-run", 4
MANIFEST = "manifest.json"  # a folder without it is no run directory
Section = TypeVar("Section")

_PACKAGES = (
    "beatrice-probe flax jax jaxlib numpy openai optax orbax-checkpoint safetensors "
    "scikit-learn scipy tensorstore tokenizers torch transformers"
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRun:
    """What makes a run directory the run that it is."""

    preset: Preset = "demo"  # sizes that every verb's section starts from
    seed: int = 0  # of training, selection and bootstrap
    # Settings of `backbone`, and of `world` or `data`; a frozen dataclass each.
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def as_json(settings: Any) -> Any:
    """Return a settings dataclass as the JSON value that a manifest holds."""
    return json.loads(json.dumps(dataclasses.asdict(settings), allow_nan=False))


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the file holds, beside its own SHA-256."""

    format: Literal["beatrice-run"]
    version: Literal[4]
    preset: Preset
    seed: int
    sections: dict[str, dict[str, Any]]
    created: str
    versions: dict[str, str]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return preset, seed, sections, creation and versions of a run directory."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} is no run directory: it has no manifest.json")
    saved = read_json(file, dict[str, Any], "restore it, or start a new run directory")
    if (saved.get("format"), saved.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{file} is not a manifest this program reads ({FORMAT}, version "
            f"{VERSION}); another version made it: start a new run directory"
        )
    manifest = read_sealed(
        file, "restore it; settings are given as options of the verbs"
    )
    try:
        msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}; start a new run directory") from None
    return manifest


def decode_section(content: Any, kind: type[Section], where: str) -> Section:
    """Return settings from their JSON value; unknown fields are refused too."""
    try:
        section = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
    else:
        wanted = as_json(section)
        if wanted == content:
            return section
        known, given = dict(_dotted(wanted, content)), dict(_dotted(content, wanted))
        reason = "a value of it is written otherwise"
        for name in sorted(known.keys() ^ given.keys(), reverse=True):
            what = "missing" if name in known else "unknown"
            reason = f"its field {name!r} is {what}"
    raise ValueError(
        f"{where}: {reason}; another version of this program made it: start a new run "
        "directory"
    )


def write_or_compare_manifest(
    path: Path, settings: NewRun, link: Callable[[Path, Path], None] = os.link
) -> None:
    """Write the manifest, or compare with the one that is there."""
    file, wanted = path / MANIFEST, {"preset": settings.preset, "seed": settings.seed}
    sections = {name: as_json(section) for name, section in settings.sections.items()}
    if not file.exists():
        manifest = {"format": FORMAT, "version": VERSION, **wanted}
        manifest |= {"sections": sections, "created": utc_now()}
        manifest["versions"] = package_versions()
        content = json.dumps(seal(manifest), indent=2, allow_nan=False) + "\n"
        with temporary(file) as name, name.open("wb") as stream:
            stream.write(content.encode())
            stream.flush()
            os.fsync(stream.fileno())
            try:
                link(name, file)  # unlike a rename, never over another's
            except FileExistsError:
                pass  # a worker started beside this one was first: compare with its
            except OSError:  # exFAT, or what mounts a bucket, has no links
                if not file.exists():
                    os.replace(name, file)
            sync_folder(path)
    manifest = read_manifest(path)
    for name in sections:
        if name not in manifest["sections"]:
            raise ValueError(
                f"{path} holds a run with no {name}; you asked for one with {name}; "
                "choose another directory"
            )
    recorded = {name: manifest[name] for name in wanted}
    recorded |= {name: manifest["sections"][name] for name in sections}
    check_same(path, recorded, wanted | sections)


class OtherSettings(ValueError):
    """A run has other settings than those that are asked for."""


def check_same(
    path: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Check that settings are those that a run has; raises `OtherSettings`."""
    here, there = dict(_dotted(recorded, wanted)), dict(_dotted(wanted, recorded))
    names = [
        name
        for name in here | there
        if (name in here, here.get(name)) != (name in there, there.get(name))
    ]
    if "preset" in names:  # their sizes follow from it
        follows = ("world.", "answer.", "extract.")
        names = [name for name in names if not name.startswith(follows)]
    if not names:
        return
    has, requested = (
        ", ".join(f"{n}={side[n]!r}" if n in side else f"no {n}" for n in names)
        for side in (here, there)
    )
    raise OtherSettings(
        f"{path} holds a run with {has}; you asked for {requested}; choose another "
        "directory, or repeat that run's options"
    )


def _dotted(
    settings: Mapping[str, Any], others: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield every entry by its dotted name; a group that others have not is one."""
    for name, value in settings.items():
        other = others.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _dotted(value, other, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_not_foreign(path: Path) -> None:
    """Check that a path is no file, and no folder with other people's things."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a directory of its own")
    if (path / MANIFEST).exists():
        return
    names = sorted(p.name for p in path.iterdir())
    # Left by a run that was killed while it was created.
    others = [n for n in names if n != "lock" and not n.startswith(".manifest.json.")]
    # Looked up again: a worker beside this one may have created the run meanwhile.
    if others and not (path / MANIFEST).exists():
        raise ValueError(
            f"{path} is not empty and no run directory (it holds {others[0]!r}, and no "
            "manifest.json); choose another directory; your own questions stay where "
            "they are: `beatrice data NEW_RUN --train NAME=FILE` makes a run of them"
        )


class StageRecord(Record, frozen=True, kw_only=True):
    """What a finished stage leaves behind; on disk with its own SHA-256."""

    stage: str
    # SHA-256 (or another identity) of what it read, by name. A name that is a path in
    # the run directory is hashed again when the stage is asked about.
    inputs: dict[str, str]
    outputs: dict[str, str]  # SHA-256 of what it wrote, by path in the run directory
    verb: str  # what of the command line does it, such as "select --exhaustive"
    seconds: float  # wall time of the start that finished it
    finished: str  # UTC; empty while the stage is done again
    versions: dict[str, str]  # of Python and packages, as they were then


def _at(name: str, text: str) -> Any:
    return property(lambda run: run.path / name, doc=text)


@dataclasses.dataclass(frozen=True)
class RunDir(contextlib.AbstractContextManager["RunDir"]):
    """Paths of one experiment; one that `RunDir.open` returns is held until `close`."""

    path: Path  # of the directory
    # Which part of a stage's work the process that holds the run does.
    share: Share = dataclasses.field(default=Share(), compare=False)
    _lock: BinaryIO | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the path absolute: stages hand whole paths around."""
        object.__setattr__(self, "path", Path(self.path).absolute())

    examples = _at("examples.jsonl", "Questions, one `Example` per line.")
    passages = _at("passages.jsonl", "What the retrievers search, one per line.")
    rewrites = _at("rewrites.jsonl", "One `Rewrite` per line; absent without rewrites.")
    splits_file = _at("splits.json", "Splits; absent in the microworld.")
    answers = _at("answers", "Folder of `Answer` lines.")
    answers_file = _at("answers/answers.jsonl", "All answers.")
    left_out_file = _at("answers/left_out.jsonl", "Not asked; absent if all was.")
    written = _at("written", "Signals read with the answers, until `extract` is done.")
    labels = _at("labels.jsonl", "Verdicts, one `Label` per line.")
    audit = _at("audit", "Folder of what is known about the labels' quality.")
    samples = _at("samples", "Folder of drawn answers.")
    samples_file = _at("samples/samples.jsonl", "All of them; absent without any.")
    draw_seconds_file = _at("samples/seconds.json", "Of one of them, by setting.")
    sweep = _at("sweep.json", "Layer sweep.")
    selection = _at("selection", "Selected encoders and heads, a folder a branch.")
    detector = _at("detector", "Folder of the calibrated detector.")
    control = _at("control", "Folder of the retrieval controllers.")
    results = _at("results.jsonl", "Every number, one row per line.")
    report = _at("report.html", "The report.")
    manifest = _at(MANIFEST, "Settings and versions; see `read_manifest`.")
    stages = _at("stages", "Folder of stage records.")

    def replies(self, role: str) -> Path:
        """What was written in one role, by key: judge, judge_with, rewrite, sample."""
        return self.path / "replies" / f"{role}.jsonl"

    def parts(self, role: str) -> Path:
        """What workers wrote in a role, or as answers, not yet put together."""
        return self.path / "parts" / role

    def features(self, setting: Setting) -> Path:
        """Feature store of one setting."""
        return self.path / "features" / setting

    def encoders(self, setting: Setting) -> Path:
        """Trained combination encoders of one setting."""
        return self.path / "encoders" / setting

    def require(self, path: Path) -> Path:
        """Return a path of this run that is there; otherwise raise `NotWritten`."""
        if not path.exists():
            raise NotWritten(self.path, self._relative(path))
        return path

    @classmethod
    def open(
        cls, path: Path | str, wanted: NewRun | None = None, *, share: Share = Share()
    ) -> Self:
        """Continue a run directory; create it where `wanted` says what it is to be.

        What is there must agree with `wanted`; a ValueError says what does not. Whoever
        does all of the work holds the directory alone; the workers of one stage hold it
        together (each writes files of its own), and keep others out: `InUse`.
        """
        path = Path(path)
        if wanted is None:
            read_manifest(path)
        else:
            check_not_foreign(path)
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path, share, acquire_lock(path / "lock", shared=not share.is_whole))
        try:
            if wanted is not None:
                write_or_compare_manifest(path, wanted)
        except BaseException:
            run.close()
            raise
        return run

    @property
    def preset(self) -> Preset:
        """Sizes that the sections of the manifest started from."""
        return read_manifest(self.path)["preset"]

    @property
    def seed(self) -> int:
        """Of training, selection and bootstrap."""
        return read_manifest(self.path)["seed"]

    def section(self, name: str, kind: type[Section]) -> Section:
        """Return the settings of a verb, of their dataclass."""
        value = read_manifest(self.path)["sections"].get(name)
        if value is None:
            raise ValueError(
                f"{self.path} has no settings of {name} yet; run `beatrice {name}`"
            )
        return decode_section(value, kind, f"{self.manifest}, section {name!r}")

    def settle(
        self,
        name: str,
        presets: Mapping[Preset, Section],
        change: Callable[[Section], Section] | None = None,
        *,
        is_replaceable: bool = False,
        is_recorded: bool = True,
    ) -> Section:
        """Return a verb's settings, and write them down if the run has none yet.

        They begin as those of the run's preset. `change` makes of them what a person
        chose, with which those that the run has must agree; new ones may replace them
        where that is allowed, since nothing was made with these yet. A dry run records
        none.
        """
        manifest = read_manifest(self.path)
        settings = presets[manifest["preset"]]
        value = manifest["sections"].get(name)
        if value is not None:
            settings = self.section(name, type(settings))
        changed = settings if change is None else change(settings)
        if value is not None:
            if changed == settings:
                return changed
            if not is_replaceable:
                check_same(self.path, {name: value}, {name: as_json(changed)})
        if is_recorded:
            manifest["sections"][name] = as_json(changed)
            write_json_atomic(self.manifest, seal(manifest))
        return changed

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None and not self._lock.closed:
            self._lock.truncate(0)
            self._lock.close()

    def __exit__(self, *error: object) -> None:
        """Let go of the directory."""
        self.close()

    def mark_stage(
        self,
        name: str,
        inputs: Mapping[str, str],
        seconds: float,
        outputs: Iterable[Path | str] = (),
        verb: str = "",
    ) -> StageRecord:
        """Record that a stage is finished; its last file is written in the run."""
        digests = self._digests(outputs)
        assert all(digests.values()), f"{name} has not written all of {digests}"
        record = StageRecord(
            stage=name,
            inputs=dict(inputs),
            outputs=digests,
            verb=verb or name,
            seconds=round(seconds, 3),
            finished=utc_now(),
            versions=package_versions(),
        )
        self._write_record(record)
        return record

    def reopen_stage(self, name: str) -> None:
        """Write down that a stage with a record is done again from now on."""
        record = self.stage_record(name)
        if record is not None and record.finished:
            self._write_record(msgspec.structs.replace(record, finished=""))

    def _write_record(self, record: StageRecord) -> None:
        fields = msgspec.structs.asdict(record)
        write_json_atomic(self._stage_file(record.stage), seal(fields))

    def stage_record(self, name: str) -> StageRecord | None:
        """Return what a stage left behind, or None if no record can be read."""
        try:
            return msgspec.convert(read_sealed(self._stage_file(name), ""), StageRecord)
        except ValueError:
            return None  # of an older program or damaged: the stage is done again

    def stage_records(self) -> dict[str, StageRecord | None]:
        """Return the record of each stage, oldest first; None where it is damaged."""
        files = sorted(
            self.stages.glob("[!.]*.json"), key=lambda p: p.stat().st_mtime_ns
        )
        return {file.stem: self.stage_record(file.stem) for file in files}

    def stage_gap(
        self, name: str, inputs: Mapping[str, str] | None = None
    ) -> str | None:
        """Say why a stage must be done (again), or return None if it is done.

        Without its inputs of now, recorded inputs that are paths in the run are hashed
        again, and the others are believed.
        """
        record = self.stage_record(name)
        if record is None:
            if self._stage_file(name).exists():
                return f"stage {name}: its record is damaged"
            return f"stage {name} has no record yet"
        if not record.finished:
            return f"stage {name} is not finished with its settings of now"
        if inputs is None:
            inputs = {
                path: sha256_tree(self.path / path) or sha
                for path, sha in record.inputs.items()
            }
        for kind, then, current in (
            ("input", record.inputs, inputs),
            ("output", record.outputs, self._digests(record.outputs)),
        ):
            for path in sorted(then.keys() | current.keys()):
                if then.get(path) != current.get(path):
                    return f"stage {name}: its {kind} {path} has changed since"
        return None

    def edited_output(self, name: str) -> str | None:
        """Return a file of a finished stage that a person edited since; none gone."""
        record = self.stage_record(name)
        if record is None or not record.finished:
            return None
        digests = self._digests(path for path in FOR_PEOPLE if path in record.outputs)
        then = record.outputs
        return next((p for p, sha in digests.items() if sha not in ("", then[p])), None)

    def stale_source(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Find, among the paths that a stage is about to read, what is out of date.

        Returns the stage nearest to the questions whose record does not hold any more,
        and which of its outputs is read; None where all that was read holds.
        """
        records = list(filter(None, self.stage_records().values()))
        seen: set[str] = set()

        def look(path: str) -> tuple[str, str] | None:
            for record in records:
                is_writer = any(  # one lies in the other
                    f"{path}/".startswith(f"{output}/")
                    or f"{output}/".startswith(f"{path}/")
                    for output in record.outputs
                )
                if record.stage in seen or not is_writer:
                    continue
                seen.add(record.stage)
                before = next((f for p in record.inputs if (f := look(p))), None)
                if before or self.stage_gap(record.stage):
                    return before or (record.stage, path)
            return None

        return next((value for path in paths if (value := look(path))), None)

    def stage_done(self, name: str, inputs: Mapping[str, str] | None = None) -> bool:
        """Tell whether a stage is finished and nothing under it has changed."""
        return self.stage_gap(name, inputs) is None

    def hash_inputs(self, *paths: Path | str) -> dict[str, str]:
        """Return the identities of files and folders of this run, for a stage."""
        digests = self._digests(paths)
        for path, sha in digests.items():
            if not sha:
                raise NotWritten(self.path, path)
        records, unknown = self.stage_records(), set(digests)
        for record in filter(None, records.values()):
            for path, sha in record.outputs.items():
                if digests.get(path, sha) != sha:
                    raise ValueError(
                        f"{self.path / path} has changed since stage {record.stage} "
                        f"wrote it; restore it, or run `beatrice {record.verb}` again"
                    )
                unknown.discard(path)
        damaged = [name for name, record in records.items() if record is None]
        if damaged and unknown:
            path = min(unknown)
            raise ValueError(
                f"{self._stage_file(damaged[0])} is damaged, and nothing else tells "
                f"whether {path} is as it was written; restore the record, or do that "
                "stage again"
            )
        return digests

    def _digests(self, paths: Iterable[Path | str]) -> dict[str, str]:
        """Return the SHA-256 of files and folders by path; empty where none is."""
        return {self._relative(p): sha256_tree(self.path / p) or "" for p in paths}

    def _stage_file(self, name: str) -> Path:
        return self.stages / f"{name}.json"

    def _relative(self, path: Path | str) -> str:
        return (self.path / path).relative_to(self.path).as_posix()

"""The directory of an experiment: its paths, settings, lock and finished stages.

Loads neither Torch nor JAX, so that any module may import it. Three guarantees:

  * a file written here is the old one or the new one, never half of either;
  * a directory holds one run's settings, and is changed at a time by one process, or
    by the workers of one stage;
  * a stage counts as finished only while its inputs and outputs are the files that it
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar, get_args

import msgspec

from beatrice.extract.records import Record, Setting
from beatrice.extract.run.files import (
    from_json,
    lock_file,
    open_unlinked,
    read_json,
    read_sealed,
    seal,
    sha256_tree,
    write_json_atomic,
    write_text_atomic,
)
from beatrice.extract.run.process import Share

MAKE_A_RUN = (
    "questions of your own become a run with `beatrice data NEW_RUN --train NAME=FILE`"
)
# Files that people edit by hand, and the answers, which their stage continues. If they
# were changed they are neither replaced nor read; what to do if that was intended:
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
        """Name what is missing; the command line adds which verb writes it."""
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
    """Lock a file until the returned stream is closed; raise `InUse` if it is locked.

    The kernel's lock ends with the process that holds it. It may not reach across
    machines (network file systems), so the file also names its owner, and an owner on
    another machine is believed. A shared lock writes nothing into the file. On a disk
    without locks nobody is kept out, and a shared lock is a ValueError.
    """
    here = {"host": socket.gethostname(), "boot": _boot_id()}
    stream = os.fdopen(open_unlinked(path, os.O_RDWR | os.O_CREAT), "r+b", 0)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        has_locks = lock_file(stream, kind | fcntl.LOCK_NB, flock)
        is_held = False
    except BlockingIOError:
        has_locks = is_held = True
    if shared and not has_locks:
        stream.close()
        raise ValueError(
            f"{path.parent} lies on a disk without locks, which processes that share "
            "the work need to keep others out; put it on another disk, or let one "
            "process do all of the work"
        )
    owner = _lock_owner(stream)
    same_kernel = here["boot"] and owner.get("boot") == here["boot"]
    is_away = bool(owner) and owner.get("host") != here["host"] and not same_kernel
    if is_held or is_away:
        stream.close()
        # The holder of a kernel's lock is alive, even if its machine was renamed.
        do = "wait or end it" if is_held else f"if that process is gone, delete {path}"
        who = (
            f"process {owner.get('pid', 'unknown')} on "
            f"{owner.get('host', here['host'])} since {owner.get('started', '?')}"
            if owner
            else "workers that a launcher started, or a process that has just started"
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
    """Return who wrote the lock file; empty if nobody did, or it is incomplete."""
    content = stream.read()
    stream.seek(0)
    with contextlib.suppress(ValueError):
        return from_json(dict[str, Any], content, "")
    return {}


Preset = Literal["demo", "few", "smoke", "paper"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
FORMAT, VERSION = "beatrice-run", 4
MANIFEST = "manifest.json"  # a folder without it is not a run directory
Section = TypeVar("Section")

_PACKAGES = (
    "beatrice-probe flax jax jaxlib numpy openai optax orbax-checkpoint safetensors "
    "scikit-learn scipy tensorstore tokenizers torch transformers"
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRun:
    """The settings that a run directory is created with."""

    preset: Preset = "demo"  # decides the defaults of every verb's section
    seed: int = 0  # of training, selection and bootstrap
    # Settings of `backbone`, and of `world` or `data`; a frozen dataclass each.
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def as_json(settings: Any) -> Any:
    """Return a settings dataclass as the JSON value that a manifest holds."""
    return json.loads(json.dumps(dataclasses.asdict(settings), allow_nan=False))


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of the manifest, besides its own SHA-256."""

    format: Literal["beatrice-run"]
    version: Literal[4]
    preset: Preset
    seed: int
    sections: dict[str, dict[str, Any]]
    created: str
    versions: dict[str, str]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a run directory's manifest as a dictionary; see `Manifest`."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} is not a run directory: it has no manifest.json")
    saved = read_json(file, dict[str, Any], "restore it, or start a new run directory")
    if (saved.get("format"), saved.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{file} is not a manifest this program reads ({FORMAT}, version "
            f"{VERSION}); another version made it: start a new run directory"
        )
    manifest = read_sealed(
        file, "restore it, and change settings with the options of verbs"
    )
    try:
        msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}; start a new run directory") from None
    return manifest


def decode_section(content: Any, kind: type[Section], where: str) -> Section:
    """Return settings from their JSON value; unknown and missing fields are errors."""
    try:
        section = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
    else:
        differences = _differences(as_json(section), content)
        if not differences:
            return section
        reason = "one of its values has another form"
        for name, (known, given) in sorted(differences.items(), reverse=True):
            if _ABSENT in (known, given):
                what = "missing" if given is _ABSENT else "unknown"
                reason = f"its field {name!r} is {what}"
    raise ValueError(
        f"{where}: {reason}; another version of this program made it: start a new run "
        "directory"
    )


def write_or_compare_manifest(path: Path, settings: NewRun) -> None:
    """Write the manifest, or check the existing one against these settings."""
    file, wanted = path / MANIFEST, {"preset": settings.preset, "seed": settings.seed}
    sections = {name: as_json(section) for name, section in settings.sections.items()}
    if not file.exists():
        manifest = {"format": FORMAT, "version": VERSION, **wanted}
        manifest |= {"sections": sections, "created": utc_now()}
        manifest["versions"] = package_versions()
        content = json.dumps(seal(manifest), indent=2, allow_nan=False) + "\n"
        with contextlib.suppress(ValueError):  # another was first: compare with it
            write_text_atomic(file, content, is_new=True)
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
    """A run has settings other than those requested."""


def check_same(
    path: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Check that a run has the wanted settings; raise `OtherSettings` if not."""
    differences = _differences(recorded, wanted)
    if not differences:
        return
    # Settings that follow from the preset.
    follows = ("world.", "answer.", "extract.") if "preset" in differences else ()
    has, requested = (
        ", ".join(
            f"no {name}" if sides[i] is _ABSENT else f"{name}={sides[i]!r}"
            for name, sides in differences.items()
            if not name.startswith(follows)
        )
        for i in range(2)
    )
    raise OtherSettings(
        f"{path} holds a run with {has}; you asked for {requested}; choose another "
        "directory, or repeat that run's options"
    )


_ABSENT = object()  # in place of a value that only one side has


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return pairs of values that differ, by dotted name; an absent group is one."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in {**first, **second}:
        values = first.get(name, _ABSENT), second.get(name, _ABSENT)
        if all(isinstance(value, dict) for value in values):
            pairs |= _differences(*values, f"{prefix}{name}.")
        elif values[0] != values[1]:
            pairs[prefix + name] = values
    return pairs


def check_not_foreign(path: Path) -> None:
    """Check that a path is neither a file nor a folder with other content."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a directory of its own")
    names = sorted(p.name for p in path.iterdir())
    # These two are left by a run that was killed while it was created.
    others = [n for n in names if n != "lock" and not n.startswith(".manifest.json.")]
    # Only now, since another worker may have created the run meanwhile.
    if others and not (path / MANIFEST).exists():
        raise ValueError(
            f"{path} is not empty, and not a run directory (it has {others[0]!r}, but "
            "no manifest.json); choose another directory; your questions stay where "
            "they are: `beatrice data NEW_RUN --train NAME=FILE` makes a run of them"
        )


class StageRecord(Record, frozen=True, kw_only=True):
    """The record of a finished stage; stored with its own SHA-256."""

    stage: str
    # SHA-256 (or another identity) of what it read, by name. A name that is a path in
    # the run directory is hashed again to check whether the stage is done.
    inputs: dict[str, str]
    outputs: dict[str, str]  # SHA-256 of what it wrote, by path in the run directory
    verb: str  # verb that does it, with options, such as "select --exhaustive"
    seconds: float  # wall time of its work in the process that finished it
    finished: str  # UTC; empty while the stage is being done again
    versions: dict[str, str]  # of Python and packages, at that time


def _at(name: str, text: str) -> Any:
    return property(lambda run: run.path / name, doc=text)


@dataclasses.dataclass(frozen=True)
class RunDir(contextlib.AbstractContextManager["RunDir"]):
    """Paths of one experiment; `RunDir.open` also locks the directory until `close`."""

    path: Path  # of the directory
    # The part of a stage's work that this process does.
    share: Share = dataclasses.field(default=Share(), compare=False)
    _lock: BinaryIO | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the path absolute, since stages pass whole paths around."""
        object.__setattr__(self, "path", Path(self.path).absolute())

    examples = _at("examples.jsonl", "Questions, one `Example` per line.")
    passages = _at("passages.jsonl", "Passages for the retrievers, one per line.")
    rewrites = _at("rewrites.jsonl", "One `Rewrite` per line; absent without rewrites.")
    splits_file = _at("splits.json", "Splits; absent in the microworld.")
    answers = _at("answers", "Folder of `Answer` lines.")
    answers_file = _at("answers/answers.jsonl", "All answers.")
    left_out_file = _at("answers/left_out.jsonl", "Questions not asked, if any.")
    written = _at("written", "Signals read with the answers, until `extract` is done.")
    labels = _at("labels.jsonl", "Verdicts, one `Label` per line.")
    audit = _at("audit", "Folder of audits of the labels' quality.")
    samples = _at("samples", "Folder of sampled answers.")
    samples_file = _at("samples/samples.jsonl", "All samples; absent without any.")
    draw_seconds_file = _at("samples/seconds.json", "Seconds per sample, by setting.")
    sweep = _at("sweep.json", "Layer sweep.")
    selection = _at("selection", "Selected encoders and heads, one folder per branch.")
    detector = _at("detector", "Folder of the calibrated detector.")
    control = _at("control", "Folder of the retrieval controllers.")
    results = _at("results.jsonl", "Every number, one row per line.")
    report = _at("report.html", "The report.")
    manifest = _at(MANIFEST, "Settings and versions; see `read_manifest`.")
    stages = _at("stages", "Folder of stage records.")

    def replies(self, role: str) -> Path:
        """Texts by key of one role: judge, judge_with, rewrite or sample."""
        return self.path / "replies" / f"{role}.jsonl"

    def parts(self, role: str) -> Path:
        """Texts of a role, or answers, that workers wrote and nobody has joined yet."""
        return self.path / "parts" / role

    def features(self, setting: Setting) -> Path:
        """Feature store of one setting."""
        return self.path / "features" / setting

    def encoders(self, setting: Setting) -> Path:
        """Trained combination encoders of one setting."""
        return self.path / "encoders" / setting

    def require(self, path: Path) -> Path:
        """Return a path of this run if it exists; otherwise raise `NotWritten`."""
        if not path.exists():
            raise NotWritten(self.path, self._relative(path))
        return path

    @classmethod
    def open(
        cls, path: Path | str, wanted: NewRun | None = None, *, share: Share = Share()
    ) -> Self:
        """Open and lock a run directory; with `wanted`, create it if it does not exist.

        An existing run must agree with `wanted`; a ValueError says what does not. A
        process that does all of the work holds the directory alone; the workers of one
        stage hold it together (each writes its own files). Anyone else gets `InUse`.
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
        """Preset that the sections of the manifest started from."""
        return read_manifest(self.path)["preset"]

    @property
    def seed(self) -> int:
        """Seed of training, selection and bootstrap."""
        return read_manifest(self.path)["seed"]

    def section(self, name: str, kind: type[Section]) -> Section:
        """Return the settings of a verb as their dataclass."""
        value = read_manifest(self.path)["sections"].get(name)
        if value is None:
            raise ValueError(
                f"{self.path} has no settings of {name} yet; run `beatrice {name}`"
            )
        return decode_section(value, kind, f"{self.manifest}, section {name!r}")

    def resolve_section(
        self,
        name: str,
        presets: Mapping[Preset, Section],
        change: Callable[[Section], Section] | None = None,
        *,
        is_replaceable: bool = False,
        is_recorded: bool = True,
    ) -> Section:
        """Return a verb's settings, and record them if the run has none yet.

        They start from the run's preset, and `change` applies the user's choices. If
        the run already has settings they must agree with the result, unless they are
        `is_replaceable`, because nothing was made with them yet. A dry run records
        nothing (`is_recorded=False`).
        """
        manifest = read_manifest(self.path)
        settings = presets[manifest["preset"]]
        value = manifest["sections"].get(name)
        if value is not None:
            settings = self.section(name, type(settings))
        changed = settings if change is None else change(settings)
        if value is not None and changed == settings:
            return changed
        if value is not None and not is_replaceable:
            check_same(self.path, {name: value}, {name: as_json(changed)})
        if is_recorded:
            manifest["sections"][name] = as_json(changed)
            write_json_atomic(self.manifest, seal(manifest))
        return changed

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock is not None and not self._lock.closed:
            self._lock.truncate(0)
            self._lock.close()

    def __exit__(self, *error: object) -> None:
        """Unlock the directory."""
        self.close()

    def mark_stage(
        self,
        name: str,
        inputs: Mapping[str, str],
        seconds: float,
        outputs: Iterable[Path | str] = (),
        verb: str = "",
    ) -> None:
        """Record that a stage is finished: call it after the last file is written."""
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

    def reopen_stage(self, name: str) -> None:
        """Record that a stage, if it was finished, is being done again."""
        record = self.stage_record(name)
        if record is not None and record.finished:
            self._write_record(msgspec.structs.replace(record, finished=""))

    def _write_record(self, record: StageRecord) -> None:
        fields = msgspec.structs.asdict(record)
        write_json_atomic(self._stage_file(record.stage), seal(fields))

    def stage_record(self, name: str) -> StageRecord | None:
        """Return the record of a stage, or None if there is no readable one."""
        try:
            return msgspec.convert(read_sealed(self._stage_file(name), ""), StageRecord)
        except ValueError:
            return None  # of another version or damaged: the stage is done again

    def stage_records(self) -> dict[str, StageRecord | None]:
        """Return the record of each stage, oldest first; None if it is damaged."""
        files = sorted(
            self.stages.glob("[!.]*.json"), key=lambda p: p.stat().st_mtime_ns
        )
        return {file.stem: self.stage_record(file.stem) for file in files}

    def stage_gap(
        self, name: str, inputs: Mapping[str, str] | None = None
    ) -> str | None:
        """Return why a stage must be done (again), or None if it is done.

        Without `inputs`, recorded inputs that are paths in the run are hashed again,
        and the others are taken as unchanged.
        """
        record = self.stage_record(name)
        if record is None:
            if self._stage_file(name).exists():
                return f"stage {name}: its record is damaged"
            return f"stage {name} has no record yet"
        if not record.finished:
            return f"stage {name} is not finished with its current settings"
        if inputs is None:
            inputs = {
                path: sha256_tree(self.path / path) or sha
                for path, sha in record.inputs.items()
            }
        for kind, then, current in (
            ("input", record.inputs, inputs),
            ("output", record.outputs, self._digests(record.outputs)),
        ):
            if changed := then.items() ^ current.items():
                # What was replaced says more than what was added or removed.
                both = then.keys() & current.keys()
                path, _ = min(changed, key=lambda x: (x[0] not in both, x[0]))
                return f"stage {name}: its {kind} {path} has changed since"
        return None

    def edited_output(self, name: str) -> str | None:
        """Return a finished stage's output that was edited by hand, not deleted."""
        record = self.stage_record(name)
        if record is None or not record.finished:
            return None
        digests = self._digests(path for path in FOR_PEOPLE if path in record.outputs)
        then = record.outputs
        return next((p for p, sha in digests.items() if sha not in ("", then[p])), None)

    def stale_source(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Return what is out of date among the paths that a stage is about to read.

        That is the earliest stage whose record is not valid any more, and the output of
        it that is read; None if everything is up to date.
        """
        records = list(filter(None, self.stage_records().values()))
        seen: set[str] = set()

        def look(path: str) -> tuple[str, str] | None:
            for record in records:
                is_writer = any(  # one path lies in the other
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
        """Return whether a stage is finished and nothing it rests on has changed."""
        return self.stage_gap(name, inputs) is None

    def hash_inputs(self, *paths: Path | str) -> dict[str, str]:
        """Return the hashes of files and folders of this run, as a stage's inputs."""
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
                f"{self._stage_file(damaged[0])} is damaged, so whether {path} was "
                "changed cannot be checked; restore the record, or do that stage again"
            )
        return digests

    def _digests(self, paths: Iterable[Path | str]) -> dict[str, str]:
        """Return the SHA-256 of files and folders by path; empty for missing ones."""
        return {self._relative(p): sha256_tree(self.path / p) or "" for p in paths}

    def _stage_file(self, name: str) -> Path:
        return self.stages / f"{name}.json"

    def _relative(self, path: Path | str) -> str:
        return (self.path / path).relative_to(self.path).as_posix()

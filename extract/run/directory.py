"""One directory per experiment: where things lie, who holds it, what is finished.

Neither Torch nor JAX, as in the modules imported here, so that every room may import
it. Three promises:

  * a file written here is the old one or the new one, never half of either;
  * a directory holds one run's settings, and one process changes it at a time;
  * a stage counts as finished only while its inputs and outputs are the files it
    was finished with.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from beatrice.extract.records import SETTINGS, Record, Setting
from beatrice.extract.run.files import read_sealed, seal, sha256_tree, write_json_atomic
from beatrice.extract.run.layout import FOR_PEOPLE, who_writes
from beatrice.extract.run.lock import take_lock, utc_now
from beatrice.extract.run.manifest import (
    NewRun,
    Preset,
    Section,
    agree_on_manifest,
    package_versions,
    read_manifest,
    read_section,
    refuse_foreign,
    settle_section,
)
from beatrice.extract.run.share import Share


class StageRecord(Record, frozen=True, kw_only=True):
    """What a finished stage leaves behind; on disk with its own SHA-256.

    Attributes:
      inputs: SHA-256 (or another identity) of what it read, by name. A name that is
        a path in the run directory is hashed again when the stage is asked about.
      outputs: SHA-256 of the files and folders it wrote, by path in the run
        directory.
      seconds: wall time.
      finished: UTC; empty while the stage is done again.
      versions: of Python and packages, as they were then.
    """

    stage: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    seconds: float
    finished: str
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """Write the record, in one step."""
        write_json_atomic(path, seal(msgspec.structs.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record at a path, or None if there is none that can be read."""
        try:
            return msgspec.convert(read_sealed(path, ""), cls)
        except (ValueError, msgspec.ValidationError):
            return None  # of an older program or damaged: the stage is done again


def _at(name: str, text: str) -> Any:
    """Return the property of a run that is a path in it."""
    return property(lambda run: run.path / name, doc=text)


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one experiment.

    `RunDir(path)` only names paths. `RunDir.open` creates or continues a run and
    holds it until `close`, or the end of a `with` block.

    Attributes:
      path: of the directory.
      share: which part of a stage's work the process that holds the run does.
    """

    path: Path
    share: Share = dataclasses.field(default=Share(), compare=False)
    _lock: BinaryIO | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the path absolute: stages hand whole paths around."""
        object.__setattr__(self, "path", Path(self.path).absolute())

    examples = _at("examples.jsonl", "Questions, one `Example` per line.")
    passages = _at("passages.jsonl", "What the retrievers search, one per line.")
    rewrites = _at("rewrites.jsonl", "One `Rewrite` per line; absent without rewrites.")
    answers = _at("answers", "Folder of `Answer` lines.")
    labels = _at("labels.jsonl", "Verdicts, one `Label` per line.")
    audit = _at("audit", "Folder of what is known about the labels' quality.")
    samples = _at("samples", "Folder of drawn answers.")
    sweep = _at("sweep.json", "Layer sweep.")
    selection = _at("selection", "Selected encoders and heads, a folder a branch.")
    detector = _at("detector", "Folder of the calibrated detector.")
    control = _at("control", "Folder of the retrieval controllers.")
    results = _at("results.jsonl", "Every number, one row per line.")
    report = _at("report.html", "The report.")
    manifest = _at("manifest.json", "Settings and versions; see `read_manifest`.")
    stages = _at("stages", "Folder of stage records.")

    def replies(self, role: str) -> Path:
        """Every text a model wrote in one role, by key: judge, rewrite or sample."""
        return self.path / "replies" / f"{role}.jsonl"

    def parts(self, role: str) -> Path:
        """What workers wrote in a role, or as answers, not yet put together."""
        return self.path / "parts" / role

    def features(self, setting: Setting) -> Path:
        """Feature store of one setting."""
        return self.path / "features" / _known(setting)

    def encoders(self, setting: Setting) -> Path:
        """Trained combination encoders of one setting."""
        return self.path / "encoders" / _known(setting)

    def finished_detector(self) -> Path:
        """Return where the detector lies.

        Raises:
          ValueError: the run has none yet.
        """
        if not self.detector.is_dir():
            verbs = "answer label extract sweep train select calibrate".split()
            left = [verb for verb in verbs if self.stage_record(verb) is None]
            then = f", then {', '.join(left[1:])}" if left[1:] else ""
            raise ValueError(
                f"{self.path} has no detector yet; go on with `beatrice "
                f"{(left or verbs[-1:])[0]} {self.path}`{then}"
            )
        return self.detector

    @classmethod
    def open(
        cls, path: Path | str, asked: NewRun | None = None, *, share: Share = Share()
    ) -> Self:
        """Create a run directory, or continue one.

        Args:
          path: the directory; created if absent and taken if empty where `asked` says
            what it is to be.
          asked: what the run is; what is there must agree. None takes what is there.
          share: of the work. Whoever does all of it holds the directory alone; the
            workers of one stage hold it together (each writes files of its own), and
            keep others out.

        Raises:
          InUse: another live process holds it.
          ValueError: the path is something else, or holds another run.
        """
        path = Path(path)
        if asked is None:
            read_manifest(path)
        else:
            refuse_foreign(path)
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path, share, take_lock(path / "lock", shared=not share.is_whole))
        try:
            if asked is not None:
                agree_on_manifest(path, asked)
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
        """Return the settings of a verb, see `read_section`."""
        return read_section(self.path, name, kind)

    def settle(
        self,
        name: str,
        presets: Mapping[Preset, Section],
        change: Callable[[Section], Section] | None = None,
        **options: bool,
    ) -> Section:
        """Return a verb's settings and write new ones down, see `settle_section`."""
        return settle_section(self.path, name, presets, change, **options)

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
            self._relative(path): sha256_tree(self.path / path) for path in outputs
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
            finished=utc_now(),
            versions=package_versions(),
        )
        record.write(self._stage_file(name))
        return record

    def reopen_stage(self, name: str) -> None:
        """Write down that a stage with a record is done again from now on."""
        record = self.stage_record(name)
        if record is not None and record.finished:
            msgspec.structs.replace(record, finished="").write(self._stage_file(name))

    def stage_record(self, name: str) -> StageRecord | None:
        """Return what a stage left behind, or None if it was never finished."""
        return StageRecord.read(self._stage_file(name))

    def stage_records(self) -> list[str]:
        """Return the names of the stages that have a record, oldest first."""
        files = sorted(self.stages.glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        return [file.stem for file in files]

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
            if self._stage_file(name).exists():
                return f"stage {name}: its record is damaged"
            return f"stage {name} has no record yet"
        if not record.finished:
            return f"stage {name} was begun again and is not finished"
        now = self._rehash(record.inputs) if inputs is None else dict(inputs)
        for kind, then, current in (
            ("input", record.inputs, now),
            ("output", record.outputs, self._rehash(record.outputs, gone="")),
        ):
            if changed := _differing(then, current):
                return f"stage {name}: its {kind} {changed[0]} has changed since"
        return None

    def edited_output(self, name: str) -> str | None:
        """Return a file that people may correct and is not as a finished stage left it.

        One that is gone is not among them: it is made again.
        """
        record = self.stage_record(name)
        if record is None or not record.finished:
            return None
        own = [path for path in FOR_PEOPLE if path in record.outputs]
        found = {path: sha256_tree(self.path / path) for path in own}
        return next((p for p in own if found[p] not in (None, record.outputs[p])), None)

    def stale_source(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Find, among what a stage is about to read, what is out of date itself.

        Args:
          paths: files and folders of this run.

        Returns:
          The stage nearest to the questions whose record does not hold any more, and
          which of its outputs is read; None where all that was read holds.
        """
        records = [r for n in self.stage_records() if (r := self.stage_record(n))]
        seen: set[str] = set()

        def look(path: str) -> tuple[str, str] | None:
            for record in records:
                is_writer = any(_overlap(path, output) for output in record.outputs)
                if record.stage in seen or not is_writer:
                    continue
                seen.add(record.stage)
                before = next((f for p in record.inputs if (f := look(p))), None)
                if before or self.stage_gap(record.stage):
                    return before or (record.stage, path)
            return None

        return next((found for path in paths if (found := look(path))), None)

    def stage_done(self, name: str, inputs: Mapping[str, str] | None = None) -> bool:
        """Tell whether a stage is finished and nothing under it has changed."""
        return self.stage_gap(name, inputs) is None

    def hash_inputs(self, *paths: Path | str) -> dict[str, str]:
        """Return the identities of files and folders of this run, for a stage."""
        hashes = {self._relative(path): sha256_tree(self.path / path) for path in paths}
        for path, sha in hashes.items():
            if sha is None:
                raise ValueError(f"{self.path / path} is missing; {who_writes(path)}")
        found = {path: str(sha) for path, sha in hashes.items()}
        self._refuse_altered(found)
        return found

    def _refuse_altered(self, found: Mapping[str, str]) -> None:
        """Refuse files that are not as the stage that wrote them left them."""
        records = {name: self.stage_record(name) for name in self.stage_records()}
        unknown = set(found)
        for name, record in records.items():
            written = record.outputs if record else {}
            unknown -= written.keys()
            for path in sorted(found.keys() & written.keys()):
                if found[path] != written[path]:
                    raise ValueError(
                        f"{self.path / path} has changed since stage {name} wrote it; "
                        f"restore it, or {who_writes(path, 'again')}"
                    )
        damaged = [name for name, record in records.items() if record is None]
        if damaged and unknown:
            path = min(unknown)
            raise ValueError(
                f"{self._stage_file(damaged[0])} is damaged, and nothing else tells "
                f"whether {path} is as it was written; restore the record, or "
                f"{who_writes(path, 'again')}"
            )

    def _rehash(
        self, recorded: Mapping[str, str], gone: str | None = None
    ) -> dict[str, str]:
        """Hash recorded paths again; what is no path keeps its value, or `gone`."""
        return {
            path: sha256_tree(self.path / path) or (sha if gone is None else gone)
            for path, sha in recorded.items()
        }

    def _stage_file(self, name: str) -> Path:
        """Path of one stage record."""
        return self.stages / f"{name}.json"

    def _relative(self, path: Path | str) -> str:
        """Path inside the run directory."""
        return (self.path / path).relative_to(self.path).as_posix()


def _overlap(one: str, other: str) -> bool:
    """Tell whether two paths are the same, or one lies in the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))


def _known(setting: Setting) -> Setting:
    """Check a setting's name."""
    if setting not in SETTINGS:
        raise ValueError(f"a setting is one of {', '.join(SETTINGS)}, not {setting!r}")
    return setting

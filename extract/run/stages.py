"""Stages of a run, each done only once.

A stage names its inputs and outputs; it is done again only if one of them has
changed. Nothing else matters, so repeating a command continues the run.

Several processes may share a stage without waiting for each other: each does its parts,
and the one that finds no part missing joins them.
"""

import dataclasses
import pkgutil
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from beatrice.extract.plugs import NotNamed
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.directory import (
    FOR_PEOPLE,
    InUse,
    OtherSettings,
    Preset,
    RunDir,
)
from beatrice.extract.run.process import Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is left of a stage; a number that does not apply or is not known is None."""

    stage: str
    n_rows: int | None = None  # rows that the stage will write
    n_requests: int | None = None  # texts to generate, without retries
    n_prompt_tokens: int | None = None  # tokens that the model reads
    n_new_tokens: int | None = None  # tokens that it generates, at most
    disk_bytes: int | None = None  # size of what the stage writes, at most
    basis: str  # what is counted, in a sentence

    def as_text(self) -> str:
        """Return the forecast as text, one number per line."""
        lines = [f"{self.stage}: a dry run, nothing is written"]
        for name, words in _SHOWN.items():
            if (n := getattr(self, name)) is not None:
                shown = bytes_in_words(n) if name == "disk_bytes" else f"{n:,}"
                lines.append(f"  {words:<24}{shown}")
        return "\n".join([*lines, f"  {self.basis}"])


def bytes_in_words(n: int) -> str:
    """Return a size with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


_SHOWN = {
    "n_rows": "rows",
    "n_requests": "requests",
    "n_prompt_tokens": "prompt tokens",
    "n_new_tokens": "new tokens, at most",
    "disk_bytes": "disk, at most",
}


Item = TypeVar("Item")
Change = Callable[[Any], Any]


def deferred(place: str) -> Callable[..., Any]:
    """Return a function that imports another, `module:name`, when it is called.

    Stages are defined by it next to light imports, so that a command that finds a stage
    done does not wait for the libraries that the stage's work needs.
    """
    return lambda *values: pkgutil.resolve_name(place)(*values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One verb of the command line."""

    name: str  # of its record
    inputs: Callable[[RunDir], list[Path]]  # files and folders of the run it reads
    outputs: Callable[[RunDir], list[Path]]  # files and folders of the run it writes
    # Does the stage, given its settings (or None); called only if there is something to
    # do. If `run.share` is not the whole work, it does that share and returns how many
    # parts of other workers are missing (0: none); called again with the whole work, it
    # finds all parts and joins them.
    work: Callable[[RunDir, Any, Update, Progress], int | None]
    # Folders of the run that are deleted once the stage is done.
    leftovers: Callable[[RunDir], list[Path]] = lambda run: []
    parts: str = ""  # what workers share, in the plural; empty if nothing
    verb: str = ""  # the verb that does it, with options; by default its name
    # What its record holds besides its inputs, given its settings. Code that only the
    # run names has an error as its value, which is raised unless the stage is done.
    identity: Callable[[Any], Mapping[str, str | NotNamed]] = lambda settings: {}
    # Likewise, identities of what it reads outside the run.
    outside: Callable[[RunDir], Mapping[str, str | NotNamed]] = lambda run: {}
    # Its settings for every preset; empty if it has none.
    presets: Mapping[Preset, Any] = dataclasses.field(default_factory=dict)
    section: str | None = None  # of its settings in the manifest; by default its name
    is_open: bool = False  # whether settings may change until there is an output
    # Returns what is left to do, given its settings; None if it has no `--dry-run`.
    forecast: Callable[[RunDir, Any], Forecast] | None = None

    def resolve_section(
        self,
        run: RunDir,
        change: Change | None = None,
        *,
        is_replaceable: bool = False,
        is_recorded: bool = True,
    ) -> Any:
        """Return the stage's settings in a run, see `RunDir.resolve_section`."""
        if not self.presets:
            return None
        outputs = [p for p in self.outputs(run) if p.exists()] if self.is_open else []
        try:
            return run.resolve_section(
                self.section or self.name,
                self.presets,
                change,
                is_replaceable=is_replaceable or (self.is_open and not outputs),
                is_recorded=is_recorded,
            )
        except OtherSettings as error:
            if not outputs:
                raise
            paths = " and ".join(map(str, outputs))
            raise ValueError(f"{error}, or delete {paths} to start over") from error


def side_by_side(
    work: Callable[[Item, Callable[..., None]], None],
    items: Sequence[Item],
    update: Update,
    total: int,
    *,
    at_once: int | None = None,
) -> None:
    """Work on several items at once, each in its own thread.

    `work` gets an item, and a function to call after each step, or with a number of
    steps; all items together have `total` steps. If `work` fails, or the user
    interrupts the run, the others stop at their next call, even of 0 steps.
    """
    lock, done, stop = threading.Lock(), 0, threading.Event()

    def tick(n_steps: int = 1) -> None:
        nonlocal done
        if stop.is_set():
            raise CancelledError("another part of the stage has stopped")
        if not n_steps:  # else an estimate's clock would start
            return
        with lock:
            done += n_steps
            update(done, total)

    def do_item(item: Item) -> None:
        if stop.is_set():
            return
        try:
            work(item, tick)
        except BaseException:
            stop.set()  # before this thread takes another item
            raise

    with ThreadPoolExecutor(at_once or len(items)) as pool:
        futures = [pool.submit(do_item, item) for item in items]
        try:
            for future in as_completed(futures):
                if not isinstance(future.exception(), CancelledError):
                    future.result()
        except BaseException:
            stop.set()
            raise


def do_once(
    run: RunDir,
    name: str,
    inputs: Mapping[str, str],
    outputs: list[Path],
    progress: Progress,
    work: Callable[[Update], int | None],
    verb: str = "",
) -> int | None:
    """Do a stage, or this process's share of it, unless it is done with these inputs.

    `inputs` are hashes, by name, of all that the outputs depend on, see
    `current_inputs`. A process that does the whole work (see `Stage.work`) records the
    stage, and `verb` (default: `name`) to do it again. Returns how many parts of other
    processes are missing, or None if the stage was already done.
    """
    gap = run.stage_gap(name, inputs)
    if gap is None:
        progress.note(f"{name}: already done")
        return None
    if run.stage_record(name) is not None:
        progress.note(f"{gap}; it is done again")
        run.reopen_stage(name)
    began = time.monotonic()
    with progress.stage(_name_of(name, run.share)) as update:
        n_missing = work(update) or 0
    if run.share.is_whole:
        run.mark_stage(name, inputs, time.monotonic() - began, outputs, verb)
    return n_missing


def _name_of(name: str, share: Share) -> str:
    return name if share.is_whole else f"{name} {share.rank}/{share.world_size}"


def _open_patiently(run_dir: Path, share: Share, patience: float) -> RunDir:
    until = time.monotonic() + patience
    while True:
        try:
            return RunDir.open(run_dir, share=share)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def do_share(
    run_dir: Path,
    name: str,
    share: Share,
    work: Callable[[RunDir], int | None],
    progress: Progress,
    parts: str,
    *,
    patience: float = 120.0,  # seconds; more than joining the parts takes
) -> None:
    """Do a stage alone, or a share of it, and join all `parts` if none is missing.

    `work` gets an open run, does the share `run.share` by `do_once` or `run_stage`, and
    returns their result. After a share, if no part is missing, it is called again with
    the run to itself. Raises `InUse` if a process that works alone, or workers of
    another stage, hold the run for more than `patience` seconds: nobody joins then.
    """
    with _open_patiently(run_dir, share, 0 if share.is_whole else patience) as run:
        n_missing = work(run)
    if n_missing is None or share.is_whole:
        return
    if n_missing:
        progress.note(
            f"{_name_of(name, share)}: {parts} of other workers are missing "
            f"({n_missing}); the worker that writes the last joins them all, as does "
            "the same command in one process"
        )
        return
    try:
        run = _open_patiently(run_dir, Share(), patience)
    except InUse as error:
        what = f"another process has joined the {parts}"
        try:
            RunDir.open(run_dir, share=share).close()
        except InUse:  # by a process that works alone
            what = f"another process holds the run and may join the {parts}"
        else:
            if not RunDir(run_dir).stage_done(name):
                raise InUse(
                    f"the {parts} are all there, but not joined: {error}, then run "
                    "the same command in one process"
                ) from None
        progress.note(f"{_name_of(name, share)}: {what}")
        return
    with run:
        work(run)


def current_inputs(
    run: RunDir, name: str, paths: Iterable[Path] = ()
) -> dict[str, str]:
    """Return the identities of what a stage reads, for `do_once`.

    Raises ValueError if any of it is out of date or was edited by hand, or if an output
    of the stage was. Stages that it reads from have to be done again first; otherwise
    scores of one split could be reported as those of another.
    """
    paths = list(paths)
    source = run.stale_source(p.relative_to(run.path).as_posix() for p in paths)
    stage, path = source or (name, "")
    if edited := run.edited_output(stage):
        raise ValueError(
            f"{run.path / edited} was changed since it was written, and is neither "
            f"read nor replaced: put it back, or {FOR_PEOPLE[edited]}"
        )
    if source:
        record = run.stage_record(stage)
        verb = record.verb if record else stage
        raise ValueError(
            f"{name} reads {run.path / path}, which is out of date "
            f"({run.stage_gap(stage)}); run `beatrice {verb}` first"
        )
    return run.hash_inputs(*paths)


def _identities(stage: Stage, run: RunDir, settings: Any) -> dict[str, str]:
    """Return what a stage's record holds besides its inputs.

    For code that the run names but this process does not, the recorded identity is
    used, so that a stage that is done stays done without the code.
    """
    identities: dict[str, str] = {}
    for name, x in {**stage.identity(settings), **stage.outside(run)}.items():
        if isinstance(x, NotNamed):
            record = run.stage_record(stage.name)
            if not record or name not in record.inputs or run.stage_gap(stage.name):
                line = f"{stage.verb or stage.name} {run.path} {x.arguments}"
                raise ValueError(f"{x}: `beatrice {line}`") from x
            x = record.inputs[name]
        identities[name] = x
    return identities


def run_stage(
    stage: Stage, run: RunDir, progress: Progress, change: Change | None = None
) -> int | None:
    """Do a stage, or this process's share of it, unless it is done; see `do_once`.

    `change` applies the user's choices to the stage's settings. Raises ValueError if
    the run has settled on other settings, or lacks an input.
    """
    inputs = current_inputs(run, stage.name, stage.inputs(run))
    settings = stage.resolve_section(run, change)

    def work(update: Update) -> int | None:
        return stage.work(run, settings, update, progress)

    inputs |= _identities(stage, run, settings)
    outputs = stage.outputs(run)
    n_missing = do_once(run, stage.name, inputs, outputs, progress, work, stage.verb)
    if run.share.is_whole:
        for path in stage.leftovers(run):
            shutil.rmtree(path, ignore_errors=True)
    return n_missing


def change_settings(run: RunDir, stage: Stage, change: Change) -> None:
    """Change a stage's settings, at any time; the stage is then done again."""
    before = stage.resolve_section(run, is_recorded=False)
    if change(before) != before:
        run.reopen_stage(stage.name)
        stage.resolve_section(run, change, is_replaceable=True)


def open_and_do(
    run_dir: Path,
    stage: Stage,
    *,
    change: Change | None = None,
    share: Share = Share(),
) -> None:
    """Open a run directory and do a stage, or a share of it; see `run_stage`."""
    progress = Progress()
    work = partial(run_stage, stage, progress=progress, change=change)
    do_share(run_dir, stage.name, share, work, progress, stage.parts)


def is_done(run_dir: Path, stage: Stage) -> bool:
    """Return whether nothing of a stage is left to do.

    Writes nothing and takes no lock. Raises ValueError as `run_stage` does.
    """
    run = RunDir(run_dir)
    settings = stage.resolve_section(run, is_recorded=False)
    inputs = current_inputs(run, stage.name, stage.inputs(run))
    inputs |= _identities(stage, run, settings)
    return run.stage_done(stage.name, inputs)


def forecast_stage(run_dir: Path, stage: Stage, change: Change | None = None) -> str:
    """Return in words what a stage with a forecast would need; write nothing."""
    assert stage.forecast is not None
    run = RunDir(run_dir)
    before = stage.resolve_section(run, is_recorded=False)
    settings = stage.resolve_section(run, change, is_recorded=False)
    inputs = run.hash_inputs(*stage.inputs(run))
    inputs |= _identities(stage, run, settings)
    if run.stage_done(stage.name, inputs) and settings == before:
        return f"{stage.name}: already done, nothing is left to forecast"
    return stage.forecast(run, settings).as_text()

"""What a stage of a run is, and how one is done once and only once.

A stage names its inputs and outputs; it is done again only if one of them has
changed. Nothing else decides, so the same line typed twice continues the run.

Several processes may share a stage, and none waits for another: each does its parts,
and whoever finds no part missing joins them.
"""

import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
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
    """What is left of a stage; None where a number does not apply or is not known."""

    stage: str
    n_rows: int | None = None  # rows it will write
    n_requests: int | None = None  # texts a model has to write, retries not included
    n_prompt_tokens: int | None = None  # that it reads
    n_new_tokens: int | None = None  # that it writes, at most
    disk_bytes: int | None = None  # of what it writes, at most
    basis: str  # what is counted, in a sentence

    def as_text(self) -> str:
        """Return the forecast in lines."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One verb of the command line."""

    name: str  # of its record
    inputs: Callable[[RunDir], list[Path]]  # files and folders of the run it reads
    outputs: Callable[[RunDir], list[Path]]  # files and folders of the run it writes
    # Does it, with its settings (None where it has none); called only if something is
    # to be done. Where `run.share` is not the whole work it does that share and returns
    # how many parts of others are missing (0: none); called again alone it finds all
    # parts and joins them.
    work: Callable[[RunDir, Any, Update, Progress], int | None]
    # Folders of the run that are deleted when it is done.
    leftovers: Callable[[RunDir], list[Path]] = lambda run: []
    parts: str = ""  # what can be shared, in the plural; empty: nothing can
    verb: str = ""  # what of the command line does it; by default its name
    # What its record names beside its inputs, given its settings. Of code that only the
    # run names it is an error, which is raised unless the stage is done.
    identity: Callable[[Any], Mapping[str, str | NotNamed]] = lambda settings: {}
    # What its record names of what it reads outside of the run, in the same way.
    outside: Callable[[RunDir], Mapping[str, str | NotNamed]] = lambda run: {}
    # Its settings for every preset; empty where it has none.
    presets: Mapping[Preset, Any] = dataclasses.field(default_factory=dict)
    section: str | None = None  # of its settings in the manifest; by default its own
    is_open: bool = False  # to other settings, while none of its outputs is there
    # Says what is left to do, with the same settings; None without a `--dry-run`.
    forecast: Callable[[RunDir, Any], Forecast] | None = None

    def settle(
        self,
        run: RunDir,
        change: Change | None = None,
        *,
        is_replaceable: bool = False,
        is_recorded: bool = True,
    ) -> Any:
        """Return the stage's settings in a run, see `RunDir.settle`."""
        if not self.presets:
            return None
        outputs = [p for p in self.outputs(run) if p.exists()] if self.is_open else []
        try:
            return run.settle(
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
            raise ValueError(f"{error}, or delete {paths} to make it anew") from error


def side_by_side(
    work: Callable[[Item, Callable[[], None]], None],
    items: Sequence[Item],
    update: Update,
    total: int,
    *,
    at_once: int | None = None,
) -> None:
    """Do work on several items at once, each in a thread of its own.

    `work` gets an item, and what it calls once for each thing it has done; there are
    `total` things of all items. If it fails, or the person at the keyboard stops the
    run, the other items end at the next thing that they have done.
    """
    lock, done, stop = threading.Lock(), itertools.count(1), threading.Event()

    def tick() -> None:
        if stop.is_set():
            raise CancelledError("another part of the stage has stopped")
        with lock:
            update(next(done), total)

    def do_item(item: Item) -> None:
        if stop.is_set():
            return
        try:
            work(item, tick)
        except BaseException:
            stop.set()  # here, before another item takes this thread
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


def once(
    run: RunDir,
    name: str,
    inputs: Mapping[str, str],
    outputs: list[Path],
    progress: Progress,
    work: Callable[[Update], int | None],
    verb: str = "",
) -> int | None:
    """Do a stage, or this process's share of it, unless it is done with these inputs.

    Inputs are hashes, by name, of all that the outputs depend on, see `current_inputs`.
    Whoever does the whole work (see `Stage.work`) records it, under a verb that is by
    default its name. Returns how many parts of other processes are missing; None if the
    stage was done before.
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


def _is_shared(run_dir: Path, share: Share) -> bool:
    """Tell whether a worker may join those that hold a run: none works alone."""
    try:
        RunDir.open(run_dir, share=share).close()
    except InUse:
        return False
    return True


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

    `work` does what `run.share` says of an open run, by `once` or `run_stage`, and
    returns what these do. After a share of which nothing is missing it is called again,
    alone with the run. Raises `InUse` if a process that works alone holds the run, or
    if workers of another stage do for longer than `patience`, in seconds, so that
    nobody joins the parts.
    """
    if share.is_whole:
        with RunDir.open(run_dir) as run:
            work(run)
        return
    with _open_patiently(run_dir, share, patience) as run:
        n_missing = work(run)
    if n_missing is None:
        return
    if n_missing:
        progress.note(
            f"{_name_of(name, share)}: {n_missing} {parts} of other workers are "
            "missing; whoever writes the last puts all together, and so does the same "
            "line in one process"
        )
        return
    try:
        run = _open_patiently(run_dir, Share(), patience)
    except InUse as error:
        if not _is_shared(run_dir, share):
            what = f"another process holds the run and may put the {parts} together"
        elif RunDir(run_dir).stage_done(name):
            what = f"another process has put the {parts} together"
        else:
            raise InUse(
                f"the {parts} are all there, but not put together: {error}, then run "
                "the same line in one process"
            ) from None
        progress.note(f"{_name_of(name, share)}: {what}")
        return
    with run:
        work(run)


def current_inputs(
    run: RunDir, name: str, paths: Iterable[Path] = ()
) -> dict[str, str]:
    """Return the identities of what a stage reads, for `once`.

    That is current, and no person has changed it, nor what the stage wrote before. To
    do a stage again is safe, but other stages have to be done again before; otherwise
    scores of one split would be reported as those of another.
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
    """Return what a stage's record names beside its inputs.

    Code that the run names and this process does not is as it is in the record, so that
    a stage that is done stays done without it.
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
    """Do a stage, or this process's share of it, unless it is done; see `once`.

    `change` makes of the stage's settings what a person chose; a run that has settled
    on others, or lacks an input, is a ValueError.
    """
    inputs = current_inputs(run, stage.name, stage.inputs(run))
    settings = stage.settle(run, change)

    def work(update: Update) -> int | None:
        return stage.work(run, settings, update, progress)

    inputs |= _identities(stage, run, settings)
    outputs = stage.outputs(run)
    n_missing = once(run, stage.name, inputs, outputs, progress, work, stage.verb)
    if run.share.is_whole:
        for path in stage.leftovers(run):
            shutil.rmtree(path, ignore_errors=True)
    return n_missing


def settle_again(run: RunDir, stage: Stage, change: Change) -> None:
    """Let a stage have other settings at any time; it is then done again."""
    before = stage.settle(run, is_recorded=False)
    if change(before) != before:
        run.reopen_stage(stage.name)
        stage.settle(run, change, is_replaceable=True)


def do(
    run_dir: Path,
    stage: Stage,
    *,
    change: Change | None = None,
    share: Share = Share(),
) -> None:
    """Open a run directory and do a stage, or a share of it, see `run_stage`."""
    progress = Progress()

    def work(run: RunDir) -> int | None:
        return run_stage(stage, run, progress, change)

    do_share(run_dir, stage.name, share, work, progress, stage.parts)


def is_done(run_dir: Path, stage: Stage) -> bool:
    """Tell whether nothing of a stage is left to do.

    Nothing is written and no lock is taken. Raises ValueError as `run_stage`.
    """
    run = RunDir(run_dir)
    settings = stage.settle(run, is_recorded=False)
    inputs = current_inputs(run, stage.name, stage.inputs(run))
    inputs |= _identities(stage, run, settings)
    return run.stage_done(stage.name, inputs)


def forecast_stage(run_dir: Path, stage: Stage, change: Change | None = None) -> str:
    """Return in words what a stage with a forecast would need; writes nothing."""
    assert stage.forecast is not None
    run = RunDir(run_dir)
    before = stage.settle(run, is_recorded=False)
    settings = stage.settle(run, change, is_recorded=False)
    inputs = run.hash_inputs(*stage.inputs(run))
    inputs |= _identities(stage, run, settings)
    if run.stage_done(stage.name, inputs) and settings == before:
        return f"{stage.name}: already done, nothing is left to forecast"
    return stage.forecast(run, settings).as_text()

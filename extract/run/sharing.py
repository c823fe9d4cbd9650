"""A stage whose work several processes share: each does its part, the last the rest.

They need not meet, and none waits for another: a worker that finds parts of others
missing leaves. Whoever writes the last part finds none missing and puts all together,
and so does a later process, alone or with others.
"""

import time
from collections.abc import Callable
from pathlib import Path

from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.lock import InUse
from extract.run.share import Share
from extract.run.stages import Change, Stage, refuse_stale, run_stage

_PATIENCE = 120.0  # seconds; who puts together, or looks whether to, takes less


def open_patiently(run_dir: Path, *, exclusive: bool) -> RunDir:
    """Hold a run, after others that hold it for a moment.

    Raises:
      InUse: they hold it for longer.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return RunDir.open(run_dir, exclusive=exclusive)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def share(
    run_dir: Path,
    verb: str,
    worker: Share,
    progress: Progress,
    part: Callable[[RunDir], int | None],
    whole: Callable[[RunDir], None],
    *,
    of: str,
) -> None:
    """Do a worker's part; do what comes after all parts if none is missing.

    Args:
      run_dir: of all workers.
      verb: as on the command line.
      worker: whose part it is.
      progress: is told what is left to others.
      part: does it, beside other workers; returns how many things are missing, or None
        where the stage is done already.
      whole: does the rest, alone with the run.
      of: what the things are, in the plural.

    Raises:
      InUse: a process that works alone holds the run.
    """
    name = f"{verb} {worker.rank}/{worker.world_size}"
    with open_patiently(run_dir, exclusive=False) as run:
        n_missing = part(run)
    if n_missing is None:
        progress.note(f"{name}: already done")
        return
    if n_missing:
        progress.note(
            f"{name}: {n_missing} {of} of other workers are missing; whoever writes "
            f"the last puts all together, and so does `beatrice {verb} {run_dir}`"
        )
        return
    try:
        held = open_patiently(run_dir, exclusive=True)
    except InUse:
        progress.note(f"{name}: another process puts the {of} together")
        return
    with held as run:
        whole(run)


def share_stage(
    run_dir: Path,
    stage: Stage,
    worker: Share,
    work: Callable[[RunDir, object, Update, Progress], int],
    *,
    change: Change | None = None,
    of: str,
) -> None:
    """Do a worker's part of a stage that finds the parts of all when it is done.

    Args:
      run_dir: of all workers.
      stage: what is done.
      worker: whose part it is.
      work: does it, with the stage's settings; returns how many things of other
        workers are missing.
      change: makes of the stage's settings what a person chose.
      of: what the things are, in the plural.
    """
    progress = Progress()

    def part(run: RunDir) -> int | None:
        paths = stage.inputs(run)
        names = [path.relative_to(run.path).as_posix() for path in paths]
        refuse_stale(run, stage.name, names)
        inputs = run.hash_inputs(*paths)
        settings = stage.settle(run, change)
        if run.stage_done(stage.name, inputs):
            return None
        run.reopen_stage(stage.name)
        name = f"{stage.name} {worker.rank}/{worker.world_size}"
        with progress.stage(name) as update:
            return work(run, settings, update, progress)

    def whole(run: RunDir) -> None:
        run_stage(stage, run, progress, change)

    share(run_dir, stage.name, worker, progress, part, whole, of=of)

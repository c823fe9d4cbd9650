"""What a stage of a run is, and how one is done once and only once.

A stage names its inputs and outputs; it is done again only if one of them has
changed. Nothing else decides, so the same line typed twice continues the run.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from extract.rundir import RunDir

if TYPE_CHECKING:
    from benchmarks.presets import RunConfig

Update = Callable[[int, int], None]  # (done, total)


class Progress(Protocol):
    """What tells a person how far a run is."""

    def stage(self, name: str) -> AbstractContextManager[Update]:
        """Show one stage while it runs."""

    def note(self, text: str) -> None:
        """Show one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One verb of the command line.

    Attributes:
      name: as on the command line.
      inputs: files and folders of the run it reads.
      outputs: files and folders of the run it writes.
      work: does it; called only if something is to be done.
    """

    name: str
    inputs: Callable[[RunDir], list[Path]]
    outputs: Callable[[RunDir], list[Path]]
    work: Callable[[RunDir, "RunConfig", Update, Progress], None]


def counted(update: Update, total: int) -> Callable[[], None]:
    """Return what several threads call once for each thing they have done."""
    lock, done = threading.Lock(), itertools.count(1)

    def tick() -> None:
        with lock:
            update(next(done), total)

    return tick


def run_stage(
    stage: Stage, run: RunDir, config: "RunConfig", progress: Progress
) -> None:
    """Do a stage unless it is done.

    Raises:
      ValueError: an input is missing; the message says which stage writes it.
    """
    inputs = run.hash_inputs(*stage.inputs(run))
    if run.stage_done(stage.name, inputs):
        progress.note(f"{stage.name}: already done")
        return
    began = time.monotonic()
    with progress.stage(stage.name) as update:
        stage.work(run, config, update, progress)
    run.mark_stage(stage.name, inputs, time.monotonic() - began, stage.outputs(run))

"""What a stage of a run is, and how one is done once and only once.

A stage names its inputs and outputs; it is done again only if one of them has
changed. Nothing else decides, so the same line typed twice continues the run.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from benchmarks.stages.forecast import Tally, Watch, compare, kept_forecast
from benchmarks.stages.tallies import count_stage
from extract.run.directory import RunDir

if TYPE_CHECKING:
    from benchmarks.stages.presets import RunConfig

Item = TypeVar("Item")
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


def side_by_side(
    work: Callable[[Item, Callable[[], None]], None],
    items: Sequence[Item],
    update: Update,
    total: int,
    *,
    at_once: int | None = None,
) -> None:
    """Do work on several items at once, each in a thread of its own.

    Args:
      work: of an item and of what it calls once for each thing it has done.
      items: what is worked on.
      update: told how many things are done, of all items.
      total: how many things there are.
      at_once: items worked on side by side; None takes all.

    Raises:
      Whatever `work` raises. The other items, and all of them when the person at the
      keyboard stops the run, end at the next thing that they have done.
    """
    lock, done, stop = threading.Lock(), itertools.count(1), threading.Event()

    def tick() -> None:
        if stop.is_set():
            raise CancelledError("another part of the stage has stopped")
        with lock:
            update(next(done), total)

    def one(item: Item) -> None:
        if stop.is_set():
            return
        try:
            work(item, tick)
        except BaseException:
            stop.set()  # here, before another item takes this thread
            raise

    with ThreadPoolExecutor(at_once or len(items)) as pool:
        parts = [pool.submit(one, item) for item in items]
        try:
            for part in as_completed(parts):
                if not isinstance(part.exception(), CancelledError):
                    part.result()
        except BaseException:
            stop.set()
            raise


def once(
    run: RunDir,
    name: str,
    inputs: Mapping[str, str],
    outputs: list[Path],
    progress: Progress,
    work: Callable[[Update], None],
    since: tuple[float, Tally] | None = None,
) -> None:
    """Do a stage, and record it, unless it is done with these inputs.

    Args:
      run: of the stage.
      name: as on the command line.
      inputs: hashes, by name, of all that the outputs depend on.
      outputs: what it writes.
      progress: shows it.
      work: does it.
      since: when it began (by `time.monotonic`) and what was there then, if part of
        it was done before this call.
    """
    if run.stage_done(name, inputs):
        progress.note(f"{name}: already done")
        return
    began, before = since or (time.monotonic(), count_stage(run, name, outputs))
    with progress.stage(name) as update:
        watch = Watch(update)
        work(watch)
    seconds = time.monotonic() - began
    run.mark_stage(name, inputs, seconds, outputs)
    done = count_stage(run, name, outputs).since(before)
    forecast = kept_forecast(run, name)
    progress.note(compare(name, forecast, watch.promised, done, seconds))


def run_stage(
    stage: Stage, run: RunDir, config: "RunConfig", progress: Progress
) -> None:
    """Do a stage unless it is done.

    Raises:
      ValueError: an input is missing; the message says which stage writes it.
    """

    def work(update: Update) -> None:
        stage.work(run, config, update, progress)

    inputs = run.hash_inputs(*stage.inputs(run))
    once(run, stage.name, inputs, stage.outputs(run), progress, work)

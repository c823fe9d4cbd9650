"""One life of an extraction: a process that ends by itself or by SIGKILL.

Processes are forked from a server that has imported the libraries and done nothing
else, since starting one from nothing takes longer than what lies between two kills. A
thread of the process sends the signal, and waits for its moment in the process's own
CPU time, so that neither a busy machine nor a pause moves it.
"""

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
import time
from ctypes import c_double
from pathlib import Path

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.torch_stages import extract_worker
from extract.run.directory import RunDir

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])
_POLL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """When a process is to kill itself.

    Attributes:
      n_committed: once so many ranges are committed …
      seconds: … and so much CPU time has passed since then.
    """

    n_committed: int
    seconds: float


def _extract(
    path: Path, config: RunConfig, death: Death | None, spent: c_double
) -> None:
    """Do what `beatrice extract` does; what each process runs.

    `spent` is set to the CPU seconds that it took.
    """
    if death is not None:
        threading.Thread(target=_die, args=(RunDir(path), death), daemon=True).start()
    with RunDir.open(path, config.as_json()) as run:
        extract_worker(run, config, lambda done, total: None, (0, 1))
    spent.value = time.process_time()


def _die(run: RunDir, death: Death) -> None:
    """Wait for the moment, and kill this process."""
    while n_committed(run) < death.n_committed:
        time.sleep(_POLL_S)
    end = time.process_time() + death.seconds
    while time.process_time() < end:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def live(run: RunDir, config: RunConfig, death: Death | None = None) -> float:
    """Extract in a process of its own; return its CPU seconds, NaN if it was killed.

    Raises:
      ValueError: it failed by itself.
    """
    spent = _FORKS.RawValue(c_double, math.nan)
    arguments = (run.path, config, death, spent)
    process = _FORKS.Process(target=_extract, args=arguments)
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL if death else 0):
        raise ValueError(
            f"the extraction of {run.path} failed by itself with exit code "
            f"{process.exitcode}; its message is above"
        )
    return float(spent.value)


def n_committed(run: RunDir) -> int:
    """Count the commit records of both settings."""
    return sum(1 for _ in (run.path / "features").glob("*/commits/*/*.json"))

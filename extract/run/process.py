"""One process: its share of a stage's work, its threads, its GPU, and its memory.

glibc returns freed blocks above a size to the system, and raises that size each time,
up to 32 MiB. A process that frees the same blocks thousands of times pays for new pages
every time; in one that frees large blocks from several threads, each thread keeps its
own. The functions at the end tell glibc which kind of process this is.
"""

import contextlib
import ctypes
import dataclasses
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Given = TypeVar("Given")
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Share:
    """One process's share of the work; by default all of it."""

    rank: int = 0  # from 0
    world_size: int = 1  # number of processes
    source: str = dataclasses.field(default="", compare=False)  # origin, for messages

    def __post_init__(self) -> None:
        """Check that the rank is between 0 and `world_size` - 1."""
        if not 0 <= self.rank < self.world_size:
            where = f"{self.source}: " if self.source else ""
            raise ValueError(
                f"{where}rank {self.rank} of {self.world_size} workers; ranks are 0 to "
                "workers - 1 without gaps"
            )

    @property
    def is_whole(self) -> bool:
        """Return whether this process does all the work."""
        return self.world_size == 1

    def mine(
        self, items: Iterable[Item], cost: Callable[[Item], float] | None = None
    ) -> list[Item]:
        """Return the items of this share, in order; each item is in exactly one share.

        With `cost`, in any unit, shares have about equal sums (the most expensive items
        first, each to the share with the least so far); otherwise about equal counts.
        """
        items = list(items)
        if cost is None:
            return items[self.rank :: self.world_size]
        costs, loads, places = list(map(cost, items)), [0.0] * self.world_size, []
        for index in sorted(range(len(items)), key=lambda index: -costs[index]):
            least = loads.index(min(loads))
            loads[least] += costs[index]
            if least == self.rank:
                places.append(index)
        return [items[index] for index in sorted(places)]


# For each launcher, the names of rank, world size, and rank on this machine. In a SLURM
# batch script outside srun, SLURM_PROCID is 0 for a single process; only the step has a
# count. SLURM is last: MPICH's mpirun uses it to start one process per machine, which
# starts all others; they get PMI's numbers, and inherit that one's of SLURM.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


_CARDS = Path("/proc/driver/nvidia/gpus")  # on Linux


def _number(text: str, source: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit():
        raise ValueError(f"{source}: expected a whole number, found {text!r}")
    return int(text)


def find_share(
    shard: str | None = None, environ: Mapping[str, str] = os.environ
) -> Share:
    """Return this process's share of the work, from `--shard i/n` or a launcher."""
    if shard is not None:
        rank, slash, world_size = shard.partition("/")
        source = f"--shard {shard}"
        if not slash:
            raise ValueError(f"{source}: expected i/n, such as 0/4 for the first of 4")
        return Share(_number(rank, source), _number(world_size, source), source)
    for *names, _ in _LAUNCHERS:
        known = [f"{name}={environ[name]}" for name in names if name in environ]
        # A single shell that Slurm starts has PMI's numbers; its steps have Slurm's.
        if "PMI_SIZE" in names and environ.get("PMI_SIZE", "1") == "1":
            continue
        if len(known) == 2:
            source = " ".join(known)
            rank, world_size = (_number(environ[name], source) for name in names)
            return Share(rank, world_size, source)
        if known and names[0] != "SLURM_PROCID":
            (missing,) = {name for name in names if name not in environ}
            raise ValueError(
                f"{known[0]} is set without {missing}; set both, or neither to use one "
                "process"
            )
    return Share()


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank on its machine; 0 without a launcher."""
    for *_, name in _LAUNCHERS:
        if name in environ:
            return _number(environ[name], name)
    return 0


_STARTED_BY = "BEATRICE_STARTED_BY"  # in a worker's environment: its parent's number


def run_workers(arguments: Sequence[str], n_workers: int) -> int:
    """Do a verb in several processes of this machine; return 0, or a failure's code.

    Each does its share of the verb; only the first shows progress. All stop if one
    fails (its message is on stderr), or if this process ends, even if it is killed.
    """
    # As for the command `beatrice`, modules in the working directory are not imported.
    command = [sys.executable, "-P", "-m", "beatrice", *arguments]
    shared = {**os.environ, "WORLD_SIZE": str(n_workers), _STARTED_BY: str(os.getpid())}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(n_workers):
            line = [*command, "--quiet"] if rank else command
            environ = {**shared, "RANK": str(rank)}
            # A session of their own: Ctrl-C in a terminal reaches this process alone.
            start = subprocess.Popen(line, env=environ, start_new_session=True)
            workers.append(start)
        while None in (codes := [x.poll() for x in workers]) and not any(codes):
            time.sleep(0.1)
        return next(filter(None, codes), 0)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def end_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker of `run_workers`, end at most a second after the parent has ended."""
    if (parent := environ.get(_STARTED_BY)) is None:
        return

    def wait() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os._exit(1)  # all files are written atomically

    threading.Thread(target=wait, daemon=True).start()


def n_cores() -> int:
    """Return how many cores this process may use; Slurm and Docker may limit them."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


class StoppablePool(ThreadPoolExecutor):
    """Threads that stop at their next checked call if the `with` block fails.

    Otherwise a user who interrupts it waits for all that has begun.
    """

    _is_stopped = False

    def checked(self, function: Callable[..., Item]) -> Callable[..., Item]:
        """Return a function that raises `CancelledError` once the block has failed."""

        def call(*args: Any) -> Item:
            if self._is_stopped:
                raise CancelledError("the block that uses these threads has failed")
            return function(*args)

        return call

    def __exit__(self, *error: Any) -> None:
        """Wait for the threads, after stopping them if the block has failed."""
        self._is_stopped = error[0] is not None
        self.shutdown(cancel_futures=self._is_stopped)


def two_at_once(
    function: Callable[[Given], Item], items: Iterable[Given]
) -> Iterator[Item]:
    """Yield the function's results for items in order, two computed at once.

    Not more on more cores: each may need as much memory as one layer's states. Results
    are computed ahead of a slow reader, so they should be small.
    """
    with StoppablePool(min(2, n_cores())) as pool:
        yield from pool.map(pool.checked(function), items)


def gpu_of_process(
    environ: Mapping[str, str] = os.environ, cards: Path = _CARDS
) -> int | None:
    """Return the index of this process's GPU among those visible, or None for all.

    It may use all if no launcher numbers the processes of this machine. `cards` is
    where the driver lists its GPUs, so that they are counted without loading it.
    """
    if not any(name in environ for *_, name in _LAUNCHERS):
        return None
    number, visible = local_rank(environ), environ.get("CUDA_VISIBLE_DEVICES")
    # Slurm may show each process a single GPU, which is then its first.
    if visible is not None:
        return number % (visible.count(",") + 1)
    n_cards = len(list(cards.iterdir())) if cards.is_dir() else 0
    return number % n_cards if n_cards else number


_STATUS = "/proc/self/status"
# From <malloc.h>, in glibc only.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def begin_peak() -> bool:
    """Reset the peak to the memory held at present; return whether it was (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        return True
    return False


def peak_bytes() -> int:
    """Return the most bytes resident since `begin_peak`, or the start if unknown."""
    return proc_bytes(_STATUS, "VmHWM") or _peak_since_start(resource.RUSAGE_SELF)


def peak_bytes_of_children() -> int:
    """Return the peak of the largest of the processes that this one has waited for."""
    return _peak_since_start(resource.RUSAGE_CHILDREN)


def _peak_since_start(who: int) -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(who).ru_maxrss * unit


def resident_bytes() -> int:
    """Return the bytes resident at present, or the peak so far if unknown."""
    return proc_bytes(_STATUS, "VmRSS") or peak_bytes()


def host_bytes() -> int | None:
    """Return the bytes of this machine's memory that are free; None except on Linux."""
    return proc_bytes("/proc/meminfo", "MemAvailable")


def proc_bytes(path: str, field: str) -> int | None:
    """Return in bytes a size that a file in Linux's /proc has in kB; None elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def keep_freed_memory(
    environ: Mapping[str, str] = os.environ,
    mallopt: Callable[[int, int], int] | None = None,
) -> bool:
    """Let this process keep up to 512 MiB of freed memory, in blocks of up to 64 MiB.

    For a backbone on a CPU: the largest activations of one layer are smaller than that.
    Returns whether it was done: not without glibc, nor if the environment sets how to
    allocate (`MALLOC_…`, `GLIBC_TUNABLES`). `mallopt` is glibc's, if None.
    """
    # Both are set, since setting one stops glibc from adapting the other. An old glibc
    # takes at most 32 MiB for blocks.
    return any(
        _set_malloc({_MMAP_THRESHOLD: n, _TRIM_THRESHOLD: 512 << 20}, environ, mallopt)
        for n in (64 << 20, 32 << 20)
    )


def return_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process return blocks of 1 MiB and more as soon as they are freed.

    Its threads share two heaps, instead of having one each. For training from a store,
    which then holds the memory of two groups of rows, however many groups there are.
    Returns whether it was done, as `keep_freed_memory` does.
    """
    # The second is glibc's default, which `keep_freed_memory` may have changed.
    limits = {_MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 128 << 10, _ARENA_MAX: 2}
    return _set_malloc(limits, environ)


def trim_freed_memory() -> None:
    """Return all freed memory to the system at once, if the C library is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_malloc(
    limits: Mapping[int, int],
    environ: Mapping[str, str],
    mallopt: Callable[[int, int], int] | None = None,
) -> bool:
    """Set limits of glibc's allocator until one is refused; return if all were set."""
    malloc = ("TRIM_THRESHOLD_", "MMAP_THRESHOLD_", "ARENA_MAX")
    chosen = {"GLIBC_TUNABLES", *(f"MALLOC_{name}" for name in malloc)}
    if sys.platform != "linux" or chosen & environ.keys():
        return False
    mallopt = mallopt or getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*limit) for limit in limits.items())

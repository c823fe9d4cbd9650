"""Which worker this is, as whoever launched it says."""

import dataclasses
import os
from collections.abc import Mapping

# Names of rank and world size, per launcher, most specific first. Open MPI under SLURM
# starts one daemon per node with srun, whose SLURM_PROCID its processes inherit.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
_ARRAY = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Worker:
    """One of several processes that share a stage's work.

    Attributes:
      rank: from 0.
      world_size: number of workers.
      said_by: the variables that say so, as they are set; empty without a launcher.
    """

    rank: int
    world_size: int
    said_by: str


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's whole number, which is 0 or more."""
    text = environ[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            f"{name} is {environ[name]!r}, expected a whole number as a launcher sets "
            f"it; unset {name} to work alone"
        )
    return int(text)


def _pair(
    environ: Mapping[str, str], rank_name: str, world_name: str, first: int = 0
) -> Worker | None:
    """Return what one launcher says, or None if it says nothing; ranks from `first`."""
    found = [name for name in (rank_name, world_name) if name in environ]
    # In a SLURM batch script outside srun, SLURM_PROCID is 0 and SLURM_NTASKS may be
    # many although one process runs: only the step's own count says how many started.
    if not found or found == ["SLURM_PROCID"]:
        return None
    if len(found) == 1:
        (missing,) = {rank_name, world_name} - set(found)
        meaning = "this worker's number, from 0" if missing == rank_name else (
            "the number of workers"
        )  # fmt: skip
        raise ValueError(
            f"{found[0]}={environ[found[0]]} is set without {missing}; set {missing} "
            f"to {meaning}, or unset {found[0]} to work alone"
        )
    rank = _number(environ, rank_name) - first
    world_size = _number(environ, world_name)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{rank_name} gives rank {rank}, {world_name} gives {world_size} "
            "workers; ranks must be 0 to workers - 1 without gaps"
        )
    said_by = " ".join(f"{name}={environ[name]}" for name in found)
    return Worker(rank, world_size, said_by)


def _within(array: Worker, inner: Worker) -> Worker:
    """Return a worker of a job that is itself one task of an array."""
    return Worker(
        array.rank * inner.world_size + inner.rank,
        array.world_size * inner.world_size,
        f"{array.said_by} {inner.said_by}",
    )


def find_worker(environ: Mapping[str, str] = os.environ) -> Worker:
    """Read which worker this is from the launcher.

    Knows torchrun, srun, SLURM arrays, Open MPI, and Kubernetes indexed jobs (where
    the manifest must set JOB_COMPLETIONS). Every task of an array is a job of its own,
    so what srun, mpirun or torchrun start in it is counted within the task; RANK and
    WORLD_SIZE that torchrun did not set are taken as they are, since a batch script
    may have made them of the array's numbers.

    Raises:
      ValueError: half of a pair is set, or the numbers are none or do not fit.
    """
    first = "SLURM_ARRAY_TASK_MIN"
    array = _pair(environ, *_ARRAY, _number(environ, first) if first in environ else 0)
    for names in _LAUNCHERS:
        inner = _pair(environ, *names)
        if inner is None:
            continue
        by_hand = names[0] == "RANK" and "TORCHELASTIC_RUN_ID" not in environ
        return inner if array is None or by_hand else _within(array, inner)
    return array or Worker(0, 1, "")


def rank_and_world_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this worker's rank and the number of workers; see `find_worker`."""
    worker = find_worker(environ)
    return worker.rank, worker.world_size


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this worker's number among those of its machine, 0 without a launcher.

    Raises:
      ValueError: the variable that says so holds no number.
    """
    for name in _LOCAL_RANKS:
        if name in environ:
            return _number(environ, name)
    return 0

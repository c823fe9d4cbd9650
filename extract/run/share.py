"""Which part of a stage's work is this process's, where several share it.

Processes need not meet: each does the parts that `Share.mine` gives it, and whoever
finds that no part is missing joins them (`extract.run.stages.do_share`).
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Share:
    """One process's share of the work; by default all of it."""

    rank: int = 0  # from 0
    world_size: int = 1  # number of processes
    # The variables or the option that say so, for messages; empty for a process that
    # works alone.
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check that the rank is one of the world's."""
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
        """Return the items of this share, in their order.

        The shares of all ranks are disjoint and hold every item.

        Args:
          items: of the whole work, equal in all processes.
          cost: of an item, in any unit; then the shares have about equal sums (the
            most expensive item first, each to the share that has least so far), else
            about equal counts (`items[rank::world_size]`).
        """
        items = list(items)
        if cost is None:
            return items[self.rank :: self.world_size]
        costs = [cost(item) for item in items]
        loads = [0.0] * self.world_size
        places = []
        for index in sorted(range(len(items)), key=lambda index: -costs[index]):
            least = loads.index(min(loads))
            loads[least] += costs[index]
            if least == self.rank:
                places.append(index)
        return [items[index] for index in sorted(places)]


# Names of rank and world size, per launcher. In a SLURM batch script outside srun,
# SLURM_PROCID is 0 although one process runs: only the step's own count says how many.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def _number(text: str, source: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit():
        raise ValueError(f"{source}: expected a whole number, found {text!r}")
    return int(text)


def find_share(
    shard: str | None = None, environ: Mapping[str, str] = os.environ
) -> Share:
    """Return which share of the work is this process's.

    `--shard i/n`, for arrays of jobs and for schedulers that set other variables, goes
    before what a launcher says.
    """
    if shard is not None:
        rank, slash, world_size = shard.partition("/")
        source = f"--shard {shard}"
        if not slash:
            raise ValueError(f"{source}: expected i/n, such as 0/4 for the first of 4")
        return Share(_number(rank, source), _number(world_size, source), source)
    for names in _LAUNCHERS:
        known = [f"{name}={environ[name]}" for name in names if name in environ]
        if len(known) == 2:
            source = " ".join(known)
            rank, world_size = (_number(environ[name], source) for name in names)
            return Share(rank, world_size, source)
        if known and names[0] != "SLURM_PROCID":
            (missing,) = {name for name in names if name not in environ}
            raise ValueError(
                f"{known[0]} is set without {missing}; set both, or neither to work "
                "alone"
            )
    return Share()


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number among those of its machine, 0 without a launcher."""
    for name in _LOCAL_RANKS:
        if name in environ:
            return _number(environ[name], name)
    return 0


def own_gpu(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return which of the visible GPUs is this process's, from 0.

    None where no launcher numbers the processes of this machine: then all are.
    """
    if not any(name in environ for name in _LOCAL_RANKS):
        return None
    number, visible = local_rank(environ), environ.get("CUDA_VISIBLE_DEVICES")
    # Slurm may show each process one GPU, which is then its first.
    return number if visible is None else number % (visible.count(",") + 1)

"""Which worker this is: as torchrun, srun or mpirun says, or the option `--shard`."""

import dataclasses
import os
from collections.abc import Mapping

import click

# Names of rank and world size, per launcher. In a SLURM batch script outside srun,
# SLURM_PROCID is 0 although one process runs: only the step's own count says how many.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Worker:
    """One of several processes that share a stage's work.

    Attributes:
      rank: from 0.
      world_size: number of workers.
      source: the variables or the option that say so; empty for one that works alone.
    """

    rank: int = 0
    world_size: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse a rank that there is not."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.source}: rank {self.rank} of {self.world_size} workers; ranks "
                "are 0 to workers - 1 without gaps"
            )


def _number(text: str, source: str) -> int:
    """Return a whole number, which is 0 or more."""
    if not text.strip().isascii() or not text.strip().isdigit():
        raise ValueError(f"{source}: expected a whole number, found {text!r}")
    return int(text)


def find_worker(
    shard: str | None = None, environ: Mapping[str, str] = os.environ
) -> Worker:
    """Return which worker this is.

    Args:
      shard: `i/n`, as the option has it; it goes before what a launcher says. For
        arrays of jobs and schedulers that set other variables.
      environ: of the process.

    Raises:
      ValueError: half of a pair is set, or the numbers are none or do not fit.
    """
    if shard is not None:
        rank, slash, world_size = shard.partition("/")
        source = f"--shard {shard}"
        if not slash:
            raise ValueError(f"{source}: expected i/n, such as 0/4 for the first of 4")
        return Worker(_number(rank, source), _number(world_size, source), source)
    for names in _LAUNCHERS:
        found = [f"{name}={environ[name]}" for name in names if name in environ]
        if len(found) == 2:
            source = " ".join(found)
            return Worker(*(_number(environ[name], source) for name in names), source)
        if found and names[0] != "SLURM_PROCID":
            (missing,) = {name for name in names if name not in environ}
            raise ValueError(
                f"{found[0]} is set without {missing}; set both, or neither to work "
                "alone"
            )
    return Worker()


def worker_of(shard: str | None, dry_run: bool) -> Worker:
    """Return which worker this is; who counts what all would do works alone."""
    return Worker() if dry_run else find_worker(shard)


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this worker's number among those of its machine, 0 without a launcher.

    Raises:
      ValueError: the variable that says so holds no number.
    """
    for name in _LOCAL_RANKS:
        if name in environ:
            return _number(environ[name], name)
    return 0


def own_gpu(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return which of the GPUs that this worker is shown is its own, from 0.

    Returns:
      None where no launcher numbers the workers of this machine: then all of them are.

    Raises:
      ValueError: the variable that numbers them holds no number.
    """
    if not any(name in environ for name in _LOCAL_RANKS):
        return None
    number, shown = local_rank(environ), environ.get("CUDA_VISIBLE_DEVICES")
    # Slurm may show each worker one GPU, which is then its first.
    return number if shown is None else number % (shown.count(",") + 1)


def _checked(
    context: click.Context, option: click.Parameter, shard: str | None
) -> str | None:
    """Tell at once that a part is none."""
    try:
        if shard is not None:
            find_worker(shard)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    return shard


SHARD = click.option(
    "--shard",
    metavar="I/N",
    callback=_checked,
    help="Do part I (from 0) of N; each part is a process of its own. Torchrun, srun "
    "and mpirun say this by themselves.",
)

"""Which worker this is, as whoever launched it says."""

import os
from collections.abc import Mapping

# Names of rank and world size, per launcher, most specific first. In a SLURM batch
# script outside srun, SLURM_PROCID is 0 and SLURM_NTASKS may be many although one
# process runs: only the step's own count says how many were started.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)


def rank_and_world_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Read this worker's rank and the number of workers from the launcher.

    Knows torchrun, srun, SLURM arrays, Open MPI, and Kubernetes indexed jobs (where
    the manifest must set JOB_COMPLETIONS). Without a launcher: (0, 1).

    Raises:
      ValueError: half of a pair is set, or the numbers do not fit.
    """
    for rank_name, world_name in _LAUNCHERS:
        # A batch script without srun has a SLURM_PROCID but no step, see above.
        if rank_name not in environ or (
            rank_name == "SLURM_PROCID" and world_name not in environ
        ):
            continue
        if world_name not in environ:
            raise ValueError(
                f"{rank_name}={environ[rank_name]} is set without {world_name}; set "
                f"{world_name} to the number of workers"
            )
        rank, world_size = int(environ[rank_name]), int(environ[world_name])
        rank -= int(environ.get("SLURM_ARRAY_TASK_MIN", "0")) * (
            rank_name == "SLURM_ARRAY_TASK_ID"
        )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"{rank_name} gives rank {rank}, {world_name} gives {world_size} "
                "workers; ranks must be 0 to workers - 1 without gaps"
            )
        return rank, world_size
    return 0, 1

"""Which accelerator is this process's own, as whoever launched it says."""

import os
from collections.abc import Mapping
from typing import Literal

from extract.run.workers import local_rank


def own_device(
    device: str, n_visible: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Return Torch's name of the device; `cuda` alone is each process's own GPU.

    Args:
      device: as asked for; one with a number, or no GPU, stays as it is.
      n_visible: GPUs that this process sees. A launcher that shows each process one
        GPU only calls it 0, whatever the process's rank.
      environ: of the process.

    Raises:
      ValueError: the launcher's number of this process on its machine is none.
    """
    if device != "cuda":
        return device
    return f"cuda:{local_rank(environ) % max(1, n_visible)}"


def default_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return how weights are held where nobody says: as trained on a GPU, else exact.

    Published checkpoints are bfloat16; float32 takes twice the memory and several
    times the time of a GPU, and on a processor it is the faster one.
    """
    return "bfloat16" if device.startswith("cuda") else "float32"

"""Processes that a launcher started, and how they meet by `jax.distributed`.

Training needs no meeting, see `jaxprobe.fit.shares`. A search does: which heads are
trained next is known when all of a round are there.
"""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from extract.run.workers import Worker, own_gpu

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_AGAIN = "the same line again, with any number of processes, does the stage anew"


def use_own_device(worker: Worker) -> None:
    """Take one GPU of a machine whose workers share its GPUs; before JAX looks."""
    gpu = own_gpu() if worker.world_size > 1 else None
    if gpu is not None:
        jax.config.update("jax_cuda_visible_devices", str(gpu))


def coordinator(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return where process 0 is met, `HOST:PORT`; None leaves it to JAX.

    JAX finds it under Slurm and Open MPI. Torchrun keeps MASTER_PORT for itself, so the
    next one is taken, or JAX_COORDINATOR_PORT.

    Raises:
      ValueError: the port is no number.
    """
    if _ADDRESS in environ:
        return environ[_ADDRESS]
    if "MASTER_ADDR" not in environ:
        return None
    text = environ.get("MASTER_PORT", "29500")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"MASTER_PORT: expected a whole number, found {text!r}")
    port = environ.get("JAX_COORDINATOR_PORT", str(int(text) + 1))
    return f"{environ['MASTER_ADDR']}:{port}"


@contextlib.contextmanager
def joined(
    worker: Worker, note: Callable[[str], None], *, seconds: int = 300
) -> Iterator[None]:
    """Meet the other processes for a `with` block; before JAX makes its first array.

    Args:
      worker: which of them this is.
      note: prints a line for the person who waits.
      seconds: how long the last of them is waited for; then JAX ends the process.

    Raises:
      ValueError: it is not known where to meet, or it is no place to meet.
    """
    gpu, address = own_gpu(), coordinator()
    note(
        f"process {worker.rank} of {worker.world_size} meets the others at "
        f"{address or 'the first machine of the job'}, within {seconds} s"
    )
    # It would take the signal that ends a process, and wait for a point to save at.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            worker.world_size,
            worker.rank,
            local_device_ids=None if gpu is None else [gpu],
            initialization_timeout=seconds,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the {worker.world_size} processes of {worker.source} did not meet "
            f"({str(error).splitlines()[0]}); set {_ADDRESS}=HOST:PORT in all of them, "
            "HOST being that of process 0 and PORT a free one there"
        ) from error
    try:
        yield
    except BaseException:
        atexit.register(_leave)
        raise
    jax.distributed.shutdown()


def _leave() -> None:
    """End the process before JAX waits for those that will not come any more."""
    sys.stdout.flush()
    os._exit(1)


@functools.cache
def _meeting() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Return where a process puts what it has, and what gives all of it to all."""
    first = {d.process_index: d for d in reversed(jax.devices("cpu"))}
    mesh = Mesh(np.asarray([first[i] for i in range(len(first))]), ("processes",))
    whole = NamedSharding(mesh, PartitionSpec())
    copied = jax.jit(lambda x: x, out_shardings=whole)
    return NamedSharding(mesh, PartitionSpec("processes")), copied


def gather(own: Any) -> Any:
    """Return what all processes have, in all of them.

    By way of the processors, whatever the heads are trained on: there the end of a
    process is told at once, and a process that is not heard of for half an hour (XLA's
    `xla_cpu_collective_timeout_seconds`) counts as ended.

    Args:
      own: a tree of arrays, of the same shapes in every process.

    Returns:
      the tree with leaves `[n_processes, ...]`, on the host.

    Raises:
      ValueError: another process has ended.
    """
    apart, copied = _meeting()

    def one(x: np.ndarray) -> np.ndarray:
        parts = jax.make_array_from_process_local_data(apart, np.asarray(x)[None])
        return np.asarray(copied(parts).addressable_data(0))

    try:
        return jax.tree.map(one, own)
    except (RuntimeError, ValueError) as error:  # depends on when it is noticed
        raise ValueError(
            f"process {jax.process_index()} of {jax.process_count()}: another one has "
            f"ended or is not heard of ({str(error).splitlines()[0]}); {_AGAIN}"
        ) from error

"""Starts the contestants of `beatrice bench train` and tells them what to do."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.forecasts.train_work import (
    Losses,
    Member,
    Workload,
    in_parts,
    turn_flops,
)
from benchmarks.speed.memory import MIB
from benchmarks.speed.torch_setting import Setting, blocks_of
from benchmarks.speed.train_worker import Kind


class Fleet:
    """One contestant: its processes, each with its share of the members."""

    def __init__(
        self,
        kind: Kind,
        workload: Workload,
        members: Sequence[Member],
        folder: Path,
        setting: Setting | None = None,
        xla_flags: str = "",
    ) -> None:
        """Start the processes; `folder` holds initial weights."""
        self.kind = kind
        self.workload = workload
        self.members = members
        self.setting = setting
        groups = [[member] for member in members]
        if kind == "vmap" and setting.block == "seeds":
            groups = blocks_of(members, setting)
        parts = in_parts(workload, groups, setting.n_processes if setting else 1)
        self._workers = []
        for part in parts:
            job = {
                "kind": kind,
                "workload": dataclasses.asdict(workload),
                "members": part,
                "folder": str(folder),
                "setting": dataclasses.asdict(setting) if setting else None,
            }
            self._workers.append(_Worker(job, xla_flags))

    def _all(self, *command: Any) -> list[Any]:
        for worker in self._workers:
            worker.tell(*command)
        return [worker.answer() for worker in self._workers]

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return losses of steps on one batch, of every member with given weights."""
        given = dataclasses.asdict(workload)
        answers = self._all("losses", given, n_steps, n_microbatches)
        return {(k, s): found for part in answers for k, s, found in part}

    def prepare(self) -> None:
        """Make data and weights, and compile."""
        self._all("prepare")

    def turn(self) -> float:
        """Train every member for the workload's steps; return seconds."""
        began = time.perf_counter()
        self._all("turn")
        return time.perf_counter() - began

    def flops(self) -> int:
        """Return the operations of a turn."""
        return turn_flops(self.workload, self.members)

    def peak_mib(self) -> float:
        """Return peak memory above the libraries, summed over the processes."""
        return sum(self._all("peak")) / MIB

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A process and the two pipes to it."""

    def __init__(self, job: dict[str, Any], xla_flags: str) -> None:
        setting = job["setting"]
        n_threads = setting["n_threads"] if setting else os.cpu_count()
        flags = os.environ.get("XLA_FLAGS", xla_flags)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(n_threads),
            "XLA_FLAGS": flags,
            # Two contestants run the same executables: one compiles them.
            "JAX_COMPILATION_CACHE_DIR": str(Path(job["folder"]) / "compiled"),
        }
        self._kind = job["kind"]
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speed.train_worker", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            text=True,
        )

    def tell(self, *command: Any) -> None:
        """Send a command; a process that has ended is noticed by its answer."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to the last command.

        Raises:
          ValueError: the process has ended; the message is its last line.
        """
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        raise ValueError(
            f"the process that trains by {self._kind!r} has ended with status "
            f"{self._process.returncode}: {lines[-1] if lines else 'no message'}"
        )

    def close(self) -> None:
        """Let the process end, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()


@contextlib.contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[Fleet]:
    """Hold a contestant while it is needed; see `Fleet`."""
    fleet = Fleet(*arguments, **options)
    try:
        yield fleet
    finally:
        fleet.close()

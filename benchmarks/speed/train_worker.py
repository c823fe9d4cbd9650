"""One contestant of `beatrice bench train` in a process of its own.

Reads commands from standard input, one JSON list per line, and answers each with a line
of JSON. So every contestant keeps its own threads, compiler and memory, and waits
without a load while another one is timed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.forecasts.train_work import Losses, Workload
from benchmarks.speed.memory import held_bytes, peak_bytes, reset_peak

Kind = Literal["grid", "alone", "loop", "vmap", "mixed"]


class Contestant(Protocol):
    """What trains some members of a workload."""

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of `n_steps` on one batch, from the given weights."""

    def prepare(self) -> None:
        """Make data and weights, and compile."""

    def turn(self) -> None:
        """Train every member for `n_steps` batches."""


def contestant(job: dict[str, Any], workload: Workload) -> Contestant:
    """Make a contestant; only its own libraries are loaded."""
    members = [(subset, seed) for subset, seed in job["members"]]
    if job["kind"] in ("grid", "mixed", "alone"):
        from benchmarks.speed.train_grid import Grid

        return Grid(workload, members, at_once=1 if job["kind"] == "alone" else 2)
    from benchmarks.speed.torch_setting import Setting
    from benchmarks.speed.torch_training import TorchContestant

    return TorchContestant(
        workload,
        Setting(**job["setting"]),
        members,
        Path(job["folder"]),
        stacked=job["kind"] == "vmap",
    )


def serve(job: dict[str, Any]) -> None:
    """Answer commands until there are none."""
    workload = Workload.from_json(job["workload"])
    me = contestant(job, workload)
    held = held_bytes()
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        found: Any = None
        if name == "losses":
            given, n_steps, n_microbatches = arguments
            losses = me.losses(Workload.from_json(given), n_steps, n_microbatches)
            found = [[*member, values] for member, values in losses.items()]
        elif name == "prepare":
            me.prepare()
            reset_peak()
        elif name == "turn":
            me.turn()
        elif name == "peak":
            found = peak_bytes() - held
        else:
            raise ValueError(f"no command {name!r}")
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

"""`beatrice bench train`: what the training grid is worth beside PyTorch.

Five methods train the same encoders: (a) the grid as a run trains it, members side by
side; (b) a PyTorch loop; (c) `torch.func.vmap`; (d) the grid's members one at a time;
(e) the grid in mixed precision. From the same weights and batches all must give the
same losses. Then they take turns, so that a busy machine slows all of them, and each
round measures the fp32 peak of matrix products beside them. Every method has processes
of its own: so it keeps its threads, compiler and memory, and waits without a load while
another one is timed.
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from beatrice.benchmarks.speed.commands import (
    AS_JSON,
    MIB,
    Remote,
    RowPrinter,
)
from beatrice.benchmarks.speed.grid import Grid, Losses, machine, microworld, paper
from beatrice.benchmarks.speed.torch_training import (
    CHANGES,
    FASTEST,
    Setting,
    TorchTrainer,
    by_subset,
)
from beatrice.extract.run.console import Progress, quiet
from beatrice.jaxprobe.config import XLA_FLAGS
from beatrice.jaxprobe.features.subsets import subset_index
from beatrice.jaxprobe.fit.work import (
    Member,
    Workload,
    in_parts,
    turn_flops,
)

KINDS = {
    "grid": "(a) grid, two members side by side",
    "loop": "(b) PyTorch, loop over the encoders",
    "vmap": "(c) PyTorch, torch.func.vmap over a subset's seeds",
    "alone": "(d) JAX, encoders one at a time",
    "mixed": "(e) grid, products in bfloat16",
}
HEAD = (
    "method, encoder-steps/s, GFLOP/s, share of fp32 peak, (a) is faster by, peak MiB, "
    "largest loss difference"
).split(", ")
# Of losses near 0.7 after a few steps: fp32 sums in another order, and Adam's division
# makes a small difference of a small gradient a difference of a whole step.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2  # the same, with operands of eight bits
N_THREADS = 2  # members side by side, and threads of the products' peak
_TRIED_ON = ("HPR", "HRA")  # encoders of middling cost
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSize:
    """How many steps on one batch, of how many seeds of a subset, compare losses."""

    n_examples: int = 32
    n_microbatches: int = 2
    n_steps: int = 4
    n_seeds: int = 2


class Method:
    """One way to train: its processes, each with its share of the members."""

    def __init__(
        self,
        kind: str,
        workload: Workload,
        members: Sequence[Member],
        folder: Path,
        setting: Setting | None = None,
    ) -> None:
        """Start the processes; `setting` is PyTorch's, None for JAX.

        The folder has the initial weights, and what JAX compiles: several methods run
        the same executables, and one compiles them.
        """
        self.kind = kind
        self.workload = workload
        is_stacked = kind == "vmap"
        groups = by_subset(members) if is_stacked else [[one] for one in members]
        n_processes, n_threads = 1, os.cpu_count()
        if setting is not None:
            n_processes, n_threads = setting.n_processes, setting.n_threads
        environment = {
            "OMP_NUM_THREADS": str(n_threads),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS["demo"]),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        }
        at_once = 1 if kind == "alone" else N_THREADS
        self._trainers = [
            Remote(environment, Grid, workload, part, at_once)
            if setting is None
            else Remote(
                environment, TorchTrainer, workload, setting, part, folder, kind
            )
            for part in in_parts(workload, groups, n_processes)
        ]

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call every process's trainer, and wait for all of them."""
        waited = [trainer.call(name, *arguments) for trainer in self._trainers]
        try:
            return [one.result() for one in waited]
        except Exception as error:
            raise ValueError(
                f"the process that trains by {self.kind!r} has failed: {error}"
            ) from error

    def losses(self, size: CheckSize) -> Losses:
        """Return losses of steps on one batch, of every member with given weights."""
        work = self.workload.quiet()
        work = dataclasses.replace(work, batch_size=size.n_examples, n_steps=1)
        parts = self._all("losses", work, size.n_steps, size.n_microbatches)
        every = {member: found for part in parts for member, found in part.items()}
        return {m: found for m, found in every.items() if m[1] < size.n_seeds}

    def prepare(self) -> None:
        """Make data and weights, and compile."""
        self._all("prepare")

    def turn(self) -> float:
        """Train every member for the workload's steps; return seconds."""
        began = time.perf_counter()
        self._all("turn")
        return time.perf_counter() - began

    def peak_mib(self) -> float:
        """Return peak memory above the libraries, summed over the processes."""
        return sum(one.peak().result() for one in self._trainers) / MIB

    def close(self) -> None:
        """End the processes."""
        for trainer in self._trainers:
            trainer.close()


def fastest(kind: str, workload: Workload, folder: Path, note: Note) -> Setting:
    """Return PyTorch's fastest setting for the encoders, found by trying.

    Each of `CHANGES` in turn is taken if it is faster: trying all combinations would
    take longer than what is measured. A setting that does not run here is passed over.
    """
    members = [(subset_index(x), s) for x in _TRIED_ON for s in range(workload.n_seeds)]

    def rate(setting: Setting) -> float:
        """GFLOP/s, the better of two short turns."""
        method = Method(kind, workload, members, folder, setting)
        with contextlib.closing(method):
            method.prepare()
            seconds = min(method.turn() for _ in range(2))
        found = turn_flops(workload, members) / seconds / 1e9
        note(f"{kind}: {setting.text()}: {found:.1f} GFLOP/s")
        return found

    best, highest = FASTEST[kind], rate(FASTEST[kind])
    for change in CHANGES[kind]:
        new = dataclasses.replace(best, **change)
        try:
            found = rate(new) if new != best else 0.0
        except ValueError as error:
            note(f"{kind}: {new.text()}: {error}")
            continue
        if found > highest:
            best, highest = new, found
    return best


def largest_difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of two methods' losses.

    Raises:
      ValueError: they have not trained the same members for the same steps.
    """
    if {m: len(x) for m, x in ours.items()} != {m: len(x) for m, x in theirs.items()}:
        raise ValueError(
            f"one method has trained {sorted(ours)}, another {sorted(theirs)}, or for "
            "another number of steps; their losses cannot be compared"
        )
    # NumPy's maximum, which a NaN goes through; Python's passes over it.
    every = [np.abs(np.subtract(x, theirs[m])).max() for m, x in ours.items()]
    return float(np.max(every))


def require_same_losses(found: dict[str, Losses]) -> dict[str, float]:
    """Return each method's largest difference from the grid.

    Raises:
      ValueError: a loss differs by more than `TOLERANCE`, or does not move.
    """
    grid = found["grid"]
    differences = {k: largest_difference(grid, losses) for k, losses in found.items()}
    for kind, difference in differences.items():
        tolerance = MIXED_TOLERANCE if kind == "mixed" else TOLERANCE
        if not difference <= tolerance:  # so that NaN fails
            raise ValueError(
                f"losses of {kind!r} differ from the grid's by {difference:.2g} from "
                f"the same weights and batches, more than {tolerance:g}: the timing "
                "would compare two things"
            )
    moved = float(np.min([abs(x[0] - x[-1]) for x in grid.values()]))
    same = [x for kind, x in differences.items() if kind != "mixed"]
    if not moved > 10 * max(TOLERANCE / 10, *same):
        raise ValueError(
            f"a loss moves by {moved:.2g} only, too little to compare trainings by; "
            "take more steps or a higher rate"
        )
    return differences


def product_gflops(n: int = 2048, n_repeats: int = 4) -> float:
    """Return the best rate of a square fp32 matrix product, in GFLOP/s."""
    torch.set_num_threads(N_THREADS)
    a, b = torch.rand(n, n), torch.rand(n, n)
    out, best = torch.empty(n, n), float("inf")
    for _ in range(n_repeats + 1):  # the first one starts the threads
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCost:
    """One method: a row of the table; rates, shares and ratios are medians over rounds.

    `steps_per_second` counts encoder-steps, `peak_share` is of the rate of matrix
    products in the same round, `ratio` the grid's speed over this one's, and memory
    stands above the libraries, data included.
    """

    kind: str
    setting: str
    steps_per_second: float
    gflops: float
    peak_share: float
    ratio: float
    peak_mib: float
    loss_difference: float
    peak_gflops: float

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `HEAD`."""
        return [
            f"{KINDS[self.kind]}{': ' if self.setting else ''}{self.setting}",
            f"{self.steps_per_second:.1f}",
            f"{self.gflops:.1f}",
            f"{self.peak_share:.0%}",
            f"{self.ratio:.2f}",
            f"{self.peak_mib:.0f}",
            f"{self.loss_difference:.1g}",
        ]


def _take_turns(
    methods: Sequence[Method], n_rounds: int, note: Note
) -> Iterator[tuple[dict[str, float], float]]:
    """Yield each round's seconds by method, and its rate of products in GFLOP/s."""
    for method in methods:
        note(f"{method.kind}: compiles")
        method.prepare()
    for i in range(n_rounds):
        note(f"round {i + 1} of {n_rounds}")
        peak = product_gflops()
        first = i % len(methods)  # another one begins in each round
        order = [*methods[first:], *methods[:first]]
        yield {method.kind: method.turn() for method in order}, peak


def measure(
    workload: Workload,
    *,
    n_rounds: int,
    check: CheckSize | None = None,
    search: bool = True,
    note: Note = lambda text: None,
) -> list[TrainCost]:
    """Check and time the methods; return a row of each.

    Args:
      workload: what is trained.
      n_rounds: turns of each.
      check: how losses are compared.
      search: whether PyTorch's fastest setting is looked for.
      note: told what is going on.

    Raises:
      ValueError: the methods do not compute the same losses, or one has failed.
    """
    check = check or CheckSize()
    n_steps = workload.n_steps * len(workload.members)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        written = [m for m in workload.members if m[1] < check.n_seeds]
        Grid(workload, written, at_once=1).save_weights(folder)
        chosen = dict(FASTEST)
        if search:
            chosen = {x: fastest(x, workload, folder, note) for x in FASTEST}
        methods = []
        for kind in KINDS:
            work = workload.mixed() if kind == "mixed" else workload
            method = Method(kind, work, workload.members, folder, chosen.get(kind))
            methods.append(stack.enter_context(contextlib.closing(method)))
        note("losses")
        differences = require_same_losses({x.kind: x.losses(check) for x in methods})
        rounds = list(_take_turns(methods, n_rounds, note))
        peaks = {method.kind: method.peak_mib() for method in methods}
    flops = turn_flops(workload, workload.members)
    products = np.array([rate for _, rate in rounds])
    grid = np.array([seconds["grid"] for seconds, _ in rounds])
    rows = []
    for kind in KINDS:
        own = np.array([seconds[kind] for seconds, _ in rounds])
        gflops = flops / own / 1e9
        rows.append(
            TrainCost(
                kind=kind,
                setting=chosen[kind].text() if kind in chosen else "",
                steps_per_second=n_steps / float(np.median(own)),
                gflops=float(np.median(gflops)),
                peak_share=float(np.median(gflops / products)),
                ratio=float(np.median(own / grid)),
                peak_mib=peaks[kind],
                loss_difference=differences[kind],
                peak_gflops=float(np.median(products)),
            )
        )
    return rows


@click.command()
@click.option("--paper", "is_paper", is_flag=True, help="Paper widths, d=4096.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="Turns of each.",
)
@click.option(
    "--search/--no-search", default=True, help="For PyTorch's fastest setting."
)
@AS_JSON
def train(is_paper: bool, rounds: int, search: bool, as_json: bool) -> None:
    """Time the training grid beside PyTorch and beside its members one at a time.

    All must give the same losses from the same weights before they are timed; the grid
    in mixed precision, which is timed beside them, roughly the same.

    Example: beatrice bench train --paper
    """
    quiet()
    work = paper(1) if is_paper else microworld(8)
    rows = measure(work, n_rounds=rounds, search=search, note=Progress().note)
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    for row in rows:
        printer.row(row)
    printer.not_measured(["GPU, all of them"], HEAD)
    printer.text(
        f"\n{machine()}; fp32 peak {rows[0].peak_gflops:.0f} GFLOP/s (products of 2048 "
        f"x 2048, the median over rounds); {len(work.members)} encoders, "
        f"{work.n_tokens} positions an example, batches of {work.batch_size}."
    )

"""What the training grid is worth beside PyTorch, measured in one go.

Four contestants train the same encoders: (a) the grid as a run trains it, members side
by side; (b) a PyTorch loop; (c) `torch.func.vmap`; (d) the grid's members one at a
time. From the same weights and batches all must give the same losses. Then they take
turns, so that a busy machine slows all of them, and each round measures the fp32 peak
of matrix products beside them.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.forecasts.train_work import Losses, Workload
from benchmarks.speed.train_fleet import Fleet, started
from benchmarks.speed.train_grid import Grid
from benchmarks.speed.train_search import Note, settings

KINDS = ("grid", "loop", "vmap", "alone", "mixed")
# Of losses near 0.7 after a few steps: fp32 sums in another order, and Adam's division
# makes a small difference of a small gradient a difference of a whole step.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2  # the same, with operands of eight bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSize:
    """How much is trained to compare losses.

    Attributes:
      n_examples: of the batch.
      n_microbatches: into which the grid parts it.
      n_steps: taken on it.
      n_seeds: of every subset.
    """

    n_examples: int = 32
    n_microbatches: int = 2
    n_steps: int = 4
    n_seeds: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One contestant.

    Attributes:
      kind: of `KINDS`.
      setting: of PyTorch, in words; empty for JAX.
      steps_per_second: encoder-steps, median over rounds.
      gflops: GFLOP/s, median over rounds.
      peak_share: of the matrix products' rate in the same round, median.
      ratio: the grid's speed over this one's, median over rounds.
      peak_mib: memory above the libraries, data included.
      loss_difference: largest difference of a loss from the grid's.
    """

    kind: str
    setting: str
    steps_per_second: float
    gflops: float
    peak_share: float
    ratio: float
    peak_mib: float
    loss_difference: float


def product_gflops(n: int = 2048, n_threads: int = 2, n_repeats: int = 4) -> float:
    """Return the best rate of a square fp32 matrix product, in GFLOP/s."""
    torch.set_num_threads(n_threads)
    a, b = torch.rand(n, n), torch.rand(n, n)
    out, best = torch.empty(n, n), float("inf")
    for _ in range(n_repeats + 1):  # the first one starts the threads
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best / 1e9


def largest_difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of two contestants' losses.

    Raises:
      ValueError: they have not trained the same members for the same steps.
    """
    if {m: len(x) for m, x in ours.items()} != {m: len(x) for m, x in theirs.items()}:
        raise ValueError(
            f"one contestant has trained {sorted(ours)}, another {sorted(theirs)}, or "
            "for another number of steps; their losses cannot be compared"
        )
    # NumPy's maximum, which a NaN goes through; Python's passes over it.
    every = [np.abs(np.subtract(x, theirs[m])).max() for m, x in ours.items()]
    return float(np.max(every))


def require_same_losses(found: dict[str, Losses]) -> dict[str, float]:
    """Return each contestant's largest difference from the grid.

    Raises:
      ValueError: a loss differs by more than `TOLERANCE`, or does not move.
    """
    grid = found["grid"]
    differences = {k: largest_difference(grid, losses) for k, losses in found.items()}
    for kind, difference in differences.items():
        tolerance = MIXED_TOLERANCE if kind == "mixed" else TOLERANCE
        # Written so that NaN fails.
        if not difference <= tolerance:
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


def check_losses(fleets: Sequence[Fleet], size: CheckSize) -> dict[str, float]:
    """Let all contestants train the same; see `require_same_losses`."""
    found = {}
    for fleet in fleets:
        quiet = fleet.workload.quiet()
        work = dataclasses.replace(quiet, batch_size=size.n_examples, n_steps=1)
        losses = fleet.losses(work, size.n_steps, size.n_microbatches)
        kept = {m: x for m, x in losses.items() if m[1] < size.n_seeds}
        found[fleet.kind] = kept
    return require_same_losses(found)


def measure(
    workload: Workload,
    *,
    n_rounds: int,
    xla_flags: str = "",
    check: CheckSize | None = None,
    search: bool = True,
    note: Note = lambda text: None,
) -> tuple[list[Measured], float]:
    """Check and time the contestants.

    Args:
      workload: what is trained.
      n_rounds: turns of each.
      xla_flags: of the JAX contestants.
      check: how losses are compared.
      search: whether PyTorch's fastest setting is looked for.
      note: told what is going on.

    Returns:
      One row per contestant, in the order of `KINDS`, and the median rate of matrix
      products in GFLOP/s.

    Raises:
      ValueError: the contestants do not compute the same losses, or one has failed.
    """
    check = CheckSize() if check is None else check
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        seeds = range(min(check.n_seeds, workload.n_seeds))
        written = [m for m in workload.members if m[1] in seeds]
        Grid(workload, written, at_once=1).save_weights(folder)
        chosen = settings(workload, folder, note, search=search)
        fleets = [
            stack.enter_context(
                started(
                    kind,
                    workload.mixed() if kind == "mixed" else workload,
                    workload.members,
                    folder,
                    chosen.get(kind),
                    xla_flags=xla_flags,
                )
            )
            for kind in KINDS
        ]
        note("losses")
        differences = check_losses(fleets, check)
        rounds = list(_take_turns(fleets, n_rounds, note))
        peaks = {fleet.kind: fleet.peak_mib() for fleet in fleets}
        flops, n_steps = fleets[0].flops(), workload.n_steps * len(workload.members)
    rows = [
        _measured(
            kind,
            [(seconds[kind], seconds["grid"], peak) for seconds, peak in rounds],
            (n_steps, flops),
            setting=chosen[kind].words(stacked=kind == "vmap")
            if kind in chosen
            else "",
            peak_mib=peaks[kind],
            loss_difference=differences[kind],
        )
        for kind in KINDS
    ]
    return rows, statistics.median(peak for _, peak in rounds)


def _take_turns(
    fleets: Sequence[Fleet], n_rounds: int, note: Note
) -> Iterator[tuple[dict[str, float], float]]:
    """Yield each round's seconds by contestant, and its rate of products in GFLOP/s."""
    for fleet in fleets:
        note(f"{fleet.kind}: compiles")
        fleet.prepare()
    for i in range(n_rounds):
        note(f"round {i + 1} of {n_rounds}")
        peak = product_gflops()
        first = i % len(fleets)  # another one begins in each round
        order = [*fleets[first:], *fleets[:first]]
        yield {fleet.kind: fleet.turn() for fleet in order}, peak


def _measured(
    kind: str,
    rounds: Sequence[tuple[float, float, float]],
    work: tuple[int, int],
    **rest: Any,
) -> Measured:
    """Reduce rounds of (own seconds, the grid's, GFLOP/s of products) to medians."""
    n_steps, flops = work
    seconds = statistics.median(own for own, _, _ in rounds)
    shares = [flops / own / 1e9 / peak for own, _, peak in rounds]
    return Measured(
        kind=kind,
        steps_per_second=n_steps / seconds,
        gflops=flops / seconds / 1e9,
        peak_share=statistics.median(shares),
        ratio=statistics.median(own / grid for own, grid, _ in rounds),
        **rest,
    )

"""`beatrice bench train`: what the training grid is worth beside PyTorch.

From the same weights and batches all methods (`KINDS`) must give the same losses,
PyTorch before it is compiled. Then they take turns, so that a busy machine slows all of
them, and each round measures the fp32 peak of matrix products beside them. Every method
has processes of its own, and waits without a load while another one is timed.

Where JAX and Torch see a GPU all of it is done there: the grid in blocks that its plan
chooses, a PyTorch method in one process; where one of them sees it alone nothing is
measured. Both round the factors of products to TF32, as
JAX does by itself, but not where losses are compared.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
import torch
from safetensors.numpy import load_file

from beatrice.benchmarks.bench.commands import (
    MIB,
    N_THREADS,
    ROUNDS,
    Row,
    RowPrinter,
    fresh_process,
    middle_and_ends,
    preset_of,
    product_rate,
    take_turns,
    widths_of,
)
from beatrice.benchmarks.bench.grid import (
    WIDTHS,
    Grid,
    Losses,
    Workload,
    machine,
    turn_flops,
    weights_file,
)
from beatrice.benchmarks.bench.torch_encoder import Stack, TorchData
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.process import (
    Share,
    begin_peak,
    held_bytes,
    keep_freed_memory,
    n_cores,
    peak_bytes,
)
from beatrice.extract.run.verbs import AS_JSON
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.grid import Member

# Of PyTorch on a CPU, with one thread each; one of two threads is slower.
N_PROCESSES = 2


class TorchTrainer:
    """The loop or the stacked members as a method of `beatrice bench train`."""

    def __init__(
        self, workload: Workload, members: Sequence[Member], folder: Path, kind: str
    ) -> None:
        """Train by "loop" or "stack"; initial weights are read from `folder`."""
        torch.set_num_threads(1)
        keep_freed_memory()  # fresh pages cost a stack a tenth of its time
        importlib.import_module("torch._inductor.config").cpp.threads = 1
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.workload = workload
        self.members = members
        self.folder = folder
        self.kind = kind
        self._n_held = held_bytes()

    def _start(
        self, workload: Workload, members: Sequence[Member], *, is_compiled: bool
    ) -> list[Stack]:
        # Seeds beyond those that were written start like the first: as costly.
        written = self.folder.glob("*.safetensors")
        seeds = {int(path.stem.split("-")[1]) for path in written}
        weights = {
            Member(subset, seed): load_file(
                weights_file(self.folder, Member(subset, seed if seed in seeds else 0))
            )
            for subset, seed in members
        }
        if self.kind == "stack":
            return [Stack(workload, weights, "whole" if is_compiled else None)]
        how = "spans" if is_compiled else None
        return [Stack(workload, {m: x}, how) for m, x in weights.items()]

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch, which is not split here."""
        members = [m for m in self.members if weights_file(self.folder, m).exists()]
        with torch.device(self._device):
            data = TorchData.made_up(workload, workload.batch_size, seed=1)
            stacks = self._start(workload, members, is_compiled=False)
        return train_torch(stacks, data, n_steps, workload.batch_size)

    def prepare(self) -> None:
        """Make the data and weights; compile by a step of every member."""
        work = self.workload
        torch.set_float32_matmul_precision("high")  # on a GPU TF32, as JAX
        with torch.device(self._device):
            self._data = TorchData.made_up(work, work.n_examples, seed=2)
            self._stacks = self._start(work, self.members, is_compiled=True)
        train_torch(self._stacks, self._data, 1, work.batch_size)
        self._has_peak = begin_peak()

    def turn(self) -> None:
        """Train every member for `n_steps` batches."""
        work = self.workload
        train_torch(self._stacks, self._data, work.n_steps, work.batch_size)

    def peak(self) -> int | None:
        """Return peak bytes of a GPU, or of this process above what it held first."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return peak_bytes() - self._n_held if self._has_peak else None


def train_torch(
    stacks: Sequence[Stack], data: TorchData, n_steps: int, batch_size: int
) -> Losses:
    """Train one stack after another for `n_steps` batches, in the order of the data."""
    losses: Losses = {}
    for stack in stacks:
        steps = []
        for step in range(n_steps):
            first = step * batch_size % len(data.labels)
            # Gathered by number, as shuffled rows have to be.
            rows = torch.arange(first, first + batch_size, device=data.labels.device)
            steps.append(stack.step(data, rows))
        of_members = torch.stack(steps, dim=1).tolist()  # waits for a GPU
        losses |= dict(zip(stack.members, of_members, strict=True))
    return losses


KINDS = {
    "grid": "(a) grid",
    "stack": "(b) PyTorch, stacked and compiled; members share batches, a seed noise",
    "loop": "(c) PyTorch, compiled, one after another; nothing shared",
    "mixed": "(d) grid, products in bfloat16",
}
TORCH = ("stack", "loop")
# Of losses near 0.7 after a few steps: fp32 sums in another order, and Adam's division
# makes a small difference of a small gradient a difference of a whole step.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2  # the same, with operands of eight bits
# How losses are compared: of steps on one batch, which the grid splits, and of the
# first seeds of every subset.
_N_EXAMPLES, _N_MICROBATCHES = 32, 2
_N_STEPS = 4
_N_SEEDS = 2
Note = Callable[[str], None]


def split_members(
    workload: Workload, groups: Sequence[Sequence[Member]], n_processes: int
) -> list[list[Member]]:
    """Split groups of members among processes that have about as much to do."""
    cost = functools.partial(turn_flops, workload)
    shares = [Share(rank, n_processes) for rank in range(n_processes)]
    return [list(itertools.chain(*share.mine(groups, cost))) for share in shares]


_trainers: list[Any] = []  # the one of this process, from its first call on


def _call(make: Callable[[], Any], name: str, arguments: Sequence[Any]) -> Any:
    if not _trainers:
        _trainers.append(make())
    return getattr(_trainers[0], name)(*arguments)


class Method:
    """One way to train: its processes, each with its share of the members."""

    def __init__(
        self, kind: str, workload: Workload, members: Sequence[Member], folder: Path
    ) -> None:
        """Start the processes.

        The folder has the initial weights, and what JAX and PyTorch compile.
        """
        self.kind = kind
        self.workload = workload
        is_torch, has_gpu = kind in TORCH, torch.cuda.is_available()
        n_threads = str(n_cores() if has_gpu else N_THREADS)
        environment = {
            "OMP_NUM_THREADS": "1" if is_torch else n_threads,
            "NPROC": n_threads,  # of XLA on a CPU, which would take every core
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        by_subset = [[m for m in members if m[0] == k] for k in {m[0] for m in members}]
        n_processes = N_PROCESSES if is_torch and not has_gpu else 1
        self._trainers = [
            functools.partial(TorchTrainer, workload, share, folder, kind)
            if is_torch
            else functools.partial(Grid, workload, share, N_THREADS)
            for share in split_members(workload, by_subset, n_processes)
        ]
        self._processes = [fresh_process(environment) for _ in self._trainers]

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call every process's trainer, and wait for all of them."""
        pairs = zip(self._processes, self._trainers, strict=True)
        waited = [process.submit(_call, x, name, arguments) for process, x in pairs]
        try:
            return [future.result() for future in waited]
        except Exception as error:
            raise ValueError(
                f"the process that trains by {self.kind!r} has failed: {error}"
            ) from error

    def losses(self) -> Losses:
        """Return losses of steps on one batch, of every member with given weights."""
        work = self.workload.quiet()
        work = dataclasses.replace(work, batch_size=_N_EXAMPLES, n_steps=1)
        parts = self._all("losses", work, _N_STEPS, _N_MICROBATCHES)
        every = {member: x for share in parts for member, x in share.items()}
        return {m: x for m, x in every.items() if m[1] < _N_SEEDS}

    def prepare(self) -> None:
        """Make data and weights, and compile."""
        self._all("prepare")

    def turn(self) -> None:
        """Train every member for the workload's steps."""
        self._all("turn")

    def peak_mib(self) -> float | None:
        """Return peak memory above libraries, or of a GPU's allocator, if known."""
        peaks = self._all("peak")
        return None if None in peaks else sum(peaks) / MIB

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.shutdown(cancel_futures=True)


def largest_difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of two methods' losses."""
    if {m: len(x) for m, x in ours.items()} != {m: len(x) for m, x in theirs.items()}:
        raise ValueError(
            f"one method has trained {sorted(ours)}, another {sorted(theirs)}, or for "
            "another number of steps; their losses cannot be compared"
        )
    # NumPy's maximum, which a NaN goes through; Python's passes over it.
    every = [np.abs(np.subtract(x, theirs[m])).max() for m, x in ours.items()]
    return float(np.max(every))


def require_same_losses(by_method: dict[str, Losses]) -> dict[str, float]:
    """Return each method's largest difference from the grid."""
    grid = by_method["grid"]
    differences = {k: largest_difference(grid, x) for k, x in by_method.items()}
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


def shared_device() -> str:
    """Return on what JAX and PyTorch both compute, "cpu" or "gpu"."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    if jax.default_backend() != device:
        raise ValueError(
            f"PyTorch would train on the {device} and JAX on the "
            f"{jax.default_backend()}: expected both on one, to be compared; install "
            "both for the GPU, or hide it with CUDA_VISIBLE_DEVICES="
        )
    return device


def square_of_peak() -> torch.Tensor:
    """Return the matrix whose products say what a machine does at most."""
    if not torch.cuda.is_available():
        return torch.rand(2048, 2048)
    torch.set_float32_matmul_precision("high")
    return torch.rand(8192, 8192, device="cuda")


def measure(
    workload: Workload, *, n_rounds: int, note: Note = lambda text: None
) -> list[Row]:
    """Check and time the methods; return a row of each.

    Rates, shares and ratios are medians over rounds: encoder-steps; the share of the
    rate of matrix products in the same round; the time over the grid's in a round, with
    its least and largest. Memory is told with the data, see `Method.peak_mib`.
    """
    device = shared_device()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        written = [m for m in workload.members if m[1] < _N_SEEDS]
        Grid(workload, written, at_once=1).save_weights(folder)
        methods = []
        for kind in KINDS:
            work = workload.mixed() if kind == "mixed" else workload
            method = Method(kind, work, workload.members, folder)
            methods.append(stack.enter_context(contextlib.closing(method)))
        # A machine with a GPU has cores enough for compiling all at once.
        n_at_once = len(methods) if torch.cuda.is_available() else 1
        with ThreadPoolExecutor(n_at_once) as pool:
            note("losses")
            losses = pool.map(Method.losses, methods)
            differences = require_same_losses(dict(zip(KINDS, losses, strict=True)))
            note("compiles")
            list(pool.map(Method.prepare, methods))
        torch.set_num_threads(N_THREADS)
        square, products = square_of_peak(), []  # GFLOP/s
        runs = [
            lambda: products.append(product_rate(square) / 1e9),
            *(x.turn for x in methods),
        ]
        note(f"rounds: {n_rounds}")
        _, *seconds = take_turns(runs, n_rounds)[..., 0].T
        peaks = [method.peak_mib() for method in methods]
    speeds = speeds_of(workload, np.array(seconds), np.array(products[1:]))
    return [
        {
            "method": KINDS[kind],
            "device": device,
            **speed,
            "peak MiB": peak,
            "largest loss difference": differences[kind],
            "peak, GFLOP/s": float(np.median(products[1:])),
        }
        for kind, speed, peak in zip(KINDS, speeds, peaks, strict=True)
    ]


def speeds_of(work: Workload, seconds: np.ndarray, products: np.ndarray) -> list[Row]:
    """Return the rates, shares and ratios of methods, see `measure`.

    Args:
      work: that every method does in a turn.
      seconds: `[n_methods, n_rounds]`, the grid first.
      products: `[n_rounds]` GFLOP/s of matrix products.
    """
    gflops = turn_flops(work, work.members) / seconds / 1e9
    n_steps = work.n_steps * len(work.members)
    return [
        {
            "encoder-steps/s": n_steps / float(np.median(turn_seconds)),
            "GFLOP/s": float(np.median(rates)),
            "share of the peak": float(np.median(rates / products)),
            "time over (a)'s": middle_and_ends(turn_seconds / seconds[0]),
        }
        for turn_seconds, rates in zip(seconds, gflops, strict=True)
    ]


@click.command()
@widths_of(WIDTHS)
@click.option("--steps", type=click.IntRange(min=1), default=8, help="In a turn.")
@ROUNDS
@AS_JSON
def train(widths: str, steps: int, rounds: int, as_json: bool) -> None:
    """Time the training grid beside PyTorch.

    All must give the same losses from the same weights before they are timed; the grid
    in mixed precision, which is timed beside them, roughly the same.

    Example: beatrice bench train --widths gemma
    """
    quiet()
    set_compiler(preset_of(widths))  # in the environment of the methods' processes too
    work, where = WIDTHS[widths](steps), machine()  # its load without this one's
    rows = measure(work, n_rounds=rounds, note=Progress().note)
    printer = RowPrinter(as_json)
    for row in rows:
        printer.row(row)
    size = len(square_of_peak())
    if torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()}, {where}"
    else:
        printer.text("\nGPU: not measured")
    printer.text(
        f"\n{where}; medians of {rounds} turns of {steps} steps [least, largest]; "
        f"peak of float32 products of {size} x {size}, the median over rounds; "
        f"{len(work.members)} encoders, {sum(work.widths)} positions an example, "
        f"batches of {work.batch_size}."
    )

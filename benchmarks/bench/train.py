"""`beatrice bench train`: speed of the training grid against PyTorch.

From the same weights and batches, all methods (`KINDS`) must give the same losses;
PyTorch's are compared before compilation. Then methods take turns, so that a busy
machine slows all of them, and each round also measures the fp32 peak of matrix
products. Every method has its own processes, which are idle while another is timed.

If JAX and Torch both see a GPU, everything runs on it: the grid in the blocks of its
plan, each PyTorch method in one process; if only one sees it, nothing is measured. On a
GPU, products are in TF32 (JAX's default), except when losses are compared.
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
    GridTrainer,
    Losses,
    Workload,
    machine,
    turn_flops,
    weights_file,
)
from beatrice.benchmarks.bench.torch_encoder import Stack, TorchData
from beatrice.extract.run.console import Progress, silence_transformers
from beatrice.extract.run.process import (
    Share,
    begin_peak,
    keep_freed_memory,
    n_cores,
    peak_bytes,
    resident_bytes,
)
from beatrice.extract.run.verbs import AS_JSON
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.grid import Member

# PyTorch's on a CPU, with one thread each; one process with two threads is slower.
N_PROCESSES = 2


class TorchTrainer:
    """Trains with PyTorch in `beatrice bench train`, members in a loop or stacked."""

    def __init__(
        self, workload: Workload, members: Sequence[Member], folder: Path, kind: str
    ) -> None:
        """Take a kind, "loop" or "stack"; initial weights are read from `folder`."""
        torch.set_num_threads(1)
        keep_freed_memory()  # new pages would take a tenth of a stack's time
        importlib.import_module("torch._inductor.config").cpp.threads = 1
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.workload = workload
        self.members = members
        self.folder = folder
        self.kind = kind
        self._n_held = resident_bytes()

    def _start(
        self, workload: Workload, members: Sequence[Member], *, is_compiled: bool
    ) -> list[Stack]:
        # Seeds without a file start like the first, which does not change the cost.
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
        """Return the losses of steps on one batch; microbatches are not used here."""
        members = [m for m in self.members if weights_file(self.folder, m).exists()]
        with torch.device(self._device):
            data = TorchData.made_up(workload, workload.batch_size, seed=1)
            stacks = self._start(workload, members, is_compiled=False)
        return train_torch(stacks, data, n_steps, workload.batch_size)

    def prepare(self) -> None:
        """Make data and weights, and compile by taking a step with every member."""
        work = self.workload
        torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as in JAX
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
        """Return peak bytes of a GPU, or of this process above its initial memory."""
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
            # Gathered by index, as shuffled rows would be.
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
# For losses near 0.7 after a few steps: fp32 sums differ in order, and Adam's division
# can turn a small difference of small gradients into a difference of a whole step.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2  # the same for bfloat16, whose significands have eight bits
# Losses are compared after steps on one batch, which the grid splits into microbatches,
# for the first seeds of every subset.
_N_EXAMPLES, _N_MICROBATCHES = 32, 2
_N_STEPS = 4
_N_SEEDS = 2
Note = Callable[[str], None]


def split_members(
    workload: Workload, groups: Sequence[Sequence[Member]], n_processes: int
) -> list[list[Member]]:
    """Split groups of members among processes with about equal work."""
    cost = functools.partial(turn_flops, workload)
    shares = [Share(rank, n_processes) for rank in range(n_processes)]
    return [list(itertools.chain(*share.mine(groups, cost))) for share in shares]


_trainers: list[Any] = []  # this process's trainer, after the first call


def _call(make: Callable[[], Any], name: str, arguments: Sequence[Any]) -> Any:
    if not _trainers:
        _trainers.append(make())
    return getattr(_trainers[0], name)(*arguments)


class Method:
    """A method of training: its processes, each with a share of the members."""

    def __init__(
        self, kind: str, workload: Workload, members: Sequence[Member], folder: Path
    ) -> None:
        """Start the processes.

        The folder holds initial weights, and the compilation caches of JAX and PyTorch.
        """
        self.kind = kind
        self.workload = workload
        is_torch, has_gpu = kind in TORCH, torch.cuda.is_available()
        n_threads = str(n_cores() if has_gpu else N_THREADS)
        environment = {
            "OMP_NUM_THREADS": "1" if is_torch else n_threads,
            "NPROC": n_threads,  # for XLA on a CPU, which would use every core
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        by_subset = [[m for m in members if m[0] == k] for k in {m[0] for m in members}]
        n_processes = N_PROCESSES if is_torch and not has_gpu else 1
        self._trainers = [
            functools.partial(TorchTrainer, workload, share, folder, kind)
            if is_torch
            else functools.partial(GridTrainer, workload, share, N_THREADS)
            for share in split_members(workload, by_subset, n_processes)
        ]
        self._processes = [fresh_process(environment) for _ in self._trainers]

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every process's trainer, and wait for all of them."""
        pairs = zip(self._processes, self._trainers, strict=True)
        waited = [process.submit(_call, x, name, arguments) for process, x in pairs]
        try:
            return [future.result() for future in waited]
        except Exception as error:
            raise ValueError(
                f"a process of the method {self.kind!r} has failed: {error}"
            ) from error

    def losses(self) -> Losses:
        """Return the losses of steps on one batch for members with stored weights."""
        work = self.workload.quiet()
        batch = dataclasses.replace(work.config.train, batch_size=_N_EXAMPLES)
        config = dataclasses.replace(work.config, train=batch)
        work = dataclasses.replace(work, config=config)
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
        """Return the peak memory above libraries, or in a GPU's allocator, if known."""
        peaks = self._all("peak")
        return None if None in peaks else sum(peaks) / MIB

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.shutdown(cancel_futures=True)


def largest_difference(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference between two methods' losses."""
    if {m: len(x) for m, x in ours.items()} != {m: len(x) for m, x in theirs.items()}:
        raise ValueError(
            f"one method trained {sorted(ours)} and another {sorted(theirs)}, or for "
            "another number of steps, so their losses cannot be compared"
        )
    # NumPy's maximum propagates NaN; Python's may not.
    every = [np.abs(np.subtract(x, theirs[m])).max() for m, x in ours.items()]
    return float(np.max(every))


def require_same_losses(by_method: dict[str, Losses]) -> dict[str, float]:
    """Return each method's largest difference from the grid; check that it is small."""
    grid = by_method["grid"]
    differences = {k: largest_difference(grid, x) for k, x in by_method.items()}
    for kind, difference in differences.items():
        tolerance = MIXED_TOLERANCE if kind == "mixed" else TOLERANCE
        if not difference <= tolerance:  # so that NaN fails
            raise ValueError(
                f"losses of {kind!r} differ from the grid's by {difference:.2g} for "
                f"the same weights and batches, more than {tolerance:g}, so times "
                "cannot be compared"
            )
    moved = float(np.min([abs(x[0] - x[-1]) for x in grid.values()]))
    same = [x for kind, x in differences.items() if kind != "mixed"]
    if not moved > 10 * max(TOLERANCE / 10, *same):
        raise ValueError(
            f"a loss changes by only {moved:.2g}, too little to compare methods; raise "
            "_N_STEPS or the workload's learning rate"
        )
    return differences


def shared_device() -> str:
    """Return the device that JAX and PyTorch share, "cpu" or "gpu"."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    if jax.default_backend() != device:
        raise ValueError(
            f"PyTorch would train on the {device} and JAX on the "
            f"{jax.default_backend()}, expected one device for both; install GPU "
            "versions of both, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    return device


def square_of_peak() -> torch.Tensor:
    """Return the matrix whose products measure the machine's peak rate."""
    if not torch.cuda.is_available():
        return torch.rand(2048, 2048)
    torch.set_float32_matmul_precision("high")
    return torch.rand(8192, 8192, device="cuda")


def measure(
    workload: Workload, *, n_rounds: int, note: Note = lambda text: None
) -> list[Row]:
    """Check and time the methods; return a row for each.

    Rates (encoder-steps per second), shares of the peak in the same round, and time
    ratios to the grid (with minimum and maximum) are medians over rounds. Memory
    includes the data, see `Method.peak_mib`.
    """
    device = shared_device()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        written = [m for m in workload.members if m[1] < _N_SEEDS]
        GridTrainer(workload, written, at_once=1).save_weights(folder)
        methods = []
        for kind in KINDS:
            dtype = (
                "bfloat16" if kind == "mixed" else workload.config.encoder.matmul_dtype
            )
            work = workload.with_encoder(matmul_dtype=dtype)
            method = Method(kind, work, workload.members, folder)
            methods.append(stack.enter_context(contextlib.closing(method)))
        # A machine with a GPU has enough cores to compile for all methods at once.
        n_at_once = len(methods) if torch.cuda.is_available() else 1
        with ThreadPoolExecutor(n_at_once) as pool:
            note("comparing losses")
            losses = pool.map(Method.losses, methods)
            differences = require_same_losses(dict(zip(KINDS, losses, strict=True)))
            note("compiling")
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

    `seconds` are `[n_methods, n_rounds]`, the grid first; `products` are the GFLOP/s of
    matrix products, `[n_rounds]`.
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
@click.option("--steps", type=click.IntRange(min=1), default=8, help="Per turn.")
@ROUNDS
@AS_JSON
def train(widths: str, steps: int, rounds: int, as_json: bool) -> None:
    """Time the training grid against PyTorch.

    Before they are timed, all methods must give the same losses from the same weights;
    the grid in mixed precision, which is timed too, must give about the same.

    Example: beatrice bench train --widths gemma
    """
    silence_transformers()
    set_compiler(preset_of(widths))  # the methods' processes inherit it
    work = dataclasses.replace(WIDTHS[widths], n_steps=steps)
    where = machine()  # load before this run
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
        f"\n{where}; medians of {rounds} turns of {steps} steps [minimum, maximum]; "
        f"peak of float32 products of {size} x {size}, median over rounds; "
        f"{len(work.members)} encoders, {sum(work.widths)} positions per example, "
        f"batches of {work.batch_size}."
    )

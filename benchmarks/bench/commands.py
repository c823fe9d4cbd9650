"""`beatrice bench`: what is promised in numbers, measured again by one command.

Here are the group, and what the benchmarks share.
"""

import importlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click

from beatrice.extract.run.console import table_head, table_row
from beatrice.extract.run.directory import Preset
from beatrice.extract.run.process import (
    begin_peak,
    held_bytes,
    peak_bytes,
    trim_freed_memory,
)

# Subcommand -> what its help begins with; the module has its name, or is named below.
BENCHES = {
    "oracle": "Compare every architecture with a brute-force oracle.",
    "survey": "Read every model type of Transformers, or say why not.",
    "written": "Say which model types are read while they write.",
    "answer": "Time answers with their signals beside the answers alone.",
    "score": "Time one score, from the shell and in a warm process.",
    "extract": "Time a full reading beside the bare forward with logits.",
    "train": "Time the training grid beside PyTorch.",
    "select": "Train the heads of one search round beside PyTorch.",
    "plan": "Plan the paper's training for a device that is not here.",
}
# Subcommands whose module has another name.
_ELSEWHERE = {"survey": "oracle", "written": "oracle", "score": "answer"}
N_THREADS = 2  # of Torch on the CPU
ROUNDS = click.option(
    "--rounds", type=click.IntRange(min=1), default=5, help="Runs of each per row."
)
DTYPE = click.option(
    "--model-dtype",
    "dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the model's weights.",
)
MIB = 2**20


def widths_of(choices: Iterable[str]) -> Callable[[Any], Any]:
    """Return the option that names the sizes of what is trained."""
    return click.option(
        "--widths",
        type=click.Choice(list(choices)),
        default="microworld",
        help="Sizes of the encoders and their signals.",
    )


def preset_of(widths: str) -> Preset:
    """Return the preset of runs that have encoders of these widths."""
    return "paper" if widths == "paper" else "demo"


class _Benches(click.Group):
    """Loads a benchmark, and with it Torch or JAX, when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHES:
            return None
        module = _ELSEWHERE.get(cmd_name, cmd_name)
        return getattr(
            importlib.import_module(f"beatrice.benchmarks.bench.{module}"), cmd_name
        )

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(BENCHES.items()))


@click.group(cls=_Benches)
def bench() -> None:
    """Measure what the README claims: exactness, speed and memory.

    Example: beatrice bench oracle
    """


Row = Mapping[str, Any]  # what was measured, by the heads of its columns


def format_cell(value: Any) -> str:
    """Format a number with three digits; of several, the others in brackets."""
    if isinstance(value, tuple):
        first, *others = map(format_cell, value)
        return f"{first} [{', '.join(others)}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


class RowPrinter:
    """Prints rows under headings, or as JSON lines, as soon as they are measured."""

    def __init__(self, as_json: bool) -> None:
        """Print for a person, or for a program."""
        self._as_json = as_json
        self._heads: Sequence[str] | None = None

    def row(self, row: Row) -> None:
        """Print one measurement; other columns than before begin a table."""
        if self._as_json:
            click.echo(json.dumps(row))
            return
        if self._heads != [*row]:
            click.echo(("" if self._heads is None else "\n") + table_head([*row]))
        self._heads = [*row]
        click.echo(table_row(map(format_cell, row.values())))

    def text(self, text: str) -> None:
        """Print what is for people alone."""
        if not self._as_json:
            click.echo(text)


def take_turns(runs: Sequence[Callable[[], object]], n_rounds: int) -> Any:
    """Time some things in turn, so that a busy machine slows all of them.

    Each is called once a round, and once before the first; another one begins in each.

    Returns:
      `[n_rounds, n_runs, 2]` seconds, of the clock and of processors (an array).
    """
    import numpy as np  # help loads none

    seconds = np.zeros((n_rounds + 1, len(runs), 2))
    for number, spent in enumerate(seconds):
        for i in np.roll(range(len(runs)), -number):
            before = time.perf_counter(), time.process_time()
            runs[i]()
            after = time.perf_counter(), time.process_time()
            spent[i] = np.subtract(after, before)
    return seconds[1:]


def middle_and_ends(values: Any) -> tuple[float, float, float]:
    """Return the median of some numbers (an array), the least and the largest."""
    import numpy as np  # help loads none

    return float(np.median(values)), float(values.min()), float(values.max())


def product_rate(square: Any) -> float:
    """Return the best FLOP/s, of five, at which a square matrix is multiplied.

    Of random numbers: equal ones a GPU multiplies faster.
    """
    import torch  # help loads none

    out, best = torch.empty_like(square), math.inf
    for _ in range(1 + 5):  # the first one starts the threads
        began = time.perf_counter()
        torch.mm(square, square, out=out)
        if square.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * len(square) ** 3 / best


def fresh_process(environment: Mapping[str, str] | None = None) -> ProcessPoolExecutor:
    """Return a process of its own, which has loaded no library yet."""
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_set_environment,
        initargs=(dict(environment or {}),),
    )


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def measure_fresh(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns in a process of its own."""
    with fresh_process() as process:
        try:
            return process.submit(function, *arguments).result()
        except Exception as error:
            raise ValueError(
                f"the process that measures {what} has failed: {error}"
            ) from error


def peak_above(run: Callable[[], object], device: str) -> float | None:
    """Return the peak of one run above what is held before it, in MiB.

    On a GPU of the allocator. Else of the process, which should be a fresh one, and
    hands back what it freed before: loading a model leaves hundreds of MiB. None where
    the system cannot let a peak begin.
    """
    if device != "cpu":
        import torch  # help loads none

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        n_before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - n_before) / MIB
    trim_freed_memory()
    if not begin_peak():
        return None
    n_before = held_bytes()
    run()
    return (peak_bytes() - n_before) / MIB

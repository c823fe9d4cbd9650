"""`beatrice bench`: commands that measure again the numbers claimed in the README.

This module has the command group and the helpers that benchmarks share.
"""

import importlib
import json
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
    peak_bytes,
    resident_bytes,
    trim_freed_memory,
)

# Subcommand -> its line in the list of commands.
BENCHES = {
    "oracle": "Compare every architecture with a brute-force oracle.",
    "survey": "Check which model types of Transformers can be read.",
    "written": "List which model types are read while they generate.",
    "answer": "Time answers with signals against plain generation.",
    "score": "Time one score, from the shell and in a warm process.",
    "extract": "Time a full reading against the bare forward with logits.",
    "train": "Time the training grid against PyTorch.",
    "select": "Time one search round's heads against PyTorch.",
    "plan": "Plan the paper's training for a device you do not have.",
}
# Subcommand -> its module, if they differ in name.
_ELSEWHERE = {"survey": "oracle", "written": "oracle", "score": "answer"}
N_THREADS = 2  # Torch threads on the CPU
ROUNDS = click.option(
    "--rounds", type=click.IntRange(min=1), default=5, help="Timed runs of each method."
)
DTYPE = click.option(
    "--model-dtype",
    "dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Data type of the model's weights.",
)
MIB = 2**20


def widths_of(choices: Iterable[str]) -> Callable[[Any], Any]:
    """Return the option `--widths`, with the given choices."""
    return click.option(
        "--widths",
        type=click.Choice(list(choices)),
        default="microworld",
        help="Sizes of the encoders and of their signals.",
    )


def preset_of(widths: str) -> Preset:
    """Return the preset whose runs train encoders of these widths."""
    return "paper" if widths == "paper" else "demo"


class _Benches(click.Group):
    """Imports a benchmark, and with it Torch or JAX, only when it is called."""

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


Row = Mapping[str, Any]  # measured values by column head


def format_cell(value: Any) -> str:
    """Format numbers with three digits, and a tuple as "first [others]"."""
    if isinstance(value, tuple):
        first, *others = map(format_cell, value)
        return f"{first} [{', '.join(others)}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


class RowPrinter:
    """Prints rows as Markdown tables or JSON lines, as soon as they are measured."""

    def __init__(self, as_json: bool) -> None:
        """Print tables, or JSON lines if `as_json`."""
        self._as_json = as_json
        self._heads: Sequence[str] | None = None

    def row(self, row: Row) -> None:
        """Print one row, in a new table if its columns differ from the last row's."""
        if self._as_json:
            click.echo(json.dumps(row))
            return
        if self._heads != [*row]:
            click.echo(("" if self._heads is None else "\n") + table_head([*row]))
        self._heads = [*row]
        click.echo(table_row(map(format_cell, row.values())))

    def text(self, text: str) -> None:
        """Print text, unless rows are printed as JSON."""
        if not self._as_json:
            click.echo(text)


def take_turns(runs: Sequence[Callable[[], object]], n_rounds: int) -> Any:
    """Time functions in turn, so that a busy machine slows all of them alike.

    Each is called once per round, after a warm-up round; the starting one rotates.
    Returns seconds of wall-clock and of CPU time, an array `[n_rounds, n_runs, 2]`.
    """
    import numpy as np  # not loaded for `--help`

    seconds = np.zeros((n_rounds + 1, len(runs), 2))
    for number, spent in enumerate(seconds):
        for i in np.roll(range(len(runs)), -number):
            before = time.perf_counter(), time.process_time()
            runs[i]()
            after = time.perf_counter(), time.process_time()
            spent[i] = np.subtract(after, before)
    return seconds[1:]


def middle_and_ends(values: Any) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum of an array."""
    import numpy as np  # not loaded for `--help`

    return float(np.median(values)), float(values.min()), float(values.max())


def product_rate(square: Any) -> float:
    """Return the best FLOP/s of five products of a square matrix with itself.

    The matrix must be random: a GPU multiplies constant ones faster.
    """
    import torch  # not loaded for `--help`

    out, seconds = torch.empty_like(square), []
    for _ in range(1 + 5):  # the first one starts the threads, and does not count
        began = time.perf_counter()
        torch.mm(square, square, out=out)
        if square.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * len(square) ** 3 / min(seconds[1:])


def fresh_process(environment: Mapping[str, str] | None = None) -> ProcessPoolExecutor:
    """Return a new process that has not loaded any library yet."""
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_set_environment,
        initargs=(dict(environment or {}),),
    )


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


def measure_fresh(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module-level function in a new process, and return its result."""
    with fresh_process() as process:
        try:
            return process.submit(function, *arguments).result()
        except Exception as error:
            raise ValueError(
                f"the process that measures {what} has failed: {error}"
            ) from error


def peak_above(run: Callable[[], object], device: str) -> float | None:
    """Return the peak memory of one run above what is held before it, in MiB.

    On a GPU, this is the allocator's memory; otherwise the process's, which should be a
    fresh one. Freed memory is first returned to the system, since loading a model
    leaves hundreds of MiB. None if the system cannot reset the peak.
    """
    if device != "cpu":
        import torch  # not loaded for `--help`

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        n_before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - n_before) / MIB
    trim_freed_memory()
    if not begin_peak():
        return None
    n_before = resident_bytes()
    run()
    return (peak_bytes() - n_before) / MIB

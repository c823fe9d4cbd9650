"""`beatrice bench train`: the training grid beside PyTorch."""

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from extract.run.console import Progress, quiet, table_head, table_row

if TYPE_CHECKING:
    from benchmarks.forecasts.train_work import Workload
    from benchmarks.speed.train_cost import Measured

NAMES = {
    "grid": "(a) grid, two members side by side",
    "loop": "(b) PyTorch, loop over the encoders",
    "vmap": "(c) PyTorch, torch.func.vmap",
    "alone": "(d) JAX, encoders one at a time",
    "mixed": "(e) grid, products in bfloat16",
}
_HEAD = (
    "contestant",
    "encoder-steps/s",
    "GFLOP/s",
    "share of fp32 peak",
    "(a) is faster by",
    "peak MiB",
    "largest loss difference",
)


def _cells(row: "Measured") -> list[str]:
    return [
        f"{NAMES[row.kind]}{': ' if row.setting else ''}{row.setting}",
        f"{row.steps_per_second:.1f}",
        f"{row.gflops:.1f}",
        f"{row.peak_share:.0%}",
        f"{row.ratio:.2f}",
        f"{row.peak_mib:.0f}",
        f"{row.loss_difference:.1g}",
    ]


def microworld(n_steps: int) -> "Workload":
    """Return the demo's encoders, closed-book, at the microworld's span lengths."""
    from benchmarks.forecasts.train_work import Workload
    from benchmarks.stages.presets import make_config
    from jaxprobe.features.subsets import FamilyDims

    config = make_config("demo")
    return Workload(
        encoder=config.encoder,
        dims=FamilyDims(hidden=160, prob=5, resid=24, attn=120),
        spans=((6, 13), (1, 6)),
        batch_size=config.train.batch_size,
        n_steps=n_steps,
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )


def paper(n_steps: int) -> "Workload":
    """Return the paper's encoders on a Qwen3.5-9B: 32 layers, 8 of full attention."""
    from benchmarks.forecasts.train_work import Workload
    from jaxprobe.features.subsets import FamilyDims
    from jaxprobe.model.encoder import EncoderConfig

    return Workload(
        encoder=EncoderConfig(),
        dims=FamilyDims(hidden=4096, prob=5, resid=4 * 32, attn=2 * 2 * 8 * 16),
        spans=((12, 24), (1, 8)),
        batch_size=512,
        n_steps=n_steps,
    )


@click.command()
@click.option("--paper", "is_paper", is_flag=True, help="Paper widths, d=4096.")
@click.option("--rounds", default=3, help="Turns of each.")
@click.option("--steps", type=int, help="Of each encoder in a turn  [default: 8 or 1]")
@click.option("--seeds", default=3, help="15 encoders each.")
@click.option(
    "--search/--no-search", default=True, help="For PyTorch's fastest setting."
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def train(
    is_paper: bool,
    rounds: int,
    steps: int | None,
    seeds: int,
    search: bool,
    as_json: bool,
) -> None:
    """Time the training grid beside PyTorch and beside its members one at a time.

    All must give the same losses from the same weights before they are timed; the grid
    in mixed precision, which is timed beside them, roughly the same.

    Example: beatrice bench train --paper
    """
    from benchmarks.speed.train_cost import measure
    from benchmarks.stages.presets import WHOLE_OPERATIONS

    if min(rounds, seeds, 1 if steps is None else steps) < 1:
        raise click.UsageError("--rounds, --steps and --seeds must be at least 1")
    quiet()
    work = paper(steps or 1) if is_paper else microworld(steps or 8)
    work = dataclasses.replace(work, n_seeds=seeds)
    progress = Progress()
    rows, peak = measure(
        work,
        n_rounds=rounds,
        xla_flags=WHOLE_OPERATIONS,
        search=search,
        note=progress.note,
    )
    if as_json:
        for row in rows:
            click.echo(json.dumps({**dataclasses.asdict(row), "peak_gflops": peak}))
        return
    click.echo(table_head(_HEAD))
    for row in rows:
        click.echo(table_row(_cells(row)))
    click.echo(table_row(["GPU, all of them", *["not measured"] * (len(_HEAD) - 1)]))
    click.echo(
        f"\n{machine()}; fp32 peak {peak:.0f} GFLOP/s (products of 2048 x 2048, the "
        f"median over rounds); {len(work.members)} encoders, {work.n_tokens} positions "
        f"an example, batches of {work.batch_size}."
    )


def machine() -> str:
    """Return the date, and what kind of machine this is and how busy."""
    import datetime
    import os
    from pathlib import Path

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    name = models[0] if models else "unknown processor"
    return f"{date}, {os.cpu_count()} cores of {name}, load {os.getloadavg()[0]:.1f}"

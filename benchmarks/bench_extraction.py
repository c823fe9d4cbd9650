"""The benchmarks of extraction: are the signals exact, and what do they cost?"""

import dataclasses
import json
from collections.abc import Iterable

import click

from extract.console import Progress, quiet


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def oracle(as_json: bool) -> None:
    """Compare every architecture with a brute-force oracle; print the table.

    Largest absolute errors of tiny random models, fp32 and bf16; behind each bf16
    error, in brackets, how far the model's own eager attention moves that reading.

    Example: beatrice bench oracle
    """
    from benchmarks import exactness

    quiet()
    rows, every = [], list(exactness.architectures())
    with Progress().stage("oracle") as update:
        for done, (name, build) in enumerate(every, start=1):
            rows.append(exactness.measure(name, build))
            update(done, len(every))
    if as_json:
        for row in rows:
            click.echo(json.dumps(dataclasses.asdict(row)))
    else:
        click.echo(exactness.table(rows))
    exactness.require(rows)


_HEAD = (
    "device",
    "dtype",
    "tokens",
    "vocabulary",
    "bare s",
    "reading s",
    "time ratio",
    "bare MiB",
    "reading MiB",
    "memory ratio",
)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


@click.command()
@click.option("--pairs", default=5, show_default=True, help="Runs of each per row.")
@click.option("--threads", default=2, show_default=True, help="Of Torch on the CPU.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the CPU rows; GPU rows are bfloat16.",
)
@click.option(
    "--vocabulary",
    type=int,
    multiple=True,
    default=(32000, 248320),
    show_default=True,
    help="Words of the model; may be given twice.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def extract(
    pairs: int, threads: int, dtype: str, vocabulary: tuple[int, ...], as_json: bool
) -> None:
    """Time a full reading beside the bare forward with logits; print the table.

    Llama-shaped, d=512, 8 layers, fp32 readings, every hidden layer kept. Both take
    turns on the same batch; peak memory is above the loaded model.

    Example: beatrice bench extract --pairs 7
    """
    import torch

    from benchmarks.extract_cost import configs, measure_cost

    quiet()
    torch.set_num_threads(threads)
    has_gpu = torch.cuda.is_available()
    every = configs(dtype, vocabulary, has_gpu=has_gpu)
    if not as_json:
        click.echo(_row(_HEAD))
        click.echo(_row(["---"] * len(_HEAD)))
    with Progress().stage("extract") as update:
        for done, config in enumerate(every, start=1):
            row = measure_cost(config, pairs, threads)
            # At once: a run that is stopped has shown what it measured.
            shown = json.dumps(dataclasses.asdict(row)) if as_json else row.cells()
            click.echo(shown if as_json else _row(shown))
            update(done, len(every))
    if not (has_gpu or as_json):
        click.echo(_row(["GPU", "bfloat16", *["not measured"] * (len(_HEAD) - 2)]))

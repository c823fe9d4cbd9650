"""The benchmarks of extraction: are the signals exact, and what do they cost?"""

import dataclasses
import json

import click

from benchmarks.speed.lines import Lines
from extract.run.console import Progress, quiet


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def oracle(as_json: bool) -> None:
    """Compare every architecture with a brute-force oracle; print the table.

    Largest absolute errors of tiny random models, fp32 and bf16; behind each bf16
    error, in brackets, how far the model's own eager attention moves that reading.

    Example: beatrice bench oracle
    """
    from benchmarks.speed import exactness

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


@click.command()
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=5,
    help="Runs of each per row.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=2,
    help="Of Torch on the CPU.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Of the CPU rows; GPU rows are bfloat16.",
)
@click.option(
    "--vocabulary",
    type=int,
    multiple=True,
    default=(32000, 248320),
    help="Words of the model; may be given twice.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def extract(
    pairs: int, threads: int, dtype: str, vocabulary: tuple[int, ...], as_json: bool
) -> None:
    """Time a full reading beside the bare forward with logits; print the tables.

    Llama-shaped, d=512, 8 layers, fp32 readings, every hidden layer kept. Both take
    turns on the same batch; peak memory is above the loaded model. Then extraction
    into a store beside its own reading, on the same batches; and on a GPU both, and a
    profile, for Qwen3.5-9B and Gemma 4 E4B at full size with random weights.

    Example: beatrice bench extract --pairs 7
    """
    import torch

    from benchmarks.speed.extract_cost import configs, measure_cost
    from benchmarks.speed.full_models import FULL_MODELS
    from benchmarks.speed.gpu_cost import GPU_HEAD, measure_gpu
    from benchmarks.speed.loop_cost import LOOP_HEAD, measure_loops

    quiet()
    torch.set_num_threads(threads)
    has_gpu = torch.cuda.is_available()
    every = configs(dtype, vocabulary, has_gpu=has_gpu)
    full = [model.name for model in FULL_MODELS]
    table = Lines(as_json)
    table.head(_HEAD)
    # Rows at once: a run that is stopped has shown what it measured.
    with Progress().stage("extract") as update:
        for done, config in enumerate(every, start=1):
            table.row(measure_cost(config, pairs, threads))
            update(done, len(every) + 2)
        if not has_gpu:
            table.not_measured(["GPU", "bfloat16"], _HEAD)
        table.head(LOOP_HEAD)
        for done, cost in enumerate(measure_loops(pairs), start=len(every) + 1):
            table.row(cost)
            update(done, len(every) + 2)
    found = [measure_gpu(model, pairs) for model in FULL_MODELS] if has_gpu else []
    for cost in found:
        table.row(cost.loop)
    table.head(GPU_HEAD)
    for cost in found:
        table.row(cost)
    for name in full[len(found) :]:
        table.not_measured([name], GPU_HEAD)
    for cost in found:
        table.text(f"{cost.model}\n{cost.profile}")

"""The verbs that ask the run's backbone: `answer` and `sample`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extract.generate.options import (
    MAX_SAMPLES,
    SERVED_MODEL,
    BackendOptions,
    backend_options,
    open_asking,
    server_options,
)
from extract.run.console import Progress, quiet
from extract.run.share import Share
from extract.run.verbs import (
    RUN_DIR,
    SHARD,
    alone,
    do_or_forecast,
    dry_run_option,
    share_of,
)

if TYPE_CHECKING:
    from extract.generate.generator import Generator
    from extract.generate.requests import TokenizerOnly
    from extract.run.directory import RunDir


@contextlib.contextmanager
def _asking_backbone(
    run_dir: Path, stage: str, backend: BackendOptions, worker: Share, **options: Any
) -> Iterator[tuple["RunDir", "TokenizerOnly", "Generator"]]:
    """Open a run, its tokenizer, and the backend that has its backbone.

    One of several workers holds the run later, beside the others.
    """
    from extract.backbone.names import backbone_of
    from extract.generate.stage import load_tokenizer_only
    from extract.run.directory import RunDir

    if backend.server is not None:
        alone(f"{stage} --server", worker)
    quiet()
    is_alone = worker.world_size == 1
    with RunDir.open(run_dir) if is_alone else RunDir(run_dir) as run:
        model, stop_ids = load_tokenizer_only(run)
        name = backend.served_model or backbone_of(run).path
        known = {"stop_ids": stop_ids, "tokenizer": model.tokenizer}
        with open_asking(run, stage, name, backend, **known, **options) as generator:
            yield run, model, generator


@click.command()
@RUN_DIR
@SERVED_MODEL
@SHARD
@dry_run_option
@server_options
def answer(
    run_dir: Path, shard: str | None, dry_run: bool, backend: BackendOptions
) -> None:
    """Answer every question, closed-book and with context.

    On this machine, or by a vLLM server that holds the run's backbone. On this
    machine under torchrun or srun, or with --shard, every process does its part, and
    the answers are those of one process.

    Example: beatrice answer runs/demo

    Example: torchrun --nproc-per-node 8 -m beatrice answer runs/paper
    """
    from extract.generate import stage
    from extract.generate.requests import answer_config

    worker = share_of(shard, dry_run)
    if backend.server is None:
        if worker.world_size == 1:
            do_or_forecast(run_dir, stage.ANSWER, dry_run)
        else:
            stage.answer_part(run_dir, worker, Progress())
        return
    with _asking_backbone(run_dir, "answer", backend, worker) as opened:
        run, model, generator = opened
        if dry_run:
            config = answer_config(run, is_recorded=False)
            forecast = stage.forecast_answers(run, config, model)
            click.echo(forecast.as_text())
        else:
            stage.answer_by_server(run, generator, model, Progress())


@click.command()
@RUN_DIR
@click.option(
    "--n-samples",
    default=10,
    type=click.IntRange(1, MAX_SAMPLES),
    help="Drawn answers per question, setting and variant.",
)
@click.option(
    "--temperature",
    default=1.0,
    type=click.FloatRange(min=0, min_open=True),
)
@click.option(
    "--top-p",
    default=0.9,
    type=click.FloatRange(0, 1, min_open=True),
)
@click.option(
    "--top-k",
    default=50,
    type=click.IntRange(min=0),
    help="0 keeps all; a server needs vllm.",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    type=click.Choice(["train", "validation", "test", "ood"]),
    default=["validation", "test", "ood"],
    help="May be given several times.",
)
@SERVED_MODEL
@SHARD
@dry_run_option
@backend_options
def sample(
    run_dir: Path,
    n_samples: int,
    temperature: float,
    top_p: float,
    top_k: int,
    splits: tuple[str, ...],
    shard: str | None,
    dry_run: bool,
    backend: BackendOptions,
) -> None:
    """Draw several answers per question, for the sampling baselines.

    On this machine under torchrun, srun or mpirun, or with --shard, every process does
    its part.

    Example: beatrice sample runs/demo --n-samples 10 --split test
    """
    from extract.generate.generator import SamplingConfig
    from extract.generate.replies import share_texts
    from extract.generate.requests import answer_config
    from extract.generate.sampling import DrawConfig
    from extract.generate.stage import draw_run

    def work(run: "RunDir", worker: Share) -> None:
        config = answer_config(run, is_recorded=not dry_run)
        sampling = SamplingConfig(
            max_new_tokens=config.generation.max_new_tokens,
            stop=config.generation.stop,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k or None,
            seed=run.seed,
        )
        path = draw_run(
            run,
            generator,
            model,
            config.prompt,
            DrawConfig(n_samples=n_samples, sampling=sampling),
            splits,
            Progress(),
            as_text=backend.server is not None and backend.dialect == "openai",
            worker=worker,
        )
        click.echo(str(path))

    worker, how = share_of(shard, dry_run), {"dry_run": dry_run, "log_probs": True}
    with _asking_backbone(run_dir, "sample", backend, worker, **how) as opened:
        run, model, generator = opened
        share_texts(run, "sample", worker, work)

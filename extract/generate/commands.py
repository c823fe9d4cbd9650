"""The verbs that ask the run's backbone: `answer` and `sample`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.generate.generator import MAX_SAMPLES
from beatrice.extract.generate.options import (
    SERVED_MODEL,
    BackendOptions,
    backend_options,
    open_asking,
    opened_once,
    server_options,
)
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.verbs import (
    RUN_DIR,
    SHARD,
    alone,
    do_or_forecast,
    dry_run_option,
    share_of,
)

if TYPE_CHECKING:
    from beatrice.extract.generate.generator import Generator
    from beatrice.extract.generate.requests import TokenizerOnly
    from beatrice.extract.run.directory import RunDir


@contextlib.contextmanager
def _open_backbone(
    run: "RunDir", stage: str, backend: BackendOptions, **options: Any
) -> Iterator[tuple["TokenizerOnly", "Generator"]]:
    """Open a run's tokenizer, and the backend that has its backbone."""
    from beatrice.extract.backbone.names import BackboneConfig
    from beatrice.extract.generate.answers import load_tokenizer_only

    quiet()
    model, stop_ids = load_tokenizer_only(run)
    name = backend.served_model or run.section("backbone", BackboneConfig).path
    known = {"stop_ids": stop_ids, "tokenizer": model.tokenizer}
    with open_asking(run, stage, name, backend, **known, **options) as generator:
        yield model, generator


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
    from beatrice.extract.generate import answers
    from beatrice.extract.generate.answers import answer_config
    from beatrice.extract.run.directory import RunDir

    share = share_of(shard, dry_run)
    if backend.server is None:
        # A share's model is the one that joins all of them.
        answering = answers.ANSWER if share.is_whole else answers.answer_stage_kept()
        do_or_forecast(run_dir, answering, dry_run, share=share)
        return
    alone("answer --server", share)
    with (
        RunDir.open(run_dir) as run,
        _open_backbone(run, "answer", backend) as (model, generator),
    ):
        if dry_run:
            config = answer_config(run, is_recorded=False)
            forecast = answers.forecast_answers(run, config, model)
            click.echo(forecast.as_text())
        else:
            answers.answer_with(run, answers.Engine(generator, model), Progress())


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
    from beatrice.extract.generate.answers import (
        DrawConfig,
        answer_config,
        draw_run,
        forecast_draws,
    )
    from beatrice.extract.generate.generator import SamplingConfig
    from beatrice.extract.run.contents import samples_file
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do_share

    share, progress = share_of(shard, dry_run), Progress()
    if backend.server is not None:
        alone("sample --server", share)

    def open_in(run: RunDir) -> Any:
        return _open_backbone(run, "sample", backend, log_probs=True)

    with opened_once(open_in) as opened:

        def work(run: RunDir) -> int | None:
            config = answer_config(run, is_recorded=not dry_run)
            sampling = SamplingConfig(
                max_new_tokens=config.generation.max_new_tokens,
                stop=config.generation.stop,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k or None,
                seed=run.seed,
            )
            model, generator = opened(run)
            draws = DrawConfig(n_samples=n_samples, sampling=sampling)
            drawing = (run, generator, model, config.prompt, draws, splits)
            as_text = backend.server is not None and backend.dialect == "openai"
            if dry_run:
                click.echo(forecast_draws(*drawing, as_text=as_text))
                return None
            return draw_run(*drawing, progress, as_text=as_text)

        do_share(run_dir, "sample", share, work, progress, parts="texts")
    if not dry_run and share.is_whole:
        click.echo(str(samples_file(RunDir(run_dir))))

"""The verb that draws several answers per question."""

from pathlib import Path
from typing import Any

import click

from benchmarks.verbs.backends import backend_options, take_options
from benchmarks.verbs.dryrun import dry_run_option, rehearsing
from benchmarks.verbs.opening import RUN_DIR, alone, config_of, opened
from extract.run.console import Progress, quiet


@click.command()
@RUN_DIR
@click.option(
    "--n-samples",
    default=10,
    show_default=True,
    type=click.IntRange(min=1),
    help="Drawn answers per question, setting and variant.",
)
@click.option(
    "--temperature",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
)
@click.option(
    "--top-p",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
)
@click.option(
    "--top-k",
    default=50,
    show_default=True,
    type=click.IntRange(min=0),
    help="0 keeps all; a server needs vllm.",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    type=click.Choice(["train", "validation", "test", "ood"]),
    default=["validation", "test", "ood"],
    show_default=True,
    help="May be given several times.",
)
@click.option("--served-model", help="What the server calls the run's backbone.")
@dry_run_option
@backend_options
def sample(
    run_dir: Path,
    n_samples: int,
    temperature: float,
    top_p: float,
    top_k: int,
    splits: tuple[str, ...],
    served_model: str | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Draw several answers per question, for the sampling baselines.

    Example: beatrice sample runs/demo --n-samples 10 --split test
    """
    backend = take_options(options, served_model)
    from benchmarks.stages.label_stages import draw_run, load_tokenizer_only
    from extract.generate.generator import SamplingConfig
    from extract.generate.sampling import DrawConfig

    alone("sample")
    config = config_of(run_dir)
    sampling = SamplingConfig(
        max_new_tokens=config.max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k or None,
        seed=config.seed,
    )
    draws = DrawConfig(n_samples=n_samples, sampling=sampling)
    quiet()
    words, stop_ids = load_tokenizer_only(config)
    with (
        opened(run_dir, config) as run,
        rehearsing(
            run,
            "sample",
            served_model or config.model_path,
            backend,
            dry_run=dry_run,
            stop_ids=stop_ids,
            log_probs=True,
            tokenizer=words.tokenizer,
        ) as generator,
    ):
        as_text = backend.server is not None and backend.dialect == "openai"
        path = draw_run(
            run, config, generator, words, draws, splits, Progress(), as_text=as_text
        )
        click.echo(str(path))

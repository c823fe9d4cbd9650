"""The verbs that make a run: from its questions to its report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.verbs.dryrun import dry_run_option, dry_run_stage
from benchmarks.verbs.keepoptions import (
    as_asked,
    keep_as_asked,
    keep_options,
    take_kept,
)
from benchmarks.verbs.modelcommands import answer, label, rewrite
from benchmarks.verbs.opening import RUN_DIR, SEED, do, do_on_request, opened
from benchmarks.verbs.runoptions import ENCODING, MODEL
from benchmarks.verbs.samplecommand import sample
from extract.run.console import Progress, quiet

__all__ = [
    "answer",
    "calibrate",
    "control",
    "demo",
    "evaluate",
    "extract",
    "label",
    "report",
    "rewrite",
    "sample",
    "select",
    "sweep",
    "train",
    "verify",
    "world",
]

if TYPE_CHECKING:
    from benchmarks.stages.presets import RunConfig
    from extract.run.workers import Worker


def _new_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that make a run what it is."""
    for option in (
        click.option(
            "--seed",
            default=0,
            show_default=True,
            type=SEED,
            help="Of training and bootstrap.",
        ),
        *ENCODING,
        MODEL,
        click.option(
            "--preset",
            type=click.Choice(["demo", "smoke"]),
            default="demo",
            show_default=True,
            help="Sizes: demo takes ten minutes on two cores, smoke one.",
        ),
    ):
        command = option(command)
    return keep_options(command)


def _make_config(**options: Any) -> "RunConfig":
    """Return a new run's configuration; a wrong model is found before it is made."""
    from benchmarks.stages.presets import make_config
    from benchmarks.verbs.modelchoice import check_choices
    from extract.store.config import StoreConfig

    config = make_config(kept=StoreConfig(**take_kept(options)), **options)
    check_choices(config)
    return config


@click.command()
@RUN_DIR
@_new_run_options
@click.option("--json", "as_json", is_flag=True, help="Print the headline as JSON.")
def demo(run_dir: Path, as_json: bool, **options: Any) -> None:
    """Do everything, from questions to the report.

    Example: beatrice demo runs/demo
    """
    do(run_dir, config=_make_config(**options))
    from benchmarks.stages.chain import summary

    _show_summary(summary(run_dir), as_json)
    click.echo(str(run_dir / "report.html"), err=as_json)


def _show_summary(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found["headline"]))
    else:
        click.echo(found["text"])


@click.command()
@RUN_DIR
@_new_run_options
@click.option("--train", is_flag=True, help="Also train the model, into RUN_DIR/model.")
@dry_run_option
def world(run_dir: Path, train: bool, dry_run: bool, **options: Any) -> None:
    """Make the microworld: questions and passages (and its model, from nothing).

    Example: beatrice world runs/mine --train
    """
    config = _make_config(**options)
    if dry_run:
        from benchmarks.forecasts.forecast_stages import forecast_world

        click.echo(forecast_world(config).as_text())
        return
    do(run_dir, "world", config=config)
    if train:
        from benchmarks.stages.torch_stages import train_world_model

        progress = Progress()
        with opened(run_dir, config) as run, progress.stage("model") as update:
            click.echo(str(train_world_model(run, config, update, progress)))


def _stage_verb(name: str, text: str) -> click.Command:
    """Return the verb of a stage that takes a run directory and nothing else."""

    @click.command(name=name, help=f"{text}\n\nExample: beatrice {name} runs/demo")
    @RUN_DIR
    @dry_run_option
    def verb(run_dir: Path, dry_run: bool) -> None:
        dry_run_stage(run_dir, name) if dry_run else do(run_dir, name)

    return verb


sweep = _stage_verb("sweep", "Choose the layer of the hidden states on validation.")
train = _stage_verb("train", "Train all fifteen encoders, every seed, both settings.")
calibrate = _stage_verb(
    "calibrate", "Fit the isotonic maps on validation and save the detector."
)
control = _stage_verb(
    "control", "Run PGIR and its plain rivals; choose threshold and budget."
)
report = _stage_verb("report", "Write report.html from the rows.")


@click.command()
@RUN_DIR
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Also rank every set of three encoders; a killed ranking continues.",
)
@dry_run_option
def select(run_dir: Path, exhaustive: bool, dry_run: bool) -> None:
    """Select encoders greedily and train the fusion heads.

    Example: beatrice select runs/demo --exhaustive
    """
    if dry_run:
        dry_run_stage(run_dir, "exhaustive" if exhaustive else "select")
        return
    do_on_request(run_dir, "select", "exhaustive", exhaustive)


@click.command()
@RUN_DIR
@click.option(
    "--ablations",
    is_flag=True,
    help="Also retrain without each token span and select without each signal family.",
)
@dry_run_option
def evaluate(run_dir: Path, ablations: bool, dry_run: bool) -> None:
    """Measure every detector on every set, with intervals.

    Example: beatrice evaluate runs/demo --ablations
    """
    if dry_run:
        dry_run_stage(run_dir, "ablate" if ablations else "evaluate")
        return
    do_on_request(run_dir, "evaluate", "ablate", ablations)


@click.command()
@RUN_DIR
@keep_options
@dry_run_option
def extract(run_dir: Path, dry_run: bool, **options: Any) -> None:
    """Read the four signal families of every answer into the feature store.

    What is kept may be chosen here as long as nothing is extracted; by default it is
    what the run was made with. Under torchrun, SLURM or a Kubernetes indexed job
    every process does its part.

    Example: torchrun --nproc-per-node 2 -m beatrice extract runs/demo
    """
    from extract.run.workers import find_worker

    kept = take_kept(options)
    if "hidden_layers" in kept:
        from benchmarks.verbs.modelchoice import check_choices

        check_choices(as_asked(run_dir, kept))
    if dry_run:
        dry_run_stage(run_dir, "extract", as_asked(run_dir, kept))
        return
    worker = find_worker()
    config = keep_as_asked(run_dir, kept, exclusive=worker.world_size == 1)
    if worker.world_size == 1:
        do(run_dir, "extract", config=config)
    else:
        _extract_part(run_dir, config, worker)


def _extract_part(run_dir: Path, config: "RunConfig", worker: "Worker") -> None:
    """Do one worker's part, and say what is left to the others."""
    from benchmarks.stages.torch_stages import extract_worker
    from extract.run.directory import RunDir

    quiet()
    progress, part = Progress(), (worker.rank, worker.world_size)
    name = f"extract {worker.rank}/{worker.world_size}"
    with RunDir.open(run_dir, config.as_json(), exclusive=False) as run:
        with progress.stage(name) as update:
            n_left = extract_worker(run, config, update, part)
    progress.note(
        f"{name}: {n_left} ranges are left to the other workers (this is worker "
        f"{worker.rank} of {worker.world_size}, as {worker.said_by} says; unset that "
        "to extract alone)"
        if n_left
        else f"{name}: every range is there, of all workers"
    )


@click.command()
@RUN_DIR
def verify(run_dir: Path) -> None:
    """Read every checksum of a run again: stages, stores, weights.

    Example: beatrice verify runs/demo
    """
    from benchmarks.stages.verification import verify_run

    problems = verify_run(run_dir)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.ClickException(f"{len(problems)} problems found in {run_dir}")
    click.echo(f"{run_dir}: every checksum holds")

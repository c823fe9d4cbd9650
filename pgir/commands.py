"""The verbs that act on the score: `control` and `score`."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.run.console import quiet
from extract.run.verbs import RUN_DIR, do_or_forecast, dry_run_option

if TYPE_CHECKING:
    from pgir.controllers.stage import ControlConfig


def with_cap(
    config: "ControlConfig", *, max_generations: float | None
) -> "ControlConfig":
    """Return how the controllers are run, with another cap if one is given."""
    if max_generations is None:
        return config
    return dataclasses.replace(config, max_generations=max_generations)


@click.command()
@RUN_DIR
@click.option(
    "--max-generations",
    type=click.FloatRange(min=1),
    help="Cap on their mean, in choosing threshold and budget.  [default: 4]",
)
@dry_run_option
def control(run_dir: Path, max_generations: float | None, dry_run: bool) -> None:
    """Run PGIR and its plain rivals; choose threshold and budget.

    Example: beatrice control runs/paper --max-generations 4.63
    """
    from pgir.controllers.stage import CONTROL

    change = partial(with_cap, max_generations=max_generations)
    do_or_forecast(run_dir, CONTROL, dry_run, change)


@click.command()
@RUN_DIR
@click.option("--question", required=True, help="As the model was asked.")
@click.option("--answer", required=True, help="The answer to be judged.")
@click.option(
    "--context", multiple=True, help="A passage the model was shown; repeatable."
)
@click.option("--model", default=None, help="Where the backbone lies, if moved.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def score(
    run_dir: Path,
    question: str,
    answer: str,
    context: tuple[str, ...],
    model: str | None,
    as_json: bool,
) -> None:
    """Score an answer that exists: one forward pass, P(correct) back.

    Example: beatrice score runs/demo --question "who wrote X?" --answer "Y"
    """
    quiet()
    from extract.run.directory import RunDir
    from extract.run.manifest import read_manifest

    read_manifest(run_dir)  # what is no run, or not finished, is refused at once
    RunDir(run_dir).finished_detector()
    from pgir.scorer import Scorer

    found = Scorer.load(run_dir, model=model).score(question, answer, context or None)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(f"{found.p_correct:.3f}")

"""The verbs that act on the score: `control` and `score`."""

import json
from pathlib import Path

import click

from extract.run.console import quiet
from extract.run.verbs import RUN_DIR, stage_verb

control = stage_verb(
    "control",
    "pgir.controllers.stage:CONTROL",
    "Run PGIR and its plain rivals; choose threshold and budget.",
)


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

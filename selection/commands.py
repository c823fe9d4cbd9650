"""The verbs `sweep`, `select` and `anatomy`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.run.directory import RunDir
from extract.run.verbs import (
    RUN_DIR,
    RunPath,
    do_or_forecast,
    dry_run_option,
    stage_verb,
)

if TYPE_CHECKING:
    from selection.anatomy.stage import AnatomyConfig

sweep = stage_verb(
    "sweep",
    "selection.sweep:SWEEP",
    "Choose the layer of the hidden states on validation.",
)


@click.command()
@RUN_DIR
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Also rank every set of three encoders; a killed ranking continues.",
)
@click.option(
    "--optimism",
    is_flag=True,
    help="Also search on twenty other splits: how much too good validation looks.",
)
@dry_run_option
def select(run_dir: Path, exhaustive: bool, optimism: bool, dry_run: bool) -> None:
    """Select encoders greedily and train the fusion heads.

    Example: beatrice select runs/demo --exhaustive
    """
    from selection.stage import SELECT

    if not ((exhaustive or optimism) and dry_run):
        do_or_forecast(run_dir, SELECT, dry_run)
    if optimism:
        from selection.optimism import OPTIMISM

        do_or_forecast(run_dir, OPTIMISM, dry_run)
    if exhaustive:
        from selection.ranking import EXHAUSTIVE

        do_or_forecast(run_dir, EXHAUSTIVE, dry_run)


@click.command()
@RUN_DIR
@click.argument("other", type=RunPath(), required=False)
@click.option("--only", multiple=True, metavar="NAME", help="These; all by default.")
@dry_run_option
def anatomy(
    run_dir: Path, other: Path | None, only: tuple[str, ...], dry_run: bool
) -> None:
    """Ask where correctness can be read; OTHER is a run of another backbone.

    Example: beatrice anatomy runs/gemma runs/smollm2 --only flips --only backbones
    """
    from extract.run.stages import do, forecast_stage
    from selection.anatomy.stage import ANATOMY, chosen_analyses

    def change(config: "AnatomyConfig") -> "AnatomyConfig":
        beside = config.other if other is None else str(other.resolve())
        asked = dataclasses.replace(config, only=only, other=beside)
        chosen_analyses(asked)  # refuses a name that is not known
        return asked

    if dry_run:
        click.echo(forecast_stage(run_dir, ANATOMY, change, is_replaceable=True))
        return
    with RunDir.open(run_dir) as run:
        before = ANATOMY.settle(run)
        if ANATOMY.settle(run, change, is_replaceable=True) != before:
            run.reopen_stage(ANATOMY.name)
    do(run_dir, ANATOMY)

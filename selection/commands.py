"""The verbs `sweep` and `select`."""

from pathlib import Path

import click

from extract.run.verbs import RUN_DIR, do_or_forecast, dry_run_option, stage_verb

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

"""The verbs `evaluate`, `report` and `compare`."""

from pathlib import Path

import click

from extract.run.console import Progress, RunPath
from extract.run.verbs import RUN_DIR, do_or_forecast, dry_run_option, load_stage


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
    from benchmarks.results.evaluate import EVALUATE

    if not (ablations and dry_run):
        do_or_forecast(run_dir, EVALUATE, dry_run)
    if ablations:
        from selection.ablation import ABLATE

        do_or_forecast(run_dir, ABLATE, dry_run)
    if not dry_run and (run_dir / "report.html").exists():
        Progress().note(f"report: `beatrice report {run_dir}` shows the rows of now")


@click.command()
@RUN_DIR
@click.option(
    "--ledger",
    is_flag=True,
    help="Also print the paper's tables with this run's numbers and what differs.",
)
@dry_run_option
def report(run_dir: Path, ledger: bool, dry_run: bool) -> None:
    """Write report.html from the rows.

    Example: beatrice report runs/demo --ledger
    """
    do_or_forecast(run_dir, load_stage("benchmarks.results.stage:REPORT"), dry_run)
    if ledger and not dry_run:
        from benchmarks.results.ledger import ledger as ledger_of

        click.echo(ledger_of(run_dir))


@click.command()
@click.argument("run_a", type=RunPath())
@click.argument("run_b", type=RunPath())
@click.option("--out", type=click.Path(path_type=Path), help="Write it there too.")
def compare(run_a: Path, run_b: Path, out: Path | None) -> None:
    """Lay two runs side by side: rankings, headline rows, answers.

    Example: beatrice compare runs/gemma runs/smollm2 --out comparison.md
    """
    from benchmarks.results.compare import comparison
    from extract.run.files import write_text_atomic

    text = comparison(run_a, run_b)
    if out is not None:
        write_text_atomic(out, text)
    click.echo(text)

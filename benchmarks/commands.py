"""The verbs `evaluate`, `baselines`, `report` and `compare`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.verbs import (
    RUN_DIR,
    RunPath,
)

if TYPE_CHECKING:
    from beatrice.benchmarks.baselines.judge import BaselinesConfig


@click.command()
@RUN_DIR
@click.option(
    "--ablations",
    is_flag=True,
    help="Also retrain without each token span and select without each signal family.",
)
def evaluate(run_dir: Path, ablations: bool) -> None:
    """Measure every detector on every set, with intervals.

    Example: beatrice evaluate runs/demo --ablations
    """
    from beatrice.benchmarks.results.evaluate import EVALUATE
    from beatrice.extract.run.stages import do

    do(run_dir, EVALUATE)
    if ablations:
        from beatrice.selection.ablation import ABLATE

        do(run_dir, ABLATE)
    if (run_dir / "report.html").exists():
        Progress().note(f"report: `beatrice report {run_dir}` shows the rows of now")


@click.command()
@click.argument("run_dir", type=RunPath(), required=False)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="These, yours by MODULE:NAME; by default those that need the run's signals "
    "and texts alone.",
)
@click.option(
    "--again",
    is_flag=True,
    help="Also those that read the answers again, or something else beside them.",
)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Every one: --again, and answers are drawn if there are none.",
)
@click.option(
    "--nli",
    type=click.Path(exists=True, file_okay=False),
    help="Directory of an NLI model, for those that ask what follows from what.",
)
@click.option(
    "--encoder",
    type=click.Path(exists=True, file_okay=False),
    help="Directory of a text encoder, for the one that is fine-tuned.",
)
@click.option("--list", "is_list", is_flag=True, help="Say which there are, and stop.")
@click.option(
    "--check",
    metavar="MODULE:NAME",
    help="Say what a detector of your own does wrong on the run's answers, and stop.",
)
def baselines(
    run_dir: Path | None,
    only: tuple[str, ...],
    again: bool,
    is_all: bool,
    nli: str | None,
    encoder: str | None,
    is_list: bool,
    check: str | None,
) -> None:
    """Judge published detectors on the run's answers, with intervals and costs.

    Example: beatrice baselines runs/demo --only saplma_last --only p_true
    """
    if is_list:
        from beatrice.benchmarks.baselines.detector import catalogue, format_list

        click.echo(format_list(catalogue().values()))
        return
    if run_dir is None:
        raise click.UsageError("missing argument 'RUN_DIR'; or give --list")
    if check is not None:
        from beatrice.benchmarks.baselines.judge import BaselinesConfig, run_violations

        with RunDir.open(run_dir) as run:
            faults = run_violations(
                run, check, BaselinesConfig(nli=nli, encoder=encoder)
            )
        click.echo("\n".join(faults) or f"{check}: nothing wrong was found")
        if faults:
            raise click.exceptions.Exit(1)
        return
    from beatrice.benchmarks.baselines.judge import BASELINES, chosen_detectors
    from beatrice.extract.run.stages import do

    def change(config: "BaselinesConfig") -> "BaselinesConfig":
        is_more = again or is_all
        asked = dataclasses.replace(
            config,
            only=only or (() if is_more else config.only),
            again=is_more or config.again,
            nli=str(Path(nli).resolve()) if nli else config.nli,
            encoder=str(Path(encoder).resolve()) if encoder else config.encoder,
        )
        chosen_detectors(asked)  # refuses a name that is not known
        return asked

    if is_all and not (run_dir / "samples").exists():
        _draw(run_dir)
    with RunDir.open(run_dir) as run:
        before = BASELINES.settle(run)
        if BASELINES.settle(run, change, is_replaceable=True) != before:
            run.reopen_stage(BASELINES.name)
    do(run_dir, BASELINES)


def _draw(run_dir: Path) -> None:
    """Draw answers of all splits; probes of semantic entropy learn from some."""
    from beatrice.extract.generate.commands import sample

    splits = [x for s in ("train", "validation", "test", "ood") for x in ("--split", s)]
    sample.main([str(run_dir), *splits], standalone_mode=False)


@click.command()
@RUN_DIR
@click.option(
    "--ledger",
    is_flag=True,
    help="Also print the paper's tables with this run's numbers and what differs.",
)
def report(run_dir: Path, ledger: bool) -> None:
    """Write report.html from the rows.

    Example: beatrice report runs/demo --ledger
    """
    from beatrice.benchmarks.results.stage import REPORT
    from beatrice.extract.run.stages import do

    do(run_dir, REPORT)
    if ledger:
        from beatrice.benchmarks.paper.ledger import ledger as ledger_of
        from beatrice.benchmarks.results.stage import run_experiment

        click.echo(ledger_of(run_experiment(RunDir(run_dir))))


@click.command()
@click.argument("run_a", type=RunPath())
@click.argument("run_b", type=RunPath())
@click.option("--out", type=click.Path(path_type=Path), help="Write it there too.")
def compare(run_a: Path, run_b: Path, out: Path | None) -> None:
    """Lay two runs side by side: rankings, headline rows, answers.

    Example: beatrice compare runs/gemma runs/smollm2 --out comparison.md
    """
    from beatrice.benchmarks.results.compare import comparison
    from beatrice.benchmarks.results.stage import run_side
    from beatrice.extract.run.files import write_text_atomic

    text = comparison(run_side(RunDir(run_a)), run_side(RunDir(run_b)))
    if out is not None:
        write_text_atomic(out, text)
    click.echo(text)

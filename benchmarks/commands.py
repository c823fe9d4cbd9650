"""The verbs `evaluate`, `baselines` and `report`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.verbs import (
    FOLDER,
    RUN_DIR,
    RunPath,
    do_again_if_changed,
    option,
    options,
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


_AGAIN, _ALL = "again", "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesOptions:
    """Which published detectors are judged, and what they need beside the run."""

    only: tuple[str, ...] = option(
        "These, yours by MODULE:NAME; by default those that need the run's signals and "
        "texts alone; again: also those that read the answers again, or something else "
        "beside them; all: every one, and answers are drawn if there are none.",
        (),
        metavar="NAME",
    )
    nli: Path | None = option(
        "Directory of an NLI model, for those that ask what follows from what.",
        type=FOLDER,
    )
    encoder: Path | None = option(
        "Directory of a text encoder, for the one that is fine-tuned.", type=FOLDER
    )
    list: bool = option("Say which there are, and stop.", False)
    check: str | None = option(
        "Say what a detector of your own does wrong on the run's answers, and stop.",
        metavar="MODULE:NAME",
    )

    def change(self, config: "BaselinesConfig") -> "BaselinesConfig":
        """Return what is judged: what a run had, and what is named here."""
        from beatrice.benchmarks.baselines.judge import chosen_detectors

        is_more = bool({_AGAIN, _ALL} & {*self.only})
        names = tuple(name for name in self.only if name not in (_AGAIN, _ALL))
        changed = dataclasses.replace(
            config,
            only=names or (() if is_more else config.only),
            again=is_more or config.again,
            nli=str(self.nli.resolve()) if self.nli else config.nli,
            encoder=str(self.encoder.resolve()) if self.encoder else config.encoder,
        )
        chosen_detectors(changed)  # an unknown name is wrong usage
        return changed


@click.command()
@click.argument("run_dir", type=RunPath(), required=False)
@options(how=BaselinesOptions)
def baselines(run_dir: Path | None, how: BaselinesOptions) -> None:
    """Judge published detectors on the run's answers, with intervals and costs.

    Example: beatrice baselines runs/demo --only saplma_last --only p_true
    """
    if how.list:
        from beatrice.benchmarks.baselines.detector import catalogue, format_list

        click.echo(format_list(catalogue().values()))
        return
    if run_dir is None:
        raise click.UsageError("missing argument 'RUN_DIR'; or give --list")
    from beatrice.benchmarks.baselines.judge import BASELINES

    if how.check is not None:
        _check(run_dir, how.check, how)
        return
    if _ALL in how.only and not (run_dir / "samples").exists():
        _draw(run_dir)
    do_again_if_changed(run_dir, BASELINES, how.change)


def _check(run_dir: Path, name: str, how: BaselinesOptions) -> None:
    """Print what a person's detector does wrong; exit code 1 if anything."""
    from beatrice.benchmarks.baselines.judge import BaselinesConfig, run_violations

    with RunDir.open(run_dir) as run:
        violations = run_violations(run, name, how.change(BaselinesConfig()))
    click.echo("\n".join(violations) or f"{name}: nothing wrong was found")
    if violations:
        raise click.exceptions.Exit(1)


def _draw(run_dir: Path) -> None:
    """Draw answers of all splits; probes of semantic entropy learn from some."""
    from beatrice.extract.generate.commands import sample

    splits = [x for s in ("train", "validation", "test", "ood") for x in ("--split", s)]
    sample.main([str(run_dir), *splits], standalone_mode=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is printed beside the report."""

    ledger: bool = option(
        "Also print the paper's tables with this run's numbers and what differs.", False
    )
    print: str | None = option(
        "Print a table: detectors, closed-book, with-context, decisions, gains, "
        "ablations, controllers, controller-gains, or all.",
        metavar="TABLE",
    )
    out: Path | None = option(
        "With RUN_B: write the comparison there too.", metavar="FILE"
    )


@click.command()
@RUN_DIR
@click.argument("run_b", type=RunPath(), required=False)
@options(how=ReportOptions)
def report(run_dir: Path, run_b: Path | None, how: ReportOptions) -> None:
    """Write report.html from the rows; or lay two runs side by side, with RUN_B.

    Side by side are rankings, headline rows and answers; nothing of the runs changes.

    Example: beatrice report runs/demo --print detectors

    Of a file of rows, such as docs/results/demo.jsonl, the tables are printed.

    Example: beatrice report runs/gemma runs/smollm2 --out comparison.md
    """
    from beatrice.benchmarks.results.report import (
        REPORT,
        rows_as_markdown,
        run_ledger,
        run_table,
    )
    from beatrice.extract.run.rows import read_rows
    from beatrice.extract.run.stages import do

    if run_dir.is_file():
        click.echo(rows_as_markdown(list(read_rows(run_dir))), nl=False)
        return

    if run_b is not None:
        if how.ledger or how.print:
            raise click.UsageError("--ledger and --print are of one run")
        _compare(run_dir, run_b, how.out)
        return
    if how.out is not None:
        raise click.UsageError("--out is for a comparison; give RUN_B too")
    do(run_dir, REPORT)
    if how.print:
        click.echo(run_table(RunDir(run_dir), how.print))
    elif not how.ledger:
        click.echo(run_dir / "report.html")
    if how.ledger:
        click.echo(run_ledger(RunDir(run_dir)))


def _compare(run_a: Path, run_b: Path, out: Path | None) -> None:
    from beatrice.benchmarks.results.report import comparison, run_side
    from beatrice.extract.run.files import write_text_atomic

    text = comparison(run_side(RunDir(run_a)), run_side(RunDir(run_b)))
    if out is not None:
        write_text_atomic(out, text)
    click.echo(text)

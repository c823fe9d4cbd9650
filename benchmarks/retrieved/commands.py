"""The verb `transfer`: detectors as they are, on answers from retrieved passages."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from beatrice.extract.run.verbs import RUN_DIR
from beatrice.pgir.commands import retrieval_options, settle_options

if TYPE_CHECKING:
    from beatrice.benchmarks.retrieved.questions import TransferConfig


def _named_file(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return (name, path) of each NAME=FILE."""
    found = []
    for value in values:
        name, sign, file = value.partition("=")
        if not (sign and name and Path(file).is_file()):
            raise click.BadParameter(f"expected NAME=FILE with a file, found {value!r}")
        found.append((name, str(Path(file).resolve())))
    return tuple(found)


@click.command()
@RUN_DIR
@retrieval_options
@click.option("--limit", type=click.IntRange(1), help="Of each set.  [default: 500]")
@click.option(
    "-k", "n_passages", type=click.IntRange(1), help="Passages.  [default: 3]"
)
@click.option(
    "--questions",
    multiple=True,
    metavar="NAME=FILE",
    callback=_named_file,
    help="A set that the run does not have; repeatable.",
)
def transfer(
    run_dir: Path,
    limit: int | None,
    n_passages: int | None,
    questions: tuple[tuple[str, str], ...],
    **retrieval: Any,
) -> None:
    """Measure a run's detectors, as they are, on answers from retrieved passages.

    The test and held-out questions are answered with passages that a retriever finds,
    labelled and read; every detector keeps what it learned from gold contexts. What
    is answered lies in RUN_DIR/retrieved, a run of its own, where `beatrice label
    --judge` may judge it before the same line is typed again.

    Example: beatrice transfer runs/gemma --corpus corpora/six --retriever fused
    --retriever-encoder all-MiniLM-L6-v2
    """
    from beatrice.benchmarks.retrieved.questions import TRANSFER_PRESETS
    from beatrice.benchmarks.retrieved.stage import NAME, transfer_run
    from beatrice.extract.run.console import Progress
    from beatrice.extract.run.directory import RunDir

    given = {"limit": limit, "n_passages": n_passages, "questions": questions or None}
    chosen = {name: value for name, value in given.items() if value is not None}

    def change(config: "TransferConfig") -> "TransferConfig":
        return dataclasses.replace(config, **chosen)

    settle_options(run_dir, retrieval)
    with RunDir.open(run_dir) as run:
        config = run.settle(NAME, TRANSFER_PRESETS, change, is_replaceable=True)
        transfer_run(run, config, Progress())

"""`beatrice bench mixed`: what mixed precision costs in AUROC."""

from pathlib import Path

import click

from benchmarks.speed.lines import Lines
from benchmarks.verbs.opening import RUN_DIR, config_of, set_compiler
from extract.run.console import Progress, quiet

_HEAD = (
    "setting",
    "encoder",
    "AUROC test, fp32",
    "mixed",
    "difference [95 %]",
    "std of fp32 over seeds",
)


@click.command()
@RUN_DIR
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def mixed(run_dir: Path, as_json: bool) -> None:
    """Train a run's encoders once more, in mixed precision.

    RUN_DIR is a finished run; it is only read.

    Example: beatrice bench mixed runs/demo
    """
    config = config_of(run_dir)
    set_compiler(config.xla_flags)
    from benchmarks.speed.mixed_cost import measure
    from extract.run.directory import RunDir

    quiet()
    lines = Lines(as_json)
    lines.head(_HEAD)
    with Progress().stage("mixed precision") as update:
        for row in measure(RunDir(run_dir), config, update):
            lines.row(row)

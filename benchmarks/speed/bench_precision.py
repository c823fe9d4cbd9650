"""`beatrice bench precision`: what 8 bits, or the answer span alone, cost in AUROC."""

from pathlib import Path

import click

from benchmarks.speed.lines import Lines
from benchmarks.verbs.opening import RUN_DIR, config_of, set_compiler
from extract.run.console import Progress, quiet

_HEAD = (
    "setting",
    "encoder",
    "hidden",
    "spans",
    "others",
    "bytes per answer",
    "AUROC validation",
    "AUROC test",
    "test, against fp32 [95 %]",
    "std over seeds",
)


@click.command()
@RUN_DIR
@click.option(
    "--encoders",
    default="H",
    help="Families that are read together, such as H,HPRA.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON lines.")
def precision(run_dir: Path, encoders: str, as_json: bool) -> None:
    """Train encoders on the hidden states as each --dtype would store them.

    RUN_DIR is a finished run; it is only read. Its answers are read again in fp32.

    Example: beatrice bench precision runs/demo --encoders H,HPRA
    """
    config = config_of(run_dir)
    set_compiler(config.xla_flags)
    from benchmarks.speed.precision_cost import measure
    from extract.run.directory import RunDir
    from jaxprobe.features.subsets import subset_index

    names = [name.strip() for name in encoders.split(",")]
    for name in names:
        try:
            subset_index(name)  # a wrong one is found before anything runs
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--encoders") from None
    quiet()
    lines = Lines(as_json)
    lines.head(_HEAD)
    with Progress().stage("precision") as update:
        for row in measure(RunDir(run_dir), config, names, update):
            lines.row(row)

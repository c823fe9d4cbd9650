"""The verbs `sweep`, `select` and `anatomy`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.verbs import RUN_DIR, RunPath
from beatrice.jaxprobe.commands import HEAD_SIZES, size_options, with_sizes

if TYPE_CHECKING:
    from beatrice.extract.run.directory import Preset
    from beatrice.jaxprobe.config import SelectConfig
    from beatrice.selection.anatomy.stage import AnatomyConfig


@click.command()
@RUN_DIR
def sweep(run_dir: Path) -> None:
    """Choose the layer of the hidden states on validation.

    Example: beatrice sweep runs/demo
    """
    from beatrice.extract.run.stages import do
    from beatrice.selection.sweep import SWEEP

    do(run_dir, SWEEP)


@click.command()
@RUN_DIR
@size_options("epochs", "learning-rate", "width", sizes=HEAD_SIZES)
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
def select(
    run_dir: Path,
    exhaustive: bool,
    optimism: bool,
    preset: "Preset | None",
    **sizes: float | None,
) -> None:
    """Select encoders greedily and train the fusion heads.

    There is a head for every seed of the encoders. Sizes stay with the run, and may be
    others until heads have been trained with them.

    Example: beatrice select runs/demo --exhaustive
    """
    from beatrice.extract.run.stages import do
    from beatrice.jaxprobe.config import SELECT_PRESETS
    from beatrice.selection.stage import SELECT

    def change(config: "SelectConfig") -> "SelectConfig":
        return with_sizes(config, SELECT_PRESETS, preset, sizes)

    do(run_dir, SELECT, change=change)
    if optimism:
        from beatrice.selection.stage import OPTIMISM

        do(run_dir, OPTIMISM)
    if exhaustive:
        from beatrice.selection.exhaustive import EXHAUSTIVE

        do(run_dir, EXHAUSTIVE)


@click.command()
@RUN_DIR
@click.argument("other", type=RunPath(), required=False)
@click.option("--only", multiple=True, metavar="NAME", help="These; all by default.")
def anatomy(run_dir: Path, other: Path | None, only: tuple[str, ...]) -> None:
    """Ask where correctness can be read; OTHER is a run of another backbone.

    Example: beatrice anatomy runs/gemma runs/smollm2 --only flips --only backbones
    """
    from beatrice.extract.run.stages import do
    from beatrice.selection.anatomy.stage import ANATOMY, chosen_analyses

    def change(config: "AnatomyConfig") -> "AnatomyConfig":
        beside = config.other if other is None else str(other.resolve())
        asked = dataclasses.replace(config, only=only, other=beside)
        chosen_analyses(asked)  # refuses a name that is not known
        return asked

    with RunDir.open(run_dir) as run:
        before = ANATOMY.settle(run)
        if ANATOMY.settle(run, change, is_replaceable=True) != before:
            run.reopen_stage(ANATOMY.name)
    do(run_dir, ANATOMY)

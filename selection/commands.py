"""The verbs `sweep`, `select` and `anatomy`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from beatrice.extract.run.directory import read_manifest
from beatrice.extract.run.verbs import (
    RUN_DIR,
    RunPath,
    checking,
    do_again_if_changed,
    option,
    options,
)
from beatrice.jaxprobe.commands import HeadSizeOptions
from beatrice.jaxprobe.config import SELECT_PRESETS, SelectConfig

if TYPE_CHECKING:
    from beatrice.selection.anatomy import AnatomyConfig


@click.command()
@RUN_DIR
def sweep(run_dir: Path) -> None:
    """Choose the layer to read hidden states from, on validation answers.

    Example: beatrice sweep runs/demo
    """
    from beatrice.extract.run.stages import open_and_do
    from beatrice.selection.stages import SWEEP

    open_and_do(run_dir, SWEEP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedOptions(HeadSizeOptions):
    """Fusion heads other than the run's own."""

    fusion: Literal["mean"] | None = option(
        "mean: search and fuse by the mean logit, without training; undo with --epochs",
        rare=True,
    )

    def change(self, config: SelectConfig) -> SelectConfig:
        """Apply the options to the run's selection config."""
        if self.fusion and self.epochs:
            raise click.UsageError("fusion=mean trains nothing: leave out --epochs")
        sizes = dataclasses.replace(self, fusion=None).sizes()
        start = SELECT_PRESETS[self.preset] if self.preset else config
        return start.resized(**sizes | ({"epochs": 0} if self.fusion else {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Searches to run in addition to the greedy one."""

    exhaustive: bool = option(
        "Also rank every set of three encoders; a killed ranking resumes.", False
    )
    optimism: bool = option(
        "Also search on twenty other splits, to measure validation's optimism.", False
    )


@click.command()
@RUN_DIR
@options(sizes=FusedOptions, also=SearchOptions)
def select(run_dir: Path, sizes: FusedOptions, also: SearchOptions) -> None:
    """Select encoders greedily and train the fusion heads.

    One head is trained for every seed of the encoders. Sizes are stored in the run, and
    can be changed until heads have been trained with them.

    Example: beatrice select runs/demo --exhaustive

    Example: beatrice select runs/demo --set fusion=mean
    """
    from beatrice.extract.run.stages import open_and_do
    from beatrice.selection.stages import SELECT

    open_and_do(run_dir, SELECT, change=sizes.change)
    if also.optimism:
        from beatrice.selection.greedy import OPTIMISM

        open_and_do(run_dir, OPTIMISM)
    if also.exhaustive:
        from beatrice.selection.exhaustive import EXHAUSTIVE

        open_and_do(run_dir, EXHAUSTIVE)


@click.command()
@RUN_DIR
@click.argument("other", type=RunPath(), required=False)
@click.option("--only", multiple=True, metavar="NAME", help="Only these; default: all.")
def anatomy(run_dir: Path, other: Path | None, only: tuple[str, ...]) -> None:
    """Analyse where correctness can be read; OTHER is a run of another backbone.

    Example: beatrice anatomy runs/gemma runs/smollm2 --only flips --only backbones
    """
    from beatrice.selection.anatomy import ANATOMY, chosen_analyses

    if other is not None:
        with checking("OTHER"):  # before it is stored in the config
            read_manifest(other)

    def change(config: "AnatomyConfig") -> "AnatomyConfig":
        beside = config.other if other is None else str(other.resolve())
        changed = dataclasses.replace(config, only=only, other=beside)
        with checking("--only"):  # before a stage begins
            chosen_analyses(changed)
        return changed

    do_again_if_changed(run_dir, ANATOMY, change)

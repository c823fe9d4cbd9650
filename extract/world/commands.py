"""The verb `world`, and the options that every new run has."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extract.run.console import Progress
from extract.run.verbs import MODEL, RUN_DIR, SEED, dry_run_option, preset_option
from extract.signals.commands import kept_options, take_kept

if TYPE_CHECKING:
    from extract.run.manifest import NewRun


def new_world_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that make a run on the microworld what it is."""
    for option in (
        click.option(
            "--seed",
            default=0,
            type=SEED,
            help="Of training and bootstrap.",
        ),
        MODEL,
        preset_option("demo", "Sizes: demo takes minutes on two cores, smoke one."),
    ):
        command = option(command)
    return kept_options(command)


def new_world(options: dict[str, Any]) -> "NewRun":
    """Take the options of a new run; a wrong model is found before it is made."""
    import dataclasses

    from extract.backbone.names import BackboneConfig
    from extract.generate.options import check_backbone
    from extract.run.manifest import NewRun
    from extract.signals.stage import EXTRACT_PRESETS
    from extract.world.stage import WORLD_PRESETS

    preset, kept = options.pop("preset"), take_kept(options)
    backbone = BackboneConfig(model=options.pop("model"))
    check_backbone(backbone, kept.get("hidden_layers"))
    return NewRun(
        preset=preset,
        seed=options.pop("seed"),
        sections={
            "backbone": backbone,
            "world": WORLD_PRESETS[preset],
            "extract": dataclasses.replace(EXTRACT_PRESETS[preset], **kept),
        },
    )


@click.command()
@RUN_DIR
@new_world_options
@click.option("--train", is_flag=True, help="Also train the model, into RUN_DIR/model.")
@dry_run_option
def world(run_dir: Path, train: bool, dry_run: bool, **options: Any) -> None:
    """Make the microworld: questions and passages (and its model, from nothing).

    Example: beatrice world runs/mine --train
    """
    from extract.run.directory import RunDir
    from extract.run.stages import do
    from extract.world.stage import WORLD, forecast_world, train_world_model

    asked = new_world(options)
    if dry_run:
        click.echo(forecast_world(asked.sections["world"]).as_text())
        return
    do(run_dir, WORLD, asked=asked)
    if train:
        progress = Progress()
        with RunDir.open(run_dir) as run, progress.stage("model") as update:
            click.echo(str(train_world_model(run, update, progress)))

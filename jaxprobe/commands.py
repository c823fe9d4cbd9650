"""The verbs `train` and `calibrate`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.run.verbs import RUN_DIR, do_or_forecast, dry_run_option, stage_verb

if TYPE_CHECKING:
    from jaxprobe.settings import GridConfig

STREAMED = click.option(
    "--streamed",
    "is_streamed",
    is_flag=True,
    help="Train from the store in groups, not in memory.",
)
MIXED = click.option(
    "--mixed",
    "is_mixed",
    is_flag=True,
    help="Round the operands of the encoders' products to bfloat16.",
)


def with_options(
    config: "GridConfig", *, is_streamed: bool, is_mixed: bool
) -> "GridConfig":
    """Return how encoders are trained, as the two options say."""
    import dataclasses

    from jaxprobe.config import StreamConfig

    if is_streamed:
        config = dataclasses.replace(config, stream=StreamConfig())
    return config.mixed() if is_mixed else config


@click.command()
@RUN_DIR
@STREAMED
@MIXED
@dry_run_option
def train(run_dir: Path, is_streamed: bool, is_mixed: bool, dry_run: bool) -> None:
    """Train all fifteen encoders, every seed, both settings.

    Example: beatrice train runs/demo
    """
    from jaxprobe.fit.stage import TRAIN

    do_or_forecast(
        run_dir,
        TRAIN,
        dry_run,
        lambda config: with_options(config, is_streamed=is_streamed, is_mixed=is_mixed),
    )


calibrate = stage_verb(
    "calibrate",
    "jaxprobe.stage:CALIBRATE",
    "Fit the isotonic maps on validation and save the detector.",
)

"""The verbs `train` and `calibrate`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extract.run.launch import find_share
from extract.run.verbs import RUN_DIR, SHARD

if TYPE_CHECKING:
    from jaxprobe.settings import GridConfig

_OPTIONS = {
    "streamed": "Train from the store in groups, not in memory.",
    "mixed": "Round the operands of the encoders' products to bfloat16.",
    "linear-first": "Begin encoders as regressions: for a few thousand answers.",
}


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of how encoders are trained, flags of `with_options`."""
    for name, told in reversed(_OPTIONS.items()):
        flag = f"is_{name.replace('-', '_')}"
        command = click.option(f"--{name}", flag, is_flag=True, help=told)(command)
    return command


def with_options(
    config: "GridConfig",
    *,
    is_streamed: bool = False,
    is_mixed: bool = False,
    is_linear_first: bool = False,
    device_memory: str | None = None,
) -> "GridConfig":
    """Return how encoders are trained, as the options say."""
    import dataclasses

    from jaxprobe.config import StreamConfig
    from jaxprobe.settings import as_bytes

    if is_streamed:
        config = dataclasses.replace(config, stream=StreamConfig())
    if is_linear_first:
        config = config.linear_first()
    if device_memory is not None:
        config = dataclasses.replace(config, device_memory=as_bytes(device_memory))
    return config.mixed() if is_mixed else config


@click.command()
@RUN_DIR
@training_options
@SHARD
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Plan for devices of this memory, such as 80GiB; by default for their own.",
)
def train(run_dir: Path, shard: str | None, **options: Any) -> None:
    """Train all fifteen encoders, every seed, every setting of the run.

    Under torchrun, srun or mpirun, or with --shard, every process trains its share.

    Example: beatrice train runs/demo

    Example: srun -n 8 beatrice train runs/paper
    """
    from extract.run.stages import do
    from jaxprobe.fit.stage import TRAIN

    change = partial(with_options, **options)
    do(run_dir, TRAIN, change=change, share=find_share(shard))


@click.command()
@RUN_DIR
@click.option(
    "--precision",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    help="Share of trusted answers to be correct; may be changed.  [default: 0.9]",
)
def calibrate(run_dir: Path, precision: float | None) -> None:
    """Fit the isotonic maps and the threshold on validation; save the detector.

    Example: beatrice calibrate runs/demo --precision .95
    """
    from extract.run.directory import RunDir
    from extract.run.stages import do
    from jaxprobe.stage import CALIBRATE, settle_precision

    if precision is not None:
        with RunDir.open(run_dir) as run:
            settle_precision(run, precision)
    do(run_dir, CALIBRATE)

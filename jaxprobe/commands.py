"""The verbs `train` and `calibrate`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extract.run.verbs import RUN_DIR, SHARD, do_or_forecast, dry_run_option, share_of

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
    config: "GridConfig", *, is_streamed: bool, is_mixed: bool, is_linear_first: bool
) -> "GridConfig":
    """Return how encoders are trained, as the options say."""
    import dataclasses

    from jaxprobe.config import StreamConfig

    if is_streamed:
        config = dataclasses.replace(config, stream=StreamConfig())
    if is_linear_first:
        config = config.linear_first()
    return config.mixed() if is_mixed else config


@click.command()
@RUN_DIR
@training_options
@SHARD
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Plan for a device of this memory, such as 80GiB; by default for its own.",
)
@dry_run_option
def train(
    run_dir: Path,
    shard: str | None,
    device_memory: str | None,
    dry_run: bool,
    **options: bool,
) -> None:
    """Train all fifteen encoders, every seed, every setting of the run.

    Under torchrun, srun or mpirun, or with --shard, every process trains its share.

    Example: beatrice train runs/demo

    Example: srun -n 8 beatrice train runs/paper
    """
    change, worker = partial(with_options, **options), share_of(shard, dry_run)
    if worker.world_size == 1:
        from jaxprobe.fit.plan import as_bytes
        from jaxprobe.fit.stage import train_stage

        stage = train_stage(as_bytes(device_memory) if device_memory else None)
        do_or_forecast(run_dir, stage, dry_run, change)
    else:
        from jaxprobe.fit.shares import train_share

        if device_memory:
            raise click.UsageError(
                "--device-memory plans for one process; each of several plans for the "
                "device that it sees, so leave the option out"
            )
        train_share(run_dir, worker, change)


@click.command()
@RUN_DIR
@click.option(
    "--precision",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    help="Share of trusted answers to be correct; may be changed.  [default: 0.9]",
)
@dry_run_option
def calibrate(run_dir: Path, precision: float | None, dry_run: bool) -> None:
    """Fit the isotonic maps and the threshold on validation; save the detector.

    Example: beatrice calibrate runs/demo --precision .95
    """
    from extract.run.directory import RunDir
    from jaxprobe.stage import CALIBRATE, settle_precision

    if precision is not None and not dry_run:
        with RunDir.open(run_dir) as run:
            settle_precision(run, precision)
    do_or_forecast(run_dir, CALIBRATE, dry_run)

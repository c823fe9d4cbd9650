"""The verbs `train` and `calibrate`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from beatrice.extract.run.share import find_share
from beatrice.extract.run.verbs import RUN_DIR, SHARD, SIZES, preset_option

if TYPE_CHECKING:
    from beatrice.extract.run.directory import Preset
    from beatrice.jaxprobe.config import GridConfig, SelectConfig

Config = TypeVar("Config", "GridConfig", "SelectConfig")
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


_POSITIVE = click.IntRange(min=1)
_SIZES = {
    "seeds": (_POSITIVE, "Encoders of each subset of the families."),
    "epochs": (_POSITIVE, "Most epochs."),
    "learning-rate": (click.FloatRange(0, min_open=True), "Rate of the first epoch."),
    "width": (_POSITIVE, "Hidden width; projections follow in proportion."),
}


# What presets are of heads; a test holds it against their configurations.
HEAD_SIZES = (
    "few: heads begin as the mean of their encoders, width 16, batches of 64, 8 epochs "
    "at 0.003; demo: width 16, batches of 512, 8 epochs at 0.003; paper: width 128, "
    "batches of 512, 60 epochs at 0.0002; smoke: width 8, batches of 64, 2 epochs at "
    "0.003, which means nothing."
)


def size_options(
    *names: str, sizes: str = SIZES
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds --preset, and options of sizes; see `with_sizes`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            kind, text = _SIZES[name]
            command = click.option(f"--{name}", type=kind, help=text)(command)
        return preset_option(None, "Instead of the run's.", sizes)(command)

    return add


def with_sizes(
    config: Config,
    presets: "Mapping[Preset, Config]",
    preset: "Preset | None",
    sizes: Mapping[str, float | None],
) -> Config:
    """Return a section `train` or `select` of other sizes; None changes nothing."""
    return (config if preset is None else presets[preset]).resized(**sizes)


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

    from beatrice.jaxprobe.config import StreamConfig, as_bytes

    if is_streamed:
        config = dataclasses.replace(config, stream=StreamConfig())
    if is_linear_first:
        config = config.linear_first()
    if device_memory is not None:
        config = dataclasses.replace(config, device_memory=as_bytes(device_memory))
    return config.mixed() if is_mixed else config


@click.command()
@RUN_DIR
@size_options("seeds", "epochs", "learning-rate", "width")
@training_options
@SHARD
@click.option(
    "--device-memory",
    metavar="BYTES",
    help="Plan for devices of this memory, such as 80GiB; by default for their own.",
)
def train(
    run_dir: Path,
    shard: str | None,
    preset: "Preset | None",
    seeds: int | None,
    epochs: int | None,
    learning_rate: float | None,
    width: int | None,
    **options: Any,
) -> None:
    """Train all fifteen encoders, every seed, every setting of the run.

    Sizes stay with the run, and may be others until encoders have been trained with
    them. Under torchrun, srun or mpirun, or with --shard, every process trains its
    share.

    Example: beatrice train runs/own --preset few --seeds 5

    Example: srun -n 8 beatrice train runs/paper
    """
    from beatrice.extract.run.stages import do
    from beatrice.jaxprobe.config import GRID_PRESETS, GridConfig
    from beatrice.jaxprobe.train import TRAIN

    sizes = {"epochs": epochs, "learning_rate": learning_rate, "width": width}

    def change(config: GridConfig) -> GridConfig:
        asked = with_sizes(config, GRID_PRESETS, preset, {"seeds": seeds, **sizes})
        return with_options(asked, **options)

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
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import do
    from beatrice.jaxprobe.calibrate import CALIBRATE, settle_precision

    if precision is not None:
        with RunDir.open(run_dir) as run:
            settle_precision(run, precision)
    do(run_dir, CALIBRATE)

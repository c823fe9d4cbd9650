"""The verbs `train` and `calibrate`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from beatrice.extract.run.directory import Preset
from beatrice.extract.run.verbs import (
    PRESET,
    RUN_DIR,
    SIZES,
    Parsed,
    ShareOptions,
    do_again_if_changed,
    given,
    option,
    options,
)
from beatrice.jaxprobe.config import GRID_PRESETS, GridConfig, StreamConfig, as_bytes

if TYPE_CHECKING:
    from beatrice.jaxprobe.config import CalibrateConfig

# Sizes of heads in each preset; a test compares this with their configurations.
HEAD_SIZES = (
    "few: heads begin as the mean of their encoders, width 16, batches of 64, 8 epochs "
    "at 0.003; demo: width 16, batches of 512, 8 epochs at 0.003; paper: width 128, "
    "batches of 512, 60 epochs at 0.0002; smoke: width 8, batches of 64, 2 epochs at "
    "0.003, which means nothing."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSizeOptions:
    """Sizes of fusion heads that override the run's."""

    preset: Preset | None = option(f"Override the run's. {HEAD_SIZES}", type=PRESET)
    epochs: int | None = option("Maximum number of epochs.", min=1)
    learning_rate: float | None = option("Initial learning rate.", min=0, is_above=True)
    width: int | None = option("Hidden width.", min=1)

    def sizes(self) -> dict[str, Any]:
        """Return the options that are given besides the preset, by name."""
        return {name: value for name, value in given(self).items() if name != "preset"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeOptions(HeadSizeOptions):
    """Sizes of encoders that override the run's."""

    preset: Preset | None = option(f"Override the run's. {SIZES}", type=PRESET)
    width: int | None = option(
        "Hidden width; projections scale in the preset's proportion.", min=1
    )
    seeds: int | None = option("Encoders per subset of the families.", min=1)

    def change(self, config: GridConfig, run_preset: Preset) -> GridConfig:
        """Return a copy with these sizes, and widths in the preset's proportion."""
        preset = GRID_PRESETS[self.preset or run_preset]
        start = preset if self.preset else config
        return start.resized(**self.sizes(), like=preset.encoder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How encoders are trained."""

    streamed: bool = option(
        "Stream rows from the store in groups; hold two in memory.", False, rare=True
    )
    mixed: bool = option(
        "Round operands of the encoders' products to bfloat16.", False, rare=True
    )
    linear_first: bool = option(
        "Begin encoders as regressions; for a few thousand answers.", False, rare=True
    )

    def change(self, config: GridConfig) -> GridConfig:
        """Return a copy with these options."""
        if self.streamed:
            config = dataclasses.replace(config, stream=StreamConfig())
        if self.linear_first:
            config = config.linear_first()
        return config.mixed() if self.mixed else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that training is planned for."""

    device_memory: int | None = option(
        "Memory to plan for, such as 60GiB; default: what JAX may use of the device.",
        rare=True,
        type=Parsed(as_bytes),
    )


@click.command()
@RUN_DIR
@options(
    sizes=SizeOptions, training=TrainingOptions, work=ShareOptions, device=DeviceOptions
)
def train(
    run_dir: Path,
    sizes: SizeOptions,
    training: TrainingOptions,
    work: ShareOptions,
    device: DeviceOptions,
) -> None:
    """Train all fifteen encoders with every seed, for every setting of the run.

    The run keeps the sizes; they can be changed until encoders have been trained with
    them. Under torchrun, srun or mpirun, or with --shard, each process trains a share.

    Example: beatrice train runs/own --preset few --seeds 5

    Example: srun -n 8 beatrice train runs/paper
    """
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.run.stages import open_and_do
    from beatrice.jaxprobe.stages import TRAIN

    def change(config: GridConfig) -> GridConfig:
        config = training.change(sizes.change(config, RunDir(run_dir).preset))
        if device.device_memory is None:
            return config
        return dataclasses.replace(config, device_memory=device.device_memory)

    open_and_do(run_dir, TRAIN, change=change, share=work.share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """How P and decisions are made; no answer, label or weight depends on it."""

    precision: float | None = option(
        "Share of decisions that should be right; can be changed.  [default: 0.9]",
        min=0,
        max=1,
        is_above=True,
    )
    maps: Literal["increasing", "isotonic"] | None = option(
        "maps from scores to P: increasing, or isotonic as in the paper (many equal P)",
        rare=True,
    )

    def change(self, config: "CalibrateConfig") -> "CalibrateConfig":
        """Return a copy with these options."""
        return dataclasses.replace(config, **given(self))


@click.command()
@RUN_DIR
@options(settings=CalibrateOptions)
def calibrate(run_dir: Path, settings: CalibrateOptions) -> None:
    """Fit the maps from scores to P on validation rows, and save the detector.

    Example: beatrice calibrate runs/demo --precision .95

    Example: beatrice calibrate runs/demo --set maps=isotonic
    """
    from beatrice.jaxprobe.stages import CALIBRATE

    do_again_if_changed(run_dir, CALIBRATE, settings.change)

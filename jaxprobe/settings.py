"""The run's sections `train` and `select`, with their presets; no JAX is loaded."""

import dataclasses

from extract.run.directory import RunDir
from extract.run.manifest import Preset
from jaxprobe.config import EncoderConfig, FusionConfig, StreamConfig, TrainConfig
from jaxprobe.features.subsets import N_SUBSETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The run's section `train`: every encoder × seed.

    Attributes:
      encoder: widths.
      train: the protocol; the run's seed takes the place of its own.
      stream: how encoders read a store that is larger than memory, or None where all
        of it is held; batches are then mixed within groups, which changes results.
    """

    encoder: EncoderConfig = EncoderConfig()
    train: TrainConfig = TrainConfig()
    stream: StreamConfig | None = None

    def seeded(self, seed: int) -> "GridConfig":
        """Return the same with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)

    def mixed(self) -> "GridConfig":
        """Return the same with products whose operands are rounded to bfloat16."""
        encoder = dataclasses.replace(self.encoder, matmul_dtype="bfloat16")
        return dataclasses.replace(self, encoder=encoder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """The run's section `select`: fusion heads, and the search over encoders.

    Attributes:
      head: widths.
      train: the heads' protocol; the run's seed takes the place of its own.
      margin: validation AUROC that an addition has to gain, delta of algorithm 1.
    """

    head: FusionConfig = FusionConfig()
    train: TrainConfig = TrainConfig()
    margin: float = 5e-4

    def seeded(self, seed: int) -> "SelectConfig":
        """Return the same with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)


# The demo's sizes aim at minutes on two cores. Those of `smoke` mean nothing: a minute
# once it is compiled. The paper's are those of its section 3 and appendix B.
GRID_PRESETS: dict[Preset, GridConfig] = {
    "demo": GridConfig(
        encoder=EncoderConfig(projection=16, hidden=16, n_blocks=2, n_groups=4),
        train=TrainConfig(
            learning_rate=2e-3, batch_size=256, max_epochs=6, lr_patience=2, patience=3
        ),
    ),
    "smoke": GridConfig(
        encoder=EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2),
        train=TrainConfig(learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1),
    ),
    "paper": GridConfig(),
}
SELECT_PRESETS: dict[Preset, SelectConfig] = {
    "demo": SelectConfig(
        head=FusionConfig(hidden=16),
        train=TrainConfig(
            learning_rate=3e-3,
            batch_size=512,
            max_epochs=8,
            lr_patience=2,
            patience=3,
            n_microbatches=1,
        ),
    ),
    "smoke": SelectConfig(
        # Room for the whole pool: every head shares one executable per setting.
        head=FusionConfig(hidden=8, n_slots=2 * N_SUBSETS),
        train=TrainConfig(learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1),
    ),
    "paper": SelectConfig(),
}


def grid_config(run: RunDir) -> GridConfig:
    """Return how a run's encoders are trained, with the run's seed."""
    return run.settle("train", GRID_PRESETS).seeded(run.seed)


def select_config(run: RunDir) -> SelectConfig:
    """Return how a run's heads are trained and selected, with the run's seed."""
    return run.settle("select", SELECT_PRESETS).seeded(run.seed)

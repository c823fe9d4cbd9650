"""Sizes and protocol of encoders and heads, as plain values: no JAX is loaded."""

import dataclasses
from typing import Literal, get_args

MatmulDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of a combination encoder; defaults give the paper's sizes at d=4096."""

    projection: int = 64  # width to which each family is projected
    hidden: int = 128
    n_blocks: int = 3
    n_groups: int = 8  # of the group normalisation
    dropout: float = 0.1
    input_noise: float = 0.05  # standard deviation, in units of a standardised channel
    matmul_dtype: MatmulDtype = (
        "float32"  # operands of matrix products; bfloat16: mixed
    )
    # A linear probe comes first, and the network learns what it leaves; the paper has
    # none. See `jaxprobe.fit.linear`.
    is_linear_first: bool = False

    def __post_init__(self):
        """Refuse widths that do not fit together."""
        if self.hidden % self.n_groups:
            raise ValueError(
                f"hidden width {self.hidden} does not part into {self.n_groups} groups"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.matmul_dtype not in get_args(MatmulDtype):
            raise ValueError(
                f"matmul_dtype: expected {' or '.join(get_args(MatmulDtype))}, "
                f"got {self.matmul_dtype!r}"
            )

    @property
    def d_pooled(self) -> int:
        """Width of the pooled vector handed to the fusion head."""
        return 2 * self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How an encoder or a fusion head is fitted; defaults are the paper's (app. B)."""

    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    batch_size: int = 512
    max_epochs: int = 60
    lr_patience: int = 4  # epochs without a validation gain before the rate is halved
    patience: int = 10  # epochs without a validation gain before training stops
    n_seeds: int = 3
    root_seed: int = 0
    n_microbatches: int | None = None  # of a batch; None: 128 rows each

    def __post_init__(self):
        """Refuse counts that train nothing."""
        for name in (
            "batch_size",
            "max_epochs",
            "lr_patience",
            "patience",
            "n_seeds",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.n_microbatches is not None and self.batch_size % self.n_microbatches:
            raise ValueError(
                f"batch_size {self.batch_size} has no {self.n_microbatches} equal parts"
            )

    def microbatches(self) -> int:
        """Into how many pieces of equal size a batch is parted.

        Each piece draws noise and dropout with keys of its own. Its gradient is
        computed by itself, unless a device's memory asks for another size; see
        `PlannedConfig`. Activations of about 128 rows stay in a core's cache: at 512 a
        step took twice the time per token.
        """
        if self.n_microbatches is not None:
            return self.n_microbatches
        return 1 if self.batch_size % 128 else self.batch_size // 128

    def rows_at_once(self) -> int:
        """Rows whose gradient is computed together."""
        return self.batch_size // self.microbatches()

    def rows_scored(self) -> int:
        """Rows that are scored together, without a gradient."""
        return self.batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedConfig(TrainConfig):
    """The protocol as a device's memory allows it; results are the protocol's own.

    Attributes:
      n_rows: rows of which a gradient is computed, and which are scored, together.
    """

    n_rows: int

    def __post_init__(self):
        """Refuse rows that do not fit the pieces that draw together."""
        super().__post_init__()
        if self.n_rows not in row_choices(self):
            raise ValueError(
                f"n_rows: expected one of {row_choices(self)}, got {self.n_rows}"
            )

    def rows_at_once(self) -> int:
        """Rows whose gradient is computed together."""
        return self.n_rows

    def rows_scored(self) -> int:
        """Rows that are scored together, without a gradient."""
        return self.n_rows


def row_choices(config: TrainConfig) -> list[int]:
    """Return the sizes into which a batch may be parted, largest first.

    They are parts of a piece that draws together, or several such pieces.
    """
    own = config.batch_size // config.microbatches()
    sizes = range(config.batch_size, 0, -1)
    return [
        n
        for n in sizes
        if config.batch_size % n == 0 and (n % own == 0 or own % n == 0)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Shape of a fusion head; defaults follow the paper, appendix B.

    Attributes:
      hidden: width.
      encoder_dropout: probability that a whole encoder is hidden.
      n_slots: encoders that it can read.
      is_mean_first: for few answers: a head stays the mean logit of its encoders where
        what it gains on that may be chance (`jaxprobe.metrics.is_gain`).
    """

    hidden: int = 128
    encoder_dropout: float = 0.3
    n_slots: int = 4
    is_mean_first: bool = False

    def __post_init__(self):
        """Refuse a head without slots, or one that hides every encoder."""
        if self.n_slots < 1 or not 0.0 <= self.encoder_dropout < 1.0:
            raise ValueError(f"need n_slots >= 1 and 0 <= encoder_dropout < 1: {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a store is parted; memory is that of two groups.

    Attributes:
      n_chunk: neighbours that are read together; more of them read faster.
      n_mixed: chunks that make a group; more of them shuffle better.
    """

    n_chunk: int = 64
    n_mixed: int = 32

    def __post_init__(self) -> None:
        """Refuse sizes that read nothing."""
        if min(self.n_chunk, self.n_mixed) < 1:
            raise ValueError(
                f"n_chunk and n_mixed must be at least 1, got {self.n_chunk} and "
                f"{self.n_mixed}"
            )

"""Sizes and protocol of encoders and heads, their presets, and how JAX compiles.

Importing this loads no JAX: the compiler's flags must be set before JAX makes its first
array.
"""

import contextlib
import dataclasses
import math
import numbers
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal, get_args

from beatrice.extract.run.directory import Preset
from beatrice.extract.run.files import user_cache

MatmulDtype = Literal["float32", "bfloat16"]
# Version of everything about a fit that its configuration does not record. Version 1
# divided constant features by rounding errors and took steps on other groups of rows;
# version 2 drew the noise of narrow encoders for each family.
PROTOCOL = 3
# Format of saved detectors. In format 8, answers of equal P are in file order; format 9
# has no hash of a Hub model's files; format 10 does not count the encoders tried, and
# has one reading path for all settings; format 11 has no hash of loaded weights; until
# format 12, the padding token and how a model is run were part of its config's hash.
DETECTOR_FORMAT = 13
# Version of the intervals beside measured values. Version 1 had only resamples for an
# AUPRC, and for exact match and F1 of one set; version 2 for differences in these and
# for answers of equal length.
INTERVAL_FORMAT = 3


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _check_counts(config: object, **least: int) -> None:
    """Check that fields which are not None are whole numbers of at least `least`."""
    for name, fewest in least.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, numbers.Integral) or value < fewest:
            raise ValueError(
                f"{name} must be a whole number of at least {fewest}, got {value!r}"
            )


def _check_amounts(config: object, *names: str) -> None:
    """Check that fields are finite numbers of at least 0."""
    for name in names:
        value = getattr(config, name)
        amount = float(value) if isinstance(value, numbers.Real) else math.nan
        if not 0.0 <= amount < math.inf:
            raise ValueError(
                f"{name} must be a finite number of at least 0, got {value!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of a combination encoder; defaults give the paper's sizes at d=4096."""

    projection: int = 64  # width to which each family is projected
    hidden: int = 128
    n_blocks: int = 3
    n_groups: int = 8  # of the group normalisation
    dropout: float = 0.1
    input_noise: float = 0.05  # standard deviation, in units of a standardised channel
    # Type of the operands of matrix products, see `jaxprobe.stored`.
    matmul_dtype: MatmulDtype = "float32"
    # Whether to fit a linear probe first and let the network learn what remains; see
    # `jaxprobe.linear`. Not in the paper.
    is_linear_first: bool = False

    def __post_init__(self):
        """Check the ranges of the fields, and that groups divide the hidden width."""
        _check_counts(self, projection=1, hidden=1, n_blocks=0, n_groups=1)
        _check_amounts(self, "dropout", "input_noise")
        if self.hidden % self.n_groups:
            raise ValueError(
                f"n_groups must divide hidden, got {self.n_groups} and {self.hidden}"
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
        """Width of the pooled vector that the fusion head receives."""
        return 2 * self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How an encoder or a fusion head is fitted; defaults are the paper's (app. B)."""

    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    batch_size: int = 512
    max_epochs: int = 60  # 0 (heads only) leaves heads at the mean logit
    # Epochs without a validation gain before the learning rate is halved; None: never.
    lr_patience: int | None = 4
    patience: int = 10  # epochs without a validation gain before training stops
    n_seeds: int = 3
    # Not compared, so that all seeds share compiled code, whose arguments are keys.
    root_seed: int = dataclasses.field(default=0, compare=False)
    n_microbatches: int | None = None  # per batch; None: 128 rows each

    def __post_init__(self):
        """Check the ranges of the fields, and that a batch splits into equal parts."""
        _check_counts(self, batch_size=1, max_epochs=0, patience=1, n_seeds=1)
        _check_counts(self, lr_patience=1, n_microbatches=1)
        _check_amounts(self, "learning_rate", "weight_decay")
        if not self.learning_rate:
            raise ValueError(
                f"learning_rate must be above 0, got {self.learning_rate!r}"
            )
        if self.n_microbatches is not None and self.batch_size % self.n_microbatches:
            raise ValueError(
                "n_microbatches must divide batch_size into equal parts, got "
                f"{self.n_microbatches} and {self.batch_size}"
            )

    def microbatches(self) -> int:
        """Return the number of equal microbatches in a batch.

        Each microbatch draws noise and dropout with its own keys. Gradients are also
        computed per microbatch, unless the device's memory calls for another size (see
        `PlannedConfig`). Activations of about 128 rows stay in a core's cache: with 512
        rows a step took twice the time per token.
        """
        if self.n_microbatches is not None:
            return self.n_microbatches
        return 1 if self.batch_size % 128 else self.batch_size // 128

    def rows_at_once(self) -> int:
        """Return the number of rows whose gradient is computed together."""
        return self.batch_size // self.microbatches()

    def rows_scored(self) -> int:
        """Return the number of rows that are scored together, without a gradient."""
        return self.batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedConfig(TrainConfig):
    """A training protocol fitted to a device's memory, with the same results."""

    n_rows: int  # per gradient, and scored together; one of `row_choices`

    def rows_at_once(self) -> int:
        """Return the number of rows whose gradient is computed together."""
        return self.n_rows

    def rows_scored(self) -> int:
        """Return the number of rows that are scored together, without a gradient."""
        return self.n_rows


def row_choices(config: TrainConfig) -> list[int]:
    """Return possible `n_rows`, largest first: whole or evenly split microbatches."""
    size = config.batch_size // config.microbatches()
    return [
        n
        for n in range(config.batch_size, 0, -1)
        if config.batch_size % n == 0 and (n % size == 0 or size % n == 0)
    ]


MOST_SLOTS = 1024  # about half a million pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Shape of a fusion head; defaults follow the paper, appendix B."""

    hidden: int = 128  # width
    encoder_dropout: float = 0.3  # probability that a whole encoder is hidden
    n_slots: int = 4  # the most encoders that a head can read
    # For few answers: keep the mean logit of the encoders unless the head gains more
    # over it than chance explains (`jaxprobe.metrics.is_gain`).
    is_mean_first: bool = False

    def __post_init__(self):
        """Check the ranges of the fields."""
        _check_counts(self, hidden=1, n_slots=1)
        if self.n_slots > MOST_SLOTS:
            raise ValueError(
                f"n_slots must be at most {MOST_SLOTS}, since a head compares every "
                f"pair of slots; got {self.n_slots}"
            )
        if not 0.0 <= self.encoder_dropout < 1.0:
            raise ValueError(
                f"encoder_dropout must lie in [0, 1), got {self.encoder_dropout}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a store is split into groups, two of which must fit in memory."""

    n_chunk: int = 64  # consecutive rows read together; larger chunks read faster
    n_mixed: int = 32  # chunks in a group; larger groups shuffle better

    def __post_init__(self) -> None:
        """Check that sizes are positive."""
        _check_counts(self, n_chunk=1, n_mixed=1)

    def n_groups(self, n_examples: int) -> int:
        """Return the number of groups that examples are split into."""
        return -(-n_examples // (self.n_chunk * self.n_mixed))

    def group_rows(self, n_examples: int) -> int:
        """Return the number of rows in a group, a whole number of chunks."""
        n_chunks = -(-n_examples // self.n_chunk)
        return -(-n_chunks // self.n_groups(n_examples)) * self.n_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The section `train` of a run: how every encoder and seed is trained."""

    encoder: EncoderConfig = EncoderConfig()  # widths
    train: TrainConfig = TrainConfig()  # protocol; the run's seed replaces its seed
    # How to stream a store that is larger than memory; None reads it all into memory.
    # Streaming mixes batches within groups, which changes results.
    stream: StreamConfig | None = None
    # Bytes of memory to plan for; None: the device's. It changes only rounding.
    device_memory: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that encoders are trained for at least one epoch."""
        if self.train.max_epochs < 1:
            raise ValueError("max_epochs of encoders must be at least 1, got 0")

    def seeded(self, seed: int) -> "GridConfig":
        """Return a copy with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)

    def mixed(self) -> "GridConfig":
        """Return a copy whose matrix products round their operands to bfloat16."""
        encoder = dataclasses.replace(self.encoder, matmul_dtype="bfloat16")
        return dataclasses.replace(self, encoder=encoder)

    def resized(
        self,
        *,
        seeds: int | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        width: int | None = None,
        like: EncoderConfig | None = None,
    ) -> "GridConfig":
        """Return a copy with other sizes; None keeps a size.

        Projections scale with the width in the proportion of `like`, since a narrow
        encoder's own proportion is affected by rounding.
        """
        encoder, like = self.encoder, like or self.encoder
        if width is not None:
            encoder = dataclasses.replace(
                encoder,
                hidden=width,
                projection=max(1, like.projection * width // like.hidden),
                n_groups=math.gcd(width, like.n_groups),
            )
        sizes = _given(n_seeds=seeds, max_epochs=epochs, learning_rate=learning_rate)
        train = dataclasses.replace(self.train, **sizes)
        return dataclasses.replace(self, encoder=encoder, train=train)

    def linear_first(self) -> "GridConfig":
        """Return a copy whose encoders begin as regressions.

        Networks improve on their regressions slowly, so their learning rate stays.
        """
        if self.encoder.is_linear_first:  # older runs have a large lr_patience instead
            return self
        encoder = dataclasses.replace(self.encoder, is_linear_first=True)
        train = dataclasses.replace(self.train, lr_patience=None)
        return dataclasses.replace(self, encoder=encoder, train=train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """The section `select` of a run: fusion heads, and the search over encoders."""

    head: FusionConfig = FusionConfig()  # widths
    # The training protocol of heads; its seed is replaced by the run's. With 0 epochs
    # nothing is trained: sets are compared and fused by their mean logit.
    train: TrainConfig = TrainConfig()
    margin: float = 5e-4  # validation AUROC that an addition must gain (delta, alg. 1)

    def resized(
        self,
        *,
        epochs: int | None = None,
        learning_rate: float | None = None,
        width: int | None = None,
    ) -> "SelectConfig":
        """Return a copy with other sizes of heads; None keeps a size."""
        sizes = _given(max_epochs=epochs, learning_rate=learning_rate)
        train = dataclasses.replace(self.train, **sizes)
        head = dataclasses.replace(self.head, **_given(hidden=width))
        return dataclasses.replace(self, head=head, train=train)

    def seeded(self, seed: int) -> "SelectConfig":
        """Return a copy with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)


# `demo` takes minutes on two cores, `few` a minute for a hundred answers, for which
# networks alone do worse than the regressions that they begin as in `few`
# (docs/measurements.md). Results of `smoke` mean nothing; it takes a minute once
# compiled. `paper` has the sizes of the paper's appendix B.
GRID_PRESETS: dict[Preset, GridConfig] = {
    "demo": GridConfig(
        # Six epochs of two blocks left the hidden and attention encoders below logistic
        # regression on the same signals.
        encoder=EncoderConfig(
            projection=16, hidden=16, n_blocks=1, n_groups=4, input_noise=0.1
        ),
        train=TrainConfig(
            learning_rate=2e-3, batch_size=128, max_epochs=12, lr_patience=2, patience=4
        ),
    ),
    "few": GridConfig(
        encoder=EncoderConfig(
            projection=16,
            hidden=16,
            n_blocks=1,
            n_groups=4,
            dropout=0.2,
            input_noise=0.5,
        ),
        train=TrainConfig(learning_rate=3e-3, batch_size=32, max_epochs=12, patience=5),
    ).linear_first(),
    "smoke": GridConfig(
        encoder=EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2),
        train=TrainConfig(learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1),
    ),
    "paper": GridConfig(),
}
_HEAD_TRAINING = TrainConfig(
    learning_rate=3e-3, max_epochs=8, lr_patience=2, patience=3, n_microbatches=1
)
SELECT_PRESETS: dict[Preset, SelectConfig] = {
    "demo": SelectConfig(head=FusionConfig(hidden=16), train=_HEAD_TRAINING),
    "few": SelectConfig(
        head=FusionConfig(hidden=16, is_mean_first=True),
        train=dataclasses.replace(_HEAD_TRAINING, batch_size=64),
    ),
    "smoke": SelectConfig(
        # Slots for all encoders of two passes: one executable serves all heads.
        head=FusionConfig(hidden=8, n_slots=30),
        train=TrainConfig(learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1),
    ),
    "paper": SelectConfig(),
}


MapKind = Literal["increasing", "isotonic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """The section `calibrate` of a run."""

    precision: float = 0.9  # share of decisions, to trust or distrust, to be right
    # Kind of map from scores to P. Isotonic regression is the paper's; it gives
    # hundreds of answers the same P, and at its steps rounding can change P a lot.
    maps: MapKind = "increasing"

    def __post_init__(self) -> None:
        """Check that precision is in (0, 1]."""
        if not 0 < self.precision <= 1:
            raise ValueError(
                f"precision: expected a share in (0, 1], got {self.precision}"
            )


CALIBRATE_PRESETS: dict[Preset, CalibrateConfig] = {
    **dict.fromkeys(get_args(Preset), CalibrateConfig()),
    "paper": CalibrateConfig(maps="isotonic"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntervalConfig:
    """The section `intervals` of a run: the number of bootstrap resamples."""

    n_resamples: int = 10_000


INTERVAL_PRESETS: dict[Preset, IntervalConfig] = {
    **dict.fromkeys(get_args(Preset), IntervalConfig()),
    "smoke": IntervalConfig(n_resamples=100),
}


_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def as_bytes(text: str) -> int:
    """Read a positive number of bytes such as "80GiB"; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    n_bytes = int(float(match[1]) * 2 ** _UNITS[match[2]]) if match else 0
    if n_bytes == 0:
        raise ValueError(f"expected a number of bytes such as 80GiB, got {text!r}")
    return n_bytes


# Cores already run several operations at once; splitting each operation over them as
# well costs a third of a training step (measured).
_SINGLE_THREADED_EIGEN = "--xla_cpu_multi_thread_eigen=false"
# Optimising code that runs for seconds would take longer than running it.
XLA_FLAGS: dict[Preset, str] = {
    "demo": _SINGLE_THREADED_EIGEN,
    "few": _SINGLE_THREADED_EIGEN,
    "smoke": f"--xla_backend_optimization_level=0 {_SINGLE_THREADED_EIGEN}",
    "paper": "",
}
# XLA before JAX 0.11 has an older loop emitter, which compiles faster. From 0.11 on the
# flag does not exist, and an unknown flag aborts the process.
_OLD_EMITTER = "xla_cpu_use_fusion_emitters"


def old_emitter() -> dict[str, bool]:
    """Return the XLA option that selects the faster-compiling loop emitter, if any."""
    major, minor = map(int, version("jax").split(".")[:2])
    return {_OLD_EMITTER: False} if (major, minor) < (0, 11) else {}


def set_compiler(preset: Preset) -> None:
    """Set XLA's flags, unless the environment has XLA_FLAGS, and its compilation cache.

    JAX then allocates GPU memory as needed instead of three quarters at once, because
    Torch's model is on the same GPU; XLA_PYTHON_CLIENT_PREALLOCATE overrides this.
    Torch returns the memory that it keeps for later, which is most of a GPU after
    batches that filled it.

    Compiled code is kept in the user's cache directory, if it can be written, so that
    resumed runs, and other runs of the same sizes, compile little.
    `JAX_COMPILATION_CACHE_DIR` names another directory;
    `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
    """
    import jax

    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = XLA_FLAGS[preset]
    if preset == "smoke":
        flags += "".join(f" --{name}=false" for name in old_emitter())
    if flags:  # JAX reads them when it makes its first array
        os.environ.setdefault("XLA_FLAGS", flags)
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = user_cache("compiled")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # JAX would warn about each function
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Keep everything: a short run compiles a hundred functions of 50 ms each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


_ENVIRONMENT = threading.Lock()


def set_library_compiler() -> None:
    """Set the compiler inside a user's program, without changing its environment.

    A process reads the flags only once, so they are those for full-size fits: a later
    fit may be large. The cache stays set, since JAX has no public way to close it.
    """
    import jax

    with _ENVIRONMENT:  # else another thread could take these flags for the user's
        names = {"XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"} - {*os.environ}
        try:
            set_compiler("demo")
            jax.devices()  # makes JAX read them
        finally:
            for name in names:
                os.environ.pop(name, None)


@contextlib.contextmanager
def usual_jax() -> Iterator[None]:
    """Run JAX with its default settings in this thread, whatever the user has set.

    Weights and signals are float32, equal keys draw equal numbers, and a mesh set by
    the user splits nothing. The user's device and matmul precision still apply.
    """
    import jax
    import numpy as np

    mesh = contextlib.nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        mesh = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    with (
        mesh,
        jax.enable_x64(False),
        jax.debug_nans(False),  # some NaNs are intended: losses of epochs not run
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield

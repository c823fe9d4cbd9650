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
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal, get_args

from beatrice.extract.run.directory import Preset
from beatrice.extract.run.files import user_cache

MatmulDtype = Literal["float32", "bfloat16"]
# Of what a configuration does not say of a fit; until 2 constant features were divided
# by rounding errors, and steps were taken over groups of other sizes.
PROTOCOL = 2


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _check_counts(config: object, **least: int) -> None:
    """Check that fields which are there are whole numbers, at least so large."""
    for name, fewest in least.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, numbers.Integral) or value < fewest:
            raise ValueError(
                f"{name} must be at least {fewest}, and a whole number, got {value!r}"
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
    # Operands of matrix products; bfloat16: mixed. An NVIDIA GPU multiplies float32 as
    # TF32 in training, unless `JAX_DEFAULT_MATMUL_PRECISION` says otherwise.
    matmul_dtype: MatmulDtype = "float32"
    # A linear probe comes first, and the network learns what it leaves; the paper has
    # none. See `jaxprobe.linear`.
    is_linear_first: bool = False

    def __post_init__(self):
        """Check that the widths fit together."""
        _check_counts(self, projection=1, hidden=1, n_blocks=0, n_groups=1)
        _check_amounts(self, "dropout", "input_noise")
        if self.hidden % self.n_groups:
            raise ValueError(
                f"hidden width {self.hidden} has no {self.n_groups} equal groups"
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
    max_epochs: int = 60  # 0, of heads alone: they stay the mean logit
    # Epochs without a validation gain before the rate is halved; None: it stays.
    lr_patience: int | None = 4
    patience: int = 10  # epochs without a validation gain before training stops
    n_seeds: int = 3
    # Of no compiled code, whose keys are arguments: all seeds share an executable.
    root_seed: int = dataclasses.field(default=0, compare=False)
    n_microbatches: int | None = None  # of a batch; None: 128 rows each

    def __post_init__(self):
        """Check that counts are positive."""
        _check_counts(self, batch_size=1, max_epochs=0, patience=1, n_seeds=1)
        _check_counts(self, lr_patience=1, n_microbatches=1)
        _check_amounts(self, "learning_rate", "weight_decay")
        if not self.learning_rate:
            raise ValueError("learning_rate must be above 0, got 0.0")
        if self.n_microbatches is not None and self.batch_size % self.n_microbatches:
            raise ValueError(
                f"batch_size {self.batch_size} has no {self.n_microbatches} equal parts"
            )

    def microbatches(self) -> int:
        """Return into how many microbatches of equal size a batch is split.

        Each microbatch draws noise and dropout with keys of its own. Its gradient is
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
    """The protocol as a device's memory allows it; results are the protocol's own."""

    # Rows of which a gradient is computed, and which are scored, together; one of
    # `row_choices`.
    n_rows: int

    def rows_at_once(self) -> int:
        """Rows whose gradient is computed together."""
        return self.n_rows

    def rows_scored(self) -> int:
        """Rows that are scored together, without a gradient."""
        return self.n_rows


def row_choices(config: TrainConfig) -> list[int]:
    """Return the sizes of a batch's parts, largest first, by whole microbatches."""
    size = config.batch_size // config.microbatches()
    return [
        n
        for n in range(config.batch_size, 0, -1)
        if config.batch_size % n == 0 and (n % size == 0 or size % n == 0)
    ]


MOST_SLOTS = 1024  # half a million pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Shape of a fusion head; defaults follow the paper, appendix B."""

    hidden: int = 128  # width
    encoder_dropout: float = 0.3  # probability that a whole encoder is hidden
    n_slots: int = 4  # encoders that it can read
    # For few answers: a head stays the mean logit of its encoders where what it gains
    # on that may be chance (`jaxprobe.metrics.is_gain`).
    is_mean_first: bool = False

    def __post_init__(self):
        """Check that a head has slots, and does not drop every encoder."""
        _check_counts(self, hidden=1, n_slots=1)
        if self.n_slots > MOST_SLOTS:
            raise ValueError(
                f"n_slots: expected at most {MOST_SLOTS}, since a head compares every "
                f"two of them, got {self.n_slots}"
            )
        if not 0.0 <= self.encoder_dropout < 1.0:
            raise ValueError(
                f"encoder_dropout must lie in [0, 1), got {self.encoder_dropout}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a store is split into groups; memory is that of two groups."""

    n_chunk: int = 64  # neighbours that are read together; more of them read faster
    n_mixed: int = 32  # chunks that make a group; more of them shuffle better

    def __post_init__(self) -> None:
        """Check that sizes are positive."""
        _check_counts(self, n_chunk=1, n_mixed=1)

    def n_groups(self, n_examples: int) -> int:
        """Return into how many groups examples are split."""
        return -(-n_examples // (self.n_chunk * self.n_mixed))

    def group_rows(self, n_examples: int) -> int:
        """Return the rows of each group of examples, whole chunks."""
        n_chunks = -(-n_examples // self.n_chunk)
        return -(-n_chunks // self.n_groups(n_examples)) * self.n_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The run's section `train`: every encoder × seed."""

    encoder: EncoderConfig = EncoderConfig()  # widths
    # The protocol; the run's seed takes the place of its own.
    train: TrainConfig = TrainConfig()
    # How encoders read a store that is larger than memory, or None where all of it is
    # in memory; batches are then mixed within groups, which changes results.
    stream: StreamConfig | None = None
    # Bytes for which members side by side are planned, or None for those that the
    # device has; no result depends on it, so that it may change.
    device_memory: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that encoders are trained at all."""
        if self.train.max_epochs < 1:
            raise ValueError("encoders need max_epochs of at least 1, got 0")

    def seeded(self, seed: int) -> "GridConfig":
        """Return the same with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)

    def mixed(self) -> "GridConfig":
        """Return the same with products whose operands are rounded to bfloat16."""
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
        """Return the same with other sizes; None leaves what is there.

        Projections follow the width in proportion, that of `like`: a narrow encoder is
        rounded, and does not tell which it was.
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
        """Return the same with encoders that begin as regressions.

        A network gains on its regression slowly, so its rate stays.
        """
        if self.encoder.is_linear_first:  # an older run's rate stays by a number
            return self
        encoder = dataclasses.replace(self.encoder, is_linear_first=True)
        train = dataclasses.replace(self.train, lr_patience=None)
        return dataclasses.replace(self, encoder=encoder, train=train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """The run's section `select`: fusion heads, and the search over encoders."""

    head: FusionConfig = FusionConfig()  # widths
    # The heads' protocol; the run's seed takes the place of its own. Of no epochs, sets
    # are searched and fused by their mean logit, and nothing is trained.
    train: TrainConfig = TrainConfig()
    # Validation AUROC that an addition has to gain, delta of algorithm 1.
    margin: float = 5e-4

    def resized(
        self,
        *,
        epochs: int | None = None,
        learning_rate: float | None = None,
        width: int | None = None,
    ) -> "SelectConfig":
        """Return the same with other sizes of the heads; None leaves what is there."""
        sizes = _given(max_epochs=epochs, learning_rate=learning_rate)
        train = dataclasses.replace(self.train, **sizes)
        head = dataclasses.replace(self.head, **_given(hidden=width))
        return dataclasses.replace(self, head=head, train=train)

    def seeded(self, seed: int) -> "SelectConfig":
        """Return the same with the run's seed in the protocol."""
        train = dataclasses.replace(self.train, root_seed=seed)
        return dataclasses.replace(self, train=train)


# The demo's sizes aim at minutes on two cores, those of `few` at a minute for a hundred
# answers, on which networks alone fall below the regressions that they begin as here
# (docs/measurements.md). Those of `smoke` mean nothing: a minute once it is compiled.
# The paper's are those of its appendix B.
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
        # Room for a pool of two passes: all heads share one executable per setting.
        head=FusionConfig(hidden=8, n_slots=30),
        train=TrainConfig(learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1),
    ),
    "paper": SelectConfig(),
}


_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def as_bytes(text: str) -> int:
    """Read a number of bytes, at least one, as in "80GiB"; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    n_bytes = int(float(match[1]) * 2 ** _UNITS[match[2]]) if match else 0
    if n_bytes == 0:
        raise ValueError(f"expected a number of bytes such as 80GiB, got {text!r}")
    return n_bytes


# Cores are shared among operations; sharing each one as well costs a third of a
# training step (measured).
_SINGLE_THREADED_EIGEN = "--xla_cpu_multi_thread_eigen=false"
# Code that runs for seconds need not be optimised for longer than that.
XLA_FLAGS: dict[Preset, str] = {
    "demo": _SINGLE_THREADED_EIGEN,
    "few": _SINGLE_THREADED_EIGEN,
    "smoke": f"--xla_backend_optimization_level=0 {_SINGLE_THREADED_EIGEN}",
    "paper": "",
}
# A flag that XLA does not know ends the process, and JAX 0.11 knows this one no more:
# before it XLA had another emitter of loops, which compiles sooner.
_OLD_EMITTER = "xla_cpu_use_fusion_emitters"


def old_emitter() -> dict[str, bool]:
    """Return the option of XLA by which loops are compiled sooner, where it has one."""
    major, minor = map(int, version("jax").split(".")[:2])
    return {_OLD_EMITTER: False} if (major, minor) < (0, 11) else {}


def set_compiler(preset: Preset) -> None:
    """Set the compiler's flags, unless XLA_FLAGS has some, and its cache.

    Of a GPU JAX then takes what it needs as it needs it, and not three quarters at
    once, unless XLA_PYTHON_CLIENT_PREALLOCATE says so: Torch's model lies there, too.

    Compiled code is kept in the user's cache directory (`JAX_COMPILATION_CACHE_DIR`
    names another, `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing): a run that is
    resumed, and the next of the same sizes, compile little.
    """
    import jax

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = XLA_FLAGS[preset]
    if preset == "smoke":
        flags += "".join(f" --{name}=false" for name in old_emitter())
    if flags:  # read from the environment when the first array is made
        os.environ.setdefault("XLA_FLAGS", flags)
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("compiled")))
        # Everything is kept: a short run compiles a hundred functions of 50 ms each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


_ENVIRONMENT = threading.Lock()


def set_library_compiler() -> None:
    """Set the compiler in a program of the user's, whose environment stays as it is.

    The flags are those of whole fits, since a process has them once: the next may be
    large. The cache stays, since JAX has no public way to close one.
    """
    import jax

    with _ENVIRONMENT:  # or another thread's fit takes these flags for the user's
        names = {"XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"} - {*os.environ}
        set_compiler("demo")
        jax.devices()  # JAX has read them with its first device
        for name in names:
            del os.environ[name]


@contextlib.contextmanager
def usual_jax() -> Iterator[None]:
    """Run JAX with its defaults in this thread, whatever the user's own settings are.

    Weights and signals are float32, the same keys draw the same numbers, and a mesh of
    the user's splits nothing. Device and precision of products stay the user's.
    """
    import jax
    import numpy as np

    mesh = contextlib.nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        mesh = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    with (
        mesh,
        jax.enable_x64(False),
        jax.debug_nans(False),  # some are meant: the loss of an epoch that was not
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield

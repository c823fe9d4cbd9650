"""The training grid by itself, on random signals of realistic sizes.

The cost of a step does not depend on the signals' values.
"""

import dataclasses
import datetime
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from beatrice.benchmarks.real import GRID
from beatrice.extract.run.process import (
    begin_peak,
    n_cores,
    peak_bytes,
    resident_bytes,
)
from beatrice.jaxprobe.config import GRID_PRESETS, GridConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import (
    SUBSETS,
    FamilyDims,
    Features,
    Standardizer,
    paper_dims,
)
from beatrice.jaxprobe.grid import (
    LabelledFeatures,
    Member,
    fit_blocks,
    grid_members,
    labelled,
    member_keys,
    seed_keys,
)
from beatrice.jaxprobe.memory import Sizes, choose, step_flops
from beatrice.jaxprobe.tokens import split_families

Losses = dict[Member, list[float]]  # one per step
N_VALID = 16  # validation examples; so few that validation costs nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Encoders, and the batches they are trained on."""

    config: GridConfig  # widths, protocol and seeds; each subset is one encoder a seed
    dims: FamilyDims  # channels of the families
    # Fewest and most tokens of each span; lengths between them are equally likely, and
    # every example is padded to the most.
    spans: tuple[tuple[int, int], ...]
    n_steps: int = 8  # training steps of each encoder per turn

    @property
    def members(self) -> list[Member]:
        """All encoders, seed-major."""
        return list(grid_members(self.config.train.n_seeds, self.dims.n_subsets))

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of tokens of each padded span."""
        return tuple(most for _, most in self.spans)

    @property
    def batch_size(self) -> int:
        """Number of examples per step."""
        return self.config.train.batch_size

    @property
    def n_examples(self) -> int:
        """Number of training examples per turn, each of which is seen once."""
        return self.batch_size * self.n_steps

    def with_encoder(self, **changes: Any) -> "Workload":
        """Return a copy with some fields of the encoder changed."""
        encoder = dataclasses.replace(self.config.encoder, **changes)
        config = dataclasses.replace(self.config, encoder=encoder)
        return dataclasses.replace(self, config=config)

    def quiet(self) -> "Workload":
        """Return a copy without noise and dropout."""
        return self.with_encoder(dropout=0.0, input_noise=0.0)


def turn_flops(workload: Workload, members: Sequence[Member]) -> int:
    """Return the operations of a turn, which is `n_steps` steps of each member."""
    encoder = workload.config.encoder
    cost = partial(step_flops, encoder, workload.dims, workload.widths)
    return workload.n_examples * sum(map(cost, members))


def _workload(
    config: GridConfig, spans: tuple[tuple[int, int], ...], **sizes: Any
) -> Workload:
    return Workload(config=config, dims=paper_dims(prob=5, **sizes), spans=spans)


_DEMO = GRID_PRESETS["demo"], ((6, 13), (1, 6))  # the microworld's span lengths
# The grid of `beatrice real` without regressions; spans are as long as in nine of ten
# rows of TriviaQA and Natural Questions.
_ENCODER = dataclasses.replace(GRID.encoder, is_linear_first=False)
_REAL = dataclasses.replace(GRID, encoder=_ENCODER), ((8, 30), (1, 16))
# All are closed-book.
WIDTHS: dict[str, Workload] = {
    "microworld": _workload(*_DEMO, hidden=160, resid=24, attn=120),
    # Gemma 3 270M: 18 layers of 4 heads.
    "gemma": _workload(*_REAL, hidden=640, resid=4 * 18, attn=4 * 18 * 4),
    # SmolLM2-135M: 30 layers of 9 heads.
    "smollm2": _workload(*_REAL, hidden=576, resid=4 * 30, attn=4 * 30 * 9),
    # Qwen3.5-9B: 32 layers, 8 of full attention with 16 heads.
    "paper": _workload(
        GridConfig(), ((12, 24), (1, 8)), hidden=4096, resid=4 * 32, attn=4 * 8 * 16
    ),
}


def machine() -> str:
    """Describe this machine: date, cores, processor and load."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    name = models[0] if models else "unknown processor"
    cores = f"{n_cores()} of {os.cpu_count()} cores"
    return f"{date}, {cores} of {name}, load {os.getloadavg()[0]:.1f}"


def weights_file(folder: Path, member: Member) -> Path:
    """Return the path of a member's initial weights."""
    return folder / f"{member[0]}-{member[1]}.safetensors"


def made_up_features(
    workload: Workload, n_examples: int, seed: int
) -> tuple[Features, np.ndarray]:
    """Return random standardised signals and boolean labels."""
    rng = np.random.default_rng(seed)
    tokens, masks = [], []
    for fewest, most in workload.spans:
        shape = (n_examples, most, workload.dims.total)
        lengths = rng.integers(fewest, most + 1, n_examples)
        mask = np.arange(most)[None, :] < lengths[:, None]
        x = rng.standard_normal(shape, dtype=np.float32)
        x[~mask] = 0.0
        tokens.append(x)
        masks.append(mask)
    return Features(tuple(tokens), tuple(masks)), rng.random(n_examples) < 0.5


def labelled_of(workload: Workload, n_examples: int, seed: int) -> LabelledFeatures:
    """Return random data in the form that the grid trains on."""
    n = workload.dims.total
    identity = Standardizer(np.zeros(n, np.float32), np.ones(n, np.float32))
    features, labels = made_up_features(workload, n_examples, seed)
    return labelled(split_families(features, workload.dims, identity), labels)


class GridTrainer:
    """Trains members with `jaxprobe.grid` in blocks, as in a run."""

    def __init__(self, workload: Workload, members: Sequence[Member], at_once: int):
        """Train `at_once` blocks in parallel, as a run does on its cores."""
        self.workload = workload
        self.members = tuple(members)
        self.at_once = at_once
        self._n_held = resident_bytes()

    def save_weights(self, folder: Path) -> None:
        """Write every member's initial weights to its `weights_file`."""
        encoder = Encoder(self.workload.config.encoder, self.workload.dims)
        features = labelled_of(self.workload, 1, seed=0).features
        start = jax.jit(lambda key, mask: encoder.init(key, features, mask))
        for subset, seed in self.members:
            _, key, _ = member_keys(seed_keys(0, (seed,))[0], subset)
            params = jax.device_get(start(key, jnp.asarray(SUBSETS[subset])))
            arrays = flax.traverse_util.flatten_dict(params["params"], sep="/")
            arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
            save_file(arrays, weights_file(folder, Member(subset, seed)))

    def _fit(
        self,
        members: Sequence[Member],
        workload: Workload,
        data: tuple[LabelledFeatures, LabelledFeatures],
        **protocol: int,
    ) -> Losses:
        encoder = workload.config.encoder
        config = dataclasses.replace(workload.config.train, **protocol)
        n_train, n_valid = (split.features.n_examples for split in data)
        # Planned for the device, with all rows of equal length.
        sizes = Sizes(
            encoder=encoder,
            dims=workload.dims,
            train=config,
            widths=workload.widths,
            n_train=n_train,
            n_valid=n_valid,
            valid_widths=workload.widths,
            device_dtypes=("float32",) * workload.dims.n_families,
        )
        plan = choose(sizes)
        trained = fit_blocks(
            plan.blocks(members),
            *([split] for split in data),
            encoder=Encoder(encoder, workload.dims),
            config=plan.config(config),
            n_threads=self.at_once,
        )
        return {
            member: losses.tolist()
            for block in trained
            for member, losses in zip(block.members, block.info.train_loss, strict=True)
        }

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch, each an epoch of its own.

        Uses full float32 precision: TF32 on a GPU would change losses as much as a bug.
        """
        data = labelled_of(workload, workload.batch_size, seed=1)
        before = jax.config.values["jax_default_matmul_precision"]
        jax.config.update("jax_default_matmul_precision", "highest")
        try:
            return self._fit(
                self.members,
                workload,
                (data, data),
                max_epochs=n_steps,
                lr_patience=n_steps + 1,
                patience=n_steps + 1,
                n_microbatches=n_microbatches,
            )
        finally:
            jax.config.update("jax_default_matmul_precision", before)

    def prepare(self) -> None:
        """Make the data, and compile; one executable serves every member."""
        work = self.workload
        self._data = (
            labelled_of(work, work.n_examples, seed=2),
            labelled_of(work, N_VALID, seed=3),
        )
        some = self.members[:1] if jax.default_backend() == "cpu" else self.members
        self._fit(some, work, self._data, max_epochs=1)
        self._has_peak = begin_peak()

    def turn(self) -> None:
        """Train every member for one epoch of `n_steps` batches."""
        self._fit(self.members, self.workload, self._data, max_epochs=1)

    def peak(self) -> int | None:
        """Return peak bytes of a GPU, or of this process above its initial memory."""
        if statistics := jax.local_devices()[0].memory_stats():
            return statistics["peak_bytes_in_use"]
        return peak_bytes() - self._n_held if self._has_peak else None

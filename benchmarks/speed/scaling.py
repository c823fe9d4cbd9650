"""`beatrice bench scaling`: the training grid by itself, and how its time grows.

One workload is varied along one axis at a time (examples, members, width), and a power
law is fitted to the seconds of an epoch of every member: `seconds = c * size **
exponent`, by least squares of the logarithms.
"""

import dataclasses
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks.speed.commands import AS_JSON, RowPrinter
from extract.run.console import Progress, quiet
from extract.run.memory import begin_peak
from jaxprobe.config import EncoderConfig, TrainConfig
from jaxprobe.features.families import Standardizer, split_families
from jaxprobe.features.subsets import SUBSETS, FamilyDims
from jaxprobe.fit.blocks import Block
from jaxprobe.fit.grid import Labelled, fit_blocks, labelled, member_keys
from jaxprobe.fit.work import (
    Losses,
    Member,
    Workload,
    made_up_features,
    turn_flops,
    weights_file,
)
from jaxprobe.model.encoder import Encoder
from jaxprobe.settings import GRID_PRESETS, set_compiler

EXAMPLES = (1, 2, 4, 8)  # times the workload's
SEEDS = (1, 3, 6)  # 15 members each
WIDTHS = (1, 2, 4, 8)  # times the workload's projection and hidden width
N_VALID = 16  # examples behind an epoch, so few that validation costs nothing
N_STEPS = 4  # of each encoder, where the axis is not the examples
HEAD = ("axis", "sizes", "seconds an epoch", "GFLOP/s", "exponent")


def microworld(n_steps: int) -> Workload:
    """Return the demo's encoders, closed-book, at the microworld's span lengths."""
    config = GRID_PRESETS["demo"]
    return Workload(
        encoder=config.encoder,
        dims=FamilyDims(hidden=160, prob=5, resid=24, attn=120),
        spans=((6, 13), (1, 6)),
        batch_size=config.train.batch_size,
        n_steps=n_steps,
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )


def paper(n_steps: int) -> Workload:
    """Return the paper's encoders on a Qwen3.5-9B: 32 layers, 8 of full attention."""
    return Workload(
        encoder=EncoderConfig(),
        dims=FamilyDims(hidden=4096, prob=5, resid=4 * 32, attn=2 * 2 * 8 * 16),
        spans=((12, 24), (1, 8)),
        batch_size=512,
        n_steps=n_steps,
    )


def machine() -> str:
    """Return the date, and what kind of machine this is and how busy."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    name = models[0] if models else "unknown processor"
    return f"{date}, {os.cpu_count()} cores of {name}, load {os.getloadavg()[0]:.1f}"


def labelled_of(workload: Workload, n_examples: int, seed: int) -> Labelled:
    """Return made-up data as the grid trains on it."""
    n = workload.dims.total
    identity = Standardizer(np.zeros(n, np.float32), np.ones(n, np.float32))
    features, labels = made_up_features(workload, n_examples, seed)
    return labelled(split_families(features, workload.dims, identity), labels)


class Grid:
    """Members trained by `jaxprobe.fit.grid`, each a block, as on a CPU in a run."""

    def __init__(self, workload: Workload, members: Sequence[Member], at_once: int):
        """Train `at_once` members side by side, as a run does on its cores."""
        self.workload = workload
        self.members = tuple(members)
        self.at_once = at_once

    def save_weights(self, folder: Path) -> None:
        """Write every member's initial weights, see `weights_file`."""
        encoder = Encoder(self.workload.encoder, self.workload.dims)
        features = labelled_of(self.workload, 1, seed=0).features
        start = jax.jit(lambda key, mask: encoder.init(key, features, mask))
        protocol = TrainConfig()
        for subset, seed in self.members:
            _, key, _ = member_keys(protocol, subset, seed)
            params = jax.device_get(start(key, jnp.asarray(SUBSETS[subset])))
            arrays = flax.traverse_util.flatten_dict(params["params"], sep="/")
            arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
            save_file(arrays, weights_file(folder, (subset, seed)))

    def _fit(
        self,
        members: Sequence[Member],
        workload: Workload,
        data: tuple[Labelled, Labelled],
        **protocol: int,
    ) -> Losses:
        config = TrainConfig(
            learning_rate=workload.learning_rate,
            weight_decay=workload.weight_decay,
            batch_size=workload.batch_size,
            **protocol,
        )
        trained = fit_blocks(
            [Block((subset,), (seed,)) for subset, seed in members],
            *([part] for part in data),
            encoder=Encoder(workload.encoder, workload.dims),
            config=config,
            n_threads=self.at_once,
        )
        return {
            member: one.info.train_loss[0].tolist()
            for member, one in zip(members, trained, strict=True)
        }

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch: every epoch is one step."""
        data = labelled_of(workload, workload.batch_size, seed=1)
        return self._fit(
            self.members,
            workload,
            (data, data),
            max_epochs=n_steps,
            lr_patience=n_steps + 1,
            patience=n_steps + 1,
            n_microbatches=n_microbatches,
        )

    def prepare(self) -> None:
        """Make the data and compile; the same executable serves every member."""
        work = self.workload
        self._data = (
            labelled_of(work, work.n_examples, seed=2),
            labelled_of(work, N_VALID, seed=3),
        )
        self._fit(self.members[:1], work, self._data, max_epochs=1)
        begin_peak()

    def turn(self) -> None:
        """Train every member for one epoch of `n_steps` batches."""
        self._fit(self.members, self.workload, self._data, max_epochs=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of workloads: a row of the table.

    Seconds are those of an epoch of every member, medians over the rounds; operations
    are counted by `turn_flops`.
    """

    name: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    gflops: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Of the power law fitted to the seconds."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.seconds), 1)[0])

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of `HEAD`."""
        return [
            self.name,
            ", ".join(str(size) for size in self.sizes),
            ", ".join(f"{x:.2f}" for x in self.seconds),
            ", ".join(f"{x:.1f}" for x in self.gflops),
            f"{self.exponent:.2f}",
        ]


def _wider(work: Workload, factor: int) -> Workload:
    encoder = dataclasses.replace(
        work.encoder,
        projection=work.encoder.projection * factor,
        hidden=work.encoder.hidden * factor,
    )
    return dataclasses.replace(work, encoder=encoder)


def variants(work: Workload) -> dict[str, dict[int, Workload]]:
    """Return workloads by axis and size; the plain one lies on every axis."""
    longer = [dataclasses.replace(work, n_steps=work.n_steps * x) for x in EXAMPLES]
    more = [dataclasses.replace(work, n_seeds=n_seeds) for n_seeds in SEEDS]
    wider = [_wider(work, factor) for factor in WIDTHS]
    return {
        "examples": {case.n_examples: case for case in longer},
        "members": {len(case.members): case for case in more},
        "hidden width": {case.encoder.hidden: case for case in wider},
    }


def measure(
    work: Workload, n_rounds: int, at_once: int, update: Callable[[int, int], None]
) -> Iterator[Axis]:
    """Time every variant once; what is compiled is compiled before.

    Args:
      work: the plain workload.
      n_rounds: epochs timed of each variant.
      at_once: members trained side by side, as many as cores.
      update: told how many are done, of how many.
    """
    axes = variants(work)
    total = len({case for cases in axes.values() for case in cases.values()})
    seconds: dict[Workload, float] = {}  # the plain one is on every axis
    for name, cases in axes.items():
        for case in cases.values():
            if case not in seconds:
                seconds[case] = _seconds(Grid(case, case.members, at_once), n_rounds)
                update(len(seconds), total)
        every = [
            (seconds[case], turn_flops(case, case.members)) for case in cases.values()
        ]
        yield Axis(
            name=name,
            sizes=tuple(cases),
            seconds=tuple(own for own, _ in every),
            gflops=tuple(flops / own / 1e9 for own, flops in every),
        )


def _seconds(grid: Grid, n_rounds: int) -> float:
    """Return the median time of an epoch of every member."""
    grid.prepare()
    seconds = []
    for _ in range(n_rounds):
        began = time.perf_counter()
        grid.turn()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    help="Epochs timed of each.",
)
@AS_JSON
def scaling(rounds: int, as_json: bool) -> None:
    """Time training against examples, members and width, and fit exponents.

    Example: beatrice bench scaling --rounds 2
    """
    quiet()
    set_compiler("demo")
    printer = RowPrinter(as_json)
    printer.head(HEAD)
    with Progress().stage("scaling") as update:
        for axis in measure(microworld(N_STEPS), rounds, os.cpu_count() or 1, update):
            printer.row(axis)
    printer.text(f"\n{machine()}; {rounds} rounds, the median.")

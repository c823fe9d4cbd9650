"""What mixed precision costs in AUROC: a finished run's encoders, trained once more.

Rows, standardisation, protocol and seeds are the run's; only the operands of matrix
products are rounded. A difference is taken on the same questions and seeds, and its
interval resamples questions.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.stages.presets import RunConfig, with_products
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.sides import sides_of, tokens_of
from benchmarks.stages.train_sides import encode_all, fit_sides
from benchmarks.stages.train_stage import read_codes
from extract.records import SETTINGS, Setting
from extract.rundir import RunDir
from jaxprobe.encoder import Encoder
from jaxprobe.grid import default_blocks, grid_members, join
from jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    cluster_weights,
    interval_of,
    weighted_auroc,
)
from jaxprobe.subsets import N_SUBSETS, SUBSET_NAMES

ALL = "mean of all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedCost:
    """One row of the table.

    Attributes:
      setting: whose answers.
      encoder: families it reads, such as "H", or `ALL`.
      single: test AUROC as the run trained it, mean over seeds.
      mixed: the same in mixed precision.
      low: lower end of the 95 % interval of their difference.
      high: upper end.
      seed_std: of the run's own test AUROC over seeds.
      n: test answers.
    """

    setting: Setting
    encoder: str
    single: float
    mixed: float
    low: float
    high: float
    seed_std: float
    n: int

    def cells(self) -> list[str]:
        """Return the cells of the row in the order of the heading."""
        return [
            self.setting,
            self.encoder,
            f"{self.single:.4f}",
            f"{self.mixed:.4f}",
            f"{self.mixed - self.single:+.4f} [{self.low:+.4f}, {self.high:+.4f}]",
            f"{self.seed_std:.4f}",
        ]


def measure(
    run: RunDir, config: RunConfig, progress: Callable[[int, int], None]
) -> Iterator[MixedCost]:
    """Train every encoder in mixed precision, and yield each row; the run is only read.

    Args:
      run: trained.
      config: its own.
      progress: told what is done and to do.

    Raises:
      ValueError: the run is not trained, or was trained in mixed precision itself.
    """
    if config.encoder.products != "float32":
        raise ValueError(
            "expected a run whose encoders were trained in single precision, found one "
            "made with --mixed; name another run"
        )
    n_blocks = len(default_blocks(config.train.n_seeds))
    for number, setting in enumerate(SETTINGS):
        done = iter(range(number * n_blocks + 1, (number + 1) * n_blocks + 1))
        single = read_codes(run, setting).logits  # before minutes of training

        def tick(done=done) -> None:
            progress(next(done), n_blocks * len(SETTINGS))

        rows, mixed = _mixed_logits(run, config, setting, tick)
        yield from compare(config, rows, single, mixed)


def _mixed_logits(
    run: RunDir, config: RunConfig, setting: Setting, tick: Callable[[], None]
) -> tuple[Rows, np.ndarray]:
    """Train the grid; also what it says of every row, `[n_members, n_rows]`."""
    store, rows = load_rows(run, setting)
    read = tokens_of(run, setting, store, rows, config.stream)
    encoder = Encoder(with_products(config, "bfloat16").encoder, read.dims)
    n_seeds = config.train.n_seeds
    with tempfile.TemporaryDirectory() as folder:
        trained = fit_sides(
            sides_of(read, rows, config.stream),
            rows.labels,
            default_blocks(n_seeds),
            encoder=encoder,
            config=config.train,
            folder=Path(folder),
            key="",
            tick=tick,
        )
    grid = join(trained, grid_members(n_seeds))
    return rows, encode_all(grid, read, len(rows.ids), encoder).logits


def compare(
    config: RunConfig, rows: Rows, single: np.ndarray, mixed: np.ndarray
) -> Iterator[MixedCost]:
    """Compare all encoders in the mean, then every one.

    Args:
      config: of the intervals.
      rows: of a setting.
      single: `[n_members, n_rows]`, seed-major.
      mixed: the same.
    """
    where = rows.where("test")
    labels = rows.labels[where]
    weights = cluster_weights(
        rows.ids[where],
        BootstrapConfig(n_resamples=config.n_bootstrap, seed=config.seed),
    )
    sides = [
        side[:, where].reshape(-1, N_SUBSETS, len(where)) for side in (single, mixed)
    ]
    exact = [_each(side, lambda one: auroc(one, labels).value) for side in sides]
    drawn = [
        _each(side, lambda one: weighted_auroc(one, labels, weights)) for side in sides
    ]
    difference = (drawn[1] - drawn[0]).mean(axis=0)
    every = list(range(N_SUBSETS))
    for name, subsets in [(ALL, every), *((SUBSET_NAMES[k], [k]) for k in every)]:
        low, high = interval_of(difference[subsets].mean(axis=0))
        yield MixedCost(
            setting=rows.setting,
            encoder=name,
            single=float(exact[0][:, subsets].mean()),
            mixed=float(exact[1][:, subsets].mean()),
            low=low,
            high=high,
            seed_std=float(exact[0][:, subsets].mean(axis=1).std()),
            n=len(where),
        )


def _each(logits: np.ndarray, measured: Callable[[np.ndarray], object]) -> np.ndarray:
    """Return what is measured of every member, `[n_seeds, n_subsets, ...]`."""
    return np.array([[measured(one) for one in seed] for seed in logits])

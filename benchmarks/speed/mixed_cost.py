"""What mixed precision costs in AUROC: a finished run's encoders, trained once more.

Rows, standardisation, protocol and seeds are the run's; only the operands of matrix
products are rounded. A difference is taken on the same questions and seeds, and its
interval resamples questions.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.speed.pairing import Pairing, aurocs
from benchmarks.stages.presets import RunConfig, in_mixed_precision
from benchmarks.stages.rows import Rows, load_rows
from benchmarks.stages.sides import sides_of, tokens_of
from benchmarks.stages.train_sides import encode_all, fit_sides
from benchmarks.stages.train_stage import read_codes
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.fit.grid import default_blocks, grid_members, join
from jaxprobe.model.encoder import Encoder

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
    if config.encoder.matmul_dtype != "float32":
        raise ValueError(
            "expected a run whose encoders were trained in single precision, found one "
            "made with --mixed; name another run"
        )
    total = len(SETTINGS) * len(default_blocks(config.train.n_seeds))
    done = itertools.count(1)

    def tick() -> None:
        progress(next(done), total)

    for setting in SETTINGS:
        single = read_codes(run, setting).logits  # before minutes of training
        rows, mixed = _mixed_logits(run, config, setting, tick)
        yield from compare(config, rows, single, mixed)


def _mixed_logits(
    run: RunDir, config: RunConfig, setting: Setting, tick: Callable[[], None]
) -> tuple[Rows, np.ndarray]:
    """Train the grid; also what it says of every row, `[n_members, n_rows]`."""
    store, rows = load_rows(run, setting)
    read = tokens_of(run, setting, store, rows, config.stream)
    encoder = Encoder(in_mixed_precision(config).encoder, read.dims)
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
    pairing = Pairing(rows.ids[where], rows.labels[where], config)
    sides = [
        side[:, where].reshape(-1, N_SUBSETS, len(where)) for side in (single, mixed)
    ]
    every = list(range(N_SUBSETS))
    for name, subsets in [(ALL, every), *((SUBSET_NAMES[k], [k]) for k in every)]:
        before, after = (side[:, subsets].reshape(-1, len(where)) for side in sides)
        own = aurocs(before, pairing.labels).reshape(-1, len(subsets))
        difference = pairing.compare(before, after)
        yield MixedCost(
            setting=rows.setting,
            encoder=name,
            single=float(own.mean()),
            mixed=float(own.mean() + difference.value),
            low=difference.low,
            high=difference.high,
            seed_std=float(own.mean(axis=1).std()),
            n=len(where),
        )

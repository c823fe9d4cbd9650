"""How the time of training grows: with examples, with members, with width.

One workload is varied along one axis at a time, and a power law is fitted to the
seconds of an epoch of every member: `seconds = c * size ** exponent`, by least squares
of the logarithms.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from benchmarks.forecasts.train_work import Workload, turn_flops
from benchmarks.speed.train_grid import Grid

EXAMPLES = (1, 2, 4, 8)  # times the workload's
SEEDS = (1, 3, 6)  # 15 members each
WIDTHS = (1, 2, 4, 8)  # times the workload's projection and hidden width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measured workload.

    Attributes:
      axis: "examples", "members" or "width".
      size: along the axis.
      seconds: of an epoch of every member, the median of the rounds.
      gflops: achieved, by `turn_flops`.
    """

    axis: str
    size: int
    seconds: float
    gflops: float


def _wider(work: Workload, factor: int) -> Workload:
    encoder = dataclasses.replace(
        work.encoder,
        projection=work.encoder.projection * factor,
        hidden=work.encoder.hidden * factor,
    )
    return dataclasses.replace(work, encoder=encoder)


def variants(work: Workload) -> Iterator[tuple[str, int, Workload]]:
    """Yield axis, size and workload; the plain workload lies on every axis."""
    for factor in EXAMPLES:
        longer = dataclasses.replace(work, n_steps=work.n_steps * factor)
        yield "examples", longer.n_examples, longer
    for n_seeds in SEEDS:
        more = dataclasses.replace(work, n_seeds=n_seeds)
        yield "members", len(more.members), more
    for factor in WIDTHS:
        wider = _wider(work, factor)
        yield "width", wider.encoder.hidden, wider


def measure(
    work: Workload, n_rounds: int, at_once: int, update: Callable[[int, int], None]
) -> list[Point]:
    """Time every variant once; what is compiled is compiled before.

    Args:
      work: the plain workload.
      n_rounds: epochs timed of each variant.
      at_once: members trained side by side, as many as cores.
      update: told how many are done, of how many.
    """
    found, cases = [], list(variants(work))
    seconds: dict[Workload, float] = {}  # the plain one is on every axis
    for number, (axis, size, case) in enumerate(cases):
        if case not in seconds:
            seconds[case] = _seconds(Grid(case, case.members, at_once), n_rounds)
        gflops = turn_flops(case, case.members) / seconds[case] / 1e9
        found.append(Point(axis=axis, size=size, seconds=seconds[case], gflops=gflops))
        update(number + 1, len(cases))
    return found


def _seconds(grid: Grid, n_rounds: int) -> float:
    """Return the median time of an epoch of every member."""
    grid.prepare()
    seconds = []
    for _ in range(n_rounds):
        began = time.perf_counter()
        grid.turn()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def exponents(points: list[Point]) -> Mapping[str, float]:
    """Fit `seconds = c * size ** exponent` along each axis."""
    found = {}
    for axis in dict.fromkeys(point.axis for point in points):
        own = [point for point in points if point.axis == axis]
        logs = np.log([(point.size, point.seconds) for point in own])
        found[axis] = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
    return found

"""PyTorch's fastest setting for the encoders, found by trying.

A search along one choice after another: trying all combinations would take longer than
what is measured.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.forecasts.train_work import Member, Workload
from benchmarks.speed.torch_setting import Setting
from benchmarks.speed.train_fleet import started
from jaxprobe.features.subsets import subset_index

Note = Callable[[str], None]


def trial_members(workload: Workload) -> list[Member]:
    """Return encoders of middling cost on which settings are tried."""
    names = ("HPR", "HRA")
    return [
        (subset_index(name), seed) for name in names for seed in range(workload.n_seeds)
    ]


class Search:
    """Looks for PyTorch's fastest setting, one choice after another."""

    def __init__(self, workload: Workload, folder: Path, note: Note) -> None:
        """Time settings of these encoders; `folder` holds their weights."""
        self._workload = workload
        self._folder = folder
        self._note = note

    def rate(self, kind: str, setting: Setting) -> float:
        """Return GFLOP/s of one setting, the better of two short turns."""
        work = self._workload
        grid = kind == "vmap" and setting.block == "grid"
        members = work.members if grid else trial_members(work)
        with started(kind, work, members, self._folder, setting) as fleet:
            fleet.prepare()
            seconds = min(fleet.turn() for _ in range(2))
            found = fleet.flops() / seconds / 1e9
        words = setting.words(stacked=kind == "vmap")
        self._note(f"{kind}: {words}: {found:.1f} GFLOP/s")
        return found

    def rate_or_none(self, kind: str, setting: Setting) -> float | None:
        """The same, or None for a setting that does not run here; it is told why."""
        try:
            return self.rate(kind, setting)
        except ValueError as error:
            self._note(f"{kind}: {setting.words(stacked=False)}: {error}")
            return None

    def best(self, kind: str, start: Setting, choices: Sequence[dict]) -> Setting:
        """Return the fastest: each choice in turn is taken if it is faster.

        Args:
          kind: "loop" or "vmap".
          start: the first setting.
          choices: changes to try, in order, on the best setting so far.
        """
        best, rate = start, self.rate(kind, start)
        for change in choices:
            new = dataclasses.replace(best, **change)
            found = self.rate_or_none(kind, new) if new != best else None
            if found is not None and found > rate:
                best, rate = new, found
        return best


# Begun with what was fastest at the paper's widths; those without a search keep it.
_EAGER = Setting(n_processes=2, n_threads=1, convolution="product", noise="projected")
FIRST = {"loop": dataclasses.replace(_EAGER, compiled=True), "vmap": _EAGER}
LOOP_CHOICES = (
    {"noise": "inputs"},
    {"convolution": "conv1d"},
    {"convolution": "conv2d"},
    {"n_processes": 1, "n_threads": 2},
    {"compiled": False},
)
VMAP_CHOICES = (
    {"noise": "inputs"},
    {"block": "grid"},
    {"compiled": True},
    {"n_processes": 1, "n_threads": 2},
)


def grid_fits(workload: Workload, limit: int = 8 << 30) -> bool:
    """Tell whether one vmap over the grid keeps its activations below `limit` bytes.

    A block keeps some ten arrays of the hidden width for its backward pass.
    """
    config = workload.encoder
    n_positions = len(workload.members) * workload.batch_size * workload.n_tokens
    return 4 * n_positions * config.hidden * 10 * config.n_blocks <= limit


def settings(
    workload: Workload, folder: Path, note: Note, *, search: bool
) -> dict[str, Setting]:
    """Return PyTorch's setting for the loop and for vmap."""
    if not search:
        return dict(FIRST)
    finder = Search(workload, folder, note)
    grid = grid_fits(workload)
    choices = [
        change
        for change in VMAP_CHOICES
        # Compiling is tried for one gradient, not for one per subset.
        if grid or not {"block", "compiled"} & set(change)
    ]
    return {
        "loop": finder.best("loop", FIRST["loop"], LOOP_CHOICES),
        "vmap": finder.best("vmap", FIRST["vmap"], choices),
    }

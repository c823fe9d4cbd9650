"""The stage that chooses encoders and trains the fusion heads."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, settings_of
from extract.run.directory import RunDir
from extract.run.results import ON_REQUEST
from extract.run.stages import Stage, side_by_side
from jaxprobe import checkpoint
from jaxprobe.checkpoint import load_cache
from jaxprobe.config import SELECT_PRESETS, SelectConfig, set_compiler
from jaxprobe.detector import HeadName
from jaxprobe.features.subsets import N_SUBSETS, subset_index
from jaxprobe.pool import Pool, branch_setting, pool_names
from jaxprobe.stage import encoder_folders, run_branches, run_pool, run_selection
from selection.greedy import (
    GreedyConfig,
    Selection,
    fit_sets,
    fused_probability,
    select,
    slots_for,
)

SINGLES = tuple(subset_index(letter) for letter in "HPRA")


@dataclasses.dataclass(frozen=True)
class HeadTrainer:
    """Trains fusion heads on the pool of one setting.

    Attributes:
      pool: outputs of the encoders.
      config: heads and search, with the run's seed.
    """

    pool: Pool
    config: SelectConfig

    def search(
        self,
        candidates: Sequence[int] | None = None,
        greedy: GreedyConfig | None = None,
    ) -> Selection:
        """Select encoders greedily, by default with the configured margin.

        Args:
          candidates: pool positions to search; None searches all.
          greedy: another margin or limit.
        """
        return select(
            self.pool.train,
            self.pool.valid,
            config=self.config.head,
            train_config=self.config.train,
            greedy=greedy or GreedyConfig(margin=self.config.margin),
            candidates=candidates,
        )

    def fit(self, members: tuple[int, ...]) -> Selection:
        """Train the heads of a given set, in the search's shapes if they fit."""
        shape = slots_for(self.config.head, len(members))
        heads = fit_sets(
            [members],
            self.pool.train,
            self.pool.valid,
            config=shape,
            train_config=self.config.train,
            n_calls=self.pool.train.n_pool,
        )
        params, info = jax.tree.map(lambda x: x[0], tuple(heads))
        auroc = float(info.best_auroc.mean())
        return Selection(members, auroc, (), shape, params, info)

    def scores(self, selection: Selection) -> np.ndarray:
        """Return P(correct) of every row by a set's heads, `[n_seeds, n_rows]`."""
        return fused_probability(selection, self.pool.all_rows, per_seed=True)


def load_results(path: Path, key: str, stage: str) -> dict[str, np.ndarray]:
    """Read the arrays that a stage on request has saved.

    Raises:
      ValueError: the file is missing, damaged, or made from other inputs.
    """
    arrays = load_cache(path, key)
    if arrays is None:
        raise ValueError(
            f"{path} is missing or damaged; run `{ON_REQUEST[stage]}` again"
        )
    return arrays


def _summary(selection: Selection, margin: float) -> dict[str, Any]:
    """Return how the search went, as JSON values."""
    last = selection.path[-1]
    gain = last.auroc - selection.auroc
    stop = (
        "the pool is used up"
        if last.accepted
        else f"the best addition gains {gain:+.4f}, not more than {margin:g}"
    )
    return {
        "members": list(selection.members),
        "n_slots": selection.config.n_slots,
        "stop": stop,
        "rounds": [
            {
                "added": step.best,
                "auroc": step.auroc,
                "candidates": {
                    str(i): float(aurocs.mean())
                    for i, aurocs in zip(step.candidates, step.aurocs, strict=True)
                },
            }
            for step in selection.path
            if step.accepted
        ],
    }


def selection_summary(run: RunDir, branch: HeadName) -> dict[str, Any]:
    """Return how the search went, with printed names."""
    _, summary = run_selection(run, branch)
    names = pool_names(branch, range(2 * N_SUBSETS))
    return {
        "rounds": [
            {
                "added": names[step["added"]],
                "auroc": step["auroc"],
                "candidates": {names[int(i)]: a for i, a in step["candidates"].items()},
            }
            for step in summary["rounds"]
        ],
        "selected": [names[i] for i in summary["members"]],
        "stop": summary["stop"],
    }


def _select_setting(
    run: RunDir, config: SelectConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    """Select in a setting, for every branch that scores its answers."""
    heads = HeadTrainer(run_pool(run, setting), config)
    for branch in run_branches(run):
        if branch_setting(branch) != setting:
            continue
        if branch == "single_pass":  # searches the with-context half of the same pool
            selections = {"champion": heads.search(range(N_SUBSETS))}
        else:
            everything = tuple(range(heads.pool.train.n_pool))
            selections = {
                "champion": heads.search(),
                "late_fusion_singles": heads.fit(SINGLES),
                "late_fusion_all": heads.fit(everything),
            }
        tree = {
            name: {
                "params": selection.params,
                "scores": heads.scores(selection),
            }
            for name, selection in selections.items()
        }
        summary = _summary(selections["champion"], config.margin)
        checkpoint.save(run.selection / branch, tree, summary)
        tick()


def _select(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    work = partial(_select_setting, run, config.seeded(run.seed))
    # All settings at once, for the same reason as in training.
    side_by_side(work, settings_of(run), update, len(run_branches(run)))


SELECT = Stage(
    name="select",
    inputs=lambda run: [*row_files(run), *encoder_folders(run)],
    outputs=lambda run: [run.selection],
    work=_select,
    presets=SELECT_PRESETS,
    is_open=True,
)

"""The stage that chooses encoders and trains the fusion heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, settings_of
from extract.run.directory import RunDir
from extract.run.results import ON_REQUEST
from extract.run.stages import Stage, side_by_side
from jaxprobe import checkpoint
from jaxprobe.checkpoint import Cache
from jaxprobe.config import SELECT_PRESETS, SelectConfig, set_compiler
from jaxprobe.detector import HeadName
from jaxprobe.features.subsets import N_SUBSETS
from jaxprobe.pool import pool_names
from jaxprobe.stage import encoder_folders, run_branches, run_pool, run_selection
from selection.greedy import HeadTrainer, Selection, select_heads


def load_part(cache: Cache, name: str, stage: str) -> dict[str, np.ndarray]:
    """Read the arrays of a part that a stage on request has saved.

    Raises:
      ValueError: the part is missing, damaged, or made from other inputs.
    """
    arrays = cache.load(name)
    if arrays is None:
        raise ValueError(
            f"{cache.path(name)} is missing or damaged; run `{ON_REQUEST[stage]}` again"
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
    pool = run_pool(run, setting)
    heads = HeadTrainer(pool, config)
    for branch, champion in select_heads({setting: pool}, config).items():
        selections = {"champion": champion}
        if branch != "single_pass":
            n_families = pool.n_subsets.bit_length()
            singles = tuple(2**family - 1 for family in range(n_families))
            selections["late_fusion_singles"] = heads.fit(singles)
            selections["late_fusion_all"] = heads.fit(tuple(range(pool.train.n_pool)))
        tree = {
            name: {"params": selection.params, "scores": heads.scores(selection)}
            for name, selection in selections.items()
        }
        checkpoint.save(run.selection / branch, tree, _summary(champion, config.margin))
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
)

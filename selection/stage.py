"""The stage that chooses encoders and trains the fusion heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.forecast import Forecast
from extract.run.stages import Stage, side_by_side
from jaxprobe import checkpoint
from jaxprobe.compiler import set_compiler
from jaxprobe.detector import HeadName
from jaxprobe.features.subsets import N_SUBSETS, subset_index
from jaxprobe.fit.stage import encoder_folders
from jaxprobe.model.fusion import PoolOutputs
from jaxprobe.pool import BRANCHES, branch_setting, pool_name, pools, read_selection
from jaxprobe.settings import SELECT_PRESETS, SelectConfig
from selection.greedy import (
    GreedyConfig,
    Selection,
    fit_sets,
    fused_probability,
    select,
    slots_for,
)

SINGLES = tuple(subset_index(letter) for letter in "HPRA")


def fixed_set(
    members: tuple[int, ...],
    train: PoolOutputs,
    valid: PoolOutputs,
    config: SelectConfig,
) -> Selection:
    """Train the heads of a given set, in the search's shapes if they fit."""
    shape = slots_for(config.head, len(members))
    heads = fit_sets(
        [members],
        train,
        valid,
        config=shape,
        train_config=config.train,
        n_calls=train.n_pool,
    )
    params, info = jax.tree.map(lambda x: x[0], tuple(heads))
    return Selection(members, float(info.best_auroc.mean()), (), shape, params, info)


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
                "added": r.best,
                "auroc": r.auroc,
                "candidates": dict(
                    zip(
                        map(str, r.candidates),
                        map(float, r.aurocs.mean(axis=1)),
                        strict=True,
                    )
                ),
            }
            for r in selection.path
            if r.accepted
        ],
    }


def _save_selection(
    run: RunDir,
    config: SelectConfig,
    branch: HeadName,
    found: dict[str, Selection],
    everyone: PoolOutputs,
) -> None:
    tree = {
        name: {
            "params": one.params,
            "scores": fused_probability(one, everyone, per_seed=True),
        }
        for name, one in found.items()
    }
    summary = _summary(found["champion"], config.margin)
    checkpoint.save(run.path / "selection" / branch, tree, summary)


def _select_setting(
    run: RunDir, config: SelectConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    """Select in a setting, for every branch that scores its answers."""
    (train, valid, everyone), _ = pools(run, setting)
    # The single pass searches the with-context half of the same pool.
    branches = [b for b in BRANCHES if branch_setting(b) == setting]
    for branch in branches:
        champion = select(
            train,
            valid,
            config=config.head,
            train_config=config.train,
            greedy=GreedyConfig(margin=config.margin),
            candidates=range(N_SUBSETS) if branch == "single_pass" else None,
        )
        found = {"champion": champion}
        if branch != "single_pass":
            every = tuple(range(train.n_pool))
            found["late_fusion_singles"] = fixed_set(SINGLES, train, valid, config)
            found["late_fusion_all"] = fixed_set(every, train, valid, config)
        _save_selection(run, config, branch, found, everyone)
        tick()


def _select(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    # Both settings at once, for the same reason as in training.
    side_by_side(partial(_select_setting, run, config), SETTINGS, update, len(BRANCHES))


def selection_summary(run: RunDir, branch: HeadName) -> dict[str, Any]:
    """Return how the search went, with printed names."""
    _, found = read_selection(run, branch)

    def named(candidates: dict[str, float]) -> dict[str, float]:
        return {pool_name(branch, int(i)): a for i, a in candidates.items()}

    rounds = [
        {
            "added": pool_name(branch, r["added"]),
            "auroc": r["auroc"],
            "candidates": named(r["candidates"]),
        }
        for r in found["rounds"]
    ]
    return {
        "rounds": rounds,
        "selected": [pool_name(branch, i) for i in found["members"]],
        "stop": found["stop"],
    }


def _forecast(run: RunDir, config: SelectConfig) -> Forecast:
    """Count the heads of one round of every search, and what the pools hold."""
    n_heads = held = 0
    for setting in SETTINGS:
        (train, valid, everyone), _ = pools(run, setting)
        n_calls = sum(branch_setting(b) == setting for b in BRANCHES)
        n_heads += n_calls * train.n_pool * train.n_seeds
        held += sum(np.asarray(x.outputs).nbytes for x in (train, valid, everyone))
    return Forecast(
        stage="select",
        memory_bytes=held,
        basis=(
            f"{n_heads} heads in the first round of all searches, at most "
            f"{config.train.max_epochs} epochs each; how many rounds follow is what "
            "the search finds out"
        ),
    )


SELECT = Stage(
    name="select",
    inputs=lambda run: [run.labels, *encoder_folders(run)],
    outputs=lambda run: [run.path / "selection"],
    work=_select,
    presets=SELECT_PRESETS,
    forecast=_forecast,
)

"""The stage that chooses encoders and trains the fusion heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.stages.presets import RunConfig
from benchmarks.stages.rows import Rows, load_rows, partners
from benchmarks.stages.stage import Progress, Stage, Update, side_by_side
from benchmarks.stages.train_stage import encoder_folders, read_codes
from extract.records import SETTINGS, Setting
from extract.run.directory import RunDir
from jaxprobe import checkpoint
from jaxprobe.detector import HeadName
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES, subset_index
from jaxprobe.model.encoder import MemberOutputs
from jaxprobe.model.fusion import PoolOutputs, pool_outputs
from selection.greedy import (
    GreedyConfig,
    Selection,
    fit_sets,
    fused_probability,
    select,
    slots_for,
)

SINGLES = tuple(subset_index(letter) for letter in "HPRA")
BRANCHES: tuple[HeadName, ...] = ("closed_book", "with_context", "single_pass")
CodesOf = Callable[[RunDir, Setting], MemberOutputs]


def branch_setting(branch: HeadName) -> Setting:
    """Return the setting whose answers a branch scores."""
    return "closed_book" if branch == "closed_book" else "with_context"


def reads(branch: HeadName, members: list[int]) -> tuple[tuple[Setting, str], ...]:
    """Return (pass, subset) of pool positions; see `setting_codes`."""
    own = branch_setting(branch)
    return tuple(
        (own if i < N_SUBSETS else "closed_book", SUBSET_NAMES[i % N_SUBSETS])
        for i in members
    )


def setting_codes(
    run: RunDir, setting: Setting, codes_of: CodesOf = read_codes
) -> tuple[tuple[MemberOutputs, ...], Rows]:
    """Return the codes of a setting's pool, pass by pass, and its rows.

    With context the pool is the with-context encoders, then the closed-book ones
    reading the closed-book pass of the same question.

    Args:
      run: with trained encoders.
      setting: whose answers are scored.
      codes_of: gives the codes of a pass; the run's own encoders unless said otherwise.
    """
    _, rows = load_rows(run, setting)
    own = codes_of(run, setting)
    if setting == "closed_book":
        return (own,), rows
    _, cached_rows = load_rows(run, "closed_book")
    cached = codes_of(run, "closed_book")
    return (own, _at(cached, partners(rows, cached_rows))), rows


def _at(codes: MemberOutputs, where: np.ndarray) -> MemberOutputs:
    return MemberOutputs(codes.logits[:, where], codes.pooled[:, where])


def _pool(
    codes: tuple[MemberOutputs, ...], rows: Rows, where: np.ndarray, n_seeds: int
) -> PoolOutputs:
    return pool_outputs(
        tuple(_at(c, where) for c in codes), n_seeds, rows.labels[where]
    )


def pools(
    run: RunDir, config: RunConfig, setting: Setting, codes_of: CodesOf = read_codes
) -> tuple[tuple[PoolOutputs, PoolOutputs, PoolOutputs], Rows]:
    """Return a setting's pool on the training, the validation and all rows."""
    codes, rows = setting_codes(run, setting, codes_of)
    train, valid, everyone = (
        _pool(codes, rows, where, config.train.n_seeds)
        for where in (
            rows.where("train"),
            rows.where("validation"),
            np.arange(len(rows.ids)),
        )
    )
    return (train, valid, everyone), rows


def fixed_set(
    members: tuple[int, ...], train: PoolOutputs, valid: PoolOutputs, config: RunConfig
) -> Selection:
    """Train the heads of a given set, in the search's shapes if they fit."""
    shape = slots_for(config.fusion, len(members))
    heads = fit_sets(
        [members],
        train,
        valid,
        config=shape,
        train_config=config.fusion_train,
        n_calls=train.n_pool,
    )
    params, info = jax.tree.map(lambda x: x[0], tuple(heads))
    return Selection(members, float(info.best_auroc.mean()), (), shape, params, info)


def _story(selection: Selection, margin: float) -> dict[str, Any]:
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
    config: RunConfig,
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
    story = _story(found["champion"], config.margin)
    checkpoint.save(run.path / "selection" / branch, tree, story)


def _select_setting(
    run: RunDir, config: RunConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    """Select in a setting, for every branch that scores its answers."""
    (train, valid, everyone), _ = pools(run, config, setting)
    # The single pass searches the with-context half of the same pool.
    branches = [b for b in BRANCHES if branch_setting(b) == setting]
    for branch in branches:
        champion = select(
            train,
            valid,
            config=config.fusion,
            train_config=config.fusion_train,
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


def _select(run: RunDir, config: RunConfig, update: Update, progress: Progress) -> None:
    # Both settings at once, for the same reason as in training.
    side_by_side(partial(_select_setting, run, config), SETTINGS, update, len(BRANCHES))


def read_selection(
    run: RunDir, branch: HeadName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a branch's heads and scores, and how the search went."""
    return checkpoint.restore(run.path / "selection" / branch)


def pool_name(branch: HeadName, index: int) -> str:
    """Return the printed name of a pool position: [HP] with context, (HA) without."""
    ((where, name),) = reads(branch, [index])
    return f"({name})" if where == "closed_book" else f"[{name}]"


def selection_story(run: RunDir, branch: HeadName) -> dict[str, Any]:
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


SELECT = Stage(
    name="select",
    inputs=lambda run: [run.labels, *encoder_folders(run)],
    outputs=lambda run: [run.path / "selection"],
    work=_select,
)

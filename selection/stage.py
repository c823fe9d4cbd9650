"""The stage that chooses encoders and trains the fusion heads, and its optimism.

Optimism: how much too good a selection looks on the rows that it was selected on. One
validation split decides early stopping, layer, heads, encoders and calibration, as in
the paper. On request the validation and in-domain test questions are split anew, at
random, into a half that the greedy search sees and a half that it does not; the
difference of its AUROC on the two halves is its optimism. Halves are exchangeable, so
anything chosen beforehand has none: one encoder of all families is the control. The
encoders themselves stay those of the run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import row_files, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import ResultRow, publish, rows_file
from beatrice.extract.run.stages import Stage, side_by_side
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import (
    Pool,
    pool_names,
    run_branches,
    run_pool,
    run_selection,
)
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import SELECT_PRESETS, SelectConfig, set_compiler
from beatrice.jaxprobe.detector import HeadName
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.fusion import PoolOutputs
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import Rows
from beatrice.jaxprobe.train import encoder_folders
from beatrice.selection.greedy import HeadTrainer, Selection, select_heads

EXPERIMENT = "optimism"
N_SPLITS = 20  # of validation and test questions


def load_part(cache: Cache, name: str, verb: str) -> dict[str, np.ndarray]:
    """Read the arrays of a part that a stage on request has saved."""
    arrays = cache.load(name)
    if arrays is None:
        raise ValueError(
            f"{cache.path(name)} is missing or damaged; run `beatrice {verb}` again"
        )
    return arrays


def _summary(selection: Selection, margin: float) -> dict[str, Any]:
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
    for branch, champion in select_heads({setting: pool}, config, tick).items():
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
        tick()  # of the search, and of the sets beside it


def _select(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    work = partial(_select_setting, run, config.seeded(run.seed))
    # All settings at once, for the same reason as in training.
    side_by_side(work, settings_of(run), update, 2 * len(run_branches(run)))


SELECT = Stage(
    name="select",
    inputs=lambda run: [*row_files(run), *encoder_folders(run)],
    outputs=lambda run: [run.selection],
    work=_select,
    presets=SELECT_PRESETS,
)


def halves(rows: Rows, number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the labelled in-domain questions that no encoder was trained on.

    Returns:
      Rows that a search may see and rows that it may not, indices into the store. Each
      set of questions is split evenly, and a rewording goes with its question.
    """
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    is_seen = np.zeros(len(rows.ids), bool)
    for dataset in np.unique(rows.datasets[where]):
        ids = np.unique(rows.ids[where[rows.datasets[where] == dataset]])
        drawn = np.random.default_rng([seed, number]).permutation(ids)
        is_seen |= np.isin(rows.ids, drawn[: len(ids) // 2])
    return where[is_seen[where]], where[~is_seen[where]]


def searched_on(pool: Pool, seen: np.ndarray) -> Pool:
    """Return the pool with other validation rows, in a shape that all splits share."""
    rows = pool.rows
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    weights = np.isin(where, seen).astype(np.float32)
    outputs = np.asarray(pool.all_rows.outputs)[..., where]
    labels = rows.labels[where].astype(np.float32)
    return pool._replace(valid=PoolOutputs(outputs, labels, weights))


def gaps(
    pool: Pool, config: SelectConfig, seen: np.ndarray, unseen: np.ndarray
) -> dict[str, np.ndarray]:
    """Return AUROC on the rows seen minus AUROC on the rows unseen, mean over seeds.

    Returns:
      `[1]` by detector: the searched set, and one encoder of all families.
    """
    heads = HeadTrainer(searched_on(pool, seen), config)
    every_family = np.asarray(pool.all_rows.outputs)[:, pool.n_subsets - 1, -1]
    scores = {"champion": heads.scores(heads.search()), "early_fusion": every_family}

    def mean(scored: np.ndarray, where: np.ndarray) -> float:
        labels = pool.rows.labels[where]
        return float(
            np.mean([auroc(seed_scores[where], labels).value for seed_scores in scored])
        )

    return {
        name: np.array([mean(s, seen) - mean(s, unseen)]) for name, s in scores.items()
    }


def _gap_rows(every: dict[str, np.ndarray], rows: Rows, n: int) -> list[ResultRow]:
    """Return means over the splits; the interval holds 95 % of the splits' own."""
    at = {"setting": rows.setting, "dataset": IN_DOMAIN, "split": "test", "n": n}
    at |= {"experiment": EXPERIMENT, "metric": "auroc_gap"}
    result = []
    for name, values in every.items():
        low, high = map(float, np.quantile(values, [0.025, 0.975]))
        ends = {"ci_low": low, "ci_high": high}
        result.append(
            ResultRow(detector=name, value=float(values.mean()), **ends, **at)
        )
    return result


def _optimism_folder(run: RunDir) -> Path:
    return run.path / EXPERIMENT


def _optimism_inputs(run: RunDir) -> list[Path]:
    return [run.labels, *encoder_folders(run)]


def _measure(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    config = config.seeded(run.seed)
    cache = Cache(
        _optimism_folder(run),
        " ".join(run.hash_inputs(*_optimism_inputs(run)).values()),
    )
    rows: dict[Setting, list[ResultRow]] = {}

    def work(setting: Setting, tick: Callable[[], None]) -> None:
        pool, splits = run_pool(run, setting), []
        for number in range(N_SPLITS):
            name = f"{setting}.{number}"
            split = cache.load(name)
            if split is None:
                split = gaps(pool, config, *halves(pool.rows, number, run.seed))
                cache.save(name, split)
            splits.append(split)
            tick()
        every = {n: np.concatenate([split[n] for split in splits]) for n in splits[0]}
        rows[setting] = _gap_rows(
            every, pool.rows, len(halves(pool.rows, 0, run.seed)[1])
        )

    settings = settings_of(run)
    side_by_side(work, settings, update, len(settings) * N_SPLITS)
    publish(run, EXPERIMENT, [row for s in settings for row in rows[s]], progress)


OPTIMISM = Stage(
    name=EXPERIMENT,
    verb="select --optimism",
    inputs=_optimism_inputs,
    outputs=lambda run: [_optimism_folder(run), rows_file(run, EXPERIMENT)],
    work=_measure,
    presets=SELECT_PRESETS,
    section="select",
)

"""Greedy forward selection of the encoders to fuse, on validation AUROC.

Algorithm 1 of the paper (appendix B). In each round, every encoder not yet selected is
added to the set in turn and a fresh head is trained per seed; the best addition is kept
while it helps by more than a margin. All heads of all rounds use one compiled function.

A second stage measures optimism: it splits the validation and in-domain test questions
at random into a half that the search sees and a half that it does not, and compares the
AUROC on the two. The halves are exchangeable, so anything chosen beforehand has no
optimism; the encoder of all families is the control.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import n_cores
from beatrice.extract.run.rows import ResultRow, publish, rows_file
from beatrice.extract.run.stages import Stage, side_by_side
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import Pool, run_branches, run_pool
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    PROTOCOL,
    SELECT_PRESETS,
    FusionConfig,
    SelectConfig,
    TrainConfig,
    set_compiler,
    usual_jax,
)
from beatrice.jaxprobe.detector import HeadName, branch_setting, branches_of
from beatrice.jaxprobe.encoder import Params
from beatrice.jaxprobe.fusion import (
    FusionHead,
    PoolOutputs,
    apply_head,
    fit_heads,
    slots_of,
)
from beatrice.jaxprobe.linear import both_classes
from beatrice.jaxprobe.loop import FitInfo
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.stages import encoder_folders


class NoSignalError(ValueError):
    """No encoder of the pool ranks validation answers better than chance."""


class SearchRound(NamedTuple):
    """One round of the search."""

    candidates: tuple[int, ...]  # pool positions tried, in pool order
    # `[n_candidates, n_seeds]` validation AUROC of the set with each candidate.
    aurocs: np.ndarray
    best: int  # pool position of the best candidate
    auroc: float  # its seed-averaged validation AUROC
    accepted: bool  # whether the gain is larger than the margin


class Selection(NamedTuple):
    """The selected set and its heads."""

    members: tuple[int, ...]  # pool positions in pool order
    auroc: float  # seed-averaged validation AUROC of the fused set
    # Every round; the last one may be the round that did not help.
    path: tuple[SearchRound, ...]
    config: FusionConfig  # shape of the heads; may have more slots than configured
    # Weights of the heads, leaves `[n_seeds, ...]`. A head depends only on (set, seed),
    # so retraining at the end would give the heads of the search again.
    params: Params
    info: FitInfo  # how the heads were fitted


class Heads(NamedTuple):
    """Trained heads of several sets; leaves are `[n_sets, n_seeds, ...]`."""

    params: Params
    info: FitInfo

    def of_set(self, i: int) -> tuple[Params, FitInfo]:
        """Return the heads of one set, leaves `[n_seeds, ...]`."""
        return jax.tree.map(lambda x: x[i], tuple(self))


def slots_for(config: FusionConfig, n_members: int) -> FusionConfig:
    """Return a config with slots doubled until a set fits, to compile rarely."""
    n_slots = config.n_slots
    while n_slots < n_members:
        n_slots *= 2
    return dataclasses.replace(config, n_slots=n_slots)


def fit_sets(
    sets: Sequence[tuple[int, ...]],
    train: PoolOutputs,
    valid: PoolOutputs,
    *,
    config: FusionConfig,
    train_config: TrainConfig,
    n_calls: int | None = None,
    n_at_once: int | None = None,
) -> Heads:
    """Train a head for every set and seed in one call, padded to `n_calls` sets.

    `n_at_once` parts train in parallel; default: one per core on a CPU, else one.
    """
    # On a CPU, a core per part: a head's operations are too small to share cores.
    if n_at_once is None:
        n_at_once = n_cores() if jax.default_backend() == "cpu" else 1
    n_sets = max(n_calls or 0, len(sets))
    n_parts = min(n_at_once, n_sets)
    padded = [*sets, *[()] * (-(-n_sets // n_parts) * n_parts - len(sets))]
    pairs = (slots_of(members, config.n_slots) for members in padded)
    slots, masks = map(np.stack, zip(*pairs, strict=True))
    # Each part has every n-th set, since the empty sets are all at the end.
    shards = [(slots[i::n_parts], masks[i::n_parts]) for i in range(n_parts)]
    head = FusionHead(config)

    def train_shard(shard: tuple[np.ndarray, np.ndarray]) -> Any:
        with usual_jax():
            return fit_heads(*shard, train, valid, head=head, config=train_config)

    with ThreadPoolExecutor(n_parts) as pool:
        trained = list(pool.map(train_shard, shards))

    def merge(*shards: np.ndarray) -> np.ndarray:
        stacked = np.stack(shards, axis=1)
        n_rows = stacked.shape[0] * stacked.shape[1]
        return stacked.reshape(n_rows, *stacked.shape[2:])[: len(sets)]

    return Heads(*jax.tree.map(merge, *trained))


def fused_probability(selection: Selection, outputs: PoolOutputs) -> np.ndarray:
    """Return P(correct) from the heads of each seed, `[n_seeds, n_examples]`."""
    slots, mask = slots_of(selection.members, selection.config.n_slots)
    head = FusionHead(selection.config)
    logits = [
        apply_head(
            jax.tree.map(lambda x, s=s: x[s], selection.params),
            slots,
            mask,
            outputs,
            np.int32(s),
            head=head,
        )
        for s in range(outputs.n_seeds)
    ]
    return np.asarray(jax.nn.sigmoid(np.stack(logits)))


@dataclasses.dataclass(frozen=True)
class HeadTrainer:
    """Trains fusion heads on the pool of one setting."""

    pool: Pool
    config: SelectConfig  # training protocol, and shape of the heads (see `shape`)

    def shape(self, n_members: int) -> FusionConfig:
        """Return the shape of heads with slots for `n_members` encoders."""
        return slots_for(self.config.head, n_members)

    def fit_sets(self, sets: Sequence[tuple[int, ...]]) -> Heads:
        """Train heads for sets of equal size, with the executable of the search."""
        return fit_sets(
            sets,
            self.pool.train,
            self.pool.valid,
            config=self.shape(len(sets[0])),
            train_config=self.config.train,
            n_calls=self.pool.train.n_pool,
        )

    def search(
        self,
        candidates: Sequence[int] | None = None,
        *,
        margin: float | None = None,
        max_encoders: int | None = None,
    ) -> Selection:
        """Select encoders by greedy forward search among candidates (None: all).

        The margin is a gain in seed-averaged validation AUROC; default: the config's.
        """
        valid, n_pool = self.pool.valid, self.pool.train.n_pool
        used = np.asarray(valid.labels)[np.asarray(valid.weights) > 0]
        both_classes(used, len(used), "validation")
        margin = self.config.margin if margin is None else margin
        searched = range(n_pool) if candidates is None else sorted(set(candidates))
        limit = min(len(searched), max_encoders or n_pool)
        chosen: tuple[int, ...] = ()
        auroc, best_heads, path = 0.5, None, []
        while len(chosen) < limit:
            left = tuple(c for c in searched if c not in chosen)
            sets = [tuple(sorted((*chosen, c))) for c in left]
            heads = self.fit_sets(sets)
            aurocs = heads.info.best_auroc
            top = int(np.argmax(aurocs.mean(axis=1)))
            mean = float(aurocs[top].mean())
            accepted = mean - auroc > margin
            path.append(SearchRound(left, aurocs, left[top], mean, accepted))
            if not accepted:
                break
            chosen, auroc, best_heads = sets[top], mean, heads.of_set(top)
        if best_heads is None:
            raise NoSignalError(
                "no encoder reaches a validation AUROC above "
                f"{0.5 + margin:.4f} (best: {path[0].auroc:.4f}), so there is no "
                "signal to select from; check the labels or use more training rows"
            )
        shape = self.shape(len(chosen))
        return Selection(chosen, auroc, tuple(path), shape, *best_heads)

    def fit(self, members: tuple[int, ...]) -> Selection:
        """Train heads for a given set."""
        params, info = self.fit_sets([members]).of_set(0)
        auroc = float(info.best_auroc.mean())
        return Selection(members, auroc, (), self.shape(len(members)), params, info)

    def scores(self, selection: Selection) -> np.ndarray:
        """Return P(correct) of every row from the set's heads, `[n_seeds, n_rows]`."""
        return fused_probability(selection, self.pool.all_rows)


@usual_jax()
def select_heads(
    pools: Mapping[Setting, Pool],
    config: SelectConfig,
    tick: Callable[[], None] = lambda: None,
) -> dict[HeadName, Selection]:
    """Select encoders for every branch that scores answers of the given settings.

    The single-pass branch searches only the with-context half of the with-context pool.
    `tick` is called after each branch.
    """
    selections = {}
    for branch in branches_of(tuple(pools)):
        pool = pools[branch_setting(branch)]
        searched = range(pool.n_subsets) if branch == "single_pass" else None
        selections[branch] = HeadTrainer(pool, config).search(searched)
        tick()
    return selections


EXPERIMENT = "optimism"
N_SPLITS = 20  # random splits of the validation and test questions


def load_part(cache: Cache, name: str, verb: str) -> dict[str, np.ndarray]:
    """Read the arrays of a part saved by an optional stage (run with `verb`)."""
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


def _select_setting(
    run: RunDir, config: SelectConfig, setting: Setting, tick: Callable[[], None]
) -> None:
    """Select encoders for every branch that scores a setting's answers."""
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
        tick()  # the second per branch: `select_heads` has made the first


def select_run(
    run: RunDir, config: SelectConfig, update: Update, progress: Progress
) -> None:
    """Select the encoders of all of a run's settings, and save their heads."""
    set_compiler(run.preset)
    work = partial(_select_setting, run, config.seeded(run.seed))
    # All settings run in parallel, for the same reason as in training.
    side_by_side(work, settings_of(run), update, 2 * len(run_branches(run)))


def split_in_halves(
    rows: StoreRows, number: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split the labelled in-domain questions that no encoder was trained on.

    Returned are indices of the rows that a search may see and of those that it may not.
    Each question set is split evenly, and a rewording stays with its question.
    """
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    is_seen = np.zeros(len(rows.ids), bool)
    for dataset in np.unique(rows.datasets[where]):
        ids = np.unique(rows.ids[where[rows.datasets[where] == dataset]])
        drawn = np.random.default_rng([seed, number]).permutation(ids)
        is_seen |= np.isin(rows.ids, drawn[: len(ids) // 2])
    return where[is_seen[where]], where[~is_seen[where]]


def pool_with_validation(pool: Pool, seen: np.ndarray) -> Pool:
    """Return the pool with `seen` as validation rows, of one shape for all splits."""
    rows = pool.rows
    where = np.concatenate([rows.where("validation"), rows.where("test")])
    weights = np.isin(where, seen).astype(np.float32)
    outputs = np.asarray(pool.all_rows.outputs)[..., where]
    labels = rows.labels[where].astype(np.float32)
    questions = np.unique(rows.ids[where], return_inverse=True)[1].astype(np.int32)
    return pool._replace(valid=PoolOutputs(outputs, labels, weights, questions))


def gaps(
    pool: Pool, config: SelectConfig, seen: np.ndarray, unseen: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the AUROC on seen rows minus that on unseen rows, averaged over seeds.

    `[1]` for each detector: the set found by the search, and the encoder of all
    families. NaN if a half has one class, or no encoder beats chance on the seen half.
    """
    heads = HeadTrainer(pool_with_validation(pool, seen), config)
    every_family = np.asarray(pool.all_rows.outputs)[:, pool.n_subsets - 1, -1]

    def gap(scored: np.ndarray) -> np.ndarray:
        seen_auroc, unseen_auroc = (
            np.mean([auroc(x[where], pool.rows.labels[where]).value for x in scored])
            for where in (seen, unseen)
        )
        return np.array([seen_auroc - unseen_auroc])

    control = gap(every_family)
    champion = np.full(1, np.nan)
    if np.isfinite(control):
        with contextlib.suppress(NoSignalError):  # other splits are still measured
            champion = gap(heads.scores(heads.search()))
    return {"champion": champion, "early_fusion": control}


def _gap_rows(every: dict[str, np.ndarray], rows: StoreRows, n: int) -> list[ResultRow]:
    """Return the mean gap over defined splits, and the interval of 95 % of them."""
    at = {"setting": rows.setting, "dataset": IN_DOMAIN, "split": "test", "n": n}
    at |= {"experiment": EXPERIMENT, "metric": "auroc_gap"}
    result = []
    for name, values in every.items():
        defined, measured = values[np.isfinite(values)], {"value": None}
        if len(defined):
            low, high = map(float, np.quantile(defined, [0.025, 0.975]))
            measured = {"value": float(defined.mean()), "ci_low": low, "ci_high": high}
        reason = None
        if n_missing := len(values) - len(defined):
            reason = (
                f"{n_missing} of {len(values)} splits: a half has one class, or no "
                "encoder ranks it better than chance"
            )
        result.append(ResultRow(detector=name, reason=reason, **measured, **at))
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
    hashes = run.hash_inputs(*_optimism_inputs(run)).values()
    cache = Cache(_optimism_folder(run), f"{PROTOCOL} {' '.join(hashes)} {config}")
    rows: dict[Setting, list[ResultRow]] = {}

    def work(setting: Setting, tick: Callable[[], None]) -> None:
        pool, splits = run_pool(run, setting), []
        for number in range(N_SPLITS):
            name = f"{setting}.{number}"
            split = cache.load(name)
            if split is None:
                split = gaps(
                    pool, config, *split_in_halves(pool.rows, number, run.seed)
                )
                cache.save(name, split)
            splits.append(split)
            tick()
        every = {n: np.concatenate([split[n] for split in splits]) for n in splits[0]}
        rows[setting] = _gap_rows(
            every, pool.rows, len(split_in_halves(pool.rows, 0, run.seed)[1])
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
    identity=lambda config: {"heads": str(config)},
    presets=SELECT_PRESETS,
    section="select",
)

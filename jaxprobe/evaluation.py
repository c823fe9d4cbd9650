"""From scores to rows: AUROC and AUPRC of every detector on every set.

A detector's number is the mean over its training seeds. Its interval resamples
questions, all seeds and both wordings of a context together, so it is the interval
of the mean that is printed.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from extract.run.directory import RunDir
from extract.run.manifest import Preset
from extract.run.results import ResultRow
from jaxprobe.features.rows import Rows
from jaxprobe.metrics import (
    BootstrapConfig,
    Metric,
    auprc,
    auroc,
    cluster_weights,
    interval_of,
    weighted_auprc,
    weighted_auroc,
)

PointMetric = Callable[[np.ndarray, np.ndarray], Metric]
Resampled = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
METRICS: dict[str, tuple[PointMetric, Resampled]] = {
    "auroc": (auroc, weighted_auroc),
    "auprc": (auprc, weighted_auprc),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """What one detector says of every row of a setting.

    Attributes:
      name: as in the rows, such as "champion" or "encoder:HP".
      scores: `[n_seeds, n_rows]`, higher = more likely correct.
      labels: `[n_rows]` bool to measure against, or None for the rows' own; only
        the permuted-label control has others.
    """

    name: str
    scores: np.ndarray
    labels: np.ndarray | None = None


def _rows_of(
    scored: Scored,
    rows: Rows,
    column: tuple[str, str],
    weights: np.ndarray,
    chosen: np.ndarray,
    experiment: str,
) -> list[ResultRow]:
    """Return one detector's rows on one set: each seed, and their mean."""
    dataset, split = column
    labels = (rows.labels if scored.labels is None else scored.labels)[chosen]
    shared = {
        "experiment": experiment,
        "detector": scored.name,
        "setting": rows.setting,
        "dataset": dataset,
        "split": split,
        "n": len(chosen),
        "n_failed": rows.n_unlabelled(split, dataset),
    }
    found = []
    for metric, (point, resampled) in METRICS.items():
        per_seed = [point(scores[chosen], labels) for scores in scored.scores]
        reason = next((p.reason for p in per_seed if p.reason is not None), None)
        if reason is not None:
            found.append(ResultRow(**shared, metric=metric, value=None, reason=reason))
            continue
        draws = np.mean(
            [resampled(s[chosen], labels, weights) for s in scored.scores], axis=0
        )
        low, high = interval_of(draws)
        found.append(
            ResultRow(
                **shared,
                metric=metric,
                value=float(np.mean([p.value for p in per_seed])),
                ci_low=low,
                ci_high=high,
            )
        )
        if len(per_seed) > 1:
            found += [
                ResultRow(**shared, metric=metric, value=p.value, seed=str(seed))
                for seed, p in enumerate(per_seed)
            ]
    return found


def detection_rows(
    detectors: list[Scored],
    rows: Rows,
    config: BootstrapConfig,
    experiment: str = "detection",
) -> list[ResultRow]:
    """Return the rows of all detectors of one setting on all evaluated sets.

    Args:
      detectors: all score the same rows.
      rows: what the rows are.
      config: the same resamples serve every detector, so that intervals compare.
      experiment: name of the rows.
    """
    found = []
    for dataset, split in rows.columns():
        chosen = rows.where(split, dataset)
        if not len(chosen):
            continue
        weights = cluster_weights(rows.ids[chosen], config)

        def measured(
            scored: Scored,
            column: tuple[str, str] = (dataset, split),
            weights: np.ndarray = weights,
            chosen: np.ndarray = chosen,
        ) -> list[ResultRow]:
            return _rows_of(scored, rows, column, weights, chosen, experiment)

        # NumPy's sums over resamples leave the interpreter free for another detector.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found += itertools.chain.from_iterable(pool.map(measured, detectors))
    return found


def permute_by_question(rows: Rows, seed: int) -> np.ndarray:
    """Return labels dealt out anew among the questions of each set and split.

    Rows of one question stay together: the two wordings of a context are no
    independent examples. Rows without a label keep none, and deal none out. Both the
    training and the evaluation labels are permuted, so that any AUROC away from one
    half is a leak in the pipeline.

    Returns:
      `[n_rows]` bool.
    """
    permuted = rows.labels.copy()
    rng = np.random.default_rng(seed)
    groups: Mapping[tuple[str, str], None] = dict.fromkeys(
        zip(rows.datasets, rows.splits, strict=True)
    )
    for dataset, split in groups:
        where = rows.where(split, dataset)
        own: dict[str, list[int]] = {}
        for i in where:
            own.setdefault(rows.ids[i], []).append(i)
        by_size: dict[int, list[list[int]]] = {}
        for members in own.values():
            by_size.setdefault(len(members), []).append(members)
        for questions in by_size.values():
            order = rng.permutation(len(questions))
            dealt = [rows.labels[questions[j]] for j in order]
            for members, labels in zip(questions, dealt, strict=True):
                permuted[members] = labels
    return permuted


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntervalConfig:
    """The run's section `intervals`: resamples of every interval."""

    n_resamples: int = 1000


INTERVAL_PRESETS: dict[Preset, IntervalConfig] = {
    "demo": IntervalConfig(),
    "smoke": IntervalConfig(n_resamples=100),
    "paper": IntervalConfig(),
}


def bootstrap_of(run: RunDir) -> BootstrapConfig:
    """Return how a run's intervals are made, with the run's seed."""
    config = run.settle("intervals", INTERVAL_PRESETS)
    return BootstrapConfig(n_resamples=config.n_resamples, seed=run.seed)

"""From scores to rows: AUROC and AUPRC of every detector on every set.

A detector's number is the mean over its training seeds. Its interval resamples
questions, all seeds and both wordings of a context together, so it is the interval
of the mean that is printed.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from extract.run.directory import RunDir
from extract.run.manifest import Preset
from extract.run.results import ResultRow
from jaxprobe.features.rows import Rows
from jaxprobe.metrics import (
    BootstrapConfig,
    auprc,
    auroc,
    cluster_weights,
    interval_of,
    weighted_auprc,
    weighted_auroc,
)

METRICS = {"auroc": (auroc, weighted_auroc), "auprc": (auprc, weighted_auprc)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The scores that one detector gives to every row of a setting.

    Attributes:
      name: as in the rows, such as "champion" or "encoder:HP".
      scores: `[n_seeds, n_rows]`, higher = more likely correct.
      labels: `[n_rows]` bool to measure against, or None for the rows' own; only
        the permuted-label control has others.
    """

    name: str
    scores: np.ndarray
    labels: np.ndarray | None = None

    def take(self, where: np.ndarray) -> "Scored":
        """Return the same of some rows, `[n]` indices."""
        labels = None if self.labels is None else self.labels[where]
        return Scored(name=self.name, scores=self.scores[:, where], labels=labels)


def _rows_of(
    scored: Scored,
    labels: np.ndarray,
    weights: np.ndarray,
    shared: Mapping[str, Any],
) -> list[ResultRow]:
    """Return one detector's rows on one set: the mean over seeds, then each seed.

    Args:
      scored: of the labelled rows of the set alone.
      labels: of the same rows, unless the detector has its own.
      weights: of the same rows, see `cluster_weights`.
      shared: the fields that all rows have in common.
    """
    labels = labels if scored.labels is None else scored.labels
    shared = {**shared, "detector": scored.name}
    made = []
    for metric, (point, resampled) in METRICS.items():
        per_seed = [point(scores, labels) for scores in scored.scores]
        reason = next((p.reason for p in per_seed if p.reason is not None), None)
        if reason is not None:
            made.append(ResultRow(**shared, metric=metric, value=None, reason=reason))
            continue
        draws = [resampled(scores, labels, weights) for scores in scored.scores]
        low, high = interval_of(np.mean(draws, axis=0))
        mean = float(np.mean([p.value for p in per_seed]))
        made.append(
            ResultRow(**shared, metric=metric, value=mean, ci_low=low, ci_high=high)
        )
        if len(per_seed) > 1:
            made += [
                ResultRow(**shared, metric=metric, value=p.value, seed=str(seed))
                for seed, p in enumerate(per_seed)
            ]
    return made


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
    made = []
    for dataset, split in rows.evaluated_sets():
        chosen = rows.where(split, dataset)
        if not len(chosen):
            continue
        measure = partial(
            _rows_of,
            labels=rows.labels[chosen],
            weights=cluster_weights(rows.ids[chosen], config),
            shared={"experiment": experiment, **rows.fields_of(dataset, split)},
        )
        # NumPy's sums over resamples leave the interpreter free for another detector.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = pool.map(measure, [scored.take(chosen) for scored in detectors])
            made += itertools.chain.from_iterable(parts)
    return made


def permute_by_question(rows: Rows, seed: int) -> np.ndarray:
    """Return labels permuted among the questions of each set and split.

    Rows of one question stay together: the two wordings of a context are not
    independent examples. Rows without a label take no part. Both the training and the
    evaluation labels are permuted, so that any AUROC away from one half is a leak in
    the pipeline.

    Returns:
      `[n_rows]` bool.
    """
    permuted = rows.labels.copy()
    rng = np.random.default_rng(seed)
    for dataset, split in dict.fromkeys(zip(rows.datasets, rows.splits, strict=True)):
        by_question: dict[str, list[int]] = {}
        for i in rows.where(split, dataset):
            by_question.setdefault(rows.ids[i], []).append(i)
        by_size: dict[int, list[list[int]]] = {}
        for where in by_question.values():
            by_size.setdefault(len(where), []).append(where)
        for questions in by_size.values():
            places = np.array(questions)  # [n_questions, n_wordings]
            permuted[places] = rows.labels[places[rng.permutation(len(places))]]
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

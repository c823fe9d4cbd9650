"""From scores to result rows: AUROC and AUPRC of every detector on every set.

A detector's value is the mean over its training seeds. Its interval resamples
questions, with all seeds and both wordings of a context, so it is the interval of that
mean. Resamples of few right or wrong answers are too similar: with 10 among 100, such
intervals of AUROC covered the truth .87 to .91 of the time. So the wider of this and
`metrics.auroc_interval` is used (for a difference, `auroc_gain_interval`), for AUPRC
that of `metrics.wider_auprc_interval` (for a difference, only resamples), and for
answers of equal length that of `metrics.wider_stratified_interval`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    Metric,
    auprc,
    auroc,
    auroc_gain_interval,
    interval_of,
    paired_strata,
    resamples,
    stratified_auroc,
    two_sided_p,
    weighted_metrics,
    weighted_stratified,
    wider_auprc_interval,
    wider_interval,
    wider_stratified_interval,
)
from beatrice.jaxprobe.rows import StoreRows

METRICS = {"auroc": auroc, "auprc": auprc}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DetectorScores:
    """The scores of one detector on every row of a setting."""

    name: Subject | str  # as in result rows: an id, or a subject if that is ambiguous
    # `[n_seeds, n_rows]`, higher = more likely correct; NaN where the detector is
    # undefined. Such rows are left out of its values, and counted.
    scores: np.ndarray
    # `[n_rows]` bool, for the permuted-label control; None uses the labels of the rows.
    labels: np.ndarray | None = None
    # Why there is no score, for sets without any defined score.
    reason: str = "the detector gives no score here"

    @property
    def subject(self) -> Subject:
        """The subject that result rows of these scores measure."""
        return Subject.of(self.name)

    @property
    def is_defined(self) -> np.ndarray:
        """Whether every seed has a score, `[n_rows]` bool."""
        return np.logical_not(np.any(np.isnan(self.scores), axis=0))

    def take(self, where: np.ndarray) -> "DetectorScores":
        """Select rows, by indices `[n]` or a mask of all rows."""
        labels = None if self.labels is None else self.labels[where]
        return dataclasses.replace(self, scores=self.scores[:, where], labels=labels)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Measured:
    """A detector on the rows of a set for which it has scores."""

    where: np.ndarray  # `[n_chosen]` bool, which of the set's rows these are
    scores: np.ndarray  # `[n_seeds, n]`
    labels: np.ndarray  # `[n]` bool
    questions: np.ndarray  # `[n]` numbers
    strata: np.ndarray | None  # `[n]`; None compares all answers
    seeds: dict[str, list[Metric]]  # by metric, its value with each seed
    # By metric, the mean over seeds in blocks of resamples; none if it is undefined.
    blocks: dict[str, list[np.ndarray]]

    @classmethod
    def of(
        cls, scored: DetectorScores, rows: StoreRows, strata: np.ndarray | None
    ) -> "_Measured":
        """Return the values of scores of a set's rows, before any resample."""
        where, metrics = scored.is_defined, METRICS
        labels = (rows.labels if scored.labels is None else scored.labels)[where]
        if strata is not None:
            strata = strata[where]
            metrics = {"auroc": partial(stratified_auroc, strata=strata)}
        scores, undefined = scored.scores[:, where], Metric(math.nan, scored.reason)
        return cls(
            where=where,
            scores=scores,
            labels=labels,
            questions=np.unique(rows.ids[where], return_inverse=True)[1],
            strata=strata,
            seeds={
                metric: [point(x, labels) if where.any() else undefined for x in scores]
                for metric, point in metrics.items()
            },
            blocks={metric: [] for metric in metrics},
        )

    def resample(self, weights: np.ndarray) -> None:
        """Add a block of resamples, given by weights of the set's rows."""
        if self.reason("auroc") is not None:
            return
        weighted = weighted_metrics
        if self.strata is not None:
            weighted = partial(weighted_stratified, strata=self.strata)
        counts = weights if self.where.all() else weights[self.where]
        by_seed = [weighted(x, self.labels, counts) for x in self.scores]
        for metric, blocks in self.blocks.items():
            blocks.append(np.mean([values[metric] for values in by_seed], axis=0))

    def draws(self, metric: str) -> np.ndarray | None:
        """Return a metric's resamples, `[n_resamples]`; None if it is undefined."""
        blocks = self.blocks[metric]
        return np.concatenate(blocks) if blocks else None

    def reason(self, metric: str) -> str | None:
        return next(
            (p.reason for p in self.seeds[metric] if p.reason is not None), None
        )

    def mean(self, metric: str) -> float:
        return float(np.mean([p.value for p in self.seeds[metric]]))

    @property
    def n_rarer(self) -> int:
        """Questions of the rarer class, among the strata that have both."""
        assert self.strata is not None
        rows = np.concatenate(paired_strata(self.labels, self.strata))
        labels, questions = self.labels[rows], self.questions[rows]
        return min(len(np.unique(questions[x])) for x in (labels, ~labels))

    def rows(self, fields: Mapping[str, Any]) -> list[ResultRow]:
        """Return the row of a metric's mean over seeds, then those of each seed."""
        fields = _with_more_failures(fields, int((~self.where).sum()))
        metric = fields["metric"]
        draws, value, seeds = self.draws(metric), self.mean(metric), self.seeds[metric]
        if draws is None:
            return [ResultRow(**fields, value=None, reason=self.reason(metric))]
        answers = self.labels, self.questions
        if self.strata is not None:
            low, high = wider_stratified_interval(draws, value, *answers, self.strata)
        elif metric == "auroc":
            low, high = wider_interval(draws, self.scores, *answers)
        else:
            low, high = wider_auprc_interval(draws, value, *answers)
        mean = ResultRow(**fields, value=value, ci_low=low, ci_high=high)
        each = enumerate(seeds if len(seeds) > 1 else ())
        return [
            mean,
            *(ResultRow(**fields, value=p.value, seed=str(s)) for s, p in each),
        ]


def _with_more_failures(fields: Mapping[str, Any], n_left_out: int) -> dict[str, Any]:
    """Return a result row's fields with more of its rows counted as failed."""
    n, n_failed = fields["n"] - n_left_out, fields["n_failed"] + n_left_out
    return {**fields, "n": n, "n_failed": n_failed}


def _measure(
    detectors: Sequence[DetectorScores],
    chosen: np.ndarray,
    *,
    rows: StoreRows,
    config: BootstrapConfig,
    strata: np.ndarray | None,
) -> dict[Subject, _Measured]:
    """Measure every detector on a set, given as `[n]` indices of labelled rows.

    All detectors share the resamples. `strata` are as in `detection_rows`.
    """
    of_set = rows.take(chosen)
    strata = None if strata is None else strata[chosen]
    measured = {
        x.subject: _Measured.of(x.take(chosen), of_set, strata) for x in detectors
    }
    for weights in resamples(of_set.ids, config) if len(chosen) else ():
        for values in measured.values():
            values.resample(weights)
    return measured


def difference_row(value: float, draws: np.ndarray, **fields: Any) -> ResultRow:
    """Return the result row of a paired difference, given its `[n_resamples]` draws."""
    low, high = interval_of(draws)
    p = two_sided_p(draws)
    return ResultRow(**fields, value=value, ci_low=low, ci_high=high, p_value=p)


def no_surer_than_signs(row: ResultRow, n: int) -> ResultRow:
    """Return a difference with p at least that of a sign test of `n` questions.

    Resamples of few questions may all have the same sign: 3 of 3 would be significant.
    Unless p is below .05, the interval includes zero.
    """
    least = min(1.0, 2.0 ** (1 - n))
    if least <= (row.p_value or 0.0):
        return row
    low, high = row.ci_low or 0.0, row.ci_high or 0.0
    if least >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    return msgspec.structs.replace(row, p_value=least, ci_low=low, ci_high=high)


def _difference(ours: _Measured, rival: _Measured, **fields: Any) -> ResultRow:
    metric = fields["metric"]
    draws, others = ours.draws(metric), rival.draws(metric)
    if draws is None or others is None:
        # The rival's reason first: a rival without scores leaves ours without rows.
        reason = rival.reason(metric) or ours.reason(metric)
        return ResultRow(**fields, value=None, reason=reason)
    value = ours.mean(metric) - rival.mean(metric)
    row = difference_row(value, draws - others, **fields)
    if ours.strata is not None:
        return no_surer_than_signs(row, min(ours.n_rarer, rival.n_rarer))
    if metric != "auroc" or not np.array_equal(ours.labels, rival.labels):
        return row
    low, high, p = auroc_gain_interval(
        ours.scores, rival.scores, ours.labels, ours.questions
    )
    return msgspec.structs.replace(
        row,
        ci_low=min(low, row.ci_low or 0.0),
        ci_high=max(high, row.ci_high or 0.0),
        p_value=max(p, row.p_value or 0.0),
    )


def detection_rows(
    detectors: list[DetectorScores],
    rows: StoreRows,
    config: BootstrapConfig,
    experiment: str = "detection",
    pairs: Mapping[str, Iterable[tuple[Subject | str, Subject | str]]] | None = None,
    strata: np.ndarray | None = None,
) -> list[ResultRow]:
    """Return the result rows of all detectors of a setting on all evaluated sets.

    All detectors share the same resamples, so that their intervals are comparable. For
    each of `pairs`, by experiment, a row has the first's value minus the second's.
    With `strata` `[n_rows]`, AUROC is that within strata, see `stratified_auroc`.
    """
    measure = partial(_measure, rows=rows, config=config, strata=strata)
    by_name = {scored.subject: scored for scored in detectors}
    result: list[ResultRow] = []
    measured_sets: dict[bytes, dict[Subject, _Measured]] = {}
    for dataset, split in rows.evaluated_sets():
        chosen = rows.where(split, dataset)
        if not len(chosen):
            continue
        identity = chosen.tobytes()  # a single dataset equals all in-domain ones
        if identity not in measured_sets:
            measured_sets[identity] = measure(detectors, chosen)
        measured, shared = measured_sets[identity], rows.fields_of(dataset, split)
        for name, values in measured.items():
            for metric in values.seeds:
                fields = {"experiment": experiment, "metric": metric, **shared}
                result += values.rows(fields | name._asdict())
        for compared, names in (pairs or {}).items():
            for name, rival in (map(Subject.of, pair) for pair in names):
                if name not in measured:
                    continue
                both, failed = [measured[name], measured[rival]], shared
                is_common = both[0].where & both[1].where
                if not is_common.all():
                    some = measure([by_name[name], by_name[rival]], chosen[is_common])
                    both = [some[name], some[rival]]
                    failed = _with_more_failures(shared, int((~is_common).sum()))
                about = {"against": rival.detector, "against_families": rival.families}
                about |= {"experiment": compared, **name._asdict(), **failed}
                result += [_difference(*both, metric=x, **about) for x in both[0].seeds]
    return result


def permute_by_question(rows: StoreRows, seed: int) -> np.ndarray:
    """Return labels `[n_rows]` permuted among the questions of each split.

    In-domain datasets are permuted together: if each kept its share of right answers,
    telling datasets apart would look like a leak. Held-out datasets are permuted one by
    one. Rows of a question stay together, because two wordings are not independent.
    Rows without a label are left out. Training and evaluation labels are permuted, so
    any AUROC away from one half is a leak in the pipeline.
    """
    permuted = rows.labels.copy()
    rng = np.random.default_rng(seed)
    sets = zip(rows.datasets, rows.splits, strict=True)
    for dataset, split in dict.fromkeys(
        (name if split == "ood" else IN_DOMAIN, split) for name, split in sets
    ):
        by_question: dict[str, list[int]] = {}
        for i in rows.where(split, dataset):
            by_question.setdefault(str(rows.ids[i]), []).append(i)
        by_size: dict[int, list[list[int]]] = {}
        for where in by_question.values():
            by_size.setdefault(len(where), []).append(where)
        for questions in by_size.values():
            indices = np.array(questions)  # [n_questions, n_wordings]
            permuted[indices] = rows.labels[indices[rng.permutation(len(indices))]]
    return permuted

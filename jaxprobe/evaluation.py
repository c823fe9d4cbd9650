"""From scores to result rows: AUROC and AUPRC of every detector on every set.

A detector's value is the mean over its training seeds. Its interval resamples
questions, with all seeds and both wordings of a context, so it is the interval of that
mean. Resamples of few right or wrong answers are too similar: with 10 among 100, such
intervals of AUROC covered the truth .87 to .91 of the time. So the wider of this and
`metrics.auroc_interval` is used (for a difference, `auroc_gain_interval`), for AUPRC
that of `metrics.wider_auprc_interval` (for a difference, only resamples).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    resamples,
    stratified_auroc,
    two_sided_p,
    weighted_metrics,
    weighted_stratified,
    wider_auprc_interval,
    wider_interval,
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
    """One metric of one detector on one set."""

    seeds: list[Metric]  # its value with each training seed
    draws: np.ndarray | None  # `[n_resamples]` of the seeds' mean; None if undefined
    n_left_out: int  # labelled rows on which the detector is undefined
    # Set for values over all rows, whose intervals do not only use resamples.
    case: "_Case | None" = None

    @property
    def reason(self) -> str | None:
        return next((p.reason for p in self.seeds if p.reason is not None), None)

    @property
    def mean(self) -> float:
        return float(np.mean([p.value for p in self.seeds]))

    def rows(self, fields: Mapping[str, Any]) -> list[ResultRow]:
        """Return the row of the mean over seeds, then those of each seed."""
        fields = _with_more_failures(fields, self.n_left_out)
        if self.draws is None:
            return [ResultRow(**fields, value=None, reason=self.reason)]
        low, high = interval_of(self.draws)
        if self.case is not None:
            _, _, scores, labels, questions, *_ = self.case
            low, high = (
                wider_interval(self.draws, scores, labels, questions)
                if fields["metric"] == "auroc"
                else wider_auprc_interval(self.draws, self.mean, labels, questions)
            )
        mean = ResultRow(**fields, value=self.mean, ci_low=low, ci_high=high)
        seeds = enumerate(self.seeds if len(self.seeds) > 1 else ())
        return [
            mean,
            *(ResultRow(**fields, value=p.value, seed=str(s)) for s, p in seeds),
        ]


def _with_more_failures(fields: Mapping[str, Any], n_left_out: int) -> dict[str, Any]:
    """Return a result row's fields with more of its rows counted as failed."""
    n, n_failed = fields["n"] - n_left_out, fields["n_failed"] + n_left_out
    return {**fields, "n": n, "n_failed": n_failed}


class _Case(NamedTuple):
    """A detector on the rows of a set for which it has scores."""

    name: Subject
    where: np.ndarray  # [n_chosen] bool, which of the set's rows these are
    scores: np.ndarray  # [n_seeds, n]
    labels: np.ndarray  # [n] bool
    questions: np.ndarray  # [n] numbers
    weighted: Callable[..., dict[str, np.ndarray]]  # see `weighted_metrics`
    seeds: dict[str, list[Metric]]  # for each metric, its value with each seed


def _case(scored: DetectorScores, rows: StoreRows, strata: np.ndarray | None) -> _Case:
    """Return a detector's values on a set, given its `scored`, `rows` and `strata`."""
    where = scored.is_defined
    labels = (rows.labels if scored.labels is None else scored.labels)[where]
    metrics, weighted = METRICS, weighted_metrics
    if strata is not None:
        metrics = {"auroc": partial(stratified_auroc, strata=strata[where])}
        weighted = partial(weighted_stratified, strata=strata[where])
    scores, undefined = scored.scores[:, where], Metric(math.nan, scored.reason)
    seeds = {
        metric: [point(x, labels) if where.any() else undefined for x in scores]
        for metric, point in metrics.items()
    }
    numbers = np.unique(rows.ids[where], return_inverse=True)[1]
    return _Case(scored.subject, where, scores, labels, numbers, weighted, seeds)


def _measure(
    detectors: Sequence[DetectorScores],
    chosen: np.ndarray,
    *,
    rows: StoreRows,
    config: BootstrapConfig,
    strata: np.ndarray | None,
) -> dict[tuple[Subject, str], _Measured]:
    """Measure every detector by every metric on one set.

    Args:
      detectors: scores of all rows.
      chosen: `[n]` indices of the set's labelled rows; may be empty.
      rows: the questions and labels of the rows.
      config: configuration of the resamples, which all detectors share.
      strata: `[n_rows]`; answers are compared only within strata. None compares all.
    """
    of_set = rows.take(chosen)
    strata = None if strata is None else strata[chosen]
    cases = [_case(scored.take(chosen), of_set, strata) for scored in detectors]
    draws: dict[tuple[Subject, str], list[np.ndarray]] = collections.defaultdict(list)
    for weights in resamples(of_set.ids, config) if len(chosen) else ():
        for case in cases:
            if any(point.reason for point in case.seeds["auroc"]):
                continue
            counts = weights if case.where.all() else weights[case.where]
            by_seed = [case.weighted(x, case.labels, counts) for x in case.scores]
            for metric in case.seeds:
                mean = np.mean([values[metric] for values in by_seed], axis=0)
                draws[case.name, metric].append(mean)
    return {
        (case.name, metric): _Measured(
            seeds=points,
            draws=np.concatenate(x) if (x := draws[case.name, metric]) else None,
            n_left_out=int((~case.where).sum()),
            case=case if strata is None else None,
        )
        for case in cases
        for metric, points in case.seeds.items()
    }


def difference_row(value: float, draws: np.ndarray, **fields: Any) -> ResultRow:
    """Return the result row of a paired difference, given its `[n_resamples]` draws."""
    low, high = interval_of(draws)
    p = two_sided_p(draws)
    return ResultRow(**fields, value=value, ci_low=low, ci_high=high, p_value=p)


def _difference(ours: _Measured, rival: _Measured, **fields: Any) -> ResultRow:
    fields = _with_more_failures(fields, ours.n_left_out)
    if ours.draws is None or rival.draws is None:
        # The rival's reason first: a rival without scores leaves ours without rows.
        return ResultRow(**fields, value=None, reason=rival.reason or ours.reason)
    row = difference_row(ours.mean - rival.mean, ours.draws - rival.draws, **fields)
    case, other = ours.case, rival.case
    if case is None or other is None or fields["metric"] != "auroc":
        return row
    if not np.array_equal(case.labels, other.labels):
        return row
    low, high, p = auroc_gain_interval(
        case.scores, other.scores, case.labels, case.questions
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
    measured_sets: dict[bytes, dict[tuple[Subject, str], _Measured]] = {}
    for dataset, split in rows.evaluated_sets():
        chosen = rows.where(split, dataset)
        if not len(chosen):
            continue
        identity = chosen.tobytes()  # a single dataset equals all in-domain ones
        if identity not in measured_sets:
            measured_sets[identity] = measure(detectors, chosen)
        measured, shared = measured_sets[identity], rows.fields_of(dataset, split)
        for (name, metric), values in measured.items():
            fields = {"experiment": experiment, "metric": metric, **name._asdict()}
            result += values.rows(fields | shared)
        for compared, names in (pairs or {}).items():
            for compared_pair, metric in itertools.product(names, METRICS):
                name, rival = map(Subject.of, compared_pair)
                if (name, metric) not in measured:
                    continue
                fields = {"experiment": compared, "metric": metric, **name._asdict()}
                fields |= {"against": rival.detector, **shared}
                fields["against_families"] = rival.families
                pair = [measured[name, metric], measured[rival, metric]]
                if any(values.n_left_out for values in pair):
                    both = [by_name[name], by_name[rival]]
                    is_common = np.all([x.is_defined[chosen] for x in both], axis=0)
                    common = measure(both, chosen[is_common])
                    n_left_out = int((~is_common).sum())
                    pair = [
                        dataclasses.replace(common[x, metric], n_left_out=n_left_out)
                        for x in (name, rival)
                    ]
                result.append(_difference(*pair, **fields))
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

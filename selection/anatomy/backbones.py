"""Do the same combinations win on another backbone? Two runs beside each other.

Spearman's correlation of the fifteen encoders' AUROC (paper, appendix E, figure across
backbones), with an interval that resamples both runs' questions.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from scipy.stats import rankdata

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from jaxprobe.features.subsets import SUBSET_NAMES
from jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    interval_of,
    resamples,
    weighted_metrics,
)
from selection.anatomy.analysis import Analysis, AnalysisInput, Findings
from selection.anatomy.encoders import Deployed
from selection.anatomy.fusion import pairs

EXPERIMENT, OTHER_PAIRS = "anatomy_backbones", "anatomy_other_pairs"


class Ranked(NamedTuple):
    """What the encoders of a run say of its answers of a split.

    Attributes:
      ids: `[n]` questions; two wordings of one share an id.
      labels: `[n]` bool.
      scores: `[n_seeds, 15, n]`, higher = more likely correct.
    """

    ids: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


class Agreement(NamedTuple):
    """Spearman's correlation of two rankings of the subsets, with its 95 % interval."""

    value: float
    low: float
    high: float


def subset_aurocs(found: Ranked, weights: np.ndarray) -> np.ndarray:
    """Return every subset's AUROC, mean over seeds, under many weightings.

    Args:
      found: of a run.
      weights: `[n, n_resamples]` float32 counts.

    Returns:
      `[n_subsets, n_resamples]`; NaN where a resample lacks a class.
    """
    return np.stack(
        [
            np.mean(
                [
                    weighted_metrics(own, found.labels, weights)["auroc"]
                    for own in found.scores[:, subset]
                ],
                axis=0,
            )
            for subset in range(found.scores.shape[1])
        ]
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation down each column, `[n_subsets, n]` each; NaN if constant.

    Returns:
      `[n]` in [-1, 1].
    """
    a, b = (rankdata(x, axis=0, nan_policy="propagate") for x in (first, second))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))


def agreement(first: Ranked, second: Ranked, config: BootstrapConfig) -> Agreement:
    """Do two runs rank the subsets of signal families alike?

    The paper's conservation of the ranking between its two models, .78. It gives no
    interval. Ours resamples the validation questions of both runs and computes all
    AUROCs anew. It does not resample the subsets: they are all there are, and they
    share families, so they are no sample of anything. What is by chance is which
    questions were asked. A question that both runs were asked is drawn for both
    together. Resampled AUROCs have more noise than the sample's, so the interval lies
    somewhat nearer to zero than one around the value would.

    Args:
      first: a run's validation answers.
      second: those of another run with the same subsets.
      config: of the bootstrap.
    """
    n = len(first.ids)
    ones = [np.ones((len(x.ids), 1), np.float32) for x in (first, second)]

    def correlate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return rank_correlation(subset_aurocs(first, a), subset_aurocs(second, b))

    value = float(correlate(*ones)[0])
    if not np.isfinite(value):
        return Agreement(value, value, value)
    together = np.concatenate([first.ids, second.ids])
    blocks = resamples(together, config)
    draws = np.concatenate([correlate(block[:n], block[n:]) for block in blocks])
    return Agreement(value, *interval_of(draws))


def _answers(deployed: Deployed, split: str) -> Ranked:
    """Return what a run's encoders say of its in-domain answers of a split."""
    rows = deployed.rows
    where = rows.where(split)
    return Ranked(rows.ids[where], rows.labels[where], deployed.logits[:, :, where])


def _auroc_rows(
    found: Ranked, config: BootstrapConfig, which: str, place: dict
) -> list[ResultRow]:
    """Return the AUROC of every subset on one run, with its interval."""
    draws = np.concatenate(
        [subset_aurocs(found, block) for block in resamples(found.ids, config)], axis=1
    )
    made = []
    for subset, name in enumerate(SUBSET_NAMES):
        values = [auroc(own, found.labels) for own in found.scores[:, subset]]
        fields = dict(experiment=EXPERIMENT, detector=f"{which} {name}", metric="auroc")
        fields |= place | {"n": len(found.labels)}
        if reason := next((v.reason for v in values if v.reason), None):
            made.append(ResultRow(**fields, value=None, reason=reason))
            continue
        low, high = interval_of(draws[subset])
        value = float(np.mean([v.value for v in values]))
        made.append(ResultRow(**fields, value=value, ci_low=low, ci_high=high))
    return made


def backbones(given: AnalysisInput) -> Findings:
    """Return how two runs' encoders compare on test answers, in shared settings.

    And what pairs of families gain on the other backbone.

    Raises:
      ValueError: the runs have no setting in common.
    """
    shared = [setting for setting in given.settings if setting in given.other]
    if not shared:
        raise ValueError(
            f"this run has {', '.join(given.settings)}, the other one has "
            f"{', '.join(given.other)}, and they have no setting in common; give a run "
            "whose questions were asked in the same way"
        )
    made: list[ResultRow] = []
    for setting in shared:
        both = given.settings[setting], given.other[setting]
        config, place = both[0].bootstrap, both[0].place(IN_DOMAIN, "test")
        ranked = [_answers(deployed, "test") for deployed in both]
        for which, side in zip(("first", "second"), ranked, strict=True):
            made += _auroc_rows(side, config, which, place)
        alike = agreement(*ranked, config)
        fields = dict(experiment=EXPERIMENT, metric="spearman", n=len(SUBSET_NAMES))
        fields |= {"detector": " | ".join(given.models), **place}
        if np.isfinite(alike.value):
            ends = {"ci_low": alike.low, "ci_high": alike.high}
            made.append(ResultRow(**fields, value=alike.value, **ends))
        else:
            reason = "one class only, or all subsets are equally good"
            made.append(ResultRow(**fields, value=None, reason=reason))
    of_pairs = [row for setting in shared for row in pairs(given.other[setting])]
    made += [msgspec.structs.replace(row, experiment=OTHER_PAIRS) for row in of_pairs]
    return Findings(made)


ANALYSES = (Analysis("backbones", backbones, needs=("other",)),)

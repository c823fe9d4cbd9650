"""Two ways of scoring the same answers, compared on the same questions and seeds."""

import dataclasses

import numpy as np

from benchmarks.stages.presets import RunConfig
from jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    cluster_weights,
    interval_of,
    weighted_auroc,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """Difference of two mean AUROCs.

    Attributes:
      value: the second less the first.
      low: lower end of its 95 % interval, which resamples questions.
      high: upper end.
    """

    value: float
    low: float
    high: float


def aurocs(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the AUROC of every member, `[n_members]` of `[n_members, n]`."""
    return np.array([auroc(one, labels).value for one in logits])


class Pairing:
    """Answers with their labels, and resamples of their questions."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray, config: RunConfig) -> None:
        """Draw the resamples; `ids` `[n]` name the questions."""
        self.labels = labels
        bootstrap = BootstrapConfig(n_resamples=config.n_bootstrap, seed=config.seed)
        self._weights = cluster_weights(ids, bootstrap)

    def _drawn(self, logits: np.ndarray) -> np.ndarray:
        """Return the mean AUROC of members in every resample."""
        draws = [weighted_auroc(one, self.labels, self._weights) for one in logits]
        return np.mean(draws, axis=0)

    def compare(self, before: np.ndarray, after: np.ndarray) -> Paired:
        """Compare the same members, `[n_members, n]` each, by their mean."""
        low, high = interval_of(self._drawn(after) - self._drawn(before))
        means = [aurocs(side, self.labels).mean() for side in (before, after)]
        return Paired(value=float(means[1] - means[0]), low=low, high=high)

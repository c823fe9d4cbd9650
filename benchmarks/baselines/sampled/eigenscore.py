"""EigenScore: how far the last states of drawn answers lie apart.

INSIDE (Chen et al., ICLR 2024), as in alibaba/eigenscore (ea8062a, func/metric.py,
`getEigenIndicator_v0`), with ten answers. What is read is the state of each answer's
last token before the stop, at entry floor((n_layers + 1) / 2) of the resid axis: the
official code finds that token by ids above 2, which holds for LLaMA-1/2 and OPT alone,
and reads the first token of the prompt for an answer of one token.

The feature clipping of the paper is not in its code, and not here.
"""

import math
from functools import partial

import numpy as np

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found

SAMPLE_STATES = "sample_states"  # the reading, `[n_rows, n_samples, d_model]`
_RIDGE = 1e-3


def official_eigenscore(states: np.ndarray, ridge: float = _RIDGE) -> float:
    """Return the mean log10 eigenvalue of the covariance, as the code has it.

    Args:
      states: `[n_samples, d_model]`, one per answer; each is centred over its channels.
      ridge: added to the diagonal, alpha of the paper.
    """
    return _mean_log_eigenvalue(np.cov(states), ridge) / math.log(10)


def paper_eigenscore(states: np.ndarray, ridge: float = _RIDGE) -> float:
    """Return the mean natural log eigenvalue, as the paper has it (eq. 6).

    The products are not divided by d_model - 1, beside which the same ridge weighs
    less: that changes the order of answers, and not their scale alone.

    Args:
      states: `[n_samples, d_model]`, one per answer.
      ridge: alpha of the paper.
    """
    centred = states - states.mean(axis=1, keepdims=True)
    return _mean_log_eigenvalue(centred @ centred.T, ridge)


def _mean_log_eigenvalue(gram: np.ndarray, ridge: float) -> float:
    """Return it by the log-determinant, which is positive with a ridge."""
    return float(np.linalg.slogdet(gram + ridge * np.eye(len(gram)))[1] / len(gram))


def eigen_scores(evidence: Evidence, *, is_official: bool) -> Found:
    """Return minus the score of every row.

    Answers whose state was not read (NaN) are left out; where fewer than two are left,
    nothing lies apart and the score is NaN.

    Raises:
      ValueError: the states were not read, or not for these rows.
    """
    states = evidence.readings.get(SAMPLE_STATES)
    n_rows = len(evidence.rows.ids)
    if states is None or states.ndim != 3 or len(states) != n_rows:
        found = "missing" if states is None else list(states.shape)
        raise ValueError(
            f"the reading {SAMPLE_STATES!r} is {found}, expected [{n_rows}, n_samples, "
            "d_model]; read the states of the drawn answers first"
        )
    measure = official_eigenscore if is_official else paper_eigenscore
    values = []
    for row in states:
        own = row[~np.isnan(row).any(axis=1)].astype(np.float64)
        values.append(-measure(own) if len(own) > 1 else math.nan)
    return Found(np.array([values]))


_SOURCE = "Chen et al., ICLR 2024 (INSIDE), section 3.1; alibaba/eigenscore ea8062a"

DETECTORS = (
    Detector(
        name="eigenscore",
        title="EigenScore",
        source=_SOURCE,
        score=partial(eigen_scores, is_official=True),
        needs=frozenset({"samples"}),
        reads=("sample_states",),
        variant="answers are drawn at the pool's temperature, not 0.5; the last token "
        "before the stop is read whatever its id",
    ),
    Detector(
        name="eigenscore:paper",
        title="EigenScore (paper's formula)",
        source=_SOURCE,
        score=partial(eigen_scores, is_official=False),
        needs=frozenset({"samples"}),
        reads=("sample_states",),
        variant="the covariance is not divided by d_model - 1 and the logarithm is "
        "natural, as in the paper; read as the other",
    ),
)

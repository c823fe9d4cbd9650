"""Lookback-Lens: how much of its attention each head spends on the context."""

from functools import partial

import numpy as np

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.trained.layers import (
    logistic_log_odds,
    scores_where_defined,
)
from beatrice.jaxprobe.features.rows import Rows


def lookback_lens(ratios: np.ndarray, rows: Rows) -> Found:
    """Return log-odds of a right answer from the lookback ratios of all heads.

    Args:
      ratios: `[n_rows, n_layers, n_heads]` in [0, 1], means over the answer's steps;
        NaN where a row was not read.
      rows: what the rows are.

    Returns:
      `[1, n_rows]` scores; NaN where a ratio is.

    Raises:
      ValueError: the training rows hold one class only.
    """
    features = ratios.reshape(len(ratios), -1)  # layer by layer, as in the code
    fit = partial(logistic_log_odds, max_iter=1000)
    return Found(scores_where_defined(features, rows.labels, rows.where("train"), fit))


def _score(evidence: Evidence) -> Found:
    return lookback_lens(evidence.readings["lookback"], evidence.rows)


LOOKBACK_LENS = Detector(
    name="lookback_lens",
    title="Lookback-Lens",
    source="Chuang et al. (EMNLP 2024), section 2; voidism/Lookback-Lens f2846ef, "
    "step03_lookback_lens.py",
    score=_score,
    reads=("lookback",),
    is_trained=True,
    variant="One example an answer, the mean over all its steps, and the label is "
    "correctness, not faithfulness to the context.",
    settings=("with_context",),
)
DETECTORS = (LOOKBACK_LENS,)

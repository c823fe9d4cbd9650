"""LLMsKnow: logistic regression on the MLP output at the exact answer's last token."""

import numpy as np

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.trained.layers import (
    best_layer,
    logistic_log_odds,
    scores_where_defined,
)
from beatrice.jaxprobe.features.rows import Rows


def llms_know(outputs: np.ndarray, rows: Rows) -> Found:
    """Return log-odds of a right answer from the block that validation chooses.

    Args:
      outputs: `[n_rows, n_layers, d_model]`, what the MLP of each block added at the
        exact answer's last token; NaN where a row has none.
      rows: what the rows are.

    Returns:
      `[1, n_rows]` scores, and the layer. Blocks count from 1 there, as the entries of
      the residual stream do that they write to; the official code counts from 0.

    Raises:
      ValueError: training or validation rows hold one class only.
    """

    def fit_at(layer: int) -> Found:
        own, train = outputs[:, layer - 1], rows.where("train")
        return Found(scores_where_defined(own, rows.labels, train, logistic_log_odds))

    return best_layer(fit_at, range(1, outputs.shape[1] + 1), rows, "llms_know")


def _score(evidence: Evidence) -> Found:
    return llms_know(evidence.readings["mlp_exact_answer"], evidence.rows)


LLMS_KNOW = Detector(
    name="llms_know",
    title="LLMsKnow",
    source="Orgad et al. (ICLR 2025), section 3; technion-cs-nlp/LLMsKnow bee3ec5, "
    "probe.py",
    score=_score,
    reads=("mlp_exact_answer",),
    is_trained=True,
    # The official extraction finds the gold answer in right ones, at test time too.
    variant="The exact answer is the whole greedy answer, which is short after worked "
    "examples; fitted on training answers alone, not on those of validation too.",
)
DETECTORS = (LLMS_KNOW,)

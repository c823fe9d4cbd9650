"""A linear probe: logistic regression on the mean answer state of the best layer."""

import numpy as np

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.linear import chosen_row, scores_of, standardise
from beatrice.benchmarks.baselines.trained.layers import best_layer
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.features.reading import mean_answer_states
from beatrice.jaxprobe.features.rows import Rows


def linear_probe(store: FeatureStore, rows: Rows) -> Found:
    """Return log-odds from the layer and the penalty that validation chooses.

    Args:
      store: an extracted setting; every layer that it keeps is tried.
      rows: what its rows are.

    Returns:
      `[1, n_rows]` scores.

    Raises:
      ValueError: training or validation rows hold one class only.
    """

    def fit_at(layer: int) -> Found:
        states = mean_answer_states(store, np.arange(len(rows.ids)), layer)
        standardise(states, rows.where("train"))
        scores, penalty = scores_of(states, rows)
        chosen = chosen_row(rows, "linear_probe", "inverse_penalty", penalty)
        return Found(scores, (chosen,))

    return best_layer(fit_at, store.spec.hidden_layers, rows, "linear_probe")


def _score(evidence: Evidence) -> Found:
    return linear_probe(evidence.store, evidence.rows)


LINEAR_PROBE = Detector(
    name="linear_probe",
    title="Linear probe",
    source="Alain and Bengio (2017), arXiv 1610.01644; not among the paper's detectors",
    score=_score,
    is_trained=True,
    variant="Reads the mean state of the answer span; layer and penalty by validation.",
)
DETECTORS = (LINEAR_PROBE,)

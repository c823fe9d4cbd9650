"""What the trained detectors share: the states they read, and how a layer is chosen.

Steps count the positions of an answer: step 0 is the last prompt token, which emits the
first answer token, and step s is the s-th answer token. A state that an answer does not
have is NaN, its row is left out of training, and its score is NaN.
"""

import warnings
from collections.abc import Callable, Iterable

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from beatrice.benchmarks.baselines.detector import Found
from beatrice.benchmarks.baselines.linear import chosen_row
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe.features.families import ANSWER
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.regression import both_classes

# Of training states `[n_train, width]`, their labels, and the states to be scored
# `[n, width]`: `[n_seeds, n]` scores.
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def last_steps(store: FeatureStore) -> np.ndarray:
    """Return the last step of every answer, `[n_rows]`: how many tokens it has.

    An answer that was cut at the length limit counts one less: its last token emitted
    nothing that is known, and is not in the store.
    """
    spans = store.spec.spans[:, ANSWER]
    return spans[:, 1] - spans[:, 0] - 1 + _first_step(store)


def _first_step(store: FeatureStore) -> int:
    """The step of the answer span's first row; 1 where it is the literal answer."""
    return int(store.spec.fingerprint.get("answer_span") == "literal")


def states_at(
    store: FeatureStore, steps: np.ndarray, layer: int, n_chunk: int = 1024
) -> np.ndarray:
    """Return one hidden state of every row.

    Args:
      store: an extracted setting.
      steps: `[n_rows]` int.
      layer: of the residual stream (0 is the embedding).
      n_chunk: examples whose answers are in memory together.

    Returns:
      `[n_rows, d_model]` float32; NaN where the answer span has no such step.
    """
    rows = steps - _first_step(store)
    d_model = store.spec.families["hidden"].shape[1]
    states = np.full((len(rows), d_model), np.nan, np.float32)
    for start in range(0, len(rows), n_chunk):
        chunk = np.arange(start, min(start + n_chunk, len(rows)))
        ragged = read_family(store, "hidden", chunk, layer=layer, span=ANSWER)
        own = rows[chunk]
        has_step = (own >= 0) & (own < ragged.lengths)
        states[chunk[has_step]] = ragged.values[(ragged.starts + own)[has_step]]
    return states


def scores_where_defined(
    features: np.ndarray, labels: np.ndarray, train: np.ndarray, fit: Fit
) -> np.ndarray:
    """Fit on the training rows that have features, and score all that have.

    Args:
      features: `[n_rows, width]`; NaN where a row has none.
      labels: `[n_rows]` bool.
      train: `[n_train]` indices.
      fit: of what is fitted.

    Returns:
      `[n_seeds, n_rows]` float64; NaN where a row has no features.

    Raises:
      ValueError: the training rows hold one class only.
    """
    is_defined = np.isfinite(features).all(axis=1)
    train = train[is_defined[train]]
    own_labels = both_classes(labels[train], len(train), "training")
    own = fit(features[train], own_labels, features[is_defined])
    scores = np.full((len(own), len(features)), np.nan)
    scores[:, is_defined] = own
    return scores


def logistic_log_odds(
    train: np.ndarray, labels: np.ndarray, states: np.ndarray, max_iter: int = 100
) -> np.ndarray:
    """Fit scikit-learn's default logistic regression, as official code does.

    On states that are not scaled the 100 default iterations rarely converge; where they
    end is the published detector, so the warning is not shown.

    Args:
      train: `[n_train, width]`.
      labels: `[n_train]` bool.
      states: `[n, width]`.
      max_iter: of the optimiser.

    Returns:
      `[1, n]` log-odds of True, which rank as the probabilities do but never saturate.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression = LogisticRegression(max_iter=max_iter).fit(train, labels)
    return regression.decision_function(states)[None]


def validation_auroc(scores: np.ndarray, rows: Rows) -> float:
    """Return the AUROC on the validation rows that have a score, mean over seeds.

    Args:
      scores: `[n_seeds, n_rows]`; NaN for the same rows with every seed.
      rows: what the rows are.

    Raises:
      ValueError: these rows hold one class only.
    """
    valid = rows.where("validation")
    valid = valid[np.isfinite(scores[0, valid])]
    labels = both_classes(rows.labels[valid], len(valid), "validation")
    return float(np.mean([auroc(own[valid], labels).value for own in scores]))


def best_layer(
    fit_at: Callable[[int], Found], layers: Iterable[int], rows: Rows, name: str
) -> Found:
    """Return what a detector says from the layer that is best on validation.

    Of equals, the first layer.

    Args:
      fit_at: what it says from a layer.
      layers: to choose from, at least one.
      rows: what the rows are.
      name: of the detector.
    """
    best: tuple[float, int, Found] | None = None
    for layer in layers:
        found = fit_at(layer)
        value = validation_auroc(found.scores, rows)
        if best is None or value > best[0]:
            best = value, layer, found
    if best is None:
        raise ValueError(f"{name}: expected at least one layer to choose from")
    _, layer, found = best
    row = chosen_row(rows, name, "layer", layer)
    return Found(found.scores, (row, *found.chosen))

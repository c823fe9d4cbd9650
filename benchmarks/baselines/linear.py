"""Logistic regression on fixed features: how every trained rival here is fitted."""

import numpy as np

from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.regression import block_scale, fit_linear


def standardise(features: np.ndarray, train: np.ndarray) -> None:
    """Scale a block of features in place, see `block_scale`.

    Args:
      features: `[n_rows, n_features]` float.
      train: `[n_train]` indices.
    """
    mean, scale = block_scale(features[train])
    features -= mean
    features /= scale


def scores_of(features: np.ndarray, rows: Rows) -> tuple[np.ndarray, float]:
    """Fit on the training rows of a setting, and score all.

    Args:
      features: `[n_rows, n_features]` of every row.
      rows: what the rows are.

    Returns:
      `[1, n_rows]` log-odds, and the inverse penalty that validation chose.

    Raises:
      ValueError: training or validation rows hold one class only.
    """
    train, valid = rows.where("train"), rows.where("validation")
    fit, _ = fit_linear(
        features[train], rows.labels[train], features[valid], rows.labels[valid]
    )
    return fit.decision_function(features)[None].astype(np.float64), fit.C


def chosen_row(rows: Rows, detector: str, metric: str, value: float) -> ResultRow:
    """Return the row that says what the validation rows chose for a detector."""
    return ResultRow(
        experiment="chosen",
        detector=detector,
        metric=metric,
        value=value,
        **rows.fields_of(IN_DOMAIN, "validation"),
    )

"""Logistic regression on fixed features: how every trained rival here is fitted."""

import numpy as np

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from jaxprobe.features.rows import Rows
from jaxprobe.regression import fit_linear


def standardise(features: np.ndarray, train: np.ndarray) -> None:
    """Give every feature mean 0 on the training rows, and all one variance, in place.

    Together the features of a training row have variance 1, so that one range of
    penalties serves ten features and ten thousand, and blocks of different width can
    stand side by side.

    Args:
      features: `[n_rows, n_features]` float; one that is constant on the training rows
        is only centred.
      train: `[n_train]` indices.
    """
    spread = features[train].std(axis=0)
    features -= features[train].mean(axis=0)
    features /= np.where(spread > 0, spread, 1) * np.sqrt(features.shape[1])


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

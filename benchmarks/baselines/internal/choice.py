"""How layers, heads and signs are chosen: by AUROC on rows that are not tested."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from beatrice.benchmarks.baselines.detector import Evidence
from beatrice.benchmarks.baselines.linear import chosen_row
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.features.rows import Rows


def reading(evidence: Evidence, name: str, n_axes: int) -> np.ndarray:
    """Return a reading of every row, `[n_rows, …]` with so many axes, float64.

    Raises:
      ValueError: it was not read, or not for these rows.
    """
    values, n_rows = evidence.readings.get(name), len(evidence.rows.ids)
    if values is None or values.ndim != n_axes or len(values) != n_rows:
        found = "missing" if values is None else f"of shape {list(values.shape)}"
        raise ValueError(
            f"the reading {name!r} is {found}, expected {n_axes} axes, the first of "
            f"{n_rows} rows; read it with `extract.readings.reader.read`"
        )
    return np.asarray(values, dtype=np.float64)


def column_aurocs(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the AUROC of every column at once, ties half.

    Args:
      values: `[n_rows, n_columns]`, higher = more likely correct.
      labels: `[n_rows]` bool, of both classes.

    Returns:
      `[n_columns]`; NaN where a column holds what is not finite.
    """
    is_finite = np.isfinite(values).all(axis=0)
    ranks = rankdata(np.where(is_finite, values, 0.0), axis=0)
    n_right, n_wrong = int(labels.sum()), int((~labels).sum())
    below = ranks[labels].sum(axis=0) - n_right * (n_right + 1) / 2
    return np.where(is_finite, below / (n_right * n_wrong), np.nan)


def defined_rows(values: np.ndarray, rows: Rows, split: str) -> np.ndarray:
    """Return the labelled rows of a split that have any finite value.

    Args:
      values: `[n_rows, n_columns]`.
      rows: what the rows are.
      split: which.

    Raises:
      ValueError: they hold one class only.
    """
    found = rows.where(split)
    found = found[np.isfinite(values[found]).any(axis=1)]
    n_right = int(rows.labels[found].sum())
    if not 0 < n_right < len(found):
        raise ValueError(
            f"{rows.setting}: {n_right} of the {len(found)} labelled {split} answers "
            "that were read are correct, and one class alone chooses nothing; take "
            "more questions"
        )
    return found


class Oriented(NamedTuple):
    """A column and its sign.

    Attributes:
      scores: `[n_rows]`, higher = more likely correct on the rows that chose.
      column: which was chosen; the first of equals.
      sign: 1 or -1.
    """

    scores: np.ndarray
    column: int
    sign: int


def oriented(values: np.ndarray, rows: Rows) -> Oriented:
    """Choose the column and the sign that are best on validation.

    Args:
      values: `[n_rows, n_columns]`; NaN where a row was not read. A column that lacks
        a value where another has one is not chosen.
      rows: what the rows are.

    Raises:
      ValueError: the validation rows hold one class only.
    """
    valid = defined_rows(values, rows, "validation")
    aurocs = column_aurocs(values[valid], rows.labels[valid])
    if np.isnan(aurocs).all():
        raise ValueError(
            f"{rows.setting}: every reading lacks a value in some validation row that "
            "another has, so none can be chosen"
        )
    column = int(np.nanargmax(np.abs(aurocs - 0.5)))
    sign = 1 if aurocs[column] >= 0.5 else -1
    return Oriented(sign * values[:, column], column, sign)


def chosen_rows(
    rows: Rows, detector: str, values: Mapping[str, float]
) -> tuple[ResultRow, ...]:
    """Return the rows that say what validation chose for a detector, by metric."""
    return tuple(chosen_row(rows, detector, *one) for one in values.items())

"""How layers, heads and signs are chosen, and the states that detectors read.

Choices go by AUROC on rows that are not tested. Steps count the positions of an answer:
step 0 is the last prompt token, which emits the first answer token, and step s is the
s-th answer token. A state that an answer does not have is NaN, its row is left out of
training, and its score is NaN.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from scipy.stats import rankdata
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from beatrice.benchmarks.baselines.detector import DetectorInput, DetectorOutput
from beatrice.benchmarks.baselines.plain import chosen_row
from beatrice.extract.run.rows import ResultRow
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe.families import ANSWER
from beatrice.jaxprobe.linear import both_classes
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import Rows
from beatrice.jaxprobe.tokens import first_step


def reading(
    inputs: DetectorInput, name: str, n_axes: int, dtype: type | None = np.float64
) -> np.ndarray:
    """Return a reading of every row, `[n_rows, …]`; without a dtype in its own."""
    values, n_rows = inputs.readings.get(name), len(inputs.rows.ids)
    if values is None or values.ndim != n_axes or len(values) != n_rows:
        shape = "missing" if values is None else f"of shape {list(values.shape)}"
        raise ValueError(
            f"the reading {name!r} is {shape}, expected {n_axes} axes, the first of "
            f"{n_rows} rows; read it with `extract.readings.reader.read`"
        )
    return np.asarray(values, dtype)


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


def defined_rows(is_defined: np.ndarray, rows: Rows, split: str) -> np.ndarray:
    """Return the labelled rows of a split on which a detector is defined.

    Args:
      is_defined: `[n_rows]` bool.
      rows: ids, splits and labels of the same rows.
      split: which.

    Returns:
      Indices of rows of both classes; one class alone is a ValueError.
    """
    where = rows.where(split)
    where = where[is_defined[where]]
    n_right = int(rows.labels[where].sum())
    if not 0 < n_right < len(where):
        raise ValueError(
            f"{rows.setting}: {n_right} of the {len(where)} labelled {split} answers "
            "that were read are correct, and one class alone chooses nothing; take "
            "more questions"
        )
    return where


def oriented(values: np.ndarray, rows: Rows) -> tuple[np.ndarray, int, int]:
    """Choose the column and the sign that are best on validation, of equals the first.

    Of `[n_rows, n_columns]`, NaN where a row was not read; a column that lacks a value
    where another has one is not chosen.

    Returns:
      Scores `[n_rows]`, higher = more likely correct; the column, and 1 or -1.
    """
    valid = defined_rows(np.any(np.isfinite(values), axis=1), rows, "validation")
    aurocs = column_aurocs(values[valid], rows.labels[valid])
    if np.isnan(aurocs).all():
        raise ValueError(
            f"{rows.setting}: every reading lacks a value in some validation row that "
            "another has, so none can be chosen"
        )
    column = int(np.nanargmax(np.abs(aurocs - 0.5)))
    sign = 1 if aurocs[column] >= 0.5 else -1
    return sign * values[:, column], column, sign


def chosen_rows(
    rows: Rows, detector: str, values: Mapping[str, float]
) -> tuple[ResultRow, ...]:
    """Return the rows that hold what validation chose for a detector, by metric."""
    return tuple(chosen_row(rows, detector, *item) for item in values.items())


def answer_lengths(store: FeatureStore) -> np.ndarray:
    """Return how many tokens every answer has, the stop token left out, `[n_rows]`."""
    n_prompt = store.spec.spans[:, ANSWER, 0] + 1 - first_step(store)
    return store.spec.lengths - n_prompt


def last_steps(store: FeatureStore) -> np.ndarray:
    """Return the last step of every answer, `[n_rows]`: how many tokens it has.

    An answer that was cut at the length limit has one step less: what its last token
    emitted is unknown, so the store lacks that token.
    """
    spans = store.spec.spans[:, ANSWER]
    return spans[:, 1] - spans[:, 0] - 1 + first_step(store)


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
    rows = steps - first_step(store)
    d_model = store.spec.families["hidden"].shape[1]
    states = np.full((len(rows), d_model), np.nan, np.float32)
    for start in range(0, len(rows), n_chunk):
        chunk = np.arange(start, min(start + n_chunk, len(rows)))
        ragged = read_family(store, "hidden", chunk, layer=layer, span=ANSWER)
        steps_here = rows[chunk]
        has_step = (steps_here >= 0) & (steps_here < ragged.lengths)
        at = (ragged.starts + steps_here)[has_step]
        states[chunk[has_step]] = ragged.values[at]
    return states


# Of training states `[n_train, width]`, their labels, and the states to be scored
# `[n, width]`: `[n_seeds, n]` scores.
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def scores_where_defined(features: np.ndarray, rows: Rows, fit: Fit) -> np.ndarray:
    """Fit on the training rows that have features, and score all that have.

    Of features `[n_rows, width]`, NaN where a row has none, `[n_seeds, n_rows]` float64
    scores, NaN likewise.
    """
    is_defined = np.all(np.isfinite(features), axis=1)
    train = rows.where("train")
    train = train[is_defined[train]]
    labels = both_classes(rows.labels[train], len(train), "training")
    defined = fit(features[train], labels, features[is_defined])
    scores = np.full((len(defined), len(features)), np.nan)
    scores[:, is_defined] = defined
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
      rows: with labels and splits.
    """
    valid = defined_rows(np.isfinite(scores[0]), rows, "validation")
    labels = rows.labels[valid]
    return float(np.mean([auroc(seed[valid], labels).value for seed in scores]))


def best_layer(
    fit_at: Callable[[int], DetectorOutput],
    layers: Iterable[int],
    rows: Rows,
    name: str,
) -> DetectorOutput:
    """Return a detector's output from the first layer that is best on validation."""
    fits = ((layer, fit_at(layer)) for layer in layers)  # two at a time in memory
    best = max(
        fits, key=lambda fit: validation_auroc(fit[1].scores, rows), default=None
    )
    if best is None:
        raise ValueError(f"{name}: expected at least one layer to choose from")
    layer, output = best
    row = chosen_row(rows, name, "layer", layer)
    return DetectorOutput(output.scores, (row, *output.chosen))

"""Choice of layers, heads and signs, and reading of states for detectors.

Choices maximise AUROC on rows that are not tested. Steps number the positions of an
answer: step 0 is the last prompt token, which predicts the first answer token, and step
s is the s-th answer token. If an answer lacks a state, the state and its score are NaN,
and its row is left out of training.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from scipy.stats import rankdata
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from beatrice.benchmarks.baselines.detector import DetectorInput, DetectorOutput
from beatrice.benchmarks.baselines.plain import chosen_row
from beatrice.extract.run.process import two_at_once
from beatrice.extract.run.rows import ResultRow
from beatrice.extract.store.store import FeatureStore, read_family
from beatrice.jaxprobe.families import ANSWER
from beatrice.jaxprobe.linear import both_classes
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import StoreRows
from beatrice.jaxprobe.tokens import first_step


def reading(
    inputs: DetectorInput, name: str, n_axes: int, dtype: type | None = np.float64
) -> np.ndarray:
    """Return a reading of every row `[n_rows, …]`; with `dtype` None, as stored."""
    values, n_rows = inputs.readings.get(name), len(inputs.rows.ids)
    if values is None or values.ndim != n_axes or len(values) != n_rows:
        shape = "missing" if values is None else f"of shape {list(values.shape)}"
        raise ValueError(
            f"the reading {name!r} is {shape}, expected {n_axes} axes and {n_rows} "
            "rows; read it with `extract.readings.reader.read`"
        )
    return np.asarray(values, dtype)


def column_aurocs(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the AUROC of every column `[n_columns]`; ties count half.

    `values` are `[n_rows, n_columns]`, higher = more likely correct; a column in which
    some are not finite has NaN. `labels` are `[n_rows]` bool, of both classes.
    """
    is_finite = np.isfinite(values).all(axis=0)
    ranks = rankdata(np.where(is_finite, values, 0.0), axis=0)
    n_right, n_wrong = int(labels.sum()), int((~labels).sum())
    below = ranks[labels].sum(axis=0) - n_right * (n_right + 1) / 2
    return np.where(is_finite, below / (n_right * n_wrong), np.nan)


def defined_rows(is_defined: np.ndarray, rows: StoreRows, split: str) -> np.ndarray:
    """Return the indices of a split's labelled rows on which a detector is defined.

    `is_defined` is `[n_rows]` bool. Raises ValueError unless they have both classes.
    """
    where = rows.where(split)
    where = where[is_defined[where]]
    n_right = int(rows.labels[where].sum())
    if not 0 < n_right < len(where):
        raise ValueError(
            f"{rows.setting}: {n_right} of the {len(where)} labelled {split} answers "
            "that were read are correct, but one class alone allows no choice; use "
            "more questions"
        )
    return where


def oriented(values: np.ndarray, rows: StoreRows) -> tuple[np.ndarray, int, int]:
    """Choose the column and the sign that are best on validation; ties: the first.

    `values` is `[n_rows, n_columns]`, NaN for rows that were not read. A column
    that lacks a value in a row where another has one is not chosen. Returns scores
    `[n_rows]`, higher = more likely correct; the column, and 1 or -1.
    """
    valid = defined_rows(np.any(np.isfinite(values), axis=1), rows, "validation")
    aurocs = column_aurocs(values[valid], rows.labels[valid])
    if np.isnan(aurocs).all():
        raise ValueError(
            f"{rows.setting}: every reading lacks a value in some validation row in "
            "which another has one, so none can be chosen"
        )
    column = int(np.nanargmax(np.abs(aurocs - 0.5)))
    sign = 1 if aurocs[column] >= 0.5 else -1
    return sign * values[:, column], column, sign


def chosen_rows(
    rows: StoreRows, detector: str, values: Mapping[str, float]
) -> tuple[ResultRow, ...]:
    """Return result rows on a detector's choices on validation, by metric."""
    return tuple(chosen_row(rows, detector, *item) for item in values.items())


def answer_lengths(store: FeatureStore) -> np.ndarray:
    """Return every answer's number of tokens without the stop token, `[n_rows]`."""
    n_prompt = store.spec.spans[:, ANSWER, 0] + 1 - first_step(store)
    return store.spec.lengths - n_prompt


def last_steps(store: FeatureStore) -> np.ndarray:
    """Return the last step of every answer, `[n_rows]`, which is its number of tokens.

    An answer cut at the length limit has one step less: the token after its last one is
    unknown, so the store lacks the last token.
    """
    spans = store.spec.spans[:, ANSWER]
    return spans[:, 1] - spans[:, 0] - 1 + first_step(store)


def states_at(
    store: FeatureStore, steps: np.ndarray, layer: int, n_chunk: int = 1024
) -> np.ndarray:
    """Return the hidden state of every row at its step, `[n_rows, d_model]` float32.

    NaN for rows whose answer span lacks the step. `steps` are `[n_rows]` int; `layer`
    0 is the embedding. The answers of `n_chunk` examples are in memory together.
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


# From training states `[n_train, width]`, their labels, and states to score
# `[n, width]`, returns scores `[n_seeds, n]`.
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def scores_where_defined(features: np.ndarray, rows: StoreRows, fit: Fit) -> np.ndarray:
    """Fit on the training rows that have features, and score all rows that have them.

    `features` is `[n_rows, width]`, NaN for rows without. Returns `[n_seeds, n_rows]`
    float64 scores, NaN for the same rows.
    """
    is_defined = np.all(np.isfinite(features), axis=1)
    labelled = rows.where("train")
    train = labelled[is_defined[labelled]]
    if len(labelled) and not len(train):
        raise ValueError(
            f"none of the {len(labelled)} labelled training answers has what the "
            "detector reads (a literal answer span lacks the last prompt token)"
        )
    labels = both_classes(rows.labels[train], len(train), "training")
    defined = fit(features[train], labels, features[is_defined])
    scores = np.full((len(defined), len(features)), np.nan)
    scores[:, is_defined] = defined
    return scores


_WARNINGS = threading.Lock()  # their filters are global


def logistic_log_odds(
    train: np.ndarray, labels: np.ndarray, states: np.ndarray, max_iter: int = 100
) -> np.ndarray:
    """Fit scikit-learn's default logistic regression, as official code does.

    On unscaled states, the default 100 iterations rarely converge; the fit at which
    they end is the published detector, so the warning is suppressed.

    Returns:
      `[1, n]` log-odds of True, which rank like the probabilities but do not saturate;
      see `Fit` for the shapes of the arguments.
    """
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression = LogisticRegression(max_iter=max_iter).fit(train, labels)
    return regression.decision_function(states)[None]


def validation_auroc(scores: np.ndarray, rows: StoreRows) -> float:
    """Return the mean AUROC over seeds on the validation rows that have a score.

    `scores` are `[n_seeds, n_rows]`, NaN for the same rows in every seed.
    """
    valid = defined_rows(np.isfinite(scores[0]), rows, "validation")
    labels = rows.labels[valid]
    return float(np.mean([auroc(seed[valid], labels).value for seed in scores]))


def best_layer(
    fit_at: Callable[[int], DetectorOutput],
    layers: Iterable[int],
    rows: StoreRows,
    name: str,
) -> DetectorOutput:
    """Return a detector's output at the first layer that is best on validation."""
    layers = list(layers)
    fits = zip(layers, two_at_once(fit_at, layers), strict=True)
    best = max(
        fits, key=lambda fit: validation_auroc(fit[1].scores, rows), default=None
    )
    if best is None:
        raise ValueError(f"{name}: expected at least one layer to choose from")
    layer, output = best
    row = chosen_row(rows, name, "layer", layer)
    return DetectorOutput(output.scores, (row, *output.chosen))

"""Logistic regressions, and encoders that begin as one.

From a few thousand labelled answers a network cannot learn all that a regression finds
in the same signals. So a regression is fitted first, for each subset of the families,
and the network starts at zero and learns the remainder. A regression has seen the
labels of the training rows and would leave nothing there, so each training row instead
has the logit of a regression that has not seen its question.

A network is dropped unless it ranks the validation answers better than the regression
alone by more than chance explains (`jaxprobe.metrics.is_gain`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.sparse import spmatrix
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.svm import LinearSVC

from beatrice.extract.run.process import StoppablePool, n_cores
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.encoder import COLLECTION
from beatrice.jaxprobe.families import divisors_of, subset_masks
from beatrice.jaxprobe.grid import TrainedMembers, pooled_rows
from beatrice.jaxprobe.metrics import auroc, is_gain
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.tokens import FamilyTokens

# Candidate inverse penalties, chosen from on validation; the paper gives none.
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


Regression = LogisticRegression | LinearSVC
Folds = list[tuple[np.ndarray, np.ndarray]]  # each fold's seen and unseen rows


def logistic_regression(inverse_penalty: float) -> LogisticRegression:
    """Return an unfitted logistic regression."""
    return LogisticRegression(C=inverse_penalty, max_iter=2000)


def fit_linear(
    train: np.ndarray | spmatrix,
    labels: Sequence[bool] | np.ndarray,
    valid: np.ndarray | spmatrix,
    valid_labels: Sequence[bool] | np.ndarray,
    regression_of: Callable[[float], Regression] = logistic_regression,
) -> Regression:
    """Fit on training answers, with the penalty of the best validation AUROC.

    Among equals it is the strongest penalty.

    Args:
      train: `[n_train, n_features]`.
      labels: `[n_train]`, True where the answer is correct.
      valid: `[n_validation, n_features]`.
      valid_labels: `[n_validation]`.
      regression_of: returns an unfitted regression for an inverse penalty.
    """
    use_one_blas_thread()
    is_correct = both_classes(labels, train.shape[0], "training")
    is_valid_correct = both_classes(valid_labels, valid.shape[0], "validation")

    def valid_auroc(regression: Regression) -> float:
        return auroc(regression.decision_function(valid), is_valid_correct).value

    regressions = map(regression_of, INVERSE_PENALTIES)
    return max((x.fit(train, is_correct) for x in regressions), key=valid_auroc)


# What to subtract from the features of a block, and what to divide by, `[n_features]`.
Scale = tuple[np.ndarray, np.ndarray]


def feature_scale(train: np.ndarray) -> Scale:
    """Return what to subtract from a block of features, and what to divide by.

    On the training rows each scaled feature has mean 0 and variance 1 / width, so that
    the variances of a block sum to 1. One range of penalties then serves ten features
    and ten thousand, and blocks can be concatenated.

    Args:
      train: `[n_train, n_features]` of the training rows; a feature that is constant
        there is only centred.

    Returns:
      means and divisors, `[n_features]`, of the dtype of `train`.
    """
    # Double precision: in single precision the mean of equal values differs from them,
    # and the divisor would be that difference.
    mean, std = (f(axis=0, dtype=np.float64) for f in (train.mean, train.std))
    scale = divisors_of(mean, std) * train.shape[1] ** 0.5
    return mean.astype(train.dtype), scale.astype(train.dtype)


def fit_and_score(
    blocks: Sequence[np.ndarray],
    labels: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Fit on rows `train`, choose the penalty on rows `valid`, and score all rows.

    Blocks `[n_rows, n_features]` are scaled one by one (see `feature_scale`) and
    concatenated. Returns log-odds `[n_rows]` and the inverse penalty.
    """
    features = np.concatenate(blocks, axis=1)
    edges = np.cumsum([block.shape[1] for block in blocks])
    for block in np.split(features, edges[:-1], axis=1):  # views: scaled in place
        mean, scale = feature_scale(block[train])
        block -= mean
        block /= scale
    fit = fit_linear(features[train], labels[train], features[valid], labels[valid])
    return fit.decision_function(features).astype(np.float64), fit.C


def both_classes(labels: Sequence[bool] | np.ndarray, n: int, split: str) -> np.ndarray:
    """Return labels as an array, after checking that there are `n` of both classes."""
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (n,):
        raise ValueError(
            f"expected one label per answer ({n}), got shape {is_correct.shape}"
        )
    if is_correct.all() or not is_correct.any():
        one_class = f"all {n} {split} labels are of one class"
        problem = one_class if n else f"there are no {split} labels"
        raise ValueError(
            f"{problem}; training and selection need correct and incorrect answers"
        )
    return is_correct


N_FOLDS = 5


class Pooled(NamedTuple):
    """Pooled signals of rows, see `jaxprobe.encoder`."""

    families: tuple[np.ndarray, ...]  # each `[n_rows, n_parts * d_family]` float32
    labels: np.ndarray  # `[n_rows]` bool

    @classmethod
    def of(
        cls, groups: Iterable[tuple[np.ndarray, FamilyTokens]], labels: np.ndarray
    ) -> "Pooled":
        """Pool rows that come in groups of indices and at least as many examples."""
        indices, pooled = [], []
        for rows, tokens in groups:
            indices.append(rows)
            pooled.append([np.asarray(x)[: len(rows)] for x in pooled_rows(tokens)])
        order = np.argsort(np.concatenate(indices))
        families = map(np.concatenate, zip(*pooled, strict=True))
        return cls(tuple(x[order] for x in families), labels)


class LinearGrid(NamedTuple):
    """The linear parts of every subset, and their logits."""

    # Variables of `encoder.linear_logits`, leaves `[n_subsets, ...]` float32.
    parts: dict[str, np.ndarray]
    # `[n_subsets]`, chosen on validation; 0 for subsets not fitted (parts of zeros).
    inverse_penalty: np.ndarray
    # `[n_subsets, n_train]` logits of regressions that have not seen a row's question
    train: np.ndarray
    fitted: np.ndarray  # `[n_subsets, n_train]` logits of the regression in `parts`
    valid: np.ndarray  # `[n_subsets, n_validation]`


def _scaled(
    families: Sequence[np.ndarray], scales: Sequence[Scale]
) -> list[np.ndarray]:
    return [(x - m) / d for x, (m, d) in zip(families, scales, strict=True)]


def _folds(labels: np.ndarray, questions: np.ndarray) -> Folds:
    """Return folds of questions, such that each fold's seen rows have both classes."""
    names, question = np.unique(questions, return_inverse=True)
    right, wrong = (np.bincount(question, x) > 0 for x in (labels, ~labels))
    if min(right.sum(), wrong.sum()) < 2:
        raise ValueError(
            "cross-fitting needs 2 training questions with a right answer and 2 with a "
            f"wrong one, got {right.sum()} and {wrong.sum()}; take more questions"
        )
    n_folds = min(N_FOLDS, len(names))
    folds = list(GroupKFold(n_folds).split(questions, groups=questions))
    if all(0 < labels[seen].sum() < len(seen) for seen, _ in folds):
        return folds
    order = np.argsort(1 * wrong - right, kind="stable")  # spread classes over folds
    fold = np.argsort(order)[question] % n_folds
    return [
        (np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(n_folds)
    ]


def _unseen_logits(
    x: np.ndarray,
    labels: np.ndarray,
    folds: Folds,
    regression_of: Callable[[float], LogisticRegression],
    inverse_penalty: float,
) -> np.ndarray:
    """Return logits `[n_rows]`, each from a regression that has not seen its fold."""
    logits = np.zeros(len(x))
    for seen, unseen in folds:
        fold = regression_of(inverse_penalty).fit(x[seen], labels[seen])
        logits[unseen] = fold.decision_function(x[unseen])
    return logits


def fit_linear_parts(
    train: Pooled,
    valid: Pooled,
    questions: np.ndarray,
    subsets: Sequence[int],
    on_subset: Callable[[], None] = lambda: None,
) -> LinearGrid:
    """Fit the regressions of subsets of the families.

    Args:
      train: training rows.
      valid: validation rows, on which each regression's penalty is chosen.
      questions: `[n_train]`; rows of one question share a fold.
      subsets: numbers of the subsets.
      on_subset: called in a thread before each subset; may raise to stop.
    """
    scales = [feature_scale(family) for family in train.families]
    scaled = [_scaled(rows.families, scales) for rows in (train, valid)]
    folds = _folds(train.labels, questions)
    widths = [len(mean) for mean, _ in scales]
    masks = subset_masks(len(widths))
    n_subsets = len(masks)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((n_subsets, *shape), np.float32)

    grid = LinearGrid(
        {**{f"kernel_{f}": zeros(n) for f, n in enumerate(widths)}, "bias": zeros()},
        np.zeros(n_subsets),
        *(zeros(len(rows.labels)) for rows in (train, train, valid)),
    )

    def fit_subset(subset: int) -> None:
        on_subset()
        read = np.flatnonzero(masks[subset])
        x, y = (np.concatenate([rows[f] for f in read], axis=1) for rows in scaled)
        best = fit_linear(x, train.labels, y, valid.labels, checked)
        grid.inverse_penalty[subset] = best.C
        grid.fitted[subset] = best.decision_function(x)
        grid.valid[subset] = best.decision_function(y)
        grid.train[subset] = _unseen_logits(x, train.labels, folds, checked, best.C)
        kernels = _linear_weights(best, {f: scales[f] for f in read.tolist()})
        for name, values in kernels.items():
            grid.parts[name][subset] = values

    use_one_blas_thread()
    with StoppablePool(n_cores()) as pool:
        checked = pool.checked(logistic_regression)
        list(pool.map(fit_subset, subsets))
    return grid


def _linear_weights(
    regression: Any, scales: Mapping[int, Scale]
) -> dict[str, np.ndarray]:
    """Return the linear part that equals a regression on scaled families."""
    bias, start, kernels = np.asarray(regression.intercept_)[0], 0, {}
    for f, (mean, scale) in scales.items():
        weights = regression.coef_[0][start : start + len(mean)] / scale
        kernels[f"kernel_{f}"] = weights.astype(np.float32)
        start, bias = start + len(mean), bias - mean @ weights
    return {**kernels, "bias": np.asarray(bias, np.float32)}


def fit_ridge(
    train: Pooled, questions: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Fit one regression on all families, with the penalty chosen on training rows.

    The criterion is cross-fitted log loss, which depends on the scale of the logits as
    well as on their order; validation rows are left for calibration. Chosen is the
    strongest penalty whose loss is within one standard error, by question, of the
    least. Returns the linear part, and logits `[n_train]`, each from a regression that
    has not seen the row's question.
    """
    scales = [feature_scale(family) for family in train.families]
    x, labels = np.concatenate(_scaled(train.families, scales), axis=1), train.labels
    folds = _folds(labels, questions)
    _, question = np.unique(questions, return_inverse=True)
    use_one_blas_thread()
    with StoppablePool(n_cores()) as pool:
        checked = pool.checked(logistic_regression)
        fit = partial(_unseen_logits, x, labels, folds, checked)
        logits = np.stack(list(pool.map(fit, INVERSE_PENALTIES)))
    losses = np.logaddexp(0.0, np.where(labels, -logits, logits))
    by_question = np.stack([np.bincount(question, row) for row in losses])
    excess = by_question - by_question[by_question.sum(axis=1).argmin()]
    errors = excess.std(axis=1) * excess.shape[1] ** 0.5
    chosen = int(np.argmax(excess.sum(axis=1) <= errors))  # the strongest comes first
    best = logistic_regression(INVERSE_PENALTIES[chosen]).fit(x, labels)
    return _linear_weights(best, dict(enumerate(scales))), logits[chosen]


def with_linear_parts(trained: TrainedMembers, grid: LinearGrid) -> TrainedMembers:
    """Return trained members with the linear parts of their subsets added."""
    subsets = [member.subset for member in trained.members]
    parts = {name: values[subsets] for name, values in grid.parts.items()}
    return trained._replace(params={**trained.params, COLLECTION: parts})


def drop_networks_without_gain(
    trained: TrainedMembers,
    logits: np.ndarray,
    grid: LinearGrid,
    labels: np.ndarray,
    questions: np.ndarray,
) -> TrainedMembers:
    """Zero the last layer of networks without a gain on their linear part (`is_gain`).

    Args:
      trained: members with their linear parts.
      logits: `[n_members, n_validation]` of network and linear part together.
      grid: the linear parts.
      labels: `[n_validation]` bool.
      questions: `[n_validation]`, see `jaxprobe.metrics.auroc_gain`.
    """
    linear = [grid.valid[member.subset] for member in trained.members]
    pairs = zip(logits, linear, strict=True)
    is_dropped = np.array([not is_gain(*pair, labels, questions) for pair in pairs])
    network = trained.params["params"]
    mlp_out = jax.tree.map(
        lambda x: np.where(is_dropped.reshape(-1, *[1] * (x.ndim - 1)), 0.0, x),
        network["mlp_out"],
    )
    linear_auroc = np.array([auroc(x, labels).value for x in linear], np.float32)
    best = np.where(is_dropped, linear_auroc, trained.info.best_auroc)
    return trained._replace(
        params={**trained.params, "params": {**network, "mlp_out": mlp_out}},
        info=trained.info._replace(best_auroc=best),
    )


def n_networks_kept(trained: TrainedMembers) -> int:
    """Return how many members have a network that adds to their linear part."""
    mlp_out = jax.tree.leaves(trained.params["params"]["mlp_out"])
    used = [np.any(x.reshape(len(trained.members), -1), axis=1) for x in mlp_out]
    return int(np.any(used, axis=0).sum())


def save_linear(cache: Cache, grid: LinearGrid) -> None:
    """Save the linear parts, for resuming a run."""
    logits = {name: x for name, x in grid._asdict().items() if name != "parts"}
    cache.save("linear", {**grid.parts, **logits})


def load_linear(cache: Cache, subsets: Sequence[int]) -> LinearGrid | None:
    """Return the saved linear parts, or None if any of the subsets is missing."""
    arrays = cache.load("linear")
    if arrays is None or not arrays["inverse_penalty"][subsets].all():
        return None
    logits = {name: arrays.pop(name) for name in LinearGrid._fields if name != "parts"}
    return LinearGrid(arrays, **logits)

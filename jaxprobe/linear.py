"""Logistic regressions, and encoders that begin as one.

A few thousand labelled answers are too few for a network to find all that a regression
finds in the same signals. So the regression comes first, one for each subset of the
families, and the network starts as zero and learns what it leaves. On training rows the
regression has seen the labels, and would leave nothing there: in its place stand
regressions that have not seen the row's question.

A network that does not rank the validation answers better than the regression alone, by
more than chance (`jaxprobe.metrics.is_gain`), is dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.sparse import spmatrix
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.svm import LinearSVC

from beatrice.extract.run.process import n_cores
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.encoder import COLLECTION, pooled_signals
from beatrice.jaxprobe.families import divisors_of, subset_masks
from beatrice.jaxprobe.grid import Trained
from beatrice.jaxprobe.metrics import auroc, is_gain
from beatrice.jaxprobe.stored import use_one_blas_thread
from beatrice.jaxprobe.tokens import FamilyTokens

# Inverse strengths of the penalty, from which validation chooses; the paper gives none.
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


Regression = LogisticRegression | LinearSVC
Folds = list[tuple[np.ndarray, np.ndarray]]  # each fold's seen and unseen rows


def logistic_regression(inverse_penalty: float) -> LogisticRegression:
    """Return a logistic regression to be fitted."""
    return LogisticRegression(C=inverse_penalty, max_iter=2000)


def fit_linear(
    train: np.ndarray | spmatrix,
    labels: Sequence[bool] | np.ndarray,
    valid: np.ndarray | spmatrix,
    valid_labels: Sequence[bool] | np.ndarray,
    regression_of: Callable[[float], Regression] = logistic_regression,
) -> Regression:
    """Fit on training answers; validation AUROC chooses the penalty.

    Of equals, the strongest penalty.

    Args:
      train: `[n_train, n_features]`.
      labels: `[n_train]`, True where the answer is correct.
      valid: `[n_validation, n_features]`.
      valid_labels: `[n_validation]`.
      regression_of: the regression of an inverse penalty, to be fitted.
    """
    is_correct = both_classes(labels, train.shape[0], "training")
    is_valid_correct = both_classes(valid_labels, valid.shape[0], "validation")

    def valid_auroc(regression: Regression) -> float:
        return auroc(regression.decision_function(valid), is_valid_correct).value

    regressions = map(regression_of, INVERSE_PENALTIES)
    return max((x.fit(train, is_correct) for x in regressions), key=valid_auroc)


# What to subtract from the features of a block, and what to divide by, `[n_features]`.
Scale = tuple[np.ndarray, np.ndarray]


def block_scale(train: np.ndarray) -> Scale:
    """Return what to subtract from a block of features, and what to divide by.

    Features then have mean 0 and one variance on the training rows, and together
    those of a row have variance 1, whatever the block's width: one range of penalties
    serves ten features and ten thousand, and blocks can stand side by side.

    Args:
      train: `[n_train, n_features]` of the training rows; a feature that is constant
        there is only centred.

    Returns:
      means and divisors, `[n_features]`, of the dtype of `train`.
    """
    # Double precision: in single, the mean of equal values differs from them, and the
    # difference would be the divisor.
    mean, std = (f(axis=0, dtype=np.float64) for f in (train.mean, train.std))
    scale = divisors_of(mean, std) * train.shape[1] ** 0.5
    return mean.astype(train.dtype), scale.astype(train.dtype)


def score_blocks(
    blocks: Sequence[np.ndarray],
    labels: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Fit on rows `train`, choose the penalty on rows `valid`, and score all.

    Blocks `[n_rows, n_features]` stand side by side in one regression, each scaled by
    itself, see `block_scale`. Returned are `[n_rows]` log-odds, and the inverse
    penalty.
    """
    features = np.concatenate(blocks, axis=1)
    edges = np.cumsum([block.shape[1] for block in blocks])
    for block in np.split(features, edges[:-1], axis=1):  # views: scaled in place
        mean, scale = block_scale(block[train])
        block -= mean
        block /= scale
    fit = fit_linear(features[train], labels[train], features[valid], labels[valid])
    return fit.decision_function(features).astype(np.float64), fit.C


def both_classes(labels: Sequence[bool] | np.ndarray, n: int, split: str) -> np.ndarray:
    """Return `n` labels of both classes as an array."""
    is_correct = np.asarray(labels, dtype=bool)
    if is_correct.shape != (n,):
        raise ValueError(
            f"labels have shape {is_correct.shape}, expected one per answer ({n})"
        )
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"the {n} {split} labels hold one class only; training and selection need "
            "correct and incorrect answers"
        )
    return is_correct


N_FOLDS = 5

_pooled = jax.jit(pooled_signals)


class Pooled(NamedTuple):
    """Pooled signals of rows, see `jaxprobe.encoder`."""

    # Per family `[n_rows, n_parts * d_family]` float32.
    families: tuple[np.ndarray, ...]
    labels: np.ndarray  # `[n_rows]` bool

    @classmethod
    def of(
        cls, groups: Iterable[tuple[np.ndarray, FamilyTokens]], labels: np.ndarray
    ) -> "Pooled":
        """Pool rows that come in groups: indices, and tokens of at least as many."""
        indices, pooled = [], []
        for rows, tokens in groups:
            indices.append(rows)
            pooled.append([np.asarray(x)[:, : len(rows)] for x in _pooled(tokens)])
        order = np.argsort(np.concatenate(indices))
        families = (np.concatenate(x, axis=1) for x in zip(*pooled, strict=True))
        return cls(tuple(x.T[order] for x in families), labels)


class LinearGrid(NamedTuple):
    """The linear parts of every subset, and their logits."""

    # The variables of `jaxprobe.encoder.linear_logits` of every subset, leaves
    # `[n_subsets, ...]` float32.
    parts: dict[str, np.ndarray]
    # `[n_subsets]`, chosen by the validation rows; 0 where a subset was not fitted: its
    # part is zero.
    inverse_penalty: np.ndarray
    # `[n_subsets, n_train]` logits of training rows, each of a regression that has not
    # seen the row's question.
    train: np.ndarray
    fitted: np.ndarray  # `[n_subsets, n_train]` logits of the regression in `parts`
    valid: np.ndarray  # `[n_subsets, n_validation]`


def _scaled(
    families: Sequence[np.ndarray], scales: Sequence[Scale]
) -> list[np.ndarray]:
    return [(x - m) / d for x, (m, d) in zip(families, scales, strict=True)]


def _folds(labels: np.ndarray, questions: np.ndarray) -> Folds:
    """Return folds of questions; the rarer class is spread."""
    names, question = np.unique(questions, return_inverse=True)
    right, wrong = (np.bincount(question, x) > 0 for x in (labels, ~labels))
    if min(right.sum(), wrong.sum()) < 2:
        raise ValueError(
            f"{right.sum()} training questions have a right answer and {wrong.sum()} a "
            "wrong one; regressions that leave questions out in turn need two of each: "
            "take more questions"
        )
    n_folds = min(N_FOLDS, len(names))
    folds = list(GroupKFold(n_folds).split(questions, groups=questions))
    if all(0 < labels[seen].sum() < len(seen) for seen, _ in folds):
        return folds
    order = np.argsort(1 * wrong - right, kind="stable")  # those of a class: neighbours
    fold = np.argsort(order)[question] % n_folds
    return [
        (np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(n_folds)
    ]


def _unseen_logits(
    x: np.ndarray, labels: np.ndarray, folds: Folds, inverse_penalty: float
) -> np.ndarray:
    """Return logits `[n_rows]`, each of a regression that has not seen its fold."""
    logits = np.zeros(len(x))
    for seen, unseen in folds:
        fold = logistic_regression(inverse_penalty).fit(x[seen], labels[seen])
        logits[unseen] = fold.decision_function(x[unseen])
    return logits


def fit_linear_parts(
    train: Pooled, valid: Pooled, questions: np.ndarray, subsets: Sequence[int]
) -> LinearGrid:
    """Fit the regressions of subsets of the families.

    Args:
      train: training rows.
      valid: validation rows, which choose each regression's penalty.
      questions: `[n_train]`; rows of one question are in one fold.
      subsets: their numbers.
    """
    scales = [block_scale(family) for family in train.families]
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
        read = np.flatnonzero(masks[subset])
        x, y = (np.concatenate([rows[f] for f in read], axis=1) for rows in scaled)
        best = fit_linear(x, train.labels, y, valid.labels)
        grid.inverse_penalty[subset] = best.C
        grid.fitted[subset] = best.decision_function(x)
        grid.valid[subset] = best.decision_function(y)
        grid.train[subset] = _unseen_logits(x, train.labels, folds, best.C)
        kernels = _linear_weights(best, {f: scales[f] for f in read.tolist()})
        for name, values in kernels.items():
            grid.parts[name][subset] = values

    use_one_blas_thread()
    with ThreadPoolExecutor(n_cores()) as pool:
        list(pool.map(fit_subset, subsets))
    return grid


def _linear_weights(
    regression: Any, scales: Mapping[int, Scale]
) -> dict[str, np.ndarray]:
    """Return the part of an encoder that is a regression on scaled families."""
    bias, start, kernels = np.asarray(regression.intercept_)[0], 0, {}
    for f, (mean, scale) in scales.items():
        weights = regression.coef_[0][start : start + len(mean)] / scale
        kernels[f"kernel_{f}"] = weights.astype(np.float32)
        start, bias = start + len(mean), bias - mean @ weights
    return {**kernels, "bias": np.asarray(bias, np.float32)}


def fit_ridge(
    train: Pooled, questions: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Fit one regression of all families; the penalty is chosen on training rows.

    Cross-fitted log loss chooses it, which looks at the scale of the logits as well as
    at their order; validation rows are left for calibration. Taken is the strongest
    penalty whose loss is within a standard error, by question, of the least. Beside the
    linear part are `[n_train]` logits, each of a regression that has not seen its
    question.
    """
    scales = [block_scale(family) for family in train.families]
    x, labels = np.concatenate(_scaled(train.families, scales), axis=1), train.labels
    folds = _folds(labels, questions)
    _, question = np.unique(questions, return_inverse=True)
    use_one_blas_thread()
    with ThreadPoolExecutor(n_cores()) as pool:
        fit = partial(_unseen_logits, x, labels, folds)
        logits = np.stack(list(pool.map(fit, INVERSE_PENALTIES)))
    losses = np.logaddexp(0.0, np.where(labels, -logits, logits))
    by_question = np.stack([np.bincount(question, row) for row in losses])
    excess = by_question - by_question[by_question.sum(axis=1).argmin()]
    errors = excess.std(axis=1) * excess.shape[1] ** 0.5
    chosen = int(np.argmax(excess.sum(axis=1) <= errors))  # the strongest comes first
    best = logistic_regression(INVERSE_PENALTIES[chosen]).fit(x, labels)
    return _linear_weights(best, dict(enumerate(scales))), logits[chosen]


def with_linear_parts(trained: Trained, grid: LinearGrid) -> Trained:
    """Return trained members whose variables hold the linear parts of their subsets."""
    subsets = [member.subset for member in trained.members]
    parts = {name: values[subsets] for name, values in grid.parts.items()}
    return trained._replace(params={**trained.params, COLLECTION: parts})


def drop_networks_without_gain(
    trained: Trained,
    logits: np.ndarray,
    grid: LinearGrid,
    labels: np.ndarray,
    questions: np.ndarray,
) -> Trained:
    """Zero the last layer of networks that gain nothing on their linear part.

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


def n_networks_kept(trained: Trained) -> int:
    """Return how many members have a network that adds to their linear part."""
    mlp_out = jax.tree.leaves(trained.params["params"]["mlp_out"])
    used = [np.any(x.reshape(len(trained.members), -1), axis=1) for x in mlp_out]
    return int(np.any(used, axis=0).sum())


def save_linear(cache: Cache, grid: LinearGrid) -> None:
    """Save the parts for a run that continues."""
    logits = {name: x for name, x in grid._asdict().items() if name != "parts"}
    cache.save("linear", {**grid.parts, **logits})


def load_linear(cache: Cache, subsets: Sequence[int]) -> LinearGrid | None:
    """Return the saved parts, or None where some of the subsets are missing."""
    arrays = cache.load("linear")
    if arrays is None or not arrays["inverse_penalty"][subsets].all():
        return None
    logits = {name: arrays.pop(name) for name in LinearGrid._fields if name != "parts"}
    return LinearGrid(arrays, **logits)

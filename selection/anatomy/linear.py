"""What logistic regression finds: in every layer, and in what encoders are given.

The layer sweep of the paper (figure of the same name) reads at most some answers of
each split and has no interval; here every labelled answer counts, on validation, test
and held-out sets.
"""

from collections.abc import Sequence

import numpy as np

from extract.run.results import ResultRow
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.reading import mean_answer_states
from jaxprobe.fit.linear import Pooled
from jaxprobe.regression import block_scale, fit_linear
from selection.anatomy.analysis import Analysis, in_each_setting, some_rows
from selection.anatomy.encoders import Deployed

LAYERS = "anatomy_layers"


def linear_scores(
    blocks: Sequence[np.ndarray],
    labels: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
) -> np.ndarray:
    """Fit on some rows, choose the penalty on others, and score all.

    Every block is scaled, see `block_scale`: five probabilities count beside thousands
    of states.

    Args:
      blocks: `[n, n_features]` each, side by side.
      labels: `[n]` bool.
      train: indices of the training rows.
      valid: indices of the rows whose AUROC chooses the penalty, the strongest of ties.

    Returns:
      `[n]` log-odds; NaN where training or validation rows hold one class.
    """
    if any(len(set(labels[part].tolist())) < 2 for part in (train, valid)):
        return np.full(len(labels), np.nan)
    scaled = []
    for block in blocks:
        mean, scale = block_scale(block[train])
        scaled.append((block - mean) / scale)
    features = np.concatenate(scaled, axis=1)
    fit = fit_linear(features[train], labels[train], features[valid], labels[valid])
    return fit.regression.decision_function(features).astype(np.float64)


def pooled_signals(deployed: Deployed, where: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what a linear probe reads of some rows, `[n, n_features]` a family.

    The same as encoders that begin as regressions do, see `jaxprobe.model.encoder`.
    """
    labels = deployed.rows.labels[where]
    return Pooled.of(deployed.parts(where, 2), labels).families


def layers(deployed: Deployed) -> list[ResultRow]:
    """Return the AUROC of the mean answer state of every kept layer, on every row."""
    rows, store = deployed.rows, deployed.store
    where = np.flatnonzero(rows.is_labelled)
    own = some_rows(rows, where)
    train, valid = own.where("train"), own.where("validation")
    scored = []
    for layer in store.spec.hidden_layers:
        states = mean_answer_states(store, where, layer)
        scores = linear_scores([states], own.labels, train, valid)
        scored.append(Scored(name=f"layer {layer}", scores=scores[None]))
    made = detection_rows(scored, own, deployed.bootstrap, LAYERS)
    return [row for row in made if row.metric == "auroc"]


ANALYSES = (Analysis("layers", in_each_setting(layers)),)

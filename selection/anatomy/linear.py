"""What logistic regression finds: in every layer, and in what encoders are given.

The layer sweep of the paper (figure of the same name) reads at most some answers of
each split and has no interval; here every labelled answer counts, on validation, test
and held-out sets.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from extract.run.results import ResultRow
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.families import FamilyTokens
from jaxprobe.features.reading import mean_answer_states
from jaxprobe.kernels.masked import masked_pool
from jaxprobe.metrics import auroc
from selection.anatomy.analysis import Evidence, Tick, some_rows
from selection.anatomy.encoders import Deployed

LAYERS = "anatomy_layers"
INVERSE_PENALTIES = (0.1, 1.0, 10.0)


def linear_scores(
    blocks: Sequence[np.ndarray],
    labels: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
) -> np.ndarray:
    """Fit on some rows, choose the penalty on others, and score all.

    Every block is centred and scaled on the training rows so that the features of a
    row together have variance one: five probabilities count beside thousands of states.

    Args:
      blocks: `[n, n_features]` each, side by side.
      labels: `[n]` bool.
      train: indices of the training rows.
      valid: indices of the rows whose AUROC chooses the penalty, the strongest of ties.

    Returns:
      `[n]` log-odds; NaN where the training rows hold one class.
    """
    # Here, since it takes a second to load, and most analyses fit nothing.
    from sklearn.linear_model import LogisticRegression

    if len(set(labels[train].tolist())) < 2:
        return np.full(len(labels), np.nan)
    scaled = []
    for block in blocks:
        spread = block[train].std(axis=0)
        scale = np.where(spread > 0, spread, 1) * np.sqrt(block.shape[1])
        scaled.append((block - block[train].mean(axis=0)) / scale)
    features = np.concatenate(scaled, axis=1)
    fits = []
    for inverse_penalty in INVERSE_PENALTIES:
        fit = LogisticRegression(C=inverse_penalty, max_iter=1000)
        fit.fit(features[train], labels[train])
        value = auroc(fit.decision_function(features[valid]), labels[valid]).value
        fits.append((np.nan_to_num(value), fit))
    best = max(fits, key=lambda one: one[0])[1]
    return best.decision_function(features).astype(np.float64)


@jax.jit
def pooled_parts(features: FamilyTokens) -> tuple[jax.Array, ...]:
    """Pool tokens as a linear probe reads them; some rows of `pooled_signals`.

    Returns:
      Per family `[n, n_parts * d_family]`: the mean of every span, then the largest and
      the least of the answer.
    """
    n_others = len(features.masks) - 1

    def one(tokens: jax.Array) -> jax.Array:
        parts = []
        spans = zip(features.masks, features.span_slices, strict=True)
        for span, (mask, at) in enumerate(spans):
            channels, real = tokens[at].transpose(2, 0, 1), mask.astype(jnp.float32)
            most, mean = jnp.split(masked_pool(channels, real), 2)
            parts.append(mean)
            if span == n_others:
                least = -jnp.split(masked_pool(-channels * real[None], real), 2)[0]
                parts += [most, least]
        return jnp.concatenate(parts).T

    return tuple(map(one, features.tokens))


def pooled_signals(deployed: Deployed, where: np.ndarray) -> list[np.ndarray]:
    """Return what a linear probe reads of some rows, family by family.

    Of every span the mean of each channel, of the answer the largest and least too.

    Returns:
      Per family `[n, n_features]` float32.
    """
    found, order = [], []
    for places, tokens in deployed.parts(where, 2):
        found.append([np.asarray(own)[: len(places)] for own in pooled_parts(tokens)])
        order.append(places)
    back = np.argsort(np.concatenate(order))
    return [np.concatenate(own)[back] for own in zip(*found, strict=True)]


def layers(evidence: Evidence, tick: Tick = lambda: None) -> list[ResultRow]:
    """Return the AUROC of the mean answer state of every kept layer, on every row."""
    rows, store = evidence.rows, evidence.store
    where = np.flatnonzero(rows.is_labelled)
    own = some_rows(rows, where)
    train, valid = own.where("train"), own.where("validation")
    scored = []
    for layer in store.spec.hidden_layers:
        states = mean_answer_states(store, where, layer)
        scores = linear_scores([states], own.labels, train, valid)
        scored.append(Scored(name=f"layer {layer}", scores=scores[None]))
        tick()
    made = detection_rows(scored, own, evidence.bootstrap, LAYERS)
    return [row for row in made if row.metric == "auroc"]

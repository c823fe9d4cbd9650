"""The head of Gnosis finds what was planted in either stream, and nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors.gnosis import (
    GnosisConfig,
    GnosisHead,
    Inputs,
    fit_heads,
    gnosis_scores,
)
from tests.benchmarks.rows import rows_of

N = 300
GNOSIS = catalogue()["gnosis"]
# All fits of one seed share what is compiled: shapes and this configuration.
SMALL = GnosisConfig(
    width=16, head_widths=(16,), n_grid=1, n_seeds=1, n_epochs=8, batch_size=16
)


def some_labels(seed=7):
    return np.random.default_rng(seed).random(N) < 0.5


def planted(labels, where):
    """Noise, but for one statistic of every head, or one channel of one step."""
    rng = np.random.default_rng(1)
    maps = rng.standard_normal((N, 2, 3, 23)).astype(np.float32)
    states = rng.standard_normal((N, 8, 6)).astype(np.float32)
    if where == "maps":
        maps[:, :, :, 4] += 4 * labels[:, None, None]
    else:
        states[:, 5, 2] += 4 * labels
    return maps, states


def measured(scores, labels):
    test = rows_of(labels).where("test")
    return roc_auc_score(labels[test], scores[0, test])


@pytest.mark.parametrize("where", ["maps", "states"])
def test_either_stream_alone_tells_right_from_wrong(where):
    labels = some_labels()
    found = gnosis_scores(*planted(labels, where), rows_of(labels), SMALL)
    assert measured(found.scores, labels) > 0.85
    (chosen,) = found.chosen
    assert chosen.metric == "epoch" and 1 <= chosen.value <= SMALL.n_epochs


def test_an_answer_that_was_not_read_has_no_score_and_teaches_nothing():
    labels = some_labels()
    maps, states = planted(labels, "states")
    maps[3, 0, 0, 0] = states[4] = maps[N - 1] = np.nan
    config = dataclasses.replace(SMALL, n_epochs=1)
    scores = gnosis_scores(maps, states, rows_of(labels), config).scores
    assert scores.shape == (1, N) and scores.dtype == np.float64
    assert np.flatnonzero(np.isnan(scores[0])).tolist() == [3, 4, N - 1]
    assert GNOSIS.is_trained and set(GNOSIS.reads) == {"gnosis_maps", "gnosis_states"}


@functools.cache
def fitted(**changes):
    labels = some_labels()
    maps, states = planted(labels, "maps")
    config = dataclasses.replace(SMALL, **changes)
    train, valid = np.arange(100), np.arange(200, 300)
    inputs = Inputs(maps, states)
    found = fit_heads(
        inputs.at(train), labels[train], inputs.at(valid), labels[valid], config
    )
    return found, config, inputs, labels


def test_a_seed_of_several_is_fitted_as_it_is_alone():
    several, _, _, _ = fitted(n_seeds=2, patience=1)
    alone, _, _, _ = fitted(patience=1)
    assert several.epochs[0] == alone.epochs[0]
    pairs = map(jax.tree.leaves, (several.params, alone.params))
    for one, other in zip(*pairs, strict=True):
        # Adam divides gradients by their own size, so rounding of tiny ones shows.
        np.testing.assert_allclose(one[0], other[0], atol=1e-3)
    kernels = jax.tree.leaves(several.params)
    assert max(float(np.abs(x[1] - x[0]).max()) for x in kernels) > 0.05


def test_a_head_keeps_the_epoch_that_is_best_on_validation():
    best, config, inputs, labels = fitted(patience=6)
    apply = jax.jit(GnosisHead(config).apply)
    valid, values = np.arange(200, 300), []
    for patience in (6, 1):
        found, _, _, _ = fitted(patience=patience)
        own = jax.tree.map(lambda x: x[0], found.params)
        logits = apply(own, *inputs.at(valid))
        values.append(roc_auc_score(labels[valid], logits))
    assert 1 <= best.epochs[0] <= SMALL.n_epochs and values[0] >= values[1] > 0.5


def test_a_step_and_a_head_have_their_places():
    head = GnosisHead(SMALL)
    maps, states = (x[:4] for x in planted(some_labels(), "maps"))
    params = jax.jit(head.init)(jax.random.key(0), maps, states)
    apply = jax.jit(head.apply)
    plain = apply(params, maps, states)
    for moved in ((maps[:, ::-1], states), (maps[:, :, ::-1], states)):
        assert np.abs(apply(params, *moved) - plain).max() > 1e-5
    turned = apply(params, maps, states[:, ::-1])
    assert np.abs(turned - plain).max() > 1e-5
    alone = apply(params, maps[:1], states[:1])
    np.testing.assert_allclose(alone, plain[:1], atol=1e-5)

"""Detectors that learn from labels: each finds what was planted, and nothing else."""

import jax
import numpy as np
import pytest
import torch
from scipy.special import logit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors.choice import last_steps, states_at
from beatrice.benchmarks.baselines.detectors.probes import (
    SaplmaConfig,
    SaplmaNetwork,
    saplma_logits,
)
from tests.benchmarks.baselines.planted import memory_store
from tests.benchmarks.rows import rows_of

D, LAYERS = 8, (0, 2, 5)


def noise(labels, seed=0):
    """States of answers of 1 to 4 tokens, and of an empty one; step 0 comes first."""
    rng = np.random.default_rng(seed)
    n_tokens = rng.integers(1, 5, len(labels))
    n_tokens[3] = 0
    sizes = [(n + 1, len(LAYERS), D) for n in n_tokens]
    return [rng.standard_normal(size).astype(np.float32) for size in sizes]


def stored(answers, answer_span="emitting"):
    """A store of these states, behind three prompt tokens of nothing but 99."""
    skipped = int(answer_span == "literal")
    lengths = np.array([3 + len(states) for states in answers])
    bounds = np.stack([lengths * 0, lengths * 0, lengths * 0 + 3 + skipped, lengths], 1)
    spans = np.stack([bounds[:, i : i + 2] for i in range(3)], axis=1)
    prompt = np.full((3, len(LAYERS), D), 99, np.float32)
    every = np.concatenate([x for states in answers for x in (prompt, states)])
    values = {"hidden": every}
    return memory_store(values, lengths, spans, layers=LAYERS, answer_span=answer_span)


def some_labels(n, seed=7):
    return np.random.default_rng(seed).random(n) < 0.5


def planted(labels, step, layer=1, size=3.0):
    """Right answers have a larger first channel at one step, of one layer alone."""
    answers = noise(labels)
    for own, label in zip(answers, labels, strict=True):
        if len(own) > 1:
            own[step, layer, 0] += size * label
    return answers


def measured(found, rows, labels=None):
    """AUROC of the first seed on the test rows that have a score."""
    test = rows.where("test")
    test = test[np.isfinite(found.scores[0, test])]
    labels = rows.labels if labels is None else labels
    return roc_auc_score(labels[test], found.scores[0, test])


def inputs(rows, store=None, **readings):
    return DetectorInput(store=store, rows=rows, layer=2, readings=readings)


def chosen(found):
    return {row.metric: row.value for row in found.chosen}


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
def test_a_step_is_counted_from_the_token_before_the_answer(answer_span):
    answers = noise(np.zeros(30))
    store = stored(answers, answer_span)
    n_tokens = np.array([len(own) - 1 for own in answers])
    np.testing.assert_array_equal(last_steps(store), n_tokens)
    for step in range(-1, 6):
        found = states_at(store, np.full(30, step), LAYERS[1], n_chunk=7)
        first = int(answer_span == "literal")
        for own, state in zip(answers, found, strict=True):
            if first <= step < len(own):
                np.testing.assert_array_equal(state, own[step, 1])
            else:
                assert np.isnan(state).all()


def test_saplma_reads_the_last_token_of_the_layer_where_it_was_planted():
    labels = some_labels(900)
    rows, store = rows_of(labels), stored(planted(labels, step=-1))
    found = catalogue()["saplma_last"].score(inputs(rows, store))
    assert found.scores.shape == (3, 900) and chosen(found) == {"layer": 2}
    assert measured(found, rows) > 0.9
    elsewhere = rows_of(labels), stored(planted(labels, step=0))
    found = catalogue()["saplma_last"].score(inputs(*elsewhere))
    assert abs(measured(found, rows) - 0.5) < 0.12  # of 300 answers, s.d. 0.033


def test_saplma_of_the_mean_reads_every_step():
    labels = some_labels(900)
    rows, store = rows_of(labels), stored(planted(labels, slice(None), size=2.0))
    found = catalogue()["saplma_mean"].score(inputs(rows, store))
    assert chosen(found) == {"layer": 2} and measured(found, rows) > 0.9
    assert np.isfinite(found.scores).all()


def test_an_answer_without_a_token_has_no_last_one_and_teaches_nothing():
    labels = some_labels(300)
    rows, store = rows_of(labels), stored(planted(labels, step=-1))
    found = catalogue()["saplma_last"].score(inputs(rows, store))
    np.testing.assert_array_equal(np.isnan(found.scores).sum(axis=1), [1, 1, 1])
    assert np.isnan(found.scores[:, 3]).all()


def test_the_layer_is_chosen_on_validation_not_on_training_rows():
    labels = some_labels(600)
    answers = planted(labels, slice(None))
    is_valid = np.arange(600) >= 200
    for own, label, held in zip(answers, labels, is_valid, strict=True):
        own[:, 2, 1] += 9 * label * (not held)  # perfect in training, absent after it
    found = catalogue()["linear_probe"].score(inputs(rows_of(labels), stored(answers)))
    assert chosen(found)["layer"] == LAYERS[1]


def small_fit(n=70, n_seeds=2):
    rng = np.random.default_rng(0)
    states = rng.standard_normal((n, D)).astype(np.float32)
    return states, states[:, 0] > 0, SaplmaConfig(n_seeds=n_seeds, n_epochs=2)


def test_saplma_is_the_published_network():
    params = SaplmaNetwork().init(jax.random.key(0), np.zeros((1, D), np.float32))
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    assert shapes == {(D, 256), (256, 128), (128, 64), (64, 1)}


def test_saplma_is_fitted_as_torch_would():
    states, labels, config = small_fit()
    key = jax.random.fold_in(jax.random.key(config.root_seed), 1)
    init_key, *epoch_keys = jax.random.split(key, 1 + config.n_epochs)
    params = SaplmaNetwork().init(init_key, states[:1])["params"]
    layers = []
    for number in range(4):
        own = params[f"Dense_{number}"]
        layers += [torch.nn.Linear(*own["kernel"].shape), torch.nn.ReLU()]
        layers[-2].weight.data = torch.tensor(np.asarray(own["kernel"]).T.copy())
        layers[-2].bias.data = torch.tensor(np.asarray(own["bias"]))
    network = torch.nn.Sequential(*layers[:-1])
    adam = torch.optim.Adam(network.parameters(), 1e-3, eps=1e-7)
    inputs, targets = torch.tensor(states), torch.tensor(labels, dtype=torch.float32)
    for epoch_key in epoch_keys:
        order = np.asarray(jax.random.permutation(epoch_key, len(states)))
        for batch in torch.tensor(order).split(32):
            adam.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(
                network(inputs[batch])[:, 0], targets[batch]
            ).backward()
            adam.step()
    with torch.no_grad():
        expected = network(inputs)[:, 0].numpy()
    found = saplma_logits(states, labels, states, config)
    # Adam divides gradients by their own size, so rounding of tiny ones shows.
    np.testing.assert_allclose(found[1], expected, atol=1e-4)


def test_a_seed_of_several_is_fitted_as_it_is_alone():
    states, labels, config = small_fit(n_seeds=3)
    alone = saplma_logits(states, labels, states, SaplmaConfig(n_seeds=1, n_epochs=2))
    every = saplma_logits(states, labels, states, config)
    np.testing.assert_allclose(every[:1], alone, atol=1e-4)
    assert np.abs(every[1] - every[0]).max() > 1e-2


def test_one_class_alone_is_refused():
    store = stored(noise(np.ones(60)))
    for labels in (np.ones(60), np.arange(60) < 20, np.arange(60) % 20 < 40):
        with pytest.raises(ValueError, match="one class only"):
            catalogue()["linear_probe"].score(inputs(rows_of(labels), store))


def test_llms_know_is_the_default_regression_on_the_block_of_validation():
    labels = some_labels(600)
    outputs = np.random.default_rng(1).standard_normal((600, 4, D)).astype(np.float32)
    outputs[:, 2, 0] += 3 * labels
    outputs[5] = np.nan
    rows = rows_of(labels)
    found = catalogue()["llms_know"].score(inputs(rows, mlp_exact_answer=outputs))
    assert chosen(found) == {"layer": 3} and measured(found, rows) > 0.9
    train = np.delete(rows.where("train"), 5)
    official = LogisticRegression().fit(outputs[train, 2], labels[train])
    has_one = np.arange(600) != 5
    p_correct = official.predict_proba(outputs[has_one, 2].astype(float))[:, 1]
    np.testing.assert_allclose(found.scores[0, has_one], logit(p_correct), rtol=1e-3)
    assert np.isnan(found.scores[0, 5])


def test_lookback_lens_is_one_regression_on_the_ratios_of_all_heads():
    labels = some_labels(600)
    ratios = np.random.default_rng(1).random((600, 3, 2))
    ratios[:, 1, 1] = (ratios[:, 1, 1] + labels) / 2
    ratios[5, 0, 0] = np.nan
    rows = rows_of(labels, "with_context")
    (scores,) = catalogue()["lookback_lens"].score(inputs(rows, lookback=ratios)).scores
    assert np.flatnonzero(np.isnan(scores)).tolist() == [5]
    train = np.delete(rows.where("train"), 5)
    flat = ratios.reshape(600, 6)
    official = LogisticRegression(max_iter=1000).fit(flat[train], labels[train])
    expected = official.decision_function(np.delete(flat, 5, axis=0))
    np.testing.assert_allclose(np.delete(scores, 5), expected)
    test = rows.where("test")
    assert roc_auc_score(labels[test], scores[test]) > 0.9
    assert catalogue()["lookback_lens"].settings == ("with_context",)

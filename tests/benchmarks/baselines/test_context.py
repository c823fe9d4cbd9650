"""LLM-Check, ReDeEP and LUMINA on planted readings; how layers and signs are chosen."""

import dataclasses

import msgspec
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors import context as context_baselines
from beatrice.benchmarks.baselines.detectors import llm_check
from beatrice.benchmarks.baselines.detectors.choice import (
    column_aurocs,
    defined_rows,
    oriented,
)
from beatrice.extract.store.store import read_family
from tests.benchmarks.baselines import planted
from tests.benchmarks.baselines.test_probes import chosen
from tests.jaxprobe.samples import rows_of

DETECTORS = catalogue()
N, N_LAYERS = planted.N, planted.N_LAYERS


@pytest.fixture(scope="module")
def inputs():
    given = planted.inputs(strength=6.0)

    def with_readings(**readings):
        return dataclasses.replace(given, readings={**given.readings, **readings})

    return with_readings


def test_the_planted_layer_and_sign_are_chosen_and_reported(inputs):
    given = inputs()
    for name, choice in (
        ("hidden", {"sign": -1, "layer": 3}),
        ("attention", {"sign": 1, "layer": 3}),
        ("perplexity", {"sign": -1}),
    ):
        assert chosen(DETECTORS[f"llmcheck_{name}"].score(given)) == choice
    combined = DETECTORS["llmcheck_combined"].score(given)
    assert chosen(combined)["hidden_layer"] == chosen(combined)["attention_layer"] == 3
    assert len(combined.chosen) == 7
    for row in combined.chosen:
        assert row.experiment == "chosen" and row.split == "validation"


def test_the_first_attention_layer_is_never_chosen(inputs):
    given = inputs()
    values = np.random.default_rng(0).normal(size=(N, N_LAYERS))
    values[:, 0] += 9 * given.rows.labels
    given = inputs(llmcheck_attention_all=values, llmcheck_hidden_all=values)
    assert chosen(DETECTORS["llmcheck_attention"].score(given))["layer"] > 1
    assert chosen(DETECTORS["llmcheck_hidden"].score(given))["layer"] == 1
    for n_layers, layer in ((1, 1), (2, 2)):  # of a single layer, the first
        given = inputs(llmcheck_attention_all=values[:, :n_layers])
        assert chosen(DETECTORS["llmcheck_attention"].score(given))["layer"] == layer


def test_perplexity_is_of_the_answers_tokens_without_the_stop_token(inputs):
    given = inputs()
    answers = list(given.answers)
    for i, n in enumerate((0, 1, 2)):
        answers[i] = msgspec.structs.replace(answers[i], token_ids=(2,) * n)
    given = dataclasses.replace(given, answers=answers)
    perplexity = llm_check.answer_perplexity(given)[:, 0]
    prob = read_family(given.store, "prob")
    for i, answer in enumerate(answers):
        start = planted.N_PROMPT - 1
        surprisals = prob.example(i)[start : start + len(answer.token_ids), 1]
        mean = surprisals.astype(float).mean() if len(surprisals) else np.nan
        np.testing.assert_allclose(perplexity[i], np.exp(mean), rtol=1e-6)


def test_the_combination_is_the_mean_of_oriented_scores_in_validation_units(inputs):
    given = inputs()
    valid = given.rows.where("validation")
    parts = []
    for name in ("hidden", "attention", "perplexity", "window", "entropy"):
        scores = DETECTORS[f"llmcheck_{name}"].score(given).scores[0]
        parts.append((scores - scores[valid].mean()) / scores[valid].std())
    combined = DETECTORS["llmcheck_combined"].score(given).scores[0]
    np.testing.assert_allclose(combined, np.mean(parts, axis=0), rtol=1e-9)


def test_redeep_finds_the_planted_heads_and_layer(inputs):
    given = inputs()
    heads = given.readings["redeep_ecs"].copy()
    others = np.random.default_rng(1).normal(size=(N, 2))
    heads[:, planted.LAYER, 1:] = others  # one head keeps the signal
    given = inputs(redeep_ecs=heads)
    halves = [DETECTORS[name].score(given) for name in ("redeep_ecs", "redeep_pks")]
    assert [chosen(half) for half in halves] == [{"n_heads": 1}, {"n_layers": 1}]
    output = DETECTORS["redeep"].score(given)
    numbers = chosen(output)
    assert numbers["n_heads"] == numbers["n_layers"] == 1
    train = given.rows.where("train")
    head = heads[:, planted.LAYER, 0].astype(float)
    layer = -given.readings["redeep_pks_swapped"][:, planted.LAYER].astype(float)
    head, layer = (
        (x - x[train].min()) / (x[train].max() - x[train].min()) for x in (head, layer)
    )
    expected = layer + numbers["alpha"] * head
    np.testing.assert_allclose(output.scores[0], expected, rtol=1e-6)
    for half, alone in zip(halves, (head, layer), strict=True):
        np.testing.assert_allclose(half.scores[0], alone, rtol=1e-6)


def test_redeeps_choice_is_the_best_of_every_combination_on_validation(inputs):
    rng, labels = np.random.default_rng(2), inputs().rows.labels
    given = inputs(
        redeep_ecs=rng.normal(size=(N, 2, 3)) + 0.5 * labels[:, None, None],
        redeep_pks_swapped=rng.normal(size=(N, 3)) - 0.5 * labels[:, None],
    )
    rows = given.rows
    heads = given.readings["redeep_ecs"].reshape(N, -1)
    context = context_baselines.ranked_sums(heads, rows, 32)
    layers = -given.readings["redeep_pks_swapped"]
    knowledge = context_baselines.ranked_sums(layers, rows, 3)
    valid = rows.where("validation")
    best = max(
        roc_auc_score(labels[valid], knowledge[valid, k] + alpha * context[valid, n])
        for n in range(context.shape[1])
        for k in range(3)
        for alpha in context_baselines.ALPHAS
    )
    scores = DETECTORS["redeep"].score(given).scores[0]
    assert roc_auc_score(labels[valid], scores[valid]) == pytest.approx(best, abs=1e-12)


def test_heads_are_summed_best_first_and_scaled_to_training_rows(inputs):
    given = inputs()
    heads = given.readings["redeep_ecs"].reshape(N, -1).astype(float)
    sums = context_baselines.ranked_sums(heads, given.rows, 5)
    assert sums.shape == (N, 5)
    train = given.rows.where("train")
    assert sums[train].min() == 0.0 and sums[train].max() == pytest.approx(1.0)
    heads[train[0], 2] = np.nan  # a head that lacks a value is left out
    sums = context_baselines.ranked_sums(heads, given.rows, 32)
    assert sums.shape == (N, heads.shape[1] - 1) and np.isfinite(sums).all()


def test_lumina_is_half_the_change_by_passages_minus_half_the_rate(inputs):
    given = inputs()
    rate, change = given.readings["lumina_ipr"], given.readings["lumina_mmd"]
    result = DETECTORS["lumina"].score(given).scores[0]
    np.testing.assert_allclose(result, 0.5 * change - 0.5 * rate, rtol=1e-5, atol=1e-6)


def test_aurocs_of_many_columns_equal_those_of_each_column():
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, (80, 6)).astype(float)
    labels = rng.random(80) < 0.4
    result = column_aurocs(values, labels)
    expected = [roc_auc_score(labels, column) for column in values.T]
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    values[3, 2] = np.nan
    assert np.flatnonzero(np.isnan(column_aurocs(values, labels))).tolist() == [2]


def test_only_validation_rows_decide_the_sign():
    rows = rows_of(np.arange(90) % 2 == 0)
    values = np.where(rows.splits == "validation", -1.0, 1.0) * rows.labels
    _, column, sign = oriented(values[:, None], rows)
    assert (column, sign) == (0, -1)


def test_validation_rows_of_only_one_class_are_refused():
    rows = rows_of(np.ones(90, bool))
    with pytest.raises(ValueError, match="one class alone"):
        defined_rows(np.ones(90, bool), rows, "validation")

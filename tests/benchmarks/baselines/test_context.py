"""LLM-Check, ReDeEP, LUMINA and P(True) on planted readings."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors import context as context_baselines
from beatrice.benchmarks.baselines.detectors import llm_check
from beatrice.benchmarks.baselines.detectors.choice import (
    column_aurocs,
    defined_rows,
    oriented,
    reading,
)
from beatrice.extract.readings.reader import READINGS
from beatrice.extract.records import Answer, Example
from beatrice.extract.store.families import Family
from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from tests.benchmarks.rows import SPLITS
from tests.benchmarks.rows import rows_of as rows_with

N = 300
N_LAYERS, N_HEADS = 4, 3
DETECTORS = {
    name: x
    for name, x in catalogue().items()
    if name.startswith(("llmcheck", "redeep", "lumina", "p_true"))
}
READERS = [name for name, one in DETECTORS.items() if one.reads]
RNG = np.random.default_rng(5)
LABELS = RNG.random(N) < 0.5
# The only readings of these that carry the label, and the way they point.
SHAPES = {
    "llmcheck_hidden": (N_LAYERS,),
    "llmcheck_hidden_all": (N_LAYERS,),
    "llmcheck_attention": (N_LAYERS,),
    "llmcheck_attention_all": (N_LAYERS,),
    "window_entropy": (),
    "window_entropy_corrected": (),
    "logit_entropy": (),
    "logit_entropy_corrected": (),
    "redeep_ecs": (N_LAYERS, N_HEADS),
    "redeep_pks": (N_LAYERS,),
    "redeep_pks_swapped": (N_LAYERS,),
    "lumina_ipr": (),
    "lumina_ipr_inner": (),
    "lumina_mmd": (),
    "p_true": (),
}
UP = {"redeep_ecs", "lumina_mmd", "p_true", "llmcheck_attention_all"}


def rows_of(labels=LABELS):
    splits = np.array(SPLITS)[np.arange(len(labels)) % 3]
    return rows_with(labels, "with_context", splits)


def planted(labels=LABELS, strength=2.0, column=2):
    """Noise in every reading, and the label in one column of each."""
    rng, readings = np.random.default_rng(0), {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal((len(labels), *shape))
        sign = 1 if name in UP else -1
        where = values.reshape(len(labels), -1)
        where[:, min(column, where.shape[1] - 1)] += sign * strength * labels
        readings[name] = where.reshape(values.shape).astype(np.float32)
    return readings


def surprisals_and_answers(labels, folder, strength=2.0):
    """A store of the prob family, and answers of zero to three tokens."""
    rng = np.random.default_rng(1)
    n, n_prompt = len(labels), 4
    n_told = np.arange(n) % 3 + 1
    n_told[7] = 0
    lengths = n_prompt + n_told
    starts = np.cumsum(lengths) - lengths
    prob = rng.random((lengths.sum(), 5)).astype(np.float32)
    for i in range(n):
        # The stop token's surprisal, at the last position, points the other way.
        own = slice(starts[i] + n_prompt - 1, starts[i] + lengths[i] - 1)
        prob[own, 1] += strength * (1 - labels[i])
        prob[starts[i] + lengths[i] - 1, 1] = 50.0 * labels[i]
    spans = np.zeros((n, 3, 2), np.int64)
    spans[:, 1:, 0], spans[:, 1, 1], spans[:, 2, 1] = (
        n_prompt - 1,
        n_prompt - 1,
        lengths,
    )
    spans[:, 1, 0] = 0
    spec = StoreSpec(
        families={"prob": Family(shape=(5,), dtype="float32")},
        keys=tuple((f"q{i}", "with_context", "original") for i in range(n)),
        lengths=lengths.astype(np.int64),
        spans=spans,
        rows_per_shard=64,
        hidden_layers=(),
        fingerprint={},
    )
    store = create_store(f"memory://{folder.name}", spec)
    for range_id in range(spec.n_ranges):
        stops = spec.range_rows(range_id, "prob")
        write_range(store, range_id, {"prob": prob[slice(*stops)]})
    answers = [
        Answer(
            example_id=f"q{i}",
            setting="with_context",
            variant="original",
            text="",
            prompt_ids=(1,) * n_prompt,
            token_ids=(2,) * int(n_told[i]),
            stop_id=3,
            context_span=(0, 1),
        )
        for i in range(n)
    ]
    fields = {"dataset": "d", "split": "train", "question": "?", "golds": ("g",)}
    questions = [Example(id=answer.example_id, **fields) for answer in answers]
    return {"questions": questions, "answers": answers}, store, prob, starts


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    texts, store, *_ = surprisals_and_answers(LABELS, tmp_path_factory.mktemp("run"))

    def made(labels=LABELS, readings=None):
        readings = planted() if readings is None else readings
        rows = rows_of(labels)
        return DetectorInput.of(store, rows, readings=readings, **texts)

    return made


@pytest.mark.parametrize("name", READERS)
def test_a_detector_reads_what_it_says_and_nothing_else(inputs, name):
    every = planted()
    own = {key: every[key] for key in DETECTORS[name].reads}
    assert set(own) <= set(READINGS)
    DETECTORS[name].score(inputs(readings=own))
    for missing in own:
        rest = {key: values for key, values in own.items() if key != missing}
        with pytest.raises(ValueError, match=f"{missing!r} is missing"):
            DETECTORS[name].score(inputs(readings=rest))


def test_untrained_detectors_do_not_look_at_training_labels(inputs):
    other = LABELS.copy()
    other[0::3] = ~other[0::3]
    for name, detector in DETECTORS.items():
        pair = [detector.score(inputs(labels=each)).scores for each in (LABELS, other)]
        is_same = bool(np.array_equal(*pair, equal_nan=True))
        assert is_same != detector.is_trained, name


def chosen(found):
    return {row.metric: row.value for row in found.chosen}


def test_the_planted_layer_and_sign_are_chosen_and_reported(inputs):
    found = DETECTORS["llmcheck_hidden"].score(inputs())
    assert chosen(found) == {"sign": -1, "layer": 3}
    found = DETECTORS["llmcheck_attention"].score(inputs())
    assert chosen(found) == {"sign": 1, "layer": 3}
    assert chosen(DETECTORS["llmcheck_perplexity"].score(inputs())) == {"sign": -1}
    combined = chosen(DETECTORS["llmcheck_combined"].score(inputs()))
    assert combined["hidden_layer"] == combined["attention_layer"] == 3
    assert len(combined) == 7
    for row in found.chosen:
        assert row.experiment == "chosen" and row.split == "validation"


def test_the_first_attention_layer_is_never_chosen(inputs):
    readings = planted(column=0, strength=9.0)
    found = DETECTORS["llmcheck_attention"].score(inputs(readings=readings))
    assert chosen(found)["layer"] > 1
    found = DETECTORS["llmcheck_hidden"].score(inputs(readings=readings))
    assert chosen(found)["layer"] == 1


def test_perplexity_is_that_of_the_answers_tokens_without_the_stop(tmp_path):
    texts, store, prob, starts = surprisals_and_answers(LABELS, tmp_path)
    given = DetectorInput.of(store, rows_of(), **texts)
    found = llm_check.answer_perplexity(given)[:, 0]
    for i, start in enumerate(starts):
        own = prob[start + 3 : start + 3 + len(given.answers[i].token_ids), 1]
        expected = np.exp(own.astype(float).mean()) if len(own) else np.nan
        np.testing.assert_allclose(found[i], expected, rtol=1e-6)


def test_the_combination_is_the_mean_of_oriented_scores_in_validation_units(inputs):
    given = inputs()
    valid = given.rows.where("validation")
    parts = []
    for name in ("hidden", "attention", "perplexity", "window", "entropy"):
        own = DETECTORS[f"llmcheck_{name}"].score(given).scores[0]
        known = own[valid][np.isfinite(own[valid])]
        parts.append((own - known.mean()) / known.std())
    found = DETECTORS["llmcheck_combined"].score(given).scores[0]
    np.testing.assert_allclose(found, np.mean(parts, axis=0), rtol=1e-9)


def test_redeep_finds_the_planted_head_and_layer(inputs):
    readings = planted(strength=6.0)
    given = inputs(readings=readings)
    assert chosen(DETECTORS["redeep_ecs"].score(given)) == {"n_heads": 1}
    assert chosen(DETECTORS["redeep_pks"].score(given)) == {"n_layers": 1}
    found = DETECTORS["redeep"].score(given)
    numbers = chosen(found)
    train = given.rows.where("train")
    head = readings["redeep_ecs"].reshape(N, -1)[:, 2].astype(float)
    layer = -readings["redeep_pks_swapped"][:, 2].astype(float)
    scaled = [
        (one - one[train].min()) / (one[train].max() - one[train].min())
        for one in (head, layer)
    ]
    assert numbers["n_heads"] == numbers["n_layers"] == 1
    expected = scaled[1] + numbers["alpha"] * scaled[0]
    np.testing.assert_allclose(found.scores[0], expected, rtol=1e-6)


def test_redeeps_choice_is_the_best_of_every_combination_on_validation(inputs):
    given = inputs(readings=planted(strength=0.7))
    rows = given.rows
    heads = given.readings["redeep_ecs"].reshape(N, -1).astype(float)
    layers = -given.readings["redeep_pks_swapped"].astype(float)
    context = context_baselines.ranked_sums(heads, rows, 32)
    knowledge = context_baselines.ranked_sums(layers, rows, N_LAYERS)
    valid = rows.where("validation")
    best = max(
        roc_auc_score(
            rows.labels[valid], knowledge[valid, k] + alpha * context[valid, n]
        )
        for n in range(context.shape[1])
        for k in range(N_LAYERS)
        for alpha in context_baselines.ALPHAS
    )
    found = DETECTORS["redeep"].score(given).scores[0]
    own = roc_auc_score(rows.labels[valid], found[valid])
    assert own == pytest.approx(best, abs=1e-12)


def test_sums_of_heads_grow_with_the_best_first_and_fill_training_rows(inputs):
    rows = rows_of()
    heads = planted()["redeep_ecs"].reshape(N, -1).astype(float)
    sums = context_baselines.ranked_sums(heads, rows, 5)
    assert sums.shape == (N, 5)
    train = rows.where("train")
    assert sums[train].min() == 0.0 and sums[train].max() == pytest.approx(1.0)
    aurocs = column_aurocs(heads[train], LABELS[train])
    first = heads[:, np.argmax(aurocs)]
    assert np.corrcoef(sums[:, 0], first)[0, 1] == pytest.approx(1.0)


def test_a_head_that_lacks_a_value_is_left_out():
    rows = rows_of()
    heads = planted(strength=9.0)["redeep_ecs"].reshape(N, -1).astype(float)
    heads[rows.where("train")[0], 2] = np.nan
    sums = context_baselines.ranked_sums(heads, rows, 32)
    assert sums.shape == (N, heads.shape[1] - 1) and np.isfinite(sums).all()


def test_lumina_is_half_of_what_passages_change_less_half_of_the_rate(inputs):
    given = inputs()
    rate, change = given.readings["lumina_ipr"], given.readings["lumina_mmd"]
    found = DETECTORS["lumina"].score(given).scores[0]
    np.testing.assert_allclose(found, 0.5 * change - 0.5 * rate, rtol=1e-5, atol=1e-6)


def test_auroc_of_many_columns_is_that_of_each():
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, (80, 6)).astype(float)
    labels = rng.random(80) < 0.4
    found = column_aurocs(values, labels)
    expected = [roc_auc_score(labels, column) for column in values.T]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    values[3, 2] = np.nan
    assert np.isnan(column_aurocs(values, labels)).tolist() == [
        i == 2 for i in range(6)
    ]


def test_validation_alone_orients():
    rows = rows_of()
    values = np.where(rows.splits == "validation", -1.0, 1.0) * LABELS
    found = oriented(values[:, None], rows)
    assert found.sign == -1 and found.column == 0


def test_one_class_and_a_wrong_shape_are_refused():
    rows = rows_of(np.ones(N, bool))
    with pytest.raises(ValueError, match="one class alone"):
        defined_rows(np.ones((N, 1)), rows, "validation")
    given = DetectorInput(store=None, rows=rows, layer=0)
    with pytest.raises(ValueError, match="'p_true' is missing"):
        reading(given, "p_true", 1)


def test_every_detector_says_what_it_needs_and_where_it_is_defined():
    assert set(DETECTORS) == {*READERS} | {"llmcheck_perplexity"}
    for name, detector in DETECTORS.items():
        is_of_context = name.startswith(("redeep", "lumina"))
        assert (detector.settings == ("with_context",)) == is_of_context
        assert ("swapped" in detector.needs) == ("lumina_mmd" in detector.reads)
        assert detector.is_trained == name.startswith("redeep")
    assert "second_prompt" in DETECTORS["p_true"].needs

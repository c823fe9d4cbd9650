"""Entropies and meanings: what entails what, and which texts mean the same."""

import copy
import dataclasses
import itertools
import json
import time

import numpy as np
import pytest
import torch
from scipy.special import digamma
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    PreTrainedTokenizerFast,
)

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors.clustering import (
    by_entailment,
    by_words,
    clusters_of,
    columns_of,
    distinct_clusters,
    load_entailment,
    official_clusters,
    paper_clusters,
)
from beatrice.benchmarks.baselines.detectors.entropy import (
    BayesConfig,
    bayesian_entropies,
    discrete_entropy,
    lower_bounds,
    mean_log_prob,
    prior_of,
    tail_of,
    weighted_entropy,
)
from beatrice.benchmarks.baselines.readings import MeteredRelations
from beatrice.jaxprobe.checkpoint import Cache
from tests.benchmarks.baselines.planted import (
    by_last_word,
    drawn_inputs,
    relations_by,
    scores,
)
from tests.pretended_gpu import PretendedGpu
from tests.records import a_sample


def ids(*counts):
    return np.repeat(np.arange(len(counts)), counts)


def test_entropies_equal_the_reference_even_for_very_unlikely_answers():
    assert discrete_entropy(ids(5, 3, 1, 1)) == pytest.approx(1.1682824501765625)
    log_probs, clusters = np.array([-0.2, -0.5, -1.0]), np.array([0, 0, 1])
    golden = 0.5074720173268471
    assert weighted_entropy(log_probs, clusters) == pytest.approx(golden, abs=1e-14)
    assert weighted_entropy(log_probs - 2000, clusters) == pytest.approx(golden)


def test_entropies_of_the_same_counts_in_any_order_tie_exactly():
    for counts in ((5, 2, 2, 1), (6, 3, 1), (4, 3, 2, 1)):
        result = {discrete_entropy(ids(*c)) for c in itertools.permutations(counts)}
        assert len(result) == 1
    rng = np.random.default_rng(0)
    assert weighted_entropy(rng.normal(size=10), ids(10)) == 0.0
    assert discrete_entropy(ids(10)) == 0.0


@pytest.mark.parametrize(
    ("log_probs", "token_ids", "expected"),
    [
        ((-1.0, -2.0, -9.0), (5, 6), -1.5),  # the stop token is not counted
        ((-1.0, -2.0), (5, 6), -1.5),  # cut at its limit
        ((-9.0,), (), -9.0),  # an empty answer has only its stop token
        ((-1.0, -2.0), None, -1.5),  # a server that returns no ids
    ],
)
def test_a_mean_log_probability_leaves_out_the_stop_token_unless_alone(
    log_probs, token_ids, expected
):
    assert (
        mean_log_prob(a_sample("x", log_probs=log_probs, token_ids=token_ids))
        == expected
    )


@pytest.mark.parametrize("log_probs", [None, ()])
def test_without_log_probabilities_only_counts_are_defined(log_probs):
    bare = a_sample("a", log_probs=log_probs)
    given = drawn_inputs([["a", "b"], ["a", bare]])
    for name, is_defined in (
        ("semantic_entropy:words", False),
        ("semantic_entropy_discrete:words", True),
        ("semantic_entropy_bayesian:words", False),
    ):
        result = scores(catalogue()[name], given)
        assert np.isfinite(result).tolist() == [True, is_defined], name


def closed_form(counts, n_meanings, concentration=0.5):
    """The posterior mean of the entropy without bounds, by digamma functions."""
    alpha = concentration + np.pad(counts, (0, n_meanings - len(counts)))
    total = alpha.sum()
    return digamma(total + 1) - (alpha / total * digamma(alpha + 1)).sum()


@pytest.mark.parametrize(
    ("counts", "prior", "golden"),
    [
        ((7, 3), {2: 1}, 0.582504),
        ((7, 3), {3: 1}, 0.704328),
        ((7, 3), {4: 1}, 0.817810),
        ((7, 3), {2: 0.5, 3: 0.3, 4: 0.2}, 0.666113),
        ((1,), {1: 1}, 0.0),
        ((1,), {2: 1}, 0.386294),
        ((1,), {3: 1}, 0.666667),
    ],
)
def test_importance_sampling_agrees_with_the_closed_form(counts, prior, golden):
    exact = sum(share * closed_form(counts, n) for n, share in prior.items())
    assert exact == pytest.approx(golden, abs=1e-6)
    config = BayesConfig(n_draws=100_000, n_seeds=8)
    bounds = np.zeros(len(counts))
    result = bayesian_entropies(np.array(counts), bounds, prior, config)
    assert result.shape == (8,)
    # The worst of these, four meanings, has a s.d. of 0.01 over seeds.
    assert result.mean() == pytest.approx(golden, abs=0.01)


def test_lower_bounds_shift_the_estimate_as_in_the_reference():
    config = BayesConfig(n_draws=40_000)
    bounds = np.array([0.5, 0.2])
    result = bayesian_entropies(np.array([7, 3]), bounds, {3: 1.0}, config)
    assert result.mean() == pytest.approx(0.7257, abs=0.005)
    other = bayesian_entropies(np.array([3, 7]), bounds[::-1], {3: 1.0}, config)
    np.testing.assert_array_equal(result, other)


def test_the_prior_is_counted_up_to_seven_meanings():
    assert prior_of([1, 1, 2, 9], BayesConfig()) == {1: 0.5, 2: 0.25, 7: 0.25}


def test_the_tail_of_the_prior_starts_at_the_meanings_already_seen():
    tails = [tail_of({1: 0.5, 2: 0.25, 4: 0.25}, n) for n in (2, 3, 4, 6)]
    assert tails == [{2: 0.5, 4: 0.5}, {4: 1.0}, {4: 1.0}, {6: 1.0}]


def test_only_the_training_rows_change_the_prior():
    detector = catalogue()["semantic_entropy_bayesian:words"]

    def score_of_draw(*last, split):
        drawn, splits = [["a", "a"], ["a"], list(last)], ["train", "test", split]
        return scores(detector, drawn_inputs(drawn, splits=splits))[1]

    # A single draw says little if some questions have two meanings.
    assert score_of_draw("a", "a", split="test") == 0
    assert score_of_draw("a", "b", split="test") == 0
    assert score_of_draw("a", "b", split="train") < -0.05


def test_without_drawn_training_answers_the_prior_is_that_of_validation():
    detector = catalogue()["semantic_entropy_bayesian:words"]
    splits = ["train", "validation", "test", "validation"]
    drawn = [[], ["a", "b"], ["a"], ["a"]]
    result = detector.score(drawn_inputs(drawn, splits=splits))
    (row,) = result.chosen
    assert (row.split, row.metric, row.value) == ("validation", "n_prior_rows", 2)
    alike = [[], ["a", "a"], ["a"], ["a"]]
    sure = detector.score(drawn_inputs(alike, splits=splits))
    assert result.scores[0, 2] < -0.05 < sure.scores[0, 2] == 0


def test_a_prior_from_only_test_answers_is_refused():
    detector = catalogue()["semantic_entropy_bayesian:words"]
    with pytest.raises(ValueError, match="no training or .* sample RUN --split train"):
        detector.score(drawn_inputs([[], ["a"]]))


@pytest.mark.parametrize(
    ("texts", "p", "clusters", "bounds"),
    [
        # Each text counts once, as first drawn, with its stop token.
        ("aabc", [(0.25, 0.5), (1, 1), (0.25, 1), (0.5, 0.25)], "0001", (0.375, 0.125)),
        # A hundredth is left for unseen meanings.
        ("ab", [(0.9,), (0.6,)], "01", (0.594, 0.396)),
        ("ab", [(0.9,), (0.6,)], "00", (0.99,)),  # clipped to one, then rescaled
        ("abc", [(0.9,), (0.6,), (0.5,)], "001", (0.66, 0.33)),
    ],
)
def test_the_lower_bound_of_a_meaning_is_the_probability_of_its_texts(
    texts, p, clusters, bounds
):
    pairs = zip(texts, map(np.log, p), strict=True)
    samples = [a_sample(text, log_probs=tuple(row)) for text, row in pairs]
    result = lower_bounds(samples, np.array([*map(int, clusters)]))
    np.testing.assert_allclose(result, bounds)


def test_every_seed_gives_a_different_estimate():
    given = drawn_inputs([["a", "b"], ["a"]])
    result = catalogue()["semantic_entropy_bayesian:words"].score(given).scores
    assert result.shape == (5, 2)
    assert len(set(result[:, 1])) == 5 and np.ptp(result[:, 1]) < 0.1


def matrix(n, *pairs):
    """Return the symmetric matrix of `n` texts in which these pairs are equivalent."""
    result = np.eye(n, dtype=bool)
    for i, j in pairs:
        result[i, j] = result[j, i] = True
    return result


RULES = (official_clusters, paper_clusters, distinct_clusters)


@pytest.mark.parametrize(
    ("texts", "pairs", "ids"),
    [
        # "c" matches two first members: it joins the last, in the paper the first.
        ("abc", [(0, 2), (1, 2)], ([0, 1, 1], [0, 1, 0], [0, 1, 1])),
        # Only the first member of a cluster is compared.
        ("abc", [(0, 1), (1, 2)], ([0, 0, 1], [0, 0, 1], [0, 0, 1])),
        # Only the official code may put equal texts into two clusters.
        ("xx", [], ([0, 1], [0, 0], [0, 0])),
        # Distinct texts are clustered in sorted order: "a" and "b" open clusters.
        ("cbac", [(0, 1), (0, 2)], ([0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1])),
        ("", [], ([], [], [])),
    ],
)
def test_each_rule_gives_its_own_clusters(texts, pairs, ids):
    equivalent = matrix(len(texts), *pairs)
    assert tuple(rule(list(texts), equivalent).tolist() for rule in RULES) == ids


def test_all_rules_agree_if_equivalence_is_transitive():
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = rng.integers(4, size=8)
        texts = [f"{kind}{rng.integers(2)}" for kind in kinds]
        _, ids = np.unique(kinds, return_inverse=True)
        for rule in RULES:
            result = rule(texts, kinds[:, None] == kinds)
            assert len(set(zip(result, ids, strict=True))) == len(set(ids))
            assert len(set(result)) == len(set(ids)) == result.max() + 1


@pytest.mark.parametrize(
    ("texts", "forth", "back", "same"),
    [
        ("ab", (0.5, 0.3, 0.2), (0.5, 0.3, 0.2), True),
        ("ab", (0.5, 0.3, 0.2), (0.3, 0.5, 0.2), False),  # entailed in one direction
        ("ab", (0.4, 0.6, 0.0), (0.4, 0.6, 0.0), False),  # not the likeliest
        ("aa", (0, 1, 0), (0, 1, 0), False),  # the model is asked about equal texts
    ],
)
def test_entailment_is_the_likeliest_relation_in_both_directions(
    texts, forth, back, same
):
    relations = relations_by(lambda p, h: forth if p < h else back)
    given = drawn_inputs([[*texts]], relations=relations)
    assert by_entailment(given)[0].tolist() == [[True, same], [same, True]]


def test_the_question_is_put_before_both_texts():
    calls = []
    rule = relations_by(lambda *pair: calls.append(pair) or (1, 0, 0))
    by_entailment(drawn_inputs([["a", "b"], ["a"]], relations=rule))
    assert sorted(calls) == [("Q0? a", "Q0? b"), ("Q0? b", "Q0? a")]


def test_without_an_nli_model_entailment_is_refused():
    with pytest.raises(ValueError, match="expected an NLI model, found none"):
        by_entailment(drawn_inputs([["a"]]))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("The Paris!", "paris", True),
        ("Ann and Bob", "Bob and Ann", True),
        ("Paris, France", "Paris", False),  # included in one direction
        ("Paris", "Rome", False),
        ("", "", True),
        ("", "Paris", False),
        ("The", "", False),  # nothing is left of it, but it is not empty
        ("ｃａｆé", "Café", True),
    ],
)
def test_words_are_included_in_both_directions(first, second, same):
    given = drawn_inputs([[first, second]])
    assert by_words(given)[0].tolist() == [[True, same], [same, True]]


def test_draws_are_sorted_by_their_number_in_whatever_order_they_come():
    rows = drawn_inputs([["a"]]).rows
    draws = [a_sample("x", example_id="q0", sample=number) for number in (2, 0, 1)]
    (samples,) = DetectorInput.of(None, rows, samples=draws).samples
    assert [sample.sample for sample in samples] == [0, 1, 2]


def test_each_row_is_clustered_by_its_own_samples():
    drawn = [["a x", "b x", "a y"], [], ["a x"]]
    given = drawn_inputs(drawn, relations=relations_by(by_last_word))
    for equivalences, expected in (
        (by_entailment, [[0, 0, 1], [], [0]]),
        (by_words, [[0, 1, 2], [], [0]]),
    ):
        clusters = clusters_of(given, equivalences, official_clusters)
        assert [ids.tolist() for ids in clusters] == expected


SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
WORDS = [*"abcdefghij", "Q0", "?"]
SIZES = dict(
    vocab_size=len(SPECIAL) + len(WORDS),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
)
CONFIGS = {
    "bert": BertConfig(**SIZES),
    "deberta": DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
}
MNLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
PAIRS = [("a b c", "d"), ("d", "a b c"), ("a", "a"), ("b c d e f g h", "i j")]


def save_tokenizer(folder, words):
    """Save a tokenizer of whole words, which joins pairs as BERT does."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {f"{name}_token": mark for name, mark in SPECIAL.items()}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    whole.save_pretrained(folder)


def save_model(folder, kind="bert", labels=MNLI, with_head=True):
    """Save a random model; its weights are large, so that relations differ."""
    config = copy.deepcopy(CONFIGS[kind])
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    build = AutoModelForSequenceClassification if with_head else AutoModel
    torch.manual_seed(0)
    model = build.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(std=0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    return folder


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("nli"), request.param)


def by_transformers(folder, pair, order=(2, 1, 0)):
    """Return what Transformers itself gives for one pair, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(*pair, return_tensors="pt")).logits[0]
    return logits.softmax(-1).numpy()[list(order)]


@pytest.mark.parametrize("n_batch", [1, 32])
def test_relations_equal_those_of_pairs_read_one_by_one(saved, n_batch):
    result = dataclasses.replace(load_entailment(saved), n_batch=n_batch)(PAIRS)
    expected = [by_transformers(saved, pair) for pair in PAIRS]
    assert result.shape == (4, 3) and result.dtype == np.float64
    np.testing.assert_allclose(result, expected, atol=1e-5)  # of float32, padded
    np.testing.assert_allclose(result.sum(axis=1), 1)
    assert np.ptp(result, axis=0).max() > 0.01  # the pairs have different relations


@pytest.mark.parametrize(
    ("labels", "order", "columns"),
    [
        (("entailment", "contradiction", "neutral"), (0, 2, 1), (0, 1, 2)),
        (("entailment", "contradiction"), (0, 1), (0, 2)),  # never neutral
    ],
)
def test_the_order_of_labels_is_that_of_the_config(tmp_path, labels, order, columns):
    path = save_model(tmp_path, labels=labels)
    result = load_entailment(path)(PAIRS)
    expected = [by_transformers(path, pair, order) for pair in PAIRS]
    np.testing.assert_allclose(result[:, columns], expected, atol=1e-5)
    assert not np.delete(result, columns, axis=1).any()


def test_relations_read_on_a_gpu_equal_those_on_the_cpu(saved):
    expected = load_entailment(saved)(PAIRS)
    with PretendedGpu():
        model = load_entailment(saved)
        assert all(x.is_cuda for x in model.model.parameters())
        np.testing.assert_allclose(model(PAIRS), expected, atol=1e-6)


def test_no_pair_is_read_twice(saved):
    model, batches = dataclasses.replace(load_entailment(saved), n_batch=2), []
    model.model.register_forward_pre_hook(lambda *_: batches.append(1))
    first = model([*PAIRS, PAIRS[0]])
    assert len(batches) == 2
    np.testing.assert_array_equal(first, model([*PAIRS, PAIRS[0]]))
    assert model([]).shape == (0, 3)
    assert len(batches) == 2 and len(model.known) == 4


def test_pairs_read_by_a_killed_start_are_charged_and_not_read_again(tmp_path):
    pairs, read, counts = [(str(i), "b") for i in range(3000)], [], []

    def relations(chunk):
        if len(read) == 2048:
            raise KeyboardInterrupt
        read.extend(chunk)
        time.sleep(0.01)
        return np.array([[int(a), 0, 0] for a, _ in chunk], float)

    def opened():
        # A pass counts for itself, whatever was counted before.
        progress = lambda: lambda *at: counts.append(at)  # noqa: E731
        return MeteredRelations(relations, Cache(tmp_path, "model"), progress)

    with pytest.raises(KeyboardInterrupt):
        opened()(pairs)
    read.append("killed")
    again = opened()
    np.testing.assert_array_equal(again(pairs[::-1])[:, 0], np.arange(3000)[::-1])
    assert len(read) == 3001
    assert again.owed >= 0.02  # of two chunks
    assert counts == [(1024, 3000), (2048, 3000)] * 2 + [(3000, 3000)]


def test_a_pair_too_long_for_the_model_is_cut(saved):
    result = load_entailment(saved)([("a " * 100, "b"), ("a " * 200, "b")])
    np.testing.assert_array_equal(result[0], result[1])


@pytest.mark.parametrize(
    "labels",
    [
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        ("entailment", "not_entailment"),
        ("entailment", "neutral"),
        ("entailment", "neutral", "contradiction", "other"),
        ("entailment", "Entailment", "neutral", "contradiction"),
    ],
)
def test_other_labels_are_refused_in_one_sentence(tmp_path, labels):
    with pytest.raises(ValueError, match="expected entailment, neutral, contr") as info:
        columns_of(dict(enumerate(labels)), tmp_path)
    assert "\n" not in str(info.value) and labels[0] in str(info.value)


def rewrite(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_remote_code_is_not_run(tmp_path):
    path = save_model(tmp_path)
    name = "AutoModelForSequenceClassification"
    rewrite(path, auto_map={name: "modeling.Net", "AutoConfig": "modeling.Config"})
    (path / "modeling.py").write_text("raise SystemExit('run')\n")
    assert type(load_entailment(path).model).__name__ == "BertForSequenceClassification"


WEIGHTS = "model.safetensors"
BROKEN = {
    "no configuration": (lambda x: (x / "config.json").unlink(), "is not a directory"),
    "no weights": (lambda x: (x / WEIGHTS).unlink(), "is not a directory"),
    "pickled weights": (
        lambda x: (x / WEIGHTS).rename(x / "pytorch_model.bin"),
        "safetensors",
    ),
    "other sizes": (
        lambda x: rewrite(x, hidden_size=32),
        "could not be loaded: .*size",
    ),
    "not trained to classify": (
        lambda x: save_model(x, with_head=False),
        "lacks 2 tensors of BertForSequenceClassif",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_directory_without_an_nli_model_is_refused_in_one_sentence(tmp_path, kind):
    damage, message = BROKEN[kind]
    damage(save_model(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        load_entailment(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_logits_that_are_not_finite_are_refused(tmp_path):
    model = load_entailment(save_model(tmp_path))
    with torch.no_grad():
        model.model.classifier.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits that are not finite"):
        model(PAIRS)

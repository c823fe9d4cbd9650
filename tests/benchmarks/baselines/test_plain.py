"""Perplexity, length, linear probes and models of the text, and checks of labels."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.svm import LinearSVC
from transformers import BertConfig, BertModel

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors.text_models import (
    FineTuneConfig,
    MlpConfig,
    best_epoch,
    encoder_scores,
    mlp_scores,
    svm_scores,
)
from beatrice.benchmarks.baselines.plain import (
    fit_tfidf,
    length_features,
    linear_scores,
    majority_scores,
    pooled_signals,
    probe_scores,
    rows_at_equal_length,
    text_scores,
)
from beatrice.benchmarks.results.evaluate import (
    annotated_rows,
    layer_rows,
    prompt_rows,
)
from beatrice.benchmarks.results.names import AT_EQUAL_LENGTH, PERPLEXITY, probe
from beatrice.benchmarks.results.tables import find, results_of
from beatrice.extract.generate.prompts import UnaskedQuestion
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Passage
from beatrice.extract.run.rows import Subject
from beatrice.jaxprobe.evaluation import DetectorScores
from beatrice.jaxprobe.linear import INVERSE_PENALTIES, feature_scale
from beatrice.jaxprobe.metrics import BootstrapConfig, auroc_interval
from beatrice.jaxprobe.tokens import answer_log_prob
from tests.benchmarks.baselines.planted import memory_store
from tests.benchmarks.baselines.test_entropy import save_tokenizer
from tests.benchmarks.baselines.test_probes import chosen, measured, some_labels
from tests.jaxprobe.samples import rows_of
from tests.pretended_gpu import PretendedGpu
from tests.records import an_answer, an_example

WORDS = [f"word{i}" for i in range(30)]


def planted(labels, seed=0):
    """Return texts of random words around a name; ten of twenty names are right."""
    rng = np.random.default_rng(seed)
    texts = []
    for label in labels:
        before, after = (" ".join(rng.choice(WORDS, 4)) for _ in range(2))
        texts.append(f"{before}\nit is name{rng.integers(10) + 10 * label}\n{after}")
    return texts


def by_words(texts, labels, new_texts):
    """Return P(correct), fitted and validated on the same texts; no penalty matters."""
    return fit_tfidf(texts, labels, texts, labels).predict_proba(new_texts)[:, 1]


@pytest.mark.parametrize(
    ("model", "penalty_of"),
    [
        (LogisticRegression(max_iter=2000), lambda *x: text_scores(*x)[1].value),
        (LinearSVC(), lambda *x: chosen(svm_scores(*x))["inverse_penalty"]),
    ],
    ids=["regression", "svm"],
)
def test_validation_chooses_the_penalty(model, penalty_of):
    labels, penalties = some_labels(300), set()
    texts = planted(labels)
    for noisy in (0.0, 0.4):
        flipped = labels ^ (np.random.default_rng(1).random(300) < noisy)
        rows = rows_of(np.where(np.arange(300) < 100, flipped, labels))
        train, valid = rows.where("train"), rows.where("validation")
        words = TfidfVectorizer(ngram_range=(1, 2)).fit([texts[i] for i in train])
        matrix = words.transform(texts)
        aurocs = {}
        for penalty in INVERSE_PENALTIES:
            fitted = clone(model).set_params(C=penalty)
            fitted.fit(matrix[train], rows.labels[train])
            scores = fitted.decision_function(matrix[valid])
            aurocs[penalty] = roc_auc_score(rows.labels[valid], scores)
        result, best = penalty_of(texts, rows), max(aurocs, key=aurocs.get)
        if isinstance(model, LinearSVC):  # whose solver visits rows in random order
            assert aurocs[result] == pytest.approx(aurocs[best], abs=1e-3)
        else:
            assert result == best
        penalties.add(result)
    assert len(penalties) == 2  # clean and noisy labels need different penalties


def each(text, *words):
    return [text.format(word) for word in words]


@pytest.mark.parametrize(
    ("learned", "new"),  # a wrong and a right text each
    [
        (each("which\n{}", "b", "a"),) * 2,  # one letter counts
        (each("who\nAda\na page\n{}", "nobody knows", "it is known"),) * 2,
        (["is not right", "right not is"],) * 2,  # the same words in other pairs
        (each("他在{}。", "上海", "北京"), each("{}很大", "上海", "北京")),
        (each("वह {} है", "का", "की"), each("{} घर", "का", "की")),  # vowel signs
    ],
)
def test_letters_passages_and_pairs_of_words_are_read_in_any_script(learned, new):
    p_wrong, p_right = by_words(learned * 20, [False, True] * 20, new)
    assert p_wrong < 0.5 < p_right


def test_a_wrong_number_of_labels_is_refused():
    with pytest.raises(ValueError, match="one label per answer"):
        by_words(["a"], [True, False], [])


def prob_rows(*p):
    """Rows of the prob family in which only p and the surprisal are filled."""
    return np.array([[x, -np.log(x), 9, 9, 9] for x in p], np.float32)


@pytest.mark.parametrize(
    ("span", "counted"),
    [((1, 3), [0.5, 0.25]), ((4, 4), [0.125])],  # empty: the token that ended it
)
def test_the_log_probability_of_an_answer_is_that_of_its_tokens_only(span, counted):
    score = answer_log_prob(prob_rows(0.001, 0.5, 0.25, 0.125), span)
    assert score == pytest.approx(np.log(counted).mean())


@pytest.mark.parametrize("span", [(0, 0), (0, 3), (-1, 1), (2, 1)])
def test_an_answer_span_outside_the_tokens_is_refused(span):
    with pytest.raises(ValueError, match="within the 2 tokens"):
        answer_log_prob(prob_rows(0.5, 0.5), span)


@pytest.mark.parametrize(
    "is_right",
    [
        lambda n, noise: n - 15 + noise > 0,
        lambda n, noise: 15 - n + noise > 0,
        lambda n, noise: (n > 5) & (n < 15),
    ],
    ids=["long", "short", "of the middle"],
)
def test_answer_length_learns_which_lengths_are_right(is_right):
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 30, size=900)
    rows = rows_of(is_right(n_tokens, rng.normal(0, 5, 900)))
    features = length_features([an_answer(token_ids=(3,) * n) for n in n_tokens])
    (scores,) = linear_scores([features], rows)[0]
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_empty_and_cut_answers_are_marked_next_to_their_length():
    answers = [an_answer(text=" ", token_ids=()), an_answer(stop_id=None)]
    features = length_features(answers)
    np.testing.assert_array_equal(features, [[0, 0, 1, 0], [1, np.log(2), 0, 1]])


def test_the_majority_gives_every_answer_the_same_score():
    rows = rows_of(np.arange(90) % 3 == 0)
    (scores,) = majority_scores(rows)
    assert len(set(scores)) == 1 and scores[0] == pytest.approx(1 / 3)


def test_standardised_features_have_a_total_variance_of_one():
    features = np.random.default_rng(0).normal(3, [1, 5, 0, 9], (50, 4))
    mean, scale = feature_scale(features[:40])
    features = (features - mean) / scale
    np.testing.assert_allclose(features[:40].mean(axis=0), 0, atol=1e-12)
    assert features[:40].var(axis=0).sum() == pytest.approx(3 / 4)  # one is constant


N, D, LAYERS = 240, 6, (1, 3)


def stored(labels, hidden_spans="all"):
    """Return a store of random signals, larger for right answers in layer 3."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, len(labels))
    spans = np.array([[(1, n // 3), (n // 3, n - 2), (n - 2, n)] for n in lengths])
    spans[4, 2] = lengths[4]  # an empty answer
    shapes = {"hidden": (len(LAYERS), D), "prob": (5,), "resid": (4,)}
    shapes["attn"] = (2, 2, 1, 1)
    every = {
        name: rng.standard_normal((lengths.sum(), *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    every["hidden"][:, 1, 0] += 2 * np.repeat(labels, lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    answer = np.repeat(spans[:, 2], lengths, axis=0)
    if hidden_spans == "answer":
        is_answer = (position >= answer[:, 0]) & (position < answer[:, 1])
        every["hidden"] = every["hidden"][is_answer]
    store = memory_store(
        every, lengths, spans, layers=LAYERS, hidden_spans=hidden_spans
    )
    return store, every, spans, np.cumsum(lengths) - lengths


def test_a_probe_reads_mean_min_and_max_of_the_answer_and_means_elsewhere():
    store, every, spans, starts = stored(np.arange(40) % 2 == 0)
    pooled = pooled_signals(store, "with_context", "hidden", 3).reshape(40, 5, D)
    for i, start in enumerate(starts):
        context, question, answer = (
            every["hidden"][start + a : start + b, 1] for a, b in spans[i]
        )
        np.testing.assert_allclose(pooled[i, 3], context.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(pooled[i, 4], question.mean(axis=0), rtol=1e-5)
        wanted = [
            getattr(answer, x)(axis=0) for x in ("mean", "min", "max") if len(answer)
        ]
        np.testing.assert_allclose(pooled[i, :3], wanted or np.zeros((3, D)), rtol=1e-5)


def test_a_probe_reads_the_same_of_answers_alone_and_in_any_number_of_parts():
    labels = np.arange(40) % 2 == 0
    (store, *_), (answers, *_) = stored(labels), stored(labels, "answer")
    whole = pooled_signals(store, "with_context", "hidden", 3)
    alone = pooled_signals(answers, "with_context", "hidden", 3)
    np.testing.assert_array_equal(alone, whole[:, : 3 * D])
    chunked = pooled_signals(store, "with_context", "hidden", 3, 100)
    np.testing.assert_array_equal(whole, chunked)


def test_a_linear_probe_finds_a_signal_only_in_its_family_and_layer():
    labels = np.random.default_rng(3).random(N) < 0.5
    store, *_ = stored(labels)
    rows = rows_of(labels)
    test = rows.where("test")

    def aurocs(layer):
        scores, chosen = probe_scores(store, rows, layer)
        assert [row.subject for row in chosen] == list(scores)
        return {n: roc_auc_score(labels[test], x[0, test]) for n, x in scores.items()}

    there, elsewhere = aurocs(3), aurocs(1)
    assert there[probe("H")] > 0.9 and there[probe("HPRA")] > 0.8
    # Of 80 answers: s.d. 0.065 by chance.
    assert all(abs(there[probe(x)] - 0.5) < 0.2 for x in "PRA")
    assert abs(elsewhere[probe("H")] - 0.5) < 0.2


def test_the_chosen_layer_is_compared_with_the_first_and_last_kept():
    labels = np.random.default_rng(3).random(N) < 0.5
    table = results_of(layer_rows(stored(labels)[0], rows_of(labels), 3, BOOTSTRAP))
    at = {"dataset": "world", "split": "test", "metric": "auroc", "seed": "mean"}
    chosen, first, gain = (
        find(table, detector=name, against=other, **at).value
        for name, other in (
            ("chosen_layer", None),
            ("first_layer", None),
            ("chosen_layer", "first_layer"),
        )
    )
    assert chosen > 0.9 and abs(first - 0.5) < 0.2
    assert gain == pytest.approx(chosen - first, abs=1e-5)
    assert "last_layer" not in {*table["detector"], *table["against"]}  # it is chosen


def test_cut_prompts_and_questions_that_were_not_asked_are_counted():
    examples = [an_example(id=f"q{i}", dataset="ab"[i % 2]) for i in range(6)]
    answers = [an_answer(example_id=f"q{i}", dropped=(1,) * (i == 0)) for i in range(4)]
    out = [UnaskedQuestion(f"q{i}", "closed_book", "original", 9, 8) for i in (4, 5)]
    out.append(UnaskedQuestion("q0", "with_context", "original", 9, 8))
    rows = prompt_rows(examples, answers, out)
    assert [(r.setting, r.dataset, r.value, r.n, r.n_failed) for r in rows] == [
        ("closed_book", "a", 0.5, 2, 1),
        ("closed_book", "b", 0.0, 2, 1),
        ("with_context", "a", None, 0, 1),
    ]
    assert rows[2].reason == "no passage of any question fitted"


def matched(n=1800):
    """Return answers, the right ones short; only the champion sees more than length."""
    rng = np.random.default_rng(1)
    n_tokens = rng.integers(1, 12, n)
    rows = rows_of(rng.random(n) < 1 - n_tokens / 12)
    noise = rng.standard_normal((3, n))
    scores = {
        Subject("champion"): 2.0 * rows.labels - n_tokens + noise,
        Subject("answer_length"): -1.0 * n_tokens[None],
        Subject("perplexity"): -1.0 * n_tokens[None] + noise[:1],
    }
    scores |= {x: noise[1:2] for x in AT_EQUAL_LENGTH if x not in scores}
    return rows, n_tokens, [DetectorScores(name=n, scores=x) for n, x in scores.items()]


BOOTSTRAP = BootstrapConfig(n_resamples=300)


def test_at_equal_length_only_skill_beyond_length_remains():
    rows, n_tokens, detectors = matched()
    table = results_of(rows_at_equal_length(detectors, rows, n_tokens, BOOTSTRAP))
    where = {"split": "test", "dataset": "world", "metric": "auroc", "seed": "mean"}
    length, ours, rival = (
        find(table, detector=x, against=None, **where)
        for x in ("answer_length", "champion", "perplexity")
    )
    labels, test = rows.labels, rows.where("test")
    assert roc_auc_score(labels[test], -n_tokens[test]) > 0.8  # without matching
    assert length.value == 0.5
    for row in (length, rival):
        assert row.ci_low < 0.5 < row.ci_high
    assert ours.ci_low > 0.85
    gain = find(table, against="answer_length", **where)
    assert gain.value == pytest.approx(ours.value - 0.5)
    assert gain.experiment == "at_equal_length_paired"
    # Length has one half in each resample, and its own interval is not subtracted.
    assert ours.ci_low - 0.5 <= gain.ci_low < gain.ci_high <= ours.ci_high - 0.5


def test_answers_without_a_counterpart_of_their_length_are_counted():
    rows, n_tokens, detectors = matched()
    n_tokens = np.where(rows.labels, n_tokens, n_tokens + 100)
    n_tokens[rows.where("test")[:10]] = 7
    table = results_of(rows_at_equal_length(detectors, rows, n_tokens, BOOTSTRAP))
    where = {"split": "test", "dataset": "world"}
    share = find(table, detector="answers", **where)
    where |= {"against": None}
    n = find(table, detector="champion", metric="auroc", seed="mean", **where).n
    assert 0 < n < share.n and share.value == pytest.approx(1 - n / share.n)
    perplexity = next(x for x in detectors if x.subject == PERPLEXITY)
    perplexity.scores[0, rows.where("test")[10:]] = np.nan
    table = results_of(rows_at_equal_length(detectors, rows, n_tokens, BOOTSTRAP))
    where |= {"metric": "auroc", "seed": "mean"}
    assert find(table, detector="champion", **where).n == n > 10
    assert find(table, detector="perplexity", **where).n == 10
    assert find(table, **where | {"against": "perplexity"}).n == 10
    undefined = find(table, detector="champion", **where | {"split": "validation"})
    assert undefined.value is None and "no stratum" in undefined.reason


def annotated(rows, disputed):
    """A person's verdicts on every test row, as `label --audit` leaves them."""
    test = rows.where("test")
    verdicts = [
        [rows.ids[i], "closed_book", "original", bool(rows.labels[i] ^ (i in disputed))]
        for i in test
    ]
    noise = []
    for label in (True, False):
        ids = {i for i in test if rows.labels[i] == label}
        counts = dict(n=len(ids), n_all=3 * len(ids), n_disputed=len(ids & disputed))
        about = dict(setting="closed_book", label=label, ci_low=0.0, ci_high=1.0)
        noise.append(about | counts)
    return {"noise": noise, "verdicts": verdicts}


def test_wrong_labels_lower_auroc_and_a_persons_verdicts_restore_it():
    rng = np.random.default_rng(2)
    truth = rng.random(900) < 0.4
    slips = np.flatnonzero(rng.random(900) < 0.15)
    labels = truth.copy()
    labels[slips] ^= True
    rows = rows_of(labels)
    scores = (2.5 * truth + rng.standard_normal(900))[None]
    verdicts = annotated(rows, set(slips.tolist()))
    scored = [DetectorScores(name="champion", scores=scores)]
    result_rows = annotated_rows(verdicts, scored, rows, BOOTSTRAP)
    by = {x.kind: x for x in result_rows if x.experiment == "annotated"}
    test = rows.where("test")
    expected_of_labels = roc_auc_score(labels[test], scores[0, test])
    assert by["labels"].value == pytest.approx(expected_of_labels, abs=1e-5)
    expected = roc_auc_score(truth[test], scores[0, test])
    assert by["a person"].value == pytest.approx(expected, abs=0.02)  # weighted
    assert by["labels"].value < by["undisputed labels"].ci_low
    assert by["undisputed labels"].n == 300 - len(set(slips) & set(test))
    shares = [x for x in result_rows if x.experiment == "label_noise"]
    assert [row.kind for row in shares] == ["right", "wrong"]
    agreed = {**verdicts, "verdicts": [[*x[:3], True] for x in verdicts["verdicts"]]}
    by = {x.kind: x for x in annotated_rows(agreed, scored, rows, BOOTSTRAP)}
    assert by["labels"].value == pytest.approx(expected_of_labels, abs=1e-5)
    assert by["a person"].value is None and "one class only" in by["a person"].reason


def test_undisputed_verdicts_on_a_few_answers_leave_an_interval_of_auroc():
    rows = rows_of(np.arange(60) % 4 == 0)
    scores = np.where(rows.labels, 1.0, 0.0)[None]
    scored = [DetectorScores(name="champion", scores=scores)]
    result_rows = annotated_rows(annotated(rows, set()), scored, rows, BOOTSTRAP)
    test = rows.where("test")
    expected = auroc_interval(scores[:, test], rows.labels[test], rows.ids[test])
    assert expected[0] < 0.9
    for row in (x for x in result_rows if x.experiment == "annotated"):
        assert (row.ci_low, row.ci_high) == pytest.approx(expected), row.kind


def test_an_mlp_learns_what_a_linear_model_cannot():
    # Right if exactly one of two words is there, which no sum over words shows.
    rng = np.random.default_rng(0)
    first, second = rng.integers(2, size=(2, 1200))
    texts = [
        f"{('ada', 'bob')[a]} {' '.join(rng.choice(WORDS[:3], 2))} {('cy', 'di')[b]}"
        for a, b in zip(first, second, strict=True)
    ]
    rows = rows_of(first != second)
    config = MlpConfig(max_epochs=60, patience=60, learning_rate=0.01, n_seeds=1)
    assert measured(mlp_scores(texts, rows, config), rows) > 0.95
    assert measured(svm_scores(texts, rows), rows) < 0.7


def test_every_seed_of_an_mlp_is_a_different_fit_and_repeats():
    labels = some_labels(150)
    texts, rows = planted(labels), rows_of(labels)
    first, second = (mlp_scores(texts, rows) for _ in range(2))
    assert first.scores.shape == (3, 150)
    np.testing.assert_array_equal(first.scores, second.scores)
    assert len({tuple(score) for score in first.scores}) == 3


def test_validation_chooses_the_penalty_of_the_mlp():
    labels = some_labels(300)
    texts, rows = planted(labels), rows_of(labels)
    *single, both = (
        mlp_scores(texts, rows, MlpConfig(penalties=penalties, n_seeds=1))
        for penalties in ((100.0,), (1e-4,), (100.0, 1e-4))
    )
    valid = rows.where("validation")
    aurocs = [roc_auc_score(labels[valid], x.scores[0, valid]) for x in single]
    assert aurocs[0] != aurocs[1]
    best = single[int(np.argmax(aurocs))]
    assert chosen(both) == chosen(best)
    np.testing.assert_array_equal(both.scores, best.scores)


def test_validation_decides_the_best_epoch_and_patience_ends_the_search():
    rows = rows_of(np.arange(600) % 2 == 0)
    is_valid = rows.splits == "validation"
    # On validation rows the second is best, on all others the fourth.
    quality, elsewhere = [0.2, 0.9, 0.5, 0.4, 0.95], [0.1, 0.2, 0.3, 0.99, 0.1]
    noise = np.random.default_rng(0).random(600)
    calls = []

    def epochs():
        for number, (here, other) in enumerate(zip(quality, elsewhere, strict=True), 1):
            calls.append(number)
            weight = np.where(is_valid, here, other)
            yield weight * rows.labels + (1 - weight) * noise

    value, scores, number = best_epoch(epochs(), rows, patience=2)
    assert number == 2 and calls == [1, 2, 3, 4]
    valid = rows.where("validation")
    assert value == roc_auc_score(rows.labels[valid], scores[valid])


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    """A random BERT of one layer that knows the words above."""
    path = tmp_path_factory.mktemp("encoders") / "tiny-bert"
    names = [f"name{i}" for i in range(20)]
    save_tokenizer(path, ["it", "is", *WORDS, *names])
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(path)
    return path


QUICK = FineTuneConfig(learning_rate=5e-3, n_epochs=4, n_tokens=16)


def test_a_fine_tuned_encoder_learns_planted_words_also_on_a_gpu(tiny_encoder):
    labels = some_labels(900)
    texts, rows = planted(labels), rows_of(labels)
    state = torch.random.get_rng_state()
    result = encoder_scores(texts, rows, tiny_encoder, QUICK)
    assert result.scores.shape == (1, 900) and measured(result, rows) > 0.95
    assert chosen(result)["epoch"] in (2, 3, 4)
    again = encoder_scores(texts, rows, tiny_encoder, QUICK)
    np.testing.assert_array_equal(result.scores, again.scores)
    with PretendedGpu() as gpu:
        gpu.seed = 5
        assert measured(encoder_scores(texts, rows, tiny_encoder, QUICK), rows) > 0.95
        assert gpu.seed == 5
    assert torch.equal(state, torch.random.get_rng_state())


def test_an_encoder_learns_nothing_from_permuted_labels(tiny_encoder):
    texts, rows = planted(some_labels(900)), rows_of(some_labels(900, 9))
    result = encoder_scores(texts, rows, tiny_encoder, QUICK)
    assert abs(measured(result, rows) - 0.5) < 0.12


def test_padding_to_a_longer_text_changes_no_score(tiny_encoder):
    labels = some_labels(90)
    texts, rows = planted(labels), rows_of(labels)
    longer = [*texts[:-1], " ".join(WORDS)]
    config = FineTuneConfig(n_epochs=1, n_tokens=40)
    first, second = (
        encoder_scores(x, rows, tiny_encoder, config).scores[0, :-1]
        for x in (texts, longer)
    )
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_directory_without_an_encoder_is_refused_in_one_sentence(
    tmp_path, tiny_encoder
):
    rows = rows_of(some_labels(30))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors, expected a text encoder"):
        encoder_scores(["a"] * 30, rows, tmp_path)
    damaged = shutil.copytree(tiny_encoder, tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged could not be loaded") as error:
        encoder_scores(["a"] * 30, rows, damaged)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting", ["closed_book", "with_context"])
def test_text_models_read_question_answer_and_passages_of_a_run(
    setting, tmp_path, tiny_encoder
):
    labels = some_labels(300)
    rows = rows_of(labels, setting)
    parts = [text.split("\n") for text in planted(labels)]
    examples, answers = [], []
    for i, (question, text, other) in enumerate(parts):
        # With context the name stands in the passage, closed-book in the answer.
        if setting == "with_context":
            text, other = other, text
        fields = dict(question=question, passages=(Passage(title="page", text=other),))
        examples.append(an_example(id=f"q{i}", split=rows.splits[i], **fields))
        answers.append(an_answer(example_id=f"q{i}", setting=setting, text=text))
    inputs = DetectorInput.of(
        None,
        rows,
        questions=examples,
        answers=reversed(answers),
        template=PromptConfig().prompt_template(),
        encoder=tiny_encoder,
    )
    assert measured(encoder_scores(inputs.texts, rows, tiny_encoder, QUICK), rows) > 0.8
    for name in ("tfidf_svm", "tfidf_mlp"):
        assert measured(catalogue()[name].score(inputs), rows) > 0.8
    with pytest.raises(ValueError, match="encoder= .*--encoder DIRECTORY"):
        catalogue()["text_encoder"].score(dataclasses.replace(inputs, encoder=None))

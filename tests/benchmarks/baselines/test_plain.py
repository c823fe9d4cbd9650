"""Perplexity, length, TF-IDF and linear probes, and what is too easy."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines import plain
from beatrice.benchmarks.baselines.plain import (
    joined_text,
    linear_scores,
    majority_scores,
    perplexity_score,
    pooled_signals,
    probe_scores,
    rows_at_equal_length,
    standardise,
)
from beatrice.benchmarks.results.evaluate import annotated_rows
from beatrice.benchmarks.results.names import AT_EQUAL_LENGTH, probe
from beatrice.benchmarks.results.tables import find, results_of
from beatrice.extract.run.rows import Subject
from beatrice.jaxprobe.evaluation import Scored
from beatrice.jaxprobe.linear import INVERSE_PENALTIES
from beatrice.jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.baselines.planted import memory_store
from tests.benchmarks.rows import rows_of


def planted_texts(n, seed):
    """Random words, and in the answer one of forty names; twenty of them are right."""
    rng = np.random.default_rng(seed)
    questions = [
        " ".join(f"word{i}" for i in rng.integers(60, size=8)) for _ in "x" * n
    ]
    names = rng.integers(40, size=n)
    texts = [
        joined_text(question, f"it is name{i}")
        for question, i in zip(questions, names, strict=True)
    ]
    return texts, names < 20


def fit_tfidf(texts, labels):
    """Fitted and validated on the same, since the penalty does not matter here."""
    return plain.fit_tfidf(texts, labels, texts, labels)


def test_validation_chooses_the_penalty():
    train, valid = planted_texts(200, seed=0), planted_texts(200, seed=1)
    noisy, chosen = np.random.default_rng(0).random(200) < 0.35, set()
    for labels in (train[1], train[1] ^ noisy):
        model = plain.fit_tfidf(train[0], labels, *valid)
        aurocs = {}
        for penalty in INVERSE_PENALTIES:
            matrix = model.vectorizer.transform(train[0])
            again = LogisticRegression(C=penalty, max_iter=2000).fit(matrix, labels)
            scores = again.predict_proba(model.vectorizer.transform(valid[0]))[:, 1]
            aurocs[penalty] = roc_auc_score(valid[1], scores)
        assert model.valid_auroc == pytest.approx(max(aurocs.values()))
        assert model.regression.C == max(aurocs, key=aurocs.get)
        chosen.add(model.regression.C)
    assert len(chosen) == 2  # clean labels and noisy ones want another penalty


def test_planted_words_are_found():
    detector = fit_tfidf(*planted_texts(400, seed=0))
    texts, labels = planted_texts(300, seed=1)
    p_correct = detector.score(texts)
    assert roc_auc_score(labels, p_correct) > 0.99
    assert p_correct.min() >= 0 and p_correct.max() <= 1


def test_permuted_labels_give_chance_auroc():
    texts, labels = planted_texts(400, seed=0)
    new_texts, new_labels = planted_texts(300, seed=1)
    aurocs = []
    for seed in range(8):
        permuted = np.random.default_rng(seed).permutation(labels)
        p_correct = fit_tfidf(texts, permuted).score(new_texts)
        aurocs.append(roc_auc_score(new_labels, p_correct))
    # One fit ranks 20 right and 20 wrong names at random: s.d. 0.09, of the mean 0.03.
    assert abs(np.mean(aurocs) - 0.5) < 0.1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (joined_text("which", "a"), joined_text("which", "b")),  # one letter counts
        (
            joined_text("who", "Ada", ["a page", "it is known"]),
            joined_text("who", "Ada", ["a page", "nobody knows"]),
        ),
        ("right not is", "is not right"),  # the same words in other pairs
    ],
)
def test_short_answers_passages_and_pairs_of_words_are_read(right, wrong):
    detector = fit_tfidf([wrong, right] * 20, [False, True] * 20)
    p_wrong, p_right = detector.score([wrong, right])
    assert p_wrong < 0.5 < p_right


def test_nothing_to_score_is_no_error():
    assert fit_tfidf(*planted_texts(20, seed=5)).score([]).shape == (0,)


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a"], [True, False], "one per answer"),
        (["a", "b"], [True, True], "one class only"),
    ],
)
def test_what_cannot_be_fitted_is_refused(texts, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_tfidf(texts, labels)


def prob_rows(p):
    """Rows of the prob family in which only p and the surprisal are filled."""
    p = np.asarray(p, dtype=np.float32)
    return np.stack([p, -np.log(p), *[np.full_like(p, 9.0)] * 3], axis=1)


def test_perplexity_score_is_minus_the_mean_surprisal_of_the_answer_only():
    score = perplexity_score(prob_rows([0.001, 0.5, 0.25, 0.001]), (1, 3))
    assert score == pytest.approx(np.log([0.5, 0.25]).mean())


def test_an_answer_without_a_token_is_read_where_its_end_was_emitted():
    score = perplexity_score(prob_rows([0.001, 0.5, 0.25]), (3, 3))
    assert score == pytest.approx(np.log(0.25))


@pytest.mark.parametrize("span", [(0, 0), (0, 3), (-1, 1), (2, 1)])
def test_an_answer_span_outside_the_tokens_is_refused(span):
    with pytest.raises(ValueError, match="outside the 2 tokens"):
        perplexity_score(prob_rows([0.5, 0.5]), span)


def lengths(n_tokens):
    """The features of answers that were neither empty nor cut."""
    zeros = np.zeros(len(n_tokens))
    return np.stack([n_tokens, np.log1p(n_tokens), zeros, zeros], axis=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_answer_length_learns_its_direction_from_training_answers(sign):
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 30, size=900)
    rows = rows_of(sign * (n_tokens - 15) + rng.normal(0, 5, 900) > 0)
    (scores,) = linear_scores([lengths(n_tokens)], rows)[0]
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_answer_length_learns_that_the_middle_is_best():
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 200, size=900)
    rows = rows_of((n_tokens > 5) & (n_tokens < 60))
    (scores,) = linear_scores([lengths(n_tokens)], rows)[0]
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_the_majority_ranks_nothing():
    rows = rows_of(np.arange(90) % 3 == 0)
    (scores,) = majority_scores(rows)
    assert len(set(scores)) == 1 and scores[0] == pytest.approx(1 / 3)


def test_standardised_features_have_variance_one_together():
    features = np.random.default_rng(0).normal(3, [1, 5, 0, 9], (50, 4))
    standardise(features, np.arange(40))
    np.testing.assert_allclose(features[:40].mean(axis=0), 0, atol=1e-12)
    assert features[:40].var(axis=0).sum() == pytest.approx(3 / 4)  # one is constant


N, D, LAYERS = 240, 6, (1, 3)


def stored(labels, hidden_spans="all"):
    """Random signals; in layer 3 the answers that are right have larger ones."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, len(labels))
    bounds = np.stack([lengths * 0 + 1, lengths // 3, lengths - 2, lengths], axis=1)
    spans = np.stack([bounds[:, i : i + 2] for i in range(3)], axis=1).astype(np.int64)
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


def test_a_probe_reads_mean_least_and_largest_of_the_answer_and_means_elsewhere():
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


def test_a_probe_reads_the_same_of_a_store_that_keeps_the_answers_alone():
    labels = np.arange(40) % 2 == 0
    whole = pooled_signals(stored(labels)[0], "closed_book", "hidden", 3)
    answers = pooled_signals(stored(labels, "answer")[0], "closed_book", "hidden", 3)
    np.testing.assert_array_equal(answers, whole[:, : 3 * D])


def test_a_probe_reads_the_same_in_however_many_parts():
    store, *_ = stored(np.arange(40) % 2 == 0)
    whole, chunked = (
        pooled_signals(store, "with_context", "attn", None, most_bytes=n)
        for n in (1 << 30, 100)
    )
    np.testing.assert_array_equal(whole, chunked)


def test_a_linear_probe_finds_what_was_planted_in_its_family_and_layer_alone():
    labels = np.random.default_rng(3).random(N) < 0.5
    store, *_ = stored(labels)
    rows = rows_of(labels)
    test = rows.where("test")

    def aurocs(layer):
        scores, chosen = probe_scores([store], rows, layer)
        assert [row.subject for row in chosen] == list(scores)
        return {n: roc_auc_score(labels[test], x[0, test]) for n, x in scores.items()}

    there, elsewhere = aurocs(3), aurocs(1)
    assert there[probe("H")] > 0.9 and there[probe("HPRA")] > 0.8
    # Of 80 answers: s.d. 0.065 by chance.
    assert all(abs(there[probe(x)] - 0.5) < 0.2 for x in "PRA")
    assert abs(elsewhere[probe("H")] - 0.5) < 0.2


def matched(n=1800):
    """Right answers are short; one detector sees that alone, another sees more."""
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
    return rows, n_tokens, [Scored(name=n, scores=x) for n, x in scores.items()]


BOOTSTRAP = BootstrapConfig(n_resamples=300)


def equal_length(detectors, rows, n_tokens):
    names = list(AT_EQUAL_LENGTH)
    return rows_at_equal_length(detectors, rows, n_tokens, BOOTSTRAP, names)


def test_what_only_follows_length_vanishes_at_equal_length_and_the_rest_stays():
    rows, n_tokens, detectors = matched()
    table = results_of(equal_length(detectors, rows, n_tokens))
    where = {"split": "test", "dataset": "world", "metric": "auroc", "seed": "mean"}
    length, ours, rival = (
        find(table, detector=x, against=None, **where)
        for x in ("answer_length", "champion", "perplexity")
    )
    labels, test = rows.labels, rows.where("test")
    assert roc_auc_score(labels[test], -n_tokens[test]) > 0.8  # without matching
    assert length.value == length.ci_low == length.ci_high == 0.5
    assert rival.ci_low < 0.5 < rival.ci_high
    assert ours.ci_low > 0.85
    gain = find(table, against="answer_length", **where)
    assert gain.value == pytest.approx(ours.value - 0.5)
    assert gain.experiment == "at_equal_length_paired"


def test_answers_without_a_counterpart_of_their_length_are_counted():
    rows, n_tokens, detectors = matched()
    n_tokens = np.where(rows.labels, n_tokens, n_tokens + 100)
    n_tokens[rows.where("test")[:10]] = 7
    table = results_of(equal_length(detectors, rows, n_tokens))
    where = {"split": "test", "dataset": "world"}
    share = find(table, detector="answers", **where)
    where |= {"against": None}
    n = find(table, detector="champion", metric="auroc", seed="mean", **where).n
    assert 0 < n < share.n and share.value == pytest.approx(1 - n / share.n)
    undefined = find(
        table, detector="champion", **where | {"split": "validation"}, metric="auroc"
    )
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
        ids = [i for i in test if rows.labels[i] == label]
        n_disputed = sum(i in disputed for i in ids)
        noise.append(dict(setting="closed_book", label=label, n_all=3 * len(ids)))
        noise[-1] |= dict(n=len(ids), n_disputed=n_disputed, ci_low=0.0, ci_high=1.0)
    return {"noise": noise, "verdicts": verdicts}


def test_mislabelled_answers_cost_auroc_that_a_person_gives_back():
    rng = np.random.default_rng(2)
    truth = rng.random(900) < 0.4
    slips = np.flatnonzero(rng.random(900) < 0.15)
    labels = truth.copy()
    labels[slips] ^= True
    rows = rows_of(labels)
    scores = (2.5 * truth + rng.standard_normal(900))[None]
    verdicts = annotated(rows, set(slips.tolist()))
    scored = [Scored(name="champion", scores=scores)]
    result_rows = annotated_rows(verdicts, scored, rows, BOOTSTRAP)
    by = {x.kind: x for x in result_rows if x.experiment == "annotated"}
    test = rows.where("test")
    expected = roc_auc_score(labels[test], scores[0, test])
    assert by["labels"].value == pytest.approx(expected, abs=1e-5)
    expected = roc_auc_score(truth[test], scores[0, test])
    assert by["a person"].value == pytest.approx(expected, abs=0.02)  # weighted
    assert by["labels"].value < by["undisputed labels"].ci_low
    assert by["undisputed labels"].n == 300 - len(set(slips) & set(test))
    shares = [x for x in result_rows if x.experiment == "label_noise"]
    assert [row.kind for row in shares] == ["right", "wrong"]

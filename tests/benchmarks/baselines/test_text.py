import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.baselines import plain
from beatrice.benchmarks.baselines.plain import joined_text, perplexity_score
from beatrice.jaxprobe.linear import INVERSE_PENALTIES


def planted(n, seed):
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
    train, valid = planted(200, seed=0), planted(200, seed=1)
    noisy, chosen = np.random.default_rng(0).random(200) < 0.35, set()
    for labels in (train[1], train[1] ^ noisy):
        found = plain.fit_tfidf(train[0], labels, *valid)
        aurocs = {}
        for penalty in INVERSE_PENALTIES:
            matrix = found.vectorizer.transform(train[0])
            again = LogisticRegression(C=penalty, max_iter=2000).fit(matrix, labels)
            scores = again.predict_proba(found.vectorizer.transform(valid[0]))[:, 1]
            aurocs[penalty] = roc_auc_score(valid[1], scores)
        assert found.valid_auroc == pytest.approx(max(aurocs.values()))
        assert found.regression.C == max(aurocs, key=aurocs.get)
        chosen.add(found.regression.C)
    assert len(chosen) == 2  # clean labels and noisy ones want another penalty


def test_planted_words_are_found():
    detector = fit_tfidf(*planted(400, seed=0))
    texts, labels = planted(300, seed=1)
    p_correct = detector.score(texts)
    assert roc_auc_score(labels, p_correct) > 0.99
    assert p_correct.min() >= 0 and p_correct.max() <= 1


def test_permuted_labels_give_chance_auroc():
    texts, labels = planted(400, seed=0)
    new_texts, new_labels = planted(300, seed=1)
    aurocs = []
    for seed in range(8):
        permuted = np.random.default_rng(seed).permutation(labels)
        p_correct = fit_tfidf(texts, permuted).score(new_texts)
        aurocs.append(roc_auc_score(new_labels, p_correct))
    # One fit ranks 20 right and 20 wrong names at random: s.d. 0.09, of the mean 0.03.
    assert abs(np.mean(aurocs) - 0.5) < 0.1


def test_a_pair_of_words_is_read_as_such():
    # "not right" and "right not" have the same words; only the pairs differ.
    texts = ["is not right", "right not is"] * 20
    wrong, right = fit_tfidf(texts, [False, True] * 20).score(texts[:2])
    assert wrong < 0.5 < right


def test_one_letter_answers_count():
    texts = [joined_text("which", answer) for answer in "ab"]
    right, wrong = fit_tfidf(texts * 20, [True, False] * 20).score(texts)
    assert wrong < 0.5 < right


def test_passages_are_read_too():
    said = ["it is known", "nobody knows"]
    texts = [joined_text("who", "Ada", ["a page", passage]) for passage in said]
    known, unknown = fit_tfidf(texts * 20, [True, False] * 20).score(texts)
    assert unknown < 0.5 < known
    without = joined_text("who", "Ada")
    assert without in texts[0] and "page" not in without


def test_fitting_twice_gives_the_same_scores():
    texts, labels = planted(80, seed=4)
    first, second = (fit_tfidf(texts, labels) for _ in range(2))
    np.testing.assert_array_equal(first.score(texts), second.score(texts))


def test_nothing_to_score_is_no_error():
    assert fit_tfidf(*planted(20, seed=5)).score([]).shape == (0,)


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


def test_a_likelier_answer_scores_higher():
    likely, unlikely = prob_rows([0.9, 0.9]), prob_rows([0.9, 0.2])
    assert perplexity_score(likely, (0, 2)) > perplexity_score(unlikely, (0, 2))


@pytest.mark.parametrize("span", [(0, 0), (0, 3), (-1, 1), (2, 1)])
def test_an_answer_span_outside_the_tokens_is_refused(span):
    with pytest.raises(ValueError, match="outside the 2 tokens"):
        perplexity_score(prob_rows([0.5, 0.5]), span)

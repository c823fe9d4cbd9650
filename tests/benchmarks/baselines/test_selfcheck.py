"""SelfCheckGPT and EigenScore; comparisons with published code, if installed.

`pip install --no-deps uqlm==0.6.7 lm-polygraph==0.7.0 selfcheckgpt==0.1.7` and, for the
last, spaCy and nltk. Only the files of the formulas are read.
"""

import ast
import importlib.util
import math
import types
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors.clustering import paper_clusters
from beatrice.benchmarks.baselines.detectors.entropy import (
    discrete_entropy,
    weighted_entropy,
)
from beatrice.benchmarks.baselines.detectors.selfcheck import (
    official_eigenscore,
    sentences_of,
    tokens_of,
    unigram_max,
)
from beatrice.jaxprobe.tokens import mean_log_eigenvalue
from tests.benchmarks.baselines.planted import (
    by_last_word,
    drawn_inputs,
    relations_by,
    scores,
)

OPENING = "Michael Alan Weiner (born {}) is {} American radio host. "
BORN = "March 31, 1942"
PASSAGE = OPENING.format(BORN, "an") + "He is the host of The Savage Nation."
SAMPLES = [
    OPENING.format(BORN, "an") + "He is the host of The Savage Country.",
    "Michael Alan Weiner (born January 13, 1960) is a Canadian radio host. "
    "He works at The New York Times.",
    OPENING.format(BORN, "an") + "He obtained his PhD from MIT.",
]
NLI, PAPER, NGRAM = (
    catalogue()[f"selfcheck_{name}"] for name in ("nli", "nli:paper", "ngram")
)


def test_unigrams_match_the_packages_own_example():
    first, second = sentences_of(PASSAGE)
    assert sum(len(tokens_of(text)) for text in [PASSAGE, *SAMPLES]) == 97
    left, both = unigram_max([first, second], SAMPLES), [first, second]
    assert left == pytest.approx(4.025405, abs=1e-6)
    for sentence, golden in zip(both, (3.476099, 4.574711), strict=True):
        # The corpus is the whole passage: its other sentences are added to the samples.
        rest = [*SAMPLES, *(other for other in both if other != sentence)]
        assert unigram_max([sentence], rest) == pytest.approx(golden, abs=1e-6)


@pytest.mark.parametrize(
    ("sentence", "sample", "one_in"),
    [
        ("Paris", "paris", 1),
        ("Paris.", "Paris.", 2),
        ("Rome.", "Paris.", 22),  # once among 11 answers of two tokens
    ],
)
def test_a_sentence_is_as_likely_as_its_rarest_token(sentence, sample, one_in):
    assert unigram_max([sentence], [sample] * 10) == pytest.approx(math.log(one_in))


def test_a_sentence_of_invisible_characters_changes_no_score():
    expected = unigram_max(["Paris."], SAMPLES)
    assert unigram_max(["Paris.", "\u200b"], SAMPLES) == expected
    assert math.isnan(unigram_max(["\u200b"], SAMPLES))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("  \n ", []),
        ("Paris", ["Paris"]),
        (
            "It is Paris. I know!  Really? Yes",
            ["It is Paris.", "I know!", "Really?", "Yes"],
        ),
        ("J. K. Rowling wrote it.", ["J. K. Rowling wrote it."]),
        ("Dr. No met Mrs. Smith. Good.", ["Dr. No met Mrs. Smith.", "Good."]),
        ("It is 3.5 km. 4 of them.", ["It is 3.5 km.", "4 of them."]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ("one line\nanother", ["one line", "another"]),
        ("e.g. this one", ["e.g. this one"]),
        ("Oui. Évian, é. Zut", ["Oui.", "Évian, é.", "Zut"]),
        ("Да, т. е. так. А. С. Попов. Он", ["Да, т. е. так.", "А. С. Попов.", "Он"]),
        ("هل هو؟ نعم. هو", ["هل هو؟", "نعم.", "هو"]),
        ("वह राम है। यह", ["वह राम है।", "यह"]),
        ("他说“是。”好！它在哪里？", ["他说“是。”好！", "它在哪里？"]),
        ("wide" + 200_000 * " " + "apart", ["wide" + 200_000 * " " + "apart"]),
    ],
)
def test_text_is_split_into_sentences(text, sentences):
    assert sentences_of(text) == sentences


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It's (the) U.S.", ["it", "'s", "(", "the", ")", "u.s."]),
        ("1,000.5 km.", ["1,000.5", "km", "."]),
        ("Well-known 'x'", ["well", "-", "known", "'", "x", "'"]),
        ("Gu\u0308n", ["g\u00fcn"]),
        ("東京です。", ["東", "京", "で", "す", "。"]),
    ],
)
def test_text_is_split_into_tokens(text, tokens):
    assert tokens_of(text) == tokens


def test_the_sentence_comes_first_but_in_the_papers_order_the_sample_does():
    calls = []
    rule = relations_by(lambda *pair: calls.append(pair) or (0.5, 0.0, 0.5))
    drawn = drawn_inputs([["x"]], ["A b. C d."], relations=rule)
    NLI.score(drawn)
    assert calls == [("A b.", "x"), ("C d.", "x")]
    PAPER.score(drawn)
    assert calls[2:] == [("x", "A b."), ("x", "C d.")]


def test_a_score_is_minus_the_mean_contradiction_without_neutral():
    chances = {"x": (0.1, 0.8, 0.1), "y": (0.3, 0.6, 0.1), "z": (0.0, 0.5, 0.5)}
    relations = relations_by(lambda p, h: chances[h])
    drawn = drawn_inputs([["x", "y", "z", "x"]], relations=relations)
    expected = -(0.5 + 0.25 + 1.0 + 0.5) / 4
    assert scores(NLI, drawn) == pytest.approx([expected])


def test_all_sentences_have_the_same_weight():
    drawn = drawn_inputs(
        [["we know x", "so x"]],
        ["Surely x. Perhaps y. Or z."],
        relations=relations_by(lambda p, h: by_last_word(p.rstrip("."), h.rstrip("."))),
    )
    low, high = 0.02 / 0.92, 0.9 / 0.92
    assert scores(NLI, drawn) == pytest.approx([-(low + 2 * high) / 3])


@pytest.mark.parametrize("detector", (NLI, PAPER, NGRAM), ids=lambda x: x.name)
def test_empty_answers_and_answers_without_samples_are_undefined(detector):
    drawn = drawn_inputs(
        [["a", "b"], ["a"], [], ["", "a"]],
        ["a", " ", "a", "a"],
        relations=relations_by(by_last_word),
    )
    assert np.isfinite(scores(detector, drawn)).tolist() == [True, False, False, True]


def test_a_pair_that_is_surely_neutral_is_undefined():
    drawn = drawn_inputs([["a"]], relations=relations_by(lambda p, h: (0, 1, 0)))
    assert np.isnan(scores(NLI, drawn)).all()


OFFICIAL = catalogue()["eigenscore"]


def test_the_official_eigenscore_equals_the_reference():
    states = (np.arange(12) ** 1.5).reshape(3, 4)
    assert official_eigenscore(states) == pytest.approx(-0.7283145391253493, abs=1e-12)


def test_the_papers_score_is_the_mean_logarithm_of_the_eigenvalues():
    states = np.random.default_rng(0).normal(size=(5, 16))
    centring = np.eye(16) - np.ones((16, 16)) / 16
    values = np.linalg.eigvalsh(states @ centring @ states.T + 1e-3 * np.eye(5))
    assert mean_log_eigenvalue(states) == pytest.approx(np.log(values).mean())


def test_equal_answers_have_a_lower_score_and_raise_no_error():
    state = np.random.default_rng(0).normal(size=64)
    alike = np.tile(state, (10, 1))
    apart = np.random.default_rng(1).normal(size=(10, 64))
    for measure in (official_eigenscore, mean_log_eigenvalue):
        assert -10 < measure(alike) < measure(apart)


def test_unread_states_are_left_out_and_a_single_state_is_undefined():
    states = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
    states[1, 3:] = states[2, 1:] = states[3] = np.nan
    given = drawn_inputs([["a"]] * 4, readings={"sample_states": states})
    result = scores(OFFICIAL, given)
    expected = -official_eigenscore(states[1, :3].astype(np.float64))
    assert result[1] == pytest.approx(expected)
    assert np.isfinite(result).tolist() == [True, True, False, False]


def test_states_of_other_rows_are_refused():
    states = {"sample_states": np.zeros((3, 2, 4))}
    given = drawn_inputs([["a"], ["b"]], readings=states)
    with pytest.raises(ValueError, match=r"is of shape \[3, 2, 4\], expected 3"):
        OFFICIAL.score(given)


EXACT = 1e-12


class Base:
    """Stands for the base classes of lm-polygraph, which only add names."""

    def __init__(self, *names):
        del names


BASES = {"Estimator": Base, "StatCalculator": Base, "WhiteboxModel": object}


def published(package, path, **given):
    """Return what a file of a package defines; `given` replaces its own imports."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())

    def is_given(node):
        names = [alias.name for alias in getattr(node, "names", [])]
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        return is_import and any(name in given for name in names)

    tree.body = [node for node in tree.body if not is_given(node)]
    result = dict(given)
    exec(compile(tree, path, "exec"), result)
    return types.SimpleNamespace(**result)


def some_answers(seed):
    """Log-probabilities of up to ten answers, and which of them entail which."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 11))
    log_probs = [rng.uniform(-3, 0, rng.integers(1, 6)) for _ in range(n)]
    entails = rng.random((n, n)) < 0.6
    both = (entails & entails.T) | np.eye(n, dtype=bool)
    return log_probs, entails, both, [str(i) for i in range(n)]


def test_entropies_equal_those_of_uqlm():
    code = published("uqlm", "nli/entropy_utils.py")
    for seed in range(100):
        log_probs, _, both, texts = some_answers(seed)
        clusters = paper_clusters(texts, both)
        places = [np.flatnonzero(clusters == k) for k in range(clusters.max() + 1)]
        as_dicts = [[{"logprob": x} for x in prob] for prob in log_probs]
        weighted, uniform = (
            code.compute_semantic_entropy(code.compute_cluster_probabilities(p, places))
            for p in code.compute_response_probabilities(as_dicts, len(texts))
        )
        means = [prob.mean() for prob in log_probs]
        assert weighted_entropy(means, clusters) == pytest.approx(weighted, abs=EXACT)
        assert discrete_entropy(clusters) == pytest.approx(uniform, abs=EXACT)


def test_clusters_and_entropies_equal_those_of_lm_polygraph():
    folder = "stat_calculators/semantic_classes.py"
    classes = published("lm_polygraph", folder, **BASES).SemanticClassesCalculator
    kind = published("lm_polygraph", "estimators/semantic_entropy.py", **BASES)
    for seed in range(100):
        log_probs, entails, both, texts = some_answers(seed)
        known = classes()
        known._is_entailment = entails[None]
        of_samples, of_classes = known.get_classes([texts])
        clusters = paper_clusters(texts, both)
        assert clusters.tolist() == [of_samples[0][i] for i in range(len(texts))]
        means = [item.mean() for item in log_probs]
        weights = log_softmax(means)
        sums, counts = (
            kind.SemanticEntropy(class_probability_estimation=name)
            for name in ("sum", "frequency")
        )
        for item in (sums, counts):
            item._sample_to_class, item._class_to_sample = of_samples, of_classes
        log_shares = [math.log(len(texts)) + weights]
        (weighted,) = sums.batched_call([texts], [weights], log_shares)
        (counted,) = counts.batched_call([texts], None)
        assert weighted_entropy(means, clusters) == pytest.approx(weighted, abs=EXACT)
        assert discrete_entropy(clusters) == pytest.approx(counted, abs=EXACT)


def test_eigenscores_equal_those_of_lm_polygraph():
    code = published("lm_polygraph", "estimators/eigenscore.py", **BASES)
    states = np.random.default_rng(0).normal(size=(10, 24))
    stats = {"sample_embeddings": [states]}
    (paper,) = code.EigenScore()(stats)
    (rescaled,) = code.EigenScore(alpha=1e-3 * 23)(stats)
    assert mean_log_eigenvalue(states) == pytest.approx(paper, abs=EXACT)
    official = (rescaled - math.log(23)) / math.log(10)
    assert official_eigenscore(states) == pytest.approx(official, abs=EXACT)


def test_unigrams_equal_those_of_selfcheckgpt():
    pytest.importorskip("nltk")
    spacy = pytest.importorskip("spacy")

    def load(name):
        """Replace en_core_web_sm, which no index has; the tokens are the same."""
        language = spacy.blank("en")
        language.add_pipe("sentencizer")
        return language

    given = {"spacy": types.SimpleNamespace(load=load)}
    model = published("selfcheckgpt", "modeling_ngram.py", **given).UnigramModel()
    for text in (PASSAGE, *SAMPLES):
        model.add(text)
    model.train()
    sentences = sentences_of(PASSAGE)
    expected = model.evaluate(sentences)["doc_level"]["avg_max_neg_logprob"]
    assert unigram_max(sentences, SAMPLES) == pytest.approx(expected, abs=EXACT)

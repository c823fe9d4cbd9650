"""Rivals agree with the packages of others on the same inputs, where these are there.

`pip install --no-deps uqlm==0.6.7 lm-polygraph==0.7.0 selfcheckgpt==0.1.7`, and for the
last `pip install spacy nltk`; what each file imports of its own package is loaded, and
not the package's `__init__`, which loads backends by the dozen.
"""

import contextlib
import importlib
import importlib.util
import math
import sys
import types

import numpy as np
import pytest

from beatrice.benchmarks.baselines.detectors.entropy import (
    discrete_entropy,
    weighted_entropy,
)
from beatrice.benchmarks.baselines.detectors.selfcheck import (
    official_eigenscore,
    paper_eigenscore,
    sentences_of,
    tokens_of,
    unigram_max,
)

MEANS = (-0.2, -0.5, -1.0, -0.5, -0.1)
CLUSTERS = np.array([0, 0, 1, 2, 1])
MEMBERS = [np.flatnonzero(CLUSTERS == c).tolist() for c in range(3)]
PASSAGE = "Ada Lovelace wrote the first program. She died in London in 1852."
SAMPLES = [
    "Ada Lovelace wrote the first computer program, in 1843.",
    "She was born in London. She died in 1852, at 36.",
    "Charles Babbage wrote a program.",
]


@contextlib.contextmanager
def bare(*names):
    """Let a package and parts of it be found without what their `__init__` does."""
    before, head = set(sys.modules), names[0]
    if (spec := importlib.util.find_spec(head)) is None:
        pytest.skip(f"{head} is not installed; see the head of {__name__}")
    for name in names:
        module = types.ModuleType(name)
        rest = name.removeprefix(head).replace(".", "/")
        module.__path__ = [place + rest for place in spec.submodule_search_locations]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == head:
                del sys.modules[name]


def load(place, *packages):
    """Import a module of another package, or skip with what it lacks."""
    with bare(*packages):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            pytest.skip(f"{place}: {error}")


@pytest.fixture(scope="module")
def uqlm():
    return load("uqlm.nli.entropy_utils", "uqlm", "uqlm.nli")


@pytest.fixture(scope="module")
def polygraph():
    packages = ("lm_polygraph", "lm_polygraph.utils", "lm_polygraph.estimators")

    def found(name):
        return load(f"lm_polygraph.estimators.{name}", *packages)

    return found


def test_semantic_entropy_is_that_of_uqlm_given_the_clusters(uqlm):
    # Its tokens' mean log-probability is given as one token of that log-probability.
    tokens = [[{"logprob": mean}] for mean in MEANS]
    weighted, uniform = uqlm.compute_response_probabilities(tokens, len(MEANS))
    for probabilities, own in (
        (weighted, weighted_entropy(MEANS, CLUSTERS)),
        (uniform, discrete_entropy(CLUSTERS)),
    ):
        parts = uqlm.compute_cluster_probabilities(probabilities, MEMBERS)
        assert own == pytest.approx(uqlm.compute_semantic_entropy(parts), abs=1e-12)


def test_semantic_entropy_is_that_of_lm_polygraph_on_normalised_means(polygraph):
    # It sums where we normalise first: given are the logarithms of our weights.
    log_weights = np.array(MEANS) - np.logaddexp.reduce(MEANS)
    given = ["a", "b", "c", "d", "e"]
    kind = polygraph("semantic_entropy").SemanticEntropy
    log_n = math.log(len(MEANS))
    for probability, weights, own in (
        ("sum", log_n + log_weights, weighted_entropy(MEANS, CLUSTERS)),
        ("frequency", 0 * log_weights, discrete_entropy(CLUSTERS)),
    ):
        estimator = kind(False, probability, "mean")
        estimator._class_to_sample = {0: MEMBERS}
        estimator._sample_to_class = {0: dict(enumerate(CLUSTERS.tolist()))}
        found = estimator.batched_call([given], [log_weights], [weights])
        assert own == pytest.approx(float(found[0]), abs=1e-12)


def test_eigenscore_is_that_of_lm_polygraph_which_follows_the_paper(polygraph):
    states = np.random.default_rng(0).normal(size=(10, 33))

    def theirs(alpha):
        stats = {"sample_embeddings": [states]}
        return float(polygraph("eigenscore").EigenScore(alpha)(stats)[0])

    assert paper_eigenscore(states) == pytest.approx(theirs(1e-3), abs=1e-12)
    # The official code divides by d - 1 under the same ridge, and takes log10.
    official = (theirs(1e-3 * 32) - math.log(32)) / math.log(10)
    assert official_eigenscore(states) == pytest.approx(official, abs=1e-12)


def test_unigrams_are_those_of_selfcheckgpt_with_a_blank_pipeline():
    module = load("selfcheckgpt.modeling_ngram", "selfcheckgpt")
    spacy = pytest.importorskip("spacy")
    model = module.UnigramModel.__new__(module.UnigramModel)
    # Its constructor loads en_core_web_sm, which no index of packages has.
    model.nlp = spacy.blank("en")
    model.nlp.add_pipe("sentencizer")
    model.sentence_count = model.token_count = 0
    model.counts, model.lowercase = {"<unk>": 0}, True
    for text in (PASSAGE, *SAMPLES):
        model.add(text)
    model.train(k=0)
    found = model.evaluate(sentences_of(PASSAGE))["doc_level"]
    own = unigram_max(sentences_of(PASSAGE), SAMPLES)
    assert own == pytest.approx(found["avg_max_neg_logprob"], abs=1e-12)
    assert model.token_count == sum(len(tokens_of(x)) for x in (PASSAGE, *SAMPLES))

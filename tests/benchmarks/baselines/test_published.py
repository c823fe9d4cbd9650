"""The same inputs through published code, where it is installed.

`pip install --no-deps uqlm==0.6.7 lm-polygraph==0.7.0 selfcheckgpt==0.1.7` and, for the
last, spaCy and nltk. Only the files of the formulas are read: the packages would load
much that is not needed for them.
"""

import ast
import importlib.util
import math
import types
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from beatrice.benchmarks.baselines.detectors.clustering import paper_clusters
from beatrice.benchmarks.baselines.detectors.entropy import (
    discrete_entropy,
    weighted_entropy,
)
from beatrice.benchmarks.baselines.detectors.selfcheck import (
    official_eigenscore,
    paper_eigenscore,
    sentences_of,
    unigram_max,
)
from tests.benchmarks.baselines.test_selfcheck import PASSAGE, SAMPLES

EXACT = 1e-12


class Base:
    """Stands for the base classes of lm-polygraph, which add names alone."""

    def __init__(self, *names):
        del names


BASES = {"Estimator": Base, "StatCalculator": Base, "WhiteboxModel": object}


def published(package, path, **given):
    """Return what one file of a package defines; `given` for imports of its own."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())

    def is_given(node):
        names = [alias.name for alias in getattr(node, "names", [])]
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        return is_import and any(name in given for name in names)

    tree.body = [node for node in tree.body if not is_given(node)]
    found = dict(given)
    exec(compile(tree, path, "exec"), found)
    return types.SimpleNamespace(**found)


def some_answers(seed):
    """Log-probabilities of up to ten answers, and which of them entail which."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 11))
    log_probs = [rng.uniform(-3, 0, rng.integers(1, 6)) for _ in range(n)]
    entails = rng.random((n, n)) < 0.6
    both = (entails & entails.T) | np.eye(n, dtype=bool)
    return log_probs, entails, both, [str(i) for i in range(n)]


def test_entropies_of_uqlm():
    code = published("uqlm", "nli/entropy_utils.py")
    for seed in range(100):
        log_probs, _, both, texts = some_answers(seed)
        clusters = paper_clusters(texts, both)
        places = [np.flatnonzero(clusters == k) for k in range(clusters.max() + 1)]
        as_dicts = [[{"logprob": x} for x in one] for one in log_probs]
        weighted, uniform = (
            code.compute_semantic_entropy(code.compute_cluster_probabilities(p, places))
            for p in code.compute_response_probabilities(as_dicts, len(texts))
        )
        means = [one.mean() for one in log_probs]
        assert weighted_entropy(means, clusters) == pytest.approx(weighted, abs=EXACT)
        assert discrete_entropy(clusters) == pytest.approx(uniform, abs=EXACT)


def test_clusters_and_entropies_of_lm_polygraph():
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
        means = [one.mean() for one in log_probs]
        weights = log_softmax(means)
        sums, counts = (
            kind.SemanticEntropy(class_probability_estimation=name)
            for name in ("sum", "frequency")
        )
        for one in (sums, counts):
            one._sample_to_class, one._class_to_sample = of_samples, of_classes
        log_shares = [math.log(len(texts)) + weights]
        (weighted,) = sums.batched_call([texts], [weights], log_shares)
        (counted,) = counts.batched_call([texts], None)
        assert weighted_entropy(means, clusters) == pytest.approx(weighted, abs=EXACT)
        assert discrete_entropy(clusters) == pytest.approx(counted, abs=EXACT)


def test_eigenscore_of_lm_polygraph():
    code = published("lm_polygraph", "estimators/eigenscore.py", **BASES)
    states = np.random.default_rng(0).normal(size=(10, 24))
    stats = {"sample_embeddings": [states]}
    (paper,) = code.EigenScore()(stats)
    (rescaled,) = code.EigenScore(alpha=1e-3 * 23)(stats)
    assert paper_eigenscore(states) == pytest.approx(paper, abs=EXACT)
    official = (rescaled - math.log(23)) / math.log(10)
    assert official_eigenscore(states) == pytest.approx(official, abs=EXACT)


def test_unigrams_of_selfcheckgpt():
    pytest.importorskip("nltk")
    spacy = pytest.importorskip("spacy")

    def load(name):
        """en_core_web_sm is no package of an index; its tokens are the same."""
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

"""Which drawn answers mean the same, and the clusters that follow from it.

Farquhar et al. (Nature, 2024) and their code (jlko/semantic_uncertainty, a8d9aa8,
`get_semantic_ids`): two answers mean the same where an NLI model finds that each
entails the other, the question put before both.
"""

import itertools
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    Relations,
    Requirement,
)
from beatrice.extract.records import normalise

# Which samples of each row mean the same: `[n_samples, n_samples]` bool, symmetric.
Equivalences = Callable[[DetectorInput], list[np.ndarray]]
# Clusters of one row, from its texts and their equivalences: `[n_samples]` ids from 0.
Clustering = Callable[[Sequence[str], np.ndarray], np.ndarray]

BY_WORDS = (
    "no NLI model: two answers mean the same where all words of each are in the other, "
    "without case, punctuation and articles"
)


def requirements(equivalences: Equivalences) -> frozenset[Requirement]:
    """Return what a detector of drawn answers needs beyond the answer's pass."""
    return frozenset(
        ("samples",) if equivalences is by_words else ("samples", "entailment")
    )


def by_entailment(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row entail each other, by the NLI model.

    Entailment must be the likeliest of the three relations in both directions
    (`strict_entailment`, the default of the official code). Equal texts are read too,
    as there.
    """
    relations = relations_of(inputs)
    texts = [
        [f"{example.question} {sample.text}" for sample in samples]
        for example, samples in zip(inputs.examples, inputs.samples, strict=True)
    ]
    pairs = list(
        dict.fromkeys(p for row in texts for p in itertools.permutations(row, 2))
    )
    is_entailed = (relations(pairs).argmax(axis=1) == 0).tolist() if pairs else []
    entails = dict(zip(pairs, is_entailed, strict=True))

    def matrix(row: list[str]) -> np.ndarray:
        equivalent = np.eye(len(row), dtype=bool)
        for i, j in itertools.permutations(range(len(row)), 2):
            equivalent[i, j] = entails[row[i], row[j]] and entails[row[j], row[i]]
        return equivalent

    return list(map(matrix, texts))


def relations_of(inputs: DetectorInput) -> Relations:
    """Return the NLI model of the inputs."""
    if inputs.relations is None:
        raise ValueError(
            "expected an NLI model, found none; give the path of one, or take the "
            "detectors that compare words"
        )
    return inputs.relations


def by_words(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row have the same words; see `BY_WORDS`.

    Inclusion in both directions stands for entailment in both.
    """
    words = [[words_of(sample.text) for sample in row] for row in inputs.samples]
    return [
        np.array([[a == b for b in row] for a in row], bool).reshape(len(row), len(row))
        for row in words
    ]


def words_of(text: str) -> frozenset[str]:
    """Return the normalised words of a text; without any, as of "The", the text."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return frozenset((normalise(folded) or folded).split())


def official_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return the clusters of `get_semantic_ids`.

    The first text without a cluster opens one, and every later text that means the same
    joins, out of another cluster if need be: a text that matches two first members ends
    with the last.

    Args:
      texts: of the samples, not read.
      equivalent: `[n_samples, n_samples]` bool.

    Returns:
      `[n_samples]` int64 from 0, numbered as they are opened.
    """
    return _opened_in_turn(equivalent, leaves=True)


def paper_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the paper's pseudo-code builds them.

    A text stays with the first cluster whose first member means the same, and equal
    texts mean the same whatever the NLI model finds. As `official_clusters` otherwise.
    """
    alike = np.array([[a == b for b in texts] for a in texts], bool)
    return _opened_in_turn(equivalent | alike.reshape(equivalent.shape), leaves=False)


def distinct_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the Bayesian estimator's code builds them.

    Equal texts are one; the distinct texts are clustered as by `official_clusters`, in
    sorted order (there in the order of a Python set, which changes from run to run).
    """
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        first.setdefault(text, i)
    names = sorted(first)
    places = np.array([first[name] for name in names], np.int64)
    of_names = _opened_in_turn(equivalent[np.ix_(places, places)], leaves=True)
    ids = dict(zip(names, of_names.tolist(), strict=True))
    return np.array([ids[text] for text in texts], np.int64)


def _opened_in_turn(equivalent: np.ndarray, *, leaves: bool) -> np.ndarray:
    """Open clusters in turn; `leaves` whether a text may leave one for a later one."""
    ids = np.full(len(equivalent), -1, np.int64)
    for i in range(len(ids)):
        if ids[i] < 0:
            later = np.arange(len(ids)) > i
            joins = equivalent[i] & later & (leaves | (ids < 0))
            ids[i] = ids[joins] = ids.max() + 1
    return ids


def clusters_of(
    inputs: DetectorInput, equivalences: Equivalences, clustering: Clustering
) -> list[np.ndarray]:
    """Return the clusters of every row's samples; empty where none was drawn."""
    return [
        clustering([sample.text for sample in row], matrix)
        for row, matrix in zip(inputs.samples, equivalences(inputs), strict=True)
    ]

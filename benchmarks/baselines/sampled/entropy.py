"""Semantic entropy: how evenly drawn answers spread over meanings.

Kuhn et al. (ICLR 2023) and Farquhar et al. (Nature, 2024), as in the latter's code.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from scipy.special import entr, softmax

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.sampled.clustering import (
    BY_WORDS,
    Clustering,
    Equivalences,
    by_entailment,
    by_words,
    clusters_of,
    official_clusters,
    paper_clusters,
)
from beatrice.extract.records import Sample


def mean_log_prob(sample: Sample) -> float:
    """Return the mean log-probability of an answer's tokens, in nats; NaN without any.

    The stop token is left out, except where it is the only token, as in the official
    code. Where a server told no ids, all the log-probabilities that it told are read.
    """
    known = sample.log_probs or ()
    n_ids = len(known) if sample.token_ids is None else len(sample.token_ids)
    own = known[: max(1, n_ids)]
    return math.fsum(own) / len(own) if own else math.nan


def weighted_entropy(mean_log_probs: Sequence[float], clusters: np.ndarray) -> float:
    """Return the semantic entropy by likelihood, in nats, from 0 to ln n_samples.

    `predictive_entropy_rao` on `logsumexp_by_id(..., "sum_normalized")`: a sample
    weighs as the exponential of its mean log-probability.

    Args:
      mean_log_probs: of the samples, at least one.
      clusters: `[n_samples]` ids from 0.

    Returns:
      NaN where a sample has no log-probability.
    """
    if np.isnan(mean_log_probs).any():
        return math.nan
    if clusters.max() == 0:
        return 0.0  # exactly, so that all answers of one meaning tie
    return float(entr(np.bincount(clusters, softmax(mean_log_probs))).sum())


def discrete_entropy(clusters: np.ndarray) -> float:
    """Return the semantic entropy by counts, in nats (`cluster_assignment_entropy`).

    Args:
      clusters: `[n_samples]` ids from 0, at least one sample.
    """
    # Sorted: the same counts in another order must tie, to the last bit.
    return float(entr(np.sort(np.bincount(clusters)) / len(clusters)).sum())


def _weighted(samples: Sequence[Sample], clusters: np.ndarray) -> float:
    return weighted_entropy([mean_log_prob(s) for s in samples], clusters)


def _discrete(samples: Sequence[Sample], clusters: np.ndarray) -> float:
    return discrete_entropy(clusters)


def entropy_scores(
    evidence: Evidence,
    entropy: Callable[[Sequence[Sample], np.ndarray], float],
    equivalences: Equivalences,
    clustering: Clustering,
) -> Found:
    """Return minus the entropy of every row; NaN where nothing was drawn."""
    clusters = clusters_of(evidence, equivalences, clustering)
    rows = zip(evidence.samples, clusters, strict=True)
    values = [-entropy(row, ids) if row else math.nan for row, ids in rows]
    return Found(np.array([values]))


def discrete_entropies(evidence: Evidence, equivalences: Equivalences) -> np.ndarray:
    """Return the entropy by counts of every row, `[n_rows]` nats; NaN without samples.

    Semantic entropy probes learn it.
    """
    found = entropy_scores(evidence, _discrete, equivalences, official_clusters)
    return -found.scores[0]


_SOURCE = (
    "Farquhar et al., Nature 2024; jlko/semantic_uncertainty a8d9aa8, "
    "semantic_entropy.py: "
)
_PAPER = (
    "an answer stays with the first cluster that it matches, and equal answers are one "
    "cluster whatever the NLI model finds"
)
_OWN = "log-probabilities are the model's own, before temperature, top-p and top-k"


def _detectors(
    name: str,
    title: str,
    function: str,
    entropy: Callable[[Sequence[Sample], np.ndarray], float],
    differs: str = "",
) -> tuple[Detector, ...]:
    """Return a detector as published, with the paper's clusters, and without NLI."""

    def one(
        ending: str, note: str, equivalences: Equivalences, clustering: Clustering
    ) -> Detector:
        kind = {} if equivalences is by_words else {"entailment"}
        return Detector(
            name=name + (ending and f":{ending}"),
            title=title + (ending and f" ({ending.replace('_', ' ')})"),
            source=_SOURCE + function,
            score=partial(
                entropy_scores,
                entropy=entropy,
                equivalences=equivalences,
                clustering=clustering,
            ),
            needs=frozenset({"samples", *kind}),
            variant="; ".join(filter(None, (note, differs))),
        )

    return (
        one("", "", by_entailment, official_clusters),
        one("first_match", _PAPER, by_entailment, paper_clusters),
        one("words", BY_WORDS, by_words, official_clusters),
    )


DETECTORS = (
    *_detectors(
        "semantic_entropy",
        "Semantic entropy",
        "predictive_entropy_rao",
        _weighted,
        _OWN,
    ),
    *_detectors(
        "semantic_entropy_discrete",
        "Semantic entropy, discrete",
        "cluster_assignment_entropy",
        _discrete,
    ),
)

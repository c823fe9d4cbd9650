"""Semantic entropy: how evenly sampled answers spread over meanings.

Kuhn et al. (ICLR 2023) and Farquhar et al. (Nature, 2024), following the latter's code.

Bayesian semantic entropy: the expected entropy given few answers. Ciosek, Felicioni and
Ghiassian (TMLR 2025, arXiv 2504.03579), estimator SE-Bayes, following
spotify-research/bayesian-semantic-entropy (d4f1be3, estimation_final.ipynb).
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.special import entr, softmax

from beatrice.benchmarks.baselines.detector import (
    SAMPLE,
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.clustering import (
    BY_WORDS,
    Clustering,
    Equivalences,
    by_entailment,
    by_words,
    clusters_of,
    distinct_clusters,
    official_clusters,
    paper_clusters,
    requirements,
)
from beatrice.benchmarks.baselines.plain import chosen_row
from beatrice.extract.records import Sample


def mean_log_prob(sample: Sample) -> float:
    """Return the mean log-probability of an answer's tokens, in nats; NaN without any.

    As in the official code, the stop token is left out unless it is the only token. If
    a server gave no token ids, all log-probabilities count.
    """
    log_probs = sample.log_probs or ()
    n_ids = len(log_probs) if sample.token_ids is None else len(sample.token_ids)
    log_probs = log_probs[: max(1, n_ids)]
    return math.fsum(log_probs) / len(log_probs) if log_probs else math.nan


def weighted_entropy(mean_log_probs: Sequence[float], clusters: np.ndarray) -> float:
    """Return the likelihood-weighted semantic entropy, in nats, up to ln n_samples.

    `predictive_entropy_rao` on `logsumexp_by_id(..., "sum_normalized")`: a sample's
    weight is the exponential of its mean log-probability. NaN if a sample has none.
    `clusters` are `[n_samples]` ids from 0, of at least one sample.
    """
    if np.isnan(mean_log_probs).any():
        return math.nan
    if clusters.max() == 0:
        return 0.0  # exactly, so that all answers of one meaning tie
    return float(entr(np.bincount(clusters, softmax(mean_log_probs))).sum())


def discrete_entropy(clusters: np.ndarray) -> float:
    """Return the count-based semantic entropy, in nats (`cluster_assignment_entropy`).

    `clusters` are `[n_samples]` ids from 0, of at least one sample.
    """
    # Sorted, so that equal counts in another order tie to the last bit.
    return float(entr(np.sort(np.bincount(clusters)) / len(clusters)).sum())


def entropies_of(
    inputs: DetectorInput,
    equivalences: Equivalences,
    clustering: Clustering = official_clusters,
    *,
    is_weighted: bool = False,
) -> np.ndarray:
    """Return the entropy of every row in nats, `[n_rows]`; NaN without samples."""
    entropies = np.full(len(inputs.samples), math.nan)
    clusters = clusters_of(inputs, equivalences, clustering)
    for i, (samples, ids) in enumerate(zip(inputs.samples, clusters, strict=True)):
        if samples and is_weighted:
            entropies[i] = weighted_entropy(list(map(mean_log_prob, samples)), ids)
        elif samples:
            entropies[i] = discrete_entropy(ids)
    return entropies


@dataclasses.dataclass(frozen=True, kw_only=True)
class BayesConfig:
    """How the entropy is estimated; defaults are the official notebook's."""

    n_prior_rows: int = 200  # rows over which the prior is counted
    most_meanings: int = 7  # in the prior; more count as this many
    concentration: float = 0.5  # of the Dirichlet prior, per meaning
    n_draws: int = 1000  # for importance sampling
    n_seeds: int = 5
    first_seed: int = 42


_NOTEBOOK = BayesConfig()


def prior_of(n_meanings: Sequence[int], config: BayesConfig) -> dict[int, float]:
    """Return the share of rows for each number of meanings, in ascending order."""
    if not n_meanings:
        raise ValueError(
            "no training or validation question has sampled answers, which the prior "
            "on the number of meanings needs; sample some with "
            f"`{SAMPLE.format('RUN')}`"
        )
    numbers, counts = np.unique(
        np.minimum(n_meanings, config.most_meanings), return_counts=True
    )
    return dict(zip(numbers.tolist(), (counts / len(n_meanings)).tolist(), strict=True))


def tail_of(prior: dict[int, float], n_seen: int) -> dict[int, float]:
    """Return the prior on the number of meanings, given that `n_seen` were seen.

    The prior is truncated below `n_seen` and renormalised, not multiplied by the
    likelihood of the counts. If no number exceeds `n_seen`, all mass is on `n_seen`.
    """
    if n_seen >= max(prior):
        return {n_seen: 1.0}
    left = {n: share for n, share in prior.items() if n >= n_seen}
    return {n: share / sum(left.values()) for n, share in left.items()}


def lower_bounds(samples: Sequence[Sample], clusters: np.ndarray) -> np.ndarray:
    """Return a lower bound on the probability of each meaning, `[n_clusters]`.

    The bound sums the probabilities, including the stop token, of a meaning's distinct
    texts (of each, the first sample). If all bounds add up to more than .99, they are
    rescaled to .99. NaN if a sample has no log-probabilities.
    """
    known: set[str] = set()
    bounds = np.zeros(clusters.max() + 1)
    for sample, cluster in zip(samples, clusters, strict=True):
        if not sample.log_probs:
            return np.full_like(bounds, math.nan)
        if sample.text not in known:
            known.add(sample.text)
            bounds[cluster] += math.exp(math.fsum(sample.log_probs))
    bounds = np.clip(bounds, 0, 1)
    return bounds * min(1.0, 0.99 / max(bounds.sum(), 0.99))


def expected_entropy(
    counts: np.ndarray, bounds: np.ndarray, draws: np.ndarray, concentration: float
) -> np.ndarray:
    """Return the posterior mean entropy of a number of meanings, `[n_seeds]` nats.

    The posterior is a Dirichlet truncated at the bounds; self-normalised importance
    sampling draws from the uniform distribution above them. With a thousand draws, the
    error is 0.005 if every meaning was seen (7 and 3 of ten samples), and 0.06 with two
    more unseen meanings. All rows share the draws, so errors do not differ by luck.

    Args:
      counts: `[n_meanings]` samples of each meaning, 0 for unseen ones.
      bounds: `[n_meanings]` lower bounds on probabilities, 0 for unseen ones.
      draws: `[n_seeds, n_draws, n_meanings]` from a Dirichlet with parameters 1.
      concentration: of the Dirichlet prior.
    """
    if len(counts) == 1:
        return np.zeros(len(draws))  # exactly, so that all such rows tie
    p = bounds + (1 - bounds.sum()) * draws
    log_weights = np.log(np.maximum(p, np.finfo(float).tiny)) @ (
        concentration + counts - 1
    )
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    entropies = np.where(p > 1e-6, entr(p), 0).sum(axis=2)
    return (weights * entropies).sum(axis=1) / weights.sum(axis=1)


def bayesian_entropies(
    counts: np.ndarray,
    bounds: np.ndarray,
    prior: dict[int, float],
    config: BayesConfig,
) -> np.ndarray:
    """Return the expected entropy of one row under the prior, `[n_seeds]` in nats.

    `counts` are the samples of each meaning, `[n_seen]`, and `bounds` the lower bounds
    on their probabilities; NaN makes the result NaN.
    """
    total = np.zeros(config.n_seeds)
    if np.isnan(bounds).any():
        return total + math.nan
    # Sorted, since meanings are exchangeable but all rows share the draws.
    order = np.lexsort((bounds, counts))[::-1]
    for n_meanings, share in tail_of(prior, len(counts)).items():
        n_more = n_meanings - len(counts)
        total += share * expected_entropy(
            np.pad(counts[order], (0, n_more)),
            np.pad(bounds[order], (0, n_more)),
            _draws(n_meanings, config),
            config.concentration,
        )
    return total


@cache
def _draws(n_meanings: int, config: BayesConfig) -> np.ndarray:
    """Return draws shared by all rows; they depend on no row and no order of rows."""
    shape, ones = config.n_draws, np.ones(n_meanings)
    seeds = range(config.first_seed, config.first_seed + config.n_seeds)
    return np.stack(
        [np.random.default_rng((s, n_meanings)).dirichlet(ones, shape) for s in seeds]
    )


def bayesian_scores(
    inputs: DetectorInput, equivalences: Equivalences, name: str
) -> DetectorOutput:
    """Return minus the expected entropy of every row; NaN for rows without samples.

    Labels are not read. The output row `n_prior_rows` says over how many rows the prior
    was counted, and of which split: training, or validation if training has no samples.
    """
    rows, samples, config = inputs.rows, inputs.samples, _NOTEBOOK
    clusters = clusters_of(inputs, equivalences, distinct_clusters)
    drawn = {
        split: [i for i in rows.where(split) if samples[i]][: config.n_prior_rows]
        for split in ("train", "validation")
    }
    split = "train" if drawn["train"] else "validation"
    n_meanings = [int(clusters[i].max()) + 1 for i in drawn[split]]
    prior = prior_of(n_meanings, config)
    scores = np.full((config.n_seeds, len(clusters)), math.nan)
    for i, (row, ids) in enumerate(zip(samples, clusters, strict=True)):
        if row:
            bounds = lower_bounds(row, ids)
            scores[:, i] = -bayesian_entropies(np.bincount(ids), bounds, prior, config)
    n_prior = chosen_row(rows, name, "n_prior_rows", len(n_meanings), split=split)
    return DetectorOutput(scores, (n_prior,))


_FIRST_MATCH = (
    "an answer stays with the first cluster that it matches, and equal answers are one "
    "cluster whatever the NLI model finds"
)
_RAW_NOTE = "log-probabilities are the model's own, before temperature, top-p and top-k"
# Suffixes of name and title, the difference in words, and how meanings are found.
_Kind = tuple[str, str, str, Equivalences, Clustering]
_KINDS: tuple[_Kind, ...] = (
    ("", "", "", by_entailment, official_clusters),
    (":first_match", " (first match)", _FIRST_MATCH, by_entailment, paper_clusters),
    (":words", " (words)", BY_WORDS, by_words, official_clusters),
)


def _add(
    name: str, title: str, function: str, note: str, is_weighted: bool, kind: _Kind
) -> None:
    """Add a semantic entropy to the catalogue; `function` is the official code's."""
    suffix, more, difference, equivalences, clustering = kind

    @baseline(
        f"semantic_entropy{name}{suffix}",
        title=f"Semantic entropy{title}{more}",
        source="Farquhar et al., Nature 2024; jlko/semantic_uncertainty a8d9aa8, "
        f"semantic_entropy.py: {function}",
        needs=requirements(equivalences),
        variant="; ".join(filter(None, (difference, note))),
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        entropies = entropies_of(
            inputs, equivalences, clustering, is_weighted=is_weighted
        )
        return DetectorOutput(-entropies[None])


for _kind in _KINDS:
    _add("", "", "predictive_entropy_rao", _RAW_NOTE, True, _kind)
for _kind in _KINDS:
    _add("_discrete", ", discrete", "cluster_assignment_entropy", "", False, _kind)


def _add_bayesian(
    suffix: str, more: str, variant: str, equivalences: Equivalences
) -> None:
    """Add a Bayesian semantic entropy to the catalogue."""
    name = f"semantic_entropy_bayesian{suffix}"

    @baseline(
        name,
        title=f"Semantic entropy, Bayesian{more}",
        source="Ciosek et al., TMLR 2025, SE-Bayes; spotify-research/"
        "bayesian-semantic-entropy d4f1be3, estimation_final.ipynb",
        needs=requirements(equivalences),
        variant=variant,
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        return bayesian_scores(inputs, equivalences, name)


_PRIOR = (
    "the prior on the number of meanings is counted on as many samples as the run has, "
    "not 100"
)
_add_bayesian("", "", _PRIOR, by_entailment)
_add_bayesian(":words", " (words)", f"{BY_WORDS}; {_PRIOR}", by_words)

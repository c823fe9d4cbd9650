"""Reciprocal rank fusion: several rankings of the same passages made one."""

from collections.abc import Sequence

import numpy as np

from pgir.retrieval.bm25 import Retriever

# Cormack, Clarke and Büttcher (SIGIR 2009): what keeps the first ranks from deciding
# alone. Their value; none was tuned.
RANK_CONSTANT = 60
LEAST_DEPTH = 100  # of each ranking that is fused


class FusedRetriever:
    """Ranks passages by the sum over retrievers of `1 / (60 + rank)`, rank from 1.

    A passage that a retriever does not have among its first hundred, or among twice as
    many as are asked for, gets nothing from it.

    Args:
      retrievers: over the same passages.
    """

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        """Take the retrievers."""
        if len(retrievers) < 2:
            raise ValueError(f"fusion needs two retrievers, found {len(retrievers)}")
        self._retrievers = tuple(retrievers)

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` indices, best first."""
        deeper = max(LEAST_DEPTH, 2 * depth)
        rankings = [one.search(queries, deeper) for one in self._retrievers]
        return fuse_all(rankings, depth)


def fuse_all(rankings: Sequence[np.ndarray], depth: int) -> np.ndarray:
    """Return the fused rankings of some queries, `[n_queries, depth]` or fewer columns.

    Args:
      rankings: of each retriever, `[n_queries, n]` indices, best first.
      depth: most passages of a query.
    """
    width = min(depth, *(ranking.shape[1] for ranking in rankings))
    rows = [fuse(own)[:width] for own in zip(*rankings, strict=True)]
    return np.array(rows, np.int64).reshape(len(rows), width)


def fuse(rankings: Sequence[np.ndarray]) -> np.ndarray:
    """Return the passages of some rankings in the order of their fused scores.

    Args:
      rankings: of one query, `[n]` indices each, best first.

    Returns:
      `[n_distinct]` indices; of equal scores the lower index first.
    """
    places, inverse = np.unique(np.concatenate(rankings), return_inverse=True)
    gains = [1 / (RANK_CONSTANT + 1 + np.arange(len(one))) for one in rankings]
    scores = np.bincount(inverse, np.concatenate(gains))
    return places[np.argsort(-scores, kind="stable")]

"""Finding passages: BM25 over the words of title and text."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from extract.records import Passage

if TYPE_CHECKING:  # the help of every verb is shown without NumPy
    import numpy as np


class Retriever(Protocol):
    """Ranks the passages of one corpus."""

    def search(self, queries: Sequence[str], depth: int) -> "np.ndarray":
        """Return `[n_queries, depth]` passage indices, best first."""


class Bm25Retriever:
    """BM25 (Lucene's variant) by `bm25s`; no stop words, no stemming.

    Args:
      passages: the corpus; a passage's index is its place here.

    Raises:
      ValueError: the corpus is empty.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Index the corpus."""
        if not passages:
            raise ValueError("retrieval needs at least one passage, found none")
        import bm25s  # runs a JAX function when imported, which fixes JAX's options

        # It asks its logger for everything when imported, and says it to our users.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._n = len(passages)
        self._index = bm25s.BM25(method="lucene")
        texts = [f"{passage.title} {passage.text}" for passage in passages]
        self._index.index(_words(texts), show_progress=False)

    def search(self, queries: Sequence[str], depth: int) -> "np.ndarray":
        """Return `[n_queries, min(depth, n_passages)]` indices, best first."""
        import numpy as np

        found, _ = self._index.retrieve(
            _words(queries),
            k=min(depth, self._n),
            show_progress=False,
            n_threads=0,
        )
        return np.asarray(found)


def _words(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    return bm25s.tokenize(
        list(texts), stopwords=None, return_ids=False, show_progress=False
    )

"""Dense retrieval: the passages whose vectors lie nearest to the question's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pgir.retrieval.corpus import Corpus
from pgir.retrieval.encoder import TextEncoder
from pgir.retrieval.index import (
    Form,
    Vectors,
    check_made_of,
    exact_best,
    index_folder,
    open_index,
)


class DenseRetriever:
    """Ranks the passages of a corpus by inner product with the encoded question."""

    def __init__(
        self, corpus: Corpus, encoder: TextEncoder, form: Form = "flat"
    ) -> None:
        """Open the index that was built for this corpus and encoder.

        Raises:
          ValueError: it is not there, damaged, of another encoder or another corpus.
        """
        folder = index_folder(corpus, encoder.config.path.name)
        self._vectors = Vectors(folder)
        check_made_of(self._vectors.facts, corpus, encoder, folder)
        self._index, self._config = open_index(self._vectors, form)
        self._encoder, self._form = encoder, form

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` places, best first."""
        return self.search_vectors(self._encoder.encode(queries, "query"), depth)

    def search_vectors(self, queries: np.ndarray, depth: int) -> np.ndarray:
        """Return the same for encoded questions, `[n_queries, d_model]` float32.

        A lossy index gives candidates, whose exact scores decide.
        """
        n_passages = self._vectors.shape[0]
        depth = min(depth, n_passages)
        if self._form == "flat":
            return self._index.search(queries, depth)[1]
        n = min(n_passages, max(depth, self._config.n_rescored))
        found = self._index.search(queries, n)[1]
        best = np.empty((len(queries), depth), np.int64)
        # The lists a query looked into may hold fewer than were asked for.
        short = np.flatnonzero((found < 0).any(axis=1))
        for i in short:
            own = found[i][found[i] >= 0]
            if len(own) < depth:
                own = self._look_everywhere(queries[i : i + 1], n)
            best[i] = exact_best(self._vectors, queries[i : i + 1], own[None], depth)[0]
        whole = np.setdiff1d(np.arange(len(queries)), short)
        best[whole] = exact_best(self._vectors, queries[whole], found[whole], depth)
        return best

    def _look_everywhere(self, query: np.ndarray, n: int) -> np.ndarray:
        """Return the candidates of one query from all inverted lists."""
        faiss_parameters: Any = self._index
        n_probed = faiss_parameters.nprobe
        faiss_parameters.nprobe = faiss_parameters.nlist
        try:
            return faiss_parameters.search(query, n)[1][0]
        finally:
            faiss_parameters.nprobe = n_probed

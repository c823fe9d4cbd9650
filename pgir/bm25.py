"""BM25 (Lucene's variant) by `bm25s`: the words of passages, indexed and searched."""

import array
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from beatrice.extract.records import Passage, spaced, word_pattern

# What `_words` takes for a word: part of a ranking's identity.
WORDS = "bm25, characters of scripts without blanks"
_PASSAGES_SPLIT = 1024  # whose words are in memory as texts


class Bm25Retriever:
    """BM25 (Lucene's variant) by `bm25s`; see `_words` for what is a word."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Index the corpus."""
        import bm25s  # runs a JAX function when imported, which fixes JAX's options

        # It sets its logger to the lowest level when imported.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._n = len(passages)
        # SciPy sorts by counting; the other way packs and sorts all words as int64.
        self._index = bm25s.BM25(method="lucene", csc_backend="scipy")
        ids, numbers = _word_ids(passages)
        if not numbers:
            raise ValueError("BM25 needs at least one passage with a word, found none")
        self._index.index(
            bm25s.tokenization.Tokenized(ids, numbers), show_progress=False
        )

    def search(self, queries: Sequence[str], depth: int) -> list[np.ndarray]:
        """Return at most `depth` indices of each query, best first.

        Fewer where fewer passages share a word with it: every word that they share
        adds to the score, which is 0 without.
        """
        rankings, scores = self._index.retrieve(
            _words(queries), k=min(depth, self._n), show_progress=False, n_threads=0
        )
        pairs = zip(np.asarray(rankings), np.asarray(scores), strict=True)
        return [ranking[gains > 0] for ranking, gains in pairs]


def _word_ids(passages: Sequence[Passage]) -> tuple[list[Any], dict[str, int]]:
    """Return the words of passages as numbers, and the number of each word.

    A passage's are an array of 4 bytes a word: as lists, of all passages at once, they
    would take more memory than the index.
    """
    ids: list[Any] = []
    numbers: dict[str, int] = {}
    for start in range(0, len(passages), _PASSAGES_SPLIT):
        some = passages[start : start + _PASSAGES_SPLIT]
        for words in _words([f"{passage.title} {passage.text}" for passage in some]):
            of_passage = [numbers.setdefault(word, len(numbers)) for word in words]
            ids.append(array.array("I", of_passage))
    return ids, numbers


def _words(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of texts, lower-cased; no stemming.

    A word is a letter or digit and those that follow with their marks (vowel signs,
    points, accents), in NFC; see `spaced` for scripts without blanks. It may be one
    character, but neither the article "a" nor what an apostrophe leaves, "s" and "t";
    there are no other stop words.
    """
    import bm25s

    words = bm25s.tokenize(
        [spaced(text) for text in texts],
        token_pattern=word_pattern(),
        stopwords=["a", "s", "t"],
        return_ids=False,
        show_progress=False,
    )
    assert isinstance(words, list)  # of `return_ids=False`
    return words

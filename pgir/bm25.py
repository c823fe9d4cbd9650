"""BM25 (Lucene's variant) by `bm25s`: the words of passages, indexed and searched.

The index of a corpus lies in its folder, since making it takes long for Wikipedia, and
loading it no time; see docs/measurements.md.
"""

import array
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.extract.records import Passage, spaced, word_pattern
from beatrice.extract.run.files import replaced_folder, sha256_json, verify_checksums
from beatrice.jaxprobe.config import set_library_compiler
from beatrice.pgir.corpus import Corpus

# What `_words` takes for a word: part of a ranking's identity.
WORDS = "bm25, characters of scripts without blanks"
_IDENTITY = "identity"  # a file: what an index was made of
_PASSAGES_SPLIT = 1024  # whose words are in memory as texts


class Bm25Retriever:
    """BM25 (Lucene's variant) by `bm25s`; see `_words` for what is a word."""

    def __init__(self, passages: Sequence[Passage], index: Any = None) -> None:
        """Index passages, or take the index that was made of them."""
        self._n = len(passages)
        self.index = _index(passages) if index is None else index

    def search(self, queries: Sequence[str], depth: int) -> list[np.ndarray]:
        """Return at most `depth` indices of each query, best first.

        Fewer where fewer passages share a word with it: every word that they share
        adds to the score, which is 0 without.
        """
        rankings, scores = self.index.retrieve(
            _words(queries), k=min(depth, self._n), show_progress=False, n_threads=0
        )
        pairs = zip(np.asarray(rankings), np.asarray(scores), strict=True)
        return [ranking[gains > 0] for ranking, gains in pairs]


def open_bm25(corpus: Corpus, note: Callable[[str], None]) -> Bm25Retriever:
    """Return the retriever of a corpus, by the index in its folder.

    One is written where there is none of these passages, words and library; where it
    cannot be, the index is in memory alone, and a note says why.
    """
    folder, bm25s = corpus.folder / "bm25", _library()
    identity = sha256_json([WORDS, corpus.identity, bm25s.__version__])
    if (index := _load(folder, identity, note)) is not None:
        return Bm25Retriever(corpus, index)
    retriever = Bm25Retriever(corpus)
    try:
        with replaced_folder(folder) as work:
            retriever.index.save(work, show_progress=False)
            (work / _IDENTITY).write_text(identity)
    except OSError as error:
        note(f"the index of words is in memory alone: {error}")
    return retriever


def _load(folder: Path, identity: str, note: Callable[[str], None]) -> Any:
    """Return the index in a folder, its arrays mapped; None where it is no such one."""
    if not folder.exists():
        return None
    try:
        verify_checksums(folder)
    except ValueError as error:
        note(f"the index of words is made again: {error}")
        return None
    if (folder / _IDENTITY).read_text() != identity:
        return None
    return _library().BM25.load(folder, mmap=True, show_progress=False)


def _library() -> Any:
    # It runs a JAX function when imported, which fixes JAX's options: unless a verb has
    # set them, they are to leave room on a GPU.
    is_set = "XLA_PYTHON_CLIENT_PREALLOCATE" in os.environ
    if "bm25s" not in sys.modules and not is_set:
        with contextlib.suppress(ImportError, RuntimeError):  # no JAX that works
            set_library_compiler()
    import bm25s

    # It sets its logger to the lowest level when imported.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _index(passages: Sequence[Passage]) -> Any:
    bm25s = _library()
    # SciPy sorts by counting; the other way packs and sorts all words as int64.
    index = bm25s.BM25(method="lucene", csc_backend="scipy")
    ids, numbers = _word_ids(passages)
    if not numbers:
        raise ValueError("BM25 needs at least one passage with a word, found none")
    index.index(bm25s.tokenization.Tokenized(ids, numbers), show_progress=False)
    return index


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
    words = _library().tokenize(
        [spaced(text) for text in texts],
        token_pattern=word_pattern(),
        stopwords=["a", "s", "t"],
        return_ids=False,
        show_progress=False,
    )
    assert isinstance(words, list)  # of `return_ids=False`
    return words

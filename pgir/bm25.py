"""BM25 (Lucene's variant) by `bm25s`: indexes the words of passages and searches them.

The index of a corpus is kept in its folder: for Wikipedia it takes long to build, but
loads at once (see docs/measurements.md).
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
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.files import (
    replaced_folder,
    sha256_json,
    sha256_once,
    verify_checksums,
)
from beatrice.jaxprobe.config import set_library_compiler
from beatrice.pgir.corpus import Corpus

# Identifies what `_words` takes for a word, as part of a ranking's identity.
WORDS = "bm25, characters of scripts without blanks"
_IDENTITY = "identity"  # the file that says what an index was made of
_PASSAGES_SPLIT = 1024  # passages whose words are in memory as texts at once


class Bm25Retriever:
    """BM25 (Lucene's variant) by `bm25s`; `_words` says what a word is."""

    def __init__(self, passages: Sequence[Passage], index: Any = None) -> None:
        """Index passages, or use the index that was made of them."""
        self._n = len(passages)
        self.index = _index(passages) if index is None else index

    def search(self, queries: Sequence[str], depth: int) -> list[np.ndarray]:
        """Return at most `depth` indices per query, best first.

        Of equal scores, the earlier passage's is first, as in JAX's `top_k`. Passages
        that share no word with the query score 0 and are left out.
        """
        rankings, scores = self.index.retrieve(
            _words(queries), k=min(depth, self._n), show_progress=False, n_threads=0
        )
        pairs = zip(np.asarray(rankings), np.asarray(scores), strict=True)
        return [ranking[gains > 0] for ranking, gains in pairs]


def open_bm25(corpus: Corpus, note: Callable[[str], None]) -> Bm25Retriever:
    """Return the BM25 retriever of a corpus, using the index in its folder.

    The index is built unless there is one of these passages, words and library version.
    If it cannot be written, it stays in memory, and a note says why.
    """
    folder, bm25s = corpus.folder / "bm25", _library()
    identity = sha256_json([WORDS, corpus.identity, bm25s.__version__])
    if (index := _load(folder, identity, note)) is not None:
        return Bm25Retriever(corpus, index)
    with Progress().stage("index words") as update:
        retriever = Bm25Retriever(corpus, _index(corpus, update))
    try:
        with replaced_folder(folder) as work:
            retriever.index.save(work, show_progress=False)
            (work / _IDENTITY).write_text(identity)
    except OSError as error:
        note(f"the index of words is kept only in memory: {error}")
    return retriever


def _load(folder: Path, identity: str, note: Callable[[str], None]) -> Any:
    """Return the index in a folder, memory-mapped; None if it is not the right one."""
    if not folder.exists():
        return None
    try:
        verify_checksums(folder, sha256_once)
    except ValueError as error:
        note(f"the index of words is built again: {error}")
        return None
    if (folder / _IDENTITY).read_text() != identity:
        return None
    return _library().BM25.load(folder, mmap=True, show_progress=False)


def _library() -> Any:
    # Importing bm25s runs a JAX function, which fixes JAX's options. Unless a verb has
    # set them, choose some that leave room on a GPU.
    is_set = "XLA_PYTHON_CLIENT_PREALLOCATE" in os.environ
    if "bm25s" not in sys.modules and not is_set:
        with contextlib.suppress(ImportError, RuntimeError):  # no JAX that works
            set_library_compiler()
    import bm25s

    # Importing it sets its logger to the lowest level.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _index(passages: Sequence[Passage], update: Update | None = None) -> Any:
    bm25s = _library()
    # SciPy sorts by counting; the other backend packs and sorts all words as int64.
    index = bm25s.BM25(method="lucene", csc_backend="scipy")
    ids, numbers = _word_ids(passages, update)
    if not numbers:
        raise ValueError("BM25 needs at least one passage with a word, found none")
    index.index(bm25s.tokenization.Tokenized(ids, numbers), show_progress=False)
    return index


def _word_ids(
    passages: Sequence[Passage], update: Update | None
) -> tuple[list[Any], dict[str, int]]:
    """Return the words of passages as numbers, and the number of each word.

    The numbers of a passage are an array with 4 bytes for each; lists for all passages
    would take more memory than the index.
    """
    ids: list[Any] = []
    numbers: dict[str, int] = {}
    for start in range(0, len(passages), _PASSAGES_SPLIT):
        some = passages[start : start + _PASSAGES_SPLIT]
        for words in _words([f"{passage.title} {passage.text}" for passage in some]):
            of_passage = [numbers.setdefault(word, len(numbers)) for word in words]
            ids.append(array.array("I", of_passage))
        if update is not None:
            update(3 * len(ids), 4 * len(passages))  # the rest is for weighing words
    return ids, numbers


def _words(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of texts in lower case, without stemming.

    A word is a run of letters and digits with their marks (vowel signs, points,
    accents), in NFC; see `spaced` for scripts without blanks. It may be one character.
    The only stop words are the article "a" and what apostrophes leave, "s" and "t".
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

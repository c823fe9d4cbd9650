"""The BM25 index that a corpus keeps in its folder."""

import os
import time

import numpy as np
import pytest

from beatrice.extract.records import Passage
from beatrice.extract.run.files import SETTLED
from beatrice.pgir.bm25 import Bm25Retriever, open_bm25
from beatrice.pgir.corpus import Corpus
from tests.pgir.small import make_corpus
from tests.process import little_room, run_python
from tests.records import flip_bit

QUERIES = ["w37 n37", "title 3", "nothing of it", ""]


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "corpus", 40)


def test_of_passages_with_equal_scores_the_first_are_found_in_order():
    passages = [Passage(title="", text=f"bridge {i % 7}") for i in range(300)]
    (ranking,) = Bm25Retriever(passages).search(["bridge"], 40)
    assert ranking.tolist() == [*range(40)]


def search(corpus, notes):
    return [*map(list, open_bm25(corpus, notes.append).search(QUERIES, 5))]


def test_the_index_in_the_folder_finds_what_one_in_memory_does(corpus, capsys):
    notes, folder = [], corpus.folder / "bm25"
    expected = [*map(list, Bm25Retriever(corpus).search(QUERIES, 5))]
    assert search(corpus, notes) == expected and not any(expected[2:])
    before, arrays = files_of(folder), open_bm25(corpus, notes.append).index.scores
    assert isinstance(arrays["data"], np.memmap)  # loaded, not built again
    assert search(corpus, notes) == expected
    assert files_of(folder) == before and notes == []
    assert capsys.readouterr().err.count("index words: done in") == 1


def test_an_index_that_is_damaged_or_of_another_corpus_is_built_again(corpus, tmp_path):
    notes, folder = [], corpus.folder / "bm25"
    expected, before = search(corpus, notes), files_of(folder)
    flip_bit(folder / "data.csc.index.npy")
    assert search(corpus, notes) == expected and files_of(folder) == before
    assert "is built again" in notes[0] and "SHA-256" in notes[0]
    other = make_corpus(tmp_path / "other", 20)
    os.rename(folder, other.folder / "bm25")
    again = search(other, notes)
    assert again == [*map(list, Bm25Retriever(other).search(QUERIES, 5))] != expected
    assert len(notes) == 1


@pytest.mark.slow
def test_the_checksums_of_an_old_corpus_are_remembered(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "corpus", 80_000)
    search(corpus, [])
    time.sleep(SETTLED + 1)  # a file that has just changed could change again
    monkeypatch.setenv("BEATRICE_REMEMBERED", str(tmp_path / "remembered"))
    search(Corpus(corpus.folder), [])
    files = [*corpus.folder.glob("*.*"), *(corpus.folder / "bm25").iterdir()]
    n_large = sum(path.stat().st_size >= 1 << 20 for path in files)
    assert n_large == len([*(tmp_path / "remembered").iterdir()]) > 1


def test_an_index_that_cannot_be_written_is_kept_in_memory_with_a_note(tmp_path):
    corpus, notes = make_corpus(tmp_path, 400), []
    with little_room():
        ranking = search(corpus, notes)
    assert ranking == [*map(list, Bm25Retriever(corpus).search(QUERIES, 5))]
    assert "kept only in memory" in notes[0] and not (corpus.folder / "bm25").exists()


def test_bm25_works_next_to_a_jax_that_does_not_fit_its_jaxlib(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib is version 0.4')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from beatrice.extract.records import Passage\n"
        "from beatrice.pgir.bm25 import Bm25Retriever\n"
        "print(Bm25Retriever([Passage(title='', text='word')]).search(['word'], 1))"
    )
    assert run_python(program).stdout.startswith("[array([0]")

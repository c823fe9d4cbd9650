"""A corpus holds the passages of published files, each once; gold ones are known."""

import json

import pytest

from beatrice.extract.records import Passage
from beatrice.pgir.arguments import from_document
from beatrice.pgir.corpus import (
    MOST_WORDS,
    Corpus,
    as_document,
    build_corpus,
)
from tests.extract.small_run import beatrice
from tests.pgir.small import make_corpus, write_passages

PSGS = 'id\ttext\ttitle\n1\t"He said ""no"" twice."\tAaron\n2\t"Second block."\tAaron\n'
TITLES = [
    {"title": "Aaron", "text": 'He said "no" twice', "idx": 0},
    {"title": "Zoe", "text": "Zoe is new."},
]
QUESTIONS = [
    {
        "id": "q1",
        "question": "Who is new?",
        "golden_answers": ["Zoe"],
        "context": [
            {"title": "Zoe", "text": "ZOE  is new.", "is_supporting": True},
            {"title": "Yan", "text": "Yan is old.", "is_supporting": False},
        ],
    }
]


def build(tmp_path, **files):
    notes = []
    for name, content in files.items():
        path = tmp_path / name.replace("__", ".")
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
    sources = [tmp_path / name.replace("__", ".") for name in files]
    return build_corpus(tmp_path / "corpus", sources, notes.append), notes


def test_published_corpora_are_read_and_each_passage_is_there_once(tmp_path):
    corpus, notes = build(tmp_path, psgs__tsv=PSGS, two__json=TITLES)
    assert [p.title for p in corpus] == ["Aaron", "Aaron", "Zoe"]
    assert corpus[0].text == 'He said "no" twice.'  # the first wording stays
    assert notes[1] == "two.json: 2 passages, 1 of them new"


def test_contexts_of_questions_are_passages_and_their_gold_ones_are_known(tmp_path):
    lines = "\n".join(map(json.dumps, QUESTIONS))
    corpus, _ = build(tmp_path, two__json=TITLES, asked__jsonl=lines)
    assert [p.title for p in corpus] == ["Aaron", "Zoe", "Yan"]
    (gold,) = corpus.golds()
    assert (gold.question, gold.passages) == ("Who is new?", (1,))


def test_wiki18_documents_give_their_title_and_back(tmp_path):
    corpus = make_corpus(tmp_path, 3)
    assert corpus[2].title == "Title 2" and corpus[2].text.endswith("n2")
    for passage in (*corpus, Passage(title="", text="No title.")):
        assert from_document(as_document(passage)) == passage


def test_a_page_is_no_passage(tmp_path):
    page = {"title": "Page", "text": "word " * (MOST_WORDS + 1)}
    corpus, _ = build(tmp_path, two__json=[*TITLES, page])
    assert len(corpus) == 2
    assert corpus.facts["sources"][0]["n_long"] == 1


def test_of_a_file_without_passages_nothing_is_left(tmp_path):
    bare = {key: QUESTIONS[0][key] for key in ("id", "question", "golden_answers")}
    with pytest.raises(ValueError, match="none of the files holds a passage"):
        build(tmp_path, bare__jsonl=json.dumps(bare))
    assert not (tmp_path / "corpus").exists()


def test_the_same_line_again_opens_the_corpus_and_other_files_are_refused(tmp_path):
    corpus = make_corpus(tmp_path, 5)
    source = tmp_path / "wiki.jsonl"
    again = build_corpus(corpus.folder, [source], lambda text: None)
    assert again.identity == corpus.identity
    write_passages(source, range(6))
    with pytest.raises(ValueError, match="a corpus of other files"):
        build_corpus(corpus.folder, [source], lambda text: None)


@pytest.mark.parametrize("name", ["passages.jsonl", "lines.npy", "gold.jsonl"])
def test_a_damaged_corpus_is_refused_by_name(tmp_path, name):
    corpus = make_corpus(tmp_path, 5)
    with (corpus.folder / name).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        Corpus(corpus.folder)


def test_a_corpus_is_searched_from_the_command_line(tmp_path):
    corpus = make_corpus(tmp_path, 40)
    done = beatrice("corpus", corpus.folder, "--search", "w7 v7 n7", "-k", 1)
    assert "1. Title 7:" in done.stdout
    failed = beatrice("corpus", tmp_path, "--search", "x", code=1)
    assert "no finished corpus" in failed.stderr

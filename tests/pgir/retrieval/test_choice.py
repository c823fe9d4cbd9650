"""A run says where its controllers search; without a word nothing changes."""

import json

import pytest

from beatrice.extract.records import Passage, write_lines
from beatrice.extract.run.directory import RunDir
from beatrice.pgir.retrieval.commands import (
    retrieval_config,
    retrieval_of,
    settle_options,
)
from beatrice.pgir.retrieval.retrievers import (
    Bm25Retriever,
    RetrievalConfig,
    served_cache,
)
from tests.extract.small_run import beatrice, smoke
from tests.pgir.retrieval.small_corpus import make_corpus


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", smoke()) as found:
        passages = [Passage(title="Own", text=f"own w{i}") for i in range(4)]
        found.passages.write_text(write_lines(passages))
    return found


def test_a_run_without_a_choice_searches_its_own_passages_by_words(run):
    assert retrieval_config(run) == RetrievalConfig()
    found = retrieval_of(run)
    assert isinstance(found.retriever, Bm25Retriever)
    assert {passage.title for passage in found.passages} == {"Own"}


def test_a_run_searches_the_corpus_that_it_was_given(run, tmp_path):
    corpus = make_corpus(tmp_path, 20)
    before = retrieval_of(run).identity
    settle_options(run.path, {"corpus": corpus.folder, "url": None})
    found = retrieval_of(run)
    (row,) = found.retriever.search(["w7 n7"], 1)
    assert found.passages[row[0]].title == "Title 7"
    assert found.identity != before
    settle_options(run.path, {"corpus": None, "url": None})  # not asked: stays
    assert retrieval_of(run).identity == found.identity


def test_a_choice_that_lacks_something_is_refused_in_a_sentence(run, tmp_path):
    with pytest.raises(ValueError, match="needs a corpus and the encoder"):
        settle_options(run.path, {"retriever": "fused"})
    with pytest.raises(ValueError, match="goes with the served retriever"):
        RetrievalConfig(retriever="served")
    assert retrieval_config(run) == RetrievalConfig()


def test_what_a_server_said_lies_in_nobodys_way(run):
    url = "http://127.0.0.1:9/retrieve"
    earlier = run.path / "retrieved" / "served.jsonl"
    earlier.parent.mkdir()
    kept = {"query": "q", "depth": 1, "places": [0], "new": ["a passage"]}
    earlier.write_text(json.dumps(kept) + "\n")
    settle_options(run.path, {"url": url})
    found = retrieval_of(run)
    assert found.retriever.search(["q"], 1) == [(0,)]
    assert not any(earlier.parent.iterdir())  # a run of its own may lie there
    assert served_cache(run.path / "searches", url).exists()


def test_two_servers_are_not_taken_for_each_other(run):
    one, other = (f"http://127.0.0.1:{port}/retrieve" for port in (8, 9))
    caches = {served_cache(run.path, url) for url in (one, other)}
    settle_options(run.path, {"url": one})
    before = retrieval_of(run).identity
    settle_options(run.path, {"url": other})
    assert len(caches) == 2 and retrieval_of(run).identity != before


def test_control_takes_the_choice_and_a_wrong_server_is_refused(run):
    done = beatrice("control", run.path, "--url", "http://there/", code=1)
    assert "Error:" in done.stderr and "Traceback" not in done.stderr

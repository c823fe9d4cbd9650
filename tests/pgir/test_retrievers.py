"""Corpora that hold each passage once, retrievers over HTTP, and broken servers."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.records import Passage, write_lines
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import InUse, RunDir
from beatrice.extract.run.stages import run_stage
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.commands import (
    ControlOptions,
    CorpusOptions,
    RetrievalOptions,
    control,
)
from beatrice.pgir.controllers.stage import _open_session, retrieval_of
from beatrice.pgir.controllers.waves import AnswerService, CallJournal
from beatrice.pgir.corpus import (
    MOST_WORDS,
    Corpus,
    Gold,
    agreement,
    build_corpus,
    exclusive_folder,
    gold_recall,
    has_answer,
    measure,
)
from beatrice.pgir.retrievers import (
    FusedRetriever,
    RetrievalConfig,
    RetrievalFailed,
    ServedRetriever,
    fuse,
)
from beatrice.pgir.stages import (
    CONTROL,
    ControlConfig,
    record_retrieval,
    retrieval_config,
)
from tests.extract.small_run import beatrice, make_run
from tests.pgir.small import (
    CORPUS,
    Ranked,
    corpus_server,
    make_corpus,
    save_encoder,
    serving,
    write_passages,
)
from tests.process import run_python
from tests.records import an_example

QUERIES = ["word3", "word7 shared", "word1"]


def client(url, cache, **options):
    options = {"pause": 0.01, "n_attempts": 2, **options}
    return ServedRetriever(url, cache, **options)


@pytest.mark.parametrize("path", ["/retrieve", "/batch_search"])
def test_both_protocols_give_the_retrievers_rankings_and_cache_them(tmp_path, path):
    expected = Bm25Retriever(CORPUS).search(QUERIES, 3)
    with serving(corpus_server()) as url:
        served = client(url + path, tmp_path / "cache.jsonl")
        result = served.search(QUERIES, 3)
    pairs = (served.passages, result), (CORPUS, expected)
    ours, theirs = ([[p[i] for i in row] for row in rows] for p, rows in pairs)
    assert ours == theirs and ours[0][0] == CORPUS[3]
    again = client(url + path, tmp_path / "cache.jsonl")  # the server has stopped
    assert again.search(QUERIES, 3) == result
    assert again.passages == served.passages


class Moody(ThreadingHTTPServer):
    """A server that misbehaves as `moods` says for each question."""

    def __init__(self, moods):
        self.moods, self.queries, self.keys = moods, [], []
        super().__init__(("127.0.0.1", 0), _Moods)


class _Moods(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.queries.append(request["queries"])
        server.keys.append(self.headers["Authorization"])
        moods = [server.moods[x] for x in request["queries"] if x in server.moods]
        mood = moods[0] if moods else "well"
        if mood == "dead":
            self.connection.close()
            return
        if mood == "slow":
            time.sleep(0.5)
        replies = {"half a pair": ["\ud800"], "nothing": []}
        replies["empty"] = [{"contents": " "}, {"contents": '"A"\ntext'}]
        replies["twice"] = [{"contents": x} for x in ("a", "b", "a")]
        documents = replies.get(mood, [{"contents": f'"{x}"\ntext'} for x in "AB"])
        content = json.dumps({"result": [documents] * len(request["queries"])})
        babble = {"babble": "<html>busy</html>", "nested": "[" * 100_000}
        babble["long"] = " " * (64 << 20) + content if mood == "long" else ""
        babble["broken"] = f"no index,\n{self.headers['Authorization']}"
        content = babble.get(mood, content)
        with contextlib.suppress(OSError):  # the client has gone
            if mood == "later":
                server.moods.clear()
                self.send_response(429)
                self.send_header("Retry-After", "0.5")
                self.end_headers()
                return
            if mood == "trickling head":
                self._trickle(b"HTTP/1.0 200 OK\r\nX-Waiting: a while, and longer\r\n")
            self.send_response({"broken": 500, "elsewhere": 302}.get(mood, 200))
            if mood == "elsewhere":
                self.send_header("Location", "/inner")  # a GET there would be a 501
            self.end_headers()
            if mood == "trickling":
                self._trickle(content.encode())
            self.wfile.write(content.encode())

    def _trickle(self, content):
        """Send the bytes slowly, but each sooner than the time-out."""
        for byte in content:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *words):
        pass


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("dead", "the connection broke"),
        ("slow", "no reply came in 0.2 seconds"),
        ("trickling", "no reply came in 0.2 seconds"),
        ("trickling head", "no reply came in 0.2 seconds"),
        ("babble", "its reply is no ranking"),
        ("nested", "its reply is no ranking"),
        ("half a pair", "its reply is no ranking"),
        ("broken", "status 500: no index, None"),
        # Not followed: no other host gets the key.
        ("elsewhere", "status 302: it redirects to /inner: give"),
    ],
)
def test_only_the_questions_that_a_server_fails_on_are_failed_and_retried(
    tmp_path, mood, reason
):
    cache, queries = tmp_path / "cache.jsonl", ["a", "b", "poison", "c"]
    server = Moody({"poison": mood})
    with serving(server) as url:
        asking = client(f"{url}/retrieve", cache, timeout=0.2)
        began = time.monotonic()
        with pytest.raises(RetrievalFailed, match="1 of 4 questions") as failed:
            asking.search(queries, 2)
        assert time.monotonic() - began < 3  # two attempts in the batch, two on its own
        assert list(failed.value.reasons) == [2]
        assert reason in failed.value.reasons[2]
        assert sorted(failed.value.rankings) == [0, 1, 3]
        server.moods.clear()  # it recovers
        server.queries.clear()
        again = client(f"{url}/retrieve", cache, timeout=5)
        assert np.shape(again.search(queries, 2)) == (4, 2)
        assert server.queries == [["poison"]]


def test_a_reply_that_is_too_long_is_called_so():
    with serving(Moody({"q": "long"})) as url:
        with pytest.raises(RetrievalFailed, match="its reply is longer than 64 MiB"):
            client(f"{url}/retrieve", None, n_attempts=1).search(["q"], 2)


def test_a_request_is_repeated_when_the_server_asks_for_it(tmp_path):
    server = Moody({"q": "later"})
    with serving(server) as url:
        asking, began = client(f"{url}/retrieve", None, pause=0.0), time.monotonic()
        assert asking.search(["q"], 2) == [(0, 1)]
    assert time.monotonic() - began >= 0.5 and len(server.queries) == 2


def test_a_server_that_works_may_find_nothing_for_a_question(tmp_path):
    cache = tmp_path / "cache.jsonl"
    with serving(corpus_server()) as url:
        asking = client(f"{url}/retrieve", cache)
        assert asking.search(["word3", "zzzz"], 2) == [(0,), ()]
        assert asking.search(["yyyy"], 2) == [()]
        assert client(f"{url}/retrieve", cache).search(["xxxx"], 2) == [()]  # resumed
    assert client(f"{url}/retrieve", cache).search(["zzzz"], 2) == [()]


@pytest.mark.parametrize(
    ("mood", "before", "reason"),
    [
        ("broken", [], "status 500"),
        ("broken", ["fine"], "status 500"),  # it stops working
        ("babble", [], "its reply is no ranking"),
        ("nothing", [], "expected documents for a question, found none"),
    ],
)
def test_a_server_that_always_fails_is_soon_asked_no_more(
    tmp_path, mood, before, reason
):
    queries = [f"q{i}" for i in range(100)]
    server = Moody(dict.fromkeys(queries, mood))
    with serving(server) as url:
        asking = client(f"{url}/retrieve", tmp_path / "cache.jsonl")
        assert asking.search(before, 2) == [(0, 1)] * len(before)
        words = f"100 of {100 + len(before)} questions"
        with pytest.raises(RetrievalFailed, match=words) as failed:
            asking.search([*before, *queries], 2)
        assert all(reason in text for text in failed.value.reasons.values())
        assert "4 requests in a row" in (last := [*failed.value.reasons.values()][-1])
        assert "no more are sent" in last
        n_sent = len(before) + 2 * (1 + 3)  # a batch, then 3 single questions, twice
        assert len(server.queries) == n_sent
        server.moods.clear()  # it recovers
        assert asking.search(queries, 2)[99] == (0, 1)


@pytest.mark.parametrize("bad", [range(1, 9), range(36)])
def test_failed_questions_in_a_row_do_not_stop_the_others_getting_passages(
    tmp_path, bad
):
    queries = [f"q{i}" for i in range(40)]  # those failed in an earlier run come first
    server = Moody({queries[i]: "broken" for i in bad})
    with serving(server) as url:
        asking = client(f"{url}/retrieve", tmp_path / "cache.jsonl", n_attempts=1)
        words = f"{len(bad)} of 40 questions"
        with pytest.raises(RetrievalFailed, match=words) as failed:
            asking.search(queries, 2)
    assert sorted(failed.value.reasons) == [*bad]


@pytest.mark.parametrize("line", ['{"query": 3}', "no line"])
def test_a_damaged_cache_is_refused_by_line_and_a_cut_last_line_dropped(tmp_path, line):
    cache = tmp_path / "cache.jsonl"
    whole = '{"query": "q", "depth": 1, "places": [0], "new": ["text"]}\n'
    cache.write_text(whole + whole[:30])
    cut = client("http://there/retrieve", cache)
    assert cut.search(["q"], 1) == [(0,)]
    assert cache.read_text() == whole
    cache.write_text(f"{line}\n{whole}")
    with pytest.raises(ValueError, match=r"cache.jsonl, line 1"):
        client("http://there/retrieve", cache)


@pytest.mark.parametrize(
    ("mood", "ranking", "n_empty"), [("empty", (1,), 1), ("twice", (0, 1), 0)]
)
def test_empty_documents_are_not_ranked_and_repeated_ones_ranked_once(
    tmp_path, mood, ranking, n_empty
):
    cache, server = tmp_path / "cache.jsonl", Moody({"poison": mood})
    with serving(server) as url:
        for _ in range(2):  # from the server, and from the cache
            asking = client(f"{url}/retrieve", cache)
            assert asking.search(["poison"], 3) == [ranking]
            assert asking.n_empty == n_empty
    assert server.queries == [["poison"]]


def test_a_server_that_cannot_be_reached_fails_all_questions_at_once(tmp_path):
    with serving(corpus_server()) as url:
        pass
    asking = client(f"{url}/retrieve", tmp_path / "cache.jsonl", n_attempts=2)
    began = time.monotonic()
    with pytest.raises(RetrievalFailed, match="cannot be reached") as failed:
        asking.search([f"q{i}" for i in range(200)], 2)
    assert len(failed.value.reasons) == 200 and not failed.value.rankings
    assert time.monotonic() - began < 5  # the attempts of one request, not of 200


def test_the_fused_score_is_the_sum_of_reciprocal_ranks():
    # 4: 1/61 + 1/63; 7: 1/62 + 1/61; 9: 1/63; 2: 1/62
    assert fuse([np.array([4, 7, 9]), np.array([7, 2, 4])]).tolist() == [7, 4, 2, 9]


@pytest.mark.parametrize(
    ("last", "others", "is_first"), [(13, (5, 8), True), (20, (5, 14), False)]
)
def test_the_constant_of_the_fusion_is_the_published_sixty(last, others, is_first):
    """With 61 the first case would be decided differently, with 59 the second."""
    rankings = np.arange(2, 42).reshape(2, 20)
    rankings[0, 0] = rankings[1, last - 1] = 0
    rankings[0, others[0] - 1] = rankings[1, others[1] - 1] = 1
    order = fuse(list(rankings)).tolist()
    assert (order.index(0) < order.index(1)) == is_first


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_fusion_does_not_depend_on_the_order_of_the_retrievers(first, second):
    a, b = np.array(first), np.array(second)
    assert fuse([a, b]).tolist() == fuse([b, a]).tolist()


def test_if_one_retriever_finds_nothing_the_other_decides_the_ranking():
    fused = FusedRetriever([Bm25Retriever(CORPUS), Ranked(*range(12))])
    rows = fused.search(["zzzz", "word5"], 3)
    assert [row.tolist() for row in rows] == [[0, 1, 2], [5, 0, 1]]
    assert FusedRetriever([Ranked(0), Ranked(1)]).search([], 2) == []


def test_an_answer_is_found_as_whole_words_ignoring_case_and_articles():
    texts = {"Rome": "A parish.", "": "Paris"}
    passages = [Passage(title=title, text=text) for title, text in texts.items()]
    ranking = np.array([0, 1])
    assert has_answer(ranking, passages, ["the paris"], (1, 2)) == {1: 0.0, 2: 1.0}
    assert has_answer(ranking, passages, ["The"], (2,)) == {2: 0.0}
    passages = [Passage(title="中国", text="首都是北京。")]
    assert has_answer(ranking[:1], passages, ["北京"], (1,)) == {1: 1.0}


RANKINGS = """
import tracemalloc
import bm25s, numpy as np
from beatrice.extract.records import Passage
from beatrice.pgir.bm25 import Bm25Retriever
drawn = np.random.default_rng(0).zipf(1.3, (2000, 100)) % 5000
words = [[f"w{i}" for i in row] for row in drawn]
passages = [Passage(title="", text=" ".join(row)) for row in words]
def of_lists():
    texts, options = [passage.text for passage in passages], {"show_progress": False}
    lists = bm25s.tokenize(texts, stopwords=[], return_ids=False, **options)
    index = bm25s.BM25(method="lucene")
    index.index(lists, **options)
    return index
Bm25Retriever(passages[:2])  # what is loaded once
peaks, indexes = [], []
for opened in (of_lists, lambda: Bm25Retriever(passages)):
    tracemalloc.start()
    indexes.append(opened())
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
assert peaks[1] < peaks[0] / 2, peaks
queries = [row[:5] for row in words[:50]]
expected, _ = indexes[0].retrieve(queries, k=9, show_progress=False)
result = indexes[1].search([" ".join(row) for row in queries], 9)
np.testing.assert_array_equal(result, expected)
"""


def test_bm25_ranks_like_an_index_of_word_lists_in_less_than_half_the_memory():
    run_python(RANKINGS)  # other tests' threads would count in this process


def test_recall_and_answers_are_averaged_per_question_set():
    golds = [
        Gold(dataset=name, id=str(i), question="q", golds=("x",), passages=(passage,))
        for i, (name, passage) in enumerate([("a", 0), ("a", 25), ("b", 4)])
    ]
    passages = [Passage(title="", text=str(i)) for i in range(30)]
    result, counts = measure(np.tile(np.arange(30), (3, 1)), passages, golds)
    assert counts == {"a": 2, "b": 1}
    assert result["a", "recall"] == {3: 0.5, 5: 0.5, 20: 0.5}
    assert result["b", "recall"] == {3: 0.0, 5: 1.0, 20: 1.0}
    assert result["a", "answer"] == {3: 0.0, 5: 0.0, 20: 0.0}


def test_recall_and_agreement_are_shares_within_the_first_ranks():
    ranking = np.array([5, 1, 8, 2, 9, 3])
    assert gold_recall(ranking, [1, 3], (1, 2, 6)) == {1: 0.0, 2: 0.5, 6: 1.0}
    exact = np.tile(np.arange(20), (3, 1))
    assert set(agreement(exact, exact).values()) == {1.0}
    half = np.where(np.arange(20) % 2, exact, 99)
    assert agreement(half, exact)[20] == 0.5


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run")
    passages = [Passage(title="Own", text=f"own w{i}") for i in range(4)]
    run.passages.write_text(write_lines(passages))
    return run


def test_a_run_searches_its_own_passages_with_bm25_until_given_a_corpus(run, tmp_path):
    before, corpus = retrieval_of(run), make_corpus(tmp_path, 20)
    assert isinstance(before.retriever, Bm25Retriever)
    assert {passage.title for passage in before.passages} == {"Own"}
    RetrievalOptions(corpus=corpus.folder).write(run.path)
    retrieval = retrieval_of(run)
    (row,) = retrieval.retriever.search(["w7 n7"], 1)
    assert retrieval.passages[row[0]].title == "Title 7"
    assert retrieval.identity != before.identity
    RetrievalOptions().write(run.path)  # not given: unchanged
    assert retrieval_config(run, "transfer_retrieval") == retrieval_config(run)
    assert retrieval_of(run).identity == retrieval.identity


def test_transfer_and_control_choose_their_corpora_separately(run, tmp_path):
    corpus = make_corpus(tmp_path, 20).folder
    RetrievalOptions(corpus=corpus).write(run.path, "transfer_retrieval")
    assert retrieval_config(run) == RetrievalConfig()
    assert retrieval_config(run, "transfer_retrieval").corpus == str(corpus)


def test_questions_without_passages_take_part_only_if_a_corpus_is_searched(
    run, tmp_path, probed
):
    passages = (Passage(title="Own", text="own w1"),)
    examples = [
        an_example(id=f"{name} {split}", dataset=name, split=split, passages=rows)
        for name, rows in (("bare", ()), ("with", passages))
        for split in ("train", "test")
    ]

    def sets():
        retrieval = retrieval_of(run)
        answering = AnswerService(probed, retrieval.passages, CallJournal(None, ""))
        opened = _open_session(examples, run, answering, retrieval, ControlConfig())
        return [x.dataset for x in opened.sets], [x.dataset for x in opened.training]

    assert sets() == (["with"], ["with"])
    RetrievalOptions(corpus=make_corpus(tmp_path, 20).folder).write(run.path)
    assert sets() == (["bare", "with"], ["bare", "with"])
    with serving(corpus_server()) as url:
        RetrievalOptions(url=f"{url}/retrieve").write(run.path)
        assert sets() == (["bare", "with"], ["bare", "with"])


def test_a_link_is_recorded_by_its_own_name_not_that_of_its_target(run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(make_corpus(tmp_path, 20).folder)
    RetrievalOptions(corpus=link).write(run.path)
    assert retrieval_config(run).corpus == str(link)
    (tmp_path / "e5-base-v2").symlink_to(tmp_path)
    here = os.path.relpath(tmp_path / "e5-base-v2")
    changed = ControlOptions(encoder=here).change(ControlConfig())
    assert changed.encoder == str(tmp_path / "e5-base-v2")
    (option,) = (x for x in control.params if x.name == "encoder")
    assert option.type_cast_value(click.Context(control), here) == here


def test_a_users_retriever_is_constructed_once_per_run(run, working_folder):
    (working_folder / "counted.py").write_text(
        "class Notes:\n    identity, n_made = 'notes', 0\n"
        "    def __init__(self):\n        Notes.n_made += 1\n"
        "    def search(self, queries, depth):\n        return [['a'] for _ in queries]"
    )
    RetrievalOptions(retriever="counted:Notes").write(run.path)
    with RunDir.open(run.path) as opened:
        CONTROL.outside(opened)
        assert retrieval_of(opened).retriever.search(["who?"], 1) == [(0,)]
    assert sys.modules.pop("counted").Notes.n_made == 1


URLS = "http://127.0.0.1:9/find", "ftp://x/retrieve", "x"  # none belongs to a protocol


def test_a_wrong_choice_of_retriever_is_not_recorded_in_the_run(run, tmp_path):
    (tmp_path / "empty").mkdir()
    empty, before = tmp_path / "empty", run.manifest.read_bytes()
    dense = {"corpus": make_corpus(tmp_path, 20).folder, "retriever": "dense"}
    with pytest.raises(ValueError, match="the served retriever needs a URL"):
        RetrievalConfig(retriever="served")
    for options, error, named in (
        ({"retriever": "fused"}, ValueError, "needs a corpus and the encoder"),
        ({"corpus": empty}, ValueError, "no finished corpus"),
        (dense | {"retriever_encoder": empty}, ValueError, "is no encoder"),
        *(({"url": url}, click.UsageError, "that ends in /retrieve") for url in URLS),
        ({"url": "http://me:secret@x/retrieve"}, click.UsageError, "without a name"),
    ):
        with pytest.raises(error, match=named):
            RetrievalOptions(**options).write(run.path)
        assert run.manifest.read_bytes() == before


OF_RUN, OF_CORPUS = RetrievalOptions, CorpusOptions


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (OF_RUN, {"url": "http://x/retrieve", "corpus": "c"}, "--url searches a"),
        (OF_RUN, {"url": "http://x/retrieve", "retriever": "dense"}, "--url searches"),
        (OF_RUN, {"corpus": "c", "retriever_encoder": "e"}, "--retriever dense or"),
        (OF_RUN, {"corpus": "c", "index": "sq8"}, "--retriever dense or fused"),
        (OF_RUN, {"max_tokens": 48}, "--retriever dense or fused"),
        (OF_CORPUS, {"search": ("q",), "serve": True}, "give only one of --source"),
        (OF_CORPUS, {"recall": True, "source": ("s",)}, "give only one of --source"),
        (OF_CORPUS, {"source": ("s",), "index": ("sq8",)}, "give --encoder too"),
        (OF_CORPUS, {"source": ("s",), "max_tokens": 48}, "give --encoder too"),
        (OF_CORPUS, {"search": ("q",), "encoder": "e"}, "bm25 uses no encoder"),
        (OF_CORPUS, {"serve": True, "encoder": "e"}, "bm25 uses no encoder"),
        (OF_CORPUS, {"search": ("q", "")}, "--search: expected a question, found ''"),
        (OF_CORPUS, {"search": (" \t",)}, "--search: expected a question, found"),
        (OF_CORPUS, {"search": ("?!",)}, "--search: expected a question, found '.!'"),
    ],
)
def test_an_option_that_would_have_no_effect_is_wrong_usage(kind, options, named):
    with pytest.raises(click.UsageError, match=named):
        kind(**options)


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b:8000/retrieve",
        f"http://{'a' * 70}/retrieve",
        "http://localhost:99999/retrieve",
        "http://[::1/retrieve",
        "http:///retrieve",
        "http://localhost/d\u00e9j\u00e0/retrieve",
        "http://localhost/my notes/retrieve",
    ],
)
def test_a_url_that_no_request_can_be_sent_to_is_refused_at_once(url):
    with pytest.raises(ValueError, match="no request can be sent there"):
        ServedRetriever(url, None)


def test_the_key_goes_with_every_request_and_is_kept_out_of_refusals(monkeypatch):
    monkeypatch.setenv("BEATRICE_RETRIEVAL_KEY", "sk-planned\n")
    server = Moody({"poison": "broken"})
    with serving(server) as url:
        asking = client(f"{url}/retrieve", None)
        asking.search(["x"], 1)
        assert server.keys == ["Bearer sk-planned"]
        with pytest.raises(RetrievalFailed) as failed:
            asking.search(["poison"], 1)
    assert "status 500: no index, Bearer …" in failed.value.reasons[0]


def test_a_key_is_sent_to_the_url_of_a_run_only_if_the_user_gives_it_too(
    run, monkeypatch
):
    monkeypatch.setenv("BEATRICE_RETRIEVAL_KEY", "sk-planned")
    server = Moody({})
    with serving(server) as url:
        chosen = RetrievalConfig(retriever="served", url=f"{url}/retrieve")
        record_retrieval(run, chosen, "retrieval")  # as somebody else did
        with pytest.raises(ValueError, match=f"run searches at {url}.*; give --url"):
            retrieval_of(run)
        RetrievalOptions(url=chosen.url).write(run.path)
        retrieval_of(run).retriever.search(["x"], 1)
    assert server.keys == ["Bearer sk-planned"]


def test_a_key_in_a_url_or_with_a_line_end_is_refused_and_not_repeated(
    run, monkeypatch
):
    before = run.manifest.read_bytes()
    with pytest.raises(click.UsageError, match="BEATRICE_RETRIEVAL_KEY") as refused:
        RetrievalOptions(url="http://there/retrieve?key=sk-planned").write(run.path)
    assert "sk-planned" not in str(refused.value)
    with pytest.raises(ValueError, match="without a name or password") as refused:
        ServedRetriever("me:sk-planned@there/retrieve", None)
    assert "sk-planned" not in str(refused.value)
    assert run.manifest.read_bytes() == before
    monkeypatch.setenv("BEATRICE_RETRIEVAL_KEY", "sk-one\nsk-two")
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        ServedRetriever("http://there/retrieve", None)
    assert "sk-" not in str(refused.value)


def test_replies_of_two_servers_are_cached_in_two_files(run):
    urls = [f"http://127.0.0.1:{port}/retrieve" for port in (8, 9)]
    identities = []
    for url in urls:
        RetrievalOptions(url=url).write(run.path)
        identities.append(retrieval_of(run).identity)
    reply = {"query": "q", "depth": 1, "places": [0], "new": ["a passage"]}
    (run.path / "searches").mkdir(exist_ok=True)
    path = run.path / "searches" / f"{identities[1][:16]}.jsonl"
    path.write_text(json.dumps(reply) + "\n")
    assert retrieval_of(run).retriever.search(["q"], 1) == [(0,)]
    RetrievalOptions(url=urls[0]).write(run.path)
    assert retrieval_of(run).passages == [] and len(set(identities)) == 2


VERSIONED = """
from pathlib import Path
class Notes:
    def __init__(self):
        self.identity = Path("notes.txt").read_text()
    def search(self, queries, depth):
        return [["a passage"] for _ in queries]
"""


def test_control_runs_again_if_its_passages_change_under_the_same_name(
    run, working_folder
):
    (working_folder / "versioned.py").write_text(VERSIONED)
    (working_folder / "notes.txt").write_text("of May")
    corpus, done = make_corpus(working_folder, 5).folder, []
    stage = dataclasses.replace(
        CONTROL,
        inputs=lambda _: [],
        outputs=lambda _: [],
        work=lambda *x: done.append(x),
    )

    def n_done(**options):
        """Return how often the stage has run after the same choice is made twice."""
        for _ in range(2):
            RetrievalOptions(**options).write(run.path)
            run_stage(stage, run, Progress())
        return len(done)

    assert n_done() == 1
    run.mark_stage("control", {}, 1.0)  # a record that does not name its retrieval
    assert n_done() == 2
    assert n_done(retriever="versioned:Notes") == 3
    (working_folder / "notes.txt").write_text("of June")
    assert n_done(retriever="versioned:Notes") == 4
    assert n_done(corpus=corpus) == 5
    shutil.rmtree(corpus)
    make_corpus(working_folder, 6)
    assert n_done(corpus=corpus) == 6


def test_another_encoder_in_the_same_folder_changes_controls_identity(tmp_path):
    config = ControlConfig(encoder=str(tmp_path / "tiny"))
    identities = []
    for seed in (0, 0, 1):
        shutil.rmtree(config.encoder, ignore_errors=True)
        save_encoder(tmp_path / "tiny", seed)
        identities.append(CONTROL.identity(config))
    assert identities[0] == identities[1] != identities[2]


PSGS = 'id\ttext\ttitle\n1\t"He said ""no"" twice."\tAaron\n2\t"Second block."\tAaron\n'
TITLES = [
    {"title": "Aaron", "text": 'He said "no" twice', "idx": 0},
    {"title": "Zoe", "text": "Zoe is new."},
]
BARE = {"id": "q1", "question": "Who is new?", "golden_answers": ["Zoe"]}
CONTEXT = [
    {"title": "Zoe", "text": "ZOE  is new.", "is_supporting": True},
    {"title": "Yan", "text": "Yan is old.", "is_supporting": False},
]


def build(tmp_path, **files):
    notes, sources = [], []
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        sources.append(tmp_path / name.replace("__", "."))
        tmp_path.mkdir(exist_ok=True)
        sources[-1].write_text(text, encoding="utf-8")
    return build_corpus(tmp_path / "corpus", sources, notes.append), notes


def test_published_corpora_are_read_and_each_passage_is_kept_once(tmp_path, capsys):
    corpus, notes = build(tmp_path, psgs__tsv=PSGS, two__json=TITLES)
    assert capsys.readouterr().err == "corpus: done in 0 s\n"
    assert [p.title for p in corpus] == ["Aaron", "Aaron", "Zoe"]
    assert corpus[0].text == 'He said "no" twice.'  # the first wording is kept
    assert notes[1] == "two.json: 2 passages, 1 of them new"
    leaders = [f"Zoe {run}12" for run in ("." * 10**6, "-" * 10**6)]  # took hours
    rows = [{"title": "Zoe", "text": text} for text in (*leaders, *leaders)]
    corpus, _ = build(tmp_path / "leaders", rows__json=rows)
    assert [p.text for p in corpus] == leaders


BY_CHAIN = {"page_content": "Paged.", "metadata": {"title": "P", "source": "x"}}


def test_passages_are_read_without_titles_and_in_the_format_of_langchain(tmp_path):
    texts = "".join(json.dumps({"id": i, "text": f"Text {i}."}) + "\n" for i in "ab")
    paged = json.dumps(BY_CHAIN) + "\n"
    other = json.dumps({"body": "x"}) + "\n"
    files = {"texts__jsonl": texts, "paged__jsonl": paged, "other__jsonl": other}
    corpus, notes = build(tmp_path, **files, table__csv="id,text\n1,Tabled.\n")
    passages = [(p.title, p.text) for p in corpus]
    untitled = ("", "Text a."), ("", "Text b.")
    assert passages == [*untitled, ("P", "Paged."), ("", "Tabled.")]
    expected = "neither questions nor passages (records with 'text', 'contents' or "
    assert expected in notes[2]


SAME = {
    'He said "no" twice.': "he said “no”  twice",
    "The 1939-1945 war (born 1970).": "The 1939 – 1945 war ( born 1970 ) .",
    "caf\u00e9 -- open": "cafe\u0301 — open",
}
OTHER = {
    "राम का घर": "राम की घर",
    "บาน": "บ้าน",
    "C++ is a language": "C# is a language",
    "-5 degrees": "5 degrees",
    "3.5": "3,5",
    "a != b": "a = b",
    "$5": "€5",
}


def test_passages_that_differ_only_in_typography_are_merged_and_no_others(tmp_path):
    pairs = SAME | OTHER
    rows = [{"title": "T", "text": text} for pair in pairs.items() for text in pair]
    corpus, _ = build(tmp_path, two__json=rows)
    texts = [*SAME, *(text for pair in OTHER.items() for text in pair)]
    assert [p.text for p in corpus] == texts


def test_contexts_of_questions_become_passages_and_gold_ones_are_known(tmp_path):
    question = {**BARE, "context": CONTEXT}
    corpus, _ = build(tmp_path, two__json=TITLES, asked__jsonl=question)
    assert [p.title for p in corpus] == ["Aaron", "Zoe", "Yan"]
    (gold,) = corpus.golds()
    assert (gold.question, gold.passages) == ("Who is new?", (1,))


def test_overlong_and_empty_passages_are_left_out_and_counted(tmp_path):
    pages = [{"title": "Page", "text": x * (MOST_WORDS + 1)} for x in ("word ", "首")]
    empty = {"title": "Page", "text": " "}
    corpus, notes = build(tmp_path, two__json=[*TITLES, *pages, empty, empty])
    assert len(corpus) == 2
    counts = corpus.facts["sources"][0]
    assert (counts["n_long"], counts["n_empty"]) == (2, 2)
    assert "2 left out for more than 1000 words, 2 left out without a word" in notes[0]


def test_unusable_question_records_are_counted_if_others_can_be_used(tmp_path):
    with pytest.raises(ValueError, match="none of the files has a passage"):
        build(tmp_path, bare__jsonl=BARE)
    assert not (tmp_path / "corpus").exists()
    rows = [{**BARE, "context": CONTEXT}, {**BARE, "question": 7}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    _, notes = build(tmp_path, asked__jsonl=lines)
    assert notes[0].startswith("asked.jsonl: unusable records left out: 1; ")
    assert "record 2 (line 2): " in notes[0]


def test_a_corpus_that_another_process_is_building_is_refused(tmp_path):
    folder = tmp_path / "corpus"
    with exclusive_folder(folder), pytest.raises(InUse, match="is in use by process"):
        build(tmp_path, psgs__tsv=PSGS)
    assert not folder.exists()


def test_the_same_files_open_an_existing_corpus_and_others_are_refused(tmp_path):
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
    folder = tmp_path / "new"
    source = write_passages(tmp_path / "wiki.jsonl", range(40))
    for _ in range(2):  # the same command again opens the corpus
        built = beatrice("corpus", folder, "--source", source)
        assert "40 passages" in built.stdout
    built = json.loads(beatrice("corpus", folder, "--json").stdout)
    assert built == {"folder": str(folder), "n_passages": 40, "n_questions": 0}
    done = beatrice("corpus", folder, "--search", "w7 v7 n7", "-k", 1)
    assert "1. Title 7:" in done.stdout
    done = beatrice("corpus", folder, "--search", "zzzz")
    assert done.stdout == "zzzz\n  no passage shares a word\n"
    (none := tmp_path / "my corpus").mkdir()
    failed = beatrice("corpus", none, "--search", "x", code=1)
    _, line, _ = failed.stderr.split("`")
    assert shlex.split(line)[:3] == ["beatrice", "corpus", str(none)]

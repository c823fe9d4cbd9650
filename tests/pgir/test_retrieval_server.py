"""The retrieval server: shapes of replies, wrong requests, shutting down."""

import contextlib
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from beatrice.extract.records import Passage
from beatrice.pgir.arguments import from_document
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.corpus import as_served
from beatrice.pgir.retrieval_server import RetrievalServer
from beatrice.pgir.retrievers import read_reply
from tests.pgir.small import CORPUS, Ranked, corpus_server, make_corpus, serving
from tests.process import ROOT


def post(url, value):
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(url, content)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def refusal(url, value):
    """Return the status of a refused request, and the error in its reply."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url, value)
    with refused.value as reply:
        return reply.code, json.load(reply)["error"]


def test_a_port_that_is_in_use_is_an_error_that_names_it():
    with corpus_server() as server:
        taken = server.server_port
        with pytest.raises(ValueError, match=f"listen on 127.0.0.1:{taken}: .* in use"):
            RetrievalServer(Bm25Retriever(CORPUS), CORPUS, port=taken)


def test_replies_have_the_shapes_of_the_two_protocols():
    with serving(corpus_server()) as url:
        two = {"queries": ["word3 shared"], "topk": 2}
        scored = post(f"{url}/retrieve", two | {"return_scores": True})
        bare = post(f"{url}/retrieve", two)
        query = {"query": "word3 shared", "top_n": 2, "return_score": False}
        single = post(f"{url}/search", query)
        queries = {"query": ["word3 shared"], "top_n": 2, "return_score": True}
        many = post(f"{url}/batch_search", queries)
        default = post(f"{url}/retrieve/", {"queries": ["word3 shared"]})
        nothing = {"queries": ["zzzz"], "return_scores": True}
        assert post(f"{url}/retrieve", nothing) == {"result": [[]]}
    document = {"id": "3", "contents": '"T3"\nword3 shared text'}
    assert scored["result"][0][0] == {"document": document, "score": 1.0}
    assert bare["result"][0][0] == single[0] == many[0][0][0] == document
    assert many[1] == [[1.0, 0.5]]
    assert len(default["result"][0]) == 3
    assert read_reply(scored, 1, 2) == read_reply(bare, 1, 2)
    assert read_reply(scored, 1, 60) == read_reply(scored, 1, 2)  # there are no more


def test_a_passage_comes_back_unchanged_whatever_its_title_and_line_ends():
    texts = ("one line", "a\nb", '"a"\nb\n', "\nb", "a\r\nb")
    passages = [Passage(title=t, text=x) for t in ("", "T", '"T"', " ") for x in texts]
    request = {"query": ["q"], "top_n": len(passages)}
    with RetrievalServer(Ranked(*range(99)), passages, port=0) as server:
        replies = [server.answer("/batch_search", request)]
    fields = [{"title": p.title or None, "text": p.text} for p in passages]
    for reply in (*replies, [fields]):  # ours, and one with separate fields
        (documents,) = read_reply(reply, 1, len(passages))
        assert [from_document(document) for document in documents] == passages
    assert from_document(as_served(Passage(title="a\nb", text="c"))).title == "a b"


@pytest.mark.parametrize(
    ("path", "value", "status"),
    [
        ("/retrieve", b"no json", 400),
        ("/retrieve", b"[" * 100_000, 400),
        ("/retrieve", {"queries": "x"}, 400),
        ("/retrieve", {"queries": ["x"], "topk": 0}, 400),
        ("/retrieve", {"queries": [7]}, 400),
        ("/retrieve", {"queries": ["x"] * 101, "topk": 1000}, 400),
        ("/retrieve", b" " * (17 << 20), 413),
        ("/elsewhere", {"queries": ["x"]}, 404),
    ],
)
def test_a_wrong_request_is_refused_and_the_server_goes_on(path, value, status):
    with serving(corpus_server()) as url:
        assert refusal(url + path, value)[0] == status
        assert post(f"{url}/retrieve", {"queries": ["word3"]})["result"]


@pytest.mark.parametrize("queries", [[], [" "], ["", "word3", "\n"]])
def test_an_empty_question_gets_an_empty_ranking_among_others(queries):
    with corpus_server(depth=1) as server:
        rankings = server.answer("/retrieve", {"queries": queries})["result"]
        (match,) = server.answer("/search", {"query": "word3"})
        assert server.answer("/search", {"query": " "}) == []
    assert rankings == [[match] if query == "word3" else [] for query in queries]


def test_a_connection_on_which_the_client_falls_silent_is_closed():
    with corpus_server(timeout=0.2) as server, serving(server):
        with socket.create_connection(server.server_address, timeout=10) as silent:
            silent.sendall(b"POST /retr")
            assert silent.recv(1) == b""


def test_a_client_that_disconnects_causes_no_traceback(capsys):
    reset = struct.pack("ii", 1, 0)  # close() then sends a reset
    body = json.dumps({"queries": ["word3"] * 200, "topk": 10}).encode()
    with corpus_server() as server:
        with serving(server):
            with socket.create_connection(server.server_address, timeout=10) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                head = f"POST /retrieve HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
                gone.sendall(head.encode() + body)
            url = f"http://127.0.0.1:{server.server_port}"
            assert post(f"{url}/retrieve", {"queries": ["word3"]})["result"]
    assert capsys.readouterr().err == ""


class Broken:
    def search(self, queries, depth):
        raise KeyError("word3")


class Gone(list):
    def __getitem__(self, index):
        raise OSError("passages.txt: no such file")


@pytest.mark.parametrize(
    ("retriever", "passages", "reason", "place"),
    [
        (Broken(), CORPUS, "KeyError: 'word3'", 'raise KeyError("word3")'),
        (Ranked(0), Gone(CORPUS), "OSError: passages.txt: no", "in __getitem__"),
    ],
)
def test_a_failed_search_is_reported_to_the_client_and_traced_on_stderr(
    capsys, retriever, passages, reason, place
):
    with RetrievalServer(retriever, passages, port=0) as server:
        with serving(server) as url:
            status, error = refusal(f"{url}/retrieve", {"queries": ["word3"]})
    assert status == 500 and error.startswith(f"the search failed: {reason}")
    assert place in capsys.readouterr().err


def test_a_closing_server_finishes_the_running_search_and_refuses_others():
    class Slow(Bm25Retriever):
        begun = threading.Event()

        def search(self, queries, depth):
            self.begun.set()
            time.sleep(0.3)
            return super().search(queries, depth)

    slow, asked = Slow(CORPUS), {"queries": ["word3"]}
    with ThreadPoolExecutor(2) as pool:
        with RetrievalServer(slow, CORPUS, port=0) as server, serving(server) as url:
            idle = socket.create_connection(server.server_address)  # not waited for
            first = pool.submit(post, f"{url}/retrieve", asked)
            slow.begun.wait()
            second = pool.submit(post, f"{url}/retrieve", asked)
            time.sleep(0.1)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        idle.close()
        assert first.result()["result"][0][0]["id"] == "3"
        with pytest.raises(urllib.error.HTTPError) as refused:
            second.result()
    with refused.value as reply:
        assert reply.code == 503 and "shutting down" in json.load(reply)["error"]


def test_a_terminated_service_exits_cleanly(tmp_path):
    folder = make_corpus(tmp_path, 20).folder
    words = [sys.executable, "-m", "beatrice", "corpus", folder, "--serve"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*words, "--set", "port=0"], cwd=ROOT, **pipes) as served:
        url = re.search(r"http://\S+", served.stdout.readline()).group()
        assert post(url, {"queries": ["w7 n7"]})["result"][0][0]["id"] == "7"
        served.terminate()
        printed = served.communicate(timeout=10)
        assert re.fullmatch(r"index words: done in \d+ s\n", "".join(printed))
    assert served.returncode == 0


def test_connections_are_accepted_with_tcp_nodelay():
    with corpus_server() as server, serving(server):
        connection = http.client.HTTPConnection(*server.server_address, timeout=10)
        connection.request("GET", "/health")
        connection.getresponse().read()
        (accepted,) = server._connections
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()


def replies_to(server, text):
    """Send a text, and return everything received until the connection closes."""
    address = server.server_address[:2]  # an IPv6 address has four parts
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(text.encode())
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("Content-Length: 30", "GET /elsewhere HTTP/1.1\r\n\r\n..."),
        ("Transfer-Encoding: chunked", "GET /elsewhere HTTP/1.1\r\n\r\n"),
    ],
)
def test_the_unneeded_body_of_a_request_is_not_taken_for_another_request(header, body):
    with corpus_server() as server, serving(server):
        text = replies_to(server, f"GET /health HTTP/1.1\r\n{header}\r\n\r\n{body}")
        assert text.count("HTTP/1.1 ") == 1 and "Connection: close" in text
        bare = "GET /health HTTP/1.1\r\n\r\n"
        assert replies_to(server, bare * 2).count("HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    ("head", "begin", "error"),
    [
        ("POST /retrieve HTTP/1.1", "HTTP/1.1 400 ", "expected a Content-Length of"),
        (f"POST /retrieve HTTP/1.1\r\nContent-Length: {'9' * 5000}", "HTTP/1.1 413 ",
         "expected a Content-Length of"),
        ("PUT /retrieve HTTP/1.1", "HTTP/1.1 501 ", "use POST /retrieve"),
        ("this is none", "{", "use POST /retrieve"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused_in_json_and_the_connection_closed(
    capsys, head, begin, error
):
    with corpus_server() as server, serving(server):
        text = replies_to(server, f"{head}\r\n\r\n")
    assert text.startswith(begin)
    assert error in json.loads(text.rpartition("\r\n\r\n")[2])["error"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "head",
    [
        "POST /retrieve HTTP/1.1\r\nTransfer-Encoding: chunked",
        "OPTIONS /retrieve HTTP/1.1\r\nContent-Length: 16777216",
        "GET /health HTTP/1.1\r\nTransfer-Encoding: chunked",
    ],
)
def test_a_client_can_send_an_unwanted_body_and_read_the_reply(head):
    with corpus_server() as server, serving(server):
        text = replies_to(server, f"{head}\r\n\r\n{'x' * (16 << 20)}")
    assert text.startswith("HTTP/1.1 ") and "Connection: close" in text


def is_here(host):
    """Return whether this machine has an address: not all have every one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as free:
        free.bind((host, 0))
        return True
    return False


@pytest.mark.parametrize("host", [*filter(is_here, ("127.0.0.1", "127.0.0.2", "::1"))])
def test_a_page_that_gives_this_machine_its_sites_name_is_refused_others_are_served(
    host,
):
    body = json.dumps({"queries": ["word3"]})
    head = f"POST /retrieve HTTP/1.1\r\nContent-Length: {len(body)}\r\n"

    def status(asked, origin="Origin: http://evil.example\r\n"):
        text = f"{head}Host: {asked}\r\n{origin}\r\n{body}"
        return replies_to(server, text).split()[1]

    with corpus_server(host=host) as server, serving(server):
        assert status("evil.example:8000") == status("127.0.0.1.evil.example") == "400"
        assert status("wiki.example", origin="") == "200"  # a program, by a proxy
        for asked in ("127.0.0.1:8000", "[::1]:8000", "localhost", "app.localhost:80"):
            assert status(asked) == "200"


def test_a_head_request_is_answered_without_a_body():
    with corpus_server() as server, serving(server):
        text = replies_to(server, "HEAD /health HTTP/1.1\r\n\r\n")
        assert text.startswith("HTTP/1.1 200 ") and text.endswith("\r\n\r\n")
        assert "Content-Length: 3" in text

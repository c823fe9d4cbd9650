"""Retrievers: BM25, rankings fused, a server, a person's own; and a server of ours.

A retriever behind HTTP speaks one of two protocols, told apart by the path of its URL.
Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}` answers `{"result":
[[{"document": {"contents"}, "score"}, …], …]}`, or bare documents. FlashRAG's
(ReSearch and others): `POST /batch_search {"query": […], "top_n", "return_score"}`
answers `[[{"id", "contents"}, …], …]`. Our server speaks both, has `/search` for
FlashRAG's single questions, and `GET /health`; there is no authentication, and by
default only this machine is listened to.

What a server or a person's own retriever returned is kept on disk, so that a passage
keeps its index over restarts and nothing is searched twice. A server that is gone, slow
or talks nonsense fails the questions concerned; the others are kept, and the same call
again searches only for the rest.
"""

import contextlib
import dataclasses
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec
import numpy as np

from beatrice.extract.plugs import load_plug
from beatrice.extract.records import Passage, read_records
from beatrice.extract.run.directory import Preset
from beatrice.extract.run.files import Journal, JournalFiles, sha256_file, sha256_json
from beatrice.pgir.arguments import as_passages, from_document
from beatrice.pgir.corpus import Corpus, as_document
from beatrice.pgir.index import DenseRetriever, Form, TextEncoder, encoder_config

Kind = Literal["bm25", "dense", "fused", "served"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PLUGS = "beatrice.retrievers"  # the group of entry points
# Cormack, Clarke and Büttcher (SIGIR 2009): what keeps the first ranks from deciding
# alone. Their value; none was tuned.
RANK_CONSTANT = 60
LEAST_DEPTH = 100  # of each ranking that is fused
_PATHS = {"retrieve": "search-r1", "batch_search": "flashrag"}
_BATCH = 32  # questions in a request
_MOST_BYTES = 64 << 20  # of a reply
Note = Callable[[str], None]


class Retriever(Protocol):
    """Ranks the passages of one corpus."""

    def search(self, queries: Sequence[str], depth: int) -> Sequence[Sequence[int]]:
        """Return the indices of at most `depth` passages of each query, best first."""


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

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` indices, best first."""
        indices, _ = self._index.retrieve(
            _words(queries),
            k=min(depth, self._n),
            show_progress=False,
            n_threads=0,
        )
        return np.asarray(indices)


def _words(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    return bm25s.tokenize(
        list(texts), stopwords=None, return_ids=False, show_progress=False
    )


class FusedRetriever:
    """Ranks passages by the sum over retrievers of `1 / (60 + rank)`, rank from 1.

    A passage that a retriever does not have among its first hundred, or among twice as
    many as are asked for, gets nothing from it.

    Args:
      retrievers: over the same passages.
    """

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        """Take the retrievers."""
        if len(retrievers) < 2:
            raise ValueError(f"fusion needs two retrievers, found {len(retrievers)}")
        self._retrievers = tuple(retrievers)

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, min(depth, n_passages)]` indices, best first."""
        deeper = max(LEAST_DEPTH, 2 * depth)
        rankings = [each.search(queries, deeper) for each in self._retrievers]
        return fuse_all(rankings, depth)


def fuse_all(rankings: Sequence[np.ndarray], depth: int) -> np.ndarray:
    """Return the fused rankings of some queries, `[n_queries, depth]` or fewer columns.

    Args:
      rankings: of each retriever, `[n_queries, n]` indices, best first.
      depth: most passages of a query.
    """
    width = min(depth, *(ranking.shape[1] for ranking in rankings))
    rows = [fuse(own)[:width] for own in zip(*rankings, strict=True)]
    return np.array(rows, np.int64).reshape(len(rows), width)


def fuse(rankings: Sequence[np.ndarray]) -> np.ndarray:
    """Return the passages of some rankings in the order of their fused scores.

    Args:
      rankings: of one query, `[n]` indices each, best first.

    Returns:
      `[n_distinct]` indices; of equal scores the lower index first.
    """
    places, inverse = np.unique(np.concatenate(rankings), return_inverse=True)
    gains = [1 / (RANK_CONSTANT + 1 + np.arange(len(one))) for one in rankings]
    scores = np.bincount(inverse, np.concatenate(gains))
    return places[np.argsort(-scores, kind="stable")]


class RetrievalFailed(OSError):
    """Some questions got no passages.

    Attributes:
      reasons: by place of the question.
      rankings: indices of the others, by place.
    """

    def __init__(
        self,
        name: str,
        reasons: Mapping[int, str],
        rankings: Mapping[int, Sequence[int]],
    ) -> None:
        """Say how many, and why the first."""
        first = next(iter(reasons.values()))
        super().__init__(
            f"{name} gave no passages for {len(reasons)} of "
            f"{len(reasons) + len(rankings)} questions, the first since {first}; what "
            "it gave is kept, and the same line again asks for the rest"
        )
        self.reasons, self.rankings = dict(reasons), dict(rankings)


class _ServerUnreachable(Exception):
    """The server cannot be reached; do not retry in this batch."""


class _RequestFailed(Exception):
    """A request has failed, in words."""


class _KeptRanking(msgspec.Struct, frozen=True):
    """One question with its ranking; `new` are passages that had no index before."""

    query: str
    depth: int
    places: tuple[int, ...]
    new: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What was asked."""
        return self.query, self.depth


class RememberedRetriever:
    """Ranks what somebody else finds, whose passages become indices that stay.

    A passage without a word is never ranked: no prompt can hold it.

    Attributes:
      passages: all that were ever found, in the order of first appearance; it grows,
        and an index once given stays.
      n_empty: passages without a word among them.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[list[str], int], list[list[str]]],
        cache: Path | None,
        note: Note = lambda text: None,
    ) -> None:
        """Read what was found before; nothing is asked yet.

        Args:
          name: of who finds, for messages.
          fetch: returns the documents of some queries, best first, at most as many as
            asked for; raises `_RequestFailed` or `_ServerUnreachable`.
          cache: file of what was found; None keeps it in memory alone.
          note: called with what became of a last line that a killed process left
            unfinished.
        """
        self._name, self._fetch = name, fetch
        self.passages: list[Passage] = []
        self.n_empty = 0
        self._places: dict[str, int] = {}
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}
        self._journal: Journal[tuple[str, int], _KeptRanking] | None = None
        if cache is not None:
            files = JournalFiles(cache, _KeptRanking, lambda row: row.key)
            self._journal = Journal.open(files)
            for text in self._journal.notes:
                note(text)
            for kept in self._journal.values():
                self._remember(kept)

    def _remember(self, kept: _KeptRanking) -> None:
        for contents in kept.new:
            self._places[contents] = len(self.passages)
            self.passages.append(from_document(contents))
            self.n_empty += not self.passages[-1].text.strip()
        readable = (p for p in kept.places if self.passages[p].text.strip())
        self._known[kept.key] = tuple(readable)

    def search(self, queries: Sequence[str], depth: int) -> list[tuple[int, ...]]:
        """Return at most `depth` indices into `passages` of each query, best first.

        Raises:
          RetrievalFailed: some questions failed; it holds the others.
        """
        missing = list(
            dict.fromkeys(q for q in queries if (q, depth) not in self._known)
        )
        reasons: dict[str, str] = {}
        try:
            for start in range(0, len(missing), _BATCH):
                self._search_batch(missing[start : start + _BATCH], depth, reasons)
        except _ServerUnreachable as error:
            left = [q for q in missing if (q, depth) not in self._known]
            reasons |= {query: reasons.get(query, str(error)) for query in left}
        if reasons:
            failed = {i: reasons[q] for i, q in enumerate(queries) if q in reasons}
            rankings = {
                i: self._known[query, depth]
                for i, query in enumerate(queries)
                if query not in reasons
            }
            raise RetrievalFailed(self._name, failed, rankings)
        return [self._known[query, depth] for query in queries]

    def _search_batch(
        self, queries: list[str], depth: int, reasons: dict[str, str]
    ) -> None:
        """Ask for some questions; those of a request that fails, one by one."""
        try:
            self._keep(queries, depth, self._fetch(queries, depth))
        except _RequestFailed as error:
            if len(queries) == 1:
                reasons[queries[0]] = str(error)
                return
            for query in queries:  # one of them may be what the server stumbles over
                self._search_batch([query], depth, reasons)

    def _keep(self, queries: list[str], depth: int, replies: list[list[str]]) -> None:
        lines: dict[tuple[str, int], str] = {}
        for query, documents in zip(queries, replies, strict=True):
            new = [d for d in dict.fromkeys(documents) if d not in self._places]
            places = {d: len(self.passages) + i for i, d in enumerate(new)}
            ranked = tuple(self._places.get(d, places.get(d, 0)) for d in documents)
            kept = _KeptRanking(query, depth, ranked, tuple(new))
            self._remember(kept)
            lines[kept.key] = json.dumps(msgspec.to_builtins(kept))
        if self._journal is not None:
            self._journal.append(lines)


class ServedRetriever(RememberedRetriever):
    """Asks a retrieval server."""

    def __init__(
        self,
        url: str,
        cache: Path | None,
        *,
        timeout: float = 60.0,
        n_attempts: int = 3,
        pause: float = 1.0,
        note: Note = lambda text: None,
    ) -> None:
        """Read what was asked before; the server is not asked yet.

        Args:
          url: with the path `/retrieve` or `/batch_search`.
          cache: file of what the server said.
          timeout: seconds until a request counts as failed, its reply included.
          n_attempts: of each request.
          pause: seconds before the second attempt, doubled before each other.
          note: as of `RememberedRetriever`.

        Raises:
          ValueError: the path is of no known protocol.
        """
        path = urllib.parse.urlsplit(url).path.rstrip("/").rpartition("/")[2]
        if path not in _PATHS or not url.startswith(("http://", "https://")):
            raise ValueError(
                f"{url}: expected a URL that ends in /retrieve (Search-R1's protocol) "
                "or in /batch_search (FlashRAG's)"
            )
        self._url, self._protocol = url, _PATHS[path]
        self._timeout, self._n_attempts, self._pause = timeout, n_attempts, pause
        super().__init__(url, self._ask, cache, note)

    def _ask(self, queries: list[str], depth: int) -> list[list[str]]:
        """Return the documents of each question, after as many attempts as allowed."""
        for attempt in range(self._n_attempts):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                return self._attempt(queries, depth)
            except (_RequestFailed, _ServerUnreachable) as error:
                last = error
        raise last

    def _attempt(self, queries: list[str], depth: int) -> list[list[str]]:
        if self._protocol == "search-r1":
            body = {"queries": queries, "topk": depth, "return_scores": True}
        else:
            body = {"query": queries, "top_n": depth, "return_score": False}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        late = _RequestFailed(f"no reply came in {self._timeout:g} seconds")
        deadline = _Deadline(self._timeout)
        try:
            with deadline, deadline.open(request) as reply:
                content = b""
                while not deadline.is_over and len(content) < _MOST_BYTES:
                    part = reply.read1(1 << 16)
                    if not part:
                        break
                    content += part
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise _RequestFailed(f"it answered with status {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if deadline.is_over or isinstance(reason, TimeoutError):
                raise late from None
            if isinstance(error, urllib.error.URLError):
                raise _ServerUnreachable(f"it cannot be reached ({reason})") from None
            raise _RequestFailed(f"the connection broke ({error!r})") from None
        if deadline.is_over:  # a connection that is shut may look like a reply's end
            raise late
        try:
            return read_reply(json.loads(content), len(queries), depth)
        except ValueError as error:
            raise _RequestFailed(f"its reply is no ranking: {error}") from None


class _Deadline:
    """Shuts the connection of one request when its time is over.

    A socket's own time-out begins anew with every byte, so that a server which sends
    one now and then would never be late. Once the headers are there urllib lets go of
    the connection: whoever reads on asks `is_over` between two parts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._shut)
        self._timer.daemon = True
        self._connections: list[http.client.HTTPConnection] = []
        self.is_over = False

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def open(self, request: urllib.request.Request) -> Any:
        """Send a request and return its reply; proxies are the environment's."""
        handlers = [
            type("_Watched", (base,), {"do_open": self._watched(base)})
            for base in (urllib.request.HTTPHandler, urllib.request.HTTPSHandler)
        ]
        opener = urllib.request.build_opener(*handlers)
        return opener.open(request, timeout=self._seconds)

    def _watched(self, base: type) -> Callable[..., Any]:
        """Return `do_open`, which remembers the connection that it makes."""

        def do_open(handler: Any, http_class: Any, *args: Any, **options: Any) -> Any:
            def connect(*words: Any, **named: Any) -> http.client.HTTPConnection:
                self._connections.append(http_class(*words, **named))
                return self._connections[-1]

            return base.do_open(handler, connect, *args, **options)

        return do_open

    def _shut(self) -> None:
        self.is_over = True
        for connection in self._connections:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def read_reply(reply: Any, n_queries: int, depth: int) -> list[list[str]]:
    """Return the documents in a server's reply, of each question as many as asked for.

    Raises:
      ValueError: the reply is of neither protocol, or has too few of something.
    """
    if isinstance(reply, dict):
        reply = reply.get("result")
    if not isinstance(reply, list):
        raise ValueError("expected a list of rankings, or one named 'result'")
    if len(reply) != n_queries:
        raise ValueError(f"expected {n_queries} rankings, found {len(reply)}")
    documents = []
    for ranking in reply:
        if not isinstance(ranking, list) or len(ranking) < depth:
            n = len(ranking) if isinstance(ranking, list) else "no list of"
            raise ValueError(f"expected {depth} documents for a question, found {n}")
        documents.append([_contents(document) for document in ranking[:depth]])
    return documents


def _contents(document: Any) -> str:
    """Return the text of a document, title first, however it is wrapped."""
    if isinstance(document, dict) and isinstance(document.get("document"), dict):
        document = document["document"]
    if isinstance(document, str):
        return document
    if isinstance(document, dict):
        if isinstance(document.get("contents"), str):
            return document["contents"]
        title, text = document.get("title", ""), document.get("text")
        if isinstance(text, str) and isinstance(title, str):
            return as_document(Passage(title=title, text=text))
    raise ValueError("a document has neither 'contents' nor 'title' and 'text'")


class OwnRetriever(RememberedRetriever):
    """A person's retriever: an object that finds passages, however it holds them.

    Args:
      retriever: has `search(queries, depth)`, which returns for each query at most
        `depth` passages, best first, each as `as_passage` reads it; and a text
        `identity` of all that they depend on, under which they are kept. An OSError of
        it fails the queries concerned, which the next run asks again.
      cache: file of what it found; None keeps it in memory alone.
      note: as of `RememberedRetriever`.

    Raises:
      ValueError: it has not both.
    """

    def __init__(
        self, retriever: Any, cache: Path | None = None, note: Note = lambda text: None
    ) -> None:
        """Check what the object has, and read what it found before."""
        self.identity = identity_of(retriever)
        self._retriever = retriever
        super().__init__(type(retriever).__name__, self._find, cache, note)

    def _find(self, queries: list[str], depth: int) -> list[list[str]]:
        name = type(self._retriever).__name__
        try:
            rankings = self._retriever.search(queries, depth)
            n = len(rankings) if isinstance(rankings, Sequence) else "no list of"
            if n != len(queries):
                raise ValueError(
                    f"expected {len(queries)} lists of passages, found {n}"
                )
            return [
                [_as_own_document(p) for p in as_passages(ranking, f"passages[{i}]")]
                for i, ranking in enumerate(rankings)
            ]
        except OSError as error:
            raise _RequestFailed(str(error)) from error
        # Whatever a person's own code raises is a mistake in that code.
        except Exception as error:
            raise ValueError(
                f"the retriever {name} fails ({type(error).__name__}): {error}"
            ) from error


def identity_of(plug: Any) -> str:
    """Return what a person's retriever says that its rankings depend on.

    Raises:
      ValueError: it is no retriever, or says nothing.
    """
    identity = getattr(plug, "identity", None)
    if not callable(getattr(plug, "search", None)) or not isinstance(identity, str):
        raise ValueError(
            f"{type(plug).__name__} is no retriever: expected a method search(queries, "
            "depth) and a text `identity` of all that its rankings depend on"
        )
    return identity


def _as_own_document(passage: Passage) -> str:
    """Return a passage so that `from_document` gives it back, without a title too."""
    title = " ".join(passage.title.split())
    return f'"{title}"\n{passage.text}'


def load_retriever(spec: str) -> Any:
    """Return the retriever at `module:NAME`, or of an entry point; a class is called.

    Raises:
      ValueError: there is none.
    """
    plug = load_plug(spec, PLUGS)
    if isinstance(plug, type) or not hasattr(plug, "search"):
        try:
            plug = plug()
        except Exception as error:
            raise ValueError(
                f"{spec}: calling it without arguments ends in "
                f"{type(error).__name__}: {error}"
            ) from error
    identity_of(plug)
    return plug


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """The run's section `retrieval`.

    Attributes:
      retriever: "bm25"; "dense"; "fused", which is both; "served", a server's; or one's
        own, as `module:NAME` or by the name of an entry point.
      corpus: folder of a corpus that `beatrice corpus` built; None searches the
        passages that came with the run's questions, by BM25 alone.
      encoder: directory of the encoder that the corpus was indexed with.
      encoder_options: fields of its `EncoderConfig` that are not its own, as then.
      form: of the dense index.
      url: of a server, with the path of its protocol.
    """

    retriever: str = "bm25"
    corpus: str | None = None
    encoder: str | None = None
    encoder_options: dict[str, str | int] = dataclasses.field(default_factory=dict)
    form: Form = "flat"
    url: str | None = None

    def __post_init__(self) -> None:
        """Refuse a retriever that lacks something, or is given too much."""
        if self.retriever not in KINDS and self.corpus is not None:
            raise ValueError(
                f"retriever: {self.retriever!r} finds its own passages, and searches "
                "no corpus; leave --corpus out, or take one of bm25, dense and fused"
            )
        is_dense = self.retriever in ("dense", "fused")
        if is_dense and (self.corpus is None or self.encoder is None):
            raise ValueError(
                f"the {self.retriever} retriever needs a corpus and the encoder that "
                "it was indexed with (--corpus, --retriever-encoder)"
            )
        if (self.retriever == "served") != (self.url is not None):
            raise ValueError("a URL goes with the served retriever, and with no other")


RETRIEVAL_PRESETS: dict[Preset, RetrievalConfig] = {
    "demo": RetrievalConfig(),
    "few": RetrievalConfig(),
    "smoke": RetrievalConfig(),
    "paper": RetrievalConfig(),
}


class Retrieval(NamedTuple):
    """A retriever with what its indices mean.

    Attributes:
      retriever: ranks `passages`.
      passages: those of a server or of one's own retriever grow as it finds new ones.
      identity: SHA-256 of all that its rankings depend on; of a server, its URL.
    """

    retriever: Retriever
    passages: Sequence[Passage]
    identity: str


def open_corpus_retrieval(
    corpus: Corpus,
    retriever: str,
    encoder: TextEncoder | None = None,
    form: Form = "flat",
) -> Retriever:
    """Return a retriever over a corpus.

    Raises:
      ValueError: its index is missing, damaged, or of another encoder or corpus.
    """
    if retriever == "bm25":
        return Bm25Retriever(corpus)
    if encoder is None:
        raise ValueError(f"the {retriever} retriever needs an encoder (--encoder)")
    dense = DenseRetriever(corpus, encoder, form)
    if retriever == "dense":
        return dense
    return FusedRetriever([Bm25Retriever(corpus), dense])


def _cache(searches: Path, identity: str) -> Path:
    return searches / f"{identity[:16]}.jsonl"


def served_cache(searches: Path, url: str) -> Path:
    """Return the file in which a server's replies are kept."""
    return _cache(searches, sha256_json(["served", url]))


def open_retrieval(
    config: RetrievalConfig,
    passages: Path,
    searches: Path,
    note: Note = lambda text: None,
) -> Retrieval:
    """Return the retriever that a run has chosen, with its passages.

    Args:
      config: the run's choice.
      passages: file of those that came with its questions.
      searches: folder in which a server's and one's own retriever's replies are kept.
      note: called with what happened to them.
    """
    if config.retriever not in KINDS:
        plug = load_retriever(config.retriever)
        identity = sha256_json(["own", identity_of(plug)])
        own = OwnRetriever(plug, _cache(searches, identity), note)
        return Retrieval(own, own.passages, identity)
    if config.retriever == "served":
        identity = sha256_json(["served", config.url])
        cache = served_cache(searches, str(config.url))
        served = ServedRetriever(str(config.url), cache, note=note)
        return Retrieval(served, served.passages, identity)
    if config.corpus is None:
        held = list(read_records(passages, Passage))
        identity = sha256_json(["bm25", sha256_file(passages)])
        return Retrieval(Bm25Retriever(held), held, identity)
    corpus = Corpus(Path(config.corpus))
    encoder, parts = None, [config.retriever, corpus.identity]
    if config.encoder is not None and config.retriever != "bm25":
        options: dict[str, Any] = config.encoder_options
        encoder = TextEncoder(encoder_config(Path(config.encoder), **options))
        parts += [encoder.identity, config.form]
    retriever = open_corpus_retrieval(corpus, config.retriever, encoder, config.form)
    return Retrieval(retriever, corpus, sha256_json(parts))


_MOST_REQUEST_BYTES = 16 << 20  # of a request
_MOST_DEPTH = 1000


class RetrievalServer(ThreadingHTTPServer):
    """Serves one retriever; one search at a time, requests in the order they come."""

    daemon_threads = True

    def __init__(
        self,
        retriever: Retriever,
        passages: Sequence[Passage],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        depth: int = 3,
    ) -> None:
        """Bind the address; `serve_forever` answers.

        Args:
          retriever: ranks the passages.
          passages: what its indices mean.
          host: address to listen at.
          port: 0 takes a free one, see `server_port`.
          depth: passages for who does not say how many.
        """
        self._retriever, self._passages = retriever, passages
        self._depth, self._one_at_a_time = depth, threading.Lock()
        super().__init__((host, port), _Handler)

    @property
    def n_passages(self) -> int:
        """How many passages are searched."""
        return len(self._passages)

    def rank(self, queries: Sequence[str], depth: Any) -> list[list[dict[str, Any]]]:
        """Return the documents of each query, best first.

        Raises:
          ValueError: there is no query, or the depth is no number of passages.
        """
        depth = self._depth if depth is None else depth
        if type(depth) is not int or not 0 < depth <= _MOST_DEPTH:
            raise ValueError(
                f"expected a number of passages from 1 to {_MOST_DEPTH}, found "
                f"{depth!r}"
            )
        if not isinstance(queries, list) or not queries:
            raise ValueError("expected a list of at least one question")
        if not all(isinstance(query, str) and query.strip() for query in queries):
            raise ValueError("expected questions that are texts and not empty")
        with self._one_at_a_time:
            found = self._retriever.search(queries, depth)
        return [
            [
                {"id": str(place), "contents": as_document(self._passages[int(place)])}
                for place in row
            ]
            for row in found
        ]

    def answer(self, path: str, asked: Mapping[str, Any]) -> Any:
        """Return the reply to a request, of either protocol.

        A score is the reciprocal of the rank: retrievers give an order, and what their
        own scores mean differs.

        Raises:
          KeyError: nothing is served under this path.
          ValueError: the request is not of the protocol.
        """
        if path == "/retrieve":
            found = self.rank(asked.get("queries", []), asked.get("topk"))
            if not asked.get("return_scores"):
                return {"result": found}
            return {
                "result": [
                    [
                        {"document": one, "score": 1 / rank}
                        for rank, one in enumerate(row, start=1)
                    ]
                    for row in found
                ]
            }
        if path not in ("/search", "/batch_search"):
            raise KeyError(path)
        query, is_one = asked.get("query", []), path == "/search"
        found = self.rank([query] if is_one else query, asked.get("top_n"))
        scores = [[1 / rank for rank in range(1, len(row) + 1)] for row in found]
        documents = found[0] if is_one else found
        if not asked.get("return_score"):
            return documents
        return [documents, scores[0] if is_one else scores]


class _Handler(BaseHTTPRequestHandler):
    """Reads requests and writes replies as JSON."""

    server: RetrievalServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Say that the server is up."""
        if self.path == "/health":
            self._reply(200, {"status": "ok", "n_passages": self.server.n_passages})
        else:
            self._reply(404, {"error": "there are POST /retrieve, /batch_search, "
                              "/search, and GET /health"})  # fmt: skip

    def do_POST(self) -> None:
        """Answer a search."""
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 <= size <= _MOST_REQUEST_BYTES:
                raise ValueError(f"a request has at most {_MOST_REQUEST_BYTES} bytes")
            asked = json.loads(self.rfile.read(size))
            if not isinstance(asked, dict):
                raise ValueError("expected a JSON object")
            self._reply(200, self.server.answer(self.path, asked))
        except KeyError:
            self.close_connection = True
            self._reply(404, {"error": f"nothing is served at {self.path}"})
        except ValueError as error:
            self.close_connection = True
            self._reply(400, {"error": str(error)})

    def _reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a search a line would bury everything else."""

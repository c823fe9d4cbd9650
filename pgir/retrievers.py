"""Retrievers: fused, remote and user-written ones, and the choice that a run records.

A retriever behind HTTP speaks one of two protocols, told apart by the path of its URL.
Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}` returns `{"result":
[[{"document": {"contents"}, "score"}, …], …]}`, or bare documents. FlashRAG (ReSearch
and others): `POST /batch_search {"query": […], "top_n", "return_score"}` returns
`[[{"id", "contents"}, …], …]`.

The results of a server or of a user's retriever are kept on disk, so that a passage
keeps its index over restarts and nothing is searched twice.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import inspect
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec
import numpy as np

from beatrice.extract.generate.options import seconds_asked_for
from beatrice.extract.generate.prompts import check_text
from beatrice.extract.plugs import load_plug
from beatrice.extract.records import Passage, read_records
from beatrice.extract.run.directory import Preset
from beatrice.extract.run.files import Journal, JournalFiles, sha256_file, sha256_json
from beatrice.pgir.arguments import (
    argument_error,
    as_list,
    as_passages,
    from_document,
    is_passage,
)
from beatrice.pgir.bm25 import WORDS, Bm25Retriever, open_bm25
from beatrice.pgir.corpus import Corpus, Note, as_served, read_facts
from beatrice.pgir.index import (
    DenseRetriever,
    Form,
    PassageEncoderConfig,
    TextEncoder,
    Vectors,
    check_index,
    encoder_identity,
    index_folder,
    read_encoder_config,
)

Kind = Literal["bm25", "dense", "fused", "served"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PLUGS = "beatrice.retrievers"  # the group of entry points
# Value of Cormack, Clarke and Büttcher (SIGIR 2009), not tuned here. It keeps the first
# ranks from deciding alone.
RANK_CONSTANT = 60
LEAST_DEPTH = 100  # of each ranking that is fused
_PROTOCOLS = {"retrieve": "search-r1", "batch_search": "flashrag"}
_URL = re.compile(rf"https?://.*/({'|'.join(_PROTOCOLS)})/*", re.DOTALL)
_KEY = "BEATRICE_RETRIEVAL_KEY"  # environment variable, sent as a bearer token
_BATCH = 32  # questions in a request
_N_TRIED = 3  # questions of a batch that failed; if these fail too, no more are asked
_MOST_REPLY_BYTES = 64 << 20
_named: set[str] = set()  # URLs that the user gave in this process


def _no_note(text: str) -> None: ...


class Retriever(Protocol):
    """Ranks the passages of one corpus."""

    def search(
        self, queries: Sequence[str], depth: int
    ) -> Sequence[Sequence[int] | np.ndarray] | np.ndarray:
        """Return the indices of at most `depth` passages per query, best first."""
        ...


class FusedRetriever:
    """Ranks passages by the sum over retrievers of `1 / (60 + rank)`, rank from 1.

    Each retriever contributes its first 100 passages, or `2 * depth` if that is more.
    """

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        """Take at least two retrievers."""
        self._retrievers = tuple(retrievers)

    def search(self, queries: Sequence[str], depth: int) -> list[np.ndarray]:
        """Return at most `depth` indices per query, best first."""
        deeper = max(LEAST_DEPTH, 2 * depth)
        rankings = [each.search(queries, deeper) for each in self._retrievers]
        return [fuse(of_query)[:depth] for of_query in zip(*rankings, strict=True)]


def fuse(rankings: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Return the passages of several rankings in the order of their fused scores.

    Args:
      rankings: the rankings of one query, `[n]` indices each, best first.

    Returns:
      `[n_distinct]` indices; the lower index comes first at equal scores.
    """
    ranked = np.concatenate([np.asarray(each, np.int64) for each in rankings])
    indices, inverse = np.unique(ranked, return_inverse=True)
    gains = [1 / (RANK_CONSTANT + 1 + np.arange(len(each))) for each in rankings]
    scores = np.bincount(inverse, np.concatenate(gains))
    return indices[np.argsort(-scores, kind="stable")]


class RetrievalFailed(OSError):
    """Some searches failed; has their reasons and the other rankings, by index."""

    def __init__(
        self,
        name: str,
        reasons: Mapping[int, str],
        rankings: Mapping[int, Sequence[int]],
    ) -> None:
        """Name how many failed, and the reason of the first."""
        first = next(iter(reasons.values()))
        super().__init__(
            f"{name} gave no passages for {len(reasons)} of "
            f"{len(reasons) + len(rankings)} questions (the first because {first}); "
            "the others are kept, and the same command asks for the rest"
        )
        self.reasons, self.rankings = dict(reasons), dict(rankings)


class _ServerFails(Exception):
    """The server cannot be reached or answers nothing, so it is sent no more."""


class _RequestFailed(Exception):
    """A request has failed for the reason in the message."""

    pause = 0.0  # seconds that the server asks to wait before the next request


class _CachedRanking(msgspec.Struct, frozen=True):
    """A question's ranking; `new` has the documents that had no index before."""

    query: str
    depth: int
    places: tuple[int, ...]
    new: tuple[str, ...]


class CachedRetriever:
    """Ranks the documents of an external search, and gives them lasting indices.

    A document that comes twice keeps its first rank. One without a word is counted but
    not ranked, since no prompt can hold it.

    Args:
      name: name of the search, for messages.
      fetch: returns the documents of some queries, best first, at most as many as
        asked for; raises `_RequestFailed` or `_ServerFails`.
      cache: file of earlier rankings; None keeps them only in memory.
      note: called with a text if a killed process has left an unfinished last line.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[list[str], int], list[list[str]]],
        cache: Path | None,
        note: Note = _no_note,
    ) -> None:
        """Read the cache; nothing is searched yet."""
        self._name, self._fetch = name, fetch
        self.passages: list[Passage] = []
        self.n_empty = 0
        self._places: dict[str, int] = {}
        self._rankings: dict[tuple[str, int], tuple[int, ...]] = {}
        self._journal: Journal[tuple[str, int], _CachedRanking] | None = None
        if cache is not None:
            key = lambda row: (row.query, row.depth)  # noqa: E731
            self._journal = Journal.open(JournalFiles(cache, _CachedRanking, key))
            for text in self._journal.notes:
                note(text)
            for row in self._journal.read(self._journal):
                self._add(row)
        # Until any question has had documents, replies without any count as failures.
        self._has_answered = any(self._rankings.values())

    def _add(self, row: _CachedRanking) -> None:
        for contents in row.new:
            self._places[contents] = len(self.passages)
            self.passages.append(from_document(contents))
            self.n_empty += not self.passages[-1].text.strip()
        readable = (p for p in row.places if self.passages[p].text.strip())
        # Else a document that came twice would be shown twice, and count twice.
        self._rankings[row.query, row.depth] = tuple(dict.fromkeys(readable))

    def search(self, queries: Sequence[str], depth: int) -> list[tuple[int, ...]]:
        """Return at most `depth` indices into `passages` per query, best first.

        Raises:
          RetrievalFailed: some questions failed; it holds the other rankings.
        """
        missing = [
            q for q in dict.fromkeys(queries) if (q, depth) not in self._rankings
        ]
        reasons: dict[str, str] = {}
        try:
            # Earlier failures come first in `missing`: spread them over the batches.
            n_batches = math.ceil(len(missing) / _BATCH)
            for first in range(n_batches):
                self._search_batch(missing[first::n_batches], depth, reasons)
        except _ServerFails as error:
            left = [q for q in missing if (q, depth) not in self._rankings]
            reasons = dict.fromkeys(left, str(error)) | reasons
        rankings = {
            i: self._rankings[query, depth]
            for i, query in enumerate(queries)
            if query not in reasons
        }
        if reasons:
            failed = {i: reasons[q] for i, q in enumerate(queries) if q in reasons}
            raise RetrievalFailed(self._name, failed, rankings)
        return list(rankings.values())

    def _search_batch(
        self, queries: list[str], depth: int, reasons: dict[str, str]
    ) -> None:
        """Search for some questions, one by one if the request for all of them fails.

        If the first few of these fail too, give up: the server may have stopped.
        """
        try:
            self._save(queries, depth, self._fetch(queries, depth))
        except _RequestFailed as error:
            if len(queries) == 1:
                reasons[queries[0]] = str(error)
                return
            # Some questions may make the server fail, and those of an earlier run are
            # adjacent; first, middle and last are rarely all of that kind.
            places = (n * (len(queries) - 1) // (_N_TRIED - 1) for n in range(_N_TRIED))
            order = [*dict.fromkeys([*(queries[i] for i in places), *queries])]
            for n_asked, query in enumerate(order, start=1):
                self._search_batch([query], depth, reasons)
                if n_asked == _N_TRIED and reasons.keys() >= set(order[:n_asked]):
                    nothing = f"none of {1 + n_asked} requests in a row was answered"
                    reason = f"{reasons[query]}; {nothing}, so no more are sent"
                    raise _ServerFails(reason) from None

    def _save(self, queries: list[str], depth: int, replies: list[list[str]]) -> None:
        self._has_answered = True
        lines: dict[tuple[str, int], str] = {}
        for query, documents in zip(queries, replies, strict=True):
            new = [d for d in dict.fromkeys(documents) if d not in self._places]
            for index, document in enumerate(new, start=len(self.passages)):
                self._places[document] = index
            ranked = tuple(self._places[document] for document in documents)
            row = _CachedRanking(query, depth, ranked, tuple(new))
            self._add(row)
            lines[query, depth] = json.dumps(msgspec.to_builtins(row))
        if self._journal is not None:
            self._journal.append(lines)


class ServedRetriever(CachedRetriever):
    """Searches with a retrieval server.

    Args:
      url: URL that ends in `/retrieve` or `/batch_search`.
      cache: file of the server's replies, as for `CachedRetriever`.
      timeout: seconds within which a request must be answered completely.
      n_attempts: attempts for each request.
      pause: seconds before the second attempt, doubled before each further one.
      note: as for `CachedRetriever`.
    """

    def __init__(
        self,
        url: str,
        cache: Path | None,
        *,
        timeout: float = 60.0,
        n_attempts: int = 3,
        pause: float = 1.0,
        note: Note = _no_note,
    ) -> None:
        """Read the cache; the server is not asked yet."""
        if "@" in url.split("//", 1)[-1].split("/")[0]:
            # No request would send them, and every error would print them.
            raise ValueError("expected a URL without a name or password")
        if re.search("[?#]", url):  # the run and every error would show it
            raise ValueError(
                "expected a URL without a query, which may hold a key; put the key in "
                f"the environment variable {_KEY}, and give the URL without the query"
            )
        if (named := _URL.fullmatch(url)) is None:
            raise ValueError(
                f"{url}: expected a URL that ends in /retrieve (Search-R1's protocol) "
                "or in /batch_search (FlashRAG's)"
            )
        if not _can_be_sent_to(url):
            raise ValueError(
                f"{url}: no request can be sent there; expected a host, a port from 1 "
                "to 65535 if any, and a path in ASCII, with other characters written "
                "like %C3%A9"
            )
        self._url, self._protocol = url, _PROTOCOLS[named[1]]
        self._headers = _headers()
        self._timeout, self._n_attempts, self._pause = timeout, n_attempts, pause
        super().__init__(url, self._request, cache, note)

    def _request(self, queries: list[str], depth: int) -> list[list[str]]:
        if self._protocol == "search-r1":
            body = {"queries": queries, "topk": depth, "return_scores": True}
        else:
            body = {"query": queries, "top_n": depth, "return_score": False}
        n_failed = 0
        while True:
            try:
                content = _post_within(self._timeout, self._url, body, self._headers)
                documents = read_reply(json.loads(content), len(queries), depth)
                if not (self._has_answered or any(documents)):
                    raise ValueError("expected documents for a question, found none")
                return documents
            except (ValueError, RecursionError) as reason:  # RecursionError: deep JSON
                error: Exception = _RequestFailed(f"its reply is no ranking: {reason}")
            except (_RequestFailed, _ServerFails) as failure:
                error = failure
            n_failed += 1
            if n_failed >= self._n_attempts:
                raise error
            asked = min(getattr(error, "pause", 0.0), self._timeout)
            time.sleep(max(asked, self._pause * 2 ** (n_failed - 1)))


def _can_be_sent_to(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # as the socket does
        is_ascii = f"{parts.path}{parts.query}".isascii()
        return bool(host) and parts.port != 0 and is_ascii and not re.search(r"\s", url)
    except ValueError:
        return False


def _headers() -> dict[str, str]:
    key = os.environ.get(_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{_KEY}: expected a key of only printable ASCII characters, found others; "
            "copy the key again into that environment variable"
        )
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Content-Type": "application/json"} | authorization


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error of the server.

    A redirect could send questions and the key to hosts that only this machine reaches.
    """

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Return no further request."""


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Return the opener of all requests; a new one would load all certificates."""
    return urllib.request.build_opener(_NoRedirects)


def _post_within(
    seconds: float, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> bytes:
    """Return the reply to a JSON request, if it is complete within some seconds.

    A socket's own time-out restarts with every byte, so the reply is read in a thread
    that is abandoned when the time is up.
    """
    reply: concurrent.futures.Future[bytes] = concurrent.futures.Future()

    def read() -> None:
        content = json.dumps(body).encode()
        request = urllib.request.Request(url, content, dict(headers))
        try:
            with _opener().open(request, timeout=seconds) as stream:
                content = stream.read(_MOST_REPLY_BYTES + 1)
            if len(content) > _MOST_REPLY_BYTES:
                limit = _MOST_REPLY_BYTES >> 20
                raise _RequestFailed(f"its reply is longer than {limit} MiB")
            reply.set_result(content)
        except urllib.error.HTTPError as error:
            reply.set_exception(_refusal(error, headers))
        except Exception as error:  # any error must reach the waiting thread
            reply.set_exception(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        return reply.result(timeout=seconds)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):  # of the socket, or of `result`
            late = f"no reply came in {seconds:g} seconds"
            raise _RequestFailed(late) from None
        if isinstance(error, urllib.error.URLError):
            raise _ServerFails(f"it cannot be reached ({reason})") from None
        raise _RequestFailed(f"the connection broke ({error!r})") from None


def _refusal(
    error: urllib.error.HTTPError, headers: Mapping[str, str]
) -> _RequestFailed:
    """Return a refusal in the server's words, without the key if it repeats that."""
    words = b""
    with contextlib.suppress(OSError, http.client.HTTPException), error:
        words = error.read(2000)
    key = headers.get("Authorization", "").removeprefix("Bearer ") or None
    text = words.decode(errors="replace")
    text = " ".join((text if key is None else text.replace(key, "…")).split())[:300]
    if place := error.headers.get("Location"):
        text = f"it redirects to {place}: give the URL that answers itself"
    failure = _RequestFailed(f"it answered with status {error.code}: {text}")
    failure.pause = seconds_asked_for(error.headers.get("Retry-After", ""))
    return failure


def read_reply(reply: Any, n_queries: int, depth: int) -> list[list[str]]:
    """Return the documents in a reply, at most `depth` for each question."""
    if isinstance(reply, dict):
        reply = reply.get("result")
    if not isinstance(reply, list):
        raise ValueError("expected a list of rankings, or one named 'result'")
    if len(reply) != n_queries:
        raise ValueError(f"expected {n_queries} rankings, found {len(reply)}")
    documents = []
    for ranking in reply:
        if not isinstance(ranking, list):
            raise ValueError("expected documents for a question, found no list")
        documents.append([_contents(document) for document in ranking[:depth]])
        "".join(documents[-1]).encode()  # raises for half of a surrogate pair
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
        title, text = document.get("title") or "", document.get("text")
        if isinstance(text, str) and isinstance(title, str):
            return as_served(Passage(title=title, text=text))
    raise ValueError("a document has neither 'contents' nor 'title' and 'text'")


class UserRetriever(CachedRetriever):
    """A retriever written by the user: any object that finds passages.

    Args:
      retriever: has a method `search(queries, depth)`, which returns for each query at
        most `depth` passages, best first, in any form that `as_passage` reads; and a
        text `identity` of all that the rankings depend on, under which they are kept.
        If it raises an OSError or returns text that is not valid, the queries fail, and
        the next run asks them again.
      cache: file of its rankings; None keeps them only in memory.
      note: as for `CachedRetriever`.
    """

    def __init__(
        self, retriever: Any, cache: Path | None = None, note: Note = _no_note
    ) -> None:
        """Check the object, and read the cache."""
        self.identity = identity_of(retriever)
        self._retriever = retriever
        super().__init__(type(retriever).__name__, self._call, cache, note)

    def _call(self, queries: list[str], depth: int) -> list[list[str]]:
        try:
            result = self._retriever.search(queries, depth)
            rankings = as_list(result, "passages", "a list of passages for each query")
            if len(rankings) != len(queries):
                raise ValueError(
                    f"expected {len(queries)} lists of passages, found {len(rankings)}"
                )
            pairs = enumerate(rankings)
            shown = [_passages(x, f"passages[{i}]")[:depth] for i, x in pairs]
        except OSError as error:
            raise _RequestFailed(str(error)) from error
        # Any other error is a mistake in the user's code.
        except Exception as error:
            raise ValueError(
                f"the retriever {self._name} failed ({type(error).__name__}): {error}"
            ) from error
        try:
            return [_documents(passages) for passages in shown]
        except ValueError as error:
            reason = f"the retriever {self._name}: {error}"
            raise _RequestFailed(reason) from None


def _passages(ranking: Any, name: str) -> tuple[Passage, ...]:
    """Return a user's passages for one query."""
    if is_passage(ranking):  # `as_passages` would accept it as a whole context
        raise argument_error(name, "a list of passages", ranking)
    return as_passages(ranking, name)


def _documents(passages: Sequence[Passage]) -> list[str]:
    """Return passages as `from_document` reads them; check that they are valid text."""
    for n, passage in enumerate(passages, start=1):
        check_text(f"{passage.text}\n{passage.title}.", f"passage {n}")
    return [
        f'"{" ".join(passage.title.split())}"\n{passage.text}'  # even without a title
        for passage in passages
    ]


def identity_of(retriever: Any) -> str:
    """Check a user's retriever, and return its `identity` (see `UserRetriever`)."""
    identity = getattr(retriever, "identity", None)
    is_retriever = callable(getattr(retriever, "search", None))
    if not is_retriever or not isinstance(identity, str):
        raise ValueError(
            f"{type(retriever).__name__} is no retriever: expected a method "
            "search(queries, depth) and a text `identity` of all that its rankings "
            "depend on"
        )
    if inspect.iscoroutinefunction(retriever.search):
        raise ValueError(
            f"{type(retriever).__name__}.search is async: expected a method that "
            "returns the passages themselves; let it call asyncio.run on the async one"
        )
    return identity


_opened: dict[str, tuple[Any, Any]] = {}  # by name: the code, and its retriever


def load_retriever(spec: str, *, option: str | None = None) -> Any:
    """Return the retriever named by `module:NAME` or an entry point, calling a class.

    `option` is given if the name comes from the run, see `load_plug`. The object made
    earlier in this process is then used again, since its corpus may be large.
    """
    plug = code = load_plug(spec, PLUGS, option=option)
    if option is not None and spec in _opened and _opened[spec][0] is code:
        return _opened[spec][1]
    if isinstance(plug, type) or not hasattr(plug, "search"):
        try:
            plug = plug()
        except Exception as error:
            raise ValueError(
                f"{spec}: calling it without arguments raised "
                f"{type(error).__name__}: {error}"
            ) from error
    identity_of(plug)
    _opened[spec] = code, plug
    return plug


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """The run's section `retrieval`."""

    # "bm25"; "dense"; "fused", which is both; "served", by a server; or a user's own,
    # as `module:NAME` or the name of an entry point.
    retriever: str = "bm25"
    # Folder of a corpus built by `beatrice corpus`; None searches the passages that
    # came with the run's questions, with BM25 only.
    corpus: str | None = None
    # Directory of the encoder that the corpus was indexed with.
    encoder: str | None = None
    # Fields of its `PassageEncoderConfig` that the user chose for the index.
    encoder_options: dict[str, str | int] = dataclasses.field(default_factory=dict)
    form: Form = "flat"  # of the dense index
    url: str | None = None  # of a server, with the path of its protocol

    def __post_init__(self) -> None:
        """Check that the retriever has what it needs, and nothing else."""
        if self.retriever not in KINDS and self.corpus is not None:
            raise ValueError(
                f"retriever: {self.retriever!r} finds its own passages and searches "
                "no corpus; leave out --corpus, or use one of bm25, dense and fused"
            )
        is_dense = self.retriever in ("dense", "fused")
        if is_dense and (self.corpus is None or self.encoder is None):
            raise ValueError(
                f"the {self.retriever} retriever needs a corpus and the encoder that "
                "it was indexed with (--corpus, --retriever-encoder)"
            )
        if (self.retriever == "served") != (self.url is not None):
            raise ValueError("the served retriever needs a URL, and no other takes one")

    @property
    def searches_own_passages(self) -> bool:
        """Whether the passages that came with the run's questions are searched."""
        return self.retriever == "bm25" and self.corpus is None


RETRIEVAL_PRESETS: dict[Preset, RetrievalConfig] = dict.fromkeys(
    get_args(Preset), RetrievalConfig()
)


class Retrieval(NamedTuple):
    """A retriever with what its indices mean."""

    retriever: Retriever  # ranks `passages`
    # For a server or a user's retriever, this list grows with searches.
    passages: Sequence[Passage]
    identity: str  # SHA-256 of all that its rankings depend on; for a server, its URL


def open_corpus_retrieval(
    corpus: Corpus,
    retriever: str,
    encoder: TextEncoder | None = None,
    form: Form = "flat",
    note: Note = _no_note,
) -> Retriever:
    """Return a retriever over a corpus."""
    if retriever == "bm25":
        return open_bm25(corpus, note)
    if encoder is None:
        raise ValueError(
            f"the {retriever} retriever needs the encoder that the corpus was indexed "
            "with; give it as encoder (of `beatrice corpus`, --encoder)"
        )
    dense = DenseRetriever(corpus, encoder, form)
    if retriever == "dense":
        return dense
    return FusedRetriever([open_bm25(corpus, note), dense])


def check_retrieval(config: RetrievalConfig) -> None:
    """Check that everything a choice names exists; load no index, ask no server."""
    if config.retriever not in KINDS:
        load_retriever(config.retriever)
    if config.url is not None:
        ServedRetriever(config.url, None)
        _named.add(config.url)
    if config.corpus is None:
        return
    corpus = Corpus(Path(config.corpus))
    if (encoder := _encoder_config(config)) is not None:
        check_index(Vectors(index_folder(corpus, encoder.path.name)), config.form)


def _encoder_config(config: RetrievalConfig) -> PassageEncoderConfig | None:
    """Return how the chosen encoder is run, or None if only words are searched."""
    if config.encoder is None or config.retriever == "bm25":
        return None
    options: dict[str, Any] = config.encoder_options
    return read_encoder_config(Path(config.encoder), **options)


def retrieval_identity(config: RetrievalConfig, passages: Path) -> str:
    """Return the identity of a `Retrieval`; load no index, ask no server.

    `passages` is the file of passages that came with a run's questions.
    """
    if config.retriever not in KINDS:
        plug = load_retriever(config.retriever, option="--retriever")
        return sha256_json(["own", identity_of(plug)])
    if config.url is not None:
        return sha256_json(["served", config.url])
    if config.corpus is None:
        return sha256_json([WORDS, sha256_file(passages)])
    facts = read_facts(Path(config.corpus))
    identities = [config.retriever, facts["files"]["passages.jsonl"]]
    if config.retriever != "dense":
        identities.append(WORDS)
    if (encoder := _encoder_config(config)) is not None:
        identities += [encoder_identity(encoder), config.form]
    return sha256_json(identities)


def open_retrieval(
    config: RetrievalConfig, passages: Path, searches: Path, note: Note
) -> Retrieval:
    """Return the retriever that a run has chosen, with its passages.

    `passages` is the file of passages that came with its questions, `searches` the
    folder in which rankings of a server or of a user's retriever are kept.
    """
    identity = retrieval_identity(config, passages)
    cache = searches / f"{identity[:16]}.jsonl"
    if config.retriever not in KINDS:
        plug = load_retriever(config.retriever, option="--retriever")
        plugged = UserRetriever(plug, cache, note)
        return Retrieval(plugged, plugged.passages, identity)
    if config.url is not None:
        if config.url not in _named and "Authorization" in _headers():
            raise ValueError(
                f"this run searches at {config.url}, which anybody may have put there, "
                f"and the key in {_KEY} would be sent to it; give --url {config.url} "
                "to allow it, or unset that variable"
            )
        served = ServedRetriever(config.url, cache, note=note)
        return Retrieval(served, served.passages, identity)
    if config.corpus is None:
        of_run = list(read_records(passages, Passage))
        return Retrieval(Bm25Retriever(of_run), of_run, identity)
    corpus = Corpus(Path(config.corpus))
    chosen = _encoder_config(config)
    encoder = None if chosen is None else TextEncoder(chosen)
    how = config.retriever, encoder, config.form
    retriever = open_corpus_retrieval(corpus, *how, note)
    return Retrieval(retriever, corpus, identity)

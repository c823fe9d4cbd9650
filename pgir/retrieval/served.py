"""A retriever behind HTTP: the servers of Search-R1 and of FlashRAG's users.

Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}` answers `{"result":
[[{"document": {"contents"}, "score"}, …], …]}`, or bare documents. FlashRAG's
(ReSearch and others): `POST /batch_search {"query": […], "top_n", "return_score"}`
answers `[[{"id", "contents"}, …], …]`. Which one is told by the path of the URL.

What a server said is kept on disk, so that a passage keeps its index over restarts and
nothing is asked twice. A server that is gone, slow or talks nonsense fails the
questions concerned; the others are kept, and the same call again asks only the rest.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from extract.records import Passage
from extract.run.files import JsonLines
from pgir.border import from_document
from pgir.retrieval.corpus import as_document

Protocol = Literal["search-r1", "flashrag"]
_PATHS: Mapping[str, Protocol] = {"retrieve": "search-r1", "batch_search": "flashrag"}
_BATCH = 32  # questions in a request
_MOST_BYTES = 64 << 20  # of a reply


class RetrievalFailed(OSError):
    """Some questions got no passages.

    Attributes:
      reasons: by place of the question.
      found: `[depth]` indices of the others, by place.
    """

    def __init__(
        self, url: str, reasons: Mapping[int, str], found: Mapping[int, np.ndarray]
    ) -> None:
        """Say how many, and why the first."""
        first = next(iter(reasons.values()))
        super().__init__(
            f"{url} gave no passages for {len(reasons)} of "
            f"{len(reasons) + len(found)} questions, the first since {first}; what it "
            "gave is kept, and the same line again asks for the rest"
        )
        self.reasons, self.found = dict(reasons), dict(found)


class _Gone(Exception):
    """The server cannot be reached: who asks on waits for nothing."""


class _Failed(Exception):
    """A request has failed, in words."""


class _Kept(msgspec.Struct, frozen=True):
    """One question with its ranking; `new` are passages that had no index before."""

    query: str
    depth: int
    places: tuple[int, ...]
    new: tuple[str, ...]


class ServedRetriever:
    """Asks a retrieval server.

    Attributes:
      passages: all that the server ever returned, in the order of first appearance; it
        grows, and an index once given stays.
    """

    def __init__(
        self,
        url: str,
        cache: Path,
        *,
        timeout: float = 60.0,
        n_attempts: int = 3,
        pause: float = 1.0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Read what was asked before; the server is not asked yet.

        Args:
          url: with the path `/retrieve` or `/batch_search`.
          cache: file of what the server said.
          timeout: seconds until a reply counts as failed.
          n_attempts: of each request.
          pause: seconds before the second attempt, doubled before each other.
          note: told of a last line that a killed process left unfinished.

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
        self.passages: list[Passage] = []
        self._places: dict[str, int] = {}
        self._known: dict[tuple[str, int], np.ndarray] = {}
        self._lines = JsonLines.open(cache)
        if self._lines.truncated:
            note(self._lines.truncated)
        for row in self._lines.rows():
            self._remember(msgspec.convert(row, _Kept))

    def _remember(self, kept: _Kept) -> None:
        for contents in kept.new:
            self._places[contents] = len(self.passages)
            self.passages.append(from_document(contents))
        self._known[kept.query, kept.depth] = np.array(kept.places, np.int64)

    def search(self, queries: Sequence[str], depth: int) -> np.ndarray:
        """Return `[n_queries, depth]` indices into `passages`, best first.

        Raises:
          RetrievalFailed: the server failed some questions; it holds the others.
        """
        wanted = list(
            dict.fromkeys(q for q in queries if (q, depth) not in self._known)
        )
        reasons: dict[str, str] = {}
        try:
            for start in range(0, len(wanted), _BATCH):
                self._search_batch(wanted[start : start + _BATCH], depth, reasons)
        except _Gone as error:
            left = [q for q in wanted if (q, depth) not in self._known]
            reasons |= {query: reasons.get(query, str(error)) for query in left}
        if reasons:
            found = {
                i: self._known[query, depth]
                for i, query in enumerate(queries)
                if query not in reasons
            }
            failed = {i: reasons[q] for i, q in enumerate(queries) if q in reasons}
            raise RetrievalFailed(self._url, failed, found)
        rows = [self._known[query, depth] for query in queries]
        return np.array(rows, np.int64).reshape(len(queries), depth)

    def _search_batch(
        self, queries: list[str], depth: int, reasons: dict[str, str]
    ) -> None:
        """Ask for some questions; those of a request that fails, one by one."""
        try:
            self._keep(queries, depth, self._ask(queries, depth))
        except _Failed as error:
            if len(queries) == 1:
                reasons[queries[0]] = str(error)
                return
            for query in queries:  # one of them may be what the server stumbles over
                self._search_batch([query], depth, reasons)

    def _keep(self, queries: list[str], depth: int, replies: list[list[str]]) -> None:
        lines = []
        for query, documents in zip(queries, replies, strict=True):
            new = [d for d in dict.fromkeys(documents) if d not in self._places]
            places = {d: len(self.passages) + i for i, d in enumerate(new)}
            ranked = tuple(self._places.get(d, places.get(d, 0)) for d in documents)
            kept = _Kept(query, depth, ranked, tuple(new))
            self._remember(kept)
            lines.append(json.dumps(msgspec.to_builtins(kept)))
        self._lines.append(lines)

    def _ask(self, queries: list[str], depth: int) -> list[list[str]]:
        """Return the documents of each question, after as many attempts as allowed."""
        for attempt in range(self._n_attempts):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                return self._attempt(queries, depth)
            except (_Failed, _Gone) as error:
                last = error
        raise last

    def _attempt(self, queries: list[str], depth: int) -> list[list[str]]:
        if self._protocol == "search-r1":
            asked = {"queries": queries, "topk": depth, "return_scores": True}
        else:
            asked = {"query": queries, "top_n": depth, "return_score": False}
        request = urllib.request.Request(
            self._url,
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                content = reply.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise _Failed(f"it answered with status {error.code}") from None
        except TimeoutError:
            raise _Failed(f"no reply came in {self._timeout:g} seconds") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                what = f"no reply came in {self._timeout:g} seconds"
                raise _Failed(what) from None
            raise _Gone(f"it cannot be reached ({error.reason})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Failed(f"the connection broke ({error!r})") from None
        try:
            return read_reply(json.loads(content), len(queries), depth)
        except ValueError as error:
            raise _Failed(f"its reply is no ranking: {error}") from None


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
    found = []
    for ranking in reply:
        if not isinstance(ranking, list) or len(ranking) < depth:
            n = len(ranking) if isinstance(ranking, list) else "no list of"
            raise ValueError(f"expected {depth} documents for a question, found {n}")
        found.append([_contents(one) for one in ranking[:depth]])
    return found


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

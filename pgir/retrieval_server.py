"""A server of one retriever, for other programs.

It speaks both protocols of `pgir.retrievers`, has `/search` for FlashRAG's single
questions, and `GET /health`; there is no authentication, and by default only this
machine is listened to.
"""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from beatrice.extract.records import Passage
from beatrice.pgir.corpus import as_served
from beatrice.pgir.retrievers import Retriever

_MOST_REQUEST_BYTES = 16 << 20
_MOST_DROPPED_BYTES = 1 << 30  # of a body that is not wanted
_MOST_DEPTH = 1000  # passages for a question
_MOST_PASSAGES = 100_000  # of a reply, some 100 MB
_PATHS = "there are POST /retrieve, /batch_search, /search, and GET /health"


class _SearchFailed(Exception):
    """A retriever that is served has raised an error; the text says which."""


class _Closed(Exception):
    """The server searches no more; its text says so."""


class RetrievalServer(ThreadingHTTPServer):
    """Serves one retriever; one search at a time, requests in the order they come.

    Port 0 takes a free one, see `server_port`. `depth` is of a request that does not
    say how many, `timeout` the seconds that a client may be silent before it is left.
    """

    daemon_threads = False  # closing waits until whoever is answered has the reply
    # Connections that wait to be served: of a longer row than 5 some were reset.
    request_queue_size = 128

    def __init__(
        self,
        retriever: Retriever,
        passages: Sequence[Passage],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        depth: int = 3,
        timeout: float = 60.0,
    ) -> None:
        """Bind the address; `serve_forever` answers."""
        self._retriever, self.passages = retriever, passages
        self.client_timeout, self._is_closed = timeout, False
        self._depth, self._lock = depth, threading.Lock()
        self._connections: set[Any] = set()  # that are open
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"nothing can be served at {host}:{port}: {error.strerror}; give "
                "another host or port (--set port=0 takes a free one)"
            ) from error

    def server_close(self) -> None:
        """Close the address and every connection, whoever is answered last.

        A search that runs ends and is replied to; none begins, and none is waited for
        that has not been sent.
        """
        self._is_closed = True
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless a client is gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _rank(self, queries: Any, depth: Any) -> list[list[dict[str, Any]]]:
        depth = self._depth if depth is None else depth
        if type(depth) is not int or not 0 < depth <= _MOST_DEPTH:
            raise ValueError(
                f"expected a number of passages from 1 to {_MOST_DEPTH}, found "
                f"{depth!r}"
            )
        is_list = isinstance(queries, list)
        if not is_list or not all(isinstance(query, str) for query in queries):
            raise ValueError("expected a list of questions that are texts")
        if len(queries) * depth > _MOST_PASSAGES:
            raise ValueError(
                f"expected at most {_MOST_PASSAGES} passages in a reply, found "
                f"{len(queries)} questions for {depth} each; ask for fewer at a time"
            )
        # Search-R1 sends what its model wrote: no question, or blank ones among others.
        written = [query for query in queries if query.strip()]
        with self._lock:
            if self._is_closed:
                raise _Closed("the server is being closed; ask another one")
            try:
                rankings = self._retriever.search(written, depth) if written else []
                ranked = dict(zip(written, rankings, strict=True))
                return [[*map(self._document, ranked.get(q, ()))] for q in queries]
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise _SearchFailed(f"the search failed: {what}") from error

    def _document(self, index: Any) -> dict[str, str]:
        contents = as_served(self.passages[int(index)])
        return {"id": str(index), "contents": contents}

    def answer(self, path: str, request: Mapping[str, Any]) -> Any:
        """Return the reply to a request, of either protocol.

        A score is the reciprocal of the rank: retrievers give an order, and what their
        own scores mean differs. Nothing under the path is a KeyError, what is not of
        the protocol a ValueError; a `_Closed` or a `_SearchFailed` may be raised.
        """
        if path == "/retrieve":
            rankings = self._rank(request.get("queries"), request.get("topk"))
            if not request.get("return_scores"):
                return {"result": rankings}
            scored = [
                [{"document": d, "score": 1 / rank} for rank, d in enumerate(row, 1)]
                for row in rankings
            ]
            return {"result": scored}
        if path not in ("/search", "/batch_search"):
            raise KeyError(path)
        query, is_single = request.get("query"), path == "/search"
        documents = self._rank([query] if is_single else query, request.get("top_n"))
        scores = [[1 / rank for rank in range(1, len(d) + 1)] for d in documents]
        reply = [documents[0], scores[0]] if is_single else [documents, scores]
        return reply if request.get("return_score") else reply[0]


class _Handler(BaseHTTPRequestHandler):
    """Reads requests and writes replies as JSON."""

    protocol_version = "HTTP/1.1"
    # Else the body waits until the client has acknowledged the head, 40 ms.
    disable_nagle_algorithm = True

    @property
    def _retrieval(self) -> RetrievalServer:
        assert isinstance(self.server, RetrievalServer)
        return self.server

    def setup(self) -> None:
        """Set how long a client may be silent."""
        super().setup()
        self.connection.settimeout(self._retrieval.client_timeout)

    def _n_bytes(self) -> int:
        """Return how long a request's body is; 0 where it does not say."""
        size = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not size.isdecimal():
            return 0
        return int(size[:20])  # more digits are too many in any case

    def do_GET(self) -> None:
        size = self.headers.get("Content-Length", "0")
        if size != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # or a body would be read as the next request
        if self.path == "/health":
            n_passages = len(self._retrieval.passages)
            self._reply(200, {"status": "ok", "n_passages": n_passages})
        else:
            self._reply(404, {"error": _PATHS})
        if self.close_connection:
            self._drop()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        n_bytes = self._n_bytes()
        if not n_bytes or n_bytes > _MOST_REQUEST_BYTES:
            expected = f"a Content-Length of at most {_MOST_REQUEST_BYTES} bytes"
            self._refuse(413 if n_bytes else 400, f"expected {expected}")
            self._drop()
            return
        try:
            request = json.loads(self.rfile.read(n_bytes))
            if not isinstance(request, dict):
                raise ValueError("expected a JSON object")
            self._reply(200, self._retrieval.answer(self.path, request))
        except KeyError:
            self._refuse(404, f"nothing is served at {self.path}")
        except (ValueError, RecursionError) as error:  # the latter of nested JSON
            self._refuse(400, str(error))
        except _Closed as error:
            self._refuse(503, str(error))
        except _SearchFailed as error:
            self._refuse(500, str(error))
            raise  # whoever serves sees where

    def _drop(self) -> None:
        """Read a body: a client that is still sending would not read the reply.

        To where the client closes, since a body in chunks does not say how long it is.
        """
        with contextlib.suppress(OSError):  # the client was faster
            self.connection.shutdown(socket.SHUT_WR)
        n_left = _MOST_DROPPED_BYTES
        while n_left > 0 and (part := self.rfile.read(min(n_left, 1 << 16))):
            n_left -= len(part)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Reply as JSON where a request is none, or of another method."""
        self._refuse(code, f"{message or explain or 'no request'}; {_PATHS}")
        self._drop()

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True
        self._reply(status, {"error": reason})

    def _reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per search would bury everything else."""

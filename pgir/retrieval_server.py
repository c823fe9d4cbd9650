"""An HTTP server that lets other programs search with a retriever.

It speaks both protocols of `pgir.retrievers`, with `/search` for FlashRAG's single
questions, and `GET /health`. It has no authentication, and by default listens only to
this machine.
"""

import contextlib
import json
import re
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
_MOST_DROPPED_BYTES = 1 << 30  # read and dropped of an unwanted body
_MOST_DEPTH = 1000  # passages for a question
_MOST_PASSAGES = 100_000  # of a reply, some 100 MB
# A Host that no other site can have.
_ADDRESS = re.compile(r"([\d.]+|\[[^]]*\]|(.+\.)?localhost)(:\d*)?", re.IGNORECASE)
_PATHS = "use POST /retrieve, /batch_search or /search, or GET /health"


class _NotServed(Exception):
    """The server cannot answer a request; has the status and the reason."""


class RetrievalServer(ThreadingHTTPServer):
    """Serves one retriever, one search at a time, in the order of the requests.

    Port 0 takes a free one, see `server_port`. `depth` is the number of passages if a
    request names none; a client that is silent for `timeout` seconds is disconnected.
    """

    daemon_threads = False  # closing waits until running searches are replied to
    # Connections that may wait; with the default of 5, some are reset.
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
        """Bind the address; `serve_forever` starts answering."""
        self._retriever, self.passages = retriever, passages
        self.client_timeout, self._is_closed = timeout, False
        self._depth, self._lock = depth, threading.Lock()
        self._connections: set[Any] = set()  # the open ones
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port}: {error.strerror}; give another host "
                "or port (port 0 takes a free one)"
            ) from error

    def server_close(self) -> None:
        """Close the address and every connection.

        A running search is finished and replied to; no other one is started, and no
        further request is waited for.
        """
        self._is_closed = True
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):  # the client has closed it already
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless a client has just disconnected."""
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
            raise ValueError("expected a list of questions, each a text")
        if len(queries) * depth > _MOST_PASSAGES:
            raise ValueError(
                f"expected at most {_MOST_PASSAGES} passages in a reply, found "
                f"{len(queries)} questions with {depth} each; ask for fewer at a time"
            )
        # Search-R1 sends what its model wrote: perhaps no question, or blank ones.
        written = [query for query in queries if query.strip()]
        with self._lock:
            if self._is_closed:
                raise _NotServed(503, "the server is shutting down; ask another one")
            try:
                rankings = self._retriever.search(written, depth) if written else []
                ranked = dict(zip(written, rankings, strict=True))
                return [[*map(self._document, ranked.get(q, ()))] for q in queries]
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise _NotServed(500, f"the search failed: {what}") from error

    def _document(self, index: Any) -> dict[str, str]:
        contents = as_served(self.passages[int(index)])
        return {"id": str(index), "contents": contents}

    def answer(self, path: str, request: Mapping[str, Any]) -> Any:
        """Return the reply to a request of either protocol.

        Scores are reciprocal ranks, since the retrievers' own scores differ in meaning.
        A KeyError means an unknown path, a ValueError a request that breaks the
        protocol; `_NotServed` may be raised too.
        """
        path = path.rstrip("/")
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
    # Else the body waits about 40 ms for the client to acknowledge the header.
    disable_nagle_algorithm = True

    @property
    def _retrieval(self) -> RetrievalServer:
        assert isinstance(self.server, RetrievalServer)
        return self.server

    def setup(self) -> None:
        """Set the time-out after which a silent client is disconnected."""
        super().setup()
        self.connection.settimeout(self._retrieval.client_timeout)

    def _n_bytes(self) -> int:
        """Return the length of a request's body; 0 if the request does not say."""
        size = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not size.isdecimal():
            return 0
        return int(size[:20])  # 20 digits are too many bytes in any case

    def do_GET(self) -> None:
        size = self.headers.get("Content-Length", "0")
        if size != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # else a body would be the next request
        if self.path == "/health":
            n_passages = len(self._retrieval.passages)
            self._reply(200, {"status": "ok", "n_passages": n_passages})
        else:
            self._reply(404, {"error": _PATHS})
        if self.close_connection:
            self._drop()

    do_HEAD = do_GET

    def _check_site(self) -> None:
        """Check that no web page has made its site's name an address of this machine.

        A browser would let the page read the passages (DNS rebinding). Only requests of
        pages have an Origin.
        """
        is_private = str(self._retrieval.server_address[0]).startswith(("127.", "::1"))
        host = self.headers.get("Host", "")
        if is_private and "Origin" in self.headers and not _ADDRESS.fullmatch(host):
            raise ValueError(
                f"expected a page of this machine, found one of {host}; let a proxy "
                "send the Host 127.0.0.1, or start the server with another host"
            )

    def do_POST(self) -> None:
        n_bytes = self._n_bytes()
        if not n_bytes or n_bytes > _MOST_REQUEST_BYTES:
            expected = f"a Content-Length of at most {_MOST_REQUEST_BYTES} bytes"
            self._refuse(413 if n_bytes else 400, f"expected {expected}")
            self._drop()
            return
        try:
            request = json.loads(self.rfile.read(n_bytes))
            self._check_site()
            if not isinstance(request, dict):
                raise ValueError("expected a JSON object")
            self._reply(200, self._retrieval.answer(self.path, request))
        except KeyError:
            self._refuse(404, f"nothing is served at {self.path}")
        except (ValueError, RecursionError) as error:  # RecursionError: deep JSON
            self._refuse(400, str(error))
        except _NotServed as error:
            self._refuse(*error.args)
            if error.__cause__ is not None:
                raise  # show the traceback on the server

    def _drop(self) -> None:
        """Read and drop a body, since a client that still sends reads no reply.

        It is read until the client closes, as a chunked body does not give its length.
        """
        with contextlib.suppress(OSError):  # the client has closed it already
            self.connection.shutdown(socket.SHUT_WR)
        n_left = _MOST_DROPPED_BYTES
        while n_left > 0 and (part := self.rfile.read(min(n_left, 1 << 16))):
            n_left -= len(part)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Reply in JSON to malformed requests and unsupported methods."""
        self._refuse(code, f"{message or explain or 'bad request'}; {_PATHS}")
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
        """Log nothing, since a line per search would bury everything else."""

"""A retrieval server that speaks Search-R1's and FlashRAG's protocols.

`/retrieve` and `/batch_search` as in `served.py`, `/search` for FlashRAG's single
questions, and `GET /health`. Made for a trusted network, as those two are: there is no
authentication, and by default only this machine is listened to.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from beatrice.extract.records import Passage
from beatrice.pgir.retrieval.corpus import as_document
from beatrice.pgir.retrieval.retrievers import Retriever

_MOST_BYTES = 16 << 20  # of a request
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
            if not 0 <= size <= _MOST_BYTES:
                raise ValueError(f"a request has at most {_MOST_BYTES} bytes")
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

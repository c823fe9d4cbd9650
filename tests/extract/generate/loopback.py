"""Shared by tests of backends: greedy answers, and a server around a backend.

The server is a minimal one for OpenAI's protocol. It also takes vLLM's extensions
(prompts as ids, `return_token_ids`) and can fail on purpose.
"""

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from beatrice.extract.generate.generator import (
    GeneratorPrompt,
    Replies,
    SamplingConfig,
    reply_files,
)
from beatrice.extract.run.files import Journal
from tests.pgir.small import serving


class Numbers:
    """A tokenizer whose words are ids."""

    chat_template = None

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


class Loopback:
    """A server's requests so far, and its planned failures."""

    def __init__(self, generator):
        self.generator = generator
        self.failures = []  # status codes, bodies or both, of the next replies
        self.requests = []
        self.is_vllm = True
        self.counts_tokens = True
        self.pause = 0.0  # minimum seconds per request
        self.trickle = 0.0  # seconds between two bytes of a reply
        self.encoding = "identity"  # named in the head of each reply
        self.location = ""  # the same
        self.encodings_wanted = []  # named by clients
        self.n_at_once = 0
        self.most_at_once = 0
        self.url = None
        self._model_lock = threading.Lock()
        self._count_lock = threading.Lock()

    @contextlib.contextmanager
    def counted(self):
        with self._count_lock:
            self.n_at_once += 1
            self.most_at_once = max(self.most_at_once, self.n_at_once)
        try:
            yield
        finally:
            with self._count_lock:
                self.n_at_once -= 1

    def planned_failure(self):
        """Return (status, body) of the next failure; None if none is left."""
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, bytes):
            return 200, failure
        if isinstance(failure, int):
            return failure, {"error": {"message": f"planned failure {failure}"}}
        return failure

    def reply(self, path, body):
        """Return (status, JSON) of one request."""
        self.requests.append((path, body))
        if (failure := self.planned_failure()) is not None:
            return failure
        if not self.is_vllm and ({"top_k", "min_p", "return_token_ids"} & body.keys()):
            return 422, {"error": {"message": "Unexpected fields in the request"}}
        is_chat = path.endswith("/chat/completions")
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        ids = tuple(text) if isinstance(text, list) else None
        known = {"text": "" if ids else text, "ids": ids, "is_chat": is_chat}
        prompt = GeneratorPrompt(**known, sample=body.get("seed", 0))
        among = {"top_p": body.get("top_p", 1.0), "top_k": body.get("top_k") or None}
        config = SamplingConfig(
            max_new_tokens=body["max_tokens"], temperature=body["temperature"], **among
        )
        with self._model_lock:
            ((_, answer),) = self.generator.stream([prompt], config)
        ends = body.get("stop_token_ids", ()), body.get("stop", ())
        if any(ends):
            answer = self.ended(answer, *ends)
        return 200, self.choice(answer, body, is_chat)

    def ended(self, answer, stop_ids, stop):
        """Return a text as vLLM ends it: at a token, or with one that ends a string."""
        decode = self.generator.backbone.tokenizer.decode
        for n, token in enumerate(answer.token_ids, start=1):
            is_stop = token in stop_ids
            if is_stop or any(x in decode(answer.token_ids[:n]) for x in stop):
                ids = answer.token_ids[: n - is_stop]
                cut = {"token_ids": ids, "text": decode(ids), "finish": "stop"}
                cut |= {"stop_id": token if is_stop else None, "n_new_tokens": n}
                cut["log_probs"] = answer.log_probs[:n]
                return msgspec.structs.replace(answer, **cut)
        return answer

    def choice(self, answer, body, is_chat):
        choice = {"index": 0, "finish_reason": answer.finish}
        if body.get("return_token_ids"):
            stop = () if answer.stop_id is None else (answer.stop_id,)
            choice["token_ids"] = [*(answer.token_ids or ()), *stop]
        if is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
            logprobs = {"content": [{"logprob": p} for p in answer.log_probs or ()]}
        else:
            choice["text"] = f" {answer.text}"
            logprobs = {"token_logprobs": answer.log_probs}
        if body.get("logprobs"):
            choice["logprobs"] = logprobs
        n_prompt, n_new = answer.n_prompt_tokens or 0, answer.n_new_tokens or 0
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
        counts = {"usage": usage} if self.counts_tokens else {}
        return {"id": "x", "model": body["model"], "choices": [choice], **counts}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        loopback = self.server.loopback
        loopback.encodings_wanted.append(self.headers["Accept-Encoding"])
        with loopback.counted():
            time.sleep(loopback.pause)
            self.send(*loopback.reply(self.path, body))

    def do_GET(self):
        listed = 200, {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self.send(*(self.server.loopback.planned_failure() or listed))

    def send(self, status, result):
        loopback, is_spoiled = self.server.loopback, isinstance(result, bytes)
        content = result if is_spoiled else json.dumps(result).encode()
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(content)}\r\n"
        head += f"Content-Encoding: {loopback.encoding}\r\n"
        head += f"Location: {loopback.location}\r\n" * bool(loopback.location)
        head += "Content-Type: application/json\r\n\r\n"
        whole = head.encode() + content
        step = 1 if loopback.trickle else len(whole)
        with contextlib.suppress(OSError):  # the client has gone
            for start in range(0, len(whole), step):
                self.wfile.write(whole[start : start + step])
                time.sleep(loopback.trickle)

    def log_message(self, *arguments):
        """Keep the test output clean."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a client opens dozens of connections at once

    def handle_error(self, request, client_address):
        """Print the error, unless a client has just disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(generator, tls=None):
    """Serve a backend on a free port of this machine, over TLS if given its context."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.loopback = loopback = Loopback(generator)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with serving(server) as url:
        loopback.url = f"{url.replace('http', 'https') if tls else url}/v1"
        yield loopback


def open_replies(path):
    return Replies(journal=Journal.open(reply_files(path)))


GREEDY = SamplingConfig(max_new_tokens=10)


def prompts_of(requests, n=None, **fields):
    return [
        GeneratorPrompt(text=r.example_id, ids=r.prompt.ids, **fields)
        for r in requests[:n]
    ]


def texts(generator, prompts, config=GREEDY):
    result = dict(generator.stream(prompts, config))
    return [result[i] for i in range(len(prompts))]


@contextlib.contextmanager
def shapes_run(backbone):
    """Collect `(n_rows, n_tokens)` of every forward through a model's first layer."""
    shapes = []
    with backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape[:2]))
    ):
        yield shapes

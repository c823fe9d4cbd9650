"""Weights are fetched from the Hub while other threads compute."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from tests.pgir.small import serving
from tests.process import run_python

COMMIT = "c" * 40
PROGRAM = """
import os, threading, urllib.request
from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.signals.precision import exact_products
def load():
    print(load_backbone("owner/name", dtype="bfloat16").revision)
loading = threading.Thread(target=load)
loading.start()
urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/asked")
with exact_products():
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/computed")
loading.join()
"""


class Hub(BaseHTTPRequestHandler):
    """Sends a model's files; its weights once the client's other thread computes."""

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        file = server.folder / path.rpartition("/")[2]
        if path == "/asked":
            assert server.asked.wait(60)
        elif path == "/computed":
            server.computed.set()
        elif "/tree/" in path:
            files = [{"path": x.name, "size": 1} for x in server.folder.iterdir()]
            rows = [{"type": "file", "oid": "0", **about} for about in files]
            return self.reply(json.dumps(rows).encode())
        elif "/resolve/" not in path or not file.is_file():
            return self.reply(b"", 404)
        elif file.suffix == ".safetensors" and self.command == "GET":
            server.asked.set()
            server.in_time.append(server.computed.wait(10))
        self.reply(file.read_bytes() if file.is_file() else b"")

    def reply(self, content, code=200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", self.path.rpartition("/")[2])  # a name in the cache
        self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        """Keep the test output clean."""


@pytest.mark.parametrize("shard_size", ["1GB", "1MB"])
def test_a_thread_computes_while_another_fetches_weights(tmp_path, shard_size):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.in_time = tmp_path / "model", []
    server.asked, server.computed = threading.Event(), threading.Event()
    shutil.copytree(WEIGHTS, server.folder)
    (server.folder / "model.safetensors").unlink()
    model = load_backbone(WEIGHTS).model
    model.save_pretrained(server.folder, max_shard_size=shard_size)
    with serving(server) as url:
        where = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        done = run_python(PROGRAM, HF_HUB_CACHE=str(tmp_path / "cache"), **where)
    assert done.stdout.strip() == COMMIT and server.in_time[0]

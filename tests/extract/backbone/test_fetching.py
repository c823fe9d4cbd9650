"""What is fetched from the Hub, and that other threads compute meanwhile."""

import contextlib
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


@contextlib.contextmanager
def hub(folder):
    """Serve a model's files; yield the server, and the environment to fetch them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.in_time = folder / "model", []
    server.asked, server.computed = threading.Event(), threading.Event()
    where = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
    with serving(server) as url:
        yield server, {**where, "HF_ENDPOINT": url, "NO_PROXY": "*"}


@pytest.mark.parametrize("shard_size", ["1GB", "1MB"])
def test_a_thread_computes_while_another_fetches_weights(tmp_path, shard_size):
    folder = shutil.copytree(WEIGHTS, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    load_backbone(WEIGHTS).model.save_pretrained(folder, max_shard_size=shard_size)
    with hub(tmp_path) as (server, where):
        done = run_python(PROGRAM, **where)
    assert done.stdout.strip() == COMMIT and server.in_time[0]


def test_an_adapter_on_the_hub_is_refused_if_nothing_is_cached_yet(tmp_path):
    folder = shutil.copytree(WEIGHTS, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    program = """
from beatrice.extract.backbone import loading
for load in (loading.load_backbone, loading.load_outline):
    try:
        load(f'owner/{load.__name__}')
    except ValueError as error:
        print(error)
"""
    with hub(tmp_path) as (_, where):
        lines = run_python(program, **where).stdout.splitlines()
    for name, line in zip(("load_backbone", "load_outline"), lines, strict=True):
        assert f"{name}': expected complete weights, found an adapter" in line

"""A probe on the Hub: what a push replaces and leaves, and loading from the cache."""

import contextlib
import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import beatrice
from beatrice.extract.run.files import CHECKSUMS
from beatrice.probe import PROBES
from tests.pgir.small import serving
from tests.process import call, run_python

COMMIT = "c" * 40
MODEL = ["config.json", "model.safetensors"]
PROBE = ["config.json", "probe.safetensors", "README.md", CHECKSUMS]


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that publishing needs; repositories hold only file names."""

    def do_GET(self):
        if self.server.page:
            return self.reply(self.server.page)
        name = self.path.split("/tree/")[0].removeprefix("/api/models/")
        files = self.server.repositories.get(name)
        rows = [{"type": "file", "path": n, "size": 1, "oid": "0"} for n in files or ()]
        self.reply(rows, 404 if files is None else 200)

    def do_CONNECT(self):
        self.reply({}, 407)  # like a proxy that wants a password

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/repos/create":
            about = json.loads(content)
            name = f"{about.get('organization', 'me')}/{about['name']}"
            is_asked = {"private", "visibility"} & {*about}  # client versions differ
            self.server.created.append((name, bool(is_asked)))
            known = name in self.server.repositories
            self.server.repositories.setdefault(name, [".gitattributes"])
            url = f"http://{self.headers['Host']}/{name}"
            self.reply({"url": url}, 409 if known else 200)
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(content)["files"]]
            usual = {"uploadMode": "regular", "shouldIgnore": False}
            self.reply({"files": [{"path": name, **usual} for name in names]})
        elif "/commit/" in self.path:
            rows = [json.loads(line) for line in content.splitlines()]
            names = [x["value"]["path"] for x in rows if x["key"] == "file"]
            deleted = {x["value"]["path"] for x in rows if "deleted" in x["key"]}
            name = self.path.split("/commit/")[0].removeprefix("/api/models/")
            files = self.server.repositories[name]
            self.server.repositories[name] = [*({*files} - deleted), *names]
            url = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
            self.reply({"commitUrl": url, "commitOid": COMMIT})
        else:
            self.reply({"errors": [], "warnings": []})

    def reply(self, value, code=200):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Keep the test output clean."""


@contextlib.contextmanager
def a_hub(**repositories):
    """Run a Hub with repositories of `acme`; yield it and the variables to reach it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories = {f"acme/{k}": list(v) for k, v in repositories.items()}
    server.created, server.page = [], b""  # sent in place of every reply
    with serving(server) as url:
        where = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        yield server, {**where, "HF_TOKEN": "hf_nobody"}


PUSH = """
import beatrice, sys
probe = beatrice.load("embedded")
for name in sys.argv[1:]:
    options = {"private": True} if name == "acme/hidden" else {}
    try:
        print(probe.push(name, **options))
    except ValueError as error:
        print(error)
"""


def test_a_push_replaces_only_a_probe_and_leaves_privacy_to_the_owner():
    page, ours = ["README.md", "LICENSE"], [*PROBE, "figures/roc.png"]
    with a_hub(model=MODEL, probe=ours, page=page) as (hub, where):
        names = [f"acme/{x}" for x in ("model", "probe", "page", "new", "hidden")]
        lines = run_python(PUSH, *names, **where).stdout.splitlines()
    assert "hf://acme/model holds something else ('config.json')" in lines[0]
    assert lines[1:] == [COMMIT] * 4
    assert hub.repositories["acme/model"] == MODEL
    assert {*PROBE} < {*hub.repositories["acme/new"]}
    assert {*ours} <= {*hub.repositories["acme/probe"]}
    assert {*PROBE, *page} <= {*hub.repositories["acme/page"]}
    assert hub.created == [(name, name == "acme/hidden") for name in names]


def test_an_unreachable_hub_is_reported_in_one_sentence():
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = run_python(PUSH, "acme/new", NO_PROXY="*", **nobody)
    (line,) = done.stdout.splitlines()
    assert line.startswith("hf://acme/new: ") and "can be reached" in line


def test_a_proxy_of_an_unknown_kind_is_reported_in_one_sentence():
    words = "score --probe hf://acme/new --question q?".split()
    proxy = {"ALL_PROXY": "socks5://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = call(*words, code=1, NO_PROXY="", **proxy)
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr


def test_a_cached_probe_loads_despite_a_refusing_proxy_and_other_files(tmp_path):
    repository = tmp_path / "models--acme--probe"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(PROBES / "embedded", snapshot)
    (snapshot / "onnx").mkdir()
    (snapshot / "onnx" / "model.onnx").write_text("another tool's")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    program = "import beatrice; print(beatrice.load('hf://acme/probe'))"
    with a_hub() as (hub, where):
        proxy = {"HTTPS_PROXY": where["HF_ENDPOINT"], "HF_ENDPOINT": "https://hub"}
        cache = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = run_python(program, **proxy, **cache)
        hub.page = b"<html>log in to this network</html>"
        in_hotel = run_python(program, **{**where, **cache})
    assert "fitted on embedded" in done.stdout == in_hotel.stdout


def test_a_damaged_download_is_to_be_deleted_with_the_files_it_links_to(tmp_path):
    repository = tmp_path / "models--acme--probe"
    folder = shutil.copytree(PROBES / "embedded", repository / "snapshots" / COMMIT)
    (folder / "config.json").write_text("{}")
    words = f"score --probe hf://acme/probe@{COMMIT} --question q?".split()
    done = call(*words, code=1, HF_HUB_CACHE=str(tmp_path))
    assert done.stderr.endswith(f"; delete {repository}, and load it again\n")


def test_a_licence_next_to_a_probe_does_not_count_as_damage(tmp_path):
    folder = shutil.copytree(PROBES / "embedded", tmp_path / "clone")
    for name in ("LICENSE", "NOTICE"):
        (folder / name).write_text("terms")
    assert beatrice.load(folder).layer is not None


def test_a_part_of_a_probe_and_a_file_of_it_are_named_as_such(tmp_path):
    folder = shutil.copytree(PROBES / "embedded", tmp_path / "probe")
    with pytest.raises(ValueError, match="is a file; give the folder that holds it"):
        beatrice.load(folder / "config.json")
    for name in ("probe.safetensors", "eval.json"):  # not yet downloaded
        (folder / name).unlink()
    with pytest.raises(ValueError, match="is missing; copy the folder again"):
        beatrice.load(folder)

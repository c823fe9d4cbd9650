"""Five hundred questions answered here and by servers: the greedy texts are alike."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.generator import GeneratorPrompt
from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.generate.requests import make_requests
from beatrice.extract.generate.server import ServedGenerator, ServerConfig
from tests.extract.generate.generating import texts
from tests.extract.generate.loopback import served
from tests.extract.small_run import questions


def five_hundred(local):
    made = questions(n_train=1, n_evaluation=260, n_ood=100)
    examples = [e for e in made if e.split != "train"][:500]
    requests = make_requests(examples, local.backbone, PromptConfig(), 10).requests
    assert len(examples) == 500
    return requests


def same_texts(local, generator, requests):
    """Return how many greedy texts are the same here and there."""
    tokenizer = local.backbone.tokenizer
    prompts = [
        GeneratorPrompt(
            text=tokenizer.decode(r.prompt.ids, skip_special_tokens=True),
            ids=r.prompt.ids,
        )
        for r in requests
    ]
    assert all(tuple(tokenizer(p.text)["input_ids"]) == p.ids for p in prompts), (
        "a server that takes text reads other ids"
    )
    here, there = (texts(backend, prompts) for backend in (local, generator))
    return sum(a.text == b.text for a, b in zip(here, there, strict=True))


@pytest.mark.slow
def test_five_hundred_questions_are_answered_alike_here_and_over_loopback(local):
    requests = five_hundred(local)
    with (
        served(local) as loopback,
        ServedGenerator(
            ServerConfig(
                url=loopback.url, model="microworld", n_concurrent=4, n_retries=0
            ),
            (2,),
        ) as generator,
    ):
        n_same = same_texts(local, generator, requests)
    print(f"{n_same} of {len(requests)} greedy texts are identical")
    assert n_same == len(requests) >= 500


@contextlib.contextmanager
def transformers_serve():
    """Start `transformers serve` on a free port; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    options = f"--device cpu --dtype float32 --host 127.0.0.1 --port {port}".split()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(WEIGHTS), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def wait_until_healthy(url, process):
    for _ in range(600):
        assert process.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(url) as reply:
                assert reply.status == 200
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server was not ready in five minutes")


@pytest.mark.slow
def test_five_hundred_questions_are_answered_alike_by_transformers_serve(local):
    """A server that this project did not write; needs transformers[serving]."""
    for name in ("fastapi", "uvicorn", "accelerate"):
        pytest.importorskip(name, reason="pip install 'transformers[serving]'")
    requests = five_hundred(local)
    with (
        transformers_serve() as url,
        ServedGenerator(
            ServerConfig(
                url=url,
                model=str(WEIGHTS),
                dialect="openai",
                n_concurrent=1,
                n_retries=8,
            )
        ) as generator,
    ):
        n_same = same_texts(local, generator, requests)
    print(f"{n_same} of {len(requests)} greedy texts are identical")
    assert n_same == len(requests) >= 500

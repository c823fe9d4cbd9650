"""A server as a backend: its texts, failures, spending and keys."""

import contextlib
import copy
import dataclasses
import gzip
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import click
import msgspec
import openai
import pytest
from tokenizers import AddedToken

from beatrice.doctor import look_at_server
from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.commands import open_generator
from beatrice.extract.generate.answers import (
    answer_identity,
    load_tokenizer_only,
    record_backend,
)
from beatrice.extract.generate.generator import (
    GeneratorPrompt,
    SamplingConfig,
    reply_key,
    tokenizer_identity,
)
from beatrice.extract.generate.local import TransformersGenerator, stop_ids
from beatrice.extract.generate.options import BackendOptions, ServerOptions
from beatrice.extract.generate.prompts import (
    ANSWER_PRESETS,
    TEMPLATE_FIELDS,
    make_requests,
)
from beatrice.extract.generate.server import (
    Account,
    ServedGenerator,
    SpendingCapReached,
    seconds_before_retry,
)
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.label.labels import ConsensusConfig, judge_answers
from beatrice.extract.label.rewrite import (
    RewriteConfig,
    count_rewrites,
    rewrite_contexts,
)
from beatrice.extract.records import Passage, write_lines
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
from tests.extract.generate.loopback import (
    GREEDY,
    open_replies,
    prompts_of,
    served,
    texts,
)
from tests.extract.small_run import questions, smoke
from tests.process import run_python
from tests.records import an_answer, an_example

QUESTION = GeneratorPrompt(text="Question: who? Answer:")
PASSAGE = Passage(title="Ada", text="Ada wrote it.")
THREE_IDS = GeneratorPrompt(text="x", ids=(3, 4, 5))
ENDING_TURNS = "{% for m in messages %}{{ m['content'] }}<s>{% endfor %}"


@pytest.fixture
def server(local):
    with served(local) as loopback:
        yield loopback


@pytest.fixture
def client(server):
    """Return a function that makes clients of the server."""
    with contextlib.ExitStack() as stack:

        def make(log_probs=False, **config):
            options = ServerOptions(**{"server": server.url, "retries": 0} | config)
            generator = ServedGenerator(
                "microworld", options, stop_ids=(2,), log_probs=log_probs
            )
            return stack.enter_context(generator)

        yield make


def test_served_greedy_texts_ids_and_log_probs_are_the_local_ones(
    local, client, requests
):
    prompts = prompts_of(requests, 10)
    there = texts(client(log_probs=True), prompts)
    for a, b in zip(texts(local, prompts), there, strict=True):
        assert b.log_probs == pytest.approx(a.log_probs, abs=2e-4)
        assert msgspec.structs.replace(b, log_probs=a.log_probs) == a
        assert a.finish == "stop"


def test_a_chat_message_is_answered_and_thinking_is_off(client, server, local):
    prompt = GeneratorPrompt(text="Question: who? Answer:", is_chat=True)
    (reply,), (here,) = texts(client(log_probs=True), [prompt]), texts(local, [prompt])
    assert reply.text == here.text
    assert reply.log_probs == pytest.approx(here.log_probs, abs=2e-4)
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    # Switched off by every name that local chat templates get.
    assert body["chat_template_kwargs"] == TEMPLATE_FIELDS
    assert not TEMPLATE_FIELDS["thinking"] and not TEMPLATE_FIELDS["enable_thinking"]
    assert body["temperature"] == 0


def test_a_plain_server_gets_only_text_and_standard_fields(client, server, local):
    server.is_vllm = False
    (reply,) = texts(client(dialect="openai"), [QUESTION])
    assert reply.text == texts(local, [QUESTION])[0].text
    assert (reply.token_ids, reply.log_probs, reply.stop_id) == (None, None, None)
    with pytest.raises(ValueError, match="422.*dialect 'openai'"):
        texts(client(), [QUESTION])
    sampling = SamplingConfig(temperature=1.0, top_k=5)
    with pytest.raises(ValueError, match="top_k is not a field.*--set top_k=0"):
        texts(client(dialect="openai"), [QUESTION], sampling)


@pytest.mark.parametrize("param", ["max_tokens", "temperature"])
def test_a_reasoning_model_gets_only_fields_that_it_takes_and_is_not_sampled(
    client, server, param
):
    message = GeneratorPrompt(text="who?", is_chat=True)
    server.failures = [(400, {"error": {"message": "not supported", "param": param}})]
    with pytest.raises(ValueError, match="need the dialect 'openai-reasoning'"):
        texts(client(dialect="openai"), [message])
    generator = client(dialect="openai-reasoning")
    choice = {"finish_reason": "stop", "message": {"content": "Ada"}}
    server.failures = [(200, {"choices": [choice]})]
    assert texts(generator, [message])[0].text == "Ada"
    _, body = server.requests[-1]
    assert body.keys() == {"model", "messages", "max_completion_tokens"}
    assert body["max_completion_tokens"] == GREEDY.max_new_tokens
    with pytest.raises(ValueError, match="take no temperature"):
        texts(generator, [message], SamplingConfig(temperature=1.0))


LATE_ERROR = {"error": {"message": "overloaded", "code": 502}}  # with status 200


@pytest.mark.parametrize(
    "status",
    [429, 500, 503, 408, b'{"id": "1', b"", b'"\xff"', json.dumps(LATE_ERROR).encode()],
)
def test_a_request_is_repeated_after_a_failure_of_the_server(client, server, status):
    server.failures = [status, status]
    (reply,) = texts(client(retries=2), [QUESTION])
    assert reply.text and len(server.requests) == 3


def busy(asked):
    headers = {"retry-after": asked}
    reply = SimpleNamespace(headers=headers, status_code=429, request=None)
    return openai.APIStatusError("busy", response=reply, body=None)


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("7", 7, 7),
        ("100", 100, 100),
        ("1e9", 600, 600),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 600, 600),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 1),
        ("Wed, 99 Oct 2015 07:28:00 GMT", 0, 1),
        ("nan", 0, 1),
        ("", 0, 1),
    ],
)
def test_a_retry_waits_as_long_as_the_server_asks_up_to_the_time_out(
    asked, least, most
):
    assert least <= seconds_before_retry(busy(asked), 0, 600.0) <= most


def test_the_pause_before_a_retry_grows_up_to_eight_seconds():
    first, later, last = (seconds_before_retry(busy(""), n, 9.0) for n in (0, 4, 5000))
    assert first <= 0.5 and 6 <= min(later, last) and max(later, last) <= 8


def test_a_retry_waits_for_the_date_that_the_server_gives():
    date = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    assert 80_000 < seconds_before_retry(busy(date), 0, 1e6) <= 86_400


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b'{"id": "1', "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"hello": "world"}', "0 choices, expected 1"),
        (json.dumps(LATE_ERROR).encode(), "its reply is an error: overloaded"),
        ((401, {"error": "Unauthorized"}), "status 401: Unauthorized"),  # of vLLM
        ((404, {"detail": "Not Found"}), "status 404: {'detail': 'Not Found'}"),
        ((503, b"<html>busy</html>"), "status 503: <html>busy</html>"),
        (
            b'{"choices": [{"finish_reason": "content_filter", "text": "x"}]}',
            "for the reason 'content_filter'",
        ),
    ],
)
def test_a_reply_without_an_answer_is_refused(client, server, reply, words):
    server.failures = [reply]
    with pytest.raises(ValueError, match=f"server {server.url}.*{words}"):
        texts(client(), [QUESTION])


@pytest.mark.parametrize(
    ("text", "is_chat", "least", "most"),
    [
        ("word " * 50, True, 50, 10**6),
        ("首都是北京。" * 40, True, 51, 10**6),  # marks, and a quarter of the rest
        ("word " * 50, False, 30, 30),
    ],
)
def test_a_server_that_cuts_a_prompt_or_adds_to_a_text_is_refused(
    client, server, text, is_chat, least, most
):
    more = {"is_chat": True} if is_chat else {"ids": (5,) * 30}
    prompt = GeneratorPrompt(text=text, **more)
    generator = client(dialect="openai")

    def read(n_tokens, n_cached=None):
        choice = {"finish_reason": "stop", "text": "x", "message": {"content": "x"}}
        usage = {"prompt_tokens": n_tokens, "completion_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": n_cached}
        server.failures = [(200, {"choices": [choice], "usage": usage})]
        return texts(generator, [prompt])

    for n_tokens in (0, least, most):
        assert read(n_tokens)
    for n_tokens in (least - 1,) if is_chat else (least - 1, most + 1):
        with pytest.raises(ValueError, match=r"it read \d+ tokens"):
            read(n_tokens)
    assert read(least - 1, n_cached=1)


def test_log_probs_are_read_in_both_layouts_and_count_as_missing_if_one_is(
    client, server
):
    choice = {"finish_reason": "length", "text": "a b", "token_ids": [5, 6]}
    entries = [{"token": "x", "logprob": p} for p in (-0.5, -0.1)]  # of llama.cpp
    for logprobs, expected in (
        ({"token_logprobs": [-0.5, -0.1]}, (-0.5, -0.1)),
        ({"content": entries}, (-0.5, -0.1)),
        ({"content": entries[1:]}, None),
        ({"token_logprobs": [-0.5, None]}, None),
    ):
        server.failures = [(200, {"choices": [{**choice, "logprobs": logprobs}]})]
        assert texts(client(), [QUESTION])[0].log_probs == expected


@pytest.mark.parametrize(
    ("ids", "reason", "expected"),
    [
        ([7, 9], 9, ((7,), 9)),
        ([7], 9, ((7,), 9)),
        ([7, 2], None, ((7,), 2)),
        ([7], None, ((7,), 2)),
        ([7], "\n", ((7,), None)),
        ([7, 1], True, ((7, 1), 2)),
        ([7], [9], ((7,), 2)),
    ],
)
def test_the_token_that_ended_a_text_is_the_one_that_the_server_names(
    client, server, ids, reason, expected
):
    """Otherwise the model's only one, unless the text ended at a string."""
    choice = {"finish_reason": "stop", "text": "a", "token_ids": ids}
    server.failures = [(200, {"choices": [{**choice, "stop_reason": reason}]})]
    (reply,) = texts(client(), [QUESTION])
    assert (reply.token_ids, reply.stop_id) == expected


FILTER = {"message": "triggered a policy", "code": "content_filter"}


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"finish_reason": "content_filter", "message": {"content": ""}}]},
        {"choices": [{"finish_reason": "tool_calls", "message": {"content": None}}]},
        {"error": FILTER},
    ],
)
def test_withheld_replies_are_counted_and_give_no_verdict_and_no_rewrite(
    client, server, tmp_path, reply
):
    withheld = (400 if "error" in reply else 200, reply)
    example = an_example(question="who?", golds=("Ada",), passages=(PASSAGE,))
    generator, replies = client(), open_replies(tmp_path / "judge.jsonl")
    server.failures = [withheld] * 9
    answers, config = [an_answer(example_id=example.id)], ConsensusConfig()
    judged = judge_answers(answers, [example], generator, replies, config)
    assert judged.labels[0].verdicts == ("unparsable",) * 3
    assert (judged.n_retried, judged.n_unparsable) == (6, 3)
    server.failures, replies = [withheld], open_replies(tmp_path / "rewrite.jsonl")
    rewrites = rewrite_contexts([example], generator, replies, RewriteConfig())
    assert rewrites[0].reason == "the server withheld the rewrite"
    assert count_rewrites(rewrites)["n_failed"] == 1
    server.failures = [withheld]
    with pytest.raises(ValueError, match=f"server {server.url}.*, question 'q7'"):
        texts(generator, [GeneratorPrompt(text="who?", is_chat=True, name="q7")])


UNIT_PRICES = {"price_prompt": 1e6, "price_new": 1e6}


@pytest.mark.parametrize(
    ("choice", "usage"),
    [
        ({"token_ids": "ab"}, {}),
        ({"token_ids": {"0": 5}}, {}),
        ({"token_ids": [1.5]}, {}),
        ({"token_ids": [-1]}, {}),
        ({"stop_reason": -1}, {}),
        ({"text": "a\ud800"}, {}),
        ({}, {"prompt_tokens": "3"}),
        ({}, {"completion_tokens": -2}),
    ],
)
def test_a_reply_with_wrong_types_is_refused_and_booked_at_the_maximum(
    client, server, choice, usage
):
    """Negative counts would return money and so exceed the cap."""
    choice = {"finish_reason": "stop", "text": "x", "token_ids": [5, 2]} | choice
    usage = {"prompt_tokens": 3, "completion_tokens": 2} | usage
    server.failures = [json.dumps({"choices": [choice], "usage": usage}).encode()]
    generator = client(**UNIT_PRICES)
    with pytest.raises(ValueError, match=f"server {server.url}.* protocol"):
        texts(generator, [THREE_IDS])
    assert generator.account.spent == 3 + GREEDY.max_new_tokens


def test_an_attempt_that_timed_out_is_booked_at_the_maximum(client, server):
    server.pause = 0.4
    slow = client(**UNIT_PRICES, retries=1, timeout=0.1)
    with pytest.raises(ValueError, match="no answer .retries: 1;"):
        texts(slow, [THREE_IDS])
    time.sleep(1.0)  # the server records a request after its pause
    assert len(server.requests) == 2  # OpenAI's client does not retry as well
    assert slow.account.spent == 2 * (3 + GREEDY.max_new_tokens)


def test_requests_that_a_server_refuses_or_never_gets_cost_nothing(client, server):
    server.failures = [429, 400]
    refused = client(**UNIT_PRICES, retries=3)
    with pytest.raises(ValueError, match="status 400: .*planned failure 400"):
        texts(refused, [THREE_IDS])
    assert len(server.requests) == 2  # 400 is not retried
    absent = client(**UNIT_PRICES, server="http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match="is it running"):
        texts(absent, [THREE_IDS])
    assert refused.account.spent == absent.account.spent == 0


def test_a_request_that_a_gateway_gives_up_is_booked_at_the_maximum(client, server):
    """The model behind the gateway goes on writing, a separate text per attempt."""
    server.failures = [504, 502, 408]
    generator = client(**UNIT_PRICES, retries=3)
    (reply,) = texts(generator, [THREE_IDS])
    last = reply.n_prompt_tokens + reply.n_new_tokens
    assert generator.account.spent == 3 * (3 + GREEDY.max_new_tokens) + last


def test_a_key_that_the_server_repeats_is_kept_out_of_messages(
    client, server, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "planned")  # a word in this server's failures
    server.failures = [401]
    with pytest.raises(ValueError, match="status 401: .*failure 401") as caught:
        texts(client(), [GeneratorPrompt(text="x")])
    assert "planned" not in str(caught.value)
    server.failures = [401]
    (finding,) = look_at_server(server.url)
    assert "… failure 401" in finding.text and "planned" not in finding.text


def test_a_compressed_reply_which_may_fill_the_memory_is_refused_unread(client, server):
    server.encoding, server.failures = "gzip", [gzip.compress(b" " * (80 << 20), 1)]
    with pytest.raises(ValueError, match="its reply is compressed .gzip"):
        texts(client(), [QUESTION])
    assert server.encodings_wanted == ["identity"]


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed_but_named(client, server, status):
    server.failures, server.location = [status], "https://elsewhere.example/v1"
    with pytest.raises(ValueError, match=f"{status}: .*redirects to {server.location}"):
        texts(client(), [QUESTION])


def test_a_key_is_sent_without_the_line_feed_of_its_file(client, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-file\n")
    assert texts(client(), [GeneratorPrompt(text="x")])[0].text
    (finding,) = look_at_server(server.url)
    assert finding.status == "ok"


@pytest.mark.parametrize(
    ("name", "value", "url", "words"),
    [
        ("SSL_CERT_FILE", "/no/such/file", "http://x/v1", "No such file"),
        ("ALL_PROXY", "socks://me:hush@x:1080", "http://x/v1", "Unknown scheme"),
        ("ALL_PROXY", "http://me:hu/sh@x:1080", "http://x/v1", "invalid URL"),
        ("ALL_PROXY", "", "http://[::1/v1", "Invalid IPv6 URL"),
        ("ALL_PROXY", "", "http://localhost:80000/v1", "Port out of range"),
    ],
)
def test_a_url_proxy_or_certificate_that_cannot_be_used_is_named_and_no_secret_shown(
    client, monkeypatch, name, value, url, words
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"no request .*{words}.*{name}") as refused:
        client(server=url)
    (finding,) = look_at_server(url)
    assert finding.status == "problem" and str(refused.value) in finding.text
    assert "hu" not in finding.text


@pytest.mark.parametrize("key", ["sk-\u201cquoted\u201d", "sk-one\nsk-two"])
def test_a_key_that_cannot_be_in_a_header_is_refused_before_anything_is_sent(
    client, server, monkeypatch, key
):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(
        ValueError, match="OPENAI_API_KEY: expected a key of"
    ) as refused:
        client()
    (finding,) = look_at_server(server.url)
    assert finding.status == "problem" and str(refused.value) in finding.text
    assert "sk-" not in finding.text and server.requests == []


def test_a_request_that_a_proxy_refuses_to_pass_on_costs_nothing(
    client, server, monkeypatch
):
    monkeypatch.setenv("HTTPS_PROXY", server.url)  # it does not know CONNECT
    generator = client(server="https://far.invalid/v1", **UNIT_PRICES)
    with pytest.raises(ValueError, match="no answer .retries: 0; .*501"):
        texts(generator, [THREE_IDS])
    assert generator.account.spent == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the key")
def test_a_certificate_that_does_not_verify_is_reported_and_not_retried(tmp_path):
    words = (
        "req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key -out cert"
    )
    line = ["openssl", *words.split()]
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with served(None, context) as loopback:
        (finding,) = look_at_server(loopback.url)
        options = ServerOptions(server=loopback.url, retries=9)
        with ServedGenerator("m", options) as generator:
            with pytest.raises(ValueError, match="retries: 0") as refused:
                texts(generator, [QUESTION])
    for text in (finding.text, str(refused.value)):
        assert "certificate verify failed" in text and "SSL_CERT_FILE" in text


def test_as_many_requests_overlap_as_concurrency_allows(client, server, requests):
    server.pause = 0.05
    texts(client(concurrency=3), prompts_of(requests, 9))
    assert server.most_at_once == 3


def test_closing_the_stream_stops_the_requests(client, server, requests):
    server.pause = 0.02
    stream = client(concurrency=2).stream(prompts_of(requests, 30), GREEDY)
    next(stream)
    stream.close()
    n_sent = len(server.requests)
    time.sleep(0.1)
    assert n_sent == len(server.requests) <= 4


def test_the_spending_cap_stops_before_it_is_crossed_and_a_higher_one_continues(
    client, server, requests, tmp_path
):
    prompts = prompts_of(requests, 20)
    replies = open_replies(tmp_path / "r.jsonl")
    capped = client(**UNIT_PRICES, max_cost=120.0, concurrency=4)
    with pytest.raises(SpendingCapReached, match="spending cap of 120"):
        replies.generate(capped, prompts, GREEDY)
    n_tokens = sum(r.n_prompt_tokens + r.n_new_tokens for r in replies.journal.values())
    assert 0 < n_tokens <= 120
    assert capped.account.spent == pytest.approx(n_tokens)
    n_before, n_sent = len(replies.journal), len(server.requests)
    richer = client(**UNIT_PRICES, max_cost=10_000.0)
    again = open_replies(tmp_path / "r.jsonl")
    assert len(again.generate(richer, prompts, GREEDY)) == 20
    assert again.n_reused == n_before
    assert again.n_new == 20 - n_before == len(server.requests) - n_sent


def test_rounding_errors_of_a_sum_do_not_reach_the_cap_early():
    account = Account(ServerOptions(server="http://x", price_new=1e5, max_cost=5.0))
    for _ in range(20):  # of 0.2, whose sum is 4.000000000000001
        account.book(account.reserve(0, 2), 0, 2)
    account.reserve(0, 10)
    with pytest.raises(SpendingCapReached):
        account.reserve(0, 1)


def test_a_request_that_the_cap_may_not_allow_waits_for_those_under_way(
    client, server, requests
):
    server.pause, prompts = 0.02, prompts_of(requests, 12)
    free, wide = client(**UNIT_PRICES), {"concurrency": 4}
    texts(free, prompts)
    most = free.account.spent + GREEDY.max_new_tokens  # for one too many at a time
    capped = client(**UNIT_PRICES, **wide, max_cost=most)
    texts(capped, prompts)
    assert capped.account.spent == free.account.spent


def test_a_server_that_trickles_is_left_at_the_time_out(client, server, requests):
    server.trickle = 0.1  # seconds per byte, some 60 per reply
    began = time.monotonic()
    with pytest.raises(ValueError, match="no answer .retries: 0; DeadlineExceeded"):
        texts(client(timeout=1.0), prompts_of(requests, 2))
    assert time.monotonic() - began < 20


def test_the_doctor_leaves_a_trickling_server_at_the_time_out(server):
    (finding,) = look_at_server(server.url)
    assert (finding.status, finding.text) == ("ok", f"{server.url} serves m")
    server.failures = [(200, {"data": [{"name": "x"}]})]
    (finding,) = look_at_server(server.url)
    assert finding.text.endswith("serves None")
    server.trickle, began = 0.1, time.monotonic()
    (finding,) = look_at_server(server.url, timeout=1.0)
    assert finding.status == "problem" and "does not list its models" in finding.text
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(("text", "n_booked"), [("x", 13), ("", 3)])
def test_a_text_whose_tokens_the_server_does_not_count_is_booked_at_the_maximum(
    client, server, text, n_booked
):
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    choice = {"finish_reason": "stop", "text": text}
    server.failures = [(200, {"choices": [choice], "usage": usage})]
    generator = client(**UNIT_PRICES)
    (reply,) = texts(generator, [THREE_IDS])
    assert generator.account.spent == sum(reply.booked) == n_booked
    assert reply.n_prompt_tokens is None


def test_everything_known_about_a_server_and_its_tokenizer_is_in_its_keys(tmp_path):
    with RunDir.open(tmp_path / "run", smoke()) as run:
        tokenizer = load_tokenizer_only(run)[0].tokenizer

    def key(name="m", tokenizer=tokenizer, log_probs=False, stop_ids=(), **changed):
        options = ServerOptions(server="http://x/v1", **changed)
        known = {"log_probs": log_probs, "tokenizer": tokenizer, "stop_ids": stop_ids}
        with ServedGenerator(name, options, **known) as generator:
            return reply_key(generator.identity, QUESTION, GREEDY)

    known = {"revision": "r", "served_dtype": "bfloat16", "dialect": "openai"}
    keys = [key(), key("n"), key(log_probs=True), key(tokenizer=None)]
    keys += [key(stop_ids=(2,)), key(stop_ids=(2, 3))]
    keys += [key(**{name: value}) for name, value in known.items()]
    assert key() == keys[0]
    # This dialect sends no stop tokens, so they change none of its texts.
    assert key(stop_ids=(2,), dialect="openai") == key(dialect="openai")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    keys.append(key())
    tokenizer.add_tokens(["<another>"])
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert None not in tokenizer_identity(tokenizer).values()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ServerOptions(server="http://x", max_cost=1.0), "needs prices"),
        (lambda: SamplingConfig(temperature=-1), "temperature"),
        (lambda: SamplingConfig(temperature=float("nan")), "temperature"),
        (lambda: SamplingConfig(top_p=0), "top_p"),
        (lambda: SamplingConfig(top_k=0), "top_k"),
        (lambda: SamplingConfig(max_new_tokens=0), "max_new_tokens"),
        (lambda: GeneratorPrompt(text="x", ids=(1,), is_chat=True), "given as text"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(make, words):
    with pytest.raises((ValueError, click.BadParameter, click.UsageError)) as refused:
        make()
    assert words in str(refused.value)


def test_sampling_parameters_reach_the_server_with_a_seed_per_draw(
    client, server, requests
):
    sent = {"temperature": 0.7, "top_p": 0.9, "top_k": 7}
    config = SamplingConfig(max_new_tokens=4, seed=1, **sent)
    (prompt,) = prompts_of(requests, 1)
    texts(client(), [dataclasses.replace(prompt, sample=k) for k in range(3)], config)
    bodies = [body for _, body in server.requests]
    assert all(sent.items() <= body.items() for body in bodies)
    assert len({body["seed"] for body in bodies}) == 3


@contextlib.contextmanager
def transformers_serve():
    """Start `transformers serve` on a free port; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    options = f"--device cpu --dtype float32 --host 127.0.0.1 --port {port}".split()
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(WEIGHTS), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 300
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url) as reply:
        return reply.status == 200


@pytest.mark.slow
def test_five_hundred_questions_are_answered_alike_by_transformers_serve(local):
    """A server that this project did not write; needs transformers[serving]."""
    for name in ("fastapi", "uvicorn", "accelerate"):
        pytest.importorskip(name, reason="pip install 'transformers[serving]'")
    every = questions(n_train=1, n_evaluation=260, n_ood=100)
    requests = make_requests(every, local.backbone, PromptConfig(), 10).requests
    prompts = [GeneratorPrompt(text=x.prompt.text, ids=x.prompt.ids) for x in requests]
    assert len(prompts) >= 500
    with transformers_serve() as url:
        known = {"dialect": "openai", "concurrency": 1, "retries": 8}
        with ServedGenerator(str(WEIGHTS), ServerOptions(server=url, **known)) as there:
            replies = texts(there, prompts)
    assert [x.text for x in replies] == [x.text for x in texts(local, prompts)]


@pytest.mark.parametrize(
    ("wanted", "dtype"), [(None, "float32"), ("bfloat16", "bfloat16")]
)
def test_a_local_backend_is_float32_unless_another_dtype_is_given(wanted, dtype):
    with open_generator("embedded", BackendOptions(model_dtype=wanted)) as generator:
        assert generator.identity["dtype"] == dtype


def test_the_tokens_that_end_a_text_are_found_without_weights(tmp_path):
    """Without generation defaults in the config; a template's end of turn is added."""
    model = shutil.copytree(WEIGHTS, tmp_path / "model")
    (model / "generation_config.json").unlink()
    with RunDir.open(tmp_path / "run", smoke(model)) as run:
        assert load_tokenizer_only(run)[1] == stop_ids(load_backbone(model)) == (2,)
        (model / "chat_template.jinja").write_text(ENDING_TURNS)
        assert load_tokenizer_only(run)[1] == stop_ids(load_backbone(model)) == (2, 1)


def test_model_and_tokenizer_of_a_run_are_of_the_commit_that_answered_it(tmp_path):
    written, newer = "a" * 40, "b" * 40
    repository = tmp_path / "models--owner--name"
    for commit in (written, newer):
        shutil.copytree(WEIGHTS, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(newer)
    changed = repository / "snapshots" / newer
    (changed / "generation_config.json").write_text('{"eos_token_id": 5}')
    (changed / "chat_template.jinja").write_text(ENDING_TURNS)
    program = """
import pathlib, sys
from beatrice.extract.backbone.loading import BackboneConfig, open_backbone
from beatrice.extract.generate.answers import load_tokenizer_only
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
run = RunDir(pathlib.Path(sys.argv[1]))
print(load_tokenizer_only(run)[1])
for answers in (run.answers, run.path / "unanswered"):
    print(open_backbone(run.section("backbone", BackboneConfig), answers).revision)
"""
    with RunDir.open(tmp_path / "run", smoke("owner/name")) as run:
        record_backend(run, {"backend": "served", "revision": written})
    done = run_python(program, run.path, HF_HUB_CACHE=str(tmp_path))
    assert done.stdout.splitlines() == ["(2,)", written, newer]


def test_served_texts_end_at_the_same_tokens_as_local_texts(local, server, requests):
    """As vLLM with a fine-tuned model that keeps the config of its base."""
    prompts = prompts_of(requests, 3)
    end = texts(local, prompts)[0].token_ids[-1]
    tokenizer = copy.deepcopy(local.backbone.tokenizer)
    word = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_tokens([AddedToken(word, special=True)], special_tokens=True)
    tokenizer.chat_template = ENDING_TURNS.replace("<s>", word)
    backbone = dataclasses.replace(local.backbone, tokenizer=tokenizer)
    here = texts(TransformersGenerator(backbone=backbone), prompts)
    options, stops = ServerOptions(server=server.url), stop_ids(backbone)
    with ServedGenerator("m", options, stop_ids=stops) as generator:
        there = texts(generator, prompts)
    assert here[0].stop_id == end
    for a, b in zip(here, there, strict=True):
        fields = ("text", "token_ids", "stop_id", "finish", "n_new_tokens")
        assert [getattr(a, x) for x in fields] == [getattr(b, x) for x in fields]


def test_a_run_with_answers_refuses_another_backend_or_setting(tmp_path):
    config = ANSWER_PRESETS["smoke"]
    run = RunDir(tmp_path)
    backend = {"backend": "transformers", "revision": "r", "dtype": "float32"}

    def identity(config=config, **fields):
        return backend | fields | answer_identity(config)

    record_backend(run, {"backend": "served"})  # of an attempt without an answer
    with pytest.raises(ValueError, match="holds answers"):  # others may be answering
        record_backend(RunDir(tmp_path, Share(0, 2)), identity())
    record_backend(run, identity())
    run.answers_file.write_text(write_lines([an_answer()]))
    record_backend(run, identity())  # the same again
    others = [identity(revision="s"), identity(dtype="bfloat16")]
    others.append(identity() | {"schema": identity()["schema"] + 1})
    for section, field in (
        ("generation", {"max_new_tokens": 3}),
        ("prompt", {"template": "paper"}),
        ("prompt", {"chat": True}),
        ("prompt", {"overlong": "drop-passages"}),
        ("prompt", {"window": 99}),
    ):
        changed = dataclasses.replace(getattr(config, section), **field)
        others.append(identity(dataclasses.replace(config, **{section: changed})))
    for other in others:
        with pytest.raises(ValueError, match="start another run directory"):
            record_backend(run, other)

"""The backend for servers that speak OpenAI's protocol, such as vLLM.

Failed requests are retried here, not by the `openai` client: each attempt may cost, and
is booked. The client's timeout limits the pause between two bytes; here each request
has a deadline as a whole, even if the server trickles its reply.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import ssl
import threading
import urllib.parse
from collections.abc import Awaitable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import msgspec
import openai

from beatrice.extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
    cut_at_stop,
    draw_seed,
    tokenizer_identity,
)
from beatrice.extract.generate.options import ServerOptions, seconds_asked_for
from beatrice.extract.generate.prompts import TEMPLATE_FIELDS
from beatrice.extract.records import UNSPACED


class SpendingCapReached(ValueError):
    """The next request might cost more than is left."""


class Account:
    """What has been spent at a server, and what may still be spent."""

    def __init__(self, server: ServerOptions, earlier: tuple[int, int] = (0, 0)):
        """Start with the prompt and new tokens that earlier processes paid for."""
        self._server = server
        self.spent = self._cost(*earlier)  # on finished requests
        self._reserved = 0.0
        self.n_under_way = 0  # requests that something is set aside for

    def _cost(self, n_prompt: int, n_new: int) -> float:
        prices = self._server.price_prompt, self._server.price_new
        return (prices[0] * n_prompt + prices[1] * n_new) / 1_000_000

    def reserve(self, n_prompt: int, n_new: int) -> float:
        """Set aside the most that one request can cost."""
        most, cap = self._cost(n_prompt, n_new), self._server.max_cost
        total = self.spent + self._reserved + most
        if cap is not None and total > cap * (1 + 1e-9):  # costs are rounded sums
            raise SpendingCapReached(
                f"the spending cap of {cap:g} is reached: {self.spent:.6g} is "
                "spent (by earlier processes too), and the next request may cost "
                f"{most:.6g}; the answers so far are kept, so repeat the command with "
                "a higher cap to continue"
            )
        self._reserved += most
        self.n_under_way += 1
        return most

    def book(self, reserved: float, n_prompt: int, n_new: int) -> None:
        """Replace a reservation by the request's true cost; 0 tokens if it was free."""
        self._reserved -= reserved
        self.n_under_way -= 1
        self.spent += self._cost(n_prompt, n_new)


Reply = TypeVar("Reply")
# By name: which library the `openai` client connects with may change.
_NEVER_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")


class DeadlineExceeded(openai.OpenAIError):
    """A server did not send its whole reply in time."""


class UnreadableReply(openai.OpenAIError):
    """A server's reply is cut off, empty, not JSON, or an error despite status 200."""


# The errors of reading a reply that is JSON, but has other fields or types.
_FOREIGN = AttributeError, TypeError, KeyError, UnicodeError, msgspec.ValidationError


def cause_of(error: BaseException) -> BaseException:
    """Return why a connection failed, which the client and its libraries wrap up."""
    is_wrapped = isinstance(error, openai.APIConnectionError)
    while is_wrapped and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


def advice_on(error: BaseException) -> str:
    """Return what to check if a server gave no answer."""
    if isinstance(cause_of(error), ssl.SSLCertVerificationError):
        return "set SSL_CERT_FILE to a file with the certificate of its issuer"
    return "is it running, and is the URL right up to /v1?"


def _is_transient(error: openai.OpenAIError) -> bool:
    if isinstance(cause_of(error), ssl.SSLCertVerificationError):
        return False
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    passing = openai.APIConnectionError | DeadlineExceeded | UnreadableReply
    return isinstance(error, passing)


def _may_have_cost(error: openai.OpenAIError) -> bool:
    """Return whether a server may charge for a request that it did not answer.

    Only a refusal, or a connection that was never made, is surely free: a server goes
    on generating when its client, which may be a gateway, stops listening.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code == 408 or error.status_code >= 500
    return type(error.__cause__).__name__ not in _NEVER_SENT


def seconds_before_retry(error: openai.OpenAIError, attempt: int, most: float) -> float:
    """Return the seconds a server asks for, at most `most`, or else more each time."""
    if isinstance(error, openai.APIStatusError):
        seconds = seconds_asked_for(error.response.headers.get("retry-after", ""))
        if seconds > 0:
            return min(seconds, most)
    # As in the `openai` client. Random, since requests that failed together would
    # otherwise fail together again.
    return 0.5 * 2 ** min(attempt, 4) * random.uniform(0.75, 1.0)


# Reasons for which a server withholds a text or its end, and codes of such refusals.
_WITHHELD = "content_filter", "tool_calls", "function_call"
_FILTERS = "content_filter", "content_policy_violation"
_NOTHING = Generated(
    text="",
    token_ids=None,
    stop_id=None,
    log_probs=None,
    finish="withheld",
    n_prompt_tokens=None,
    n_new_tokens=None,
)


def _read(reply: Any, prompt: GeneratorPrompt, stop_ids: Collection[int]) -> Generated:
    """Return the generated text of a reply to a prompt.

    A server may leave the stop token out of its ids. If it does not name it either, and
    the model has only one (`stop_ids`, as far as known), it was that one, unless the
    server says that it stopped at a string.
    """
    choices = getattr(reply, "choices", None) or []
    if not choices and (error := getattr(reply, "error", None)):
        # Of a gateway whose model failed after the gateway had begun to reply.
        raise UnreadableReply(f"its reply is an error: {_words_in(error)}")
    if len(choices) != 1:
        raise ValueError(
            f"its reply has {len(choices)} choices, expected 1; does it speak OpenAI's "
            "protocol?"
        )
    (choice,) = choices
    finish, is_chat = choice.finish_reason, prompt.is_chat
    if prompt.may_be_withheld and finish in _WITHHELD:
        finish = "withheld"
    elif finish not in ("stop", "length"):
        raise ValueError(
            f"it ended a text for the reason {finish!r}; expected 'stop' or 'length'"
        )
    ids, stop_id = getattr(choice, "token_ids", None), None
    reason = getattr(choice, "stop_reason", None)  # of vLLM: a token id, or a string
    if type(reason) is int:
        stop_ids = (reason,)
    if ids is not None and finish == "stop":
        if ids and ids[-1] in stop_ids:
            *ids, stop_id = ids
        elif len(stop_ids) == 1 and not isinstance(reason, str):
            (stop_id,) = stop_ids
    log_probs = getattr(choice.logprobs, "token_logprobs", None)
    content = getattr(choice.logprobs, "content", None)
    if log_probs is None and content is not None:  # a chat, or a text of llama.cpp
        entries = (x if isinstance(x, dict) else vars(x) for x in content)
        log_probs = [entry["logprob"] for entry in entries]
    if log_probs is not None and not (
        len(log_probs) >= max(1, len(ids or ()))
        and all(p is not None and math.isfinite(p) for p in log_probs)
    ):
        log_probs = None
    text = (choice.message.content or "") if is_chat else choice.text
    text.encode()  # raises for half of a surrogate pair
    usage = getattr(reply, "usage", None)
    n_new = usage and usage.completion_tokens
    # A server that reports 0 tokens of an existing text does not count; it is not free.
    counts = {
        "n_prompt_tokens": (usage and usage.prompt_tokens) or None,
        "n_new_tokens": (n_new or None) if text or ids else n_new,
    }
    fields = {
        "text": text.strip(),
        "token_ids": ids,
        "stop_id": stop_id,
        "log_probs": None if log_probs is None else tuple(map(float, log_probs)),
        "finish": finish,
        **counts,
    }
    reply = msgspec.convert(fields, Generated)  # the client does not check types
    numbers = (*(ids or ()), stop_id, *counts.values())
    if any(n is not None and n < 0 for n in numbers):
        raise TypeError("a token id or a count of tokens is negative")
    details = getattr(usage, "prompt_tokens_details", None)
    n_cached = getattr(details, "cached_tokens", None) or 0  # some count them apart
    _check_prompt_read(prompt, reply.n_prompt_tokens or 0, n_cached)
    return reply


def _check_prompt_read(prompt: GeneratorPrompt, n_tokens: int, n_cached: int) -> None:
    """Check that a server read all of a prompt and nothing else, if it counts tokens.

    Ollama puts texts into the model's chat template, and cuts what does not fit.
    """
    n_least = 0 if prompt.ids is None else len(prompt.ids)
    if 0 < n_least < n_tokens:
        raise ValueError(
            f"it read {n_tokens} tokens for a prompt of {n_least}, so it adds some, "
            "such as a chat template; use a server that takes token ids (vLLM)"
        )
    if prompt.is_chat:
        # In scripts without blanks, few tokens have more than four characters.
        others, n_unspaced = UNSPACED.subn("", prompt.text)
        n_least = len(others.split()) + n_unspaced // 4
    if 0 < n_tokens and n_tokens + n_cached < n_least:
        raise ValueError(
            f"it read {n_tokens} tokens of a prompt of at least {n_least}, so it "
            "leaves some out; give it a longer context (for Ollama, with "
            "OLLAMA_CONTEXT_LENGTH), or use another server"
        )


def _api_key() -> str | None:
    """Return the key in the environment, which is sent in a header, or None."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()  # files end in a line feed
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "OPENAI_API_KEY: expected a key of printable ASCII characters, found "
            "another character; copy the key into that environment variable again"
        )
    return key or None


def redacted(text: str) -> str:
    """Return a text with the key removed: some servers repeat what they were sent."""
    key = _api_key()
    return text if key is None else text.replace(key, "…")


def _words_in(body: Any) -> str:
    """Return what the body of an error says; servers differ in its layout."""
    words = body.get("message") or body if isinstance(body, dict) else body
    return " ".join(redacted(str(words)).split())[:300]


def reason_of(error: BaseException) -> str:
    """Return why a server gave no answer, in its words if it has sent some."""
    return _words_in(getattr(error, "body", None) or cause_of(error))


async def _check_encoding(response: Any) -> None:
    """Check that a reply is not compressed, or it could fill the memory."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"its reply is compressed ({encoding}), expected plain bytes")


def open_client(url: str, timeout: float) -> openai.AsyncOpenAI:
    """Return a client, for requests that `reply_before_deadline` ends in time.

    Raises ValueError if the key in the environment cannot be sent in a header, or if
    the URL, or a proxy or certificate that the environment names, cannot be used.
    """
    key = _api_key()
    try:
        _ = urllib.parse.urlsplit(url).port  # the client accepts any number
        return openai.AsyncOpenAI(
            base_url=url,
            # Local servers need no key, but the client insists on one.
            api_key=key or "none",
            http_client=openai.DefaultAsyncHttpxClient(
                headers={"Accept-Encoding": "identity"},
                event_hooks={"response": [_check_encoding]},
                follow_redirects=False,  # most would turn a request into a GET
            ),
            max_retries=0,  # `ServedGenerator._send` retries
            # Shorter to connect, so that a connection never made, which is free, is
            # seen.
            timeout=openai.Timeout(timeout, connect=0.9 * timeout),
        )
    except Exception as error:  # the library that connects has errors of its own
        # Its words on a malformed URL may be a part of a proxy's password.
        is_shown = isinstance(error, ValueError | OSError | ImportError)
        reason = error if is_shown else "invalid URL"
        raise ValueError(
            f"no request can be sent to {url} ({reason}); check it, and HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE in the environment"
        ) from error


async def reply_before_deadline(seconds: float, request: Awaitable[Reply]) -> Reply:
    """Return a request's reply; raises if it is late, or not JSON."""
    try:
        return await asyncio.wait_for(request, seconds)
    except TimeoutError as error:
        raise DeadlineExceeded(f"no whole reply within {seconds:g} s") from error
    # From the JSON library, from UTF-8, or from lists that are nested too deeply.
    except (ValueError, RecursionError) as error:
        raise UnreadableReply(f"its reply is not JSON: {error}") from error


class ServedGenerator(contextlib.AbstractContextManager):
    """Generates by asking a server."""

    max_length = None  # a server refuses what does not fit, or is caught cutting it

    def __init__(
        self,
        model: str,
        server: ServerOptions,
        *,
        stop_ids: Sequence[int] = (),
        log_probs: bool = False,
        tokenizer: Any = None,
        earlier: tuple[int, int] = (0, 0),
    ) -> None:
        """Prepare a client of `model`, the server's name for it; nothing is sent.

        `stop_ids` and `tokenizer` are the model's, if they are known here: the
        tokenizer's SHA-256 is part of every key, and it finds stop strings in ids.
        `earlier` are the prompt and new tokens that other processes have paid for;
        they count towards the cap.
        """
        if server.server is None:
            raise ValueError("expected the URL of a server, found none")
        self._model, self._server, self._url = model, server, server.server
        self._log_probs, self._tokenizer = log_probs, tokenizer
        self._stop_ids = frozenset(stop_ids)
        self.account = Account(server, earlier)
        self._client = open_client(self._url, server.timeout)
        self._loop = asyncio.new_event_loop()
        # Requests run in this loop, where each can be cancelled at its deadline.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        """Close the connections."""
        self._start(self._client.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, Reply]) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def identity(self) -> dict[str, Any]:
        """Return what affects a text, as far as it can be known.

        No server reports which weights a name stands for, or their dtype: what the user
        did not state is "unstated" or None.
        """
        sent = self._stop_ids if self._server.dialect == "vllm" else ()
        return {
            "backend": "served",
            "model": self._model,
            "revision": self._server.revision,
            "dialect": self._server.dialect,
            "dtype": self._server.served_dtype,
            **tokenizer_identity(self._tokenizer),
            "enable_thinking": False,
            "log_probs": self._log_probs,
            **({"stop_ids": sorted(sent)} if sent else {}),
        }

    def count_tokens(self, prompt: GeneratorPrompt) -> int | None:
        """Return how many ids a prompt has, or None if the server tokenises it."""
        return None if prompt.ids is None else len(prompt.ids)

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index, text) in the order in which the server answers.

        After a failure nothing new is sent; the replies under way are awaited and
        yielded, and then the failure is raised.
        """
        waiting = iter([i for i in range(len(prompts)) if i not in done])
        under_way: dict[Future[Generated], int] = {}
        failure: ValueError | None = None
        try:
            while True:
                # New requests wait until the caller has stored the last replies.
                n_free = self._server.concurrency - len(under_way)
                for i in itertools.islice(waiting, 0 if failure else n_free):
                    under_way[self._start(self._send(prompts[i], config))] = i
                if not under_way:
                    break
                for job in wait(under_way, return_when=FIRST_COMPLETED).done:
                    i = under_way.pop(job)
                    try:
                        reply = job.result()
                    except ValueError as error:
                        failure = failure or error
                    else:
                        yield i, reply
        finally:
            for job in under_way:  # the caller stopped listening
                job.cancel()
        if failure is not None:
            raise failure

    async def _send(self, prompt: GeneratorPrompt, config: SamplingConfig) -> Generated:
        """Send one request until it is answered, retrying after transient failures."""
        for attempt in itertools.count():
            try:
                return await self._attempt(prompt, config)
            except openai.OpenAIError as error:
                if prompt.may_be_withheld and getattr(error, "code", None) in _FILTERS:
                    return _NOTHING
                if attempt == self._server.retries or not _is_transient(error):
                    raise ValueError(self._in_words(error, prompt)) from error
                most = self._server.timeout
                await asyncio.sleep(seconds_before_retry(error, attempt, most))
        raise AssertionError("retries are counted without an end")

    async def _attempt(
        self, prompt: GeneratorPrompt, config: SamplingConfig
    ) -> Generated:
        """Send one request once, and book what it cost, or may have cost."""
        where = self._where(prompt)
        # A token is at least one byte; the server's chat template adds some tokens.
        n_prompt = self.count_tokens(prompt)
        if n_prompt is None:
            n_prompt = len(prompt.text.encode()) + (1024 if prompt.is_chat else 16)
        n_new = config.max_new_tokens
        reserved = await self._reserve(n_prompt, n_new)
        client = self._client.chat if prompt.is_chat else self._client
        try:
            request = client.completions.create(**self._fields(prompt, config))
            response = await reply_before_deadline(self._server.timeout, request)
            reply = _read(response, prompt, self._stop_ids)
            reply = cut_at_stop(reply, config.stop, self._tokenizer)
            if reply.n_prompt_tokens is not None:
                n_prompt = reply.n_prompt_tokens
            if reply.n_new_tokens is not None:
                n_new = reply.n_new_tokens
            if None in (reply.n_prompt_tokens, reply.n_new_tokens):
                reply = msgspec.structs.replace(reply, booked=(n_prompt, n_new))
            return reply
        except openai.OpenAIError as error:
            if not _may_have_cost(error):
                n_prompt = n_new = 0
            raise
        except _FOREIGN as error:
            raise ValueError(
                f"{where}: its reply does not follow OpenAI's protocol ({error})"
            ) from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        finally:
            self.account.book(reserved, n_prompt, n_new)

    async def _reserve(self, n_prompt: int, n_new: int) -> float:
        """Set aside what a request can cost, if need be after those under way."""
        while True:
            try:
                return self.account.reserve(n_prompt, n_new)
            except SpendingCapReached:  # most requests cost less than was set aside
                if not self.account.n_under_way:
                    raise
            await asyncio.sleep(0.05)

    def _where(self, prompt: GeneratorPrompt) -> str:
        name = f", question {prompt.name!r}" if prompt.name else ""
        return f"server {self._url}, model {self._model!r}{name}"

    def _in_words(self, error: openai.OpenAIError, prompt: GeneratorPrompt) -> str:
        where = self._where(prompt)
        if isinstance(error, openai.APIStatusError):
            reason = reason_of(error)
            status, dialect, hint = error.status_code, self._server.dialect, ""
            if place := error.response.headers.get("location"):
                hint = f" (it redirects to {place}: give the URL that answers itself)"
            if status in (400, 422) and dialect == "vllm":
                hint = " (a server other than vLLM may need the dialect 'openai')"
            if error.param in ("max_tokens", "temperature") and dialect == "openai":
                hint = " (a model that reasons may need the dialect 'openai-reasoning')"
            return f"{where}: refused with status {status}: {reason}{hint}"
        reason, cause = type(error).__name__, cause_of(error)
        if isinstance(error, UnreadableReply):
            reason = str(error)
        elif cause is not error:
            reason = f"{reason}: {cause}"
        n_retries = self._server.retries if _is_transient(error) else 0
        return (
            f"{where}: no answer (retries: {n_retries}; {reason}); {advice_on(error)}"
        )

    def _fields(
        self, prompt: GeneratorPrompt, config: SamplingConfig
    ) -> dict[str, Any]:
        """Return the fields of a request, for a chat reply or a continuation."""
        is_vllm = self._server.dialect == "vllm"
        fields: dict[str, Any] = {"model": self._model}
        if self._server.dialect != "openai-reasoning":
            fields["temperature"] = config.temperature
            fields["max_tokens"] = config.max_new_tokens
        elif config.is_greedy:
            fields["max_completion_tokens"] = config.max_new_tokens
        else:
            raise ValueError(
                "models of the dialect 'openai-reasoning' take no temperature, so they "
                "cannot be sampled from; sample from the run's own model"
            )
        if prompt.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            ids = prompt.ids if is_vllm else None
            fields["prompt"] = prompt.text if ids is None else list(ids)
        if config.stop:
            fields["stop"] = list(config.stop)
        if self._log_probs:
            fields["logprobs"] = True if prompt.is_chat else 1
        top_k = None if config.is_greedy else config.top_k
        if not config.is_greedy:
            fields |= {"top_p": config.top_p, "seed": draw_seed(prompt, config)}
        if is_vllm:
            # Stated, or vLLM would take the checkpoint's defaults.
            extra = {"top_k": top_k or 0, "min_p": 0.0, "repetition_penalty": 1.0}
            if prompt.is_chat:
                extra["chat_template_kwargs"] = TEMPLATE_FIELDS
            if config.stop:
                extra["include_stop_str_in_output"] = True
            if self._stop_ids:  # in addition to those of the server's config
                extra["stop_token_ids"] = sorted(self._stop_ids)
            fields["extra_body"] = {**extra, "return_token_ids": True}
        elif top_k is not None:
            raise ValueError(
                "top_k is not a field of OpenAI's protocol; draw without it (`--set "
                "top_k=0`), or use a vLLM server with the dialect 'vllm'"
            )
        return fields

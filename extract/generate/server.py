"""The backend behind a server that speaks OpenAI's protocol, such as vLLM.

The `openai` client does the talking. A request that failed for the server's reasons is
sent again here, not by the client: each attempt may cost, and is booked.
"""

import dataclasses
import itertools
import math
import os
import random
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal, Self, get_args

import openai

from extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
    draw_seed,
)
from extract.generate.prompts import template_fields
from extract.generate.spending import Account, Prices

Dialect = Literal["vllm", "openai"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Which server, and how it is asked.

    Attributes:
      url: up to and including `/v1`.
      model: the name the server gives its model.
      revision: what identifies the weights behind that name. No server tells, so who
        runs it has to; it is part of every key.
      dialect: "vllm" sends and receives exact token ids, and knows top_k; "openai"
        keeps to the fields that every such server has.
      log_probs: ask for log-probabilities.
      enable_thinking: handed to the chat template, "vllm" only: the protocol has no
        field for it, so another server's model thinks or not as it was set up.
      dtype: of the server's weights; no server tells.
      tokenizer: SHA-256 of the model's tokenizer, where it is known here.
      chat_template: likewise.
      n_concurrent: most requests under way at a time.
      n_retries: of one request.
      timeout: of one request, seconds.
      prices: for the spending cap.
    """

    url: str
    model: str
    revision: str = "unstated"
    dialect: Dialect = "vllm"
    log_probs: bool = False
    enable_thinking: bool = False
    dtype: str = "unstated"
    tokenizer: str | None = None
    chat_template: str | None = None
    n_concurrent: int = 16
    n_retries: int = 5
    timeout: float = 600.0
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
          ValueError: a value is out of its range.
        """
        if self.dialect not in get_args(Dialect):
            raise ValueError(
                f"dialect: expected one of {', '.join(get_args(Dialect))}, "
                f"found {self.dialect!r}"
            )
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"server: expected a URL such as http://localhost:8000/v1, "
                f"found {self.url!r}"
            )
        if self.n_concurrent < 1 or self.n_retries < 0 or not self.timeout > 0:
            raise ValueError(
                "server: expected at least 1 request at a time, 0 or more retries and "
                f"a positive time-out, found {self.n_concurrent}, {self.n_retries} "
                f"and {self.timeout:g}"
            )


_FIRST, _LONGEST = 0.5, 8.0  # seconds, as the `openai` client waits
_LONGEST_ASKED = 60.0  # that a server may ask for
# By name: which library connects is the `openai` client's own affair.
_NEVER_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")


def is_passing(error: openai.OpenAIError) -> bool:
    """Tell whether the same request may succeed later.

    No connection, a time-out, and the states 408, 409, 429 and 5xx pass.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def may_have_cost(error: openai.OpenAIError) -> bool:
    """Tell whether a server may charge for a request although it gave no answer.

    Only a refusal, or a connection that never stood, is surely free: a server goes on
    writing when its client stops listening.
    """
    if isinstance(error, openai.APIStatusError):
        return False
    return type(error.__cause__).__name__ not in _NEVER_SENT


def seconds_before_retry(error: openai.OpenAIError, attempt: int) -> float:
    """Return how long to wait: what the server asks for, else longer each time.

    Args:
      error: of the last attempt.
      attempt: of it, from 0.
    """
    if isinstance(error, openai.APIStatusError):
        try:
            asked = float(error.response.headers.get("retry-after", ""))
        except ValueError:
            asked = 0.0  # absent, or a date
        if 0 < asked <= _LONGEST_ASKED:
            return asked
    # Requests that failed together are spread, or they would fail together again.
    return min(_FIRST * 2**attempt, _LONGEST) * random.uniform(0.75, 1.0)


def only_choice(reply: Any) -> Any:
    """Return the one choice of a reply.

    Raises:
      ValueError: there is not exactly one.
    """
    choices = getattr(reply, "choices", None) or []
    if len(choices) != 1:
        raise ValueError(
            f"the server's reply has {len(choices)} choices, expected 1; does it speak "
            "OpenAI's protocol?"
        )
    return choices[0]


def read_choice(
    reply: Any,
    choice: Any,
    text: str,
    log_probs: Sequence[float | None] | None,
    stop_ids: Collection[int],
) -> Generated:
    """Return a generated text.

    Args:
      reply: the whole reply, with its usage.
      choice: its only choice; vLLM adds `token_ids` where it was asked to.
      text: of the choice.
      log_probs: one per token, or None.
      stop_ids: of the model, as far as known. A server gives the stop token among its
        ids or leaves it out; where there is only one it can have been no other.

    Raises:
      ValueError: the text ended in a way that makes it no answer.
    """
    if choice.finish_reason not in ("stop", "length"):
        raise ValueError(
            f"the server ended a text for the reason {choice.finish_reason!r}; "
            "expected 'stop' or 'length'"
        )
    ids = getattr(choice, "token_ids", None)
    ids, stop_id = (None, None) if ids is None else _split(ids, choice, stop_ids)
    usage = getattr(reply, "usage", None)
    return Generated(
        text=text.strip(),
        token_ids=ids,
        stop_id=stop_id,
        log_probs=_finite(log_probs),
        finish=choice.finish_reason,
        n_prompt_tokens=None if usage is None else usage.prompt_tokens,
        n_new_tokens=None if usage is None else usage.completion_tokens,
    )


def _split(
    ids: Sequence[int], choice: Any, stop_ids: Collection[int]
) -> tuple[tuple[int, ...], int | None]:
    """Return the ids without the stop token, and the stop token if it is known."""
    if choice.finish_reason != "stop":
        return tuple(ids), None
    if ids and ids[-1] in stop_ids:
        return tuple(ids[:-1]), ids[-1]
    return tuple(ids), next(iter(stop_ids)) if len(stop_ids) == 1 else None


def _finite(log_probs: Sequence[float | None] | None) -> tuple[float, ...] | None:
    """Return log-probabilities, or None if any is missing or not finite."""
    if log_probs is None or any(p is None or not math.isfinite(p) for p in log_probs):
        return None
    return tuple(float(p) for p in log_probs)


_KEY_VARIABLE = "OPENAI_API_KEY"


class ServedGenerator:
    """Generates by asking a server."""

    def __init__(
        self,
        config: ServerConfig,
        stop_ids: Sequence[int] = (),
        earlier: tuple[int, int] = (0, 0),
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
          config: which server.
          stop_ids: the model's stop tokens, where they are known: a server may give
            the one that ended a text among its ids.
          earlier: prompt and new tokens that other processes have paid for, and that
            count towards the cap.
        """
        self.config = config
        self.account = Account(config.prices, config.prices.cost(*earlier))
        self._stop_ids = frozenset(stop_ids)
        self._client = openai.OpenAI(
            base_url=config.url,
            # Local servers need none, but the client insists on some.
            api_key=os.environ.get(_KEY_VARIABLE) or "none",
            max_retries=0,  # repeated here, see `_ask`
            timeout=config.timeout,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        """Return the generator."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections."""
        self.close()

    @property
    def identity(self) -> dict[str, Any]:
        """Return what changes a text, as far as a server lets it be known.

        What was not said of the server is "unstated" or None; `revision` stands for
        that too.
        """
        return {
            "backend": "served",
            "model": self.config.model,
            "revision": self.config.revision,
            "dialect": self.config.dialect,
            "dtype": self.config.dtype,
            "tokenizer": self.config.tokenizer,
            "chat_template": self.config.chat_template,
            "enable_thinking": self.config.enable_thinking,
            "log_probs": self.config.log_probs,
        }

    @property
    def max_length(self) -> None:
        """Return None: a server refuses what does not fit."""

    def count_tokens(self, prompt: GeneratorPrompt) -> int | None:
        """Return how many ids a prompt has, or None: a server splits its text."""
        return None if prompt.ids is None else len(prompt.ids)

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index, text) in the order in which the server answers.

        After a failure nothing new is sent, what is under way is waited for and
        yielded, and then the failure is raised.

        Raises:
          ValueError: the server refused, failed or could not be reached, or the
            spending cap was reached; the message says what to do.
        """
        waiting = iter([i for i in range(len(prompts)) if i not in done])
        under_way: dict[Future[Generated], int] = {}
        failure: ValueError | None = None
        gave_up = threading.Event()
        with ThreadPoolExecutor(self.config.n_concurrent) as pool:
            try:
                while True:
                    while failure is None and len(under_way) < self.config.n_concurrent:
                        i = next(waiting, None)
                        if i is None:
                            break
                        job = pool.submit(self._ask, prompts[i], config, gave_up)
                        under_way[job] = i
                    if not under_way:
                        break
                    finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
                    for job in finished:
                        i = under_way.pop(job)
                        try:
                            found = job.result()
                        except ValueError as error:
                            failure = failure or error
                            continue
                        yield i, found
            finally:
                gave_up.set()  # the caller stopped listening: send nothing more
        if failure is not None:
            raise failure

    def _ask(
        self,
        prompt: GeneratorPrompt,
        config: SamplingConfig,
        gave_up: threading.Event,
    ) -> Generated:
        """Send one request, again if it fails in passing, until it is answered."""
        for attempt in itertools.count():
            if gave_up.is_set():
                raise ValueError(
                    "the request was not sent: nobody waits for it any more"
                )
            try:
                return self._attempt(prompt, config)
            except openai.OpenAIError as error:
                if attempt == self.config.n_retries or not is_passing(error):
                    raise ValueError(self._in_words(error)) from error
                gave_up.wait(seconds_before_retry(error, attempt))
        raise AssertionError("a count has no end")

    def _attempt(self, prompt: GeneratorPrompt, config: SamplingConfig) -> Generated:
        """Send one request once, and book what it cost, or may have cost."""
        # A token is at least one byte, but the server's chat template adds some.
        most = (
            len(prompt.ids)
            if prompt.ids is not None
            else len(prompt.text.encode()) + (1024 if prompt.is_chat else 16)
        )
        reserved = self.account.reserve(most, config.max_new_tokens)
        ask = self._chat if prompt.is_chat else self._continue
        try:
            found = ask(prompt, config)
        except openai.OpenAIError as error:
            if may_have_cost(error):
                self.account.book(reserved, most, config.max_new_tokens)
            else:
                self.account.release(reserved)
            raise
        except (AttributeError, TypeError) as error:
            self.account.book(reserved, most, config.max_new_tokens)
            raise ValueError(
                f"server {self.config.url}: its reply is not of OpenAI's protocol "
                f"({error})"
            ) from error
        except BaseException:  # a reply came, and was no answer
            self.account.book(reserved, most, config.max_new_tokens)
            raise
        n_prompt = most if found.n_prompt_tokens is None else found.n_prompt_tokens
        n_new = (
            config.max_new_tokens if found.n_new_tokens is None else found.n_new_tokens
        )
        self.account.book(reserved, n_prompt, n_new)
        return found

    def _in_words(self, error: openai.OpenAIError) -> str:
        """Return one sentence on a request that failed for good."""
        where = f"server {self.config.url}, model {self.config.model!r}"
        if isinstance(error, openai.APIStatusError):
            said = " ".join(str(error.message).split())[:300]
            hint = (
                " (a server other than vLLM may need the dialect 'openai')"
                if error.status_code in (400, 422) and self.config.dialect == "vllm"
                else ""
            )
            return f"{where}: refused with status {error.status_code}: {said}{hint}"
        return (
            f"{where}: no answer after {self.config.n_retries} retries "
            f"({type(error).__name__}); is it running, and is the URL right up to /v1?"
        )

    def _sampling(self, prompt: GeneratorPrompt, config: SamplingConfig) -> dict:
        """Return the sampling fields of a request."""
        fields: dict[str, Any] = {
            "model": self.config.model,
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
        }
        if not config.is_greedy:
            fields |= {"top_p": config.top_p, "seed": draw_seed(prompt, config)}
        if self.config.dialect == "vllm":
            top_k = 0 if config.top_k is None or config.is_greedy else config.top_k
            # Named, or vLLM takes the checkpoint's own defaults for them.
            extra = {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0}
            fields["extra_body"] = {**extra, "return_token_ids": True}
        elif config.top_k is not None and not config.is_greedy:
            raise ValueError(
                "top_k is no field of OpenAI's protocol; leave it out, or use a vLLM "
                "server with the dialect 'vllm'"
            )
        return fields

    def _continue(self, prompt: GeneratorPrompt, config: SamplingConfig) -> Generated:
        """Ask for the continuation of a text or of exact ids."""
        fields = self._sampling(prompt, config)
        if self.config.log_probs:
            fields["logprobs"] = 1
        as_ids = self.config.dialect == "vllm" and prompt.ids is not None
        reply = self._client.completions.create(
            prompt=list(prompt.ids) if as_ids else prompt.text, **fields
        )
        choice = only_choice(reply)
        found = choice.logprobs.token_logprobs if choice.logprobs else None
        return read_choice(reply, choice, choice.text, found, self._stop_ids)

    def _chat(self, prompt: GeneratorPrompt, config: SamplingConfig) -> Generated:
        """Ask for the reply to one message."""
        fields = self._sampling(prompt, config)
        if self.config.log_probs:
            fields["logprobs"] = True
        if self.config.dialect == "vllm":
            fields["extra_body"]["chat_template_kwargs"] = template_fields(
                self.config.enable_thinking
            )
        reply = self._client.chat.completions.create(
            messages=[{"role": "user", "content": prompt.text}], **fields
        )
        choice = only_choice(reply)
        found = choice.logprobs.content if choice.logprobs else None
        probs = None if found is None else [token.logprob for token in found]
        text = choice.message.content or ""
        return read_choice(reply, choice, text, probs, self._stop_ids)

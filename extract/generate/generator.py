"""`Generator`, the interface of every backend, and the store of generated texts.

`TransformersGenerator` computes on this machine and `ServedGenerator` asks a server;
stages that judge, rewrite or sample use either. Texts are stored on disk under a key of
all that affects them; a dry run counts the missing ones.
"""

import copy
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from beatrice.extract.records import Finish, Record
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import Journal, JournalFiles, sha256_json
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import Forecast, current_inputs, do_once

SCHEMA_VERSION = 1  # of keys and of stored replies; raise it when either changes
MAX_SAMPLES = 1000  # per question; the baselines draw ten, and memory holds all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How text is generated."""

    max_new_tokens: int = 16  # longest text, the stop token included
    temperature: float = 0.0  # divides the logits; 0: greedy, ignoring the next three
    top_p: float = 1.0  # keep the most probable tokens up to this mass
    top_k: int | None = None  # keep at most this many tokens; None keeps all
    seed: int = 0  # of the random draws
    stop: tuple[str, ...] = ()  # a text ends where one begins, see `cut_at_stop`

    def __post_init__(self) -> None:
        """Check that every value is valid."""
        finite = 0 <= self.temperature < math.inf
        for name, holds, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", finite, "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1"),
            ("stop", all(self.stop), "texts of at least one character"),
        ):
            if not holds:
                value = getattr(self, name)
                raise ValueError(f"{name}: expected {expected}, found {value!r}")

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest tokens are chosen, without sampling."""
        return self.temperature == 0

    def as_key(self) -> dict[str, Any]:
        """Return the settings that affect a text, for its key."""
        key = {"max_new_tokens": self.max_new_tokens, "temperature": 0.0}
        if not self.is_greedy:
            key = dataclasses.asdict(self)
            del key["stop"]
        return key | ({"stop": list(self.stop)} if self.stop else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorPrompt:
    """One text to be continued, or one message to be replied to.

    If a text's exact token ids matter, `ids` holds them, special tokens included.
    """

    text: str  # for a chat, the user's message
    ids: tuple[int, ...] | None = None
    is_chat: bool = False  # wrap the text in the model's chat template
    sample: int = 0  # number of the draw, if one prompt is sampled several times
    # How many leading tokens may be computed once for several prompts, at most; None
    # sets no limit. It affects a text only by rounding, and is not part of the key.
    n_common: int | None = None
    name: str = ""  # of its question, for messages; not part of the key
    # Whether a reply that a server withholds (by its filter, say) counts as a reply.
    may_be_withheld: bool = False

    def __post_init__(self) -> None:
        """Check that a chat message is a text."""
        if self.is_chat and self.ids is not None:
            raise ValueError("a chat message is given as text, not as token ids")

    def as_key(self, config: SamplingConfig) -> dict[str, Any]:
        """Return what affects a reply to this prompt, for its key."""
        key: dict[str, Any] = {"is_chat": self.is_chat}
        key |= {"text": self.text} if self.ids is None else {"ids": list(self.ids)}
        return key if config.is_greedy else key | {"sample": self.sample}


class Generated(Record, frozen=True, kw_only=True):
    """One generated text; a field that the backend does not report is None."""

    text: str  # without special tokens and surrounding white space
    token_ids: tuple[int, ...] | None  # the ids written, without the stop token
    stop_id: int | None  # the stop token, or None if the text was cut
    # In nats, one per id and one more for the stop token if it was written; of the
    # model itself, before temperature, top-p and top-k.
    log_probs: tuple[float, ...] | None
    # "length" if the text was cut at its limit, "withheld" if a server did not give it.
    finish: Finish
    n_prompt_tokens: int | None  # as counted by the model
    n_new_tokens: int | None  # likewise, the stop token included
    # Most prompt and new tokens, for the spending cap, if a server does not count both.
    booked: tuple[int, int] | None = None
    # Time since the previous text, so the first of a batch has the whole batch's. Their
    # sum is the time of all texts, over all starts. None if it was not measured.
    seconds: float | None = None


# The marks around a model's thinking, for models and servers that leave it in the text.
THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
)


def without_thinking(text: str) -> str | None:
    """Return the text after a model's thinking; None if the thinking never ends."""
    for begin, end in THINKING:
        text = text.rpartition(end)[2]
        if begin in text:
            return None
    return text


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop string in a text begins, in characters, or None."""
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return min(starts, default=None)


def cut_at_stop(
    reply: Generated, stop: Sequence[str], tokenizer: Any | None
) -> Generated:
    """Return a reply, cut before the first stop string in its text.

    The token in which that string begins becomes the stop token: the model chose to end
    there, and that choice is part of the answer. What the token holds before the string
    (a full stop, if that and a line feed are one token) stays in the text but not in
    the ids. A reply with ids, the stop string's included, needs the model's tokenizer.
    """
    ids, text = reply.token_ids, reply.text
    if ids is not None and stop:
        text = decode_ids(tokenizer, ids)
    start = find_stop(text, stop)
    if start is None:
        return reply
    cut = {"text": text[:start].strip(), "finish": "stop"}
    if ids is None:  # which of the tokens are left is unknown
        return msgspec.structs.replace(reply, **cut, log_probs=None)
    # Texts are compared, not lengths: each byte of an incomplete character may decode
    # to a replacement character.
    n_tokens = next(
        n
        for n in reversed(range(len(ids)))
        if text[:start].startswith(decode_ids(tokenizer, ids[:n]))
    )
    return msgspec.structs.replace(
        reply,
        **cut,
        token_ids=ids[:n_tokens],
        stop_id=ids[n_tokens],
        log_probs=reply.log_probs and reply.log_probs[: n_tokens + 1],
    )


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids, without special tokens, with spaces unchanged."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class Generator(Protocol):
    """A backend that generates texts; it chooses the order of its results.

    A generator that computes in batches also has `plan(prompts, config)`, which returns
    all batches as indices of prompts, whether they are done or not: the texts of a
    batch are stored together, and processes that share the work do whole batches.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return everything about the backend that affects a text, as JSON values."""
        ...

    @property
    def max_length(self) -> int | None:
        """Return the model's window in tokens, or None if it is not known here."""
        ...

    def count_tokens(self, prompt: GeneratorPrompt) -> int | None:
        """Return how many tokens a prompt has, or None if only a server knows."""
        ...

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index of the prompt, text) as soon as each text exists.

        `prompts` includes those that are `done` (indices): batches are planned over all
        prompts, so that a text does not depend on when an earlier run was killed.
        Prompts that are done need not be generated again, but may be.
        """
        ...


def plan_of(
    generator: Generator, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
) -> list[tuple[int, ...]]:
    """Return a generator's batches, or one per prompt if it does not plan any."""
    plan = getattr(generator, "plan", None)
    if plan is None:
        return [(i,) for i in range(len(prompts))]
    return [tuple(batch) for batch in plan(prompts, config)]


def reply_key(
    identity: Mapping[str, Any], prompt: GeneratorPrompt, config: SamplingConfig
) -> str:
    """Return the SHA-256 of everything that affects a text."""
    content = {
        "schema": SCHEMA_VERSION,
        "backend": dict(identity),
        "prompt": prompt.as_key(config),
        "sampling": config.as_key(),
    }
    return sha256_json(content)


def draw_seed(prompt: GeneratorPrompt, config: SamplingConfig) -> int:
    """Return the random seed of one prompt, in [0, 2**31): the same in any batch."""
    return int(sha256_json([config.seed, prompt.as_key(config)])[:8], 16) >> 1


def tokenizer_identity(tokenizer: Any) -> dict[str, str | None]:
    """Return the SHA-256 of a tokenizer and of its chat template, None if absent."""
    if tokenizer is None:
        return {"tokenizer": None, "chat_template": None}
    rules = tokenizer.backend_tokenizer
    if rules.truncation or rules.padding:  # Transformers resets both at every call
        rules = copy.deepcopy(rules)
        rules.no_truncation()
        rules.no_padding()
    template = getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer": _sha256(rules.to_str()),  # vocabulary and added tokens too
        "chat_template": None if template is None else _sha256(str(template)),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class SavedReply(Generated, frozen=True, kw_only=True):
    """A generated text with its key, see `reply_key`."""

    key: str


def _reply_line(key: str, text: Generated) -> str:
    return json.dumps({"key": key, **msgspec.structs.asdict(text)})


def reply_files(path: Path, parts: Path | None = None) -> JournalFiles[str, SavedReply]:
    """Return where replies are stored: a file, and a folder of parts to add to it."""
    return JournalFiles(path, SavedReply, lambda reply: reply.key, parts)


@dataclasses.dataclass(kw_only=True)
class Replies:
    """Generated texts by `reply_key`; a text is reused only for an equal key."""

    journal: Journal[str, SavedReply]  # where texts are appended
    share: Share = Share()  # which part of the texts this process generates
    is_timed: bool = False  # store seconds too; no two runs then store the same bytes
    n_reused: int = 0  # texts that existed
    n_new: int = 0  # texts that were generated and appended
    n_missing: int = 0  # texts that other workers have yet to generate

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
        check: Callable[[Sequence[Generated]], None] | None = None,
    ) -> Sequence[Generated] | None:
        """Return the text of every prompt, in order, generating the missing ones.

        Equal prompts share a text. `progress` gets the existing and the total number of
        this share's texts. If any are missing, `check`, which may raise, gets the
        existing ones, and then the new ones of each stored batch. Returns None if this
        process does only a share; `n_missing` then counts the texts left to others.
        """
        identity = generator.identity
        keys = [reply_key(identity, prompt, config) for prompt in prompts]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        batches = self.share.mine(plan_of(generator, prompts, config))
        batch_of = {i: batch for batch in batches for i in batch}
        mine = {i: key for key, i in first.items() if i in batch_of}
        todo = {i for i, key in mine.items() if key not in self.journal}
        self.n_reused += len(mine) - len(todo)
        progress(len(mine) - len(todo), len(mine))
        if check is not None and todo:
            check(self.journal.read(key for i, key in mine.items() if i not in todo))
        new: dict[int, Generated] = {}
        began = time.monotonic()
        for i, text in generator.stream(prompts, config, {*range(len(keys))} - todo):
            now = time.monotonic()
            seconds, began = round(now - began, 6) if self.is_timed else None, now
            if i not in todo:
                continue
            new[i] = msgspec.structs.replace(text, seconds=seconds)
            todo.discard(i)
            if todo.isdisjoint(batch_of[i]):
                texts = {keys[k]: new.pop(k) for k in batch_of[i] if k in new}
                self.journal.append({k: _reply_line(k, t) for k, t in texts.items()})
                if hasattr(generator, "plan"):  # it waited while they were stored
                    began = time.monotonic()
                self.n_new += len(texts)
                progress(len(mine) - len(todo) - len(new), len(mine))
                if check is not None:
                    check([*texts.values()])
        if not self.share.is_whole:
            there = self.journal.files.places()
            self.n_missing = sum(key not in there for key in first)
            return None
        return self.journal.read(keys)

    def summary(self) -> str:
        """Return in words how many texts were generated, and how many reused."""
        name = self.journal.lines.path.name
        return f"{self.n_new} texts generated, {self.n_reused} found in {name}"


def count_requests(
    stage: str,
    prompts: Sequence[GeneratorPrompt],
    config: SamplingConfig,
    generator: Generator | None = None,
) -> Forecast:
    """Return how many requests and tokens the prompts need.

    Prompts without ids need `generator`; one of a server may not know their tokens.
    """
    counts = [
        len(prompt.ids or ()) if generator is None else generator.count_tokens(prompt)
        for prompt in prompts
    ]
    is_counted = None not in counts
    return Forecast(
        stage=stage,
        n_rows=len(prompts),
        n_requests=len(prompts),
        n_prompt_tokens=sum(n or 0 for n in counts) if is_counted else None,
        n_new_tokens=len(prompts) * config.max_new_tokens,
        basis=(
            "existing texts and retries are not counted"
            if is_counted
            else "the server does not count prompt tokens; retries are not counted"
        ),
    )


class ReplyCounter:
    """Counts the missing texts, in place of `Replies` in a dry run."""

    def __init__(self, files: JournalFiles[str, SavedReply], stage: str) -> None:
        """Look up which texts exist; nothing is written."""
        self._there = files.places()
        self._stage = stage
        self.forecast = count_requests(stage, (), SamplingConfig())

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
        check: Callable[[Sequence[Generated]], None] | None = None,
    ) -> None:
        """Count what `Replies.generate` would generate; None ends the stage."""
        identity = generator.identity
        missing = {reply_key(identity, prompt, config): prompt for prompt in prompts}
        todo = [prompt for key, prompt in missing.items() if key not in self._there]
        self.forecast = count_requests(self._stage, todo, config, generator)


Texts = Replies | ReplyCounter  # where a stage gets its texts
Product = TypeVar("Product")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStage(Generic[Product]):
    """A stage that makes something from a model's texts, or counts the missing ones."""

    run: RunDir
    name: str
    role: str  # of the model; names the file of its texts
    reads: list[Path]
    settings: dict[str, str]  # identities of what else it depends on
    outputs: list[Path]
    make: Callable[[Texts, Update], Product | None]  # None for a share, or a dry run
    write: Callable[[Product], None]
    is_timed: bool = False  # see `Replies`

    def _files(self) -> JournalFiles[str, SavedReply]:
        return reply_files(self.run.replies(self.role), self.run.parts(self.role))

    def do(self, progress: Progress) -> int | None:
        """Do the stage, or a share of it; return the result of `do_once`."""

        def work(update: Update) -> int | None:
            journal = Journal.open(self._files(), self.run.share)
            for note in journal.notes:
                progress.note(note)
            replies = Replies(
                journal=journal, share=self.run.share, is_timed=self.is_timed
            )
            product = self.make(replies, update)
            if product is None:
                return replies.n_missing
            progress.note(f"{self.name}: {replies.summary()}")
            self.write(product)
            return None

        inputs = current_inputs(self.run, self.name, self.reads) | self.settings
        return do_once(self.run, self.name, inputs, self.outputs, progress, work)

    def forecast(self) -> str:
        """Return in words how many texts are missing, without retries."""
        replies = ReplyCounter(self._files(), self.name)
        self.make(replies, lambda done, total: None)
        return replies.forecast.as_text()

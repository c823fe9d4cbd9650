"""The role that every backend plays: prompts in, texts out, with what they are from.

`TransformersGenerator` computes on this machine, `ServedGenerator` asks a server; a
stage that judges, rewrites or samples uses either. Its texts lie on disk by key; a dry
run counts those that are missing.
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
from beatrice.extract.run.stages import Forecast, current_inputs, once

SCHEMA_VERSION = 1  # of keys and of stored replies; raise it when either changes
MAX_SAMPLES = 1000  # of a question; the baselines draw ten, and all are held in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How text is generated."""

    max_new_tokens: int = 16  # longest text, the stop token included
    temperature: float = 0.0  # divides the logits; 0 is greedy, whatever follows
    top_p: float = 1.0  # keep the most probable tokens up to this mass
    top_k: int | None = None  # keep at most this many tokens; None keeps all
    seed: int = 0  # of the draws
    stop: tuple[str, ...] = ()  # end a text where one begins, see `cut_at_stop`

    def __post_init__(self) -> None:
        """Check that a backend can sample so."""
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
        """Return whether nothing is drawn."""
        return self.temperature == 0

    def as_key(self) -> dict[str, Any]:
        """Return what changes a text; draws change no greedy one."""
        key = {"max_new_tokens": self.max_new_tokens, "temperature": 0.0}
        if not self.is_greedy:
            key = dataclasses.asdict(self)
            del key["stop"]
        return key | ({"stop": list(self.stop)} if self.stop else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorPrompt:
    """One text to be continued, or one message to be replied to.

    Where the exact ids of a text matter they are given too, special tokens included.
    """

    text: str  # for a chat, the user's message
    ids: tuple[int, ...] | None = None
    is_chat: bool = False  # wrap the text in the model's chat template
    sample: int = 0  # sets draws of the same prompt apart
    # Most tokens at its beginning that may be computed once for several prompts; None
    # is any number. It changes a text by rounding alone, and is in no key.
    n_common: int | None = None
    name: str = ""  # of its question, for messages; in no key
    # Whether a reply that a server withholds, as by its filter, is taken for one.
    may_be_withheld: bool = False

    def __post_init__(self) -> None:
        """Check that a chat message is a text."""
        if self.is_chat and self.ids is not None:
            raise ValueError("a chat message is given as text, not as token ids")

    def as_key(self, config: SamplingConfig) -> dict[str, Any]:
        """Return what changes a reply to this prompt."""
        key: dict[str, Any] = {"is_chat": self.is_chat}
        key |= {"text": self.text} if self.ids is None else {"ids": list(self.ids)}
        return key if config.is_greedy else key | {"sample": self.sample}


class Generated(Record, frozen=True, kw_only=True):
    """One generated text; None where the backend does not tell."""

    text: str  # without special tokens and surrounding white space
    token_ids: tuple[int, ...] | None  # the ids written, without the stop token
    stop_id: int | None  # the stop token, or None if the text was cut
    # In nats, one per id and one more for the stop token if it was written; of the
    # model itself, before temperature, top-p and top-k.
    log_probs: tuple[float, ...] | None
    # "length" if the text was cut at its limit, "withheld" if a server did not give it.
    finish: Finish
    n_prompt_tokens: int | None  # as the model counts
    n_new_tokens: int | None  # likewise, the stop token included
    # Prompt and new tokens that are booked, at most, where a server does not count.
    booked: tuple[int, int] | None = None
    # Since the text before it came, so that the first of a batch has all of the batch;
    # their sum is what the texts took over all starts. None where it is not measured.
    seconds: float | None = None


# How a model's thinking begins and ends, where nobody has taken it out of its text.
THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
)


def without_thinking(text: str) -> str | None:
    """Return what stands behind a model's thinking; None where that has no end."""
    for begin, end in THINKING:
        text = text.rpartition(end)[2]
        if begin in text:
            return None
    return text


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the character at which the first of the stop strings begins, or None."""
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return min(starts, default=None)


def cut_at_stop(
    reply: Generated, stop: Sequence[str], tokenizer: Any | None
) -> Generated:
    """Return a text as it was before the first of the stop strings.

    The token in which that string begins is the stop token: the model chose to end
    there, and its choice is read as one of the answer. What that token holds before
    the string (the full stop, where a full stop and a line feed are one token)
    belongs to the text, not to the ids. A reply with ids, which include those of the
    stop string, needs the model's tokenizer.
    """
    ids, text = reply.token_ids, reply.text
    if ids is not None and stop:
        text = decode_ids(tokenizer, ids)
    start = find_stop(text, stop)
    if start is None:
        return reply
    cut = {"text": text[:start].strip(), "finish": "stop"}
    if ids is None:  # nobody can tell which of its tokens are left
        return msgspec.structs.replace(reply, **cut, log_probs=None)
    # By their text, not its length: bytes may decode to a sign each until their
    # character is whole.
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
    """Return the text of some ids, without special tokens, spaces as they are."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class Generator(Protocol):
    """Generates texts; the order of the results is the backend's own.

    A generator that computes in batches also has `plan(prompts, config)`, which returns
    the batches as indices of prompts, whichever are done: texts of a batch are written
    down together, and processes that share the work do whole batches.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return everything about the backend that changes a text; JSON values."""
        ...

    @property
    def max_length(self) -> int | None:
        """Return the model's window in tokens, or None if it is not known here."""
        ...

    def count_tokens(self, prompt: GeneratorPrompt) -> int | None:
        """Return how many tokens the model reads, or None if only a server knows."""
        ...

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index of the prompt, text) as soon as each exists.

        The prompts are all, also those that are done: batches are planned over all, so
        that a text does not depend on when an earlier run was killed. Those that are
        done need not be generated again, but may be.
        """
        ...


def plan_of(
    generator: Generator, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
) -> list[tuple[int, ...]]:
    """Return the batches of a generator, or every prompt by itself if it has none."""
    plan = getattr(generator, "plan", None)
    if plan is None:
        return [(i,) for i in range(len(prompts))]
    return [tuple(batch) for batch in plan(prompts, config)]


def reply_key(
    identity: Mapping[str, Any], prompt: GeneratorPrompt, config: SamplingConfig
) -> str:
    """Return the SHA-256 of everything that changes a text."""
    content = {
        "schema": SCHEMA_VERSION,
        "backend": dict(identity),
        "prompt": prompt.as_key(config),
        "sampling": config.as_key(),
    }
    return sha256_json(content)


def draw_seed(prompt: GeneratorPrompt, config: SamplingConfig) -> int:
    """Return the seed of one prompt's draws, in [0, 2**31): the same in any batch."""
    return int(sha256_json([config.seed, prompt.as_key(config)])[:8], 16) >> 1


def tokenizer_identity(tokenizer: Any) -> dict[str, str | None]:
    """Return the SHA-256 of a fast tokenizer and of its chat template.

    None where there is no chat template, and for both without a tokenizer.
    """
    if tokenizer is None:
        return {"tokenizer": None, "chat_template": None}
    rules = tokenizer.backend_tokenizer
    if rules.truncation or rules.padding:  # Transformers sets both anew at every call
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
    """Return where replies lie: a file, and a folder of what is not in it yet."""
    return JournalFiles(path, SavedReply, lambda reply: reply.key, parts)


@dataclasses.dataclass(kw_only=True)
class Replies:
    """Generated texts by `reply_key`; one is reused for what has the same key alone."""

    journal: Journal[str, SavedReply]  # where texts are appended
    share: Share = Share()  # of the texts that are generated here
    is_timed: bool = False  # write each seconds, so that no two starts write alike
    n_reused: int = 0  # texts that were there
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
        """Return the text of every prompt, in order; generate what is missing.

        Equal prompts share a text. Progress is texts of this share that are there, and
        texts of it in all. Where some are missing, those that are there are checked,
        which may raise, and then the new ones of each batch once they are written down.
        None after a share of the texts; `n_missing` counts what others have to do.
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
                if hasattr(generator, "plan"):  # which waited while they were written
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
        """Count the texts that were generated, and those that were reused."""
        name = self.journal.lines.path.name
        return f"{self.n_new} texts generated, {self.n_reused} found in {name}"


def count_requests(
    stage: str,
    prompts: Sequence[GeneratorPrompt],
    config: SamplingConfig,
    generator: Generator | None = None,
) -> Forecast:
    """Return how many tokens texts would need; prompts without ids need the generator.

    That of a server may not count them.
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
            "what is there already is not counted; retries are not foreseen"
            if is_counted
            else "the server does not count prompt tokens; retries are not foreseen"
        ),
    )


class CountedReplies:
    """Counts the texts that are not there yet, in place of `Replies` in a dry run."""

    def __init__(self, files: JournalFiles[str, SavedReply], stage: str) -> None:
        """Read which texts are there; nothing is written."""
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
        """Count what `Replies.generate` would generate; the stage ends here."""
        identity = generator.identity
        missing = {reply_key(identity, prompt, config): prompt for prompt in prompts}
        todo = [prompt for key, prompt in missing.items() if key not in self._there]
        self.forecast = count_requests(self._stage, todo, config, generator)


Texts = Replies | CountedReplies  # what a stage asks for its texts
Product = TypeVar("Product")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStage(Generic[Product]):
    """A stage that makes something of a model's texts, or counts what it would need."""

    run: RunDir
    name: str
    role: str  # of the model, which names the file of its texts
    reads: list[Path]
    settings: dict[str, str]  # identities of what it depends on beside
    outputs: list[Path]
    make: Callable[[Texts, Update], Product | None]  # None of a share of the texts
    write: Callable[[Product], None]
    is_timed: bool = False  # see `Replies`

    def _files(self) -> JournalFiles[str, SavedReply]:
        return reply_files(self.run.replies(self.role), self.run.parts(self.role))

    def do(self, progress: Progress) -> int | None:
        """Do the stage, or a share of its texts; returns what `once` does."""

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
        return once(self.run, self.name, inputs, self.outputs, progress, work)

    def forecast(self) -> str:
        """Return as text how many texts are missing; retries are not foreseen."""
        replies = CountedReplies(self._files(), self.name)
        self.make(replies, lambda done, total: None)
        return replies.forecast.as_text()

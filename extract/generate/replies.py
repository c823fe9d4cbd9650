"""Generated texts on disk, by key; stages made of them, and what a dry run counts."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from beatrice.extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    plan_of,
    reply_key,
)
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import Journal, JournalFiles
from beatrice.extract.run.share import Share
from beatrice.extract.run.stages import Forecast, once


class SavedReply(Generated, frozen=True, kw_only=True):
    """A generated text with its key, see `reply_key`."""

    key: str


def reply_files(path: Path, parts: Path | None = None) -> JournalFiles[str, SavedReply]:
    """Return where replies lie: a file, and a folder of what is not in it yet."""
    return JournalFiles(path, SavedReply, lambda reply: reply.key, parts)


@dataclasses.dataclass(kw_only=True)
class Replies:
    """Generated texts by key.

    The key covers everything that changes a text, so that a text is reused only for the
    same prompt to the same backend.
    """

    journal: Journal[str, SavedReply]  # where texts are appended
    share: Share = Share()  # of the texts that are generated here
    is_timed: bool = False  # write each seconds, so that no two starts write alike
    n_reused: int = 0  # texts that were there
    n_new: int = 0  # texts that were generated and appended
    n_missing: int = 0  # texts that other workers have yet to generate

    @classmethod
    def open(cls, path: Path) -> "Replies":
        """Open a file of replies; an unfinished last line is done again."""
        return cls(journal=Journal.open(reply_files(path)))

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
    ) -> Sequence[Generated] | None:
        """Return the text of every prompt, in order; generate what is missing.

        Equal prompts share a text. Progress is texts that are there, and texts in all.
        None after a share of the texts, with which no stage can go on; `n_missing`
        counts what other workers have to do.
        """
        identity = generator.identity
        keys = [reply_key(identity, prompt, config) for prompt in prompts]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        done = {i for i, k in enumerate(keys) if k in self.journal or first[k] != i}
        n_there = sum(key in self.journal for key in first)
        self.n_reused += n_there
        progress(n_there, len(first))
        if not self.share.is_whole:
            batches = self.share.mine(plan_of(generator, prompts, config))
            done |= {*range(len(prompts))} - {i for batch in batches for i in batch}
        began = time.monotonic()
        for i, text in generator.stream(prompts, config, done):
            now = time.monotonic()
            seconds, began = round(now - began, 6) if self.is_timed else None, now
            if keys[i] in self.journal:
                continue
            fields = msgspec.structs.asdict(text) | {"seconds": seconds}
            self.journal.append({keys[i]: json.dumps({"key": keys[i], **fields})})
            self.n_new += 1
            n_there += 1
            progress(n_there, len(first))
        if not self.share.is_whole:
            there = self.journal.files.keys()
            self.n_missing = sum(key not in there for key in first)
            return None
        return [self.journal[key] for key in keys]

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
    """Return how many tokens texts would need.

    The generator counts the tokens of prompts without ids; a server's may not.
    """
    counts = [
        len(prompt.ids)
        if prompt.ids is not None
        else (None if generator is None else generator.count_tokens(prompt))
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
        self._there = files.keys()
        self._stage = stage
        self.forecast = count_requests(stage, (), SamplingConfig())

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
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

        inputs = self.run.hash_inputs(*self.reads) | self.settings
        return once(self.run, self.name, inputs, self.outputs, progress, work)

    def forecast(self) -> str:
        """Return as text how many texts are missing; retries are not foreseen."""
        replies = CountedReplies(self._files(), self.name)
        self.make(replies, lambda done, total: None)
        return replies.forecast.as_text()

"""Generated texts on disk, each appended when it exists and found again by its key.

What texts a stage would ask a model for, counted instead of asked.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from beatrice.extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    plan_of,
    reply_key,
)
from beatrice.extract.run.console import Update
from beatrice.extract.run.files import Journal, JournalFiles
from beatrice.extract.run.share import Share
from beatrice.extract.run.stages import Forecast


class Reply(Generated, frozen=True, kw_only=True):
    """A generated text with the key that it is found by, see `reply_key`."""

    key: str

    def text_alone(self) -> Generated:
        """Return the text without its key."""
        names = Generated.__struct_fields__
        return Generated(**{name: getattr(self, name) for name in names})


def reply_files(path: Path, parts: Path | None = None) -> JournalFiles[str, Reply]:
    """Return where replies lie: a file, and a folder of what is not in it yet."""
    return JournalFiles(path, Reply, lambda reply: reply.key, parts)


class Texts(Protocol):
    """What a stage asks for texts: `Replies`, or what counts them in a dry run."""

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = ...,
    ) -> list[Generated] | None:
        """Return the text of every prompt, or None where the stage ends here."""


@dataclasses.dataclass(kw_only=True)
class Replies:
    """Generated texts by key.

    The key covers everything that changes a text, so a text is found again only for
    the same question to the same backend.

    Attributes:
      journal: where texts are appended.
      share: of the texts that are generated here.
      is_timed: a new text's line says what it took; no two starts write equal lines.
    """

    journal: Journal[str, Reply]
    share: Share = Share()
    is_timed: bool = False
    n_reused: int = 0  # texts that were found and not generated again
    n_new: int = 0  # texts that were generated and appended
    n_missing: int = 0  # texts of other workers that were wanted and are not there

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
    ) -> list[Generated] | None:
        """Return the text of every prompt, in order; generate what is missing.

        For a share of the texts there is nothing to go on with: whoever works alone
        afterwards finds them all.

        Args:
          generator: the backend.
          prompts: equal ones share a text.
          config: how.
          progress: told texts there and wanted.

        Returns:
          None after a share; `n_missing` says what others have to do.
        """
        identity = generator.identity
        keys = [reply_key(identity, prompt, config) for prompt in prompts]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        done = {i for i, k in enumerate(keys) if k in self.journal or first[k] != i}
        n_there = sum(key in self.journal for key in first)
        self.n_reused += n_there
        progress(n_there, len(first))
        if not self.share.is_whole:
            mine = self.share.mine(plan_of(generator, prompts, config))
            done |= {*range(len(prompts))} - {i for batch in mine for i in batch}
        began = time.monotonic()
        for i, text in generator.stream(prompts, config, done):
            now = time.monotonic()
            took, began = round(now - began, 6) if self.is_timed else None, now
            reply = msgspec.structs.replace(text, seconds=took)
            if keys[i] in self.journal:
                continue
            self.journal.append({keys[i]: _line(keys[i], reply)})
            self.n_new += 1
            n_there += 1
            progress(n_there, len(first))
        if not self.share.is_whole:
            there = self.journal.files.keys()
            self.n_missing = sum(key not in there for key in first)
            return None
        texts = {key: self.journal[key].text_alone() for key in first}
        return [texts[key] for key in keys]


def _line(key: str, reply: Generated) -> str:
    return json.dumps({"key": key, **msgspec.structs.asdict(reply)})


def open_replies(
    files: JournalFiles[str, Reply],
    share: Share,
    note: Callable[[str], None],
    *,
    is_timed: bool = False,
) -> Replies:
    """Open what a model has written, to go on with it.

    Args:
      files: where it lies, see `reply_files`.
      share: of the texts, which this process generates.
      note: is told what was set aside.
      is_timed: see `Replies`.
    """
    journal = Journal.open(files, share)
    for text in journal.notes:
        note(text)
    return Replies(journal=journal, share=share, is_timed=is_timed)


def reused_in_words(replies: Replies) -> str:
    """Say how many texts were generated, and how many found."""
    return (
        f"{replies.n_new} texts generated, {replies.n_reused} found in "
        f"{replies.journal.lines.path.name}"
    )


def count_requests(
    stage: str,
    prompts: Sequence[GeneratorPrompt],
    config: SamplingConfig,
    generator: Generator | None = None,
) -> Forecast:
    """Return what texts would need.

    Args:
      stage: whose forecast it is.
      prompts: what a model would be asked.
      config: how.
      generator: counts the tokens of prompts without ids; a server's may not.
    """
    counts = [
        len(prompt.ids)
        if prompt.ids is not None
        else generator and generator.count_tokens(prompt)
        for prompt in prompts
    ]
    is_known = None not in counts
    return Forecast(
        stage=stage,
        n_rows=len(prompts),
        n_requests=len(prompts),
        n_prompt_tokens=sum(n or 0 for n in counts) if is_known else None,
        n_new_tokens=len(prompts) * config.max_new_tokens,
        basis=(
            "what is there already is not counted; retries are not foreseen"
            if is_known
            else "the server does not count prompt tokens; retries are not foreseen"
        ),
    )


class CountedReplies:
    """Stands in for `Replies` in a dry run: counts the texts that are not there yet.

    Whoever asks for texts gets None, as for a share of them, and goes no further: the
    stage itself decides what it would ask.

    Args:
      files: of the texts that are there, see `reply_files`.
      stage: whose forecast it is.
    """

    n_missing = 0

    def __init__(self, files: JournalFiles[str, Reply], stage: str) -> None:
        """Look which texts are there; nothing is written."""
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
        """Count what `Replies.generate` would ask the generator."""
        identity = generator.identity
        left = {reply_key(identity, prompt, config): prompt for prompt in prompts}
        todo = [prompt for key, prompt in left.items() if key not in self._there]
        self.forecast = count_requests(self._stage, todo, config, generator)


def forecast_texts(
    files: JournalFiles[str, Reply],
    stage: str,
    ask: Callable[[CountedReplies], object],
) -> str:
    """Return in words what texts `ask` would generate with these replies."""
    replies = CountedReplies(files, stage)
    ask(replies)
    return replies.forecast.as_text()

"""Generated texts on disk, each appended when it exists and found again by its key."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    reply_key,
)
from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.files import JsonLines


@dataclasses.dataclass(kw_only=True)
class Replies:
    """A file of generated texts by key.

    The key covers everything that changes a text (`reply_key`), so a
    text is found again only for the same question to the same backend.
    """

    lines: JsonLines
    found: dict[str, Generated]
    n_reused: int = 0  # texts that were found and not generated again
    n_new: int = 0  # texts that were generated and appended

    @classmethod
    def open(cls, path: Path) -> "Replies":
        """Open a file of replies; a truncated last line is set aside and done again.

        Raises:
          ValueError: a line before the last is no reply; the message names it.
        """
        lines = JsonLines.open(path)
        found: dict[str, Generated] = {}
        for number, row in enumerate(lines.rows(), start=1):
            try:
                key = msgspec.convert(row.pop("key"), str)
                found.setdefault(key, msgspec.convert(row, Generated))
            except (AttributeError, KeyError, TypeError, msgspec.ValidationError):
                raise ValueError(
                    f"{path}, line {number}: not a generated text of this program's "
                    "version; move the file away to generate its texts again"
                ) from None
        return cls(lines=lines, found=found)

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
    ) -> list[Generated]:
        """Return the text of every prompt, in order; generate what is missing.

        Args:
          generator: the backend.
          prompts: equal ones share a text.
          config: how.
          progress: told texts there and wanted.
        """
        identity = generator.identity
        keys = [reply_key(identity, prompt, config) for prompt in prompts]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        done = {i for i, k in enumerate(keys) if k in self.found or first[k] != i}
        n_there = sum(key in self.found for key in first)
        self.n_reused += n_there
        progress(n_there, len(first))
        for i, reply in generator.stream(prompts, config, done):
            if keys[i] in self.found:
                continue
            row = {"key": keys[i], **msgspec.structs.asdict(reply)}
            self.lines.append([json.dumps(row)])
            self.found[keys[i]] = reply
            self.n_new += 1
            n_there += 1
            progress(n_there, len(first))
        return [self.found[key] for key in keys]


def open_replies(run: RunDir, role: str, progress: Progress) -> Replies:
    """Open what a model has written in one role of a run; see `RunDir.replies`."""
    replies = Replies.open(run.replies(role))
    if replies.lines.truncated:
        progress.note(replies.lines.truncated)
    return replies


def reused_in_words(replies: Replies) -> str:
    """Say how many texts were generated, and how many found."""
    return (
        f"{replies.n_new} texts generated, {replies.n_reused} found in "
        f"{replies.lines.path.name}"
    )

"""Generated texts on disk, each appended when it exists and found again by its key."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    Progress,
    SamplingConfig,
    reply_key,
)
from extract.run.console import Progress as Console
from extract.run.directory import RunDir
from extract.run.files import JsonLines


@dataclasses.dataclass(kw_only=True)
class Replies:
    """A file of generated texts by key.

    The key covers everything that changes a text (`reply_key`), so a
    text is found again only for the same question to the same backend.

    Attributes:
      n_reused: texts that were found and not generated again.
      n_new: texts that were generated and appended.
    """

    lines: JsonLines
    found: dict[str, Generated]
    n_reused: int = 0
    n_new: int = 0

    @classmethod
    def open(cls, path: Path) -> "Replies":
        """Open a file of replies; a truncated last line is set aside and done again.

        Raises:
          ValueError: a line before the last is no reply; the message names it.
        """
        lines = JsonLines.open(path)
        found: dict[str, Generated] = {}
        for number, row in enumerate(lines.rows(), start=1):
            key, reply = _from_row(row, f"{path}, line {number}")
            found.setdefault(key, reply)
        return cls(lines=lines, found=found)

    @property
    def truncated(self) -> str | None:
        """Say what was set aside when the file was opened, or None."""
        return self.lines.truncated

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Progress = lambda done, total: None,
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
        done = {i for i, key in enumerate(keys) if key in self.found}
        n_wanted = len(set(keys))
        n_there = len({keys[i] for i in done})
        self.n_reused += n_there
        seen: set[str] = set()
        for i, key in enumerate(keys):
            if key in seen:
                done.add(i)
            seen.add(key)
        progress(n_there, n_wanted)
        for i, reply in generator.stream(prompts, config, done):
            if keys[i] in self.found:
                continue
            self.lines.append([json.dumps({"key": keys[i], **_as_row(reply)})])
            self.found[keys[i]] = reply
            self.n_new += 1
            n_there += 1
            progress(n_there, n_wanted)
        return [self.found[key] for key in keys]


def _as_row(reply: Generated) -> dict[str, Any]:
    return dataclasses.asdict(reply)


def _from_row(row: dict[str, Any], where: str) -> tuple[str, Generated]:
    """Return key and text of one line.

    Raises:
      ValueError: the line is something else.
    """
    fields = dict(row)
    key = fields.pop("key", None)
    try:
        for name in ("token_ids", "log_probs"):
            if fields[name] is not None:
                fields[name] = tuple(fields[name])
        reply = Generated(**fields)
    except (KeyError, TypeError):
        reply = None
    if reply is None or not isinstance(key, str) or not isinstance(reply.text, str):
        raise ValueError(
            f"{where}: not a generated text of this program's version; move the file "
            "away to generate its texts again"
        )
    return key, reply


def open_replies(run: RunDir, role: str, progress: Console) -> Replies:
    """Open what a model has written in one role of a run; see `RunDir.replies`."""
    replies = Replies.open(run.replies(role))
    if replies.truncated:
        progress.note(replies.truncated)
    return replies


def reused_in_words(replies: Replies) -> str:
    """Say how many texts were generated, and how many found."""
    return (
        f"{replies.n_new} texts generated, {replies.n_reused} found in "
        f"{replies.lines.path.name}"
    )

"""Generated texts on disk, each appended when it exists and found again by its key.

Workers that share a stage's texts write a part each, beside the file; who works alone
after them finds their texts there, and takes them in.
"""

import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from extract.run.share import Share


@dataclasses.dataclass(kw_only=True)
class Replies:
    """A file of generated texts by key.

    The key covers everything that changes a text (`reply_key`), so a
    text is found again only for the same question to the same backend.

    Attributes:
      lines: where texts are appended.
      found: texts by key.
      parts: folder of what workers wrote, None where there is none.
      share: of the texts that are generated here; one of several needs a backend that
        plans its batches.
      from_parts: texts that are in parts alone.
      is_timed: a new text's line says what it took; no two starts write equal lines.
    """

    lines: JsonLines
    found: dict[str, Generated]
    parts: Path | None = None
    share: Share = Share()
    from_parts: dict[str, Generated] = dataclasses.field(default_factory=dict)
    is_timed: bool = False
    n_reused: int = 0  # texts that were found and not generated again
    n_new: int = 0  # texts that were generated and appended
    n_missing: int = 0  # texts of other workers that were wanted and are not there

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
                key, reply = _reply(row)
                found.setdefault(key, reply)
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
        done = {i for i, k in enumerate(keys) if k in self.found or first[k] != i}
        n_there = sum(key in self.found for key in first)
        self.n_reused += n_there
        progress(n_there, len(first))
        if not self.share.is_whole:
            mine = self.share.mine(generator.plan(prompts, config))
            done |= {*range(len(prompts))} - {i for batch in mine for i in batch}
        began = time.monotonic()
        for i, text in generator.stream(prompts, config, done):
            now = time.monotonic()
            took, began = round(now - began, 6) if self.is_timed else None, now
            reply = msgspec.structs.replace(text, seconds=took)
            if keys[i] in self.found:
                continue
            self.lines.append([_line(keys[i], reply)])
            self.found[keys[i]] = reply
            self.n_new += 1
            n_there += 1
            progress(n_there, len(first))
        if not self.share.is_whole:
            self.found |= dict(_written(self.parts))
            self.n_missing = sum(key not in self.found for key in first)
            return None
        self._take_in()
        return [self.found[key] for key in keys]

    def _take_in(self) -> None:
        """Append what workers wrote; their parts go."""
        self.lines.append([_line(key, x) for key, x in self.from_parts.items()])
        self.from_parts.clear()
        if self.parts is not None:
            shutil.rmtree(self.parts, ignore_errors=True)


def _reply(row: dict[str, Any]) -> tuple[str, Generated]:
    """Return a row's key and text."""
    key = msgspec.convert(row.pop("key"), str)
    return key, msgspec.convert(row, Generated)


def _line(key: str, reply: Generated) -> str:
    return json.dumps({"key": key, **msgspec.structs.asdict(reply)})


def _written(folder: Path) -> Iterator[tuple[str, Generated]]:
    """Yield keys and texts of all parts; of a damaged line on, none of its part."""
    for path in sorted(folder.glob("*.jsonl")):
        for row in JsonLines(path).whole_rows(dict[str, Any]):
            yield _reply(row)


def open_replies(
    run: RunDir,
    role: str,
    progress: Progress,
    *,
    is_timed: bool = False,
) -> Replies:
    """Open what a model has written in one role of a run; see `RunDir.replies`.

    Args:
      run: held alone, or for a share of the texts.
      role: of the model.
      progress: is told what was set aside.
      is_timed: see `Replies`.
    """
    share, parts = run.share, run.parts(role)
    if share.is_whole:
        replies = Replies.open(run.replies(role))
        replies.parts = parts
        others = {k: v for k, v in _written(parts) if k not in replies.found}
        replies.from_parts, replies.found = others, {**replies.found, **others}
    else:
        whole = (_reply(r) for r in JsonLines(run.replies(role)).whole_rows(dict))
        found = {**dict(whole), **dict(_written(parts))}
        name = f"{share.rank}-of-{share.world_size}@{socket.gethostname()}"
        lines = JsonLines.open(parts / f"{name}.{os.getpid()}.jsonl")
        replies = Replies(lines=lines, found=found, parts=parts, share=share)
    replies.is_timed = is_timed
    if replies.lines.truncated:
        progress.note(replies.lines.truncated)
    return replies


def reused_in_words(replies: Replies) -> str:
    """Say how many texts were generated, and how many found."""
    return (
        f"{replies.n_new} texts generated, {replies.n_reused} found in "
        f"{replies.lines.path.name}"
    )

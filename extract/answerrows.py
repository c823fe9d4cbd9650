"""The file of answers, opened to be continued: which rows are there, and still hold.

A row holds if it answers the very prompt that is asked now. Others (of a context that
was rewritten again since) are moved to a file beside, never mixed in.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from extract.atomic import write_text_atomic
from extract.jsonlines import JsonLines
from extract.requests import Request


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """An open file of answers.

    Attributes:
      lines: where rows are appended.
      done: keys of the answers that are there.
      notes: what was set aside, in words.
    """

    lines: JsonLines
    done: set[tuple[str, str, str]]
    notes: tuple[str, ...]


def open_answers(path: Path, requests: Sequence[Request]) -> AnswerRows:
    """Open a file of answers and keep the rows that answer these requests."""
    lines = JsonLines.open(path)
    asked = {request.key: request.prompt.ids for request in requests}
    done, stale, kept = set(), [], []
    for row in lines.rows():
        key = (row["example_id"], row["setting"], row["variant"])
        if key not in done and asked.get(key) == tuple(row["prompt_ids"]):
            done.add(key)
            kept.append(row)
        else:
            stale.append(row)
    notes = [] if lines.torn is None else [lines.torn]
    if stale:
        aside = JsonLines.open(path.with_name(path.name + ".stale"))
        aside.append(json.dumps(row) for row in stale)
        write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        notes.append(
            f"{path}: {len(stale)} answers are to prompts that are no longer asked "
            f"and are now in {aside.path.name}"
        )
    return AnswerRows(lines, done, tuple(notes))

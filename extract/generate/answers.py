"""The file of answers, opened to be continued: which rows are there, and still hold.

A row holds if it answers the very prompt that is asked now. Others (of a context that
was rewritten again since) are moved to a file beside, never mixed in. What workers
answered side by side lies in parts, one file per process, until one process alone
takes them in.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extract.generate.generator import Generated
from extract.generate.requests import Request
from extract.records import Answer, to_json
from extract.run.console import Progress, Update
from extract.run.contents import answers_file
from extract.run.directory import RunDir
from extract.run.files import (
    JsonLines,
    from_json,
    read_json,
    write_json_atomic,
    write_stream_atomic,
)

Key = tuple[str, str, str]  # example, setting, variant


class _Line(NamedTuple):
    """Where a row lies: files of answers are larger than memory should hold."""

    path: Path
    start: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """An open file of answers."""

    lines: JsonLines  # where rows are appended
    done: dict[Key, None]  # keys of the answers that are there, in the file's order

    def append(self, rows: Mapping[Key, str]) -> None:
        """Add answers, as lines by key."""
        self.lines.append(rows.values())
        self.done.update(dict.fromkeys(rows))

    def arrange(self, order: Sequence[Key]) -> None:
        """Put the rows into an order; nothing is written if they have it."""
        there = [key for key in order if key in self.done]
        if there != list(self.done):
            lines = {key: line for key, _, line in _read(self.lines.path)}
            _write(self.lines.path, [lines[key] for key in there])


def _read(path: Path, *, is_whole: bool = False) -> Iterator[tuple[Key, Answer, _Line]]:
    """Yield keys, answers and their places; an unfinished last line is passed over.

    In a file that `is_whole` a damaged line is an error. Elsewhere it is of a worker
    that was killed, and what follows is done again.
    """
    if not path.exists():
        return
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                again = "restore the file, or delete it to do the stage again"
                row = from_json(Answer, line, f"{path}, line {number}", again)
            except ValueError:
                if is_whole:
                    raise
                return
            if not line.endswith(b"\n"):
                return
            yield row.key, row, _Line(path, start, len(line))
            start += len(line)


def _write(path: Path, lines: Sequence[_Line]) -> None:
    """Replace a file in one step by lines of files; it may be one of them."""
    with contextlib.ExitStack() as opened, write_stream_atomic(path) as stream:
        sources = {
            source: opened.enter_context(source.open("rb"))
            for source in {line.path for line in lines}
        }
        for line in lines:
            sources[line.path].seek(line.start)
            stream.write(sources[line.path].read(line.n_bytes))


def part_files(run: RunDir) -> list[Path]:
    """Return what workers have written and nobody has taken in yet."""
    return sorted(run.parts("answer").glob("*.jsonl"))


def answered_keys(run: RunDir, requests: Sequence[Request]) -> set[Key]:
    """Return which requests have an answer, here or in a part; changes nothing."""
    asked = {request.key: request.prompt.ids for request in requests}
    # Parts first: they go only after the file has their rows.
    return {
        key
        for file in (*part_files(run), answers_file(run))
        for key, row, _ in _read(file)
        if asked.get(key) == row.prompt_ids
    }


def open_answers(
    run: RunDir, requests: Sequence[Request], progress: Progress
) -> AnswerRows:
    """Open a run's file of answers and keep the rows that answer these requests.

    Of the whole run nobody else writes it meanwhile: what workers wrote is taken in,
    and their parts go; what was set aside is noted. For a share of the work it is a
    part of this process's own, and what is answered anywhere counts as done.
    """
    if not run.share.is_whole:
        name = f"{run.share.rank}-of-{run.share.world_size}@{socket.gethostname()}"
        part = JsonLines.open(run.parts("answer") / f"{name}.{os.getpid()}.jsonl")
        return AnswerRows(part, dict.fromkeys(answered_keys(run, requests)))
    path = answers_file(run)
    lines = JsonLines.open(path)
    asked = {request.key: request.prompt.ids for request in requests}
    kept: dict[Key, _Line] = {}
    stale: list[str] = []
    for file in (path, *part_files(run)):
        for key, row, line in _read(file, is_whole=file == path):
            if key not in kept and asked.get(key) == row.prompt_ids:
                kept[key] = line
            elif key not in kept or file == path:  # else done twice, by two workers
                stale.append(to_json(row))
    if lines.truncated:
        progress.note(lines.truncated)
    if stale:
        aside = JsonLines.open(path.with_name(path.name + ".stale"))
        aside.append(stale)
        progress.note(
            f"{path}: {len(stale)} answers are to prompts that are no longer asked "
            f"and are now in {aside.path.name}"
        )
    if stale or any(line.path != path for line in kept.values()):
        _write(path, list(kept.values()))
    shutil.rmtree(run.parts("answer"), ignore_errors=True)
    return AnswerRows(lines, dict.fromkeys(kept))


# How an answer says that it is none; read at its start, after small words are lowered.
# A short list on purpose: it counts what is plainly no answer, and drops nothing.
_HEDGE = re.compile(
    r"\W*((i|we) (do not|don't|don’t|cannot|can't|can’t|am not|am unable|have no)\b"
    r"|i'm (not sure|unable|sorry)|i’m (not sure|unable|sorry)|sorry\b"
    r"|as an? (ai|language model|large language model)\b|it depends\b"
    r"|(it is |this is |the answer is )?"
    r"(not known|unknown|unclear|uncertain|not (mentioned|stated|given|specified)"
    r"|impossible to (say|tell|know))\b"
    r"|there is (no|not enough) (information|answer|context)\b"
    r"|(no|not enough) (information|answer|context)\b|(none|n/a)\W*$)",
    re.IGNORECASE,
)


def is_hedge(text: str) -> bool:
    """Return whether an answer begins by refusing, or by saying that it is unknown.

    By a list of English words: "I don't know", "unknown", "I cannot", "as an AI", "it
    depends", "not mentioned", "no information", and their like. An empty text is none.
    """
    return _HEDGE.match(text) is not None


def shares_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the shares of answers that are cut off, empty, and hedges or refusals.

    Args:
      answers: at least one.
    """
    counts = {
        "cut_off": sum(answer.stop_id is None for answer in answers),
        "empty": sum(not answer.text.strip() for answer in answers),
        "hedged": sum(is_hedge(answer.text) for answer in answers),
    }
    return {name: n / len(answers) for name, n in counts.items()}


_MANY_CUT = 0.1  # of the answers of a setting


def answers_in_words(answers: Iterable[Answer], limit: int) -> list[str]:
    """Say per setting how many answers were cut at the length limit or are empty.

    Args:
      answers: all of a run.
      limit: most tokens of an answer.

    Raises:
      ValueError: every answer is empty, so that nothing can be concluded.
    """
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.setting, []).append(answer)
    n_all, lines = sum(map(len, found.values())), []
    if n_all and not any(answer.text for mine in found.values() for answer in mine):
        raise ValueError(
            f"all {n_all} answers are empty: the model ends or cannot go on where its "
            "answer should begin; ask in other words (--template, --chat), look at the "
            "model's weights, and start another run directory"
        )
    for setting, mine in found.items():
        n_cut = sum(answer.stop_id is None for answer in mine)
        n_empty = sum(not answer.text for answer in mine)
        line = f"{setting}: {len(mine)} answers, {n_cut} cut at {limit} tokens, "
        n_hedges = sum(is_hedge(answer.text) for answer in mine)
        lines.append(f"{line}{n_empty} empty, {n_hedges} hedges or refusals")
        if n_cut > _MANY_CUT * len(mine):
            lines[-1] += (
                ". A cut answer is half a text, and mostly labelled wrong: the model "
                "explains or never stops; make the run with --chat or with a larger "
                "--max-new-tokens"
            )
    return lines


def record_backend(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Write down which backend answers, or check that it is still the same.

    Raises:
      ValueError: the answers that are there are of another backend; never mixed.
    """
    path = run.answers / "backend.json"
    # Through JSON, so that tuples and lists compare alike.
    wanted = json.loads(json.dumps(dict(identity)))
    if path.exists():
        # Before the file named a schema there was one only.
        again = "restore it, or delete the folder to answer again"
        found = {"schema": 1, **read_json(path, dict[str, Any], again)}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{run.answers} holds answers with {name}={found.get(name)!r}, "
                    f"asked was {wanted.get(name)!r}; start another run directory, or "
                    "delete this folder to answer again"
                )
        return
    if (run.answers / "answers.jsonl").exists() and wanted["backend"] == "served":
        raise ValueError(
            f"{run.answers} holds answers of an earlier version, which did not say who "
            "answered; start another run directory to answer by a server"
        )
    write_json_atomic(path, wanted)


def append_answers(
    rows: AnswerRows,
    requests: Sequence[Request],
    ask: Callable[[Collection[int]], Iterable[Sequence[tuple[int, Generated]]]],
    update: Update,
    share: Collection[int] | None = None,
) -> None:
    """Answer what has no row yet.

    Args:
      rows: where the answers go.
      requests: all of them.
      ask: of the indices that need no text; yields (index, text) in groups, each of
        which is appended as a whole as soon as it exists.
      update: told rows done and to do.
      share: indices that are answered here; None for all.
    """
    share = range(len(requests)) if share is None else share
    todo = {i for i in share if requests[i].key not in rows.done}
    update(len(share) - len(todo), len(share))
    for group in ask(set(range(len(requests))) - todo):
        answers = [requests[i].answer(reply) for i, reply in group if i in todo]
        rows.append({answer.key: to_json(answer) for answer in answers})
        todo -= {i for i, _ in group}
        update(len(share) - len(todo), len(share))

"""The file of answers, opened to be continued: which rows are there, and still hold.

A row holds if it answers the very prompt that is asked now. Others (of a context that
was rewritten again since) are moved to a file beside, never mixed in. What workers
answered side by side lies in parts, one file per process, until one process alone
takes them in.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from extract.generate.generator import Generated, Generator, Progress, SamplingConfig
from extract.generate.requests import Request
from extract.generate.sampling import request_prompt
from extract.records import Answer, to_json
from extract.run.directory import RunDir
from extract.run.files import JsonLines, write_json_atomic, write_stream_atomic

Key = tuple[str, str, str]  # example, setting, variant


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """An open file of answers.

    Attributes:
      lines: where rows are appended.
      done: keys of the answers that are there, in their order in the file.
      notes: what was set aside, in words.
    """

    lines: JsonLines
    done: dict[Key, None]
    notes: tuple[str, ...]

    def append(self, rows: Mapping[Key, str]) -> None:
        """Add answers, as lines by key."""
        self.lines.append(rows.values())
        self.done.update(dict.fromkeys(rows))

    def arrange(self, order: Sequence[Key]) -> None:
        """Put the rows into an order; nothing is written if they have it."""
        there = [key for key in order if key in self.done]
        if there != list(self.done):
            places = dict(_placed_rows(self.lines.path))
            _write_places(self.lines.path, [places[key] for key in there])


@dataclasses.dataclass(frozen=True)
class _Place:
    """One line of a file."""

    path: Path
    start: int
    n_bytes: int


def _lines(
    path: Path, *, is_whole: bool = False
) -> Iterator[tuple[dict[str, Any], _Place]]:
    """Yield rows and where they are; an unfinished last line is passed over.

    Args:
      path: may be absent.
      is_whole: a line that is none is an error.
    """
    if not path.exists():
        return
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if is_whole:
                    raise ValueError(
                        f"{path}, line {number}: not a JSON object ({error}); restore "
                        "the file, or delete it to do the stage again"
                    ) from None
                return  # of a worker that was killed; what follows is done again
            if not line.endswith(b"\n"):
                return
            yield row, _Place(path, start, len(line))
            start += len(line)


def _key_of(row: Mapping[str, Any]) -> Key:
    return row["example_id"], row["setting"], row["variant"]


def _placed_rows(path: Path) -> Iterator[tuple[Key, _Place]]:
    return ((_key_of(row), place) for row, place in _lines(path))


def _write_places(path: Path, places: Sequence[_Place]) -> None:
    """Replace a file in one step by lines of files; it may be one of them."""
    opened = {source: source.open("rb") for source in {p.path for p in places}}
    try:
        with write_stream_atomic(path) as stream:
            for place in places:
                opened[place.path].seek(place.start)
                stream.write(opened[place.path].read(place.n_bytes))
    finally:
        for source in opened.values():
            source.close()


def part_files(folder: Path) -> list[Path]:
    """Return what workers have written and nobody has taken in yet."""
    return sorted(folder.glob("*.jsonl"))


def answered_keys(path: Path, parts: Path, requests: Sequence[Request]) -> set[Key]:
    """Return which requests have an answer, here or in a part; changes nothing.

    Args:
      path: the file of answers.
      parts: folder of parts.
      requests: what is asked.
    """
    asked = {request.key: request.prompt.ids for request in requests}
    # Parts first: they go only after the file has their rows.
    return {
        _key_of(row)
        for file in (*part_files(parts), path)
        for row, _ in _lines(file)
        if asked.get(_key_of(row)) == tuple(row["prompt_ids"])
    }


def open_answers(
    path: Path, requests: Sequence[Request], parts: Path | None = None
) -> AnswerRows:
    """Open a file of answers and keep the rows that answer these requests.

    Args:
      path: the file; nobody else writes it meanwhile.
      requests: what is asked.
      parts: folder of parts; their rows are taken in, and the folder goes.
    """
    lines = JsonLines.open(path)
    asked = {request.key: request.prompt.ids for request in requests}
    kept: dict[Key, _Place] = {}
    stale: list[str] = []
    files = [] if parts is None else part_files(parts)
    for file in (path, *files):
        for row, place in _lines(file, is_whole=file == path):
            key = _key_of(row)
            if key not in kept and asked.get(key) == tuple(row["prompt_ids"]):
                kept[key] = place
            elif key not in kept or file == path:  # else done twice, by two workers
                stale.append(json.dumps(row))
    notes = [] if lines.truncated is None else [lines.truncated]
    if stale:
        aside = JsonLines.open(path.with_name(path.name + ".stale"))
        aside.append(stale)
        notes.append(
            f"{path}: {len(stale)} answers are to prompts that are no longer asked "
            f"and are now in {aside.path.name}"
        )
    if stale or any(place.path != path for place in kept.values()):
        _write_places(path, list(kept.values()))
    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)
    return AnswerRows(lines, dict.fromkeys(kept), tuple(notes))


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
        found = {"schema": 1, **json.loads(path.read_text(encoding="utf-8"))}
        differing = [
            name
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{run.answers} holds answers with {name}={found.get(name)!r}, asked "
                f"was {wanted.get(name)!r}; start another run directory, or delete "
                "this folder to answer again"
            )
        return
    if (run.answers / "answers.jsonl").exists() and wanted["backend"] == "served":
        raise ValueError(
            f"{run.answers} holds answers of an earlier version, which did not say who "
            "answered; start another run directory to answer by a server"
        )
    write_json_atomic(path, wanted)


def served_answer(request: Request, found: Generated) -> Answer:
    """Return a served text as an answer.

    Raises:
      ValueError: the server tells no token ids; a text split again may be other ids
        than were written, and the signals those of another answer.
    """
    if found.token_ids is None or (found.finish == "stop" and found.stop_id is None):
        raise ValueError(
            f"the server tells no token ids for question {request.example_id!r}; use "
            "vLLM with the dialect 'vllm' (return_token_ids), or answer on this machine"
        )
    return Answer(
        example_id=request.example_id,
        setting=request.setting,
        variant=request.variant,
        text=found.text,
        prompt_ids=request.prompt.ids,
        token_ids=found.token_ids,
        stop_id=found.stop_id,
        context_span=request.prompt.context_span,
        dropped=request.dropped,
    )


def append_answers(
    rows: AnswerRows,
    requests: Sequence[Request],
    generator: Generator,
    tokenizer: Any,
    config: SamplingConfig,
    progress: Progress = lambda done, total: None,
) -> None:
    """Answer what has no row yet; each row is appended when it exists."""
    done = {i for i, request in enumerate(requests) if request.key in rows.done}
    prompts = [request_prompt(tokenizer, request) for request in requests]
    n_done = len(done)
    progress(n_done, len(requests))
    for i, found in generator.stream(prompts, config, done):
        answer = served_answer(requests[i], found)
        rows.append({answer.key: to_json(answer)})
        n_done += 1
        progress(n_done, len(requests))

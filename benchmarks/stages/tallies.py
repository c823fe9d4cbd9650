"""What is there of a stage, counted in its files."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.stages.forecast import Tally
from extract.generate.answers import part_files
from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.files import JsonLines

_REPLIES = {"rewrite": "rewrite", "label": "judge", "sample": "sample"}


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files, and of all files below folders."""
    total = 0
    for path in paths:
        files = path.rglob("*") if path.is_dir() else (path,)
        total += sum(file.stat().st_size for file in files if file.is_file())
    return total


def count_stage(run: RunDir, stage: str, outputs: Iterable[Path]) -> Tally:
    """Return what is there of a stage.

    Args:
      run: of the stage.
      stage: as on the command line.
      outputs: what it writes.
    """
    n_rows = n_prompt = n_new = 0
    paths = list(outputs)
    if stage == "extract":  # its outputs name what identifies a store, not its arrays
        paths = [run.features(setting) for setting in SETTINGS]
    if stage == "answer":
        parts = part_files(run.answer_parts)
        paths += parts
        for file in (run.answers / "answers.jsonl", *parts):
            for row in JsonLines(file).whole_rows():
                n_rows += 1
                n_prompt += len(row["prompt_ids"])
                n_new += len(row["token_ids"]) + (row["stop_id"] is not None)
    elif stage in _REPLIES:
        replies = run.replies(_REPLIES[stage])
        paths.append(replies)
        for row in JsonLines(replies).whole_rows():
            n_rows += 1
            n_prompt += row["n_prompt_tokens"] or 0
            n_new += row["n_new_tokens"] or 0
    return Tally(
        n_rows=n_rows,
        n_requests=n_rows,  # a row is a text that some model was asked for
        n_prompt_tokens=n_prompt,
        n_new_tokens=n_new,
        disk_bytes=disk_bytes(paths),
    )


def paid_tokens(run: RunDir, stage: str) -> tuple[int, int]:
    """Return prompt and new tokens of the texts that are there of a stage.

    All of them, whichever backend wrote them: a cap errs on the side of the purse.
    What a server did not count is not known.
    """
    found = count_stage(run, stage, [])
    return found.n_prompt_tokens, found.n_new_tokens

"""Where the rows of a run lie: one file per stage, and all of them in one."""

from pathlib import Path

from benchmarks.stages.stage import Progress
from extract.run.directory import RunDir
from extract.run.files import write_text_atomic
from extract.run.results import ResultRow, read_rows, write_rows

ALWAYS = ("evaluate", "control")
ON_REQUEST = {
    "exhaustive": "beatrice select RUN_DIR --exhaustive",
    "ablate": "beatrice evaluate RUN_DIR --ablations",
}
"""Stages that a run has only where they were asked for, and what asks for them."""


def rows_file(run: RunDir, stage: str) -> Path:
    """Return the rows one stage has made."""
    return run.path / "rows" / f"{stage}.jsonl"


def asked_for(run: RunDir) -> list[str]:
    """Return the stages on request that are done and up to date."""
    return [name for name in ON_REQUEST if run.stage_done(name)]


def publish(run: RunDir, stage: str, rows: list[ResultRow], progress: Progress) -> None:
    """Write a stage's rows and, from all stages, results.jsonl.

    Rows that were asked for and are out of date are left out, and a line says so.
    """
    path = rows_file(run, stage)
    write_text_atomic(path, write_rows(rows))
    current = {*ALWAYS, stage, *asked_for(run)}
    parts = []
    for name in (*ALWAYS, *ON_REQUEST):
        if not rows_file(run, name).exists():
            continue
        if name in current:
            parts.append(rows_file(run, name))
        elif run.stage_record(name) is not None:
            progress.note(
                f"{name}: its rows are out of date and left out; run "
                f"`{ON_REQUEST[name]}` again"
            )
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    write_text_atomic(run.results, text)


def read_result_rows(run: RunDir) -> list[ResultRow]:
    """Return every row of the run."""
    return list(read_rows(run.results))

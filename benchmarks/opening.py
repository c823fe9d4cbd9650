"""How a verb opens its run directory, and does stages in it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.console import Progress, quiet

if TYPE_CHECKING:
    from benchmarks.presets import RunConfig
    from extract.rundir import RunDir

RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))


def config_of(run_dir: Path) -> "RunConfig":
    """Return the configuration a run directory was made with."""
    from benchmarks.presets import config_from_manifest
    from extract.manifest import read_manifest

    return config_from_manifest(read_manifest(run_dir)["config"])


@contextlib.contextmanager
def opened(run_dir: Path, config: "RunConfig") -> Iterator["RunDir"]:
    """Hold a run directory while stages work in it."""
    from extract.rundir import RunDir

    with RunDir.open(run_dir, config.as_json()) as run:
        yield run


def do(run_dir: Path, *names: str, config: "RunConfig | None" = None) -> None:
    """Do stages of a run, in order; without names, all that a run always has."""
    config = config_of(run_dir) if config is None else config
    if config.xla_flags:  # read once, when JAX starts
        os.environ.setdefault("XLA_FLAGS", config.xla_flags)
    from benchmarks.stage import run_stage
    from benchmarks.stages import ON_REQUEST, STAGES

    quiet()
    progress = Progress()
    with opened(run_dir, config) as run:
        for name in names or STAGES:
            run_stage({**STAGES, **ON_REQUEST}[name], run, config, progress)


def do_on_request(run_dir: Path, stage: str, extra: str, asked: bool) -> None:
    """Do a stage and, if asked, the one beside it.

    A report that is there is made anew, so that it shows what was asked for, unless
    some stage that it rests on must be done again first.
    """
    do(run_dir, *((stage, extra) if asked else (stage,)))
    if not asked or not (run_dir / "report.html").exists():
        return
    from benchmarks.stages import STAGES
    from extract.rundir import RunDir

    run = RunDir(run_dir)
    gaps = (run.stage_gap(name) for name in STAGES if name != "report")
    gap = next((gap for gap in gaps if gap is not None), None)
    if gap is None:
        do(run_dir, "report")
    else:
        Progress().note(f"report: left as it was, since {gap}")

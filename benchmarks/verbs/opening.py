"""How a verb opens its run directory, and does stages in it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.run.console import Progress, RunPath, quiet

if TYPE_CHECKING:
    from benchmarks.stages.presets import RunConfig
    from extract.run.directory import RunDir

RUN_DIR = click.argument("run_dir", type=RunPath())
SEED = click.IntRange(0, 2**31 - 1)  # what every generator of draws takes


def config_of(run_dir: Path) -> "RunConfig":
    """Return the configuration a run directory was made with."""
    from benchmarks.stages.configurations import config_from_manifest
    from extract.run.manifest import read_manifest

    return config_from_manifest(read_manifest(run_dir)["config"])


def alone(verb: str) -> None:
    """Refuse to be one of several workers of a launcher.

    Raises:
      click.UsageError: there are several.
    """
    from extract.run.workers import rank_and_world_size

    _, world_size = rank_and_world_size()
    if world_size > 1:
        raise click.UsageError(
            f"{verb} is one process's work, and {world_size} were launched; only "
            "`answer` on this machine and `extract` are shared among workers, so start "
            "this verb once (with --server, --concurrency says how many requests are "
            "under way)"
        )


@contextlib.contextmanager
def opened(run_dir: Path, config: "RunConfig") -> Iterator["RunDir"]:
    """Hold a run directory while stages work in it."""
    from extract.run.directory import RunDir

    with RunDir.open(run_dir, config.as_json()) as run:
        yield run


def set_compiler(flags: str) -> None:
    """Say how JAX compiles, before it compiles anything.

    Compiled code is kept in the user's cache directory (`JAX_COMPILATION_CACHE_DIR`
    names another, `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing): a run that is
    resumed, and the next of the same sizes, compile little.
    """
    import jax

    if flags:  # read from the environment when the first array is made
        os.environ.setdefault("XLA_FLAGS", flags)
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update(
            "jax_compilation_cache_dir", str(cache / "beatrice" / "compiled")
        )
        # All of it: a short run compiles a hundred small pieces of 50 ms each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def do(run_dir: Path, *names: str, config: "RunConfig | None" = None) -> None:
    """Do stages of a run, in order; without names, all that a run always has."""
    config = config_of(run_dir) if config is None else config
    progress = Progress()
    with opened(run_dir, config) as run:
        # Here, not above: a directory that is no run is refused at once.
        quiet()
        set_compiler(config.xla_flags)
        from benchmarks.stages.chain import ON_REQUEST, STAGES
        from benchmarks.stages.stage import run_stage

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
    from benchmarks.stages.chain import STAGES
    from extract.run.directory import RunDir

    run = RunDir(run_dir)
    gaps = (run.stage_gap(name) for name in STAGES if name != "report")
    gap = next((gap for gap in gaps if gap is not None), None)
    if gap is None:
        do(run_dir, "report")
    else:
        Progress().note(f"report: left as it was, since {gap}")

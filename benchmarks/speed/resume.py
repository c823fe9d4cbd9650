"""`beatrice bench resume`: does a killed extraction end with the same bytes?

A killed run is compared with one that nobody interrupts. Both do what `beatrice
extract` does, each time in a process of its own, on the same answers. The kills are
SIGKILL, spread over the whole extraction: each comes a random while after a random
number of ranges is committed, also during the start of a process.

Processes are forked from a server that has imported the libraries and done nothing
else, since starting one from nothing takes longer than what lies between two kills. A
thread of the process sends the signal, and waits for its moment in the process's own
CPU time, so that neither a busy machine nor a pause moves it.
"""

import dataclasses
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from ctypes import c_double
from pathlib import Path

import click

from benchmarks.speed.commands import AS_JSON
from extract.backbone.loading import open_backbone
from extract.backbone.names import BackboneConfig, backbone_of
from extract.generate.requests import answer_config, make_requests
from extract.records import SETTINGS, Answer, Example, read_records, write_lines
from extract.run.console import Progress, quiet
from extract.run.contents import answers_file
from extract.run.directory import RunDir
from extract.run.files import sha256_file, write_text_atomic
from extract.run.manifest import NewRun, Preset
from extract.run.share import Share
from extract.run.stages import run_stage
from extract.run.verbs import SEED
from extract.signals.plan import ExtractConfig
from extract.signals.stage import EXTRACT_PRESETS, extract_config, extract_part
from extract.store.read import done_ranges, open_store
from extract.world.commands import WORLD, WORLD_PRESETS

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])
_POLL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """What is extracted, and how often it is killed.

    Attributes:
      n_examples: stored examples: every setting and wording of a question is one.
      n_kills: SIGKILLs.
      seed: of their moments.
      preset: of the run.
      extract: what is kept of the signals.
    """

    n_examples: int = 5000
    n_kills: int = 20
    seed: int = 0
    preset: Preset = "demo"
    extract: ExtractConfig = EXTRACT_PRESETS["demo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeProof:
    """What came of it: counts, files that differ or that one side lacks, wall times.

    `n_half_written` counts kills that left files of a range that was not committed,
    and `n_before` the ranges that were committed at each kill.
    """

    n_examples: int
    n_ranges: int
    n_kills: int
    n_half_written: int
    n_before: tuple[int, ...]
    n_files: int
    n_bytes: int
    differing: tuple[str, ...]
    whole_seconds: float
    killed_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """When a process is to kill itself.

    Attributes:
      n_committed: once so many ranges are committed …
      seconds: … and so much CPU time has passed since then.
    """

    n_committed: int
    seconds: float


def _extract(path: Path, kill: Kill | None, spent: c_double) -> None:
    """Do what `beatrice extract` does; what each process runs.

    `spent` is set to the CPU seconds that it took.
    """
    if kill is not None:
        threading.Thread(
            target=_kill_at, args=(RunDir(path), kill), daemon=True
        ).start()
    with RunDir.open(path) as run:
        extract_part(run, extract_config(run), lambda done, total: None, Share())
    spent.value = time.process_time()


def _kill_at(run: RunDir, kill: Kill) -> None:
    """Wait for the moment, and kill this process."""
    while n_committed(run) < kill.n_committed:
        time.sleep(_POLL_S)
    end = time.process_time() + kill.seconds
    while time.process_time() < end:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def run_process(run: RunDir, kill: Kill | None = None) -> float:
    """Extract in a process of its own; return its CPU seconds, NaN if it was killed.

    Raises:
      ValueError: it failed by itself.
    """
    spent = _FORKS.RawValue(c_double, math.nan)
    process = _FORKS.Process(target=_extract, args=(run.path, kill, spent))
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL if kill else 0):
        raise ValueError(
            f"the extraction of {run.path} failed by itself with exit code "
            f"{process.exitcode}; its message is above"
        )
    return float(spent.value)


def n_committed(run: RunDir) -> int:
    """Count the commit records of both settings."""
    return sum(1 for _ in (run.path / "features").glob("*/commits/*/*.json"))


def prove(
    folder: Path, config: ResumeConfig, progress: Callable[[int, int], None]
) -> ResumeProof:
    """Extract twice, once killed again and again, and compare every file.

    Args:
      folder: an empty directory; two runs are left in it.
      config: how much and how often.
      progress: told kills done and to do.

    Raises:
      ValueError: the preset has fewer examples, or a process fails by itself.
    """
    whole = _make_run(folder / "whole", config)
    killed = RunDir(folder / "killed")
    shutil.copytree(whole.path, killed.path, ignore=shutil.ignore_patterns("lock"))
    began = time.monotonic()
    spent = run_process(whole)
    whole_seconds = time.monotonic() - began
    stores = [open_store(whole.features(setting)) for setting in SETTINGS]
    n_ranges = sum(store.spec.n_ranges for store in stores)
    if n_ranges < 2:
        raise ValueError(
            f"{config.n_examples} examples are one range, which is too few to be "
            "killed between; ask for more"
        )
    began = time.monotonic()
    n_before, n_half_written = _kill_repeatedly(
        killed, config, n_ranges, spent / n_ranges, progress
    )
    run_process(killed)
    n_files, n_bytes, differing = compare(whole.path, killed.path)
    return ResumeProof(
        n_examples=sum(len(store.spec.keys) for store in stores),
        n_ranges=n_ranges,
        n_kills=len(n_before),
        n_half_written=n_half_written,
        n_before=tuple(n_before),
        n_files=n_files,
        n_bytes=n_bytes,
        differing=differing,
        whole_seconds=whole_seconds,
        killed_seconds=time.monotonic() - began,
    )


def _make_run(path: Path, config: ResumeConfig) -> RunDir:
    """Make a run with questions and answers; the answers are the gold ones.

    What is extracted need not be what the model would say, and this takes seconds.
    """
    sections = {
        "backbone": BackboneConfig(n_threads=1),
        "world": WORLD_PRESETS[config.preset],
        "extract": config.extract,
    }
    with RunDir.open(path, NewRun(preset=config.preset, sections=sections)) as run:
        run_stage(WORLD, run, Progress())
        answers = _gold_answers(run, config.n_examples)
        write_text_atomic(answers_file(run), write_lines(answers))
    return run


def _gold_answers(run: RunDir, n_examples: int) -> list[Answer]:
    """Return the gold answers to the first questions, in every setting and wording."""
    backbone, answers = open_backbone(backbone_of(run)), list[Answer]()
    tokenizer, config = backbone.tokenizer, answer_config(run)
    for example in read_records(run.examples, Example):
        gold = example.golds[0]
        ids = tokenizer(" " + gold, add_special_tokens=False)["input_ids"]
        answers += (
            Answer(
                example_id=request.example_id,
                setting=request.setting,
                variant=request.variant,
                text=gold,
                prompt_ids=request.prompt.ids,
                token_ids=tuple(ids),
                stop_id=tokenizer.eos_token_id,
                context_span=request.prompt.context_span,
            )
            for request in make_requests(
                [example], backbone, config.prompt, config.generation.max_new_tokens
            ).requests
        )
        if len(answers) >= n_examples:
            return answers[:n_examples]
    raise ValueError(
        f"the {run.preset} preset has {len(answers)} examples to extract, expected at "
        f"least {n_examples}; ask for fewer"
    )


def _kill_repeatedly(
    run: RunDir,
    config: ResumeConfig,
    n_ranges: int,
    pace: float,
    progress: Callable[[int, int], None],
) -> tuple[list[int], int]:
    """Start and kill; return the ranges committed at each kill, and half-written ones.

    `pace` is the CPU seconds of a range.
    """
    rng = random.Random(config.seed)
    # Not among the last, which are over before the kill.
    targets = sorted(rng.randrange(n_ranges * 9 // 10) for _ in range(config.n_kills))
    n_before, n_half_written = [], 0
    for number, target in enumerate(targets):
        # A target that is met already means a kill between the start and a range.
        longest = 2 * pace * (1 + (n_committed(run) >= target))
        kill = Kill(n_committed=target, seconds=rng.uniform(0.0, longest))
        if not math.isnan(run_process(run, kill)):
            break  # it was faster than the kill
        n_before.append(n_committed(run))
        n_half_written += any(is_half_written(run.features(s)) for s in SETTINGS)
        progress(number + 1, config.n_kills)
    return n_before, n_half_written


def is_half_written(features: Path) -> bool:
    """Tell whether a store has files of a range that is not committed."""
    if not (features / "index.json").exists():
        return features.exists()
    store = open_store(features)
    done = done_ranges(store)
    return any(
        (features / key).exists()
        for range_id in range(store.spec.n_ranges)
        if range_id not in done
        for name in store.spec.families
        for key in store.shard_keys(range_id, name)
    )


def compare(whole: Path, killed: Path) -> tuple[int, int, tuple[str, ...]]:
    """Return how many files and bytes two runs' features have, and which differ.

    Args:
      whole: a run; the bytes are its own.
      killed: the other.
    """
    ours, theirs = (_hashes(path / "features") for path in (whole, killed))
    names = sorted(ours.keys() | theirs.keys())
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    n_bytes = sum(size for _, size in ours.values())
    return len(names), n_bytes, tuple(differing)


def _hashes(folder: Path) -> dict[str, tuple[str, int]]:
    """Return SHA-256 and size of every file by its name."""
    return {
        path.relative_to(folder).as_posix(): (sha256_file(path), path.stat().st_size)
        for path in folder.rglob("*")
        # A killed writer's temporary, which TensorStore replaces or ignores.
        if path.is_file() and path.suffix != ".__lock"
    }


@click.command()
@click.option(
    "--examples",
    default=5000,
    type=click.IntRange(min=1),
    help="Of the store: a question in one setting and wording is one.",
)
@click.option(
    "--kills",
    default=20,
    type=click.IntRange(min=1),
    help="SIGKILLs at random moments.",
)
@click.option("--seed", default=0, type=SEED, help="Of the moments.")
@AS_JSON
def resume(examples: int, kills: int, seed: int, as_json: bool) -> None:
    """Kill `beatrice extract` at random and resume it; compare every stored byte.

    Fails if a file differs from that of an uninterrupted run, or if fewer kills hit.

    Example: beatrice bench resume --examples 600 --kills 5
    """
    quiet()
    config = ResumeConfig(n_examples=examples, n_kills=kills, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        with Progress().stage("resume") as update:
            found = prove(Path(folder), config, update)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        click.echo(
            f"{found.n_examples} examples in {found.n_ranges} ranges; {found.n_kills} "
            f"kills, {found.n_half_written} of them with a range half written; "
            f"{found.n_files} files, {found.n_bytes} bytes, {len(found.differing)} "
            f"files differ; {found.whole_seconds:.0f} s uninterrupted, "
            f"{found.killed_seconds:.0f} s killed"
        )
    if found.differing:
        raise click.ClickException(f"{found.differing[0]} differs after resuming")
    if found.n_kills < kills:
        raise click.ClickException(
            f"only {found.n_kills} of {kills} kills came before the end; use more "
            "examples"
        )

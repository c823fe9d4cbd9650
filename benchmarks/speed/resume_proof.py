"""Extraction killed at random moments, beside one that nobody interrupts.

Both do what `beatrice extract` does, each time in a process of its own, on the same
answers. The kills are SIGKILL, spread over the whole extraction: each comes a random
while after a random number of ranges is committed, also during the start of a process.
"""

import dataclasses
import math
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from extract.pipeline import answers_file, write_world

from benchmarks.speed.resume_worker import Death, live, n_committed
from benchmarks.stages.presets import PresetName, RunConfig, make_config
from benchmarks.stages.torch_stages import open_backbone
from extract.generate.requests import make_requests
from extract.records import SETTINGS, Answer, Example, read_records, write_lines
from extract.run.directory import RunDir
from extract.run.files import sha256_file, write_text_atomic
from extract.store.config import StoreConfig
from extract.store.read import done_ranges, open_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """What is extracted, and how often it is killed.

    Attributes:
      n_examples: stored examples: every setting and wording of a question is one.
      n_kills: SIGKILLs.
      seed: of their moments.
      preset: of the run.
      kept: what is kept of the signals.
      n_threads: of Torch.
    """

    n_examples: int = 5000
    n_kills: int = 20
    seed: int = 0
    preset: PresetName = "demo"
    kept: StoreConfig = StoreConfig()
    n_threads: int = 1

    def run_config(self) -> RunConfig:
        """Return the configuration of both runs."""
        made = make_config(self.preset, kept=self.kept)
        return dataclasses.replace(made, n_threads=self.n_threads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeProof:
    """What came of it.

    Attributes:
      n_examples: stored examples.
      n_ranges: ranges of both settings.
      n_kills: processes that were killed.
      n_torn: kills that left files of a range that was not committed.
      n_before: ranges committed at each kill.
      n_files: files compared.
      n_bytes: their bytes.
      differing: files that differ, or that one side lacks.
      whole_seconds: wall time of the uninterrupted process.
      killed_seconds: wall time of all processes of the killed run.
    """

    n_examples: int
    n_ranges: int
    n_kills: int
    n_torn: int
    n_before: tuple[int, ...]
    n_files: int
    n_bytes: int
    differing: tuple[str, ...]
    whole_seconds: float
    killed_seconds: float


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
    spent = live(whole, config.run_config())
    whole_seconds = time.monotonic() - began
    stores = [open_store(whole.features(setting)) for setting in SETTINGS]
    n_ranges = sum(store.spec.n_ranges for store in stores)
    if n_ranges < 2:
        raise ValueError(
            f"{config.n_examples} examples are one range, which is too few to be "
            "killed between; ask for more"
        )
    began = time.monotonic()
    n_before, n_torn = _kill_again_and_again(
        killed, config, n_ranges, spent / n_ranges, progress
    )
    live(killed, config.run_config())
    n_files, n_bytes, differing = compare(whole.path, killed.path)
    return ResumeProof(
        n_examples=sum(len(store.spec.keys) for store in stores),
        n_ranges=n_ranges,
        n_kills=len(n_before),
        n_torn=n_torn,
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
    made = config.run_config()
    with RunDir.open(path, made.as_json()) as run:
        write_world(run, made.world, made.questions)
        answers = _gold_answers(run, made, config.n_examples)
        write_text_atomic(answers_file(run), write_lines(answers))
    return run


def _gold_answers(run: RunDir, made: RunConfig, n_examples: int) -> list[Answer]:
    """Return the gold answers to the first questions, in every setting and wording."""
    backbone, answers = open_backbone(made), list[Answer]()
    tokenizer = backbone.tokenizer
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
                [example], backbone, made.prompt, made.max_new_tokens
            ).requests
        )
        if len(answers) >= n_examples:
            return answers[:n_examples]
    raise ValueError(
        f"the {made.preset} preset has {len(answers)} examples to extract, expected at "
        f"least {n_examples}; ask for fewer"
    )


def _kill_again_and_again(
    run: RunDir,
    config: ResumeConfig,
    n_ranges: int,
    pace: float,
    progress: Callable[[int, int], None],
) -> tuple[list[int], int]:
    """Start and kill; return the ranges committed at each kill, and truncated kills.

    `pace` is the CPU seconds of a range.
    """
    rng = random.Random(config.seed)
    # Not among the last, which are over before the kill.
    targets = sorted(rng.randrange(n_ranges * 9 // 10) for _ in range(config.n_kills))
    n_before, n_torn = [], 0
    for number, target in enumerate(targets):
        # A target that is met already means a kill between the start and a range.
        longest = 2 * pace * (1 + (n_committed(run) >= target))
        death = Death(n_committed=target, seconds=rng.uniform(0.0, longest))
        if not math.isnan(live(run, config.run_config(), death)):
            break  # it was faster than the kill
        n_before.append(n_committed(run))
        n_torn += any(is_torn(run.features(setting)) for setting in SETTINGS)
        progress(number + 1, config.n_kills)
    return n_before, n_torn


def is_torn(features: Path) -> bool:
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
    sides = [_hashes(path / "features") for path in (whole, killed)]
    names = sorted(sides[0].keys() | sides[1].keys())
    differing = [name for name in names if sides[0].get(name) != sides[1].get(name)]
    n_bytes = sum(size for _, size in sides[0].values())
    return len(names), n_bytes, tuple(differing)


def _hashes(folder: Path) -> dict[str, tuple[str, int]]:
    """Return SHA-256 and size of every file by its name."""
    return {
        path.relative_to(folder).as_posix(): (sha256_file(path), path.stat().st_size)
        for path in folder.rglob("*")
        # A killed writer's temporary, which TensorStore replaces or ignores.
        if path.is_file() and path.suffix != ".__lock"
    }

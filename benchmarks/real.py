"""Runs of a released model on published questions: files, training sizes, costs."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.datasets.building import is_usable
from beatrice.extract.datasets.loading import Loaded, open_dataset
from beatrice.extract.datasets.splits import Context, Role
from beatrice.extract.run.files import read_json, write_json_atomic
from beatrice.extract.run.process import (
    begin_peak,
    peak_bytes,
    peak_bytes_of_children,
)
from beatrice.extract.run.stages import bytes_in_words
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    SelectConfig,
    TrainConfig,
)


class NeededSet(NamedTuple):
    """A question set that a real run needs."""

    title: str
    roles: tuple[Role, ...]  # what its file is used for; no question is in two splits
    context: Context  # which passages its examples have
    remedy: str  # which file to get if it is missing


# TriviaQA's passages are whole pages, too long for a small model. The second of PopQA's
# two gold paragraphs is from the answer's own page, so its title is the answer.
WANTED = {
    "triviaqa": NeededSet(
        "TriviaQA",
        ("train", "dev"),
        "none",
        "any published file, even without passages, such as DPR's trivia-*.qa.csv",
    ),
    "nq": NeededSet(
        "Natural Questions",
        ("train", "dev"),
        "supporting",
        "a file with gold passages, such as nq-open-oracle.jsonl.gz, DPR's "
        "nq-dev_gold_info.json or biencoder-nq-dev.json",
    ),
    "popqa": NeededSet(
        "PopQA",
        ("held-out",),
        "first",
        "a file with gold paragraphs, such as popqa.json of HippoRAG or NeuroPath",
    ),
}


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, in an order independent of the file system."""
    for where, folders, names in os.walk(folder):
        # TriviaQA's `evidence` has half a million pages but no questions.
        folders[:] = sorted(f for f in folders if f[0] != "." and f != "evidence")
        yield from (Path(where) / name for name in sorted(names) if name[0] != ".")


def _n_usable(path: Path, note: Callable[[str], None]) -> tuple[str | None, int]:
    """Return the question set of a file, and how many of its questions are usable."""
    wanted = None
    try:
        file = open_dataset(path)
        if (wanted := WANTED.get(file.dataset or "")) is None:
            return None, 0
        return file.dataset, sum(
            isinstance(row, Loaded)
            and row.question.dataset == file.dataset
            and is_usable(row, wanted.context)
            for row in file.read()
        )
    except (ValueError, OSError) as error:  # not questions, or a partial download
        if wanted is not None:
            note(f"{wanted.title}: left out: {error}")
        return None, 0


def find_questions(
    folder: Path, note: Callable[[str], None], given: Collection[tuple[str, str]] = ()
) -> list[tuple[Role, str, Path]]:
    """Return (role, set, file) of the sets that a real run needs.

    Of several files of one set, the one with the most usable questions is taken. The
    (role, set) pairs in `given` have their files already; if one has a role that its
    set lacks in `WANTED`, such as held out, nothing else of that set is looked for.
    """
    best: dict[str, tuple[int, Path]] = {}
    for path in _files(folder):
        dataset, n = _n_usable(path, note)
        if dataset is not None and n > best.get(dataset, (0, path))[0]:
            best[dataset] = n, path
    looked_for: list[tuple[Role, str]] = [
        (role, name)
        for name, wanted in WANTED.items()
        if {role for role, dataset in given if dataset == name} <= {*wanted.roles}
        for role in wanted.roles
        if (role, name) not in given
    ]
    names = dict.fromkeys(name for _, name in looked_for)
    missing = [name for name in names if name not in best]
    if missing:
        options = [f"--{role} {m}=FILE" for role, m in looked_for if m in missing]
        raise ValueError(
            f"{folder} lacks "
            + "; ".join(f"{WANTED[m].title}: {WANTED[m].remedy}" for m in missing)
            + f"; put the files there, or name them: {' '.join(options)}"
        )
    for name in names:
        note(f"{WANTED[name].title}: {best[name][0]} questions in {best[name][1]}")
    return [(role, name, best[name][1]) for role, name in looked_for]


_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}  # two flags of x86, one of ARM


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the dtype for weights: bfloat16 if this processor can multiply it.

    Gemma 3 270M reads 4,000 tokens/s in bfloat16 on a processor with AMX and 1,160 in
    float32; on processors without such units, bfloat16 is slower than float32.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return "float32"
    flags = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    return "bfloat16" if _BF16 & set(flags.split()) else "float32"


# With weights in a file of at most this size, two threads answer a tenth to a third
# faster than one, two processes twice as fast (docs/measurements.md, "Threads that
# wait").
_SMALL_MODEL = 1 << 30
_LEAST_ASKED = 1_000  # questions of a worker: it loads the model in the time of 100
# Bytes of memory per byte of the file, and those of batches and their signals.
_MOST_WIDENED, _BESIDE = 4, 4 << 30


def _n_bytes_of_weights(model: Path) -> int:
    """Return the size of a model's files on this machine; 0 if it has none here."""
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def n_threads_of(model: Path) -> int:
    """Return with how many of Torch's threads a model should answer on a CPU."""
    is_small = 0 < _n_bytes_of_weights(model) <= _SMALL_MODEL
    return 1 if is_small else BackboneConfig.n_threads


def n_workers(config: BackboneConfig, n_asked: int, n_free: int, n_cores: int) -> int:
    """Return how many processes should answer `n_asked` questions with a model.

    On a CPU, as many as there are cores for their threads and memory (`n_free` bytes)
    for their weights. Their answers are those of a single process.
    """
    size = _n_bytes_of_weights(Path(config.path))
    if config.device != "cpu" or not size:
        return 1
    n_that_fit = n_free // (_MOST_WIDENED * size + _BESIDE)
    return max(1, min(n_cores // config.n_threads, n_asked // _LEAST_ASKED, n_that_fit))


class StageCost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stage cost."""

    seconds: float = 0.0  # wall time of its last start only
    # Of all cores during that start. On a machine shared with other work, half of it is
    # the least that two free cores would take.
    cpu_seconds: float = 0.0
    n_starts: int = 0  # more than one if it was interrupted
    peak_bytes: int = 0  # peak memory of its largest process during that start
    disk_bytes: int = 0  # size of the run directory after it


COSTS = "costs.json"  # in the run directory; no stage reads it


def read_costs(path: Path) -> dict[str, StageCost]:
    """Return the costs of the stages that were started, in the order of the file."""
    if not path.exists():
        return {}
    return read_json(path, dict[str, StageCost], "delete it; nothing depends on it")


def _clocks() -> tuple[float, float]:
    """Return the time, and that of all cores for this process and ended children."""
    return time.monotonic(), sum(os.times()[:4])


@contextlib.contextmanager
def recorded_cost(
    folder: Path, stage: str, record_of: Callable[[str], object]
) -> Iterator[None]:
    """Record what a stage costs; its old costs stay if it had nothing to do."""
    path, done_before = folder / COSTS, record_of(stage)
    costs = read_costs(path)
    before = costs.get(stage, StageCost())
    costs[stage] = msgspec.structs.replace(before, n_starts=before.n_starts + 1)
    write_json_atomic(path, msgspec.to_builtins(costs))
    begin_peak()
    began, cpu_began, children_before = *_clocks(), peak_bytes_of_children()
    yield
    if done_before is not None and record_of(stage) == done_before:
        costs[stage] = before
    else:
        (ended, cpu_ended), peak = _clocks(), peak_bytes_of_children()
        costs[stage] = StageCost(
            seconds=round(ended - began, 1),
            cpu_seconds=round(cpu_ended - cpu_began, 1),
            n_starts=before.n_starts + 1,
            peak_bytes=max(peak_bytes(), peak if peak > children_before else 0),
            disk_bytes=sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()),
        )
    write_json_atomic(path, msgspec.to_builtins(costs))


def costs_in_words(costs: Mapping[str, StageCost]) -> str:
    """Return the costs as a plain-text table, with the totals below."""
    every = [StageCost(), *costs.values()]
    total = StageCost(
        seconds=sum(cost.seconds for cost in every),
        cpu_seconds=sum(cost.cpu_seconds for cost in every),
        n_starts=sum(cost.n_starts for cost in every),
        peak_bytes=max(cost.peak_bytes for cost in every),
        disk_bytes=max(cost.disk_bytes for cost in every),
    )
    lines = [
        f"{'stage':<12}{'minutes':>9}{'of cores':>10}{'peak memory':>13}"
        f"{'disk after':>12}{'starts':>8}"
    ]
    lines += [
        f"{name:<12}{cost.seconds / 60:>9.1f}{cost.cpu_seconds / 60:>10.1f}"
        f"{bytes_in_words(cost.peak_bytes):>13}{bytes_in_words(cost.disk_bytes):>12}"
        f"{cost.n_starts:>8}"
        for name, cost in {**costs, "all": total}.items()
    ]
    if any(cost.n_starts > 1 for cost in every):
        lines.append("(a stage that was interrupted is timed for its last start only)")
    return "\n".join(lines)


# How to train encoders and heads on a few thousand answers of a released model. The
# paper's protocol is for ten times as many rows; the demo's sizes are for minutes on an
# invented world. These were chosen on Gemma 3 270M's validation answers
# (docs/measurements.md). Encoders start from logistic regression (`jaxprobe.linear`),
# because a network without it did worse than regression on the same signals. Noise and
# dropout are strong, and the learning rate is constant. A head is the mean logit of its
# encoders if its gain over that may be chance.
GRID = GridConfig(
    encoder=EncoderConfig(
        projection=32,
        hidden=32,
        n_blocks=1,
        n_groups=4,
        dropout=0.5,
        input_noise=1.0,
    ),
    train=TrainConfig(learning_rate=1e-3, batch_size=128, max_epochs=24, patience=8),
).linear_first()
SELECT = SelectConfig(
    head=FusionConfig(hidden=16, is_mean_first=True),
    train=TrainConfig(
        learning_rate=1e-3,
        batch_size=256,
        max_epochs=15,
        lr_patience=2,
        patience=4,
        n_microbatches=1,
    ),
)

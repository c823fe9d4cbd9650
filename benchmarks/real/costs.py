"""What each stage of a real run cost, written down; and how weights are held."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from beatrice.extract.run.files import read_json, write_json_atomic
from beatrice.extract.run.memory import begin_peak, peak_bytes
from beatrice.extract.run.stages import bytes_in_words, disk_bytes

_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}  # x86 twice, and ARM


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return how weights are held on this processor: bfloat16 where it multiplies them.

    Gemma 3 270M reads 4,000 tokens/s in bfloat16 on a processor with AMX and 1,160 in
    float32; without such units bfloat16 is the slower one.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return "float32"
    flags = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    return "bfloat16" if _BF16 & set(flags.split()) else "float32"


class StageCost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stage cost.

    Attributes:
      seconds: wall time, of its last start alone.
      cpu_seconds: of all cores during that start; where other work shares the machine,
        half of it is what two cores alone would take at least.
      n_starts: more than one if it was stopped in between.
      peak_bytes: most memory of the process during that start.
      disk_bytes: of the run directory after it.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    n_starts: int = 0
    peak_bytes: int = 0
    disk_bytes: int = 0


COSTS = "costs.json"  # in the run; no stage reads it


def read_costs(path: Path) -> dict[str, StageCost]:
    """Return the costs of the stages that were started, in their order."""
    if not path.exists():
        return {}
    return read_json(path, dict[str, StageCost], "delete it; nothing depends on it")


def _write(path: Path, costs: Mapping[str, StageCost]) -> None:
    write_json_atomic(path, msgspec.to_builtins(costs))


@contextlib.contextmanager
def measured(
    folder: Path, stage: str, record_of: Callable[[str], object]
) -> Iterator[None]:
    """Write down what a stage costs; nothing changes if it was done already.

    Args:
      folder: of the run.
      stage: its name.
      record_of: gives a stage's record by its name, None where there is none.
    """
    path, done_before = folder / COSTS, record_of(stage)
    costs = read_costs(path)
    before = costs.get(stage, StageCost())
    costs[stage] = msgspec.structs.replace(before, n_starts=before.n_starts + 1)
    _write(path, costs)
    begin_peak()
    began, cpu_began = time.monotonic(), time.process_time()
    yield
    if done_before is not None and record_of(stage) == done_before:
        costs[stage] = before
    else:
        costs[stage] = StageCost(
            seconds=round(time.monotonic() - began, 1),
            cpu_seconds=round(time.process_time() - cpu_began, 1),
            n_starts=before.n_starts + 1,
            peak_bytes=peak_bytes(),
            disk_bytes=disk_bytes(folder),
        )
    _write(path, costs)


def costs_in_words(costs: Mapping[str, StageCost]) -> str:
    """Return the costs as a table in plain characters, with the totals below."""
    every = costs.values()
    total = StageCost(
        seconds=sum(cost.seconds for cost in every),
        cpu_seconds=sum(cost.cpu_seconds for cost in every),
        n_starts=sum(cost.n_starts for cost in every),
        peak_bytes=max((cost.peak_bytes for cost in every), default=0),
        disk_bytes=max((cost.disk_bytes for cost in every), default=0),
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
        lines.append("(of a stage that was stopped, the last start alone is timed)")
    return "\n".join(lines)

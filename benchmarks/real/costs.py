"""What a real run needs, said before it starts; what it cost, written down by stage."""

import contextlib
import shutil
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from extract.run.directory import RunDir
from extract.run.files import read_json, write_json_atomic
from extract.run.memory import begin_peak, peak_bytes
from extract.run.stages import bytes_in_words, disk_bytes

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


class Needs(NamedTuple):
    """What a run takes; what is empty or None has not been measured.

    Attributes:
      minutes: by stage, on two cores.
      memory_bytes: of the process.
      disk_bytes: of the run directory.
    """

    minutes: Mapping[str, float] = types.MappingProxyType({})
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    def in_words(self) -> str:
        """Return the needs in a line."""
        known = [
            f"about {sum(self.minutes.values()):.0f} minutes on two cores"
            if self.minutes
            else "",
            *(
                f"{bytes_in_words(n)} of {name}"
                for n, name in (
                    (self.memory_bytes, "memory"),
                    (self.disk_bytes, "disk"),
                )
                if n is not None
            ),
        ]
        return ", ".join(filter(None, known)) or "what nobody has measured yet"


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that can be had; None where the system does not tell."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return None


def check_needs(run_dir: Path, needs: Needs, memory: int | None) -> None:
    """Refuse to begin what cannot end.

    Args:
      run_dir: what it holds already is not needed a second time.
      needs: of the whole run.
      memory: bytes that can be had, or None if unknown.

    Raises:
      ValueError: disk or memory will not do; says how much is there.
    """
    there = next(p for p in (run_dir, *run_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    held = disk_bytes(run_dir) if run_dir.exists() else 0
    for name, needed, found in (
        ("disk", max(0, (needs.disk_bytes or 0) - held), free),
        ("memory", needs.memory_bytes or 0, memory),
    ):
        if found is not None and found < needed:
            raise ValueError(
                f"the run needs {bytes_in_words(needed)} of {name}, "
                f"{bytes_in_words(found)} are free; make room, or ask for less with "
                "--n-train, --n-evaluation, --n-held-out or --hidden-layers"
            )


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


def costs_file(run: RunDir) -> Path:
    """Return where the costs lie; no stage reads them."""
    return run.path / "costs.json"


def read_costs(run: RunDir) -> dict[str, StageCost]:
    """Return the costs of the stages that were started, in their order."""
    path = costs_file(run)
    if not path.exists():
        return {}
    return read_json(path, dict[str, StageCost], "delete it; nothing depends on it")


def _write(run: RunDir, costs: Mapping[str, StageCost]) -> None:
    write_json_atomic(costs_file(run), msgspec.to_builtins(costs))


@contextlib.contextmanager
def measured(run: RunDir, stage: str) -> Iterator[None]:
    """Write down what a stage costs; nothing changes if it was done already."""
    done_before = run.stage_record(stage)
    costs = read_costs(run)
    before = costs.get(stage, StageCost())
    costs[stage] = msgspec.structs.replace(before, n_starts=before.n_starts + 1)
    _write(run, costs)
    begin_peak()
    began, cpu_began = time.monotonic(), time.process_time()
    yield
    if done_before is not None and run.stage_record(stage) == done_before:
        costs[stage] = before
    else:
        costs[stage] = StageCost(
            seconds=round(time.monotonic() - began, 1),
            cpu_seconds=round(time.process_time() - cpu_began, 1),
            n_starts=before.n_starts + 1,
            peak_bytes=peak_bytes(),
            disk_bytes=disk_bytes(run.path),
        )
    _write(run, costs)


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

"""What a run needs of a machine, looked at before hours are spent on it.

Every check is a function that returns findings; none raises for what it finds.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from benchmarks.stages.forecast import bytes_in_words

Status = Literal["ok", "warning", "problem"]
_DISTRIBUTION = "beatrice-probe"
_LITTLE_MEMORY = 4 << 30
_LITTLE_DISK = 10 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
      about: what was looked at.
      status: a problem would stop a run, a warning would not.
      text: one sentence.
    """

    about: str
    status: Status
    text: str


def look_at_packages() -> Iterator[Finding]:
    """Compare Python and the packages with what the project asks for."""
    from packaging.requirements import Requirement

    version = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    yield Finding(
        about="python",
        status="ok" if is_new else "problem",
        text=f"Python {version}" + ("" if is_new else "; 3.11 or newer is needed"),
    )
    try:
        wanted = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{_DISTRIBUTION} is not installed, so nothing says what it needs"
        yield Finding(about="packages", status="warning", text=text)
        return
    needed = [Requirement(line) for line in wanted]
    needed = [r for r in needed if r.marker is None or r.marker.evaluate()]
    wrong = [text for one in needed if (text := _wrong_version(one)) is not None]
    yield Finding(
        about="packages",
        status="problem" if wrong else "ok",
        text="; ".join(wrong) or f"all {len(needed)} are there in a version that fits",
    )


def _wrong_version(needed: object) -> str | None:
    """Return what is wrong with one package, or None."""
    name, specifier = needed.name, needed.specifier
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name}{specifier} is missing"
    if specifier.contains(found, prereleases=True):
        return None
    return f"{name} is {found}, needed is {specifier}"


def look_at_machine(place: Path) -> Iterator[Finding]:
    """Look at cores, memory, and the disk that a run directory is on."""
    cores = len(os.sched_getaffinity(0))
    yield Finding(about="cores", status="ok", text=f"{cores} cores for this process")
    available = _available_memory()
    if available is not None:
        yield Finding(
            about="memory",
            status="warning" if available < _LITTLE_MEMORY else "ok",
            text=f"{bytes_in_words(available)} available",
        )
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    is_writable = os.access(place, os.W_OK)
    little = free < _LITTLE_DISK
    yield Finding(
        about="disk",
        status="problem" if not is_writable else "warning" if little else "ok",
        text=f"{bytes_in_words(free)} free at {place}"
        + ("" if is_writable else ", which cannot be written to"),
    )


def _available_memory() -> int | None:
    """Return the bytes that can be had without swapping, or None if nothing tells."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def look_at_devices() -> Iterator[Finding]:
    """Look at the GPUs that Torch sees, and at what JAX will train on."""
    import torch

    if not torch.cuda.is_available():
        text = f"Torch {torch.__version__} sees no GPU; models run on the CPU"
        yield Finding(about="torch", status="warning", text=text)
    else:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            has_bf16 = torch.cuda.is_bf16_supported()
            yield Finding(
                about=f"cuda:{index}",
                status="ok" if has_bf16 else "warning",
                text=(
                    f"{torch.cuda.get_device_name(index)}, {bytes_in_words(free)} of "
                    f"{bytes_in_words(total)} free"
                    + ("" if has_bf16 else ", no bfloat16; use float16")
                ),
            )
    import jax

    devices = ", ".join(map(str, jax.devices()))
    yield Finding(about="jax", status="ok", text=f"JAX {jax.__version__} on {devices}")


def look_at_server(url: str) -> Iterator[Finding]:
    """Ask a server which models it has."""
    import openai

    key = os.environ.get("OPENAI_API_KEY") or "none"
    try:
        with openai.OpenAI(
            base_url=url, api_key=key, max_retries=0, timeout=10
        ) as client:
            names = [model.id for model in client.models.list()]
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        yield Finding(
            about="server",
            status="problem",
            text=f"{url} does not list its models ({said}); is it running, and is the "
            "URL right up to /v1?",
        )
        return
    yield Finding(
        about="server",
        status="ok",
        text=f"{url} serves {', '.join(names) or 'nothing'}",
    )

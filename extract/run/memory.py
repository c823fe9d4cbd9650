"""What memory this process holds, now and at most, and what it does with freed memory.

glibc hands blocks above a size back to the system as they are freed, and raises that
size whenever one is, up to 32 MiB. Whoever frees the same blocks thousands of times
pays for clean pages every time; whoever frees large ones from several threads finds
them kept in each. It is told which of both this process is.
"""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

_STATUS = Path("/proc/self/status")
# Of <malloc.h>; glibc alone has them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def begin_peak() -> None:
    """Let the peak start from what is held now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_bytes() -> int:
    """Return the most that was resident since `begin_peak`, in bytes.

    Where the mark cannot be reset, since the process began.
    """
    n_bytes = _resident("VmHWM")
    if n_bytes is not None:
        return n_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes() -> int:
    """Return what is resident now, in bytes; where unknown, the peak so far."""
    n_bytes = _resident("VmRSS")
    return peak_bytes() if n_bytes is None else n_bytes


def _resident(field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep up to 512 MiB of freed memory, in blocks of up to 64 MiB.

    For a backbone on a CPU: the largest activations of one layer are below that.
    Returns whether it was done: not where the C library is not glibc, nor where the
    environment says how it allocates (`MALLOC_…`, `GLIBC_TUNABLES`).
    """
    # Either alone would stop glibc from finding the other by itself.
    return _tell({_MMAP_THRESHOLD: 64 << 20, _TRIM_THRESHOLD: 512 << 20}, environ)


def return_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process hand back blocks of 1 MiB and more as soon as they are freed.

    Its threads share two heaps, where glibc would give each one its own. For training
    from a store: what it holds is then that of two groups of rows, however many there
    are. Returns whether it was done, as `keep_freed_memory` does.
    """
    # The second is glibc's own, which `keep_freed_memory` may have changed before.
    limits = {_MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 128 << 10, _ARENA_MAX: 2}
    return _tell(limits, environ)


def trim_freed_memory() -> None:
    """Hand back all freed memory now, where the C library is glibc.

    What is measured from here on is then not hidden in blocks that were freed before.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _tell(limits: Mapping[int, int], environ: Mapping[str, str]) -> bool:
    ours = (
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
    )
    if sys.platform != "linux" or any(name in environ for name in ours):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*limit) for limit in limits.items()])

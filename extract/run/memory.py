"""What memory this process holds, now and at most."""

import contextlib
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def begin_peak() -> None:
    """Let the peak start from what is held now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_bytes() -> int:
    """Return the most that was resident since `begin_peak`, in bytes.

    Where the mark cannot be reset, since the process began.
    """
    found = _resident("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes() -> int:
    """Return what is resident now, in bytes; where unknown, the peak so far."""
    found = _resident("VmRSS")
    return peak_bytes() if found is None else found


def _resident(field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None

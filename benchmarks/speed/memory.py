"""Memory of this process: what it holds, and the most that it has held."""

import resource
import sys
from pathlib import Path

MIB = 2**20
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _status(field: str) -> int:
    """Return a field of the process's status in bytes (Linux)."""
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Let the peak start from what is held now, on systems that can (Linux)."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")  # resets VmHWM


def peak_bytes() -> int:
    """Return the most that was resident since `reset_peak`, in bytes.

    Where the mark cannot be reset, since the process began.
    """
    if _CLEAR_REFS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes() -> int:
    """Return what is resident now, in bytes; where unknown, the peak so far."""
    return _status("VmRSS") if _STATUS.exists() else peak_bytes()

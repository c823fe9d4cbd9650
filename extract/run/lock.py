"""One process holds a directory at a time, or several workers share it."""

import datetime
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any, BinaryIO


def utc_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class InUse(ValueError):
    """A live process holds the directory."""


def _boot_id() -> str:
    """Identify the running kernel, which containers on one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def take_lock(path: Path, *, shared: bool = False) -> BinaryIO:
    """Hold the lock file; closing what is returned lets go.

    The kernel's lock ends with its owner, so a dead owner on this machine is no
    obstacle. It may not reach across machines (network file systems), therefore the
    file also says who holds it, and an owner on another machine is believed.

    Args:
      path: the file.
      shared: hold it beside others that share it, against those that do not. Who
        shares says nothing in the file.

    Raises:
      InUse: another live process holds it.
    """
    here = {"host": socket.gethostname(), "boot": _boot_id()}
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", 0)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
        is_held = False
    except BlockingIOError:
        is_held = True
    owner = _lock_owner(stream)
    same_kernel = here["boot"] and owner.get("boot") == here["boot"]
    is_away = bool(owner) and owner.get("host") != here["host"] and not same_kernel
    if is_held or is_away:
        stream.close()
        do = f"if that process is gone, delete {path}" if is_away else "wait or end it"
        who = (
            f"process {owner.get('pid', 'unknown')} on "
            f"{owner.get('host', here['host'])} since {owner.get('started', '?')}"
            if owner
            else "workers that a launcher started, or a process that just began"
        )
        raise InUse(f"{path.parent} is in use by {who}; {do}")
    stream.truncate(0)
    if shared:
        return stream
    mine = {"pid": os.getpid(), **here, "started": utc_now()}
    stream.write(json.dumps(mine).encode() + b"\n")
    os.fsync(stream.fileno())
    return stream


def _lock_owner(stream: BinaryIO) -> dict[str, Any]:
    """Read who wrote the lock file; empty if nobody did, or was killed doing it."""
    try:
        owner = json.loads(stream.read())
    except (ValueError, RecursionError):
        return {}
    finally:
        stream.seek(0)
    return owner if isinstance(owner, dict) else {}

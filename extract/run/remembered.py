"""What was found out on this machine and need not be found out again.

A checksum of a model's file, or the check of a model that takes seconds and comes out
alike for the same bytes, is done once and remembered in the user's cache, under all
that it depends on. Any of these files may be deleted: then it is done again. Only what
was right is remembered; nothing is where the cache cannot be written.
"""

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from beatrice.extract.run.files import (
    SETTLED,
    read_sealed,
    seal,
    sha256_file,
    sha256_json,
    write_json_atomic,
)

_SMALL = 1 << 20  # bytes; a smaller file is hashed in a millisecond
# What the checks run: a release has one version, a checkout changes under it.
_SOURCES = ("api", "extract", "jaxprobe", "pgir")
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where it is kept; `BEATRICE_REMEMBERED` names another place."""
    if path := environ.get("BEATRICE_REMEMBERED"):
        return Path(path)
    cache_home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "beatrice" / "remembered"


def remembered(what: str, key: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """Return what was found under a key before, or find it and remember it.

    `what` names its files, such as "parity"; the key holds all that the result depends
    on. Both are JSON values. None, or an error, is not remembered.
    """
    path = folder() / f"{what}-{sha256_json(key)[:32]}.json"
    with contextlib.suppress(ValueError, OSError):
        entry = read_sealed(path, "delete it")
        if entry["key"] == dict(key):
            return entry["value"]
    value = find()
    if value is not None:
        with contextlib.suppress(OSError):
            write_json_atomic(path, seal({"key": dict(key), "value": value}))
    return value


def sha256_of_model(path: Path) -> str:
    """Return the SHA-256 of a model's file; of a large one once until it changes.

    Whoever writes to a file changes its time of change, which no program sets. So a
    file is hashed again unless device, inode, size and both times are as they were.
    """
    at = path.stat()
    is_settled = time.time() - max(at.st_mtime, at.st_ctime) > SETTLED
    if at.st_size < _SMALL or not is_settled:
        return sha256_file(path)
    key = {
        "path": str(path.resolve()),
        "inode": [at.st_dev, at.st_ino],
        "bytes": at.st_size,
        "times": [at.st_mtime_ns, at.st_ctime_ns],
    }
    return remembered("sha256", key, lambda: sha256_file(path))


@cache
def software() -> dict[str, str]:
    """Return what computes: this package's sources, libraries and the processor."""
    root = Path(__file__).parents[2]
    files = [*root.glob("*.py")]
    for room in _SOURCES:
        files += (root / room).rglob("*.py")
    stats = [(str(p.relative_to(root)), p.stat()) for p in sorted(files)]
    sources = [(name, at.st_size, at.st_mtime_ns) for name, at in stats]
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {
        **versions,
        "beatrice": sha256_json(sources),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.node()}",
    }

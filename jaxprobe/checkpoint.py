"""Weights on disk: Orbax, one JSON file, and checksums of every file.

Orbax does not notice a flipped bit, so every file's sum is checked before anything is
read. A checkpoint is either there whole or not at all; finished parts of a longer work
are in a `Cache` until the whole is saved. Orbax is loaded where it is needed: loading
it gives the root logger a handler, after which `logging.basicConfig` of a notebook does
nothing.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from beatrice.extract.run.files import (
    Decoded,
    read_json,
    replaced_folder,
    verify_checksums,
    write_stream_atomic,
)

Arrays = Mapping[str, np.ndarray]


def _digest(arrays: Arrays, key: str) -> str:
    """Return the SHA-256 of names, shapes, types and values, and of the key."""
    digest = hashlib.sha256(key.encode())
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Cache:
    """Arrays of the finished parts of a work, one file a part.

    Work that is interrupted continues from it: do what is `missing`, save each part as
    it is done, load them all.
    """

    # Of the files; None keeps nothing, and every part is missing.
    folder: Path | None = None
    # Identity of everything the parts depend on; parts saved under another key, and
    # damaged ones, are missing.
    key: str = ""

    def path(self, name: str) -> Path | None:
        """Return the file of a part; its name may have folders, `grid/3-0`."""
        return self.folder and self.folder / f"{name}.safetensors"

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """Return a part's arrays by name, or None if it is missing or damaged."""
        path = self.path(name)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError):
            return None
        is_intact = metadata.get("sha256") == _digest(arrays, self.key)
        return arrays if is_intact else None

    def save(self, name: str, arrays: Arrays) -> None:
        """Write a part's arrays, replacing what was there."""
        path = self.path(name)
        if path is None:
            return
        contiguous = {key: np.ascontiguousarray(x) for key, x in arrays.items()}
        metadata = {"sha256": _digest(contiguous, self.key)}
        with write_stream_atomic(path) as stream:
            stream.write(serialize(contiguous, metadata))

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those parts that are still to be done, in the order of `names`."""
        return [name for name in names if self.load(name) is None]

    def clear(self) -> None:
        """Delete all parts: the whole is saved elsewhere."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


CONFIG = "config.json"
ARRAYS = "arrays"


def save(path: Path, tree: Any, config: dict[str, Any]) -> None:
    """Write a pytree of arrays and its JSON description, replacing what was there."""
    import orbax.checkpoint as ocp

    arrays = jax.tree.map(np.asarray, tree)
    with replaced_folder(Path(path)) as work:
        _check_room(work, jax.tree.leaves(arrays))
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(work / ARRAYS, arrays)
        (work / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))


_N_FILES = 32  # more than Orbax writes, folders and what it renames included
_RESERVE = getattr(os, "posix_fallocate", None)  # macOS has none


def _check_room(
    folder: Path,
    arrays: list[np.ndarray],
    reserve: Callable[[int, int, int], None] | None = _RESERVE,
) -> None:
    """Check that a disk holds arrays; where it does not, Orbax prints tracebacks.

    Where no room can be reserved, the disk says how much is free.
    """
    # What Orbax writes beside them; of 24 arrays a file of each kind, 50 KiB in all.
    n_left = sum(array.nbytes for array in arrays) + (len(arrays) << 12) + (1 << 17)
    with contextlib.ExitStack() as opened:
        for _ in range(_N_FILES):
            opened.enter_context(tempfile.TemporaryFile(dir=folder))
        if reserve is None and n_left > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        while reserve is not None and n_left > 0:
            file = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            n_bytes = min(n_left, 1 << 30)  # some file systems hold no larger file
            reserve(file.fileno(), 0, n_bytes)
            n_left -= n_bytes


def restore(path: Path, kind: type[Decoded] = dict[str, Any]) -> tuple[Any, Decoded]:
    """Read a checkpoint after checking it: nested dicts of NumPy arrays, and config."""
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    verify_checksums(path)
    what_to_do = "another version of this program made it: do its stage again"
    config = read_json(path / CONFIG, kind, what_to_do)
    with ocp.PyTreeCheckpointer() as checkpointer:
        structure = checkpointer.metadata(path / ARRAYS).item_metadata.tree
        args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure
        )
        tree = checkpointer.restore(path / ARRAYS, restore_args=args)
    return tree, config


def is_saved(path: Path, key: str) -> bool:
    """Tell whether a checkpoint is there, whole, and described with this key."""
    if not path.exists():
        return False
    try:
        verify_checksums(path)
        return read_json(path / CONFIG, dict[str, Any], "").get("key") == key
    except ValueError:
        return False  # damaged: made again and replaced

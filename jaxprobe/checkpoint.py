"""Weights on disk: Orbax arrays, a JSON file, and checksums of every file.

Orbax does not notice a flipped bit, so all checksums are verified before anything is
read. A checkpoint is written completely or not at all; a `Cache` keeps finished parts
of longer work until the whole is saved. Orbax and JAX are imported inside functions:
descriptions and caches need neither, and importing Orbax adds a handler to the root
logger, after which a notebook's `logging.basicConfig` does nothing.
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
    """Arrays of finished parts of longer work, one file per part.

    To resume interrupted work, do and save the parts that are `missing`, then load all.
    """

    # Folder of the files; None saves nothing, so that every part is missing.
    folder: Path | None = None
    # Identity of all that parts depend on; parts damaged or of another key are missing.
    key: str = ""

    def path(self, name: str) -> Path | None:
        """Return the file of a part, whose name may have folders (`grid/3-0`)."""
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
        """Return the parts that are still to be done, in the order of `names`."""
        return [name for name in names if self.load(name) is None]

    def clear(self) -> None:
        """Delete all parts, once the whole is saved elsewhere."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


CONFIG = "config.json"
ARRAYS = "arrays"


def save(path: Path, tree: Any, config: dict[str, Any]) -> None:
    """Write a pytree of arrays and its JSON description, replacing what was there."""
    import jax
    import orbax.checkpoint as ocp

    arrays = jax.tree.map(np.asarray, tree)
    with replaced_folder(Path(path)) as work:
        _check_room(work, jax.tree.leaves(arrays))
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(work / ARRAYS, arrays)
        (work / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))


_N_FILES = 32  # more than Orbax creates, including folders and renamed files
_RESERVE = getattr(os, "posix_fallocate", None)  # macOS has none


def _check_room(
    folder: Path,
    arrays: list[np.ndarray],
    reserve: Callable[[int, int, int], None] | None = _RESERVE,
) -> None:
    """Raise `OSError` if the disk lacks room for arrays; Orbax would print tracebacks.

    The room is reserved for a moment, or else compared with the disk's free space.
    """
    # Allow for what Orbax writes besides: for 24 arrays a few files, 50 KiB in all.
    n_left = sum(array.nbytes for array in arrays) + (len(arrays) << 12) + (1 << 17)
    with contextlib.ExitStack() as opened:
        for _ in range(_N_FILES):
            opened.enter_context(tempfile.TemporaryFile(dir=folder))
        if reserve is None and n_left > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        while reserve is not None and n_left > 0:
            file = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            n_bytes = min(n_left, 1 << 30)  # some file systems limit a file's size
            reserve(file.fileno(), 0, n_bytes)
            n_left -= n_bytes


def read_config(path: Path, kind: type[Decoded] = dict[str, Any]) -> Decoded:
    """Verify a checkpoint, and read its config without its arrays."""
    verify_checksums(path)
    what_to_do = "another version of this program wrote it; run its stage again"
    return read_json(path / CONFIG, kind, what_to_do)


def restore(path: Path, kind: type[Decoded] = dict[str, Any]) -> tuple[Any, Decoded]:
    """Verify and read a checkpoint: nested dicts of NumPy arrays, and its config."""
    import jax
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    config = read_config(path, kind)
    with ocp.PyTreeCheckpointer() as checkpointer:
        structure = checkpointer.metadata(path / ARRAYS).item_metadata.tree
        args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure
        )
        tree = checkpointer.restore(path / ARRAYS, restore_args=args)
    return tree, config


def is_saved(path: Path, key: str) -> bool:
    """Return whether a checkpoint exists, is undamaged, and was saved with this key."""
    if not path.exists():
        return False
    try:
        verify_checksums(path)
        return read_json(path / CONFIG, dict[str, Any], "").get("key") == key
    except ValueError:
        return False  # damaged: will be made again and replaced

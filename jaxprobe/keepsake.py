"""One finished member of a grid on disk, so that a killed run continues behind it.

Small safetensors files, written whole or not at all; the SHA-256 of the values and of
what they were trained on stands in the header and is checked on load.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Arrays = Mapping[str, np.ndarray]


def _digest(arrays: Arrays, key: str) -> str:
    """Return the SHA-256 of names, shapes, types and values, and of the key."""
    digest = hashlib.sha256(key.encode())
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def keep(path: Path, arrays: Arrays, key: str) -> None:
    """Write arrays under a key.

    Args:
      path: file to be made or replaced.
      arrays: by name.
      key: identity of everything the values depend on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(whole, temporary, metadata={"sha256": _digest(whole, key)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def recall(path: Path, key: str) -> dict[str, np.ndarray] | None:
    """Read arrays back.

    Returns:
      The arrays, or None if there is no such file, it was made from something else, or
      it is damaged: then the member is trained again.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError):
        return None
    return arrays if metadata.get("sha256") == _digest(arrays, key) else None

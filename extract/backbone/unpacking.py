"""A GGUF file's model as a checkpoint directory, made once and kept in the cache."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from beatrice.extract.backbone.gguf import (
    Header,
    config_of,
    generation_of,
    read_header,
    tokenizer_of,
)
from beatrice.extract.backbone.gguf_weights import Weights
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.files import (
    sha256_file,
    sync_folder,
    verify_checksums,
    write_checksums,
)

# Part of the folder's name: raised when the same file would be unpacked otherwise.
_RECIPE = 1
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where unpacked models are kept; any of them may be deleted."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "beatrice" / "gguf"


def _kept(path: Path) -> Path:
    """Return the folder of a file's model, which may not be there yet."""
    return cache_folder() / f"{sha256_file(path)}-{_RECIPE}"


def _write_outline(header: Header, folder: Path) -> Any:
    """Write config, tokenizer and stop tokens; return the config."""
    config = config_of(header)
    tokenizer = tokenizer_of(header, config)
    config.save_pretrained(folder)
    _write_tokenizer(tokenizer, folder, header.n_tokens)
    generation_of(header, config, tokenizer).save_pretrained(folder)
    return config


def _write_tokenizer(tokenizer: Any, folder: Path, n_tokens: int) -> None:
    """Write a tokenizer that is loaded as it is.

    Transformers' classes add tokens of their own (`<|endoftext|>`, `<mask>`) to a
    vocabulary that lacks them; the model has no embedding of these.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_bytes()) | {"tokenizer_class": "TokenizersBackend"}
    if len(tokenizer) > n_tokens:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = content["added_tokens"]
        content["added_tokens"] = [t for t in tokens if t["id"] < n_tokens]
        (folder / "tokenizer.json").write_text(json.dumps(content))
        added = [t["content"] for t in tokens if t["id"] >= n_tokens]
        values = {k: v for k, v in values.items() if v not in added}
    path.write_text(json.dumps(values, indent=2))


def _write_weights(weights: Weights, path: Path, update: Update) -> None:
    """Write tensors as safetensors, one after another: none waits for the rest."""
    heads, end = {}, 0
    for name, shape in weights.shapes.items():
        kind = weights.dtypes[name]
        begin, end = end, end + math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize
        heads[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **heads}).encode()
    text += b" " * (-len(text) % 8)
    free = shutil.disk_usage(path.parent).free
    if end > free:
        raise ValueError(
            f"unpacking takes {end / 1e9:.1f} GB in {cache_folder()}, but "
            f"{free / 1e9:.1f} GB are free; make room, or set XDG_CACHE_HOME"
        )
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for name, values in weights.read():
            begin, _ = heads[name]["data_offsets"]
            stream.seek(8 + len(text) + begin)
            stored = values.astype(_DTYPES[weights.dtypes[name]], copy=False)
            stream.write(stored.view(np.uint8).data)
            update(done := done + 1, len(heads))
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[BinaryIO]:
    """Let one process unpack at a time; the others wait, and then find it done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield stream


def _is_whole(folder: Path) -> bool:
    """Tell whether an unpacked model is there as it was written."""
    try:
        verify_checksums(folder)
    except ValueError:
        return False
    return True


def unpacked(name: str) -> str:
    """Return what Transformers loads for a name; a GGUF file is unpacked if need be.

    The folder is written beside its place and moved there whole. If what is kept does
    not match its checksums, it is made again.

    Args:
      name: a GGUF file; a directory or Hub id is returned as it is.

    Raises:
      ValueError: the file is damaged, or of an architecture that cannot be read.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        return str(path) if path.exists() else name
    kept = _kept(path)
    if _is_whole(kept):
        return str(kept)
    header = read_header(path)
    weights = Weights(header, config_of(header))
    with _only_one(kept.parent):
        if not _is_whole(kept):
            _unpack(weights, header, kept)
    return str(kept)


def _unpack(weights: Weights, header: Header, kept: Path) -> None:
    """Write a model's folder beside its place, and move it there."""
    for left in kept.parent.glob(f".{kept.name}.*"):  # of a process that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(
        prefix=f".{kept.name}.", dir=kept.parent
    ) as beside:
        folder = Path(beside) / "model"
        folder.mkdir()
        with Progress().stage(f"unpack {header.path.name}") as update:
            _write_outline(header, folder)
            _write_weights(weights, folder / "model.safetensors", update)
            write_checksums(folder)
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        sync_folder(kept.parent)


@contextlib.contextmanager
def outlined(name: str) -> Iterator[str]:
    """Yield what has a name's config and tokenizer; no weight of a GGUF file is read.

    Raises:
      ValueError: as `unpacked` does.
    """
    path = Path(name).expanduser()
    if not path.is_file() or _kept(path).is_dir():
        yield str(_kept(path)) if path.is_file() else unpacked(name)
        return
    header = read_header(path)
    with tempfile.TemporaryDirectory(prefix="beatrice-") as folder:
        Weights(header, _write_outline(header, Path(folder)))
        yield folder

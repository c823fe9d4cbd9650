"""The manifest of a run directory: which configuration its numbers belong to."""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extract.run.files import sync_folder, write_json_atomic, write_temporary

_PACKAGES = (
    "beatrice-probe",
    "flax",
    "jax",
    "jaxlib",
    "numpy",
    "openai",
    "optax",
    "orbax-checkpoint",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tensorstore",
    "tokenizers",
    "torch",
    "transformers",
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def utc_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


_LENGTH = "max_new_tokens"  # chosen for published questions, else the preset's
# What options of the command line set, in the order in which a person thinks of them.
_CHOICES = (
    "preset",
    "model",
    "seed",
    "data",
    "prompt",
    "model_dtype",
    "device",
    "extract.hidden_layers",
    "extract.hidden_spans",
    "extract.dtype",
    "extract.scalars",
    "extract.answer_span",
    "stream",
    _LENGTH,
)


def manifest_file(path: Path) -> Path:
    """Path of the manifest; a folder without it is no run directory."""
    return path / "manifest.json"


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory.

    Raises:
      ValueError: there is none, or it is no manifest of ours.
    """
    file = manifest_file(path)
    if not file.is_file():
        raise ValueError(f"{path} is no run directory: it has no manifest.json")
    try:
        manifest = json.loads(file.read_text())
        ours = manifest["format"] == "beatrice-run" and manifest["version"] == 1
        manifest["config"]
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(
            f"{file} is not a manifest this program reads (beatrice-run, version 1); "
            "choose another directory"
        )
    return manifest


def agree_on_manifest(path: Path, config: Mapping[str, Any]) -> None:
    """Write the manifest, or compare with the one that is there."""
    file = manifest_file(path)
    asked = json.loads(json.dumps(config, allow_nan=False))
    manifest = {
        "format": "beatrice-run",
        "version": 1,
        "config": asked,
        "created": utc_now(),
        "versions": package_versions(),
    }
    if not file.exists():
        text = json.dumps(manifest, indent=2) + "\n"
        name = write_temporary(file, text.encode())
        try:
            os.link(name, file)  # unlike a rename, never over another's
            sync_folder(path)
        except FileExistsError:
            pass  # a worker started beside this one was first; compare with it
        finally:
            os.unlink(name)
    held = read_manifest(path)["config"]
    if held != asked:
        here, there = _differences(held, asked)
        raise ValueError(
            f"{path} holds a run with {here}; you asked for {there}; "
            "choose another directory, or repeat that run's options"
        )


def amend_manifest(path: Path, config: Mapping[str, Any]) -> None:
    """Replace the configuration of a run directory in one step.

    The caller has seen that nothing in the directory depends on what changes. Workers
    that do this at once write the same bytes.
    """
    manifest = read_manifest(path)
    manifest["config"] = json.loads(json.dumps(config, allow_nan=False))
    write_json_atomic(manifest_file(path), manifest)


def refuse_foreign(path: Path) -> None:
    """Raise if `path` is a file, or a folder with other people's things in it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a directory of its own")
    if manifest_file(path).exists():
        return
    ours = ("lock", ".manifest.json.")  # of a run that was killed while being created
    others = sorted(p.name for p in path.iterdir() if not p.name.startswith(ours))
    # Looked up again: a worker beside this one may have created the run meanwhile.
    if others and not manifest_file(path).exists():
        raise ValueError(
            f"{path} is not empty and no run directory (it holds {others[0]!r}, and no "
            "manifest.json); choose another directory"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to dotted names."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value}
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _telling(differ: list[str]) -> list[str]:
    """Return the entries that say what differs, those that a person chose first.

    A preset sets dozens of sizes, and a seed those of the stages: where these differ,
    what follows from them says nothing more.
    """
    chosen = [
        key
        for name in _CHOICES
        for key in differ
        if key == name or key.startswith(f"{name}.")
    ]
    if "preset" in chosen:
        return [key for key in chosen if key != _LENGTH]
    follows = (".root_seed",) if "seed" in chosen else ()
    others = [key for key in differ if key not in chosen]
    return chosen + [key for key in others if not key.endswith(follows)]


def _differences(held: Any, asked: Any) -> tuple[str, str]:
    """Spell out, for both sides, the entries that differ."""
    sides = _flat(held), _flat(asked)
    both = list(dict.fromkeys([*sides[0], *sides[1]]))
    differ = _telling(
        [
            key
            for key in both
            if any(key not in side for side in sides) or sides[0][key] != sides[1][key]
        ]
    )
    first, second = (
        ", ".join(f"{k}={side[k]!r}" if k in side else f"no {k}" for k in differ)
        for side in sides
    )
    return first, second

"""The manifest of a run directory: which settings its numbers belong to.

It holds what the whole run shares (preset and seed) and a section of settings for
each verb. A section is a frozen dataclass beside the code that uses it. It is written
when the verb first runs, from the run's preset and the options given, and stays: a
verb reads its own section, and nobody needs to know all of them.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from beatrice.extract.run.files import (
    read_json,
    read_sealed,
    seal,
    sync_folder,
    write_json_atomic,
    write_temporary,
)
from beatrice.extract.run.lock import utc_now

Preset = Literal["demo", "few", "smoke", "paper"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
FORMAT, VERSION = "beatrice-run", 4
Section = TypeVar("Section")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRun:
    """What makes a run directory the run that it is.

    Attributes:
      preset: sizes that every verb's section starts from.
      seed: of training, selection and bootstrap.
      sections: settings that are known when the run is made, by name: `backbone`, and
        `world` or `data`; a frozen dataclass each.
    """

    preset: Preset = "demo"
    seed: int = 0
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the preset's name."""
        if self.preset not in PRESETS:
            raise ValueError(
                f"preset: expected one of {', '.join(PRESETS)}, found {self.preset!r}"
            )


def as_json(settings: Any) -> Any:
    """Return a settings dataclass as the JSON value that a manifest holds."""
    return json.loads(json.dumps(dataclasses.asdict(settings), allow_nan=False))


def manifest_file(path: Path) -> Path:
    """Path of the manifest; a folder without it is no run directory."""
    return path / "manifest.json"


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the file holds, beside its own SHA-256."""

    format: Literal["beatrice-run"]
    version: Literal[4]
    preset: Preset
    seed: int
    sections: dict[str, dict[str, Any]]
    created: str
    versions: dict[str, str]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory.

    Returns:
      `preset`, `seed`, `sections`, `created` and `versions`.

    Raises:
      ValueError: there is none, another version of this program wrote it, or it is
        not as it was written.
    """
    file = manifest_file(path)
    if not file.is_file():
        raise ValueError(f"{path} is no run directory: it has no manifest.json")
    found = read_json(file, dict[str, Any], "restore it, or start a new run directory")
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{file} is not a manifest this program reads ({FORMAT}, version "
            f"{VERSION}); another version made it: start a new run directory"
        )
    manifest = read_sealed(
        file, "restore it; settings are given as options of the verbs"
    )
    try:
        msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}; start a new run directory") from None
    return manifest


def read_section(path: Path, name: str, kind: type[Section]) -> Section:
    """Return the settings of a verb of a run.

    Args:
      path: the run directory.
      name: of the section.
      kind: the section's dataclass.

    Raises:
      ValueError: the verb has not run yet, or the section is not of this kind.
    """
    found = read_manifest(path)["sections"].get(name)
    if found is None:
        raise ValueError(f"{path} has no settings of {name} yet; run `beatrice {name}`")
    return decode_section(found, kind, f"{manifest_file(path)}, section {name!r}")


def decode_section(found: Any, kind: type[Section], where: str) -> Section:
    """Return settings from their JSON value; unknown fields are refused too.

    Raises:
      ValueError: the value is not of this kind; the message says where and why.
    """
    try:
        section = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
    else:
        if as_json(section) == found:
            return section
        reason = "a field is missing or unknown"
    raise ValueError(
        f"{where}: {reason}; another version of this program made it: start a new run "
        "directory"
    )


def agree_on_manifest(path: Path, asked: NewRun) -> None:
    """Write the manifest, or compare with the one that is there.

    Raises:
      ValueError: the directory holds another run; the message says what differs.
    """
    file = manifest_file(path)
    wanted = {
        "preset": asked.preset,
        "seed": asked.seed,
        "sections": {name: as_json(one) for name, one in asked.sections.items()},
    }
    if not file.exists():
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **wanted,
            "created": utc_now(),
            "versions": package_versions(),
        }
        content = json.dumps(seal(manifest), indent=2, allow_nan=False) + "\n"
        name = write_temporary(file, content.encode())
        try:
            os.link(name, file)  # unlike a rename, never over another's
            sync_folder(path)
        except FileExistsError:
            pass  # a worker started beside this one was first; compare with it
        finally:
            os.unlink(name)
    manifest = read_manifest(path)
    for name in wanted["sections"]:
        if name not in manifest["sections"]:
            raise ValueError(
                f"{path} holds a run with no {name}; you asked for one with {name}; "
                "choose another directory"
            )
    sections = {name: manifest["sections"][name] for name in wanted["sections"]}
    held = {"preset": manifest["preset"], "seed": manifest["seed"], **sections}
    refuse_other(path, held, wanted | wanted.pop("sections"))


def refuse_other(path: Path, held: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than a run has.

    Raises:
      ValueError: names every entry that differs, and both values.
    """
    differ = list(_differences(held, asked))
    if any(key == "preset" for key, *_ in differ):  # their sizes follow from it
        follows = ("world.", "answer.", "extract.")
        differ = [one for one in differ if not one[0].startswith(follows)]
    if not differ:
        return
    here, there = (
        ", ".join(
            f"no {one[0]}" if one[side] is _ABSENT else f"{one[0]}={one[side]!r}"
            for one in differ
        )
        for side in (1, 2)
    )
    raise ValueError(
        f"{path} holds a run with {here}; you asked for {there}; choose another "
        "directory, or repeat that run's options"
    )


def settle_section(
    path: Path,
    name: str,
    presets: Mapping[Preset, Section],
    change: Callable[[Section], Section] | None = None,
    *,
    is_replaceable: bool = False,
    is_recorded: bool = True,
) -> Section:
    """Return a verb's settings, and write them down if the run has none yet.

    Args:
      path: the run directory.
      name: of the section.
      presets: the settings of every preset.
      change: makes of settings what a person chose; what the run has settled must
        agree with it.
      is_replaceable: whether they may replace settled ones, since nothing was made
        with these yet.
      is_recorded: write new ones down; a dry run does not.

    Raises:
      ValueError: the run has settled on others; the message names them.
    """
    manifest = read_manifest(path)
    preset = presets[manifest["preset"]]
    held = manifest["sections"].get(name)
    if held is not None:
        where = f"{manifest_file(path)}, section {name!r}"
        settled = decode_section(held, type(preset), where)
        asked = settled if change is None else change(settled)
        if asked == settled:
            return asked
        if not is_replaceable:
            refuse_other(path, {name: held}, {name: as_json(asked)})
    else:
        asked = preset if change is None else change(preset)
    if is_recorded:
        manifest["sections"][name] = as_json(asked)
        write_json_atomic(manifest_file(path), seal(manifest))
    return asked


def refuse_foreign(path: Path) -> None:
    """Raise if `path` is a file, or a folder with other people's things in it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a directory of its own")
    if manifest_file(path).exists():
        return
    names = sorted(p.name for p in path.iterdir())
    # Left by a run that was killed while it was created.
    others = [n for n in names if n != "lock" and not n.startswith(".manifest.json.")]
    # Looked up again: a worker beside this one may have created the run meanwhile.
    if others and not manifest_file(path).exists():
        raise ValueError(
            f"{path} is not empty and no run directory (it holds {others[0]!r}, and no "
            "manifest.json); choose another directory; your own questions stay where "
            "they are: `beatrice data NEW_RUN --train NAME=FILE` makes a run of them"
        )


_ABSENT = object()


def _differences(
    held: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name of every entry that differs, and both values."""
    for key in dict.fromkeys([*held, *asked]):
        here, there = held.get(key, _ABSENT), asked.get(key, _ABSENT)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _differences(here, there, f"{prefix}{key}.")
        elif here != there:
            yield f"{prefix}{key}", here, there

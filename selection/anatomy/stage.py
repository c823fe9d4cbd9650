"""The stage that takes the trained detector apart, one analysis after another.

Each analysis is kept by what it was made of, so that a killed run continues with the
next one, and asking for one analysis more does not make the others again.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from extract.run.console import Progress, Update
from extract.run.contents import row_files
from extract.run.directory import RunDir
from extract.run.files import from_json
from extract.run.manifest import Preset
from extract.run.results import ResultRow, publish, rows_file, write_rows
from extract.run.stages import Stage
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.fit.stage import encoder_folders
from jaxprobe.settings import set_compiler
from selection.anatomy.analysis import Evidence, evidence_of
from selection.anatomy.complementarity import complementarity
from selection.anatomy.encoders import Deployed
from selection.anatomy.flips import Ablated, boundary, flips


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnatomyConfig:
    """Which analyses a run is given.

    Attributes:
      only: names; empty takes all. Those that were made before, of the same detector,
        stay in the rows.
      other: a run of another backbone, or None.
    """

    only: tuple[str, ...] = ()
    other: str | None = None


ANATOMY_PRESETS: dict[Preset, AnatomyConfig] = {
    "demo": AnatomyConfig(),
    "smoke": AnatomyConfig(),
    "paper": AnatomyConfig(),
}


class Asked(NamedTuple):
    """What an analysis is given.

    Attributes:
      run: of the analysis.
      config: the stage's.
      ablated: the run's settings, each with its encoders.
    """

    run: RunDir
    config: AnatomyConfig
    ablated: tuple[Ablated, ...]


Work = Callable[[Asked], list[ResultRow]]


def _per_setting(work: Callable[[Evidence], list[ResultRow]]) -> Work:
    return lambda asked: [row for a in asked.ablated for row in work(a.evidence)]


def _per_ablated(work: Callable[[Ablated], list[ResultRow]]) -> Work:
    return lambda asked: [row for a in asked.ablated for row in work(a)]


ANALYSES: Mapping[str, Work] = {
    "complementarity": _per_setting(complementarity),
    "flips": _per_ablated(flips),
    "boundary": _per_ablated(boundary),
}


def chosen_analyses(config: AnatomyConfig) -> list[str]:
    """Return the analyses asked for, in the order of the report.

    Raises:
      ValueError: one is not known.
    """
    if unknown := [name for name in config.only if name not in ANALYSES]:
        raise ValueError(f"no analysis {unknown[0]!r}; there are {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if not config.only or name in config.only]


def _folder(run: RunDir) -> Path:
    return run.path / "anatomy"


def _inputs(run: RunDir) -> list[Path]:
    return [
        *row_files(run),
        run.answers,
        run.sweep,
        run.selection,
        *encoder_folders(run),
    ]


def _key(run: RunDir, name: str) -> str:
    """Return the identity of all that an analysis depends on."""
    digest = hashlib.sha256(name.encode())
    for path, sha in sorted(run.hash_inputs(*_inputs(run)).items()):
        digest.update(f"{path} {sha} ".encode())
    return digest.hexdigest()


def _kept(run: RunDir, name: str) -> list[ResultRow] | None:
    """Return the rows of an analysis that was made before, of the same things."""
    held = load_cache(_folder(run) / f"{name}.safetensors", _key(run, name))
    if held is None:
        return None
    lines = held["rows"].tobytes().decode().splitlines()
    where = f"the rows of {name}"
    return [from_json(ResultRow, line, where) for line in lines]


def _anatomy(
    run: RunDir, config: AnatomyConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    chosen = chosen_analyses(config)
    ablated = tuple(Ablated(Deployed(one)) for one in evidence_of(run))
    asked = Asked(run, config, ablated)
    made: list[ResultRow] = []
    for name, work in ANALYSES.items():
        rows = _kept(run, name)
        if rows is None and name in chosen:
            began = time.monotonic()
            rows = work(asked)
            text = write_rows(rows).encode()
            arrays = {
                "rows": np.frombuffer(text, np.uint8),
                "seconds": np.float64(time.monotonic() - began),
            }
            path = _folder(run) / f"{name}.safetensors"
            save_cache(path, arrays, _key(run, name))
        if name in chosen:
            update(1 + chosen.index(name), len(chosen))
        made += rows or []
    publish(run, "anatomy", made, progress)


ANATOMY = Stage(
    name="anatomy",
    inputs=_inputs,
    outputs=lambda run: [_folder(run), rows_file(run, "anatomy")],
    work=_anatomy,
    presets=ANATOMY_PRESETS,
)

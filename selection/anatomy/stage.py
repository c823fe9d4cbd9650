"""The stage that takes the trained detector apart, one analysis after another.

Each analysis is kept by what it was made of, so that a killed run continues with the
next one, and asking for one analysis more does not make the others again.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from extract.records import Setting
from extract.run.console import Progress, Update
from extract.run.contents import row_files, settings_of
from extract.run.directory import RunDir
from extract.run.files import from_json, sha256_tree, write_json_atomic
from extract.run.manifest import Preset
from extract.run.results import ResultRow, publish, rows_file, write_rows
from extract.run.stages import Stage
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.config import set_compiler
from jaxprobe.pool import reads
from jaxprobe.stage import encoder_folders, run_branches, run_selection
from selection.anatomy import Study
from selection.anatomy.analysis import Evidence
from selection.anatomy.backbones import backbones
from selection.anatomy.cases import cases
from selection.anatomy.combinations import combinations
from selection.anatomy.complementarity import complementarity
from selection.anatomy.encoders import Deployed
from selection.anatomy.flips import Ablated, boundary, flips
from selection.anatomy.fusion import fusion, pairs
from selection.anatomy.grounding import grounding
from selection.anatomy.heads import heads
from selection.anatomy.learning import (
    learning_curve,
    transfer,
)
from selection.anatomy.linear import layers
from selection.anatomy.positions import positions, spans_gone


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


FORMAT = 2  # of what is kept
OTHER_PAIRS = "anatomy_other_pairs"
ANATOMY_PRESETS: dict[Preset, AnatomyConfig] = {
    "demo": AnatomyConfig(),
    "few": AnatomyConfig(),
    "smoke": AnatomyConfig(),
    "paper": AnatomyConfig(),
}


def evidence_of(run: RunDir) -> tuple[Evidence, ...]:
    """Return a run's settings, each with the encoders of its pass that were selected.

    By any search: the with-context set may hold closed-book ones.
    """
    selected: dict[Setting, dict[str, None]] = {s: {} for s in settings_of(run)}
    for branch in run_branches(run):
        members = run_selection(run, branch)[1]["members"]
        for setting, name in reads(branch, members):
            selected[setting][name] = None
    return tuple(Evidence(run, s, tuple(names)) for s, names in selected.items())


@dataclasses.dataclass(frozen=True)
class Asked:
    """What an analysis is given.

    Attributes:
      run: of the analysis.
      config: the stage's.
      ablated: the run's settings, each with its encoders.
    """

    run: RunDir
    config: AnatomyConfig
    ablated: tuple[Ablated, ...]

    @property
    def evidence(self) -> dict[str, Evidence]:
        """The run's settings by name."""
        return {a.evidence.setting: a.evidence for a in self.ablated}


class Made(NamedTuple):
    """What an analysis made: rows of the results, and cases where it shows some."""

    rows: list[ResultRow]
    cases: tuple[Study, ...] = ()


Work = Callable[[Asked], Made]


class Analysis(NamedTuple):
    """An analysis of the stage.

    Attributes:
      work: does it.
      lacks: says what a run lacks for it, or gives None.
      also: what it reads beside what the stage reads, inside the run or not.
    """

    work: Work
    lacks: Callable[[Asked], str | None] = lambda asked: None
    also: Callable[[RunDir, AnatomyConfig], Iterable[Path]] = lambda run, config: ()


def _each(work: Callable[[Evidence], list[ResultRow]]) -> Work:
    return lambda asked: Made([row for a in asked.ablated for row in work(a.evidence)])


def _deployed(work: Callable[[Deployed], list[ResultRow]]) -> Work:
    return lambda asked: Made([row for a in asked.ablated for row in work(a.deployed)])


def _ablated(work: Callable[[Ablated], list[ResultRow]]) -> Work:
    return lambda asked: Made([row for a in asked.ablated for row in work(a)])


def _grounding(asked: Asked) -> Made:
    closed_book = asked.evidence.get("closed_book")
    (own,) = (a for a in asked.ablated if a.evidence.setting == "with_context")
    return Made(grounding(own, closed_book))


def _backbones(asked: Asked) -> Made:
    """Rankings, and what pairs of families gain on the other backbone."""
    other = {e.setting: e for e in evidence_of(RunDir(Path(str(asked.config.other))))}
    of_pairs = [
        msgspec.structs.replace(row, experiment=OTHER_PAIRS)
        for setting in asked.evidence
        if setting in other
        for row in pairs(other[setting])
    ]
    return Made([*backbones(asked.evidence, other), *of_pairs])


def _cases(asked: Asked) -> Made:
    found = asked.evidence
    rows, shown = cases(found["closed_book"], found["with_context"])
    return Made(rows, tuple(shown))


def _lacks_context(asked: Asked) -> str | None:
    return None if "with_context" in asked.evidence else "needs answers with context"


def _lacks_both(asked: Asked) -> str | None:
    return None if len(asked.evidence) == 2 else "needs answers in both settings"


def _lacks_ranking(asked: Asked) -> str | None:
    if asked.run.stage_done("exhaustive"):
        return None
    return f"needs the ranking of `beatrice select {asked.run.path} --exhaustive`"


def _lacks_other(asked: Asked) -> str | None:
    if asked.config.other is not None:
        return None
    return f"needs another backbone: `beatrice anatomy {asked.run.path} OTHER_RUN`"


def _other_files(run: RunDir, config: AnatomyConfig) -> list[Path]:
    if config.other is None:
        return []
    other = RunDir(Path(config.other))
    return [*row_files(other), *encoder_folders(other)]


ANALYSES: Mapping[str, Analysis] = {
    "complementarity": Analysis(_each(complementarity)),
    "flips": Analysis(_ablated(flips)),
    "boundary": Analysis(_ablated(boundary)),
    "grounding": Analysis(_grounding, _lacks_context),
    "heads": Analysis(_deployed(heads)),
    "positions": Analysis(_ablated(positions)),
    "spans": Analysis(_ablated(spans_gone)),
    "layers": Analysis(_each(layers)),
    "pairs": Analysis(_each(pairs)),
    "fusion": Analysis(
        _each(fusion),
        also=lambda run, config: [run.path / "ablations"],
    ),
    "combinations": Analysis(
        _each(combinations),
        _lacks_ranking,
        lambda run, config: [run.path / "exhaustive"],
    ),
    "backbones": Analysis(_backbones, _lacks_other, _other_files),
    "labels": Analysis(_deployed(learning_curve)),
    "transfer": Analysis(_deployed(transfer)),
    "cases": Analysis(_cases, _lacks_both),
}


def chosen_analyses(config: AnatomyConfig) -> list[str]:
    """Return the analyses asked for, in order.

    Raises:
      ValueError: one is not known.
    """
    if unknown := [name for name in config.only if name not in ANALYSES]:
        raise ValueError(f"no analysis {unknown[0]!r}; there are {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if not config.only or name in config.only]


def _folder(run: RunDir) -> Path:
    return run.path / "anatomy"


def cases_file(run: RunDir) -> Path:
    """Return where the cases lie that the report shows."""
    return _folder(run) / "cases.json"


def _inputs(run: RunDir) -> list[Path]:
    own = [run.answers, run.sweep, run.selection, run.detector]
    return [*row_files(run), *own, *encoder_folders(run)]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What analyses made, by file in the run.

    Attributes:
      asked: of the run.
      base: identity of what all analyses read.
    """

    asked: Asked
    base: str

    def _path(self, name: str) -> Path:
        return _folder(self.asked.run) / f"{name}.safetensors"

    def _key(self, name: str) -> str:
        also = ANALYSES[name].also(self.asked.run, self.asked.config)
        own = [sha256_tree(path) for path in also]
        return hashlib.sha256(f"{FORMAT} {name} {self.base} {own}".encode()).hexdigest()

    def load(self, name: str) -> Made | None:
        """Return what an analysis made before, of the same things."""
        held = load_cache(self._path(name), self._key(name))
        if held is None:
            return None
        where = f"the rows of {name}"
        lines = held["rows"].tobytes().decode().splitlines()
        shown = from_json(tuple[Study, ...], held["cases"].tobytes(), where)
        rows = [from_json(ResultRow, line, where) for line in lines]
        return Made(rows, shown)

    def save(self, name: str, made: Made) -> None:
        """Keep what an analysis made."""
        texts = write_rows(made.rows).encode(), msgspec.json.encode(made.cases)
        rows, shown = (np.frombuffer(text, np.uint8) for text in texts)
        arrays = {"rows": rows, "cases": shown}
        save_cache(self._path(name), arrays, self._key(name))


def _asked(run: RunDir, config: AnatomyConfig) -> Asked:
    settings = (Ablated(Deployed(one)) for one in evidence_of(run))
    return Asked(run, config, tuple(settings))


def _anatomy(
    run: RunDir, config: AnatomyConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    asked, chosen = _asked(run, config), chosen_analyses(config)
    base = " ".join(run.hash_inputs(*_inputs(run)).values())
    kept = _Kept(asked, base)
    made: list[Made] = []
    for name, analysis in ANALYSES.items():
        reason = analysis.lacks(asked)
        found = kept.load(name) if reason is None else None
        if reason is not None and name in chosen:
            progress.note(f"anatomy: {name} {reason}")
        elif found is None and name in chosen:
            began = time.monotonic()
            found = analysis.work(asked)
            kept.save(name, found)
            progress.note(f"anatomy: {name} took {time.monotonic() - began:.0f} s")
        if name in chosen:
            update(1 + chosen.index(name), len(chosen))
        made += [] if found is None else [found]
    shown = [msgspec.to_builtins(case) for one in made for case in one.cases]
    write_json_atomic(cases_file(run), shown)
    publish(run, "anatomy", [row for one in made for row in one.rows], progress)


ANATOMY = Stage(
    name="anatomy",
    inputs=_inputs,
    outputs=lambda run: [_folder(run), rows_file(run, "anatomy")],
    work=_anatomy,
    presets=ANATOMY_PRESETS,
)

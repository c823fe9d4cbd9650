"""The anatomy stage: analyses of the trained detector, one after another.

Each analysis is saved under a key that covers its inputs, so a killed run resumes with
the next one, and requesting one more analysis does not repeat the others.
"""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.run.console import Progress, Update, shell_line
from beatrice.extract.run.contents import (
    read_answers,
    read_examples,
    row_files,
    settings_of,
)
from beatrice.extract.run.directory import Preset, RunDir, read_manifest
from beatrice.extract.run.files import from_json, sha256_tree, write_json_atomic
from beatrice.extract.run.rows import ResultRow, publish, rows_file, write_rows
from beatrice.extract.run.stages import Stage
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import run_bootstrap, run_branches, run_selection
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.detector import Detector, HeadName, encoders_read
from beatrice.jaxprobe.stages import chosen_layer, encoder_folders, grid_config
from beatrice.jaxprobe.train import open_rows
from beatrice.selection import decisions, places, reach
from beatrice.selection.ablation import scores_without
from beatrice.selection.analysis import (
    AnalysisInput,
    AnalysisOutput,
    CaseStudy,
    Deployed,
    Part,
    QuestionTexts,
    Search,
    per_setting,
)
from beatrice.selection.exhaustive import read_ranking

FORMAT = 7  # of saved analyses: 7 has Wilson's intervals of shares
# Optional part -> the stage that writes it, and its folder in the run.
_ON_REQUEST: dict[Part, tuple[str, str]] = {
    "rankings": ("exhaustive", "exhaustive"),
    "ablations": ("ablate", "ablations"),
}


class Analysis(NamedTuple):
    """An analysis of the anatomy; it requires `needs`, and reads `uses` if present."""

    run: Callable[[AnalysisInput], AnalysisOutput]
    needs: tuple[Part, ...] = ()
    uses: tuple[Part, ...] = ()


ANALYSES = {
    "complementarity": Analysis(per_setting(decisions.complementarity)),
    "pairs": Analysis(per_setting(decisions.pairs)),
    "fusion": Analysis(decisions.fusion, uses=("ablations",)),
    "combinations": Analysis(decisions.combinations, needs=("rankings",)),
    "flips": Analysis(per_setting(decisions.flips)),
    "boundary": Analysis(per_setting(decisions.boundary)),
    "grounding": Analysis(decisions.grounding, needs=("with_context",)),
    "cases": Analysis(decisions.cases, needs=("closed_book", "with_context")),
    "heads": Analysis(per_setting(places.heads)),
    "positions": Analysis(per_setting(places.positions)),
    "spans": Analysis(per_setting(places.spans_gone)),
    "layers": Analysis(per_setting(places.layers)),
    "labels": Analysis(reach.learning_curve),
    "transfer": Analysis(reach.transfer),
    "backbones": Analysis(reach.backbones, needs=("other",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnatomyConfig:
    """Which analyses to run."""

    # Names; empty: all. Earlier analyses of the same detector stay in the rows.
    only: tuple[str, ...] = ()
    other: str | None = None  # path of a run of another backbone


ANATOMY_PRESETS: dict[Preset, AnatomyConfig] = dict.fromkeys(
    get_args(Preset), AnatomyConfig()
)


def chosen_analyses(config: AnatomyConfig) -> list[str]:
    """Return the names of the analyses to run, in order."""
    if unknown := [name for name in config.only if name not in ANALYSES]:
        raise ValueError(f"no analysis {unknown[0]!r}; there are {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if not config.only or name in config.only]


def _folder(run: RunDir) -> Path:
    return run.path / "anatomy"


def _inputs(run: RunDir) -> list[Path]:
    files = [run.answers, run.sweep, run.selection, run.detector]
    return [*row_files(run), *files, *encoder_folders(run)]


def _model_of(run: RunDir) -> str:
    """Return the name of a run's backbone without its owner or folder."""
    section = read_manifest(run.path)["sections"].get("backbone", {})
    return Path(str(section.get("model", "embedded"))).name


def _searches(run: RunDir) -> dict[HeadName, Search]:
    searches: dict[HeadName, Search] = {}
    for branch in run_branches(run):
        tree, summary = run_selection(run, branch)
        scores = {name: head["scores"] for name, head in tree.items()}
        searches[branch] = Search(encoders_read(branch, summary["members"]), scores)
    return searches


def _deployed(
    run: RunDir, searches: Mapping[HeadName, Search]
) -> dict[Setting, Deployed]:
    """Return each setting's encoders, and which of them any search selected."""
    pairs = dict.fromkeys(p for search in searches.values() for p in search.reads)
    deployed = {}
    for setting in settings_of(run):
        store, rows = open_rows(run, setting)
        deployed[setting] = Deployed(
            setting=setting,
            store=store,
            rows=rows,
            layer=chosen_layer(run),
            tree=checkpoint.restore(run.encoders(setting))[0],
            config=grid_config(run),
            selected=tuple(name for where, name in pairs if where == setting),
            bootstrap=run_bootstrap(run),
        )
    return deployed


def _on_request(run: RunDir) -> dict[Part, Path]:
    """Return the folders of the optional parts that are present and up to date."""
    return {
        part: run.path / folder
        for part, (stage, folder) in _ON_REQUEST.items()
        if run.stage_done(stage)
    }


def _other_run(config: AnatomyConfig) -> RunDir | None:
    """Return the run of another backbone; None if none was named or it is gone."""
    run = None if config.other is None else RunDir(Path(config.other))
    return run if run is not None and run.manifest.exists() else None


def _other(config: AnatomyConfig) -> dict[Part, str]:
    """Return the identity of the run of another backbone, if there is one."""
    if (other := _other_run(config)) is None:
        return {}
    files = [*row_files(other), *encoder_folders(other)]
    return {"other": " ".join(str(sha256_tree(file)) for file in files)}


def _parts(run: RunDir, config: AnatomyConfig) -> dict[Part, str]:
    parts: dict[Part, str] = {setting: "" for setting in settings_of(run)}
    parts |= {part: str(sha256_tree(x)) for part, x in _on_request(run).items()}
    return parts | _other(config)


def _input(run: RunDir, config: AnatomyConfig) -> AnalysisInput:
    other = _other_run(config)
    parts, settings, searches = _parts(run, config), settings_of(run), _searches(run)
    without_hidden: dict[Setting, np.ndarray] = {
        setting: scores
        for setting in (settings if "ablations" in parts else ())
        if (scores := scores_without(run, setting, "without_hidden")) is not None
    }
    return AnalysisInput(
        settings=_deployed(run, searches),
        searches=searches,
        heads=Detector.load(run.detector).heads,
        read_texts=lambda: QuestionTexts(
            {example.id: example for example in read_examples(run)},
            {answer.key: answer for answer in read_answers(run)},
        ),
        parts=parts,
        rankings={s: read_ranking(run, s) for s in settings if "rankings" in parts},
        without_hidden=without_hidden,
        other={} if other is None else _deployed(other, _searches(other)),
        models=tuple(map(_model_of, [run] if other is None else [run, other])),
        folder=_folder(run) / "members",
    )


def _missing(analysis: Analysis, inputs: AnalysisInput, run: RunDir) -> str | None:
    """Describe the first part that an analysis needs and the run lacks, if any."""
    line = functools.partial(shell_line, path=run.path)
    sources = {
        "closed_book": "closed-book answers",
        "with_context": "answers with context",
        "rankings": f"the ranking of `{line('select')} --exhaustive`",
        "other": f"another backbone: `{line('anatomy')} OTHER_RUN`",
    }
    missing = (need for need in analysis.needs if need not in inputs.parts)
    return next((sources[need] for need in missing), None)


def _load(cache: Cache, name: str) -> AnalysisOutput | None:
    arrays = cache.load(name)
    if arrays is None:
        return None
    where = f"the rows of {name}"
    lines = arrays["rows"].tobytes().decode().splitlines()
    cases = from_json(tuple[CaseStudy, ...], arrays["cases"].tobytes(), where)
    return [*(from_json(ResultRow, line, where) for line in lines), *cases]


def _save(cache: Cache, name: str, output: AnalysisOutput) -> None:
    rows, cases = _split(output)
    texts = {"rows": write_rows(rows).encode(), "cases": msgspec.json.encode(cases)}
    cache.save(name, {n: np.frombuffer(text, np.uint8) for n, text in texts.items()})


def _split(output: AnalysisOutput) -> tuple[list[ResultRow], list[CaseStudy]]:
    rows = [x for x in output if isinstance(x, ResultRow)]
    return rows, [x for x in output if isinstance(x, CaseStudy)]


def _anatomy(
    run: RunDir, config: AnatomyConfig, update: Update, progress: Progress
) -> None:
    set_compiler(run.preset)
    inputs, chosen = _input(run, config), chosen_analyses(config)
    if config.other is not None and not inputs.other:
        progress.note(
            f"anatomy: no run is at {config.other} now; its rows are left out"
        )
    base = " ".join(run.hash_inputs(*_inputs(run)).values())
    outputs: list[ResultRow | CaseStudy] = []
    for name, analysis in ANALYSES.items():
        missing = _missing(analysis, inputs, run)
        if missing is not None and name in chosen:
            progress.note(f"anatomy: {name} needs {missing}")
        if missing is None:
            parts = [inputs.parts.get(x) for x in (*analysis.needs, *analysis.uses)]
            key = hashlib.sha256(f"{FORMAT} {name} {base} {parts}".encode())
            cache = Cache(_folder(run), key.hexdigest())
            output = _load(cache, name)
            if output is None and name in chosen:
                began = time.monotonic()
                output = analysis.run(inputs)
                _save(cache, name, output)
                seconds = time.monotonic() - began
                progress.note(f"anatomy: {name} took {seconds:.0f} s")
            outputs += output or ()
        if name in chosen:
            update(1 + chosen.index(name), len(chosen))
    rows, cases = _split(outputs)
    write_json_atomic(_folder(run) / "cases.json", msgspec.to_builtins(cases))
    publish(run, "anatomy", rows, progress)


ANATOMY = Stage(
    name="anatomy",
    inputs=lambda run: [*_inputs(run), *_on_request(run).values()],
    outputs=lambda run: [_folder(run), rows_file(run, "anatomy")],
    work=_anatomy,
    presets=ANATOMY_PRESETS,
    identity=lambda config: {**_other(config), "format": str(FORMAT)},
)

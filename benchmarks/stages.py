"""The stages `evaluate`, `baselines` and `report`.

Importing this loads no JAX; see `extract.run.stages.deferred`.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import get_args

from beatrice.benchmarks.baselines.detector import (
    DetectorCost,
    Requirement,
    find_detector,
    is_plug,
)
from beatrice.extract.plugs import NotNamed, identity_or_error, sha256_of_code
from beatrice.extract.run.contents import question_files, row_files
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.files import read_json, sha256_file, sha256_json
from beatrice.extract.run.rows import published, rows_file
from beatrice.extract.run.stages import Stage, deferred, is_done
from beatrice.jaxprobe.config import INTERVAL_FORMAT
from beatrice.jaxprobe.stages import encoder_folders


def human_files(run: RunDir) -> list[Path]:
    """Return the file of a person's verdicts, if `label --audit` has read any."""
    path = run.audit / "human.json"
    return [path] if path.exists() else []


EVALUATE = Stage(
    name="evaluate",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.detector,
        run.selection,
        *encoder_folders(run),
        *human_files(run),
    ],
    outputs=lambda run: [
        rows_file(run, "evaluate"),
        run.path / "reliability.json",
        run.path / "shown.json",
    ],
    work=deferred("beatrice.benchmarks.results.evaluate:evaluate_run"),
    identity=lambda config: {"interval format": str(INTERVAL_FORMAT)},
)

SCORE_FORMAT = "5"  # of cached scores: 5 splits words and sentences of every script


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselinesConfig:
    """Which detectors to judge on a run's answers."""

    # Names; empty: detectors that need nothing beyond the run's signals and texts.
    # Detectors judged earlier on the same answers stay in the rows.
    only: tuple[str, ...] = ()
    # Judge all detectors whose requirements are met, in addition to `only`, including
    # those that need another pass over the answers.
    again: bool = False
    # Directory of an NLI model; without it, detectors that need one are skipped.
    nli: str | None = None
    encoder: str | None = None  # directory of a text encoder, likewise

    @property
    def models(self) -> dict[Requirement, str | None]:
        """Directory of the model for each requirement, None if not given."""
        return {"entailment": self.nli, "encoder": self.encoder}


BASELINES_PRESETS: dict[Preset, BaselinesConfig] = dict.fromkeys(
    get_args(Preset), BaselinesConfig()
)


def costs_file(run: RunDir) -> Path:
    """Return the path of the detectors' costs, which the report reads."""
    return run.path / "baselines" / "detectors.json"


def read_costs(path: Path) -> list[DetectorCost]:
    """Read the costs of a run's detectors."""
    return read_json(path, list[DetectorCost], "run `beatrice baselines` again")


def _identity(config: BaselinesConfig) -> dict[str, str | NotNamed]:
    def identity_of(spec: str) -> str:
        return sha256_of_code(find_detector(spec, option="--only").score)

    plugs = filter(is_plug, config.only)
    codes = {f"detector:{x}": identity_or_error(partial(identity_of, x)) for x in plugs}
    return {"format": SCORE_FORMAT, "interval format": str(INTERVAL_FORMAT), **codes}


BASELINES = Stage(
    name="baselines",
    inputs=lambda run: [
        *row_files(run),
        run.answers,
        run.sweep,
        run.selection,
        *([run.samples] if run.samples.exists() else []),
    ],
    outputs=lambda run: [rows_file(run, "baselines"), costs_file(run)],
    work=deferred("beatrice.benchmarks.baselines.judge:judge_run"),
    identity=_identity,
    presets=BASELINES_PRESETS,
)

STUDIES = "anatomy/cases.json"  # in the run directory
# Files written next to the page.
TABLES = ("findings.md", "findings.tex", "panorama.md", "panorama.tex")


def _report_inputs(run: RunDir) -> list[Path]:
    has_control = run.stage_record("control") is not None
    return [
        *question_files(run),
        run.sweep,
        run.labels,
        run.selection,
        run.path / "reliability.json",
        run.path / "shown.json",
        rows_file(run, "evaluate"),
        *((run.control, rows_file(run, "control")) if has_control else ()),
        *(rows_file(run, name) for name in published(run)),
        *([costs_file(run)] if "baselines" in published(run) else []),
        *([run.path / STUDIES] if "anatomy" in published(run) else []),
    ]


def _drawn_by(config: None) -> dict[str, str]:
    """Return the identity of the code of the page, so that newer code draws it again.

    No version number: every change of a table, a figure or a sentence would raise it.
    """
    files = sorted((Path(__file__).parent / "results").glob("*.*"))
    return {"code": sha256_json([sha256_file(file) for file in files])}


REPORT = Stage(
    name="report",
    inputs=_report_inputs,
    outputs=lambda run: [run.report, run.results, *(run.path / x for x in TABLES)],
    work=deferred("beatrice.benchmarks.results.report:report_run"),
    identity=_drawn_by,
)


def are_rows_gathered(run_dir: Path) -> bool:
    """Return whether the report has the run's current rows, whatever code drew it."""
    record = RunDir(run_dir).stage_record("report")
    inputs = {} if record is None else record.inputs
    drawn_by = {name: inputs[name] for name in ("code",) if name in inputs}
    return is_done(run_dir, dataclasses.replace(REPORT, identity=lambda _: drawn_by))

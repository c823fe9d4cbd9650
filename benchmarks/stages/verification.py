"""Reading every checksum of a run again."""

from pathlib import Path

from benchmarks.stages.chain import IN_ORDER
from benchmarks.stages.publishing import ON_REQUEST
from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from extract.store.read import open_store
from extract.store.write import verify as verify_store
from jaxprobe import checkpoint


def _stage_problems(run: RunDir) -> list[str]:
    names = ("data", *IN_ORDER, *ON_REQUEST, "rewrite", "sample")
    gaps = [run.stage_gap(n) for n in names if run.stage_record(n) is not None]
    return [gap for gap in gaps if gap is not None]


def _store_problems(run: RunDir) -> list[str]:
    problems = []
    for setting in SETTINGS:
        if run.features(setting).exists():
            try:
                problems += verify_store(open_store(run.features(setting)))
            except ValueError as error:
                problems.append(str(error))
    return problems


def _checkpoint_problems(run: RunDir) -> list[str]:
    folders = [run.encoders(setting) for setting in SETTINGS]
    folders += [*sorted((run.path / "selection").glob("[a-z]*")), run.detector]
    problems = []
    for folder in folders:
        if folder.is_dir():
            try:
                checkpoint.verify(folder)
            except ValueError as error:
                problems.append(str(error))
    return problems


def verify_run(path: Path) -> list[str]:
    """Return every problem of a run directory, one sentence each.

    Checks what each finished stage recorded of its inputs and outputs, every chunk of
    the feature stores, and every file of the trained weights.

    Raises:
      ValueError: the path is no run directory.
    """
    read_manifest(path)
    run = RunDir(path)
    return [*_stage_problems(run), *_store_problems(run), *_checkpoint_problems(run)]

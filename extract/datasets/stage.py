"""The first stage of a run on published questions: its files become a run directory.

What comes out is what `world` writes, and a manifest of the splits beside it; from
there on a run does not know where its questions came from.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.datasets.building import build_examples, check_folder
from extract.datasets.config import BuildConfig, Source
from extract.datasets.pools import open_source
from extract.run.console import Progress, Update
from extract.run.contents import splits_file
from extract.run.directory import RunDir
from extract.run.files import sha256_file
from extract.run.manifest import NewRun, manifest_file
from extract.run.stages import Forecast, once


@contextlib.contextmanager
def _nothing_half_made(path: Path) -> Iterator[None]:
    """Take a new run directory away again if its questions cannot be read."""
    was_there, was_run = path.exists(), manifest_file(path).exists()
    try:
        yield
    except BaseException:
        if not was_run and path.is_dir():
            for name in ("manifest.json", "lock"):
                (path / name).unlink(missing_ok=True)
            if not was_there and not any(path.iterdir()):
                path.rmdir()
        raise


def make_data_run(
    path: Path,
    sources: Sequence[Source],
    build: BuildConfig,
    asked: NewRun,
    progress: Progress,
    *,
    fixed: Path | None = None,
) -> dict[str, Any]:
    """Make a run directory of published questions, or continue making it.

    Args:
      path: the directory; created if absent, taken if empty.
      sources: the files.
      build: which of their questions, and what of them.
      asked: the run; its section `data` says the same of the files as `sources`.
      progress: shows the stage.
      fixed: a manifest whose splits are used instead of drawing.

    Returns:
      The manifest of the splits.

    Raises:
      ValueError: a file is refused or too small, or the directory holds another run.
    """
    with _nothing_half_made(path), RunDir.open(path, asked) as run:
        for left in run.path.glob(".*.tmp"):  # of a run that was killed; we hold it
            left.unlink()

        def work(update: Update) -> None:
            build_examples(run.path, sources, build, fixed=fixed, note=progress.note)

        inputs = {f"{s.dataset} {s.role}": sha256_file(s.path) for s in sources}
        outputs = [run.examples, run.passages, splits_file(run)]
        once(run, "data", inputs, outputs, progress, work)
        return check_folder(run.path)


def forecast_data(sources: Sequence[Source], build: BuildConfig) -> Forecast:
    """Return what making a run of these files needs; nothing is written.

    Args:
      sources: at least one file.
      build: what is drawn from them.

    Raises:
      ValueError: a file is refused.
    """
    for source in sources:
        open_source(source, build)  # says what is refused
    return Forecast(
        stage="data",
        n_rows=sum(
            sum(build.splits.sizes(s.dataset, s.role).values()) for s in sources
        ),
        basis=(
            f"rows are the sizes of the splits that are asked for; {len(sources)} "
            "files were opened and recognised, and not read through"
        ),
    )

"""A dry run of `control` counts questions, and loads nothing that it need not."""

from extract.run.directory import RunDir
from extract.run.files import write_text_atomic
from pgir.controllers.stage import CONTROL
from tests.extract.small_run import beatrice


def test_a_dry_run_of_control_loads_no_detector(tmp_path):
    run = tmp_path / "run"
    beatrice("world", run, "--preset", "smoke")
    for path in CONTROL.inputs(RunDir(run)):
        if not path.exists():
            write_text_atomic(path, "nothing that could be loaded")
    assert "requests" in beatrice("control", run, "--dry-run").stdout

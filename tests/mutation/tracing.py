"""A pytest plugin: records which test runs which line, also in child processes."""

import json
import os
from pathlib import Path

import coverage
import pytest

SETTINGS = """[run]
parallel = true
source = {source}
data_file = {folder}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected,module-not-imported,module-not-measured
"""


class Tracer:
    """Tells the tracer of a worker which test is running."""

    def __init__(self, folder: Path):
        settings = str(folder / "coveragerc")
        self.tracer = coverage.Coverage(config_file=settings, context="")
        self.tracer.start()
        # Read by coverage's start-up file in every Python process that a test starts.
        os.environ["COVERAGE_PROCESS_START"] = settings

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.tracer.switch_context(item.nodeid)
        return (yield)

    def pytest_unconfigure(self):
        self.tracer.stop()
        self.tracer.save()


class Durations:
    """Writes how long each test took, which all workers report to the main process."""

    def __init__(self, folder: Path):
        self.path, self.seconds, self.failed = folder / "tests.jsonl", {}, set()

    def pytest_runtest_logreport(self, report):
        seconds = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = seconds
        if not report.passed:  # or is skipped: it can kill no mutant
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            row = {"test": report.nodeid, "seconds": round(seconds, 3)}
            row["passed"] = report.nodeid not in self.failed
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_tests(folder: Path) -> dict[str, dict]:
    """Return the tests that were traced, by their names."""
    path = folder / "tests.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["test"]: row for row in map(json.loads, lines)}


def pytest_configure(config):
    folder = Path(os.environ["MUTATION_FOLDER"])
    plugin = Tracer if hasattr(config, "workerinput") else Durations
    config.pluginmanager.register(plugin(folder), "mutation")


def pytest_collection_modifyitems(items):
    """Leave out tests that a stopped run has traced; all workers collect the same."""
    traced = read_tests(Path(os.environ["MUTATION_FOLDER"]))
    items[:] = [item for item in items if item.nodeid not in traced]

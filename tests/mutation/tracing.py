"""A pytest plugin: which test runs which line, in its worker and in what it starts."""

import gc
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
    """Names the running test to the tracer of a worker."""

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

    @pytest.fixture(scope="module", autouse=True)
    def libraries_are_no_garbage(self):
        gc.collect()
        gc.freeze()

    def pytest_unconfigure(self):
        self.tracer.stop()
        self.tracer.save()


class Durations:
    """Sums what each test takes, as the first process hears it from all workers."""

    def __init__(self, folder: Path):
        self.folder, self.tests = folder, {}

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["passed"] &= report.passed

    def pytest_unconfigure(self):
        (self.folder / "tests.json").write_text(json.dumps(self.tests))


def pytest_configure(config):
    folder = Path(os.environ["MUTATION_FOLDER"])
    plugin = Tracer if hasattr(config, "workerinput") else Durations
    config.pluginmanager.register(plugin(folder), "mutation")

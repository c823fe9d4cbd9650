"""A pytest plugin: which lines each test runs, in workers and in processes it starts.

`-p tests.mutation.tracing` with `MUTATION_FOLDER`; needs workers of pytest-xdist, since
the first process imports before a plugin can listen.
"""

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
    """Names the running test to the tracer, and writes how long each test takes."""

    def __init__(self, folder: Path, worker: str):
        self.folder, self.worker = folder, worker
        settings = folder / "coveragerc"
        self.tracer = coverage.Coverage(config_file=str(settings), context="")
        self.tracer.start()
        # Read by coverage's start-up file in every Python process that a test starts.
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self.shared: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.tracer.switch_context(item.nodeid)
        infos = item._fixtureinfo.name2fixturedefs.values()
        shared = {f.argname for fs in infos for f in fs if f.scope == "session"}
        self.shared[item.nodeid] = sorted(shared)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope != "session":
            return (yield)
        test = os.environ["PYTEST_CURRENT_TEST"]
        self.tracer.switch_context(f"session:{fixturedef.argname}")
        os.environ["PYTEST_CURRENT_TEST"] = f"session:{fixturedef.argname} "
        try:
            return (yield)
        finally:
            os.environ["PYTEST_CURRENT_TEST"] = test
            self.tracer.switch_context(test.rsplit(" (", 1)[0])

    def pytest_unconfigure(self):
        self.tracer.stop()
        self.tracer.save()
        path = self.folder / f"shared.{self.worker}.json"
        path.write_text(json.dumps(self.shared))


class Durations:
    """Sums what each test takes, as the first process hears it from all workers."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tests: dict[str, dict] = {}

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["passed"] &= report.passed

    def pytest_unconfigure(self):
        (self.folder / "tests.json").write_text(json.dumps(self.tests))


def pytest_configure(config):
    folder = Path(os.environ["MUTATION_FOLDER"])
    if hasattr(config, "workerinput"):
        worker = config.workerinput["workerid"]
        config.pluginmanager.register(Tracer(folder, worker), "tracer")
    else:
        config.pluginmanager.register(Durations(folder), "durations")

"""Which changes of the source the suite notices: `make mutants`.

A few hundred expressions are drawn over all rooms and changed, one at a time, in a copy
of the tree. The tests that run a changed line are run, quickest files first, until one
fails. At the end the share of killed mutants is printed by room; the same command
again continues.

One run of the whole suite finds which test runs which line. A mutant is tried in a
process forked from one that has imported the libraries, which saves six seconds, but
none of our modules, and that has started no backend.
"""

import argparse
import collections
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import coverage
import pytest

from tests.mutation.sites import Mutant, apply, draw, rooms_of
from tests.mutation.tracing import SETTINGS, read_tests
from tests.process import ENVIRON

LIBRARIES = (
    "numpy scipy.stats scipy.optimize sklearn.linear_model sklearn.metrics torch "
    "transformers jax flax.linen optax msgspec pyarrow tensorstore orbax.checkpoint "
    "matplotlib.figure openai safetensors.numpy rich.progress"
).split()
ROOMS = ("extract", "jaxprobe", "selection", "pgir", "benchmarks")
NOT_COPIED = (".*", "__pycache__", "runs", "build", "*.egg-info", "shared")
LEAST_SECONDS, TIMES_ITS_SECONDS = 60, 10  # after which a test counts as hung


def environ_of(tree: Path) -> dict[str, str]:
    """Return an environment in which Python imports the modules of this tree."""
    path = os.pathsep.join([str(tree / ".path"), str(tree)])
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(tree.parent / "compiled")}
    return {**os.environ, **ENVIRON, **compiled, "PYTHONPATH": path}


def copy_tree(tree: Path, copy: Path) -> None:
    """Copy sources and tests; the root package has another name than its folder."""
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    package = copy / ".path" / "beatrice"
    package.mkdir(parents=True)
    for path in [*(copy / "api").iterdir(), *(copy / room for room in ROOMS)]:
        # Relative: the copy is renamed, and copied again for each worker.
        (package / path.name).symlink_to(os.path.relpath(path, package))


def trace(tree: Path, folder: Path) -> None:
    """Run a copied tree's suite once; write `coverage` and `tests.jsonl`.

    Raises:
      SystemExit: the suite was stopped; the next run does the tests that are left.
    """
    if (folder / "traced").exists():
        return
    source = ",".join(str(room[0].parent) for room in rooms_of(tree).values())
    settings = folder / "coveragerc"
    settings.write_text(SETTINGS.format(source=source, folder=folder))
    line = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    line += ["-p", "no:cacheprovider", "-p", "tests.mutation.tracing"]
    environ = environ_of(tree) | {"MUTATION_FOLDER": str(folder)}
    with (folder / "trace.log").open("w") as log:
        code = subprocess.call(line, cwd=tree, env=environ, stdout=log, stderr=log)
    if code not in (0, 1, 5):  # 1: tests have failed, 5: none was left
        raise SystemExit(f"the suite did not come to its end; see {folder}/trace.log")
    data = coverage.Coverage(config_file=str(settings))
    data.combine(keep=True)
    if not data.get_data().measured_files():
        raise SystemExit(f"no line was traced; see {folder}/trace.log")
    data.save()
    (folder / "traced").touch()


def by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    """Group tests by their files; their order stays."""
    files = collections.defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)
    return files


def choose(
    mutant: Mutant, tree: Path, contexts: dict, seconds: dict[str, float], budget: float
) -> list[str]:
    """Return a mutant's tests, in running order, of `budget` seconds at most.

    First come those that run the statement or, for code run at import, the file. Then
    come the others of their files, as a test may judge what another has made; for code
    run at import, those of test files that import it. `contexts` are the names of the
    tests that run each line of the file, and `seconds` what each passed test takes.
    """
    lines = {mutant.line, *range(mutant.first_line, mutant.last_line + 1)}
    names = {
        # A process started by a test is recorded as "TEST (call)".
        name if name in seconds else name.rsplit(" (", 1)[0]
        for line, names in contexts.items()
        for name in names
        if mutant.at_import or line in lines
    }
    first, files = names & seconds.keys(), by_file(seconds)
    near = by_file(first).keys()
    if mutant.at_import:
        module = mutant.file.removesuffix(".py").replace("/", ".")
        module = re.sub(r"^api\b", "beatrice", module)
        near = {file for file in files if module in (tree / file).read_text()}
    chosen, left = [], budget
    for group in (first, {test for file in near for test in files[file]} - first):
        parts = by_file(test for test in seconds if test in group).values()
        for tests in sorted(parts, key=lambda x: sum(map(seconds.__getitem__, x))):
            for test in tests:
                if seconds[test] <= left:
                    chosen.append(test)
                    left -= seconds[test]
    return chosen


@dataclasses.dataclass(eq=False)  # a plugin is hashed
class Reporter:
    """Writes which test began last, or which failed first."""

    path: Path

    def write(self, nodeid: str, outcome: str) -> None:
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps({"test": nodeid, "outcome": outcome}))
        partial.rename(self.path)

    def pytest_runtest_logstart(self, nodeid):
        self.write(nodeid, "begun")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.write(report.nodeid, "killed")

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tree: Path, tests: list[str], reporter: Reporter) -> None:
    """Run tests in this process, which was forked for it."""
    os.setsid()
    log = os.open(tree.with_suffix(".log"), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in range(3):
        os.dup2(log, number)
    os.chdir(tree)
    os.environ.update(environ_of(tree), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    ours = [x for x in sys.modules if x.split(".")[0] in ("tests", "beatrice")]
    for name in ours:
        del sys.modules[name]  # this program's, which are of another tree
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("beatrice")
    if spec is None or not str(spec.origin).startswith(f"{tree}{os.sep}"):
        raise RuntimeError(f"expected beatrice of {tree}, found {spec}")
    line = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    line += ["--hypothesis-seed=0", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if pytest.main([*line, *tests], plugins=[reporter]) == 0:
        reporter.write("", "survived")


def judge(tree: Path, tests: list[str], seconds: dict[str, float]) -> dict[str, str]:
    """Run tests on a tree; return the `outcome` and the `test` that decided."""
    reporter = Reporter(tree.with_suffix(".json"))
    reporter.write("", "not begun")
    if not (child := os.fork()):
        try:
            run_tests(tree, tests, reporter)
        finally:
            os._exit(0)
    is_late = False
    while not (is_late or os.waitpid(child, os.WNOHANG)[0]):
        result = json.loads(reporter.path.read_text())
        limit = LEAST_SECONDS + TIMES_ITS_SECONDS * seconds.get(result["test"], 0)
        is_late = time.time() - reporter.path.stat().st_mtime > limit
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # with what its tests have started
    except ProcessLookupError:
        pass
    if is_late:
        os.waitpid(child, 0)
        return result | {"outcome": "hung"}
    result = json.loads(reporter.path.read_text())
    if result["outcome"] == "begun":  # and the process died
        result["outcome"] = "killed"
    return result


def try_mutant(tree: Path, mutant: Mutant, tests: list[str], seconds: dict) -> dict:
    """Judge a tree with one expression changed, and change it back."""
    path = tree / mutant.file
    source, stat = path.read_bytes(), path.stat()
    try:
        path.write_text(apply(source.decode(), mutant), encoding="utf-8")
        result = judge(tree, tests, seconds)
        # "not begun": what every test imports cannot be imported any more.
        return result | {"outcome": result["outcome"].replace("not begun", "killed")}
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def work(
    tree: Path, planned: list[tuple[Mutant, list[str]]], seconds: dict, out: Path
) -> None:
    """Try mutants one after another in a separate tree; write a line for each.

    A test that kills a mutant must pass without the change, or it does not count.
    """
    good, bad = set(), set()
    first = next((tests[:1] for _, tests in planned if tests), None)
    if first and judge(tree, first, seconds)["outcome"] == "not begun":
        raise RuntimeError(f"no test began; see {tree.with_suffix('.log')}")
    for mutant, chosen in planned:
        began, test = time.monotonic(), None
        while test is None:
            tests = [test for test in chosen if test not in bad]
            result = {"outcome": "uncovered", "test": ""}
            if tests:
                result = try_mutant(tree, mutant, tests, seconds)
            test = result["test"]
            if test in tests and test not in good:
                is_good = judge(tree, [test], seconds)["outcome"] == "survived"
                (good if is_good else bad).add(test)
                test = test if is_good else None
        row = dataclasses.asdict(mutant) | result | {"n_tests": len(tests)}
        row["seconds"] = round(time.monotonic() - began, 1)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(f"{tree.name}: tests that fail without a change: {sorted(bad)}", flush=True)


def summary(rows: list[dict]) -> str:
    """Return the share of killed mutants by room; hung ones count as killed."""
    lines = []
    for room in ["", *sorted({row["file"].split("/")[0] for row in rows})]:
        counts = collections.Counter(
            r["outcome"] for r in rows if r["file"].split("/")[0] == room or not room
        )
        n, n_killed = counts.total(), counts["killed"] + counts["hung"]
        lines.append(
            f"{room or 'all'}: {n_killed} of {n} killed ({n_killed / n:.1%}), of these "
            f"{counts['hung']} hung; {counts['survived']} survived, "
            f"{counts['uncovered']} run by no test"
        )
    return "\n".join(lines)


def main() -> None:
    """Draw mutants, judge those that have no line yet, print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90, help="seconds per mutant")
    args = parser.parse_args()
    tree, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for paths in [*rooms_of(tree).values(), sorted((tree / "tests").rglob("*.py"))]:
        for path in paths:
            digest.update(path.read_bytes())
    folder = Path("/var/tmp") / f"beatrice-mutants-{digest.hexdigest()[:12]}"
    out = folder / f"mutants-{args.seed}.jsonl"  # existing lines stay
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "tree"
    if not base.exists():
        copy_tree(tree, folder / "copying")
        (folder / "copying").rename(base)
    trace(base, folder)
    mutants = draw(base, args.n, args.seed)
    rows = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []
    done = {(r["file"], r["line"], r["column"], r["after"]) for r in rows}
    if done - {mutant.key for mutant in mutants}:
        raise SystemExit(f"{out} is of another tree, seed or number; move it away")
    tests = read_tests(folder).items()
    seconds = {test: row["seconds"] for test, row in tests if row["passed"]}
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    planned = []  # all are: a forked process that reads coverage's data erases it
    for mutant in (m for m in mutants if m.key not in done):
        contexts = data.contexts_by_lineno(str(base / mutant.file))
        planned.append((mutant, choose(mutant, base, contexts, seconds, args.budget)))
    os.environ.update(environ_of(base))  # JAX reads its own when it is imported
    for library in LIBRARIES:
        importlib.import_module(library)
    children = []
    for job in range(args.jobs):
        copy = folder / f"tree-{job}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy, symlinks=True)
        if not (child := os.fork()):
            work(copy, planned[job :: args.jobs], seconds, out)
            os._exit(0)
        children.append(child)
    is_whole = not any([os.waitpid(child, 0)[1] for child in children])
    print(summary([json.loads(line) for line in out.read_text().splitlines()]))
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()

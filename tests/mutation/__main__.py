"""Which changes of the source the suite notices: `make mutants`.

A few hundred expressions are drawn over all rooms and changed, one at a time, in a copy
of the tree. The tests that run a changed line are run, quickest files first, until one
fails. It ends with the share of mutants that were killed, by room.

Which test runs which line is found once, in a run of the whole suite. A mutant is tried
in a process that is forked from one that has imported the libraries, which spares six
seconds each, but nothing of ours, and has started no backend.
"""

import argparse
import collections
import compileall
import dataclasses
import hashlib
import importlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import coverage
import pytest

from tests.mutation.sites import Mutant, apply, draw, rooms_of
from tests.mutation.tracing import SETTINGS

LIBRARIES = (
    "numpy scipy.stats scipy.optimize sklearn.linear_model sklearn.metrics torch "
    "transformers jax flax.linen optax msgspec pyarrow tensorstore orbax.checkpoint "
    "matplotlib.figure openai statsmodels.api safetensors.numpy"
).split()
ENVIRON = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
IGNORED = shutil.ignore_patterns(
    ".*", "__pycache__", "runs", "build", "*.egg-info", "shared"
)


def environ_of(tree: Path) -> dict[str, str]:
    """Return the environment in which a tree's modules are its own."""
    path = os.pathsep.join([str(tree / ".path"), str(tree)])
    cache = str(tree.parent / "compiled")
    return {
        **os.environ,
        **ENVIRON,
        "PYTHONPATH": path,
        "JAX_COMPILATION_CACHE_DIR": cache,
    }


def copy_tree(tree: Path, copy: Path) -> None:
    """Copy sources and tests; the root package's folder has another name than it."""
    shutil.copytree(tree, copy, ignore=IGNORED)
    if (copy / "api").is_dir():
        (copy / ".path").mkdir()
        (copy / ".path" / "beatrice").symlink_to("../api")


def trace(tree: Path, folder: Path, tests: list[str]) -> None:
    """Run the whole suite once, and keep which test runs which line.

    Args:
      tree: the copy of the tree in which it runs.
      folder: gets `.coverage` and `tests.json`; what is there is not made again.
    """
    if (folder / "traced").exists():
        return
    for path in folder.glob("coverage*"):
        path.unlink()
    source = ",".join(
        str(tree / (name if (tree / name).is_dir() else f"{name}.py"))
        for name in rooms_of(tree)
    )
    settings = SETTINGS.format(source=source, folder=folder)
    (folder / "coveragerc").write_text(settings)
    here = Path(__file__).parents[2]
    environ = environ_of(tree) | {"MUTATION_FOLDER": str(folder)}
    del environ["PYTHONDONTWRITEBYTECODE"]
    if not (tree / "tests" / "mutation").exists():
        shutil.copytree(here / "tests" / "mutation", tree / "tests" / "mutation")
    line = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    line += ["-p", "no:cacheprovider", "-p", "tests.mutation.tracing", *tests]
    with (folder / "trace.log").open("w") as log:
        subprocess.run(line, cwd=tree, env=environ, stdout=log, stderr=log, check=False)
    compileall.compile_dir(tree, quiet=2)
    data = coverage.Coverage(config_file=str(folder / "coveragerc"))
    data.combine(keep=True)
    if not data.get_data().measured_files():
        raise SystemExit(f"no line was traced; see {folder}/trace.log")
    data.save()
    (folder / "traced").touch()


class Chooser:
    """Chooses and orders the tests of a mutant."""

    def __init__(self, tree: Path, folder: Path, budget: float):
        self.tree, self.budget = tree, budget
        self.tests = json.loads((folder / "tests.json").read_text())
        self.data = coverage.CoverageData(str(folder / "coverage"))
        self.data.read()
        self.users = collections.defaultdict(set)  # of a session's fixture
        for path in folder.glob("shared.*.json"):
            for test, names in json.loads(path.read_text()).items():
                for name in names:
                    self.users[name].add(test)
        self.files = collections.defaultdict(list)
        for test, about in self.tests.items():
            if about["passed"] and about["seconds"] <= budget:
                self.files[test.split("::")[0]].append(test)
        self.importers = collections.defaultdict(set)
        for path in [*tree.glob("*.py"), *tree.glob("*/**/*.py")]:
            text = path.read_text(encoding="utf-8")
            name = str(path.relative_to(tree))
            for line in text.splitlines():
                parts = line.split()
                if parts[:1] == ["from"] and "import" in parts:
                    self.importers[parts[1]].add(name)

    def covering(self, file: str, lines: set[int] | None = None) -> set[str]:
        """Return the tests that run any of some lines, or any line of a file."""
        contexts = self.data.contexts_by_lineno(str(self.tree / file))
        found = set()
        for line, names in contexts.items():
            if lines is None or line in lines:
                for name in names:
                    name = name.split("|")[-1].rsplit(" (", 1)[0].strip()
                    fixture = name.removeprefix("session:")
                    found |= {name} if fixture == name else self.users[fixture]
        return found & self.tests.keys()

    def choose(self, mutant: Mutant) -> list[str]:
        """Return tests, in the order to run them, of `budget` seconds at most.

        First those that run the statement, or for what runs at import, those that run
        the file; then others of their files: what one test made another may judge;
        then those that import the file.
        """
        lines = set(range(mutant.first_line, mutant.last_line + 1)) | {mutant.line}
        first = self.covering(mutant.file, None if mutant.at_import else lines)
        groups = [first]
        if first and not mutant.at_import:
            groups.append(
                {t for f in {x.split("::")[0] for x in first} for t in self.files[f]}
            )
        if mutant.at_import:
            module = mutant.file.removesuffix(".py").replace("/", ".")
            names = self.importers[module.removesuffix(".__init__")]
            groups.append({t for f in names for t in self.files[f]})
            others = [f for f in names if not f.startswith("tests/")]
            groups.append({t for f in others for t in self.covering(f)})
        chosen, seconds = [], 0.0
        for group in groups:
            files = collections.defaultdict(list)
            for test in group - set(chosen):
                if self.tests[test]["passed"]:
                    files[test.split("::")[0]].append(test)
            cost = {
                f: sum(self.tests[t]["seconds"] for t in ts) for f, ts in files.items()
            }
            for file in sorted(files, key=lambda f: (cost[f], f)):
                for test in sorted(files[file], key=list(self.tests).index):
                    if seconds + self.tests[test]["seconds"] <= self.budget:
                        chosen.append(test)
                        seconds += self.tests[test]["seconds"]
        return chosen


class Reporter:
    """Writes which test begins and which fails to a pipe."""

    def __init__(self, pipe: int):
        self.pipe = pipe

    def pytest_runtest_logstart(self, nodeid):
        os.write(self.pipe, f"start {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report):
        if report.failed:
            os.write(self.pipe, f"failed {report.nodeid}\n".encode())

    def pytest_collectreport(self, report):
        if report.failed:
            os.write(self.pipe, f"failed {report.nodeid}\n".encode())


def run_tests(tree: Path, tests: list[str], pipe: int) -> None:
    """Run tests in this process, which was forked for it and ends here."""
    os.setsid()
    log = os.open(tree.with_suffix(".log"), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in range(3):
        os.dup2(log, number)
    os.chdir(tree)
    os.environ.update(environ_of(tree))
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # this program's, which may be of another tree
    sys.path[:] = environ_of(tree)["PYTHONPATH"].split(os.pathsep) + sys.path
    line = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--hypothesis-seed=0",
    ]
    line += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
    code = pytest.main(line, plugins=[Reporter(pipe)])
    os.write(pipe, f"code {int(code)}\n".encode())
    os._exit(0)


def judge(tree: Path, tests: list[str], seconds: dict[str, float]) -> dict[str, str]:
    """Run tests on a tree; a test that takes ten times its time and 60 s hangs.

    Returns:
      `outcome`: killed, hung or survived; `test`: by which, if any.
    """
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(reading)
            run_tests(tree, tests, writing)
        except BaseException:
            traceback.print_exc()
            os.write(writing, b"code crash\n")
        finally:
            os._exit(1)
    os.close(writing)
    waiter, rest, test, failed, code, limit = (
        selectors.DefaultSelector(),
        b"",
        "",
        "",
        "",
        120,
    )
    waiter.register(reading, selectors.EVENT_READ)
    deadline = time.monotonic() + limit
    while not code and (left := deadline - time.monotonic()) > 0:
        if not waiter.select(left):
            continue
        if not (content := os.read(reading, 2**16)):
            code = "crash"  # a signal ended it
        *lines, rest = (rest + content).split(b"\n")
        for kind, _, name in (line.decode().partition(" ") for line in lines):
            if kind == "start":
                test = name
                deadline = time.monotonic() + 60 + 10 * seconds.get(name, 0)
            elif kind == "failed":
                failed = failed or name
            else:
                code = name
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(child, 0)
    os.close(reading)
    if code == "crash" and not test and not failed:
        raise RuntimeError(f"no test began; see {tree.with_suffix('.log')}")
    if failed or code in ("crash", "1", "2", "3", "4"):
        return {"outcome": "killed", "test": failed or test or code}
    return (
        {"outcome": "survived", "test": ""}
        if code
        else {"outcome": "hung", "test": test}
    )


def work(tree: Path, mutants: list[Mutant], chooser: Chooser, out: Path) -> None:
    """Judge mutants one after another in a tree of one's own; a line each.

    A test that fails here without a change, once it has killed, kills nothing.
    """
    seconds = {test: about["seconds"] for test, about in chooser.tests.items()}
    good, bad = set(), set()
    for mutant in mutants:
        began, path = time.monotonic(), tree / mutant.file
        source, stat = path.read_bytes(), path.stat()
        while True:
            tests = [test for test in chooser.choose(mutant) if test not in bad]
            if not tests:
                result = {"outcome": "uncovered", "test": ""}
                break
            path.write_text(apply(source.decode(), mutant), encoding="utf-8")
            try:
                result = judge(tree, tests, seconds)
            finally:
                path.write_bytes(source)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            test = result["test"]
            if test not in tests or test in good:
                break
            if judge(tree, [test], seconds)["outcome"] == "survived":
                good.add(test)
                break
            bad.add(test)
        row = dataclasses.asdict(mutant) | result
        row |= {"n_tests": len(tests), "seconds": round(time.monotonic() - began, 1)}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(f"{tree.name}: tests that fail without a change: {sorted(bad)}", flush=True)


def summary(rows: list[dict]) -> str:
    """Return killed, of how many, by room; what hangs is killed."""
    lines = []
    rooms = sorted({row["file"].split("/")[0] for row in rows})
    for room in ["", *rooms]:
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
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--out", type=Path, help="JSON lines; what is there stays")
    parser.add_argument("--work", type=Path, help="folder for the copies of the tree")
    parser.add_argument("--tests", nargs="*", default=[], help="instead of all")
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90, help="seconds per mutant")
    asked = parser.parse_args()
    tree = asked.tree.resolve()
    sources = [p for paths in rooms_of(tree).values() for p in paths]
    digest = hashlib.sha256()
    for path in sorted([*sources, *(tree / "tests").rglob("*.py")]):
        digest.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    name = f"beatrice-mutants-{digest.hexdigest()[:12]}"
    folder = asked.work or Path("/var/tmp") / name
    out = asked.out or folder / f"mutants-{asked.seed}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "tree"
    if not base.exists():
        copy_tree(tree, folder / "copying")
        (folder / "copying").rename(base)
    trace(base, folder, asked.tests)
    mutants = draw(base, asked.n, asked.seed)
    rows = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []
    done = {(r["file"], r["line"], r["column"], r["after"]) for r in rows}
    if done - {m.key for m in mutants}:
        raise SystemExit(
            f"{out} has mutants of another tree, seed or count; move it away"
        )
    left = [mutant for mutant in mutants if mutant.key not in done]
    chooser = Chooser(base, folder, asked.budget)
    os.environ.update(ENVIRON)
    for library in LIBRARIES:
        importlib.import_module(library)
    children = []
    for job in range(asked.jobs):
        tree = folder / f"tree-{job}"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(base, tree, symlinks=True)
        if not (child := os.fork()):
            work(tree, left[job :: asked.jobs], chooser, out)
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    print(summary(rows))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

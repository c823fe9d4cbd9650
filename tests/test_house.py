"""The import rules between rooms, each tried in a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("extract", "jaxprobe", "selection", "pgir", "benchmarks")
MAY_IMPORT = {
    "extract": {"extract"},
    "jaxprobe": {"jaxprobe", "extract"},
    "selection": {"selection", "jaxprobe", "extract"},
    "pgir": {"pgir", "selection", "jaxprobe", "extract"},
    "benchmarks": set(ROOMS),
}
# Folders of `benchmarks`, each of which uses those before it.
FOLDERS = ("reporting", "stages", "forecasts", "verbs", "benches")
# What a JAX room may take from `extract`: words and arrays, never the backbone.
PLAIN = {"extract.records", "extract.store.read"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_before_it(room):
    for path in (ROOT / room).rglob("*.py"):
        for name in imports_of(path):
            if name.split(".")[0] in ROOMS:
                assert name.split(".")[0] in MAY_IMPORT[room], f"{path}: {name}"
                if room in ("jaxprobe", "selection") and name.startswith("extract"):
                    assert name in PLAIN, f"{path}: {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_benchmarks_imports_only_the_folders_before_it(folder):
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    paths = list((ROOT / "benchmarks" / folder).glob("*.py"))
    assert len(paths) > 1
    for path in paths:
        for name in imports_of(path):
            room, _, rest = name.partition(".")
            if room == "benchmarks":
                assert rest.split(".")[0] in allowed, f"{path}: {name}"


def loaded_by(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import extract.store.read, extract.run.directory, extract.records",
            "jax",
        ),
        ("import extract.signals.reader, extract.pipeline", "jax"),
        (
            "import extract.datasets.building, extract.datasets.splits",
            "jax",
        ),
        (
            "import extract.datasets.building, extract.datasets.splits",
            "torch",
        ),
        (
            "import extract.generate.requests, extract.generate.answers, "
            "extract.label.rewrite, extract.label.verdicts, extract.run.contents",
            "torch",
        ),
        ("import extract.datasets", "pyarrow"),
        ("import benchmarks.verbs.datacommands", "orjson"),
        ("import jaxprobe, jaxprobe.detector, jaxprobe.features.reading", "torch"),
        ("import selection.greedy, selection.sweep", "torch"),
        ("import beatrice", "torch"),
        ("import beatrice", "jax"),
        ("import beatrice", "numpy"),
    ],
)
def test_importing_one_side_leaves_the_other_unloaded(statement, absent):
    assert absent not in loaded_by(statement)


def test_the_top_level_holds_the_rooms_and_nothing_else():
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in done.stdout.split()}
    assert top <= {
        *ROOMS,
        "tests",
        "beatrice.py",
        "pyproject.toml",
        "README.md",
        "Makefile",
        "constraints.txt",
        "LICENSE",
        ".ci",
        ".gitignore",
    }


def test_no_source_reads_pickles_or_runs_remote_code():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            names = set(imports_of(path))
            assert not names & {"pickle", "joblib", "dill", "cloudpickle"}, path
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg in (
                    "trust_remote_code",
                    "allow_pickle",
                ):
                    assert getattr(node.value, "value", None) is False, path

"""Rules of the code base: which room imports which, its documents, unsafe code."""

import ast
import functools
import re
import subprocess
import sys

import pytest

from beatrice import cli
from tests.process import ROOT, loaded_by

ROOMS = ("extract", "jaxprobe", "selection", "pgir", "benchmarks")
MAY_IMPORT = {
    "extract": {"extract"},
    "jaxprobe": {"jaxprobe", "extract"},
    "selection": {"selection", "jaxprobe", "extract"},
    "pgir": {"pgir", "selection", "jaxprobe", "extract"},
    "benchmarks": set(ROOMS),
}
# What a JAX room may import from `extract`: records, labels, words of prompts, run
# directories, stored arrays.
WITHOUT_TORCH = (
    "extract.backbone.names",
    "extract.generate.templates",
    "extract.label.labels",
    "extract.records",
    "extract.run",
    "extract.store",
)
SOURCES = sorted(
    path for room in (*ROOMS, "api") for path in (ROOT / room).rglob("*.py")
)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("beatrice", *(parts[1:] if parts[0] == "api" else parts))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


MODULES = {module_of(path): path for path in SOURCES}


def of_types(path):
    """Return the nodes that only a type checker reads."""
    return {
        inner
        for node in nodes_of(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imports_of(path, left_out=()):
    """Yield every module of ours that a file names, deferred imports included."""
    for node in nodes_of(path):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_before_it(room):
    for path in (ROOT / room).rglob("*.py"):
        for name in imports_of(path):
            package, _, module = name.partition(".")
            if package == "beatrice":
                # A benchmark may also time what a user calls.
                is_bench = path.is_relative_to(ROOT / "benchmarks" / "bench")
                is_known = module.split(".")[0] in MAY_IMPORT[room]
                assert is_known or is_bench, f"{path}: {name}"
                if room in ("jaxprobe", "selection") and module.startswith("extract"):
                    assert module.startswith(WITHOUT_TORCH), f"{path}: {name}"


def test_nothing_imports_a_room_by_its_bare_name():
    """In a checkout it would work, but load a second copy of every module."""
    rooms = {*ROOMS, "api"}
    for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")):
        bare = {name.split(".")[0] for name in imports_of(path)} & rooms
        assert not bare, f"{path} imports {bare}"


def test_there_is_no_circular_import():
    imports = {
        name: MODULES.keys() & {*imports_of(path, of_types(path))} - {name}
        for name, path in MODULES.items()
    }
    finished = set()

    def visit(name, above):
        assert name not in above, f"circular import: {' > '.join([*above, name])}"
        if name not in finished:
            for other in imports[name]:
                visit(other, (*above, name))
            finished.add(name)

    for name in MODULES:
        visit(name, ())


def test_a_type_checker_reads_no_getattr_that_would_allow_any_name():
    for path in SOURCES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert "__getattr__" not in {getattr(node, "name", None) for node in body}, path


def calls_of(path):
    """Yield every call in a file, with the name of the function."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", None)), node


# The modules that do the work of stages defined elsewhere.
WORKERS = {
    call.args[0].value.partition(":")[0]
    for path in SOURCES
    for name, call in calls_of(path)
    if name == "deferred"
}


def is_stage_file(path):
    """Return whether a file makes or does a stage or a verb, or is in `extract/run`."""
    if path.is_relative_to(ROOT / "extract" / "run") or module_of(path) in WORKERS:
        return True
    makers = {"Stage", "TextStage", "answer_stage", "command"}
    return any(name in makers for name, _ in calls_of(path))


def functions_with_a_run(path):
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if "RunDir" in ast.unparse(node.args):
                yield node.name


def test_only_files_of_stages_and_verbs_take_a_run_directory():
    below = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in SOURCES
        if not is_stage_file(path)
        for name in functions_with_a_run(path)
    }
    assert below == set()


def test_every_room_has_a_readme_and_the_top_one_is_short():
    for room in ROOMS:
        assert (ROOT / room / "README.md").is_file()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def anchors_of(document):
    """Return the names of a document's headings, as links write them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_relative_link_of_a_document_leads_to_a_file_and_a_heading():
    rooms = (ROOT / room / "README.md" for room in ROOMS)
    for document in (*ROOT.glob("*.md"), *rooms, *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^):]+)\)", document.read_text()):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), f"{document}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{document}: {link}"


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            # What the stages of `data` and `label` import, and the prompts.
            "extract.datasets extract.datasets.building extract.generate.answers "
            "extract.generate.prompts extract.label.stage extract.records "
            "extract.run.contents extract.run.process extract.run.stages "
            "extract.store.store",
            "click jax pyarrow torch",
        ),
        ("extract.signals.reader extract.generate.local", "jax"),
        # What `Probe.predict` imports, which needs no language model.
        ("jaxprobe.calibrate pgir.forward pgir.warnings signals", "transformers"),
        (
            # What `train`, `select`, `calibrate` and `evaluate` need to do their work.
            "jaxprobe.calibrate jaxprobe.detector jaxprobe.train selection.ablation "
            "selection.exhaustive selection.greedy benchmarks.results.evaluate",
            "torch",
        ),
        ("", "numpy"),
    ],
)
def test_importing_one_side_does_not_load_the_libraries_of_the_other(modules, absent):
    names = ["beatrice", *(f"beatrice.{name}" for name in modules.split())]
    assert not {*absent.split()} & loaded_by("import " + ", ".join(names))


def test_exact_products_do_not_load_the_compiler_of_torch():
    module = "beatrice.extract.signals.precision"
    code = f"from {module} import exact_products\nwith exact_products():\n    pass"
    assert "torch._dynamo" not in loaded_by(code)


def test_doctor_loads_transformers_only_for_a_model():
    code = "from beatrice.cli import main\nmain(['doctor'], standalone_mode=False)"
    assert "transformers.utils" not in loaded_by(code)


def test_the_help_of_every_verb_loads_neither_torch_nor_jax():
    code = """
import click
from beatrice import cli
for name in cli.VERBS:
    command = cli.main.get_command(None, name)
    command.get_help(click.Context(command))
"""
    assert not {"torch", "jax", "transformers", "numpy"} & loaded_by(code)


def test_every_verb_is_defined_in_the_commands_module_of_a_room():
    for module in cli.VERBS.values():
        rooms = module.removeprefix("beatrice.").split(".")
        if rooms[0] in ROOMS:  # the others use all rooms: demo, doctor
            assert rooms[-1] == "commands"


def git_files(*arguments):
    """Return the paths that git lists in the checkout; without one, skip the test."""
    line = ["git", "ls-files", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.split()


def test_the_top_level_holds_the_rooms_and_nothing_else():
    top = {name.split("/")[0] for name in git_files()}
    others = "README.md CONTRIBUTING.md LICENSE Makefile setup.py pyproject.toml "
    others += "constraints.txt MANIFEST.in .pre-commit-config.yaml .ci .gitignore"
    assert top == {*ROOMS, "api", "docs", "tests", *others.split()}


@pytest.fixture
def build(tmp_path):
    """Return a function that runs setup.py in a checkout where it was run before."""
    pytest.importorskip("setuptools", "77")
    files = "setup.py pyproject.toml MANIFEST.in README.md LICENSE"
    for name in (*ROOMS, "api", "tests", *files.split()):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build" / "lib" / "beatrice").mkdir(parents=True)
    (tmp_path / "build" / "lib" / "beatrice" / "removed.py").touch()

    def run(verb):
        line = (sys.executable, "-W", "error", "setup.py", "-q", verb)
        subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
        return tmp_path

    return run


def test_a_build_has_every_file_of_the_rooms_and_none_of_an_earlier_version(build):
    library = build("build_py") / "build" / "lib" / "beatrice"
    # Also those that are not yet added to git.
    kinds = ("--cached", "--others", "--exclude-standard")
    names = git_files(*kinds, "api", *ROOMS)
    files = {library / x.removeprefix("api/") for x in names if (ROOT / x).exists()}
    expected = files - {library / room / "README.md" for room in ROOMS}
    assert {path for path in library.rglob("*") if path.is_file()} == expected


def test_a_source_distribution_has_the_package_without_its_tests(build):
    lines = (build("egg_info") / "beatrice_probe.egg-info" / "SOURCES.txt").read_text()
    top = {line.split("/")[0] for line in lines.split()}
    assert {*ROOMS, "api"} < top and "tests" not in top


def test_no_source_reads_pickles_or_runs_remote_code():
    for path in SOURCES:
        names = set(imports_of(path))
        assert not names & {"pickle", "joblib", "dill", "cloudpickle"}, path
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                raise AssertionError(f"{path} calls torch.load")
            dangerous = ("trust_remote_code", "allow_pickle")
            if isinstance(node, ast.keyword) and node.arg in dangerous:
                assert getattr(node.value, "value", None) is False, path

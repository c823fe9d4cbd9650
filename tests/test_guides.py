"""The guides, the notebook and the results show what the program really gives."""

import faulthandler
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time

import pytest

from beatrice.benchmarks.results.names import CHAMPION, EVERY_FAMILY, PERPLEXITY, probe
from beatrice.benchmarks.results.tables import (
    find,
    number,
    of_rival,
    results_of,
    row_value,
    where,
)
from beatrice.cli import SHARED, VERBS, main
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import ResultRow, read_rows
from beatrice.jaxprobe.calibration import N_BINS
from beatrice.pgir.controllers import CONTROLLERS
from beatrice.selection.anatomy import ANALYSES
from tests.blocks import FENCE, run_blocks
from tests.extract.small_run import beatrice
from tests.process import ROOT, run_line

RESULTS = ROOT / "docs" / "results"
SCHEMA = (RESULTS / "schema.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
DOCUMENTS = [
    *(ROOT / "docs").rglob("*.md"),
    *(path for path in ROOT.glob("*/README.md")),
    ROOT / "README.md",
]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPAN = re.compile(r"`([^`]+)`")
PARTS = re.compile(r"&&|\$\(|#")  # where another command may begin in a line
OPTION = re.compile(r"(?<!\S)\[?(--[a-z][a-z-]+)")
SETTING = re.compile(r"--set (\w+)=")
NAMED = re.compile(r"(\w+): ")


@pytest.fixture
def folder(smoke_run, tmp_path, monkeypatch):
    """A folder as a reader has it: a finished run, and questions."""
    shutil.copytree(smoke_run, tmp_path / "runs" / "demo")
    shutil.copy(RunDir(smoke_run).examples, tmp_path / "questions.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_python_of_a_guide_runs_and_prints_what_it_shows(guide, folder):
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 150
    run_blocks(guide, terminal=False)


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_line_of_a_guide_runs_in_order(guide, folder):
    (folder / "questions.jsonl").unlink()  # the guide says where it comes from
    run_blocks(guide, terminal=True)


def options_of(command):
    """Return the options of a command, and the names that its `--set` takes."""
    names = {name for option in command.params for name in option.opts}
    rare = [option.help for option in command.params if "--set" in option.opts]
    return names | {f"{name}=" for text in rare for name in NAMED.findall(text)}


def commands_of(document):
    """Yield the line and the words, from the verb on, of each command shown."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [x for k, b in FENCE.findall(text) if k != "python" for x in b.splitlines()]
    lines += [" ".join(x.split()) for x in SPAN.findall(FENCE.sub("", text))]
    for part in itertools.chain.from_iterable(map(PARTS.split, lines)):
        if command := re.search(r"(?:^|\s)beatrice (\w.*)", part):
            yield part, command[1].split()
        elif part.split(" --")[0] in VERBS and " --" in part:
            yield part, part.split()


def test_every_command_in_a_document_has_a_known_verb_and_known_options():
    n_commands = 0
    for document in DOCUMENTS:
        for line, words in commands_of(document):
            verb = words[0].rstrip(",")
            assert verb in VERBS, f"{document.name}: {line}"
            command = main.get_command(None, verb)
            if verb == "bench" and len(words) > 1:
                command = command.get_command(None, words[1])
            given = {w for w in OPTION.findall(" ".join(words)) if w != "--set"}
            given |= {f"{name}=" for name in SETTING.findall(" ".join(words))}
            assert given <= options_of(command), f"{document.name}: {line}"
            is_shared = line.startswith(("srun", "torchrun")) or "--shard" in given
            assert verb in SHARED or not is_shared, f"{document.name}: {line}"
            n_commands += 1
    assert n_commands > 100


def test_the_picture_is_small_and_loads_nothing_from_outside():
    svg = (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8")
    assert len(svg) < 200_000
    links = re.findall(r'(?:xlink:)?href="([^"]{0,20})', svg)
    assert links and all(x.startswith(("#", "data:image/png")) for x in links)


@pytest.mark.slow
def test_the_notebook_holds_what_its_cells_print_and_draw(capsys):
    docs = ROOT / "docs"
    executed = runpy.run_path(str(docs / "execute.py"))["executed"]
    path = docs / "notebook.ipynb"
    assert path.stat().st_size < 300_000
    committed = json.loads(path.read_text(encoding="utf-8"))
    result = executed((docs / "notebook.py").read_text(encoding="utf-8"))
    n_figures = 0
    for old, new in zip(committed["cells"], result["cells"], strict=True):
        assert old["source"] == new["source"]
        outputs = zip(old.get("outputs", ()), new.get("outputs", ()), strict=True)
        for before, after in outputs:
            if "data" in before:
                n_figures += 1
                assert after["data"].keys() == before["data"].keys() == {"image/png"}
                continue
            texts = ["".join(output["text"]) for output in (before, after)]
            assert NUMBER.sub("#", texts[0]) == NUMBER.sub("#", texts[1])
            # Sums in another order move P by rounding, which moves a share by one.
            numbers = [[float(x) for x in NUMBER.findall(text)] for text in texts]
            assert numbers[1] == pytest.approx(numbers[0], rel=0.05, abs=0.01)
    assert n_figures == 1


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    line = ("-m", "sphinx", "-W", "-q", ROOT / "docs", tmp_path / "out")
    run_line(sys.executable, *line)
    for page in ("guides/score-answers.html", "results/gemma.html"):
        assert (tmp_path / "out" / page).exists()
    sidebar = (tmp_path / "out" / "index.html").read_text()
    assert sidebar.count(">Tables of ") >= 3 and ">Decisions<" not in sidebar


# Beginnings of variables that the tests set and a newcomer does not have.
OURS = ("BEATRICE_", "JAX_", "XLA_", "PYTHON", "OMP_", "HF_", "PYTEST_")


@pytest.mark.slow
@pytest.mark.network
def test_every_line_of_readme_and_guides_runs_in_a_fresh_clone(tmp_path, capsys):
    faulthandler.cancel_dump_traceback_later()  # longer than any other test
    clone, began = tmp_path / "beatrice", time.monotonic()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    environ["PYTHON"] = sys.executable

    def do(*words, folder=clone):
        start = time.monotonic()
        with capsys.disabled():  # so that its hour can be watched
            subprocess.run(words, cwd=folder, env=environ, check=True)
            print(f"{time.monotonic() - start:6.0f} s  {' '.join(words)}", flush=True)

    do("git", "clone", "--quiet", str(ROOT), str(clone), folder=tmp_path)
    do("make", "setup")
    do("make", "demo")
    with (clone / "runs" / "demo" / "examples.jsonl").open() as lines:
        some = "".join(itertools.islice(lines, 600))
    (clone / "questions.jsonl").write_text(some)  # as a user has
    # The detector of this guide stays in the run, and `transfer` of another refuses it.
    last = ROOT / "docs" / "guides" / "add-a-detector.md"
    texts = [ROOT / "README.md", *(path for path in GUIDES if path != last), last]
    texts = [str(path.relative_to(ROOT)) for path in texts]
    do(".venv/bin/python", "-m", "tests.blocks", *texts)
    with capsys.disabled():
        print(f"{time.monotonic() - began:6.0f} s  in all")


@pytest.mark.parametrize(
    ("name", "n_tables"), [("demo", 9), ("gemma", 7), ("smollm2", 7)]
)
def test_the_tables_are_those_of_the_committed_rows(name, n_tables):
    done = beatrice("report", RESULTS / f"{name}.jsonl")
    assert done.stdout == (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert done.stdout.count("###") == n_tables


def with_interval(row):
    """Return a row's value and interval as texts print them."""
    ends = [number(x, is_signed=x < 0) for x in (row.ci_low, row.ci_high)]
    return f"{row_value(row)} [{', '.join(ends)}]".replace("-", "−")


def readme_cells(name, lines):
    """Yield the cells that a released model's rows give in the README's table."""
    results = results_of(read_rows(RESULTS / f"{name}.jsonl"))
    places = ({"dataset": IN_DOMAIN, "split": "test"}, {"dataset": "popqa"})
    for setting, rival in lines:
        for place in places:
            experiment, against = "detection", {"against": None}
            if rival is not None:
                experiment, against = "paired", of_rival(rival)
            about = {"experiment": experiment, "setting": setting, "seed": "mean"}
            columns = CHAMPION._asdict() | against | about | place
            row = find(results, metric="auroc", **columns)
            yield with_interval(row) if rival else row_value(row)


def test_the_numbers_of_the_readme_are_those_of_the_committed_rows():
    lines = re.findall(r"^\| ((?:selected|minus) .*) \|$", README, re.MULTILINE)
    cells = [line.split(" | ")[1:] for line in lines]
    probes = zip(SETTINGS, (probe("P"), probe(EVERY_FAMILY)), strict=True)
    shown = [(s, rival) for s, x in probes for rival in (None, PERPLEXITY, x)]
    for i, name in enumerate(("gemma", "smollm2")):
        given = [cell for line in cells for cell in line[2 * i : 2 * i + 2]]
        assert given == list(readme_cells(name, shown)), name
        n, n_context, n_popqa = re.search(
            r"are (\S+) test answers .* and (\S+) with .*, of PopQA (\S+) each", README
        ).groups()
        counts = (f"{x} (0)" for x in (n, n_popqa, n_context, n_popqa))
        tables = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert f"| n (left out) | {' | '.join(counts)} |" in tables
    pairs = re.search(r"In (\d+) of 100 such pairs[^.]+by perplexity in (\d+)", README)
    ours, gain = (float(cells[line][0].replace("+", "").split()[0]) for line in (0, 1))
    assert pairs.groups() == (f"{100 * ours:.0f}", f"{100 * (ours - gain):.0f}")


def test_the_retrieval_numbers_of_the_texts_are_those_of_the_committed_rows():
    sentence = re.findall(r"has (\S+ \[[^]]*\]) exact match; (.*)\.\n", README)
    results = results_of(read_rows(RESULTS / "demo.jsonl"))
    about = {"experiment": "controller_macro", "metric": "em", "split": "evaluated"}
    rows = {r.detector: r for r in where(results, **about)["row"]}
    published = ("skr", "adaptive_rag", "dragin", "probing_rag")
    best = max((rows[name] for name in published), key=lambda row: row.value)
    rivals = {
        "with the paper's query": rows["pgir"],
        "retrieving once": rows["vanilla_rag"],
        CONTROLLERS[best.detector]: best,
        "PGIR's loop with perplexity": rows["perplexity_rag_query"],
    }
    ours = rows["pgir_query"]
    others = ", ".join(f"{name} {row_value(row)}" for name, row in rivals.items())
    assert sentence == [(with_interval(ours), others)]
    text = (RESULTS / "retrieval.md").read_text(encoding="utf-8")
    gains = re.findall(r"the detector gains (.*) in exact match and (.*) in F1", text)
    pair = {"detector": "pgir_query", "against": "perplexity_rag_query"}
    about |= pair | {"experiment": "controller_query_paired", "dataset": "macro"}
    differences = [find(results, **about | {"metric": name}) for name in ("em", "f1")]
    assert gains == [tuple(map(with_interval, differences))]
    assert all(row.ci_low > 0 for row in differences)


def test_the_readme_quotes_numbers_that_stand_in_the_measurements():
    measured = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    least = re.findall(r"^\| Qwen3.5-9B \|(?: \S+ \|){3} (\S+) \|", measured, re.M)[0]
    most = re.findall(r"Gemma \S+ and ([\d.]+), embedded", measured)[0]
    assert f"takes [{float(least):.1f} to {float(most):.1f} times]" in README
    minutes, questions = re.findall(r"([\d.]+) minutes for \[([\d,]+) quest", README)[0]
    assert re.search(rf"^\| {questions} \|.* \| {minutes} \|$", measured, re.MULTILINE)
    words = r"(\d+) of Tr.* (\d+) ca.*; (\d+) are"
    exact, types, refused = re.findall(words, README)[0]
    assert f"Which of Transformers' {types} causal types" in measured
    assert f"| of up to 26 tokens | {exact} | {refused} |" in measured


def test_the_schema_names_every_column_of_a_row():
    columns = re.findall(r"^\| `(\w+)` \| (?:text|number|whole) \|", SCHEMA, re.M)
    assert sorted(columns) == sorted(ResultRow.__struct_fields__)


def test_the_schema_names_every_experiment_of_the_committed_rows():
    lines = "".join(x.read_text(encoding="utf-8") for x in RESULTS.glob("*.jsonl"))
    experiments = set(re.findall(r'"experiment": "(\w+)"', lines))
    assert len(experiments) == 15
    assert all(f"`{name}`" in SCHEMA for name in experiments)


def test_the_schema_and_the_rooms_table_name_every_analysis():
    text = (ROOT / "selection" / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| `--only` |") :].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    listed = [name for cell in cells for name in SPAN.findall(cell)]
    assert sorted(listed) == sorted(ANALYSES)
    assert all(f"`anatomy_{name}`" in SCHEMA for name in ANALYSES)


def test_the_schema_says_in_how_many_bins_the_calibration_error_is_measured():
    assert f"calibration error in {N_BINS} bins of equal width" in SCHEMA

"""A finished run, damaged one file at a time: an error of one sentence, or no change.

Mutants of its JSON files are read by the readers of the stages and by the verbs.
None may end in a traceback, and none may be accepted and change a number.
"""

import json
import os
import random
import shutil
from pkgutil import resolve_name

import pytest

from beatrice.benchmarks.results.report import Control, Curves, read_part
from beatrice.cli import CHAIN
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.label.labels import count_correct
from beatrice.extract.records import Passage, read_records
from beatrice.extract.run.contents import read_answers, read_examples, read_labels
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.rows import read_result_rows, read_rows
from beatrice.extract.signals.extract import extract_config
from beatrice.extract.store.store import open_store, verify
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import run_selection
from beatrice.jaxprobe.detector import Detector
from beatrice.jaxprobe.stages import grid_config, read_sweep, select_config
from tests.extract.small_run import beatrice
from tests.records import spoil

JUNK = (None, True, -1, 0, 7, 2.5, 10**9, 10**30, "", "x", "7", [], {}, [1], [[]])
JUNK += ({"a": 1}, [None], "../..", float("nan"))


@pytest.fixture(scope="module")
def run(smoke_run, tmp_path_factory):
    """A finished run, which every test leaves as it was."""
    path = tmp_path_factory.mktemp("damaged") / "run"
    return RunDir(shutil.copytree(smoke_run, path))


def contents(run):
    """Return the contents of all JSON files of a run, by their paths in it."""
    files = [*run.path.rglob("*.json"), *run.path.rglob("*.jsonl")]
    return {str(f.relative_to(run.path)): f.read_bytes() for f in sorted(files)}


def read(run, name):
    """Read a file as the stages do, which may raise nothing but ValueError."""
    top, *inner = name.split("/")
    if top == "manifest.json":
        read_manifest(run.path)
        run.section("backbone", BackboneConfig)
        for section in (answer_config, extract_config, grid_config):
            section(run)
        return select_config(run)
    readers = {
        "stages": lambda: run.stage_record(inner[0].removesuffix(".json")),
        "sweep.json": lambda: read_sweep(run.sweep),
        "examples.jsonl": lambda: read_examples(run),
        "passages.jsonl": lambda: list(read_records(run.passages, Passage)),
        "answers": lambda: read_answers(run),
        "labels.jsonl": lambda: count_correct(read_examples(run), read_labels(run)),
        "selection": lambda: run_selection(run, inner[0]),
        "encoders": lambda: checkpoint.restore(run.encoders(inner[0])),
        "detector": lambda: Detector.load(run.detector),
        "features": lambda: verify(open_store(run.features(inner[0]))),
        "control": lambda: read_part(run.control / "control.json", Control, "control"),
        "reliability.json": lambda: read_part(
            run.path / name, dict[str, Curves], "evaluate"
        ),
        "results.jsonl": lambda: read_result_rows(run),
        "rows": lambda: list(read_rows(run.path / name)),
    }
    return readers.get(top, lambda: None)()


def mutant(rng, content, *, is_lines):
    """Return the content with a bit flipped, a part cut out, or a value changed."""
    kind = rng.choice(("bit", "end", "part", "value", "value", "line"))
    if kind == "bit":
        index = rng.randrange(len(content))
        changed = bytes([content[index] ^ 1 << rng.randrange(8)])
        return content[:index] + changed + content[index + 1 :]
    if kind in ("end", "part"):
        start = rng.randrange(len(content))
        stop = len(content) if kind == "end" else start + rng.randrange(1, 40)
        return content[:start] + content[stop:]
    lines = content.splitlines(keepends=True) if is_lines else [content]
    i = rng.randrange(len(lines))
    if kind == "line" and is_lines:
        return b"".join(
            [*lines[:i], *rng.choice(([], [lines[i]] * 2)), *lines[i + 1 :]]
        )
    lines[i] = json.dumps(spoil(rng, json.loads(lines[i]), JUNK)).encode() + b"\n"
    return b"".join(lines)


def consumers(run):
    """Return for each file the verbs that read it, or else make or show it."""
    stages = list(map(resolve_name, CHAIN))
    inputs = {
        s.name: [str(p.relative_to(run.path)) for p in s.inputs(run)] for s in stages
    }
    results = {}
    for name in contents(run):
        verbs = [
            verb
            for verb, paths in inputs.items()
            if any(name == path or name.startswith(f"{path}/") for path in paths)
        ]
        # The page leaves out rows of rivals whose record is damaged, and says so.
        if name.startswith("baselines/"):
            verbs = ["baselines"]
        results[name] = verbs or ["report"]
    return results


def call(verb, run, *options):
    """Return how a verb ends; a traceback fails the test."""
    done = beatrice(verb, run.path, *options, code=None)
    assert done.exit_code in (0, 1), (done.exit_code, done.output, done.exception)
    if done.exit_code:
        assert isinstance(done.exception, SystemExit), repr(done.exception)
        last = done.output.strip().splitlines()[-1]
        assert last.startswith("Error: ") and len(last) < 900, last
    return done


def write_all(run, files):
    """Put files back as they were."""
    for name, content in files.items():
        if (run.path / name).read_bytes() != content:
            (run.path / name).write_bytes(content)


def numbers(files):
    """Return the files that hold a run's numbers."""
    return {n: c for n, c in files.items() if n.startswith(("rows/", "results.jsonl"))}


@pytest.mark.parametrize("n_mutants", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutants_end_in_one_sentence_or_change_no_number(run, n_mutants):
    whole, verbs = contents(run), consumers(run)
    # The page is drawn again for these two, which takes a second.
    slow = dict.fromkeys(("results.jsonl", "stages/report.json"), n_mutants // 150)
    quick = [name for name in whole if name not in slow]
    names = [name for name, n in slow.items() for _ in range(n)]
    names += [quick[i % len(quick)] for i in range(n_mutants - len(names))]
    n_refused = 0
    for number, name in enumerate(names):
        seed = f"{os.environ.get('BEATRICE_MUTANT_SEED', '0')} {number} {name}"
        rng = random.Random(seed)
        content = mutant(rng, whole[name], is_lines=name.endswith("l"))
        if content == whole[name]:
            continue
        (run.path / name).write_bytes(content)
        try:
            try:
                read(run, name)
            except ValueError as error:
                assert "Traceback" not in str(error)
            done = call(rng.choice(verbs[name]), run)
        except Exception as error:
            raise AssertionError(f"mutant {seed!r}: {content[:300]!r}") from error
        n_refused += done.exit_code
        if done.exit_code == 0:
            after = {n: c for n, c in numbers(contents(run)).items() if n != name}
            was = {n: c for n, c in numbers(whole).items() if n != name}
            assert after == was, f"mutant {seed!r} was accepted and changed a number"
        write_all(run, whole)
    assert n_refused > n_mutants // 2


def edit(name, **fields):
    """Return a function that changes the last record of a file of lines."""

    def change(run):
        lines = (run.path / name).read_text().splitlines(keepends=True)
        lines[-1] = json.dumps(json.loads(lines[-1]) | fields) + "\n"
        (run.path / name).write_text("".join(lines))

    return change


def replaced(name, old, new):
    """Return a function that replaces a text in a file."""

    def change(run):
        content = (run.path / name).read_text()
        assert old in content
        (run.path / name).write_text(content.replace(old, new))

    return change


PLAUSIBLE = {
    "another split": replaced("examples.jsonl", '"split": "test"', '"split": "ood"'),
    "another gold": edit("examples.jsonl", golds=["Atlantis"]),
    "another answer": edit("answers/answers.jsonl", text="Atlantis"),
    "another label": replaced("labels.jsonl", '"label": false', '"label": true'),
    "another layer": replaced("sweep.json", '"layer": ', '"layer": 1'),
    "another threshold": replaced("control/control.json", '"tau": 0', '"tau": 1'),
    "another row": edit("rows/evaluate.jsonl", value=0.123),
    "another result": edit("results.jsonl", value=0.123),
    "another curve": replaced("reliability.json", '"lower": 0', '"lower": 1'),
    "another seed": replaced("manifest.json", '"seed": 0', '"seed": 1'),
    "another member": replaced("selection/closed_book/config.json", ".", ".0"),
}


# Written by `evaluate` or after it, and not read by it.
LATER = {"another threshold", "another row", "another result", "another curve"}


@pytest.mark.parametrize(
    ("edited", "verb"),
    [
        *((edited, "report") for edited in PLAUSIBLE),
        *((edited, "evaluate") for edited in PLAUSIBLE if edited not in LATER),
    ],
)
def test_a_plausible_edit_changes_no_number(run, tmp_path, edited, verb):
    copied = RunDir(shutil.copytree(run.path, tmp_path / "run"))
    whole = contents(copied)
    PLAUSIBLE[edited](copied)
    changed = {n for n, c in contents(copied).items() if c != whole[n]}
    assert len(changed) == 1
    (copied.stages / f"{verb}.json").unlink()  # so that it reads its inputs again
    done = call(verb, copied)
    for name, content in numbers(contents(copied)).items():
        lines, before = set(content.splitlines()), set(whole[name].splitlines())
        assert name in changed or lines <= before, done.output
        # Rows of an edited part are left out, and the output says so.
        assert lines == before or name in changed or "left out" in done.output


def test_verify_fails_for_every_file_that_was_edited(run):
    whole = contents(run)
    for edited, change in PLAUSIBLE.items():
        change(run)
        assert call("doctor", run, "--verify").exit_code == 1, edited
        write_all(run, whole)
    assert call("doctor", run, "--verify").exit_code == 0

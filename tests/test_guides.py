"""The guides: short, built without a warning, and every block of code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beatrice.cli import SHARED, VERBS, main
from beatrice.extract.run.directory import RunDir

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SLOW = ("fit-a-probe",)


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(x, id=x.stem, marks=[pytest.mark.slow] * (x.stem in SLOW))
        for x in GUIDES
    ],
)
def test_the_python_of_a_guide_runs(guide, smoke_run, tmp_path):
    text = guide.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(smoke_run)
    examples = RunDir(smoke_run).examples.read_bytes()
    (tmp_path / "questions.jsonl").write_bytes(examples)
    here, names = os.getcwd(), {}
    os.chdir(tmp_path)
    try:
        for language, code in FENCE.findall(text):
            if language == "python":
                exec(compile(code, guide.name, "exec"), names)
    finally:
        os.chdir(here)


def options_of(command):
    """Return the options of a command and of those below it."""
    names = {name for option in command.params for name in option.opts}
    for below in getattr(command, "commands", {}).values():
        names |= options_of(below)
    return names


def test_every_line_of_a_terminal_names_a_verb_and_options_that_there_are():
    n_lines = 0
    for guide in GUIDES:
        for language, block in FENCE.findall(guide.read_text(encoding="utf-8")):
            for line in block.splitlines() if language == "console" else ():
                words = line[line.index("beatrice") :].split()
                verb, given = words[1], {w for w in words if w.startswith("--")}
                assert verb in VERBS, line
                assert given <= options_of(main.get_command(None, verb)), line
                is_shared = line.startswith(("srun", "torchrun")) or "--shard" in given
                assert verb in SHARED or not is_shared
                n_lines += 1
    assert n_lines > 20


def test_the_picture_is_small_and_asks_for_nothing():
    svg = (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8")
    assert len(svg) < 200_000
    links = re.findall(r'(?:xlink:)?href="([^"]{0,20})', svg)
    assert links and all(x.startswith(("#", "data:image/png")) for x in links)


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    line = [sys.executable, "-m", "sphinx", "-W", "-q", ROOT / "docs", tmp_path / "out"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "guides" / "score-answers.html").exists()

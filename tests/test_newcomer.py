"""A newcomer: a fresh clone, two commands, then every line of README and guides."""

import faulthandler
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What the tests set, and a newcomer has not.
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
        with capsys.disabled():  # an hour is watched
            subprocess.run(words, cwd=folder, env=environ, check=True)
            print(f"{time.monotonic() - start:6.0f} s  {' '.join(words)}", flush=True)

    do("git", "clone", "--quiet", str(ROOT), str(clone), folder=tmp_path)
    do("make", "setup")
    do("make", "demo")
    with (clone / "runs" / "demo" / "examples.jsonl").open() as lines:
        some = "".join(itertools.islice(lines, 600))
    (clone / "questions.jsonl").write_text(some)  # as anybody has
    guides = sorted(path.name for path in (ROOT / "docs" / "guides").glob("*.md"))
    texts = ["README.md", *(f"docs/guides/{name}" for name in guides)]
    do(".venv/bin/python", "-m", "tests.blocks", *texts)
    with capsys.disabled():
        print(f"{time.monotonic() - began:6.0f} s  in all")

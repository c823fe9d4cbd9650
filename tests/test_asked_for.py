"""Rankings and ablations of a whole small run, killed again and again, and verified."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = (
    ("select", "--exhaustive", "exhaustive"),
    ("evaluate", "--ablations", "ablate"),
)
N_KILLS = 4


def start(verb, run, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "beatrice", verb, str(run), *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(verb, run, *options):
    process = start(verb, run, *options)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


@pytest.mark.slow
def test_kills_change_no_row_and_the_report_shows_what_was_asked_for(
    smoke_run, tmp_path
):
    whole, killed = (shutil.copytree(smoke_run, tmp_path / x) for x in ("a", "b"))
    plain = (whole / "results.jsonl").read_text()
    for verb, option, stage in LINES:
        began = time.monotonic()
        finish(verb, whole, option)
        seconds = time.monotonic() - began
        rng, n_killed = random.Random(0), 0
        for _ in range(N_KILLS):
            process = start(verb, killed, option)
            time.sleep(rng.uniform(0.2, 0.7) * seconds)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                n_killed += 1
            process.communicate()
        assert n_killed, "the line outran the kills"
        finish(verb, killed, option)
        assert f"{stage}: already done" in finish(verb, whole, option)
    rows = (whole / "results.jsonl").read_text()
    assert rows == (killed / "results.jsonl").read_text()
    assert rows.startswith(plain)  # what was there before is as it was
    for experiment in ("exhaustive", "ablation"):
        assert f'"experiment": "{experiment}"' in rows[len(plain) :]
    finish("report", killed)
    page = (killed / "report.html").read_text()
    for section in ("exhaustive", "ablations"):
        text = re.search(rf'<section id="{section}">.*?</section>', page, re.DOTALL)
        assert 'class="empty"' not in text.group()
    assert not list(killed.glob("exhaustive/*.pieces"))
    assert not list(killed.glob("ablations/*.members"))
    finish("doctor", killed, "--verify")

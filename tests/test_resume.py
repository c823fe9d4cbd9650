"""A demo that is killed again and again ends with the rows of one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
N_KILLS = 10
LONGEST_LIFE_S = 40.0


def start(run):
    return subprocess.Popen(
        [sys.executable, "-m", "beatrice", "demo", str(run), "--preset", "smoke"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(run):
    process = start(run)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_ten_kills_change_no_row(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole)
    rng = random.Random(int(os.environ.get("BEATRICE_KILL_SEED", "0")))
    n_killed = 0
    while n_killed < N_KILLS:
        process = start(killed)
        time.sleep(rng.uniform(2.0, LONGEST_LIFE_S))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            n_killed += 1
        process.communicate()
        if process.returncode == 0:
            break
    assert n_killed >= 3, "the run outran the kills; shorten LONGEST_LIFE_S"
    finish(killed)
    for name in ("results.jsonl", "selection/closed_book/config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()

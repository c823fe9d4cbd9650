"""A demo that is killed again and again ends with the rows of one that was not."""

import json
import os
import random
import time

import pytest

from tests.process import BEATRICE, call, kill, start

N_KILLS = 10
LEAST_KILLS = 5  # a run that ends before its tenth kill has been killed often enough
LIFE = 0.1, 0.45  # between these shares of the uninterrupted run's time


@pytest.mark.slow
def test_ten_kills_change_no_row(smoke_run, tmp_path):
    killed = tmp_path / "killed"
    records = [json.loads(x.read_text()) for x in (smoke_run / "stages").iterdir()]
    seconds = sum(record["seconds"] for record in records)
    rng = random.Random(int(os.environ.get("BEATRICE_KILL_SEED", "0")))
    n_killed = 0
    while n_killed < N_KILLS:
        process = start(*BEATRICE, "demo", killed, "--preset", "smoke")
        time.sleep(seconds * rng.uniform(*LIFE))
        n_killed += kill(process)
        if process.returncode == 0:
            break
    assert n_killed >= LEAST_KILLS, "the run outran the kills; shorten LIFE"
    print(f"killed {n_killed} times")
    call("demo", killed, "--preset", "smoke")
    for name in ("results.jsonl", "selection/closed_book/config.json"):
        assert (killed / name).read_bytes() == (smoke_run / name).read_bytes()

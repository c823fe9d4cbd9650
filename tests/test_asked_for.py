"""Rankings and ablations of a whole small run, killed again and again, and verified."""

import random
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.process import BEATRICE, call, kill, start

ROOT = Path(__file__).parent.parent
LINES = (
    ("select", "--exhaustive", "exhaustive"),
    ("evaluate", "--ablations", "ablate"),
)
N_KILLS = 4


@pytest.mark.slow
def test_kills_change_no_row_and_the_report_shows_what_was_asked_for(
    smoke_run, tmp_path
):
    whole, killed = (shutil.copytree(smoke_run, tmp_path / x) for x in ("a", "b"))
    plain = (whole / "results.jsonl").read_text()
    for verb, option, stage in LINES:
        began = time.monotonic()
        call(verb, whole, option)
        seconds = time.monotonic() - began
        rng, n_killed = random.Random(0), 0
        for _ in range(N_KILLS):
            process = start(*BEATRICE, verb, killed, option)
            time.sleep(rng.uniform(0.2, 0.7) * seconds)
            n_killed += kill(process)
        assert n_killed, "the line outran the kills"
        call(verb, killed, option)
        assert f"{stage}: already done" in call(verb, whole, option).stderr
    rows = (whole / "results.jsonl").read_text()
    assert rows == (killed / "results.jsonl").read_text()
    before = dict.fromkeys(plain.splitlines())
    # What was there before is as it was, in its order.
    assert [row for row in rows.splitlines() if row in before] == list(before)
    for experiment in ("exhaustive", "ablation"):
        assert f'"experiment": "{experiment}"' in rows
        assert f'"experiment": "{experiment}"' not in plain
    call("report", killed)
    page = (killed / "report.html").read_text()
    for section in ("exhaustive", "ablations"):
        text = re.search(rf'id="{section}">.*?</section>', page, re.DOTALL)
        assert 'class="empty"' not in text.group()
    assert not list(killed.glob("exhaustive/*.pieces"))
    assert not list(killed.glob("ablations/*.members"))
    call("doctor", killed, "--verify")

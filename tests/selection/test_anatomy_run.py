"""The anatomy of a whole small run: killed and continued, asked for in parts, shown."""

import os
import re
import shutil
import signal
import time

import pytest

from selection.anatomy.stage import ANALYSES
from tests.process import call
from tests.test_asked_for import finish, start


def rows_of(run):
    return (run / "rows" / "anatomy.jsonl").read_text()


def kept_in(run):
    return [path.stem for path in (run / "anatomy").glob("[!.]*.safetensors")]


@pytest.mark.slow
def test_a_killed_anatomy_ends_with_the_same_rows_and_the_report_shows_it(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish("demo", whole, "--preset", "smoke")
    shutil.copytree(whole, killed)
    foreseen = call("anatomy", whole, "--dry-run").stdout
    for name in set(ANALYSES) - {"combinations", "backbones"}:  # they need more
        assert re.search(rf"^  {name} +forecast \d+ s, .*iB$", foreseen, re.MULTILINE)
    finish("anatomy", whole)
    for n_before in (3, 9):  # of thirteen
        process = start("anatomy", killed)
        while len(kept_in(killed)) < n_before and process.poll() is None:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    left = call("anatomy", killed, "--dry-run").stdout
    kept = kept_in(killed)
    assert 9 <= len(kept) < 13
    for name in kept:
        there = rf"^  {name} +is there already, and took \d+ s, .* at most .*iB$"
        assert re.search(there, left, re.MULTILINE)
    finish("anatomy", killed)
    assert rows_of(killed) == rows_of(whole)
    assert "anatomy: already done" in finish("anatomy", killed)
    finish("anatomy", killed, "--only", "flips")  # what was made stays
    assert rows_of(killed) == rows_of(whole)
    finish("report", killed)
    page = (killed / "report.html").read_text()
    section = re.search(r'<section id="anatomy">.*?</section>', page, re.DOTALL)
    assert 'class="empty"' not in section.group()
    assert not (killed / "anatomy" / "members").exists()

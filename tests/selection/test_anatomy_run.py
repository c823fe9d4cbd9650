"""The anatomy of a whole small run: killed and continued, asked for in parts, shown."""

import re
import shutil
import time

import pytest

from tests.process import BEATRICE, call, kill, start


def rows_of(run):
    return (run / "rows" / "anatomy.jsonl").read_text()


def kept_in(run):
    return [path.stem for path in (run / "anatomy").glob("[!.]*.safetensors")]


@pytest.mark.slow
def test_a_killed_anatomy_ends_with_the_same_rows_and_the_report_shows_it(
    smoke_run, tmp_path
):
    whole, killed = (shutil.copytree(smoke_run, tmp_path / x) for x in ("a", "b"))
    call("anatomy", whole)
    for n_before in (3, 9):  # of thirteen
        process = start(*BEATRICE, "anatomy", killed)
        while len(kept_in(killed)) < n_before and process.poll() is None:
            time.sleep(0.2)
        kill(process)
    assert 9 <= len(kept_in(killed)) < len(kept_in(whole)) == 13
    call("anatomy", killed)
    assert rows_of(killed) == rows_of(whole)
    assert "anatomy: already done" in call("anatomy", killed).stderr
    call("anatomy", killed, "--only", "flips")  # what was made stays
    assert rows_of(killed) == rows_of(whole)
    call("report", killed)
    page = (killed / "report.html").read_text()
    section = re.search(r'id="anatomy">.*?</section>', page, re.DOTALL)
    assert 'class="empty"' not in section.group()
    assert not (killed / "anatomy" / "members").exists()

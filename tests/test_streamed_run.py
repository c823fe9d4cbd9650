"""A whole run whose encoders read the store in groups, beside one that holds it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train_stage import read_codes
from extract.rundir import RunDir

ROOT = Path(__file__).parent.parent


def demo(path, *options):
    done = subprocess.run(
        [sys.executable, "-m", "beatrice", "demo", path, "--preset", "smoke", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RunDir(path)


@pytest.mark.slow
def test_a_streamed_run_whose_store_is_one_group_is_the_run_that_holds_it(tmp_path):
    held, streamed = demo(tmp_path / "held"), demo(tmp_path / "streamed", "--streamed")
    manifest = json.loads((streamed.path / "manifest.json").read_text())
    assert manifest["config"]["stream"] is not None
    # 320 rows with context are five chunks of 64. The 160 closed-book are two and a
    # half: a group is padded to whole chunks, which makes another step an epoch.
    one, other = (read_codes(run, "with_context").logits for run in (held, streamed))
    np.testing.assert_allclose(one, other, atol=1e-3)
    assert np.ptp(one) > 0.1
    one, other = (read_codes(run, "closed_book").logits for run in (held, streamed))
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.7

"""The command line as a user calls it: in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def call(*words) -> subprocess.CompletedProcess[str]:
    """Run `beatrice` with some words, and return what it said; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "beatrice", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done

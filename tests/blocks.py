"""Run the code blocks of a Markdown file in order, as a reader would type them.

`python -m tests.blocks README.md …` runs all blocks of each file in the current folder.
Blocks of `python` share their names. A block without a language, or of `text`, right
after one of Python is what that block prints; `console` blocks are lines typed in a
terminal. Blocks of `sh` need a cluster or hours, and are not run.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(path, *, terminal):
    """Run a file's blocks; if `terminal` is false, only those of Python."""
    text = path.read_text(encoding="utf-8")
    names, printed, end = {}, None, 0
    here = os.path.dirname(sys.executable)
    environ = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
    for block in FENCE.finditer(text):
        language, code = block.groups()
        if language in ("", "text"):
            if printed is not None and not text[end : block.start()].strip():
                assert printed == code, f"{path.name}: {code!r} is now {printed!r}"
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, path.name, "exec"), names)
            printed, end = output.getvalue(), block.end()
            continue
        elif language == "console" and terminal:
            for line in code.replace("\\\n", " ").splitlines():
                began = time.monotonic()
                done = subprocess.run(
                    line, shell=True, env=environ, capture_output=True, text=True
                )
                seconds = time.monotonic() - began
                print(f"{seconds:6.0f} s  {path.name}: {line}", flush=True)
                assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
        printed = None
    return names


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run_blocks(Path(name), terminal=True)

"""Run a notebook's source and write the notebook, with its outputs, next to it.

`python docs/execute.py docs/notebook.py` writes docs/notebook.ipynb. The source is a
script whose cells begin with `# %%` (for text `# %% [markdown]`), as in Jupytext, VS
Code and Spyder. A cell's outputs are what it prints and the pyplot figures open at
its end, as in Jupyter, which is not needed.
"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

FORMAT = {"nbformat": 4, "nbformat_minor": 5}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells_of(source: str) -> list[tuple[str, str]]:
    """Return (kind, text) of each cell; the kind is "markdown" or "code"."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    cells = []
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        is_text = "[markdown]" in head
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_text else body
        cells.append(("markdown" if is_text else "code", text.strip("\n")))
    return cells


def outputs_of(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return what it prints, and its figures as PNG."""
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<cell>", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def executed(source: str) -> dict[str, Any]:
    """Execute a source and return the notebook."""
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, n_run = [], 0
    for number, (kind, text) in enumerate(cells_of(source)):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            n_run += 1
            outputs = outputs_of(text, names)
            cell |= {"execution_count": n_run, "outputs": outputs}
        cells.append(cell)
    return {"cells": cells, "metadata": {"kernelspec": KERNEL}, **FORMAT}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    target = path.with_suffix(".ipynb")
    notebook = executed(path.read_text(encoding="utf-8"))
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"{target}: {target.stat().st_size:,} bytes")

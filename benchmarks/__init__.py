"""Measuring: evaluation rows, tables, figures, the report, recipes of several stages.

This file lists the stages in order and says which verb writes a missing file.
"""

import itertools

from beatrice.extract.run.console import shell_line
from beatrice.extract.run.directory import NotWritten, RunDir

# The stages of `demo` in order, as module:name. `real` replaces the first: it reads
# published questions instead of making the world's.
CHAIN = (
    "beatrice.extract.world.stage:WORLD",
    "beatrice.extract.engines:ANSWER",
    "beatrice.extract.label.stage:LABEL",
    "beatrice.extract.signals.extract:EXTRACT",
    "beatrice.selection.stages:SWEEP",
    "beatrice.jaxprobe.stages:TRAIN",
    "beatrice.selection.stages:SELECT",
    "beatrice.jaxprobe.stages:CALIBRATE",
    "beatrice.benchmarks.stages:EVALUATE",
    "beatrice.benchmarks.stages:BASELINES",
    "beatrice.pgir.stages:CONTROL",
    "beatrice.benchmarks.stages:REPORT",
)

STAGES = [place.partition(":")[2].lower() for place in CHAIN]  # names of the verbs

# Which verb writes a file or folder at the top of a run, by its name up to a dot.
_WRITERS = {
    "examples": "data",
    "passages": "data",
    "rewrites": "rewrite",
    "answers": "answer",
    "labels": "label",
    "samples": "sample",
    "features": "extract",
    "sweep": "sweep",
    "encoders": "train",
    "selection": "select",
    "detector": "calibrate",
    "reliability": "evaluate",
    "shown": "evaluate",
    "rows": "evaluate",
    "control": "control",
}
_IN_ORDER = ["data", *STAGES[1 : STAGES.index("baselines")]]
# The verb to run after each one.
NEXT = dict(itertools.pairwise([*_IN_ORDER, "baselines", "report"]))
NEXT |= dict.fromkeys(("control", "anatomy", "transfer"), "report")


def what_to_do(missing: NotWritten) -> str:
    """Return which verbs to run, as advice on a file that a run lacks."""
    verb = _WRITERS.get(missing.name.split("/")[0].split(".")[0])
    if verb is None:
        return "run the stage that writes it"
    if verb not in _IN_ORDER:
        return f"run `beatrice {verb}` first"
    run, verbs = RunDir(missing.run), _IN_ORDER[: _IN_ORDER.index(verb)]
    has_questions = run.examples.exists()
    left = [
        name
        for name in verbs
        if not (has_questions if name == "data" else run.stage_record(name))
    ]
    first, *others = *left, verb
    then = f", then {', '.join(others)}" if others else ""
    return f"run `{shell_line(first, missing.run)}` first{then}"

"""Measuring: evaluation rows, tables, figures, the report, recipes of several stages.

Here are the way of the data, stage by stage, and which verb writes a missing file.
"""

import itertools

from beatrice.extract.run.console import shell_line
from beatrice.extract.run.directory import NotWritten, RunDir

# What `demo` does, in order: where each stage stands. Real questions take the place of
# the world's in `real`.
CHAIN = (
    "beatrice.extract.world.stage:WORLD",
    "beatrice.extract.engines:ANSWER",
    "beatrice.extract.label.stage:LABEL",
    "beatrice.extract.signals.extract:EXTRACT",
    "beatrice.selection.sweep:SWEEP",
    "beatrice.jaxprobe.train:TRAIN",
    "beatrice.selection.greedy:SELECT",
    "beatrice.jaxprobe.calibrate:CALIBRATE",
    "beatrice.benchmarks.results.evaluate:EVALUATE",
    "beatrice.benchmarks.baselines.judge:BASELINES",
    "beatrice.pgir.controllers.stage:CONTROL",
    "beatrice.benchmarks.results.report:REPORT",
)

STAGES = [place.partition(":")[2].lower() for place in CHAIN]  # by their verbs

# Which verb writes what lies at a path of a run, by the path's first name.
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
# What a person does after a verb of the way.
NEXT = dict(itertools.pairwise([*_IN_ORDER, "baselines", "report"]))


def what_to_do(missing: NotWritten) -> str:
    """Return which verbs a run still needs, where one of its files is missing."""
    verb = _WRITERS.get(missing.name.split("/")[0].split(".")[0])
    if verb is None:
        return "do the stage that writes it"
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

"""Which verb writes what in a run directory, and what to do where it is missing."""

# The first part of the path, without its ending, or the name of a stage's rows.
_WRITERS = {
    "examples": "world` or `beatrice data",
    "passages": "world` or `beatrice data",
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
    "readings": "baselines",
    "baselines": "baselines",
    "control": "control",
    "retrieved": "transfer",
    "results": "report",
    "exhaustive": "select --exhaustive",
    "ablate": "evaluate --ablations",
    "anatomy": "anatomy",
}


MAKE_A_RUN = (
    "questions of your own become a run with `beatrice data NEW_RUN --train NAME=FILE`"
)
# What people write and correct by hand, and the answers, which their stage goes on
# from: never replaced, or taken for its own, where it was changed. If that was meant:
FOR_PEOPLE = {
    "examples.jsonl": f"start a new run ({MAKE_A_RUN})",
    "passages.jsonl": f"start a new run ({MAKE_A_RUN})",
    "rewrites.jsonl": "delete it to have the contexts rewritten again",
    "answers": "delete the folder to have all questions answered again",
    "labels.jsonl": "move it elsewhere and give it to `beatrice label --import FILE`",
}


def who_writes(path: str, when: str = "first, which writes it") -> str:
    """Say what to do about a missing file, by its path in the run directory."""
    parts = path.split("/")
    # Rows of a stage lie in `rows/`, named by it.
    name = (parts[1] if parts[0] == "rows" and parts[1:] else parts[0]).split(".")[0]
    verb = _WRITERS.get(name, name if parts[0] == "rows" else None)
    if verb is None:
        return f"run the stage that writes it {when.split(',')[0]}"
    return f"run `beatrice {verb}` {when}"

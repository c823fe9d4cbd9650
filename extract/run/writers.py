"""Which verb writes which file of a run directory, for messages."""

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
    "control": "control",
    "results": "report",
    "exhaustive": "select --exhaustive",
    "ablate": "evaluate --ablations",
}


def who_writes(path: str) -> str:
    """Say what to do about a missing file, by its path in the run directory."""
    parts = path.split("/")
    # Rows of a stage lie in `rows/`, named by it.
    name = (parts[1] if parts[0] == "rows" and parts[1:] else parts[0]).split(".")[0]
    verb = _WRITERS.get(name, name if parts[0] == "rows" else None)
    if verb is None:
        return "run the stage that writes it first"
    return f"run `beatrice {verb}` first, which writes it"

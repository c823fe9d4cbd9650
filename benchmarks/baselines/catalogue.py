"""Every rival detector that a run can be judged with, in the order of the tables.

A detector of one's own is one file that ends in `DETECTORS`, and one line here.
"""

import importlib
from collections.abc import Iterable

from benchmarks.baselines.detector import Detector

_FILES = (
    "sampled.entropy",
    "sampled.bayesian",
    "sampled.selfcheck",
    "sampled.eigenscore",
    "trained.saplma",
    "trained.linear_probe",
    "trained.llms_know",
    "trained.sep",
    "trained.gnosis",
    "internal.llm_check",
    "internal.p_true",
    "trained.lookback_lens",
    "internal.redeep",
    "internal.lumina",
    "ladder",
)


def catalogue() -> dict[str, Detector]:
    """Return the detectors by name; loads JAX and scikit-learn, and not Torch."""
    modules = (importlib.import_module(f"{__package__}.{file}") for file in _FILES)
    return {one.name: one for module in modules for one in module.DETECTORS}


def listed(detectors: Iterable[Detector]) -> str:
    """Return a line for each detector: name, title, what it needs, where it is from."""
    cells = [(one.name, one.title, _needs(one), one.source) for one in detectors]
    widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
    pad = [[f"{x:<{w}}" for x, w in zip(own, widths, strict=True)] for own in cells]
    return "\n".join("".join(own).rstrip() for own in pad)


def _needs(detector: Detector) -> str:
    found = [*sorted(detector.needs), *(["a pass"] if detector.reads else [])]
    return ", ".join(found) or "nothing more"

"""A made-up run: plausible numbers, every section filled, nothing measured."""

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.results.page import ReportData
from beatrice.benchmarks.results.shown import Control, Curves, ShownSet
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.jaxprobe.stages import LayerCurve
from beatrice.selection.analysis import CaseStudy

FOLDER = Path(__file__).parent
PLACES = (
    ("microworld", "validation"),
    ("microworld", "test"),
    ("pursuits", "ood"),
    ("places", "ood"),
    ("rephrased", "ood"),
)
TEST = PLACES[1]
POOLED = (IN_DOMAIN, "test")
MARKUP = '<script>alert("x")</script> & co'
# The types of those parts of the page that are records.
KINDS = {
    "sweep": dict[Setting, LayerCurve],
    "reliability": dict[Setting, Curves],
    "control": Control,
    "shown": list[ShownSet],
    "studies": list[CaseStudy],
    "judged": list[DetectorCost],
}
PARTS = {
    name: msgspec.convert(part, KINDS.get(name, Any))
    for name, part in json.loads((FOLDER / "report.json").read_text("utf-8")).items()
}


def row(name, setting, eval_set, metric, value, **changes):
    """Return a seed mean with an interval around it; `name` is an id or a subject."""
    half, top = 0.03, math.inf if metric == "generations" else 1.0
    if (rival := changes.pop("rival", None)) is not None:
        rival = Subject.of(rival)
        changes |= {"against": rival.detector, "against_families": rival.families}
    fields = dict(
        experiment="detection",
        setting=setting,
        dataset=eval_set[0],
        split=eval_set[1],
        metric=metric,
        value=value,
        ci_low=None if value is None else round(value - half, 6),
        ci_high=None if value is None else round(min(value + half, top), 6),
        n=398,
        **Subject.of(name)._asdict(),
    )
    return ResultRow(**(fields | changes))


def undefined(result, reason="one class only"):
    """Return the same row without a value."""
    gone = dict(value=None, ci_low=None, ci_high=None, p_value=None)
    return msgspec.structs.replace(result, reason=reason, **gone)


@functools.cache
def read_rows(name):
    """Return the rows of a table whose lines have the values of several sets each.

    A column head with a space is a dataset and a split; `half` is half the width of an
    interval. A value that is a word is a reason, and an empty cell is absent.
    """
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        lines = [{k: v for k, v in x.items() if v} for x in csv.DictReader(file)]
    rows = []
    for line in lines:
        half = float(line.pop("half", 0))
        sets = {head: line.pop(head) for head in [*line] if " " in head}
        for head, cell in sets.items():
            dataset, _, split = head.rpartition(" ")
            value = float(cell) if cell[-1].isdigit() else None
            row = {**line, "dataset": dataset, "split": split, "value": value}
            if value is None:
                row["reason"] = cell
            elif half:
                row["ci_low"] = round(value - half, 6)
                row["ci_high"] = round(value + half, 6)
            rows.append(row)
    return msgspec.convert(rows, list[ResultRow], strict=False)


def anatomy_rows():
    """Return rows of every analysis of the anatomy."""
    return list(read_rows("anatomy.csv"))


def sample_rows():
    """Return the rows, one of them undefined and one with failed examples.

    Those of the only in-domain set are repeated as rows of all in-domain sets.
    """
    rows = read_rows("rows.csv")
    pooled = (
        msgspec.structs.replace(r, dataset=IN_DOMAIN)
        for r in rows
        if r.split in ("validation", "test") and "controller" not in r.experiment
    )
    return [*rows, *pooled]


@functools.cache
def sample_results():
    """Return the rows as a data frame."""
    return results_of(sample_rows())


def sample_report(**changes):
    """Return the whole made-up run, without its anatomy."""
    return ReportData(**(PARTS | dict(rows=sample_rows(), studies=()) | changes))

"""A made-up run: plausible numbers, every section filled, nothing measured."""

import csv
import functools
import json
import math
from pathlib import Path

import msgspec

from beatrice.benchmarks.baselines.detector import DetectorCost
from beatrice.benchmarks.results.report import ReportData
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow

FOLDER = Path(__file__).parent
PLACES = (
    ("microworld", "validation"),
    ("microworld", "test"),
    ("pursuits", "ood"),
    ("places", "ood"),
    ("rephrased", "ood"),
)
MARKUP = '<script>alert("x")</script> & co'
PARTS = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))


def row(detector, setting, place, metric, value, **changes):
    """One seed mean with an interval around it."""
    half = 0.03
    top = math.inf if metric == "generations" else 1.0
    fields = dict(
        experiment="detection",
        detector=detector,
        setting=setting,
        dataset=place[0],
        split=place[1],
        metric=metric,
        value=value,
        ci_low=None if value is None else round(value - half, 6),
        ci_high=None if value is None else round(min(value + half, top), 6),
        n=398,
        seed="mean",
    )
    return ResultRow(**(fields | changes))


@functools.cache
def read_rows(name):
    """Return the rows of a table, in which an empty cell is an absent value."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        cells = [{k: v for k, v in x.items() if v} for x in csv.DictReader(file)]
    rows = [{"value": None} | x for x in cells]
    return msgspec.convert(rows, list[ResultRow], strict=False)


def anatomy_rows():
    """Rows of every analysis of the anatomy."""
    return list(read_rows("anatomy.csv"))


def with_pool(rows):
    """Add what one in-domain set gives for all of them."""
    pooled = (
        msgspec.structs.replace(r, dataset=IN_DOMAIN)
        for r in rows
        if r.split in ("validation", "test") and "controller" not in r.experiment
    )
    return [*rows, *pooled]


def sample_rows():
    """The rows, one of them undefined and one with failed examples."""
    return with_pool(read_rows("rows.csv"))


def judged():
    """Costs of three rivals that have rows."""
    return msgspec.convert(PARTS["judged"], list[DetectorCost])


def sample_report(**changes):
    """The whole made-up run."""
    parts = {k: v for k, v in PARTS.items() if k not in ("judged", "studies")}
    fields = dict(rows=sample_rows(), judged=judged(), **parts)
    return ReportData(**(fields | changes))

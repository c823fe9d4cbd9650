"""Gains of the selected encoders and of PGIR over each rival, question by question.

Both sides are resampled together, which accounts for what their scores share; two
separate intervals would not. Nothing corrects for the number of comparisons.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from benchmarks.results.tables import Table, detection_table, interval, number
from extract.run.results import (
    CONTROLLERS,
    DIFFERENCE,
    RIVALS,
    ResultRow,
    ResultTable,
)


def paired_table(rows: Sequence[ResultRow], experiment: str = "paired") -> Table:
    """Lay out differences: a line for each rival, a column for each set.

    Args:
      rows: result rows.
      experiment: "paired" for AUROC, "controller_paired" for exact match and F1.
    """
    is_detection = experiment == "paired"
    names = ("auroc",) if is_detection else ("em", "f1")
    by_rival = [
        msgspec.structs.replace(row, detector=row.against)
        for row in ResultTable(rows).select(experiment=experiment)
    ]
    found = detection_table(
        by_rival,
        experiment=experiment,
        labels=RIVALS if is_detection else CONTROLLERS,
        splits=("test", "ood", "evaluated"),
        metrics=[f"{name}{DIFFERENCE}" for name in names],
    )
    return dataclasses.replace(found, corner="Against")


def gain(rows: Sequence[ResultRow], against: str, **where: str) -> str:
    """Say in words how much more there is than a rival has; empty if not measured.

    Args:
      rows: result rows.
      against: the rival.
      **where: the other fields that tell the row, see `ResultTable.find`.
    """
    row = ResultTable(rows).find(against=against, **where)
    if row is None or row.value is None:
        return ""
    label = {**RIVALS, **CONTROLLERS}[against]
    spelled = number(row.value, row.metric)
    return f"{spelled} [{interval(row)}] against {label[0].lower()}{label[1:]}"

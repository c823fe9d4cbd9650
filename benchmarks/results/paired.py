"""Gains over rivals, question by question, and what is left at equal answer length.

Both sides are resampled together, which accounts for what their scores share; two
separate intervals would not. Nothing corrects for the number of comparisons.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from beatrice.benchmarks.results.names import AT_EQUAL_LENGTH, DETECTORS, FLOORS, RIVALS
from beatrice.benchmarks.results.tables import (
    Cell,
    Table,
    detection_table,
    interval,
    number,
)
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable
from beatrice.pgir.controllers import CONTROLLERS


def paired_table(rows: Sequence[ResultRow], experiment: str = "paired") -> Table:
    """Lay out differences: a line for each rival, a column for each set.

    Args:
      rows: result rows.
      experiment: "paired" or "at_equal_length_paired" for AUROC, or
        "controller_paired" or "controller_query_paired" for exact match and F1.
    """
    is_detection = not experiment.startswith("controller")
    names = ("auroc",) if is_detection else ("em", "f1")
    by_rival = [
        msgspec.structs.replace(row, detector=row.against)
        for row in ResultTable(rows).select(experiment=experiment)
    ]
    found = detection_table(
        by_rival,
        experiment=experiment,
        labels=AT_EQUAL_LENGTH if is_detection else CONTROLLERS,
        splits=("test", "ood", "evaluated"),
        metrics=[f"{name}{DIFFERENCE}" for name in names],
    )
    return dataclasses.replace(found, corner="Against")


def equal_length_table(rows: Sequence[ResultRow]) -> Table:
    """AUROC among answers of equally many tokens, and the share without such a pair."""
    labels = {**AT_EQUAL_LENGTH, "answers": "Share of answers without a counterpart"}
    metrics = ("auroc", "unmatched")
    found = detection_table(
        rows, experiment="at_equal_length", labels=labels, metrics=metrics
    )
    lines = (
        dataclasses.replace(line, cells=tuple(map(_either, line.cells)))
        for line in found.lines
    )
    return dataclasses.replace(found, lines=tuple(lines))


def noise_table(rows: Sequence[ResultRow]) -> Table:
    """Share of labels that a person disputes."""
    return detection_table(
        rows,
        experiment="label_noise",
        labels={"labels:right": "Labelled right", "labels:wrong": "Labelled wrong"},
        splits=("annotated",),
        metrics=("disputed",),
    )


def annotated_table(rows: Sequence[ResultRow]) -> Table:
    """AUROC on annotated answers by the labels, without the disputed, by a person."""
    return detection_table(
        rows,
        experiment="annotated",
        labels=AT_EQUAL_LENGTH,
        splits=("annotated",),
        metrics=("auroc",),
    )


def answer_table(rows: Sequence[ResultRow]) -> Table:
    """Shares of answers that were cut off, are empty, and are hedges or refusals."""
    found = detection_table(
        rows,
        experiment="answers",
        labels={"backbone": "Cut off / empty / hedges"},
        splits=("train", "validation", "test", "ood"),
        metrics=("cut_off", "empty", "hedged"),
    )
    return dataclasses.replace(found, corner="Share of answers")


def floor_table(rows: Sequence[ResultRow]) -> Table:
    """How much more each encoder has than a linear probe of the same signals."""
    labels = {**RIVALS, "encoder:H": DETECTORS["hidden_only"]}
    return detection_table(
        rows,
        experiment="floor_paired",
        labels={name: labels[name] for name in FLOORS},
        metrics=(f"auroc{DIFFERENCE}",),
    )


def _either(cell: Cell) -> Cell:
    """Return the one measure of a cell's two; a share is in no order with AUROCs."""
    own, share = cell
    return (own or share and dataclasses.replace(share, rank=None),)


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
    label = {**AT_EQUAL_LENGTH, **CONTROLLERS}[against]
    spelled = number(row.value, row.metric)
    return f"{spelled} [{interval(row)}] against {label[0].lower()}{label[1:]}"

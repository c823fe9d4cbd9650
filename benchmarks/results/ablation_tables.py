"""The ablations as tables: the paper's features and fusion, families, spans, rankings.

Rows of two experiments meet here: what `evaluate` measured of every run, and what
`ablate` and `exhaustive` add on request.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.results.tables import Table, detection_table
from extract.run.results import ResultRow

FEATURES = {
    "hidden_only": "Hidden states only",
    "without_hidden": "Without hidden states",
    "early_fusion": "Early fusion: one encoder, all families",
    "late_fusion_singles": "Late fusion: single families",
    "late_fusion_all": "Late fusion: all encoders (not ranked)",
    "without_closed_book": "Without closed-book encoders",
    "champion": "Full: the selected encoders",
}
"""The seven variants of the paper's table, in its order."""

REFERENCE = "late_fusion_all"  # a saturation reference, which the paper does not rank
FAMILY_VARIANTS = {
    "without_hidden": "Without hidden states",
    "without_prob": "Without probabilities",
    "without_resid": "Without residual stream",
    "without_attn": "Without attention",
    "champion": "Full: all four families",
}
SPAN_VARIANTS = {
    "champion": "None: all spans",
    "without_context_span": "Context",
    "without_question_span": "Question",
    "without_answer_span": "Answer",
}
RANKED = {
    "best_three": "Best of all sets of three",
    "greedy_three": "Greedy search after three rounds",
}


def _together(rows: Sequence[ResultRow], names: Mapping[str, str]) -> list[ResultRow]:
    """Bring the rows of some detectors and variants under one experiment.

    Nothing, where none was made on request: `evaluate` alone makes no ablation.
    """
    if not any(row.experiment == "ablation" for row in rows):
        return []
    return [
        msgspec.structs.replace(row, experiment="ablation")
        for row in rows
        if row.experiment in ("detection", "ablation") and row.detector in names
    ]


def _table(rows: Sequence[ResultRow], names: Mapping[str, str], corner: str) -> Table:
    """Lay some variants out as the main table lays out detectors."""
    found = detection_table(_together(rows, names), experiment="ablation", labels=names)
    return dataclasses.replace(found, corner=corner)


def feature_table(rows: Sequence[ResultRow]) -> Table:
    """The paper's table of features and fusion, seven variants in both settings."""
    ranked = {name: label for name, label in FEATURES.items() if name != REFERENCE}
    whole, table = (_table(rows, names, "Variant") for names in (FEATURES, ranked))
    by_label = {line.label: line for line in table.lines}
    # The reference takes no rank, so it takes none away either.
    lines = [by_label.get(line.label, _unranked(line)) for line in whole.lines]
    return dataclasses.replace(whole, lines=tuple(lines))


def _unranked(line: Any) -> Any:
    """Return a line whose cells carry no rank."""
    cells = tuple(
        tuple(m and dataclasses.replace(m, rank=None) for m in cell)
        for cell in line.cells
    )
    return dataclasses.replace(line, cells=cells)


def family_table(rows: Sequence[ResultRow]) -> Table:
    """The search without the encoders that read a family, for each family."""
    return _table(rows, FAMILY_VARIANTS, "Pool")


def span_table(rows: Sequence[ResultRow]) -> Table:
    """The champion trained anew without a token span, for each span."""
    return _table(rows, SPAN_VARIANTS, "Dropped span")


def exhaustive_table(rows: Sequence[ResultRow]) -> Table:
    """The best set of the enumeration and greedy's, where they were evaluated."""
    splits = ("validation", "test", "ood")
    found = detection_table(rows, experiment="exhaustive", labels=RANKED, splits=splits)
    return dataclasses.replace(found, corner="Set")


def set_names(
    selection: Mapping[str, Mapping[str, Any]],
    ablations: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[tuple[str, list[str]]]:
    """Spell which encoders each variant reads: its label, and a text per setting."""
    if not ablations:
        return []
    alone = "without_closed_book"
    labels = {alone: FEATURES[alone], **FAMILY_VARIANTS}

    def spelled(name: str, setting: str) -> str:
        if name == "champion":
            return " ".join(selection[setting]["selected"])
        if name not in ablations[setting]:
            return "–"  # there is nothing of the kind to take away
        return " ".join(ablations[setting][name]) or "none: no better than chance"

    return [
        (label, [spelled(name, setting) for setting in ablations])
        for name, label in labels.items()
    ]

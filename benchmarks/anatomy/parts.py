"""The report's section on the anatomy: every analysis that the run has rows of."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.anatomy.combining import (
    backbones_part,
    combinations_part,
    fusion_part,
    pairs_part,
)
from benchmarks.anatomy.decisions import (
    complementarity_part,
    flips_part,
    grounding_part,
)
from benchmarks.anatomy.places import heads_part, layers_part, positions_part
from benchmarks.anatomy.reach import cases_part, labels_part, transfer_part
from benchmarks.anatomy.rows import Part
from extract.run.results import ResultRow

PARTS = (
    complementarity_part,
    pairs_part,
    fusion_part,
    combinations_part,
    backbones_part,
    flips_part,
    grounding_part,
    heads_part,
    positions_part,
    layers_part,
    labels_part,
    transfer_part,
)


def anatomy_parts(
    rows: Sequence[ResultRow], cases: Sequence[Mapping[str, Any]] = ()
) -> list[Part]:
    """Return the analyses of a run, in order.

    Args:
      rows: of the run.
      cases: as `selection.anatomy.cases.Case` has them.
    """
    is_own = [row.experiment.startswith("anatomy_") for row in rows]
    if not any(is_own):
        return []
    beside = [r for r, own in zip(rows, is_own, strict=True) if own or _is_beside(r)]
    parts = [make(beside) for make in PARTS]
    return [part for part in (*parts, cases_part(beside, cases)) if part is not None]


def _is_beside(row: ResultRow) -> bool:
    """Whether the curves of labels end in this row."""
    return (row.experiment, row.split, row.seed) == ("detection", "test", "mean")

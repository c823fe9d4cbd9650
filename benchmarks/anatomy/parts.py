"""The report's section on the anatomy: every analysis that the run has rows of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from beatrice.benchmarks.anatomy.combining import (
    backbones_part,
    combinations_part,
    fusion_part,
    pairs_part,
)
from beatrice.benchmarks.anatomy.decisions import (
    complementarity_part,
    flips_part,
    grounding_part,
)
from beatrice.benchmarks.anatomy.places import heads_part, layers_part, positions_part
from beatrice.benchmarks.anatomy.reach import cases_part, labels_part, transfer_part
from beatrice.benchmarks.anatomy.rows import Part
from beatrice.benchmarks.paper.cells import read_ledger
from beatrice.benchmarks.paper.signs import Sign, in_a_sentence, signs_by_table
from beatrice.extract.run.rows import ResultRow

# With the paper's tables, figures and sections whose numbers stand beside.
PARTS = {
    complementarity_part: ("fig:complementarity",),
    pairs_part: ("fig:cross-model-synergy, bottom",),
    fusion_part: ("ablation", "champion-vs-hidden"),
    combinations_part: ("fig:combination-search", "fig:gemma-combination-search"),
    backbones_part: ("fig:cross-model-synergy, top",),
    flips_part: ("anatomy-flip-profile", "fig:boundary-band"),
    grounding_part: ("anatomy-grounding",),
    heads_part: ("fig:attention-heads",),
    positions_part: ("sec:anatomy", "app:span", "span-ablation"),
    layers_part: (),
    labels_part: (),
    transfer_part: (),
}


def anatomy_parts(
    rows: Sequence[ResultRow], cases: Sequence[Mapping[str, Any]] = ()
) -> list[Part]:
    """Return the analyses of a run, in order.

    Args:
      rows: of the run.
      cases: as `selection.anatomy.Study` has them.
    """
    is_own = [row.experiment.startswith("anatomy_") for row in rows]
    if not any(is_own):
        return []
    beside = [r for r, own in zip(rows, is_own, strict=True) if own or _is_beside(r)]
    compared = signs_by_table(read_ledger(), rows)
    made = [
        part
        and _with_signs(part, [s for table in tables for s in compared.get(table, ())])
        for make, tables in PARTS.items()
        for part in [make(beside)]
    ]
    return [part for part in (*made, cases_part(beside, cases)) if part is not None]


def _with_signs(part: Part, own: Sequence[Sign]) -> Part:
    """Add how many of the paper's comparisons come out the same way, and each below."""
    if not own:
        return part
    lines = ((s.what, s.paper, s.here, s.verdict_in_words) for s in own)
    found = (*part.found, in_a_sentence(own))
    return dataclasses.replace(part, found=found, beside=tuple(lines))


def _is_beside(row: ResultRow) -> bool:
    """Whether the curves of labels end in this row."""
    return (row.experiment, row.split, row.seed) == ("detection", "test", "mean")

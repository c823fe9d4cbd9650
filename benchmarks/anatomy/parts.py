"""The report's section on the anatomy: every analysis that the run has rows of."""

from collections.abc import Sequence

from benchmarks.anatomy.decisions import complementarity_part, flips_part
from benchmarks.anatomy.rows import Part
from extract.run.results import ResultRow

PARTS = (complementarity_part, flips_part)


def anatomy_parts(rows: Sequence[ResultRow]) -> list[Part]:
    """Return the analyses of a run, in order."""
    own = [row for row in rows if row.experiment.startswith("anatomy_")]
    return [part for make in PARTS if (part := make(own)) is not None]

"""Rows of the anatomy, looked up and spelled: what tables, figures and sentences share.

Nothing here loads JAX or Torch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from beatrice.benchmarks.results.names import SETTING_LABELS
from beatrice.benchmarks.results.pictures import Picture
from beatrice.benchmarks.results.tables import (
    Cell,
    Column,
    Line,
    Measure,
    Table,
    number,
)
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable

FAMILIES = {
    "H": "hidden states",
    "P": "probabilities",
    "R": "residual stream",
    "A": "attention",
}
EVERY = "HPRA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One analysis on the page.

    Attributes:
      title: of the analysis.
      look: what to look at, in a sentence.
      found: what was found in this run, from its rows.
      pictures: figures.
      tables: by heading.
      cases: as `selection.anatomy.Study` has them.
      beside: what the paper compares, the paper's, this run's, and whether they agree.
    """

    title: str
    look: str
    found: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    cases: tuple[Mapping[str, Any], ...] = ()
    beside: tuple[tuple[str, str, str, str], ...] = ()


def part_of(
    title: str,
    look: str,
    found: Sequence[str],
    pictures: Sequence[Picture] = (),
    tables: Sequence[tuple[str, Table]] = (),
    cases: Sequence[Mapping[str, Any]] = (),
) -> Part | None:
    """Return a part, or nothing where the run has none of its rows."""
    if not (found or pictures or tables or cases):
        return None
    return Part(
        title=title,
        look=look,
        found=tuple(found),
        pictures=tuple(pictures),
        tables=tuple(tables),
        cases=tuple(cases),
    )


def own(rows: Sequence[ResultRow], experiment: str, **fields: str) -> ResultTable:
    """Return the rows of one experiment, mean over seeds."""
    where = {"experiment": f"anatomy_{experiment}", "seed": "mean", **fields}
    return ResultTable(ResultTable(rows).select(**where))


def test_rows(table: ResultTable, setting: str) -> ResultTable:
    """Return those on all in-domain test answers of a setting."""
    return ResultTable(table.select(setting=setting, dataset=IN_DOMAIN, split="test"))


def places_in(table: ResultTable) -> list[tuple[str, str]]:
    """Return the sets that rows are of, all in-domain ones together first."""
    splits = ("test", "ood")
    found = dict.fromkeys((r.dataset, r.split) for r in table.rows)
    n_test = sum(split == "test" for _, split in found)
    return sorted(
        (
            place
            for place in found
            if place[1] in splits
            and (place[0] == IN_DOMAIN or place[1] != "test" or n_test != 2)
        ),
        key=lambda place: (splits.index(place[1]), place[0] != IN_DOMAIN),
    )


def settings_in(table: ResultTable) -> list[str]:
    """Return the settings that rows are of, in the house's order."""
    found = {row.setting for row in table.rows}
    return [setting for setting in SETTINGS if setting in found]


def known(row: ResultRow | None) -> bool:
    """Whether a row has a value with an interval."""
    return row is not None and row.value is not None and row.ci_low is not None


def spelled(row: ResultRow | None) -> str:
    """Spell a row's value and interval, and why it has none."""
    if row is None:
        return "not measured"
    if row.value is None:
        return f"undefined ({row.reason})"
    if row.ci_low is None or row.ci_high is None:
        return number(row.value, row.metric)
    low, high = (number(end, row.metric) for end in (row.ci_low, row.ci_high))
    return f"{number(row.value, row.metric)} [{low}, {high}]"


def printed(setting: str, name: str) -> str:
    """Return an encoder's printed name, [HP] with context and (HP) without."""
    return f"({name})" if setting == "closed_book" else f"[{name}]"


def largest(rows: Sequence[ResultRow | None]) -> ResultRow | None:
    """Return the row with the largest value, or None where none has one."""
    have = [row for row in rows if row is not None and row.value is not None]
    return max(have, key=lambda row: row.value or 0.0, default=None)


def distinct_sets(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Leave out the rows of the one in-domain set that is all of them."""
    where = places_in(ResultTable(rows))
    return [row for row in rows if (row.dataset, row.split) in where]


def over_the_better(table: ResultTable) -> list[ResultRow]:
    """Return, of every pair of families and set, the difference to the better member.

    Args:
      table: rows of the analysis `pairs`; an undefined one is left out.
    """
    smallest: dict[tuple[str, ...], ResultRow] = {}
    for row in table.select(metric=f"auroc{DIFFERENCE}"):
        if row.value is None:
            continue
        place = row.detector, row.setting, row.dataset, row.split
        if place not in smallest or row.value < (smallest[place].value or 0.0):
            smallest[place] = row
    return list(smallest.values())


def cell(*rows: ResultRow | None) -> Cell:
    """Put rows side by side in a cell of a table."""
    return tuple(None if row is None else Measure(row=row) for row in rows)


def table_of(
    corner: str,
    columns: Sequence[tuple[str, str, str]],
    lines: Sequence[tuple[str, Sequence[Cell]]],
) -> Table:
    """Lay out cells; a column is a group, a label and a detail."""
    return Table(
        corner=corner,
        columns=tuple(Column(group=g, label=x, detail=d) for g, x, d in columns),
        lines=tuple(Line(label=label, cells=tuple(cells)) for label, cells in lines),
    )


def in_setting(setting: str) -> str:
    """Begin a sentence with its setting."""
    return SETTING_LABELS[setting]

"""Tables in plain characters, for the terminal."""

import io
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from beatrice.benchmarks.results.tables import Cell, Table, interval, number


def _cell_text(cell: Cell, notes: Sequence[str]) -> str:
    """Spell one cell, its interval on a second line."""
    marks = {"best": "*", "second": "+", None: ""}
    parts = []
    for m in cell:
        if m is None:
            parts.append("-")
            continue
        value = m.row.value
        shown = "n/a" if value is None else number(value, m.row.metric)
        refs = "".join(f"[{notes.index(note) + 1}]" for note in m.notes)
        clear = "!" if m.is_clear else ""
        parts.append(f"{shown}{marks[m.rank]}{clear}{refs}")
    below = interval(cell[0].row).replace("–", "-") if cell[0] else ""
    return "/".join(parts) + (f"\n{below}" if below else "")


def _block(table: Table, kept: Sequence[int], title: str | None) -> rich.table.Table:
    """Build one block of columns."""
    block = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE)
    block.add_column(rich.text.Text(table.corner))
    for i in kept:
        column = table.columns[i]
        head = rich.text.Text(f"{column.label}\n{column.detail}")
        block.add_column(head, no_wrap=True)
    for line in table.lines:
        cells = [_cell_text(line.cells[i], table.notes) for i in kept]
        block.add_row(*map(rich.text.Text, (line.label, *cells)))
    return block


def as_text(table: Table, width: int = 100) -> str:
    """Spell a table in plain characters; groups are stacked where it is too wide.

    The best value of a column has a `*`, the second a `+`, a difference whose interval
    excludes zero a `!`; under the first metric of a
    cell stands its 95 % interval, and `[1]` refers to the notes below.
    """
    console = rich.console.Console(file=io.StringIO(), width=width, color_system=None)
    n_columns = len(table.columns)
    if 28 + 13 * n_columns <= width:
        console.print(_block(table, range(n_columns), None))
    else:
        for group in table.groups:
            kept = [i for i, c in enumerate(table.columns) if c.group == group]
            console.print(_block(table, kept, group))
    for index, note in enumerate(table.notes, start=1):
        console.print(rich.text.Text(f"[{index}] {note}"))
    return "\n".join(line.rstrip() for line in console.file.getvalue().split("\n"))

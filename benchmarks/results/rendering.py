"""Tables as text: Markdown, LaTeX (booktabs) and the terminal."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import rich.box
import rich.console
import rich.table
import rich.text

from beatrice.benchmarks.results.tables import (
    Measure,
    Table,
    counts_of,
    interval,
    row_value,
)

_TAG = re.compile(r"<(?=[a-zA-Z/!?])(?!/?(?:u|sup)>)")  # except our own marks
_ENTITY = re.compile(r"&(?=#?\w+;)")
_BAR = re.compile(r"(\\*)\|")  # backslashes before it would escape the escape


def md(text: str) -> str:
    """Return a text in one line, with tags and entities escaped for Markdown."""
    return _TAG.sub("&lt;", _ENTITY.sub("&amp;", " ".join(text.splitlines())))


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format texts as a Markdown table, escaping bars and HTML in the cells."""
    rows = [
        "| " + " | ".join(_BAR.sub(r"\1\1\|", md(cell)) for cell in cells) + " |"
        for cells in (heads, *lines)
    ]
    rows.insert(1, "|---" * len(heads) + "|")
    return "\n".join(rows) + "\n"


_TEX = str.maketrans(
    {letter: rf"\{letter}" for letter in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}
    | {"–": "--", "−": "$-$", "±": r"$\pm$", "→": r"$\to$", "†": r"$^\dagger$"}
)


def tex(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    return text.translate(_TEX)


def latex(
    align: str,
    heads: Iterable[str],
    lines: Iterable[Iterable[str]],
    *,
    above: Sequence[str] = (),
    foot: str = "",
) -> str:
    """Format texts as a LaTeX table (booktabs); only `heads` are escaped."""
    head, *body = (" & ".join(cells) + r" \\" for cells in (map(tex, heads), *lines))
    below = [r"\midrule", foot] if foot else []
    parts = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", *above, head, r"\midrule"]
    return "\n".join([*parts, *body, *below, r"\bottomrule", r"\end{tabular}"]) + "\n"


def small_print(notes: Sequence[str]) -> str:
    """Return notes as LaTeX to put below a table; empty if there are none."""
    text = tex(" ".join(notes))
    return rf"\\ {{\footnotesize {text}}}" + "\n" if notes else ""


class Style(NamedTuple):
    """How to mark numbers: patterns with `%s`, and the text of an absent number."""

    best: str
    second: str
    note: str
    absent: str
    clear: str


_CLEAR = "the 95 % interval of the difference excludes zero"


def _has_clear(table: Table) -> bool:
    return any(m.is_clear for m in table.measures)


def _cells(table: Table, style: Style) -> Iterator[list[str]]:
    patterns = {"best": style.best, "second": style.second, None: "%s"}

    def text(m: Measure | None) -> str:
        if m is None:
            return style.absent
        marked = patterns[m.rank] % row_value(m.row)
        references = ",".join(str(table.notes.index(note) + 1) for note in m.notes)
        marked = style.clear % marked if m.is_clear else marked
        return marked + (style.note % references if references else "")

    for line in table.lines:
        yield ["/".join(map(text, cell)) for cell in line.cells]


def as_markdown(table: Table) -> str:
    """Format a table as Markdown, with the meaning of † and numbered notes below."""
    heads = [f"{column.group}: {column.title}" for column in table.columns]
    cells = _cells(table, Style("**%s**", "<u>%s</u>", "<sup>%s</sup>", "–", "%s†"))
    lines = [[x.label, *values] for x, values in zip(table.lines, cells, strict=True)]
    lines.append(["n (left out)", *counts_of(table)])
    notes = [f"{i}. {md(note)}\n" for i, note in enumerate(table.notes, start=1)]
    clear = f"\n† {_CLEAR}\n" if _has_clear(table) else ""
    below = "\n" + "".join(notes) if notes else ""
    return markdown([table.corner, *heads], lines) + clear + below


def as_latex(table: Table) -> str:
    """Format a table as LaTeX (booktabs); its notes follow in small print."""
    groups, rules, start = [""], [], 2
    for group, width in table.groups.items():
        groups.append(rf"\multicolumn{{{width}}}{{c}}{{{tex(group)}}}")
        rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    heads = [table.corner, *(column.title for column in table.columns)]
    marks = r"\textbf{%s}", r"\underline{%s}", r"\textsuperscript{%s}"
    cells = _cells(table, Style(*marks, absent="--", clear=r"%s$^\dagger$"))
    text = latex(
        "l" + "c" * len(table.columns),
        heads,
        ([tex(x.label), *values] for x, values in zip(table.lines, cells, strict=True)),
        above=[" & ".join(groups) + r" \\", " ".join(rules)],
        foot=" & ".join(["$n$ (left out)", *counts_of(table)]) + r" \\",
    )
    notes = [f"{i}. {note}." for i, note in enumerate(table.notes, start=1)]
    return text + small_print([f"† {_CLEAR}."] * _has_clear(table) + notes)


_LABEL_WIDTH = 22  # least width of the first column, in characters


def _texts(table: Table) -> list[list[str]]:
    """Return each column as texts: its head, then its cells."""
    columns = [[f"{column.label}\n{column.detail}"] for column in table.columns]
    texts = _cells(table, Style("%s*", "%s+", "[%s]", "-", clear="%s!"))
    for line, cells in zip(table.lines, texts, strict=True):
        for column, cell, text in zip(columns, line.cells, cells, strict=True):
            ends = interval(cell[0].row) if cell[0] else ""
            column.append(f"{text}\n{ends.replace('–', '-')}" if ends else text)
    for column, count in zip(columns, counts_of(table), strict=True):
        column.append(count)
    return columns


def _blocks(
    table: Table, texts: Sequence[Sequence[str]], width: int
) -> list[tuple[str | None, list[int]]]:
    """Split a table into blocks that fit the width; return their titles and columns."""
    widths = [
        3 + max(len(line) for text in column for line in text.split("\n"))
        for column in texts
    ]
    if _LABEL_WIDTH + sum(widths) <= width:
        return [(None, list(range(len(widths))))]
    blocks: list[tuple[str | None, list[int]]] = []
    for group in table.groups:
        left = 0
        for i in (i for i, c in enumerate(table.columns) if c.group == group):
            if widths[i] > left:
                blocks.append((group, []))
                left = width - _LABEL_WIDTH
            blocks[-1][1].append(i)
            left -= widths[i]
    return blocks


def _block(
    table: Table,
    texts: Sequence[Sequence[str]],
    chosen: Sequence[int],
    title: str | None,
) -> rich.table.Table:
    block = rich.table.Table(
        title=title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False
    )
    block.add_column(rich.text.Text(table.corner), overflow="fold")  # never truncated
    for i in chosen:
        block.add_column(rich.text.Text(texts[i][0]), no_wrap=True)
    labels = (*(line.label for line in table.lines), "answers (left out)")
    for number, label in enumerate(labels, start=1):
        shown = (texts[i][number] for i in chosen)
        block.add_row(*map(rich.text.Text, (label, *shown)))
    return block


def as_text(table: Table, width: int = 100) -> str:
    """Format a table as plain text, stacking the parts of one that is too wide.

    The best value of a column has a `*`, the second best a `+`, and a difference whose
    interval excludes zero a `!`. Below each cell is the 95 % interval of its first
    metric, and `[1]` refers to the notes below the table.
    """
    stream = io.StringIO()
    console = rich.console.Console(file=stream, width=width, color_system=None)
    texts = _texts(table)
    for title, chosen in _blocks(table, texts, width):
        console.print(_block(table, texts, chosen, title))
    if any(m.rank for m in table.measures):
        console.print("* best of its column, + second best; below, the 95 % interval")
    if _has_clear(table):
        console.print(f"! {_CLEAR}")
    for index, note in enumerate(table.notes, start=1):
        console.print(rich.text.Text(f"[{index}] {note}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))

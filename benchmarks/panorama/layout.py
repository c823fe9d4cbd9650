"""The paper's tables of detectors from a run's rows, as Markdown and LaTeX.

Three of them, as in the paper: both settings on the pooled in-domain test questions and
the held-out sets (tab:main-detection), and each setting on every set alone
(tab:appendix-detection and tab:appendix-detection-ctx). A cell is AUROC / AUPRC, the
best of a column bold, the second underlined; the first line is the AUPRC of guessing.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from beatrice.benchmarks.panorama.significance import is_rival
from beatrice.benchmarks.results.findings import tex
from beatrice.benchmarks.results.names import DETECTORS, SETTING_LABELS
from beatrice.benchmarks.results.tables import (
    METRICS,
    Cell,
    Line,
    Measure,
    Table,
    detection_table,
    number,
)
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Setting
from beatrice.extract.run.rows import ResultRow

CHANCE = "Random AUPRC (error rate)"
# A score that is the same for every answer: its AUPRC is the share of wrong ones.
_CONSTANT = "majority"
_SPLITS = ("test", "ood")


def panorama_table(
    rows: Sequence[ResultRow],
    setting: Setting | None = None,
    titles: Mapping[str, str] | None = None,
) -> Table:
    """Lay the selected set and all its rivals out, the better ones first.

    They are sorted by AUROC in the first column, as in the paper's panoramas; own
    encoders and fusions are no rivals and have tables of their own.

    Args:
      rows: of a run.
      setting: on every set of this one; None is both, in-domain sets pooled.
      titles: printed names beyond those of `DETECTORS`.
    """
    shown = [r for r in rows if r.experiment == "detection" and r.seed == "mean"]
    if setting is None:
        shown = [r for r in shown if r.split == "ood" or r.dataset == IN_DOMAIN]
    else:
        shown = [r for r in shown if r.setting == setting]
    printed = {**DETECTORS, **(titles or {})}
    found = dict.fromkeys(r.detector for r in shown)
    labels = {n: printed.get(n, n) for n in found if n == "champion" or is_rival(n)}
    table = detection_table(shown, labels=labels)
    ours = [line for line in table.lines if line.is_ours]
    rivals = [line for line in table.lines if not line.is_ours]
    ordered = [*_chance(shown, table), *ours, *sorted(rivals, key=_by_first)]
    return dataclasses.replace(table, lines=tuple(ordered))


def _by_first(line: Line) -> float:
    """Return what puts the highest AUROC of the first column first."""
    value = line.cells[0][0].row.value if line.cells[0][0] else None
    return 1.0 if value is None else -value


def _chance(rows: Sequence[ResultRow], table: Table) -> list[Line]:
    """Return the line of guessing, without a rank, in the table's columns."""
    own = detection_table(rows, labels={_CONSTANT: CHANCE})
    cells = {
        column: cell
        for line in own.lines
        for column, cell in zip(own.columns, line.cells, strict=True)
    }

    def auprc_alone(cell: Cell) -> Cell:
        measure = cell[METRICS.index("auprc")]
        return (None, measure and dataclasses.replace(measure, rank=None))

    nothing: Cell = (None,) * len(METRICS)
    found = tuple(auprc_alone(cells.get(c, nothing)) for c in table.columns)
    return [Line(label=CHANCE, cells=found)] if cells else []


def panoramas(
    rows: Sequence[ResultRow], titles: Mapping[str, str] | None = None
) -> dict[str, Table]:
    """Return the three tables by their headings, without the empty ones.

    Args:
      rows: of a run.
      titles: see `panorama_table`.
    """
    found = {"Detecting wrong answers": panorama_table(rows, None, titles)}
    for setting in SETTINGS:
        heading = f"{SETTING_LABELS[setting]}, every set"
        found[heading] = panorama_table(rows, setting, titles)
    return {heading: table for heading, table in found.items() if table.lines}


def counts_of(table: Table) -> list[tuple[int, int]]:
    """Return for each column how many answers are measured and how many left out.

    Of the selected set, where it has a line; what another detector leaves out stands
    in the notes.
    """
    lines = [line for line in table.lines if line.is_ours] or list(table.lines)
    columns = zip(*(line.cells for line in lines), strict=True)
    measured = [[m.row for cell in column for m in cell if m] for column in columns]
    return [
        (max((r.n for r in own), default=0), max((r.n_failed for r in own), default=0))
        for own in measured
    ]


def _value(measure: Measure) -> str:
    value = measure.row.value
    return "n/a" if value is None else number(value, measure.row.metric)


def as_markdown(table: Table) -> str:
    """Spell a table as Markdown; its notes are a numbered list below it."""
    marks = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}

    def spelled(measure: Measure | None) -> str:
        if measure is None:
            return "–"
        refs = "".join(f"<sup>{table.notes.index(n) + 1}</sup>" for n in measure.notes)
        return marks[measure.rank].format(_value(measure)) + refs

    heads = [f"{c.group}: {c.label}, {c.detail}" for c in table.columns]
    lines = [f"| {table.corner} | " + " | ".join(heads) + " |"]
    lines.append("|---" * (1 + len(heads)) + "|")
    for line in table.lines:
        cells = ("/".join(map(spelled, cell)) for cell in line.cells)
        lines.append(f"| {line.label} | " + " | ".join(cells) + " |")
    counts = (f"{n:,} ({n_failed:,})" for n, n_failed in counts_of(table))
    lines.append("| n (left out) | " + " | ".join(counts) + " |")
    notes = [f"{i}. {note}" for i, note in enumerate(table.notes, start=1)]
    return "\n".join([*lines, "", *notes]) + "\n"


def as_latex(table: Table) -> str:
    """Spell a table as LaTeX (booktabs); its notes follow in small print."""
    marks = {"best": r"\textbf{%s}", "second": r"\underline{%s}", None: "%s"}

    def spelled(measure: Measure | None) -> str:
        if measure is None:
            return "--"
        refs = ",".join(str(table.notes.index(n) + 1) for n in measure.notes)
        above = rf"\textsuperscript{{{refs}}}" if refs else ""
        return marks[measure.rank] % _value(measure) + above

    n_columns = len(table.columns)
    groups, rules, start = [], [], 2
    for group, width in table.groups.items():
        groups.append(rf"\multicolumn{{{width}}}{{c}}{{{tex(group)}}}")
        rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    heads = (tex(f"{c.label}, {c.detail}") for c in table.columns)
    lines = [rf"\begin{{tabular}}{{l{'c' * n_columns}}}", r"\toprule"]
    lines += [" & ".join(["", *groups]) + r" \\", " ".join(rules)]
    lines += [" & ".join([tex(table.corner), *heads]) + r" \\", r"\midrule"]
    for line in table.lines:
        cells = ("/".join(map(spelled, cell)) for cell in line.cells)
        lines.append(" & ".join([tex(line.label), *cells]) + r" \\")
    counts = (f"{n:,} ({n_failed:,})" for n, n_failed in counts_of(table))
    lines += [r"\midrule", " & ".join(["$n$ (left out)", *counts]) + r" \\"]
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [f"{i}. {tex(note)}." for i, note in enumerate(table.notes, start=1)]
    lines += [r"\\ {\footnotesize " + " ".join(notes) + "}"] if notes else []
    return "\n".join(lines) + "\n"

"""Two runs beside each other: do the same combinations win, do the answers agree?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from beatrice.benchmarks.results.findings import (
    Finding,
    measured,
    place_name,
    questions_of,
)
from beatrice.benchmarks.results.names import DETECTORS, RIVALS, SETTING_LABELS
from beatrice.benchmarks.results.tables import interval, number
from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.rows import ResultRow, ResultTable
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.selection.anatomy.reach import Agreement, Ranked, agreement


def in_words(found: Agreement) -> str:
    """Return a correlation and its interval."""
    if not np.isfinite(found.value):
        return "undefined: one class only, or all subsets are equally good"
    return f"{number(found.value)} [{number(found.low)} to {number(found.high)}]"


class Side(NamedTuple):
    """One of two evaluated runs.

    Attributes:
      name: where it lies.
      rows: of its results.
      answered: the paper's questions, as it answers them.
      validation: what its encoders say of its validation answers, by setting.
      intervals: of its results.
    """

    name: str
    rows: Sequence[ResultRow]
    answered: Sequence[Finding]
    validation: Mapping[Setting, Ranked]
    intervals: BootstrapConfig


def _set_of(found: Finding | ResultRow) -> str:
    """Name a set so that two runs on other questions meet in their in-domain ones."""
    if isinstance(found, ResultRow):
        return IN_DOMAIN if found.split == "test" else f"{found.dataset}, held out"
    return IN_DOMAIN if found.place[2] == "test" else place_name(found.place)


def _headline(sides: Sequence[Side], setting: Setting) -> list[str]:
    """Lay out the AUROC of both runs, all in-domain test sets and the held-out ones."""
    names = {**DETECTORS, **RIVALS}
    found: list[dict[tuple[str, str], ResultRow]] = []
    for side in sides:
        rows = ResultTable(side.rows).select(
            experiment="detection", metric="auroc", seed="mean", setting=setting
        )
        found.append(
            {
                (row.detector, _set_of(row)): row
                for row in rows
                if row.split == "ood" or (row.split, row.dataset) == ("test", IN_DOMAIN)
            }
        )
    sets = list(dict.fromkeys(place for own in found for _, place in own))
    lines = ["| AUROC | " + " | ".join(f"{s}: A | B" for s in sets) + " |"]
    lines += ["|---" * (1 + 2 * len(sets)) + "|"]
    for name, label in names.items():
        cells = [own.get((name, place)) for place in sets for own in found]
        if any(cells):
            lines.append(f"| {label} | " + " | ".join(map(_spelled, cells)) + " |")
    return lines


def _spelled(row: ResultRow | None) -> str:
    if row is None:
        return "–"
    return f"{number(row.value)} [{interval(row)}]" if row.value is not None else "n/a"


def _answers(sides: Sequence[Side], setting: Setting) -> list[str]:
    """Lay out both runs' answers to each question on the sets that both have."""
    both = []
    for side in sides:
        own: dict[tuple[str, str], Finding] = {}
        for one in side.answered:  # the first of the test sets is all of them together
            if one.place[0] == setting and one.answer is not None:
                own.setdefault((one.question, _set_of(one)), one)
        both.append(own)
    wordings = questions_of(None)
    shared = [key for key in both[0] if key in both[1]]
    pairs = [(both[0][key].answer, both[1][key].answer) for key in shared]
    n_same, n_told = (
        sum(a == b for a, b in pairs),
        sum({a, b} <= {"yes", "no"} for a, b in pairs),
    )
    n_opposite = sum({a, b} == {"yes", "no"} for a, b in pairs)
    lines = [
        f"The answers agree on {n_same} of {len(pairs)}; where both say yes or no "
        f"({n_told}), {n_opposite} are opposite.",
        "",
        "| | on | A | B | |",
        "|---|---|---|---|---|",
    ]
    for key in shared:
        a, b = both[0][key], both[1][key]
        same = "same" if a.answer == b.answer else "differs"
        cells = (f"**{x.answer}** {measured(x)}" for x in (a, b))
        text = wordings[key[0]].text
        lines.append(f"| {text} | {key[1]} | {' | '.join(cells)} | {same} |")
    return lines


def comparison(first: Side, second: Side) -> str:
    """Return the comparison of two evaluated runs as Markdown.

    Raises:
      ValueError: they have no setting in common.
    """
    sides = (first, second)
    shared = [setting for setting in first.validation if setting in second.validation]
    if not shared:
        raise ValueError(
            f"{first.name} and {second.name} have no setting in common; compare runs "
            "that were both answered closed-book, or both with context"
        )
    lines = [f"A: {first.name}", "", f"B: {second.name}", ""]
    for setting in shared:
        ranked = [side.validation[setting] for side in sides]
        found = agreement(*ranked, first.intervals)
        n_answers = " and ".join(str(len(x.ids)) for x in ranked)
        lines += [
            f"## {SETTING_LABELS[setting]}",
            "",
            "Spearman's correlation of the fifteen subsets' validation AUROC: "
            f"**{in_words(found)}** ({n_answers} answers, resampled by question; in "
            "the paper, between its two models, .78).",
            "",
            *_headline(sides, setting),
            "",
            *_answers(sides, setting),
            "",
        ]
    return "\n".join(lines)

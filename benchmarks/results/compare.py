"""Two runs beside each other: do the same combinations win, do the answers agree?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas

from beatrice.benchmarks.results.findings import PaperAnswer, measured, questions_of
from beatrice.benchmarks.results.names import DETECTORS, RIVALS, SETTING_LABELS
from beatrice.benchmarks.results.printing import markdown
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    Place,
    by_subject,
    in_domain_or_held_out,
    interval,
    number,
    places_of,
    row_value,
    where,
)
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Setting
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.selection.anatomy.reach import RankAgreement, Ranked, agreement


class Side(NamedTuple):
    """One of two evaluated runs, and what encoders say of its validation answers."""

    name: str
    results: pandas.DataFrame
    answered: Sequence[PaperAnswer]
    validation: Mapping[Setting, Ranked]
    intervals: BootstrapConfig


def correlation(alike: RankAgreement) -> str:
    """Format a correlation and its interval."""
    if not np.isfinite(alike.value):
        return "undefined: one class only, or all subsets are equally good"
    return f"{number(alike.value)} [{number(alike.low)} to {number(alike.high)}]"


def _set_of(place: Place) -> str:
    """Name a set so that two runs on other questions meet in their in-domain ones."""
    return IN_DOMAIN if place.split == "test" else place.title


def _headline(sides: Sequence[Side], setting: Setting) -> str:
    """Lay out the AUROC of both runs, all in-domain test sets and the held-out ones."""
    by_set: list[dict[str, dict[Subject, ResultRow]]] = []
    for side in sides:
        at = {"experiment": "detection", "metric": "auroc", "setting": setting}
        shown = in_domain_or_held_out(where(side.results, **at))
        places = places_of(shown, EVALUATED)
        by_set.append({_set_of(x): by_subject(shown, **x._asdict()) for x in places})
    sets = list(dict.fromkeys(name for rows in by_set for name in rows))
    lines = []
    for subject, label in {**DETECTORS, **RIVALS}.items():
        cells = [x.get(s, {}).get(subject) for s in sets for x in by_set]
        if any(cells):
            lines.append([label, *map(_text, cells)])
    heads = [f"{name}, {side}" for name in sets for side in "AB"]
    return markdown(["AUROC", *heads], lines)


def _text(row: ResultRow | None) -> str:
    if row is None:
        return "–"
    return row_value(row) + (f" [{interval(row)}]" if row.value is not None else "")


def _answers(sides: Sequence[Side], setting: Setting) -> str:
    """Lay out both runs' answers to each question on the sets that both have."""
    both: list[dict[tuple[str, str], PaperAnswer]] = [{}, {}]
    for side, answers in zip(sides, both, strict=True):
        for x in side.answered:  # the first of the test sets is all of them together
            if x.place.setting == setting and x.answer is not None:
                answers.setdefault((x.question, _set_of(x.place)), x)
    shared = [key for key in both[0] if key in both[1]]
    pairs = [(both[0][key].answer, both[1][key].answer) for key in shared]
    counts = [
        ("questions answered by both", len(pairs)),
        ("the same answer", sum(a == b for a, b in pairs)),
        ("both say yes or no", sum({a, b} <= {"yes", "no"} for a, b in pairs)),
        ("opposite", sum({a, b} == {"yes", "no"} for a, b in pairs)),
    ]
    wordings, lines = questions_of(None), []
    for question, name in shared:
        a, b = (answers[question, name] for answers in both)
        cells = [f"**{x.answer}** {measured(x)}" for x in (a, b)]
        same = "same" if a.answer == b.answer else "differs"
        lines.append([wordings[question].text, name, *cells, same])
    summary = markdown(("Answers", "n"), [(text, str(n)) for text, n in counts])
    return f"{summary}\n{markdown(('', 'on', 'A', 'B', ''), lines)}"


def comparison(first: Side, second: Side) -> str:
    """Return the comparison of two evaluated runs as Markdown."""
    sides = (first, second)
    both = first.validation.keys() & second.validation.keys()
    shared: list[Setting] = [setting for setting in SETTINGS if setting in both]
    if not shared:
        raise ValueError(
            f"{first.name} and {second.name} have no setting in common; compare runs "
            "that were both answered closed-book, or both with context"
        )
    parts = [f"A: {first.name}\n\nB: {second.name}\n"]
    for setting in shared:
        left, right = first.validation[setting], second.validation[setting]
        alike = agreement(left, right, first.intervals)
        n_answers = f"{len(left.ids)} and {len(right.ids)}"
        parts.append(
            f"## {SETTING_LABELS[setting]}\n\n"
            "Spearman's correlation of the fifteen subsets' validation AUROC: "
            f"**{correlation(alike)}** ({n_answers} answers, resampled by question; in "
            "the paper, between its two models, .78).\n"
        )
        parts += [_headline(sides, setting), _answers(sides, setting)]
    return "\n".join(parts)

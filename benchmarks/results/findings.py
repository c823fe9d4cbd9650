"""The paper's research questions, each answered from a run's rows by one rule.

A question compares AUROCs on the same questions of a set (`paired` and `finding` rows):

* "yes": a difference is above zero, and its 95 % interval excludes zero. If one of
  several differences is enough (is one of four families better?), its p must also be
  at most .05 divided by their number, so that more looks do not find more by chance.
* "no": every difference is below zero, and every interval excludes zero.
* "cannot tell": neither of these.
* "cannot conclude", whatever the rows say: the setting has too few right or wrong
  training answers (`extract.label.labels.too_few_answers`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pandas

from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.rendering import latex, markdown, tex
from beatrice.benchmarks.results.rivals import seed_spread
from beatrice.benchmarks.results.tables import (
    EVALUATED,
    Place,
    by_pair,
    by_subject,
    find,
    interval,
    number,
    p_text,
    places_of,
    row_value,
    where,
)
from beatrice.extract.label.labels import too_few_answers
from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from beatrice.jaxprobe.stages import LayerCurve

Answer = Literal["yes", "no", "cannot tell", "cannot conclude"]
SINGLES = {x: names.HIDDEN_ONLY if x == "H" else encoder(x) for x in names.FAMILIES}


class PaperQuestion(NamedTuple):
    """A question, and the differences that answer it."""

    text: str  # with a question mark, without the setting and the set
    # Detector and rival of each difference, by its name, which is empty if it is the
    # only one. Any of them may answer with yes.
    pairs: Mapping[str, tuple[Subject, Subject]]


class PaperAnswer(NamedTuple):
    """The answer to a question on one set."""

    question: str  # short name
    place: Place
    answer: Answer | None  # None if a difference is not measured or undefined
    # The difference that decides, see `decide`; None if none was measured.
    row: ResultRow | None
    label: str = ""  # the name of that difference; empty if it is the only one


def decide(rows: Sequence[ResultRow]) -> tuple[Answer | None, ResultRow | None]:
    """Return the answer by the rule above, and the largest difference that decides it.

    The answer is None if nothing was measured or a difference is undefined.
    """

    def largest(some: Sequence[ResultRow]) -> ResultRow | None:
        values = [-math.inf if r.value is None else r.value for r in some]
        return some[values.index(max(values))] if some else None

    if not rows or any(r.value is None or r.ci_low is None for r in rows):
        return None, largest(rows)
    enough = 0.05 / len(rows) if len(rows) > 1 else 1.0
    above = [
        r
        for r in rows
        if (r.ci_low or 0.0) > 0 and (1.0 if r.p_value is None else r.p_value) <= enough
    ]
    if above:
        return "yes", largest(above)
    is_below = all((r.ci_high or 0.0) < 0 for r in rows)
    return "no" if is_below else "cannot tell", largest(rows)


def best_single(results: pandas.DataFrame, setting: str) -> str | None:
    """Return the letter of the family whose encoder is best on validation, if known."""
    at = {"dataset": IN_DOMAIN, "split": "validation", "setting": setting}
    rows = by_subject(results, experiment="detection", metric="auroc", **at)
    known = {
        letter: row.value
        for letter, single in SINGLES.items()
        if (row := rows.get(single)) and row.value is not None
    }
    return max(known, key=known.__getitem__) if len(known) == len(SINGLES) else None


def questions_of(best: str | None) -> dict[str, PaperQuestion]:
    """Return the questions by short name, in order; `best` is from `best_single`."""
    single = {}
    if best is not None:
        single = {f"{names.FAMILIES[best]}, the best on validation": SINGLES[best]}
    rivals = {
        "perplexity": ("answer perplexity", {"": names.PERPLEXITY}),
        "single": ("the best single family", single),
        "all_four": ("one encoder of all four families", {"": names.EARLY_FUSION}),
        "hidden": ("hidden states only", {"": names.HIDDEN_ONLY}),
        "text": ("the text alone", {"": Subject("tfidf")}),
    }
    questions = {
        "family_over_perplexity": PaperQuestion(
            "Does any signal family alone beat answer perplexity?",
            {y: (encoder(x), names.PERPLEXITY) for x, y in names.FAMILIES.items()},
        )
    }
    for name, (than, compared) in rivals.items():
        text = f"Does the selected set beat {than}?"
        pairs = {label: (names.CHAMPION, rival) for label, rival in compared.items()}
        questions[f"set_over_{name}"] = PaperQuestion(text, pairs)
    for letter, name in names.FAMILIES.items():
        others = "".join(names.FAMILIES).replace(letter, "")
        verb = "Do" if name.endswith("s") else "Does"
        the = "the " if letter == "R" else ""
        questions[f"{letter}_adds"] = PaperQuestion(
            f"{verb} {the}{name} add to the other three families?",
            {"": (names.EARLY_FUSION, encoder(others))},
        )
    for end, layer in zip(("first", "last"), names.LAYER_PROBES[1:], strict=True):
        questions[f"layer_over_{end}"] = PaperQuestion(
            f"Is the chosen layer better than the {end} stored one?",
            {"": (names.LAYER_PROBES[0], layer)},
        )
    return questions


def findings(
    results: pandas.DataFrame, accuracy: Sequence[Mapping[str, Any]]
) -> list[PaperAnswer]:
    """Answer every question on every test and held-out set, setting by setting."""
    reasons, answered = too_few_answers(accuracy), []
    pairs = where(results, experiment=("paired", "finding"), metric="auroc")
    for place in places_of(where(pairs, experiment="paired"), EVALUATED):
        differences = by_pair(pairs, **place._asdict())
        for name, question in questions_of(best_single(results, place.setting)).items():
            labels = {
                differences[pair]: label
                for label, pair in question.pairs.items()
                if pair in differences
            }
            is_whole = len(labels) == len(question.pairs)
            answer, row = decide([*labels] if is_whole else [])
            if answer is not None and place.setting in reasons:
                answer = "cannot conclude"
            answered.append(
                PaperAnswer(name, place, answer, row, labels[row] if row else "")
            )
    return answered


def difference_text(finding: PaperAnswer) -> str:
    """Format the difference that decides an answer: its value, interval and p."""
    row = finding.row
    assert row is not None  # an answer has a row, see `decide`
    of = f"{finding.label} " if finding.label else ""
    p = "" if row.p_value is None else f", p = {p_text(row.p_value)}"
    return f"{of}{row_value(row)} [{interval(row)}]{p}"


class AnswerGrid(NamedTuple):
    """The answers of one setting: a line for each question, a column for each set."""

    setting: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[PaperAnswer, ...]], ...]

    @property
    def title(self) -> str:
        """The setting in words."""
        return names.SETTING_LABELS[self.setting]


def grids(answered: Sequence[PaperAnswer]) -> list[AnswerGrid]:
    """Return a grid for each setting, of the questions measured on at least one set."""
    by_setting = []
    for setting in dict.fromkeys(f.place.setting for f in answered):
        answers = {
            (f.question, f.place): f for f in answered if f.place.setting == setting
        }
        places = tuple(dict.fromkeys(place for _, place in answers))
        lines = tuple(
            (question.text, tuple(answers[name, place] for place in places))
            for name, question in questions_of(None).items()
            if any(answers[name, place].row for place in places)
        )
        heads = tuple(place.title for place in places)
        by_setting.append(AnswerGrid(setting, heads, lines))
    return by_setting


def grid_lines(grid: AnswerGrid, answer: str = "{}:") -> list[tuple[str, ...]]:
    """Return a grid's texts: the question, then answer and difference on each set."""

    def cell(finding: PaperAnswer) -> str:
        words = answer.format(finding.answer)
        return f"{words} {difference_text(finding)}" if finding.answer else "–"

    return [(text, *map(cell, cells)) for text, cells in grid.lines]


def _in_words(cells: Sequence[PaperAnswer]) -> str:
    """Summarise one setting's answers: the pooled in-domain set, then the single sets.

    Sets that cannot tell are only counted.
    """
    answered = [cell for cell in cells if cell.answer is not None]
    has_members = sum(cell.place.split == "test" for cell in cells) > 1
    pooled = [x for x in answered if has_members and x.place.dataset == IN_DOMAIN]
    known = [x for x in answered if x not in pooled]
    parts, n_open = [], len(known)
    for x in pooled:
        answer = x.answer if x.answer in ("yes", "no") else "open"
        parts.append(f"{answer} on {IN_DOMAIN} questions")
    for answer in ("yes", "no"):
        if sets := [x.place.dataset for x in known if x.answer == answer]:
            on = f" on all {len(sets)} sets"
            is_all = len(sets) == len(known) > 1
            parts.append(answer + (on if is_all else f": {', '.join(sets)}"))
            n_open -= len(sets)
    if n_open:
        parts.append(f"open on {n_open}")
    return "; ".join(parts) or "–"


def verdicts_in_words(
    answered: Sequence[PaperAnswer],
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return answered questions with each setting's answers, and unanswered ones."""
    lines, undecided = [], []
    by_setting = [dict(grid.lines) for grid in grids(answered)]
    for text in dict.fromkeys(text for lines_of in by_setting for text in lines_of):
        cells = [lines_of.get(text, ()) for lines_of in by_setting]
        if any(x.answer in ("yes", "no") for of_setting in cells for x in of_setting):
            lines.append((text, *map(_in_words, cells)))
        else:
            undecided.append(text)
    return lines, undecided


def facts(
    results: pandas.DataFrame,
    accuracy: Sequence[Mapping[str, Any]],
    sweep: Mapping[Setting, LayerCurve],
    selection: Mapping[Setting, Mapping[str, Any]],
) -> dict[str, list[tuple[str, str]]]:
    """Return, by setting, names and values of numbers related to the answers."""
    reasons, by_setting = too_few_answers(accuracy), {}
    champion = where(
        results, experiment="detection", metric="auroc", **names.CHAMPION._asdict()
    )
    for setting in dict.fromkeys((*reasons, *selection, *sweep)):
        lines = [("Too few answers", reasons[setting])] if setting in reasons else []
        if setting in selection:
            rounds = selection[setting]["rounds"]
            added = (f"{r['added']} {number(r['auroc'])}" for r in rounds if r["added"])
            lines.append(("Validation AUROC, round by round", " → ".join(added)))
        if (curve := sweep.get(setting)) is not None:
            means = zip(curve.layers, map(statistics.fmean, curve.auroc), strict=True)
            layers = ", ".join(f"{layer}: {number(mean)}" for layer, mean in means)
            about = f"{layers}; best {curve.best}"
            lines.append(("Validation AUROC by layer", about))
        for place in places_of(where(champion, setting=setting), EVALUATED):
            here = where(champion, **place._asdict())
            mean, spread = find(here, seed="mean"), seed_spread(here, place)
            if spread is not None and mean and mean.ci_low is not None:
                half = number(((mean.ci_high or 0.0) - mean.ci_low) / 2)
                numbers = f"{number(spread)} over {len(here) - 1}"
                numbers += f", 95 % over questions ±{half}"
                lines.append((f"SD over seeds, {place.title}", numbers))
        by_setting[setting] = lines
    return by_setting


def as_markdown(
    answered: Sequence[PaperAnswer], beside: Mapping[str, Sequence[tuple[str, str]]]
) -> str:
    """Format the answers as Markdown: a table per setting, with its facts below."""
    parts = []
    for grid in grids(answered):
        parts.append(f"### {grid.title}\n")
        parts.append(markdown(["", *grid.heads], grid_lines(grid, "**{}**")))
        if grid.setting in beside:
            parts.append(markdown(("Related numbers", ""), beside[grid.setting]))
    return "\n".join(parts)


def as_latex(answered: Sequence[PaperAnswer]) -> str:
    """Format the answers as LaTeX tables (booktabs), one per setting."""
    parts = []
    for grid in grids(answered):
        heads = grid.title, *grid.heads
        lines = (map(tex, cells) for cells in grid_lines(grid))
        parts.append(latex("l" * len(heads), heads, lines))
    return "\n".join(parts)

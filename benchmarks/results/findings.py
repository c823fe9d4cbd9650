"""The questions that the paper asks of a run, each answered from its rows by one rule.

The rule, the same for every question and set. Each question compares AUROCs on the same
questions (`paired` and `finding` rows). "yes": a difference is above zero, and its
95 % interval excludes zero. "no": every difference lies below zero so. "cannot tell":
all else. Where any of several differences would do (is one of four families better?),
its p must be below .05 divided by their number too, so that four looks at chance find
nothing more often than one. "cannot conclude": the setting has too few right or wrong
training answers (`extract.label.labels.too_few_answers`), whatever its rows say.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from beatrice.benchmarks.results.names import RIVALS, SETTING_LABELS, SPLIT_LABELS
from beatrice.benchmarks.results.tables import Place, interval, number, places_of
from beatrice.extract.label.labels import too_few_answers
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable

Answer = Literal["yes", "no", "cannot tell", "cannot conclude"]
FAMILIES = {"H": "hidden states", "P": "probabilities", "R": "residual stream"}
FAMILIES |= {"A": "attention"}
SINGLES = {"H": "hidden_only", "P": "encoder:P", "R": "encoder:R", "A": "encoder:A"}
Pair = tuple[str, str]
_SPLITS = ("test", "ood")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, and the differences that answer it.

    Attributes:
      text: with a question mark, without the setting and the set.
      pairs: (detector, against); any of them answers with yes.
      labels: what each difference is called where there are several.
    """

    text: str
    pairs: tuple[Pair, ...]
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A question's answer on one set.

    Attributes:
      row: the difference that decides, the largest of several; None where none was
        measured.
      label: what it is called, empty where it is the only one.
    """

    question: str
    place: Place
    answer: Answer | None
    row: ResultRow | None
    label: str = ""


def answer_of(rows: Sequence[ResultRow]) -> Answer | None:
    """Answer by the rule above; None where nothing was measured or it is undefined."""
    known = [r for r in rows if r.value is not None and r.ci_low is not None]
    if len(known) < len(rows) or not known:
        return None
    enough = 0.05 / len(known) if len(known) > 1 else 1.0
    if any(r.ci_low > 0 and (r.p_value or 0.0) <= enough for r in known):
        return "yes"
    return "no" if all(r.ci_high < 0 for r in known) else "cannot tell"


def best_single(table: ResultTable, setting: str) -> str | None:
    """Return the letter of the family whose encoder is best on validation."""
    where = {"setting": setting, "dataset": IN_DOMAIN, "split": "validation"}
    where |= {"experiment": "detection", "metric": "auroc", "seed": "mean"}
    found = {f: table.find(detector=SINGLES[f], **where) for f in SINGLES}
    known = {f: r.value for f, r in found.items() if r and r.value is not None}
    return max(known, key=known.__getitem__) if len(known) == len(SINGLES) else None


def questions_of(best: str | None) -> dict[str, Question]:
    """Return the questions in order, by their short names.

    Args:
      best: letter of a setting's best single family on validation, see `best_single`.
    """
    found = {
        "family_over_perplexity": Question(
            text="Does any signal family alone beat answer perplexity?",
            pairs=tuple((f"encoder:{letter}", "perplexity") for letter in FAMILIES),
            labels=tuple(FAMILIES.values()),
        ),
        "set_over_perplexity": Question(
            text="Does the selected set beat answer perplexity?",
            pairs=(("champion", "perplexity"),),
        ),
        "set_over_single": Question(
            text="Does the selected set beat the best single family?",
            pairs=(("champion", SINGLES[best]),) if best else (),
            labels=(f"{FAMILIES[best]}, the best on validation",) if best else (),
        ),
        "set_over_all_four": Question(
            text="Does the selected set beat one encoder of all four families?",
            pairs=(("champion", "early_fusion"),),
        ),
        "set_over_hidden": Question(
            text="Does the selected set beat hidden states only?",
            pairs=(("champion", "hidden_only"),),
        ),
        "set_over_text": Question(
            text="Does the selected set beat the text alone?",
            pairs=(("champion", "tfidf"),),
        ),
    }
    for letter, name in FAMILIES.items():
        others = "HPRA".replace(letter, "")
        verb = "Do" if name.endswith("s") else "Does"
        the = "the " if letter == "R" else ""
        found[f"{letter}_adds"] = Question(
            text=f"{verb} {the}{name} add to the other three families?",
            pairs=(("early_fusion", f"encoder:{others}"),),
        )
    for end in ("first", "last"):
        found[f"layer_over_{end}"] = Question(
            text=f"Is the layer that is read better than the {end} one kept?",
            pairs=(("layer:chosen", f"layer:{end}"),),
        )
    return found


def _rows_of(table: ResultTable, question: Question, place: Place) -> list[ResultRow]:
    setting, dataset, split = place
    where = {"setting": setting, "dataset": dataset, "split": split}
    where |= {"metric": f"auroc{DIFFERENCE}"}
    found = []
    for detector, against in question.pairs:
        is_rival = detector == "champion" and against in RIVALS
        experiment = "paired" if is_rival else "finding"
        pair = {"experiment": experiment, "detector": detector, "against": against}
        row = table.find(**pair, **where)
        found += [] if row is None else [row]
    return found if len(found) == len(question.pairs) else []


def findings(
    rows: Sequence[ResultRow], accuracy: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Answer every question on every test and held-out set, setting by setting.

    Args:
      rows: result rows of a run.
      accuracy: as `extract.label.labels.count_correct` gives it.
    """
    wanted = [r for r in rows if r.experiment in ("paired", "finding", "detection")]
    table, too_few = ResultTable(wanted), too_few_answers(accuracy)
    paired = [r for r in wanted if r.experiment == "paired" and r.split in _SPLITS]
    answered = []
    for place in places_of(paired, _SPLITS):
        asked = questions_of(best_single(table, place[0]))
        for name, question in asked.items():
            found = _rows_of(table, question, place)
            largest = max(found, key=lambda r: r.value or -1.0, default=None)
            label = ""
            if largest is not None and question.labels:
                label = question.labels[found.index(largest)]
            answer = answer_of(found)
            if answer is not None and place[0] in too_few:
                answer = "cannot conclude"
            answered.append(
                Finding(
                    question=name, place=place, answer=answer, row=largest, label=label
                )
            )
    return answered


def measured(found: Finding) -> str:
    """Spell the deciding difference: its value, interval and p, a dash without one."""
    row = found.row
    if row is None:
        return "–"
    if row.value is None or row.ci_low is None:
        return f"n/a ({row.reason})"
    of = f"{found.label} " if found.label else ""
    p = "" if row.p_value is None else f", p = {row.p_value:.2g}".replace("0.", ".")
    return f"{of}{number(row.value, row.metric)} [{interval(row)}]{p}"


def place_name(place: Place) -> str:
    """Name a set in words, as "all in-domain" or "popqa, held out"."""
    _, dataset, split = place
    return dataset if dataset == IN_DOMAIN else f"{dataset}, {SPLIT_LABELS[split]}"


def seed_spread(table: ResultTable, place: Place) -> float | None:
    """Return the SD of the selected set's AUROC over training seeds; None with one."""
    setting, dataset, split = place
    where = {"setting": setting, "dataset": dataset, "split": split, "metric": "auroc"}
    rows = table.select(experiment="detection", detector="champion", **where)
    values = [r.value for r in rows if r.seed != "mean" and r.value is not None]
    return statistics.stdev(values) if len(values) > 1 else None


def _seeds(table: ResultTable, place: Place) -> str:
    """Say how far apart the seeds of the selected set are, beside its interval."""
    setting, dataset, split = place
    where = {"setting": setting, "dataset": dataset, "split": split, "metric": "auroc"}
    rows = table.select(experiment="detection", detector="champion", **where)
    n_seeds = sum(r.seed != "mean" for r in rows)
    mean = next((r for r in rows if r.seed == "mean" and r.ci_low is not None), None)
    spread = seed_spread(table, place)
    if spread is None or mean is None or mean.ci_high is None:
        return ""
    half = (mean.ci_high - mean.ci_low) / 2
    return (
        f"{place_name(place)} SD {number(spread)} over {n_seeds} seeds, beside "
        f"±{number(half)} for the questions"
    )


def _layers(sweep: Mapping[str, Any]) -> str:
    """Say what the sweep found, in a sentence."""
    means = {
        layer: sum(known) / len(known)
        for layer, seeds in zip(sweep["layers"], sweep["auroc"], strict=True)
        if (known := [x for x in seeds if x is not None])
    }
    best, first, last = sweep["best"], min(means), max(means)
    told = ", ".join(f"{layer}: {number(v)}" for layer, v in means.items())
    return (
        f"Which layer? {best} of {first} to {last} has the best validation AUROC "
        f"({told})."
    )


def remarks(
    rows: Sequence[ResultRow],
    accuracy: Sequence[Mapping[str, Any]],
    sweep: Mapping[str, Mapping[str, Any]],
    selection: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Return, by setting, sentences on what yes and no do not answer.

    What the search added, which layer is best, how far the seeds are apart; and first,
    where the answers are too few, that nothing can be concluded.

    Args:
      rows: result rows.
      accuracy: see `findings`.
      sweep: as the report has it.
      selection: likewise.
    """
    champion = [r for r in rows if r.detector == "champion"]
    champion = [
        r for r in champion if r.experiment == "detection" and r.split in _SPLITS
    ]
    told = {setting: [f"{why}."] for setting, why in too_few_answers(accuracy).items()}
    for setting, found in selection.items():
        path = " → ".join(
            f"{r['added']} {number(r['auroc'])}"
            for r in found["rounds"]
            if r["added"] is not None
        )
        told.setdefault(setting, []).append(
            f"What did the search add, in validation AUROC? {path}."
        )
    for setting, found in sweep.items():
        told.setdefault(setting, []).append(_layers(found))
    for setting in told:
        places = places_of([r for r in champion if r.setting == setting], _SPLITS)
        spreads = [one for p in places if (one := _seeds(ResultTable(champion), p))]
        if spreads:
            told[setting].append(f"How far apart are the seeds? {'; '.join(spreads)}.")
    return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The answers of one setting: a line for each question, a column for each set."""

    setting: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Finding, ...]], ...]


def grids(answered: Sequence[Finding]) -> list[Grid]:
    """Lay findings out, one grid a setting.

    What was not measured on any set has no line: a layer that is the last one kept
    cannot be compared with it.
    """
    made, wordings = [], questions_of(None)
    for setting in dict.fromkeys(f.place[0] for f in answered):
        own = {(f.question, f.place): f for f in answered if f.place[0] == setting}
        places = tuple(dict.fromkeys(place for _, place in own))
        lines = tuple(
            (question.text, tuple(own[name, place] for place in places))
            for name, question in wordings.items()
            if any(own[name, place].row for place in places)
        )
        heads = tuple(map(place_name, places))
        made.append(Grid(setting=setting, heads=heads, lines=lines))
    return made


def sentences(answered: Sequence[Finding]) -> dict[str, list[str]]:
    """Return, by setting, each question with its answers on all sets as a sentence."""
    told: dict[str, list[str]] = {}
    for grid in grids(answered):
        told[grid.setting] = []
        for text, own in grid.lines:
            parts = (
                f"{place_name(f.place)} {f.answer or 'not measured'}, {measured(f)}"
                for f in own
            )
            told[grid.setting].append(f"{text} {'; '.join(parts)}.")
    return told


def as_markdown(answered: Sequence[Finding], told: Mapping[str, Sequence[str]]) -> str:
    """Spell the answers as Markdown: a table for each setting, its remarks below.

    Args:
      answered: of a run.
      told: see `remarks`.
    """
    parts = []
    for grid in grids(answered):
        lines = [f"### {SETTING_LABELS[grid.setting]}", ""]
        lines += ["| | " + " | ".join(grid.heads) + " |"]
        lines += ["|---" * (len(grid.heads) + 1) + "|"]
        for text, own in grid.lines:
            cells = (f"**{f.answer}** {measured(f)}" if f.answer else "–" for f in own)
            lines.append(f"| {text} | " + " | ".join(cells) + " |")
        lines += ["", *(f"* {sentence}" for sentence in told.get(grid.setting, ()))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


_TEX = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "–": "--"}
_TEX |= {"−": "$-$", "±": r"$\pm$", "→": r"$\to$", "†": r"$^\dagger$"}


def tex(text: str) -> str:
    """Return a text with what LaTeX reads as commands escaped."""
    return "".join(_TEX.get(letter, letter) for letter in text)


def as_latex(answered: Sequence[Finding]) -> str:
    """Spell the answers as LaTeX tables (booktabs), one a setting."""
    parts = []
    for grid in grids(answered):
        columns = "l" + "l" * len(grid.heads)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [" & ".join((SETTING_LABELS[grid.setting], *map(tex, grid.heads)))]
        lines[-1] += r" \\"
        lines.append(r"\midrule")
        for text, own in grid.lines:
            cells = (f"{f.answer}: {measured(f)}" if f.answer else "–" for f in own)
            lines.append(" & ".join(map(tex, (text, *cells))) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n")
    return "\n".join(parts)

"""What a run shows in plain words: the first lines of the page and of the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas

from beatrice.benchmarks.results.names import (
    CHAMPION,
    PERPLEXITY,
    RIVALS,
    SETTING_LABELS,
)
from beatrice.benchmarks.results.tables import (
    excludes_zero,
    find,
    interval,
    number,
    of_rival,
    of_subject,
    row_value,
    where,
)
from beatrice.extract.label.labels import ENOUGH, class_counts
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import MACRO, Subject
from beatrice.pgir.controllers import CONTROLLERS

SETTINGS_IN_WORDS = {"closed_book": "from memory", "with_context": "with passages"}
_TEST = {"dataset": IN_DOMAIN, "split": "test", "metric": "auroc", "seed": "mean"}


def _against(gain: Any) -> str:
    """Say in a word how perplexity compares, by the paired interval."""
    if gain is None or gain.value is None:
        return ""
    if not excludes_zero(gain):
        return " (no clear difference)"
    return " (worse)" if gain.value > 0 else " (better)"


def _ranking_in_words(results: pandas.DataFrame) -> str:
    """Say how often a right answer scores above a wrong one, and by perplexity."""
    ours, theirs = [], []
    for setting, words in SETTINGS_IN_WORDS.items():
        at = {"setting": setting, **_TEST}
        row = find(results, experiment="detection", **of_subject(CHAMPION), **at)
        rival = find(results, experiment="detection", **of_subject(PERPLEXITY), **at)
        if row is None or row.value is None:
            continue
        ours.append(f"{100 * row.value:.0f} of 100 pairs {words}")
        if rival is not None and rival.value is not None:
            gain = find(results, experiment="paired", **of_rival(PERPLEXITY), **at)
            theirs.append(f"{100 * rival.value:.0f}{_against(gain)}")
    if not ours:
        return ""
    text = f"A right answer scores above a wrong one in {' and in '.join(ours)}"
    if theirs:
        text += f"; by the model's own perplexity in {' and in '.join(theirs)}"
    return f"{text}."


def _trust_in_words(shown: Sequence[Mapping[str, Any]]) -> str:
    """Say which share of the test answers is trusted, and how often rightly."""
    parts = []
    for setting, words in SETTINGS_IN_WORDS.items():
        n: Counter[str] = Counter()
        is_certified = True
        for place in shown:
            if (place["setting"], place["split"]) == (setting, "test"):
                n.update({kind["name"]: kind["n"] for kind in place["kinds"]})
                is_certified &= place.get("is_certified", True)
        if not n.total():
            continue
        right, all_right = n["right and trusted"], n["right and distrusted"]
        n_trusted = right + n["wrong and missed"]
        part = f"{100 * n_trusted / n.total():.0f} % of the answers {words}"
        if not is_certified:
            part = f"none of the answers {words}, where no P holds the wanted precision"
        elif n_trusted:
            part += f", right in {100 * right / n_trusted:.0f} %"
        every = 100 * (right + all_right) / n.total()
        parts.append(f"{part} (all answers: {every:.0f} %)")
    return f"beatrice trusts {' and '.join(parts)}." if parts else ""


def headline(
    results: pandas.DataFrame, shown: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return two sentences: how well answers are told apart, and what is trusted.

    Args:
      results: see `tables.results_of`.
      shown: answers to look at, as `benchmarks.results.report.ShownSet` has them.
    """
    return list(filter(None, (_ranking_in_words(results), _trust_in_words(shown))))


def too_few_in_words(accuracy: Sequence[Mapping[str, Any]]) -> str:
    """Say where training answers are too few to conclude anything; else nothing.

    Args:
      accuracy: as `extract.label.labels.count_correct` gives it.
    """
    original = class_counts(row for row in accuracy if row["variant"] == "original")
    few = [
        f"{n_correct} right and {n - n_correct} wrong {SETTINGS_IN_WORDS[setting]}"
        for (setting, split), (n, n_correct) in original.items()
        if split == "train" and min(n_correct, n - n_correct) < ENOUGH
    ]
    if not few:
        return ""
    return (
        f"Nothing can be concluded from so few training answers: {', '.join(few)}; "
        f"{ENOUGH} of each are needed."
    )


def _gain(results: pandas.DataFrame, rival: Subject, title: str, **columns: Any) -> str:
    """Format how much more there is than a rival has; empty if not measured."""
    row = find(results, **of_rival(rival), **columns)
    if row is None or row.value is None:
        return ""
    return f"{row_value(row)} [{interval(row)}] against {title[0].lower()}{title[1:]}"


def numbers(
    results: pandas.DataFrame, reliability: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Pick the numbers to see first: label, value and detail of each."""
    shown = []
    for setting, words in SETTINGS_IN_WORDS.items():
        at = {"setting": setting, **_TEST}
        row = find(results, experiment="detection", **of_subject(CHAMPION), **at)
        label = f"AUROC {words}"
        if row is not None and row.value is None:
            shown.append((label, "–", str(row.reason)))
        elif row is not None:
            at["experiment"] = "paired"
            gain = _gain(results, PERPLEXITY, RIVALS[PERPLEXITY], **at)
            detail = (f"{interval(row)}", gain, f"{row.n} answers")
            shown.append((label, row_value(row), "; ".join(filter(None, detail))))
    for setting, curves in reliability.items():
        label = f"Calibration error {SETTINGS_IN_WORDS[setting]}"
        shown.append((label, number(curves["ece_calibrated"]), _calibrated(curves)))
    pgir = {"experiment": "controller_macro", "detector": "pgir", "dataset": MACRO}
    em, cost = (find(results, metric=m, **pgir) for m in ("em", "generations"))
    if em is not None and cost is not None:
        at = {"experiment": "controller_paired", "dataset": MACRO, "metric": "em"}
        once = "vanilla_rag"
        gain = _gain(results, Subject(once), CONTROLLERS[once], **at)
        detail = (gain, f"{row_value(cost)} generations per question")
        label = "Exact match, PGIR, mean of the sets"
        shown.append((label, row_value(em), "; ".join(filter(None, detail))))
    return shown


def is_worse(curves: Mapping[str, Any]) -> bool:
    """Whether calibration made the calibration error larger, on the test answers."""
    return curves["ece_calibrated"] > curves["ece_raw"]


def _calibrated(curves: Mapping[str, Any]) -> str:
    raw = number(curves["ece_raw"])
    if is_worse(curves):
        return f"worse than the {raw} before calibration: here P ranks, but means less"
    return f"{raw} before calibration"


def times_in_words(seconds: Mapping[str, float]) -> str:
    """Say what each stage took."""
    total = f"{sum(seconds.values()):,.0f} s in all"
    return ", ".join([*(f"{x} {n:,.0f} s" for x, n in seconds.items()), total])


def folds_in_words(
    results: pandas.DataFrame,
    facts: Mapping[str, str],
    selection: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Say of what the page folds, in a few words, what stands there."""
    chosen = (
        f"{SETTING_LABELS[setting]} {' '.join(search['selected'])}"
        for setting, search in selection.items()
    )
    macro = where(results, experiment="controller_macro", metric="em", seed="mean")
    em = {row.detector: row for row in macro["row"] if row.value is not None}
    names = [x for x in ("pgir", "vanilla_rag", "no_rag") if x in em]
    shown = ", ".join(f"{CONTROLLERS[x]} {row_value(em[x])}" for x in names)
    run = [facts[name] for name in ("Backbone", "Questions") if name in facts]
    return {
        "selection": "; ".join(chosen),
        "controller": f"Exact match: {shown}" if shown else "",
        "run": "; ".join(run),
    }

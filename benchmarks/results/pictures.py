"""The figures of a run's report, each with its title and caption."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from beatrice.benchmarks.results import figures
from beatrice.benchmarks.results.names import METRIC_LABELS, SETTING_LABELS
from beatrice.benchmarks.results.tables import controller_rows, macro_row, number
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, ResultTable
from beatrice.pgir.controllers import CONTROLLERS

PerSetting = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on the page, with the words around it."""

    title: str
    svg: Markup
    caption: str


def picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """Wrap a figure; its SVG is ours, so it goes in unescaped."""
    svg = Markup(figures.to_svg(figure, name, f"{title}. {caption}"))
    return Picture(title=title, svg=svg, caption=caption)


def reliability_pictures(reliability: PerSetting) -> list[Picture]:
    """One reliability plot per setting."""
    return [
        picture(
            figures.reliability(found["raw"], found["calibrated"], setting),
            f"reliability-{setting}",
            SETTING_LABELS[setting],
            f"Brier {number(found['brier_raw'])} raw, "
            f"{number(found['brier_calibrated'])} calibrated; calibration error (ECE) "
            f"{number(found['ece_raw'])} raw, {number(found['ece_calibrated'])} "
            "calibrated. Dashed: perfect calibration. Below: answers per bin.",
        )
        for setting, found in reliability.items()
    ]


def sweep_pictures(sweep: PerSetting) -> list[Picture]:
    """One picture of both settings."""
    if not sweep:
        return []
    caption = "Pale points are seeds, the line is their mean, the ring the best layer."
    for setting, found in sweep.items():
        caption += (
            f" {SETTING_LABELS[setting]}: {found['n_train']:,} training and "
            f"{found['n_validation']:,} validation answers."
        )
    figure = figures.layer_sweep(sweep)
    return [picture(figure, "sweep", "Hidden states, layer by layer", caption)]


def _encoder_rows(rows: Sequence[ResultRow], setting: str) -> dict[str, ResultRow]:
    """Validation AUROC rows of one setting's encoders, by the encoder's letters.

    Over all in-domain sets together, on which encoders are also selected.
    """
    found = ResultTable(rows).select(
        experiment="detection",
        setting=setting,
        dataset=IN_DOMAIN,
        split="validation",
        metric="auroc",
        seed="mean",
    )
    prefix = "encoder:"
    return {
        row.detector.removeprefix(prefix): row
        for row in found
        if row.detector.startswith(prefix)
    }


def synergy_pictures(rows: Sequence[ResultRow]) -> list[Picture]:
    """One picture per setting from the validation rows of the single encoders."""
    pictures = []
    for setting in ("closed_book", "with_context"):
        found = _encoder_rows(rows, setting)
        auroc = {n: row.value for n, row in found.items() if row.value is not None}
        if not auroc:
            continue
        caption = (
            "Dots: the families an encoder reads; full colour: hidden states are one. "
            "The axis is cropped."
        )
        have_ci = [row for row in found.values() if row.ci_low is not None]
        if have_ci:
            halves = sorted((row.ci_high - row.ci_low) / 2 for row in have_ci)
            half = number(halves[len(halves) // 2])
            caption += f" The 95 % interval of one bar is about ±{half}."
        for name, row in found.items():
            if row.value is None:
                caption += f" {name} is undefined: {row.reason}."
        figure = figures.synergy(auroc, setting)
        title = SETTING_LABELS[setting]
        pictures.append(picture(figure, f"synergy-{setting}", title, caption))
    return pictures


def selection_pictures(selection: PerSetting) -> list[Picture]:
    """One picture of the greedy search per setting."""
    return [
        picture(
            figures.selection_path(found["rounds"], setting),
            f"selection-{setting}",
            SETTING_LABELS[setting],
            f"Selected: {', '.join(found['selected'])}. Stopped: {found['stop']}.",
        )
        for setting, found in selection.items()
        if found["rounds"]
    ]


def frontier_curve(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, float]], list[str]]:
    """Average the controller's frontier over its datasets, budget by budget.

    Returns:
      One `{budget, generations, em, f1}` per budget, and the datasets averaged over.

    Raises:
      ValueError: a budget lacks a dataset, so that its mean would be of other data.
    """
    datasets = list(dict.fromkeys(entry["dataset"] for entry in entries))
    curve = []
    for budget in sorted({entry["budget"] for entry in entries}):
        here = [entry for entry in entries if entry["budget"] == budget]
        if sorted(e["dataset"] for e in here) != sorted(datasets):
            raise ValueError(
                f"the frontier at budget {budget} has {len(here)} entries, expected "
                f"one for each of {', '.join(datasets)}"
            )
        means = {
            name: sum(entry[name] for entry in here) / len(here)
            for name in ("generations", "em", "f1")
        }
        curve.append({"budget": budget, **means})
    return curve, datasets


def frontier_pictures(
    control: Mapping[str, Any], rows: Sequence[ResultRow]
) -> list[Picture]:
    """EM and F1 against generations per question."""
    if not control.get("frontier"):
        return []
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for entry in control["frontier"]:
        by_name.setdefault(entry["controller"], []).append(entry)
    curves = {}
    for name, entries in by_name.items():
        curves[CONTROLLERS.get(name, name)], datasets = frontier_curve(entries)
    table = controller_rows(rows)
    pictures = []
    for metric in ("em", "f1"):
        rivals = {}
        for name in dict.fromkeys(row.detector for row in table.rows):
            if name in by_name or name not in CONTROLLERS:
                continue
            score = macro_row(table, name, metric, datasets)
            cost = macro_row(table, name, "generations", datasets)
            if score and cost and None not in (score.value, cost.value):
                rivals[CONTROLLERS[name]] = (cost.value, score.value)
        figure = figures.frontier(curves, rivals, metric, control["budget"])
        caption = f"Mean over {', '.join(datasets)}. The ring marks the chosen budget."
        title = f"{METRIC_LABELS[metric]} against cost"
        pictures.append(picture(figure, f"frontier-{metric}", title, caption))
    return pictures


def ranking_pictures(ranked: PerSetting) -> list[Picture]:
    """One picture per setting."""
    return [
        picture(
            figures.ranking(found, setting),
            f"ranking-{setting}",
            SETTING_LABELS[setting],
            f"{found['n_sets']:,} sets of three, best to worst. Greedy's "
            f"{' '.join(found['greedy'])} is number {found['rank']:,} (dashed), "
            f"{found['gap']:.4f} AUROC below the best, "
            f"{' '.join(found['best'])}. Ribbons: how many of the three read a family, "
            "with context in orange, closed-book in blue.",
        )
        for setting, found in ranked.items()
    ]

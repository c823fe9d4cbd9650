"""The figures of the page, each with its title and caption."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas

from beatrice.benchmarks.results import figures
from beatrice.benchmarks.results.figures import Picture, picture
from beatrice.benchmarks.results.headline import is_worse
from beatrice.benchmarks.results.names import METRIC_LABELS, SETTING_LABELS
from beatrice.benchmarks.results.tables import number, where
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import MACRO
from beatrice.pgir.controllers import CONTROLLERS

PerSetting = Mapping[str, Mapping[str, Any]]


def reliability_pictures(reliability: PerSetting) -> list[Picture]:
    """One reliability plot per setting."""
    return [
        picture(
            figures.reliability(curves["raw"], curves["calibrated"], setting),
            f"reliability-{setting}",
            SETTING_LABELS[setting],
            f"Brier {number(curves['brier_raw'])} raw, "
            f"{number(curves['brier_calibrated'])} calibrated; calibration error (ECE) "
            f"{number(curves['ece_raw'])} raw, {number(curves['ece_calibrated'])} "
            "calibrated"
            + (", which made it worse on these answers" if is_worse(curves) else "")
            + ". Dashed: perfect calibration. Below: answers "
            "per bin.",
        )
        for setting, curves in reliability.items()
    ]


def sweep_pictures(sweep: PerSetting) -> list[Picture]:
    """One picture of both settings."""
    if not sweep:
        return []
    caption = "Pale points are seeds, the line is their mean, the ring the best layer."
    for setting, layers in sweep.items():
        caption += (
            f" {SETTING_LABELS[setting]}: {layers['n_train']:,} training and "
            f"{layers['n_validation']:,} validation answers."
        )
    figure = figures.layer_sweep(sweep)
    return [picture(figure, "sweep", "Hidden states, layer by layer", caption)]


def synergy_pictures(results: pandas.DataFrame) -> list[Picture]:
    """One picture per setting from the validation rows of the single encoders.

    Over all in-domain sets together, on which encoders are also selected.
    """
    at = {"experiment": "detection", "detector": "encoder", "metric": "auroc"}
    at |= {"dataset": IN_DOMAIN, "split": "validation", "seed": "mean"}
    pictures = []
    for setting in SETTINGS:
        rows = where(results, setting=setting, **at)["row"].tolist()
        auroc = {str(r.families): r.value for r in rows if r.value is not None}
        if not auroc:
            continue
        caption = (
            "Dots: the families an encoder reads; full colour: hidden states are one. "
            "The axis is cropped."
        )
        ends = [(r.ci_low, r.ci_high) for r in rows if r.ci_low is not None]
        if ends:
            halves = sorted((high - low) / 2 for low, high in ends)
            half = number(halves[len(halves) // 2])
            caption += f" The 95 % interval of one bar is about ±{half}."
        for row in rows:
            if row.value is None:
                caption += f" {row.families} is undefined: {row.reason}."
        figure, title = figures.synergy(auroc, setting), SETTING_LABELS[setting]
        pictures.append(picture(figure, f"synergy-{setting}", title, caption))
    return pictures


def selection_pictures(selection: PerSetting) -> list[Picture]:
    """One picture of the greedy search per setting."""
    return [
        picture(
            figures.selection_path(search["rounds"], setting),
            f"selection-{setting}",
            SETTING_LABELS[setting],
            f"Selected: {', '.join(search['selected'])}. Stopped: {search['stop']}.",
        )
        for setting, search in selection.items()
        if search["rounds"]
    ]


def frontier_curve(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, float]], list[str]]:
    """Average the controller's frontier over its datasets, budget by budget.

    Returns:
      One `{budget, generations, em, f1}` per budget, and the datasets averaged over.
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
    control: Mapping[str, Any], results: pandas.DataFrame
) -> list[Picture]:
    """EM and F1 against generations per question."""
    if not control.get("frontier"):
        return []
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for entry in control["frontier"]:
        by_name.setdefault(entry["controller"], []).append(entry)
    curves, datasets = {}, []
    for name, entries in by_name.items():
        curves[CONTROLLERS.get(name, name)], datasets = frontier_curve(entries)
    means = where(results, experiment="controller_macro", dataset=MACRO, seed="mean")
    values = {(row.detector, row.metric): row.value for row in means["row"]}
    rivals = [name for name in CONTROLLERS if name not in by_name]
    pictures = []
    for metric in ("em", "f1"):
        points = {
            CONTROLLERS[x]: (values[x, "generations"], values[x, metric])
            for x in rivals
            if None not in (values.get((x, "generations")), values.get((x, metric)))
        }
        figure = figures.frontier(curves, points, metric, control["budget"])
        caption = f"Mean over {', '.join(datasets)}. The ring marks the chosen budget."
        title = f"{METRIC_LABELS[metric]} against cost"
        pictures.append(picture(figure, f"frontier-{metric}", title, caption))
    return pictures


def ranking_pictures(ranked: PerSetting) -> list[Picture]:
    """One picture per setting."""
    return [
        picture(
            figures.ranking(ranking, setting),
            f"ranking-{setting}",
            SETTING_LABELS[setting],
            f"{ranking['n_sets']:,} sets of three, best to worst. Greedy's "
            f"{' '.join(ranking['greedy'])} is number {ranking['rank']:,} (dashed), "
            f"{ranking['gap']:.4f} AUROC below the best, "
            f"{' '.join(ranking['best'])}. Ribbons: how many of the three read a "
            "family, with context in orange, closed-book in blue.",
        )
        for setting, ranking in ranked.items()
    ]

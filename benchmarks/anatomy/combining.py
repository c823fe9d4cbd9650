"""What combining is worth, on the page: pairs, fusion, all sets, another backbone."""

import statistics
from collections.abc import Sequence

import numpy as np

from beatrice.benchmarks.anatomy import figures
from beatrice.benchmarks.anatomy.rows import (
    FAMILIES,
    Part,
    cell,
    distinct_sets,
    in_setting,
    known,
    over_the_better,
    own,
    part_of,
    places_in,
    settings_in,
    spelled,
    table_of,
    test_rows,
)
from beatrice.benchmarks.results.names import DETECTORS, SETTING_LABELS, SPLIT_LABELS
from beatrice.benchmarks.results.pictures import Picture, picture
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable

METRIC = f"auroc{DIFFERENCE}"
VARIANTS = {
    "hidden_only": DETECTORS["hidden_only"],
    "without_hidden": "Search without hidden states",
    "early_fusion": DETECTORS["early_fusion"],
    "late_fusion_singles": DETECTORS["late_fusion_singles"],
    "late_fusion_all": DETECTORS["late_fusion_all"],
    "without_closed_book": DETECTORS["without_closed_book"],
}


def _pair_name(row: ResultRow) -> str:
    letters = row.detector.removeprefix("encoder:")
    return " + ".join(figures.FAMILIES[x] for x in letters)


def pairs_part(rows: Sequence[ResultRow]) -> Part | None:
    """Which pairs of families are worth more together."""
    gains: dict[str, dict[str, list[float]]] = {}
    every: dict[str, list[ResultRow]] = {}
    for experiment, prefix in (("pairs", ""), ("other_pairs", "other:")):
        for row in distinct_sets(over_the_better(own(rows, experiment))):
            kind, name = f"{prefix}{row.setting}", _pair_name(row)
            gains.setdefault(name, {}).setdefault(kind, []).append(row.value or 0.0)
            every.setdefault(name, []).append(row)
    if not gains:
        return None
    kinds = dict.fromkeys(kind for named in gains.values() for kind in named)
    gains = {n: {kind: g.get(kind, []) for kind in kinds} for n, g in gains.items()}
    medians = {
        n: statistics.median(r.value or 0.0 for r in e) for n, e in every.items()
    }
    best = max(medians, key=lambda name: medians[name])
    n_sure = sum(bool(known(r) and r.ci_low > 0) for r in every[best])
    n_positive = sum((r.value or 0.0) > 0 for r in every[best])
    largest = max(every[best], key=lambda r: r.value or 0.0)
    found = [
        f"The pair with the largest median gain over its better member is {best}: "
        f"{100 * medians[best]:+.1f} AUROC points, above zero on {n_positive} of "
        f"{len(every[best])} sets and settings, with an interval above zero on "
        f"{n_sure}; at most {spelled(largest)} ({in_setting(largest.setting)}, "
        f"{largest.dataset}, {SPLIT_LABELS[largest.split]})."
    ]
    own_hidden = [r.value or 0.0 for n, e in every.items() if "hidden" in n for r in e]
    found.append(
        "Pairs that read hidden states gain "
        f"{100 * statistics.median(own_hidden):+.1f} points in the median of "
        f"{len(own_hidden)} comparisons."
    )
    caption = (
        "A point is a test or held-out set; to the right of zero an encoder of both "
        "ranks answers better than either alone. Nothing corrects for the number of "
        "comparisons."
    )
    drawn = picture(
        figures.pair_gains(gains), "pairs", "Two families early-fused", caption
    )
    return part_of(
        "Which pairs of families are worth more together",
        "Points to the right of zero; that the better of two is chosen on the same "
        "answers makes gains look smaller by a little.",
        found,
        [drawn],
    )


def fusion_part(rows: Sequence[ResultRow]) -> Part | None:
    """What the selected set has more than the other ways of fusing."""
    table, found, tables = own(rows, "fusion"), [], []
    for setting in settings_in(table):
        here = ResultTable(table.select(setting=setting))
        where = places_in(here)
        names = [n for n in VARIANTS if here.select(against=n)]
        lines = [
            (
                VARIANTS[n],
                [
                    cell(here.find(against=n, dataset=d, split=s, metric=METRIC))
                    for d, s in where
                ],
            )
            for n in names
        ]
        label = SETTING_LABELS[setting]
        columns = [(label, dataset, SPLIT_LABELS[split]) for dataset, split in where]
        heading = f"{label}: AUROC of the selected set minus the variant's"
        tables.append((heading, table_of("Variant", columns, lines)))
        on_test = [test_rows(here, setting).find(against=n) for n in names]
        told = ", ".join(
            f"{VARIANTS[n]} {spelled(row)}"
            for n, row in zip(names, on_test, strict=True)
            if row is not None
        )
        found.append(f"{label} on test the selected set is ahead by: {told}.")
    return part_of(
        "Features and fusion, variant by variant",
        "Whether an interval excludes zero (†): a larger number alone says little.",
        found,
        (),
        tables,
    )


def combinations_part(rows: Sequence[ResultRow]) -> Part | None:
    """What the best sets of three hold."""
    table, found, pictures = own(rows, "combinations"), [], []
    for setting in settings_in(table):
        here = ResultTable(table.select(setting=setting))
        counts = {
            k: here.find(detector=f"{k} closed-book", metric="best sets")
            for k in range(4)
        }
        held = ", ".join(
            f"{row.value:.0f} hold {k}"
            for k, row in counts.items()
            if row is not None and row.value
        )
        most = _most_carried(here)
        text = f"{in_setting(setting)} {most}" if most else ""
        if held:
            text += f" Of the ten best sets, in closed-book encoders: {held}."
            pictures += _count_figure(here, setting)
        if text:
            found.append(text)
    return part_of(
        "What the best sets of three encoders hold",
        "Of the ranking of all sets by validation AUROC: what the ten best carry more "
        "of than sets at large, and whether closed-book encoders gather at the top.",
        found,
        pictures,
    )


def _most_carried(table: ResultTable) -> str:
    """Say which family of which pass the best sets hold the most above all sets."""
    ratios: dict[str, tuple[float, float]] = {}
    for row in table.select(metric="encoders in a best set"):
        whole = table.find(detector=row.detector, metric="encoders in a set")
        if row.value is not None and whole is not None and whole.value:
            ratios[row.detector] = row.value, whole.value
    if not ratios:
        return ""
    name = max(ratios, key=lambda n: ratios[n][0] - ratios[n][1])
    letter, own_pass = name.split(":")
    best, every = ratios[name]
    where = SETTING_LABELS[own_pass].lower()
    return (
        f"the ten best sets carry {FAMILIES[letter]} ({where}) in {best:.1f} of their "
        f"three encoders, sets at large in {every:.1f}."
    )


def _count_figure(table: ResultTable, setting: str) -> list[Picture]:
    shares = []
    for k in range(4):
        own_rows = [
            row
            for row in table.select(detector=f"{k} closed-book")
            if row.metric.startswith("share in part ")
        ]
        own_rows.sort(key=lambda row: int(row.metric.rsplit(" ", 1)[1]))
        shares.append([row.value or 0.0 for row in own_rows])
    figure = figures.closed_book_counts(np.array(shares))
    caption = (
        "Sets of three from best to worst by validation AUROC; the wedges are how many "
        "of the three read the closed-book pass."
    )
    title = f"{SETTING_LABELS[setting]}: closed-book encoders along the ranking"
    return [picture(figure, f"counts-{setting}", title, caption)]


def backbones_part(rows: Sequence[ResultRow]) -> Part | None:
    """Whether the same combinations win on another backbone."""
    table, found = own(rows, "backbones"), []
    points: dict[str, list[tuple[str, float, float]]] = {}
    names = ("this backbone", "the other")
    for setting in [s for s in SETTINGS if s in settings_in(table)]:
        here = test_rows(table, setting)
        for row in here.select(metric="spearman"):
            first, second = row.detector.split(" | ")
            names = first, second
            found.append(
                f"{in_setting(setting)} Spearman's correlation of the fifteen "
                f"encoders' test AUROC between {first} and {second} is {spelled(row)} "
                "(the paper, between its two, .78 closed-book and .79 with context)."
            )
        for row in here.select(metric="auroc"):
            which, letters = row.detector.split(" ")
            beside = here.find(detector=f"second {letters}", metric="auroc")
            if which == "first" and row.value is not None and beside is not None:
                if beside.value is not None:
                    point = letters, row.value, beside.value
                    points.setdefault(setting, []).append(point)
    if not points:
        return None
    figure = figures.two_backbones(points, names)
    caption = "A point is an encoder of a subset of the families, mean over seeds."
    drawn = picture(figure, "backbones", "The same combinations?", caption)
    return part_of(
        "Whether the same combinations win on another backbone",
        "Points that rise from left to right: the ranking belongs to the families, not "
        "to one model.",
        found,
        [drawn],
    )

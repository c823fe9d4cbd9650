"""How far it carries, on the page: how much data it takes, other sets, cases."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from beatrice.benchmarks.anatomy import figures
from beatrice.benchmarks.anatomy.rows import (
    EVERY,
    FAMILIES,
    Part,
    in_setting,
    known,
    own,
    part_of,
    settings_in,
    spelled,
    test_rows,
)
from beatrice.benchmarks.results.names import SETTING_LABELS
from beatrice.benchmarks.results.pictures import Picture, picture
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, ResultTable

CURVES = {
    **{f"encoder:{x}": name for x, name in FAMILIES.items()},
    "selected": "selected encoders",
    f"encoder:{EVERY}": "encoder of all four",
    f"probe:{EVERY}": "regression on all four",
}
# What has been trained on everything, under the names of the detection rows.
WHOLE = {
    **{f"encoder:{x}": f"encoder:{x}" for x in FAMILIES},
    "selected": "champion",
    f"encoder:{EVERY}": "early_fusion",
    f"probe:{EVERY}": f"probe:{EVERY}",
}


def _curves(
    table: ResultTable, detection: ResultTable
) -> dict[str, list[tuple[float, ResultRow]]]:
    """Return the rows of every reader by number of labels, all labels last."""
    found: dict[str, list[tuple[float, ResultRow]]] = collections.defaultdict(list)
    for row in table.select(metric="auroc"):
        name, _, n = row.detector.partition(" at ")
        if name in CURVES and row.value is not None:
            found[name].append((float(n), row))
    n_all = table.find(metric="labels")
    for name, of in WHOLE.items():
        row = detection.find(detector=of)
        if name == "selected":  # of this pass alone, as those of fewer labels are
            row = detection.find(detector="without_closed_book") or row
        if name in found and row is not None and row.value is not None:
            if n_all is not None and n_all.value:
                found[name].append((n_all.value, row))
    return {name: found[name] for name in CURVES if name in found}


def labels_part(rows: Sequence[ResultRow]) -> Part | None:
    """How much data it takes."""
    table, found, pictures = own(rows, "labels"), [], []
    for setting in settings_in(table):
        where = {"setting": setting, "dataset": IN_DOMAIN, "split": "test"}
        where |= {"experiment": "detection", "metric": "auroc", "seed": "mean"}
        detection = ResultTable(ResultTable(rows).select(**where))
        curves = _curves(test_rows(table, setting), detection)
        if not curves:
            continue
        found += [
            sentence
            for name in ("selected", f"probe:{EVERY}")
            if name in curves and (sentence := _enough(setting, name, curves[name]))
        ]
        points = {
            CURVES[name]: [(n, row.value or 0.0) for n, row in own_rows]
            for name, own_rows in curves.items()
        }
        caption = (
            "Of n labels a fifth stops the training or chooses the penalty. Encoders: "
            "one seed and one drawing, three sizes; rightmost, all labels of the run "
            "with all its seeds, and the selected encoders under their head."
        )
        figure = figures.learning_curves(points, setting)
        title = SETTING_LABELS[setting]
        pictures.append(picture(figure, f"labels-{setting}", title, caption))
    return part_of(
        "How much data it takes",
        "Where the curves begin to flatten, and whether encoders need more labels than "
        "logistic regression on the same signals.",
        found,
        pictures,
    )


def _enough(
    setting: str, name: str, points: Sequence[tuple[float, ResultRow]]
) -> str | None:
    """Say from how many labels on the interval covers what all labels give."""
    (n_first, first), (n_all, whole) = points[0], points[-1]
    if not known(first) or whole.value is None or n_first == n_all:
        return None
    reached = next(
        (n for n, row in points[:-1] if known(row) and row.ci_high >= whole.value), None
    )
    end = (
        f"from {reached:,.0f} on the interval covers that"
        if reached is not None
        else "no smaller number comes near enough for its interval to cover that"
    )
    return (
        f"{in_setting(setting)}, {CURVES[name]}: {spelled(first)} with {n_first:,.0f} "
        f"labelled answers, {spelled(whole)} with all {n_all:,.0f}; {end}."
    )


def transfer_part(rows: Sequence[ResultRow]) -> Part | None:
    """What one question set teaches about another."""
    table, found, pictures = own(rows, "transfer"), [], []
    for setting in settings_in(table):
        here = ResultTable(table.select(setting=setting, metric="auroc"))
        for reader in (f"encoder:{EVERY}", f"probe:{EVERY}"):
            drawn, sentence = _matrix(here, setting, reader)
            pictures += drawn
            found += [sentence] if sentence else []
    return part_of(
        "What one question set teaches about another",
        "Rows that stay as dark as the diagonal carry over. Every detector had as many "
        "labels as every other; held-out sets teach with half of their questions and "
        "are read on the other.",
        found,
        pictures,
    )


def _matrix(
    table: ResultTable, setting: str, reader: str
) -> tuple[list[Picture], str | None]:
    """Return a reader's matrix and what it says."""
    cells = {
        (row.detector.partition(" from ")[2], row.dataset): row
        for row in table.rows
        if row.detector.startswith(f"{reader} from ")
    }
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    if len(sources) < 2:
        return [], None
    targets = [s for s in sources if s in targets]
    targets += [t for _, t in cells if t not in targets]
    targets = list(dict.fromkeys(targets))
    values = np.full((len(sources), len(targets)), np.nan)
    for (source, target), row in cells.items():
        if row.value is not None:
            values[sources.index(source), targets.index(target)] = row.value
    title = f"{SETTING_LABELS[setting]}, {CURVES[reader]}"
    figure = figures.matrix(values, sources, targets, setting)
    name = f"transfer-{setting}-{reader.split(':')[0]}"
    drawn = picture(figure, name, title, "A dash is undefined: one class only.")
    others = {
        pair: row
        for pair, row in cells.items()
        if pair[0] != pair[1] and known(row) and known(cells.get((pair[1], pair[1])))
    }
    if not others:
        return [drawn], None
    lost = {
        pair: row.value - cells[pair[1], pair[1]].value for pair, row in others.items()
    }
    worst = min(lost, key=lambda pair: lost[pair])
    mean = sum(lost.values()) / len(lost)
    return [drawn], (
        f"{title}: taught by another set, AUROC is {mean:+.3f} from what the set's own "
        f"answers teach, on average over {len(lost)} pairs; the worst is {worst[1]} "
        f"taught by {worst[0]}, {spelled(others[worst])} instead of "
        f"{spelled(cells[worst[1], worst[1]])}."
    )


def cases_part(rows: Sequence[ResultRow], cases: Sequence[Mapping]) -> Part | None:
    """Two passes, two decisions, of every set."""
    table, found = own(rows, "cases", dataset=IN_DOMAIN), []
    shares = {row.detector: row for row in table.select(metric="share")}
    right = {row.detector: row for row in table.select(metric="right")}
    told = ", ".join(
        f"{kind} {spelled(row)} (right {spelled(right.get(kind))})"
        for kind, row in shares.items()
    )
    if told:
        found.append(f"Of the in-domain test questions: {told}.")
    return part_of(
        "Cases: two passes, two decisions",
        "Of every set and kind the question that is surest of its decisions, of equals "
        "the smaller id; nobody picked.",
        found,
        cases=cases,
    )

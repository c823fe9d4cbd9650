"""Which family decides, on the page: whose mistakes, whose flips, what grounds them."""

import itertools
from collections.abc import Sequence

import numpy as np

from beatrice.benchmarks.anatomy import figures
from beatrice.benchmarks.anatomy.rows import (
    EVERY,
    FAMILIES,
    Part,
    cell,
    in_setting,
    known,
    largest,
    own,
    part_of,
    places_in,
    printed,
    settings_in,
    spelled,
    table_of,
    test_rows,
)
from beatrice.benchmarks.results.names import SETTING_LABELS, SPLIT_LABELS
from beatrice.benchmarks.results.pictures import Picture, picture
from beatrice.benchmarks.results.tables import Table
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, ResultTable


def _complementarity_figure(table: ResultTable, setting: str) -> Picture | None:
    """Draw one setting's matrix, or nothing where a number is missing."""
    rights = np.full((4, 4), np.nan)
    for (i, row), (j, of) in itertools.product(enumerate(FAMILIES), repeat=2):
        found = table.find(detector=f"encoder:{row}", metric=f"rights:{of}")
        if found is not None and found.value is not None:
            rights[i, j] = found.value
    errors = [
        table.find(detector=f"encoder:{x}", metric="error_rate") for x in FAMILIES
    ]
    values = [row.value for row in errors if row is not None and row.value is not None]
    if len(values) < len(FAMILIES):
        return None
    n = errors[0].n if errors[0] is not None else 0
    return picture(
        figures.complementarity(rights, values, setting),
        f"complementarity-{setting}",
        SETTING_LABELS[setting],
        f"All in-domain test answers ({n:,}). Every family's encoder flags as many "
        "answers as are wrong. Right: what each gets wrong itself.",
    )


def complementarity_part(rows: Sequence[ResultRow]) -> Part | None:
    """Which family gets right what another gets wrong."""
    table, found, pictures = own(rows, "complementarity"), [], []
    for setting in settings_in(table):
        here = test_rows(table, setting)
        drawn = _complementarity_figure(here, setting)
        pictures += [] if drawn is None else [drawn]
        errors = {
            x: here.find(detector=f"encoder:{x}", metric="error_rate") for x in FAMILIES
        }
        best = min(
            (x for x in FAMILIES if known(errors[x])),
            key=lambda x: errors[x].value,
            default=None,
        )
        if best is None:
            continue
        helped = {
            x: here.find(detector=f"encoder:{x}", metric=f"rights:{best}")
            for x in FAMILIES
            if x != best
        }
        first = largest(list(helped.values()))
        if first is None:
            continue
        letter = first.detector[-1]
        alone = errors[letter]
        by_chance = 1 - (alone.value if alone and alone.value is not None else 0.0)
        found.append(
            f"{in_setting(setting)} the fewest mistakes are those of "
            f"{FAMILIES[best]} ({spelled(errors[best])} of the answers); of them "
            f"{FAMILIES[letter]} get{_s(letter)} {spelled(first)} right, the most of "
            f"the other families, where unrelated mistakes would give {by_chance:.3f}."
        )
    return part_of(
        "Which family gets right what another gets wrong",
        "A cell near the row's own share of right answers means mistakes that have "
        "nothing to do with each other; near 0, that the row repeats the column's.",
        found,
        pictures,
    )


def _flip_table(table: ResultTable, setting: str) -> Table:
    """Lay out the flips of every family of every queried encoder of a setting."""
    names = dict.fromkeys(row.detector for row in table.rows if "-" in row.detector)
    metrics = {
        "flip_rate": "flip rate",
        "flip_precision": "flip precision",
        "flips_near_boundary": "flips within one logit",
        "answers_near_boundary": "answers within one logit",
    }
    lines = []
    for name in names:
        encoder, letter = name.rsplit("-", 1)
        cells = [cell(table.find(detector=name, metric=m)) for m in metrics]
        lines.append((f"{FAMILIES[letter]} in {encoder}", cells))
    columns = [(SETTING_LABELS[setting], label, "share") for label in metrics.values()]
    return table_of("Family", columns, lines)


def _flip_sentence(table: ResultTable, setting: str) -> str:
    """Say which family decides in the encoder of all four, and how near others act."""
    name = printed(setting, EVERY)
    rates = {x: table.find(detector=f"{name}-{x}", metric="flip_rate") for x in EVERY}
    first = largest(list(rates.values()))
    if first is None:
        return ""
    decides = first.detector[-1]
    near = [
        row
        for x in EVERY
        if x != decides
        and (row := table.find(detector=f"{name}-{x}", metric="flips_near_boundary"))
        and row.value is not None
    ]
    precise = largest(
        [
            table.find(detector=f"{name}-{x}", metric="flip_precision")
            for x in EVERY
            if x != decides
        ]
    )
    right = table.find(detector="answers", metric="right")
    text = (
        f"{in_setting(setting)} {FAMILIES[decides]} decide{_s(decides)} most in "
        f"{name}: {spelled(first)} of the decisions flip without "
        f"{_them(decides)}, the right way with precision "
        f"{spelled(table.find(detector=f'{name}-{decides}', metric='flip_precision'))}."
    )
    if near:
        low, high = (f(row.value for row in near) for f in (min, max))
        text += (
            f" Of the flips of the others {low:.2f} to {high:.2f} lie within one logit "
            "of the boundary."
        )
    if precise is not None:
        letter = precise.detector[-1]
        text += (
            f" The most precise of the others: {FAMILIES[letter]}, {spelled(precise)}"
            f" ({precise.n} answers)."
        )
    return text + f" {spelled(right)} of the answers are right."


def _s(letter: str) -> str:
    return "" if letter in "HP" else "s"


def _them(letter: str) -> str:
    return "them" if letter in "HP" else "it"


def flips_part(rows: Sequence[ResultRow]) -> Part | None:
    """Which family decides, and when the others act."""
    table, band = own(rows, "flips"), own(rows, "boundary")
    found, pictures, tables = [], [], []
    for setting in settings_in(table):
        here = test_rows(table, setting)
        found.append(_flip_sentence(here, setting))
        tables.append(
            (f"{SETTING_LABELS[setting]}, {IN_DOMAIN} test", _flip_table(here, setting))
        )
        for dataset in dict.fromkeys(
            r.dataset for r in table.rows if r.split == "ood" and r.setting == setting
        ):
            other = ResultTable(table.select(setting=setting, dataset=dataset))
            heading = f"{SETTING_LABELS[setting]}, {dataset}, held out"
            tables.append((heading, _flip_table(other, setting)))
        panels, width = _panels(test_rows(band, setting), printed(setting, EVERY))
        if panels:
            caption = (
                f"Of {printed(setting, EVERY)}, in-domain test answers, all seeds, in "
                f"cells of {width:g} logits; a larger mark is more answers. In the "
                "shaded wedge the family changes the decision; squares are flips."
            )
            pictures.append(
                picture(
                    figures.boundary_band(panels, width, setting),
                    f"boundary-{setting}",
                    SETTING_LABELS[setting],
                    caption,
                )
            )
    return part_of(
        "Which family decides, and when the others act",
        "A family is replaced by its means inside a deployed encoder. A high flip rate "
        "is a family that decides; a high precision with flips near the boundary is "
        "one that corrects where the rest is undecided. A precision is to be read "
        "against how often such answers are right at all.",
        found,
        pictures,
        tables,
    )


Panels = dict[str, tuple[dict[tuple[float, float], float], ...]]


def _panels(table: ResultTable, encoder: str) -> tuple[Panels, float]:
    """Return an encoder's cells by family, stays and flips, and their width."""
    panels: Panels = {}
    width = 0.0
    for row in table.rows:
        name, letter = row.detector.rsplit("-", 1)
        if name != encoder or row.value is None:
            continue
        try:
            kind, _, x, y, _, w = row.metric.split(" ")
        except ValueError:
            raise ValueError(
                f"the boundary's row {row.metric!r} names no width of a cell: it is of "
                "an earlier version; delete anatomy/boundary.safetensors in the run, "
                "and run `beatrice anatomy` again"
            ) from None
        kinds = panels.setdefault(FAMILIES[letter], ({}, {}))
        kinds[kind == "flips"][float(x), float(y)] = row.value
        width = float(w)
    return panels, width


GROUNDING = {
    "right closed-book": ("answers", "Right answers, closed-book"),
    "right with context": ("answers", "Right answers, with the passages"),
    "wrong ones that stand there": ("answers", "Wrong answers that stand there"),
    "right ones that stand there": ("answers", "Right answers that stand there"),
    "flip precision": ("", "Precision of attention's flips"),
    "flip precision, there but wrong": ("", "· answer stands there, but is wrong"),
    "flip precision, right but not there": ("", "· answer right, but not there"),
}


def grounding_part(rows: Sequence[ResultRow]) -> Part | None:
    """What the attention family responds to."""
    table, tables, found = own(rows, "grounding"), [], []
    where = places_in(table)
    encoders = dict.fromkeys(r.detector for r in table.rows if r.detector != "answers")
    columns = [
        ("With context", dataset, SPLIT_LABELS[split]) for dataset, split in where
    ]
    for encoder in encoders:
        lines = []
        for metric, (of, label) in GROUNDING.items():
            cells = [
                cell(
                    table.find(
                        detector=of or encoder, metric=metric, dataset=d, split=s
                    )
                )
                for d, s in where
            ]
            lines.append((label, cells))
        tables.append((f"Attention in {encoder}", table_of("Share", columns, lines)))
    name = printed("with_context", EVERY)
    for dataset, split in where[:1]:
        at = {"dataset": dataset, "split": split}
        every, wrong, unseen = (
            table.find(detector=name, metric=metric, **at)
            for metric in list(GROUNDING)[4:]
        )
        found.append(
            f"On {dataset} {SPLIT_LABELS[split]} answers the flips of attention in "
            f"{name} are right with precision {spelled(every)}; where the answer "
            f"stands in the passages but is wrong, {spelled(wrong)} ({_n(wrong)} "
            "answers); where it is right but does not stand there, "
            f"{spelled(unseen)} ({_n(unseen)} answers)."
        )
    return part_of(
        "What attention responds to",
        "If precision falls where an answer stands in the passage and is wrong, "
        "attention endorses support, not truth. Whole words of the normalised answer "
        "are looked for in titles and texts.",
        found if encoders else [],
        (),
        tables,
    )


def _n(row: ResultRow | None) -> int:
    return 0 if row is None else row.n

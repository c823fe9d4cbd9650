"""Where the signal is, on the page: heads, positions and spans, layers."""

from collections.abc import Sequence

import numpy as np

from beatrice.benchmarks.anatomy import figures
from beatrice.benchmarks.anatomy.rows import (
    EVERY,
    Part,
    cell,
    in_setting,
    known,
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
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable


def _head_map(table: ResultTable, name: str) -> np.ndarray | None:
    """Return an encoder's shares by layer and head, or None where there are none."""
    cells = {
        tuple(map(int, row.metric.split(" ")[2:])): row.value
        for row in table.select(detector=name)
        if row.metric.startswith("share at ") and row.value is not None
    }
    if not cells:
        return None
    shares = np.full(np.array(list(cells)).max(axis=0) + 1, np.nan)
    for at, value in cells.items():
        shares[at] = value
    return shares


def heads_part(rows: Sequence[ResultRow]) -> Part | None:
    """Whether a few heads carry what attention says."""
    table, found, pictures = own(rows, "heads"), [], []
    for setting in settings_in(table):
        here, maps = test_rows(table, setting), {}
        for letters in (EVERY, "A"):
            name = printed(setting, letters)
            shares = _head_map(here, name)
            if shares is not None:
                maps[name] = shares
            found.append(_head_sentence(here, setting, name))
        if not maps:
            continue
        caption = (
            "Integrated gradients of the logit from attention at its means, absolute, "
            "over all channels, tokens and spans of 400 test answers; the line on the "
            "scale is an even share."
        )
        figure = figures.head_map(maps, setting)
        title = SETTING_LABELS[setting]
        pictures.append(picture(figure, f"heads-{setting}", title, caption))
    return part_of(
        "Whether a few heads carry what attention says",
        "A flat map, and eight largest heads that move the encoder no more than eight "
        "random ones, mean that no head is privileged.",
        found,
        pictures,
    )


def _head_sentence(table: ResultTable, setting: str, name: str) -> str:
    """Say how uneven an encoder's heads are."""
    top = table.find(detector=name, metric="share of 8")
    if top is None or top.value is None:
        why = "not measured" if top is None else top.reason
        return f"{in_setting(setting)} {name}: {why}."
    even = table.find(detector=name, metric="even share of 8")
    moved, by_random, more = (
        table.find(detector=name, metric=metric)
        for metric in ("moved by 8", "moved by random 8", "moved more by 8")
    )
    verdict = "which cannot be told from none"
    if known(more) and more.ci_low * more.ci_high > 0:
        verdict = "which is more" if more.ci_low > 0 else "which is less"
    return (
        f"{in_setting(setting)} the eight largest heads of {name} hold "
        f"{spelled(top)} of the attribution (even: {spelled(even)}); without them the "
        f"logit moves by {spelled(moved)}, without eight random ones by "
        f"{spelled(by_random)}: a difference of {spelled(more)}, {verdict}."
    )


def positions_part(rows: Sequence[ResultRow]) -> Part | None:
    """Where in the text the read-out comes from."""
    table, gone = own(rows, "positions"), own(rows, "spans")
    found, pictures, tables = [], [], []
    for setting in settings_in(table):
        here, name = test_rows(table, setting), printed(setting, EVERY)
        drawn = _text_figure(here, setting, name)
        pictures += [] if drawn is None else [drawn]
        found.append(_text_sentence(here, setting, name))
    for setting in settings_in(gone):
        own_rows = ResultTable(gone.select(setting=setting))
        where = places_in(own_rows)
        columns = [
            (SETTING_LABELS[setting], dataset, SPLIT_LABELS[split])
            for dataset, split in where
        ]
        names = dict.fromkeys(
            r.detector for r in own_rows.rows if r.metric == f"auroc{DIFFERENCE}"
        )
        lines = [
            (
                n,
                [
                    cell(
                        own_rows.find(
                            detector=n,
                            metric=f"auroc{DIFFERENCE}",
                            dataset=dataset,
                            split=split,
                        )
                    )
                    for dataset, split in where
                ],
            )
            for n in names
        ]
        heading = f"{SETTING_LABELS[setting]}: AUROC with a span at its means, minus"
        tables.append((f"{heading} intact", table_of("Encoder", columns, lines)))
        found.append(_span_sentence(own_rows, setting))
    return part_of(
        "Where in the text the read-out comes from",
        "How much each span and each token of the answer moves the logit, beside its "
        "share of the tokens; and what a deployed encoder loses without a span.",
        [sentence for sentence in found if sentence],
        pictures,
        tables,
    )


def _text_figure(table: ResultTable, setting: str, name: str) -> Picture | None:
    spans, positions = {}, {}
    for row in table.select(detector=name):
        words = row.metric.split(" ")
        if row.value is None or len(words) != 3:
            continue
        if row.metric.startswith("share in "):
            tokens = table.find(detector=name, metric=f"tokens in {words[2]}")
            if tokens is not None and tokens.value is not None:
                spans[words[2]] = row.value, tokens.value
        if row.metric.startswith("share at ") and known(row):
            even = table.find(detector=name, metric=f"even share at {words[2]}")
            if even is not None and even.value is not None:
                ends = row.value, row.ci_low, row.ci_high
                positions[words[2]] = *ends, even.value
    if not spans or not positions:
        return None
    n = table.select(detector=name)[0].n
    caption = (
        f"Of {name}, {n} test answers: size of integrated gradients from all signals "
        "at their means. Right: of the answers that have such a token; bars are 95 % "
        "intervals, dashes an even share. The first position emits the first token."
    )
    figure = figures.shares_of_text(spans, positions, setting)
    title = SETTING_LABELS[setting]
    return picture(figure, f"positions-{setting}", title, caption)


def _text_sentence(table: ResultTable, setting: str, name: str) -> str:
    answer = table.find(detector=name, metric="share in answer")
    if answer is None or answer.value is None:
        why = "not measured" if answer is None else answer.reason
        return f"{in_setting(setting)} {name}: {why}."
    tokens = table.find(detector=name, metric="tokens in answer")
    first, even = (
        table.find(detector=name, metric=f"{word}share at 1") for word in ("", "even ")
    )
    return (
        f"{in_setting(setting)} {spelled(answer)} of what moves {name} lies on the "
        f"answer, which has {spelled(tokens)} of the tokens; within it "
        f"{spelled(first)} lies on the first position (even: {spelled(even)})."
    )


def _span_sentence(table: ResultTable, setting: str) -> str:
    """Say which span costs the most, of the encoder of all families on test answers."""
    name, here = printed(setting, EVERY), test_rows(table, setting)
    rows = [
        row
        for row in here.select(metric=f"auroc{DIFFERENCE}", against=name)
        if row.value is not None
    ]
    if not rows:
        return ""
    told = ", ".join(
        f"without the {row.detector.rsplit(' ', 1)[1]} {spelled(row)}"
        for row in sorted(rows, key=lambda row: row.value or 0.0)
    )
    return f"{in_setting(setting)} the AUROC of {name} changes by: {told}."


def layers_part(rows: Sequence[ResultRow]) -> Part | None:
    """Which layer knows, on every answer."""
    table, found = own(rows, "layers"), []
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    best: dict[str, int] = {}
    for setting in settings_in(table):
        valid, test = (
            {
                int(row.detector.split(" ")[1]): row
                for row in table.select(
                    setting=setting, dataset=IN_DOMAIN, split=split, metric="auroc"
                )
                if known(row)
            }
            for split in ("validation", "test")
        )
        if not valid or valid.keys() != test.keys():
            continue
        layers = sorted(test)
        chosen = max(layers, key=lambda layer: valid[layer].value)
        best[setting] = chosen
        curves[setting] = [
            (x, test[x].value, test[x].ci_low, test[x].ci_high) for x in layers
        ]
        first, last = layers[0], layers[-1]
        found.append(
            f"{in_setting(setting)} validation is best at layer {chosen} of {last}: "
            f"{spelled(test[chosen])} on test, beside {spelled(test[first])} at layer "
            f"{first} and {spelled(test[last])} at layer {last}."
        )
    if not curves:
        return None
    caption = (
        "Logistic regression on the mean state of the answer, on every labelled "
        "answer; bands are 95 % intervals, rings the layers that validation chooses."
    )
    figure = figures.layer_curves(curves, best)
    drawn = [picture(figure, "anatomy-layers", "Every layer on every answer", caption)]
    return part_of(
        "Which layer knows, on every answer",
        "Whether the curve peaks in the middle, and whether the peak stands out of the "
        "intervals.",
        found,
        drawn,
    )

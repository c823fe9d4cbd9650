"""What the paper says of many numbers at once, of a run's rows of the anatomy.

The paper's text tells of the least, the most, the median, or how many of some numbers
there are. A summary is the one of the rows that is least, most or in the middle, with
its own interval, or a count; it is a row like others, and nothing publishes it.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from beatrice.benchmarks.anatomy.rows import (
    EVERY,
    FAMILIES,
    distinct_sets,
    over_the_better,
    own,
    printed,
    test_rows,
)
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import DIFFERENCE, ResultRow, ResultTable

EXPERIMENT = "anatomy_summary"
OTHERS = tuple(letter for letter in FAMILIES if letter != "H")
NEAR = 0.72  # the paper's, of eleven of its twelve cases


def _summary(
    detector: str, metric: str, setting: str, value: float, n: int, split: str = "test"
) -> ResultRow:
    """Return a count, or another number without an interval."""
    fields = dict(
        experiment=EXPERIMENT, dataset=IN_DOMAIN, split=split, setting=setting
    )
    return ResultRow(detector=detector, metric=metric, value=value, n=n, **fields)


def _as(row: ResultRow, detector: str, metric: str, **fields: str) -> ResultRow:
    """Return a row under another name, with its value and interval."""
    gone = {"against": None, "p_value": None}
    named = {"experiment": EXPERIMENT, "detector": detector, "metric": metric}
    return msgspec.structs.replace(row, **gone, **named, **fields)


def _sorted(rows: Iterable[ResultRow | None]) -> list[ResultRow]:
    """Return the rows that have a value, the least first."""
    have = [row for row in rows if row is not None and row.value is not None]
    return sorted(have, key=lambda row: row.value or 0.0)


def _best_encoder(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    for setting in SETTINGS:
        where = {"setting": setting, "dataset": IN_DOMAIN, "split": "validation"}
        where |= {"experiment": "detection", "metric": "auroc", "seed": "mean"}
        found = _sorted(ResultTable(rows).select(**where))
        if found := [r for r in found if r.detector.startswith("encoder:")]:
            n = float(len(found[-1].detector.removeprefix("encoder:")))
            row = found[-1]
            yield _summary("best encoder", "families", setting, n, row.n, row.split)


def _rights(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    table = own(rows, "complementarity", metric="rights:H")
    found = _sorted(r for s in SETTINGS for r in test_rows(table, s).rows)
    for name, row in zip(("least", "most"), (found[:1], found[-1:]), strict=True):
        yield from (_as(r, f"{name} of H", "rights:H", setting="both") for r in row)


def _near(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    """Of the encoder of all families, which every run has."""
    table = own(rows, "flips", metric="flips_near_boundary")
    found: dict[str, list[ResultRow]] = {
        setting: _sorted(
            test_rows(table, setting).find(detector=f"{printed(setting, EVERY)}-{x}")
            for x in OTHERS
        )
        for setting in SETTINGS
    }
    every = found["both"] = _sorted(itertools.chain(*found.values()))
    for setting, own_rows in found.items():
        if own_rows:
            yield _as(own_rows[0], "least near", "near", setting=setting)
            yield _as(own_rows[-1], "most near", "near", setting=setting)
    if len(every) > 1:
        yield _as(every[1], "least but one near", "near", setting="both")
        n = sum((row.value or 0.0) >= NEAR for row in every)
        yield _summary("families", "near at .72", "both", n, len(every))
        yield _summary("families", "near cases", "both", len(every), len(every))


def _gains(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    """Of probabilities with attention, on both backbones where rows tell of two."""
    here, other = (
        [
            row
            for row in over_the_better(own(rows, experiment))
            if row.detector == "encoder:PA"
        ]
        for experiment in ("pairs", "other_pairs")
    )
    yield from (_as(row, row.detector, "gain") for row in here)
    every = _sorted([*distinct_sets(here), *distinct_sets(other)])
    if not every:
        return
    middle = statistics.median_low(range(len(every)))
    place = {"setting": "both", "dataset": IN_DOMAIN, "split": "test"}
    yield _as(every[middle], "encoder:PA", "median gain", **place)
    n = sum((row.value or 0.0) > 0 for row in every)
    yield _summary("encoder:PA", "gains above zero", "both", n, len(every))
    yield _summary("encoder:PA", "gains", "both", len(every), len(every))


def _backbones(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    for row in own(rows, "backbones", metric="spearman").rows:
        yield _as(row, "two backbones", "spearman")


def _spans(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    table = own(rows, "spans", metric=f"auroc{DIFFERENCE}")
    losses = _sorted(
        test_rows(table, setting).find(
            detector=f"{printed(setting, EVERY)} without {span}",
            against=printed(setting, EVERY),
        )
        for setting in SETTINGS
        for span in ("question", "context")
    )
    for row in losses[:1]:
        yield _as(row, "most of question and context", "loss", setting="both")


def _layer(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    """The best of the mean over settings, as the sweep chooses it."""
    layers: dict[str, list[ResultRow]] = {}
    where = {"metric": "auroc", "dataset": IN_DOMAIN, "split": "validation"}
    for row in _sorted(own(rows, "layers", **where).rows):
        layers.setdefault(row.detector, []).append(row)
    if layers:
        name = max(
            layers, key=lambda x: statistics.fmean(r.value or 0.0 for r in layers[x])
        )
        n = sum(row.n for row in layers[name])
        layer = float(name.rsplit(" ", 1)[1])
        yield _summary("best layer", "layer", "both", layer, n, "validation")


def _counts(rows: Sequence[ResultRow]) -> Iterable[ResultRow]:
    """How many sets were ranked, and how many answers' heads were attributed."""
    for setting in SETTINGS:
        ranked = own(rows, "combinations", setting=setting, metric="encoders in a set")
        for row in ranked.rows[:1]:
            n = float(row.n)
            yield _summary("sets of three", "sets", setting, n, row.n, "validation")
        heads = test_rows(own(rows, "heads", metric="incompleteness"), setting)
        for row in heads.rows[:1]:
            yield _summary("heads", "answers", setting, float(row.n), row.n)


def summaries(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows that stand beside what the paper's text says of many numbers.

    Args:
      rows: of a run.
    """
    parts = (
        _best_encoder,
        _rights,
        _near,
        _gains,
        _backbones,
        _spans,
        _layer,
        _counts,
    )
    return [row for part in parts for row in part(rows)]

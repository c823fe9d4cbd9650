"""Cases: two passes, two decisions, of every set; chosen by a rule, not by hand.

After the paper's table of case studies (appendix G), but of every set and kind. A
closed-book answer with P(correct) of at least the threshold is accepted; else the
with-context answer is trusted if its P is; else both are flagged. Of each set and kind
the case that is surest of its decisions is shown, of equals the smaller id, with at
most three of its golds.
"""

from typing import NamedTuple

import numpy as np

from extract.records import Setting
from extract.run.contents import read_answers, read_examples
from extract.run.results import ResultRow
from jaxprobe.detector import Detector
from jaxprobe.stage import run_selection
from selection.anatomy import Study
from selection.anatomy.analysis import Evidence, Ratio, judged_sets, ratio_rows

EXPERIMENT = "anatomy_cases"
TRUSTED_FROM = 0.6  # the paper's, where `calibrate` found no threshold of its own
KINDS = ("accepted closed-book", "trusted with context", "both flagged")


class Answered(NamedTuple):
    """Both answers to some questions, `[n]` each.

    Attributes:
      ids: all different.
      p: `[n, 2]` calibrated P(correct), closed-book and with context.
      labels: `[n, 2]` bool.
    """

    ids: np.ndarray
    p: np.ndarray
    labels: np.ndarray


def kinds_of(p: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the place in KINDS of each question, by `[n, 2]` probabilities."""
    is_trusted = p >= thresholds[None]
    return np.where(is_trusted[:, 0], 0, np.where(is_trusted[:, 1], 1, 2))


def chosen(found: Answered, thresholds: np.ndarray) -> dict[int, int]:
    """Return the question shown of each kind, by the kind's place.

    The surest: the smallest distance of a probability that decides from its threshold
    is the largest. Accepted, the first decides alone.
    """
    kinds = kinds_of(found.p, thresholds)
    distance = np.abs(found.p - thresholds[None])
    margin = np.where(kinds == 0, distance[:, 0], distance.min(axis=1))
    shown = {}
    for kind in range(len(KINDS)):
        own = np.flatnonzero(kinds == kind)
        if len(own):
            shown[kind] = min(own.tolist(), key=lambda i: (-margin[i], found.ids[i]))
    return shown


class _Read(NamedTuple):
    """P, label and row of every judged original answer of a setting, by question."""

    p: dict[str, float]
    labels: dict[str, bool]
    threshold: float


def _read(evidence: Evidence) -> _Read:
    rows, where = evidence.rows, evidence.judged
    where = where[rows.variants[where] == "original"]
    head = Detector.load(evidence.run.detector).heads[evidence.setting]
    tree, _ = run_selection(evidence.run, evidence.setting)
    p = head.calibrator(tree["champion"]["scores"].mean(axis=0))
    wanted = head.threshold and head.threshold.p_correct
    return _Read(
        {str(rows.ids[i]): float(p[i]) for i in where},
        {str(rows.ids[i]): bool(rows.labels[i]) for i in where},
        TRUSTED_FROM if wanted is None else float(wanted),
    )


def cases(
    closed_book: Evidence, with_context: Evidence
) -> tuple[list[ResultRow], list[Study]]:
    """Return how many questions are of each kind and how often the answer is right.

    And a case of each kind of every set.
    """
    sides = [_read(closed_book), _read(with_context)]
    thresholds = np.array([side.threshold for side in sides])
    run = with_context.run
    settings: tuple[Setting, Setting] = ("closed_book", "with_context")
    texts = [
        {a.example_id: a.text for a in read_answers(run, s) if a.variant == "original"}
        for s in settings
    ]
    examples = {example.id: example for example in read_examples(run)}
    made: list[ResultRow] = []
    shown: list[Study] = []
    rows = with_context.rows
    for dataset, split in judged_sets(rows):
        own = rows.where(split, dataset)
        wanted = set(rows.ids[own].tolist())
        ids = sorted(wanted & sides[0].p.keys() & sides[1].p.keys())
        if not ids:
            continue
        found = Answered(
            np.array(ids),
            np.array([[side.p[i] for side in sides] for i in ids]),
            np.array([[side.labels[i] for side in sides] for i in ids]),
        )
        made += _rows(found, thresholds, dataset, split, with_context)
        if len(set(datasets := rows.datasets[own].tolist())) > 1:
            continue  # all in-domain sets together
        dataset = datasets[0]
        for kind, i in chosen(found, thresholds).items():
            example = examples[ids[i]]
            shown.append(
                Study(
                    dataset=dataset,
                    split=split,
                    kind=KINDS[kind],
                    question=example.question,
                    gold="; ".join(example.golds[:3]),  # any of them is right
                    closed_book=texts[0][ids[i]],
                    p_closed_book=float(found.p[i, 0]),
                    is_closed_book_right=bool(found.labels[i, 0]),
                    with_context=texts[1][ids[i]],
                    p_with_context=float(found.p[i, 1]),
                    is_with_context_right=bool(found.labels[i, 1]),
                )
            )
    return made, shown


def _rows(
    found: Answered,
    thresholds: np.ndarray,
    dataset: str,
    split: str,
    evidence: Evidence,
) -> list[ResultRow]:
    """Return the share of each kind, and of its final answers that are right."""
    kinds, every = kinds_of(found.p, thresholds), np.ones(len(found.ids))
    final = np.where(kinds == 0, found.labels[:, 0], found.labels[:, 1])
    ratios = []
    for place, kind in enumerate(KINDS):
        is_own = kinds == place
        ratios.append(Ratio(kind, "share", is_own, every))
        ratios.append(Ratio(kind, "right", is_own & final, is_own))
    place = {"setting": "both", "dataset": dataset, "split": split}
    return ratio_rows(EXPERIMENT, ratios, found.ids, place, evidence.bootstrap)

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
from extract.run.results import ResultRow
from selection.anatomy import Study
from selection.anatomy.analysis import (
    Analysis,
    AnalysisInput,
    Findings,
    Ratio,
    judged_sets,
    ratio_rows,
)
from selection.anatomy.encoders import Deployed

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


def _read(given: AnalysisInput, setting: Setting) -> _Read:
    deployed, head = given.settings[setting], given.heads[setting]
    rows, where = deployed.rows, deployed.judged
    where = where[rows.variants[where] == "original"]
    scores = given.searches[setting].scores["champion"]
    p = head.calibrator(scores.mean(axis=0))
    wanted = head.threshold and head.threshold.p_correct
    return _Read(
        {str(rows.ids[i]): float(p[i]) for i in where},
        {str(rows.ids[i]): bool(rows.labels[i]) for i in where},
        TRUSTED_FROM if wanted is None else float(wanted),
    )


def cases(given: AnalysisInput) -> Findings:
    """Return how many questions are of each kind and how often the answer is right.

    And a case of each kind of every set.
    """
    settings: tuple[Setting, Setting] = ("closed_book", "with_context")
    with_context = given.settings["with_context"]
    sides = [_read(given, setting) for setting in settings]
    thresholds = np.array([side.threshold for side in sides])
    examples, answers = given.read_texts()
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
            texts = [answers[ids[i], s, "original"].text for s in settings]
            shown.append(
                Study(
                    dataset=dataset,
                    split=split,
                    kind=KINDS[kind],
                    question=example.question,
                    gold="; ".join(example.golds[:3]),  # any of them is right
                    closed_book=texts[0],
                    p_closed_book=float(found.p[i, 0]),
                    is_closed_book_right=bool(found.labels[i, 0]),
                    with_context=texts[1],
                    p_with_context=float(found.p[i, 1]),
                    is_with_context_right=bool(found.labels[i, 1]),
                )
            )
    return Findings(made, tuple(shown))


def _rows(
    found: Answered,
    thresholds: np.ndarray,
    dataset: str,
    split: str,
    deployed: Deployed,
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
    return ratio_rows(EXPERIMENT, ratios, found.ids, place, deployed.bootstrap)


ANALYSES = (Analysis("cases", cases, needs=("closed_book", "with_context")),)

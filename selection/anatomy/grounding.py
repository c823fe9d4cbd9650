"""What the attention family responds to: does the answer stand in the passage?

The flips of attention, restricted to the answers on which verbatim support and
correctness disagree (paper, appendix E, table of grounding), beside how good retrieval
was: the generator's accuracy with and without the passages, and the share of wrong
answers that stand in them.
"""

from typing import NamedTuple

import numpy as np

from extract.records import stands_in_context
from jaxprobe.features.rows import Rows
from selection.anatomy.analysis import (
    Analysis,
    AnalysisInput,
    Findings,
    Ratio,
    Texts,
    judged_sets,
    ratio_rows,
)
from selection.anatomy.encoders import Deployed

EXPERIMENT = "anatomy_grounding"


class Grounded(NamedTuple):
    """What is known of some with-context answers.

    Attributes:
      labels: `[n]` bool.
      stands: `[n]` bool, whether the answer stands in the passages.
      right_without: `[n]` float, whether the closed-book answer is right; NaN where
        there is none, or it has no label.
    """

    labels: np.ndarray
    stands: np.ndarray
    right_without: np.ndarray


def ratios_of(
    known: Grounded, flips: dict[str, tuple[np.ndarray, np.ndarray]]
) -> list[Ratio]:
    """Return shares of answers and precisions of flips.

    Args:
      known: of `n` answers.
      flips: by encoder, whether decisions flip, and whether the intact encoder is
        right; `[n_seeds, n]` bool each.
    """
    labels, stands, without = known
    every, has = np.ones(len(labels)), ~np.isnan(without)
    ratios = [
        Ratio("answers", "right with context", labels, every),
        Ratio("answers", "right closed-book", np.where(has, without, 0), has),
        Ratio("answers", "wrong ones that stand there", stands & ~labels, ~labels),
        Ratio("answers", "right ones that stand there", stands & labels, labels),
    ]
    subsets = {
        "flip precision": every > 0,
        "flip precision, there but wrong": stands & ~labels,
        "flip precision, right but not there": ~stands & labels,
    }
    for name, (is_flip, is_right) in flips.items():
        ratios += [
            Ratio(name, metric, is_flip & is_right & own[None], is_flip & own[None])
            for metric, own in subsets.items()
        ]
        for metric, own in list(subsets.items())[1:]:
            whole = np.broadcast_to(own[None], is_flip.shape)
            rate = metric.replace("flip precision", "flip rate")
            ratios.append(Ratio(name, rate, is_flip & own[None], whole))
    return ratios


def _grounded(deployed: Deployed, texts: Texts, closed_book: Rows | None) -> Grounded:
    """Return what is known of the judged answers of the with-context setting."""
    rows, where = deployed.rows, deployed.judged
    stands = np.zeros(len(where), bool)
    for place, i in enumerate(where):
        key = str(rows.ids[i]), deployed.setting, str(rows.variants[i])
        stands[place] = stands_in_context(texts.examples[key[0]], texts.answers[key])
    without = np.full(len(where), np.nan)
    if closed_book is not None:
        labelled = np.flatnonzero(closed_book.is_labelled)
        labels = {closed_book.ids[i]: float(closed_book.labels[i]) for i in labelled}
        without = np.array([labels.get(rows.ids[i], np.nan) for i in where])
    return Grounded(rows.labels[where], stands, without)


def grounding(given: AnalysisInput) -> Findings:
    """Return the rows of every test and held-out set, with context alone."""
    deployed, made = given.settings["with_context"], []
    closed_book = given.settings.get("closed_book")
    known = _grounded(deployed, given.read_texts(), closed_book and closed_book.rows)
    for dataset, split in judged_sets(deployed.rows):
        at = np.isin(deployed.judged, deployed.rows.where(split, dataset))
        own = Grounded(*(x[at] for x in known))
        flips = {}
        for name in deployed.queried:
            if "A" not in name:
                continue
            intact, without = (
                x[:, at] for x in (deployed.intact(name), deployed.without(name, "A"))
            )
            is_right = (intact > 0) == own.labels[None]
            flips[deployed.printed(name)] = (intact > 0) != (without > 0), is_right
        ids = deployed.rows.ids[deployed.judged[at]]
        place = deployed.place(dataset, split)
        ratios = ratios_of(own, flips)
        made += ratio_rows(EXPERIMENT, ratios, ids, place, deployed.bootstrap)
    return Findings(made)


ANALYSES = (Analysis("grounding", grounding, needs=("with_context",)),)

"""Which family decides, and when the others get to act.

One family at a time is replaced by its means inside a deployed encoder (paper, appendix
E, table of flips and figure of the boundary band). A flip is a decision, P(correct)
above or below one half, that changes; it is precise where the intact encoder decides
correctly. The score without the family, against what the family adds to it, shows how
near the boundary its flips lie.
"""

import numpy as np

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from selection.anatomy.analysis import (
    Analysis,
    Ratio,
    in_each_setting,
    judged_sets,
    ratio_rows,
)
from selection.anatomy.encoders import Deployed

EXPERIMENT, BAND = "anatomy_flips", "anatomy_boundary"
NEAR = 1.0  # logits: a remaining score so near the boundary is undecided
_N_CELLS = 12  # of the boundary's figure, from zero to its edge
_NARROWEST = 0.5  # logits, of a cell


def flip_ratios(
    detector: str, intact: np.ndarray, without: np.ndarray, labels: np.ndarray
) -> list[Ratio]:
    """Return how often decisions flip, how often rightly, and how near the boundary.

    Args:
      detector: of the rows.
      intact: `[n_seeds, n]` logits.
      without: the same without a family.
      labels: `[n]` bool.
    """
    is_flip = (intact > 0) != (without > 0)
    is_right = (intact > 0) == labels[None]
    is_near, every = np.abs(without) <= NEAR, np.ones_like(is_flip)
    added = intact - without
    return [
        Ratio(detector, "flip_rate", is_flip, every),
        Ratio(detector, "flip_precision", is_flip & is_right, is_flip),
        Ratio(detector, "flips_near_boundary", is_flip & is_near, is_flip),
        Ratio(detector, "answers_near_boundary", is_near, every),
        Ratio(detector, "mean_contribution", np.abs(added), every),
    ]


def flips(deployed: Deployed) -> list[ResultRow]:
    """Return the flips of every family of every queried encoder on every set.

    And the share of right answers, against which a precision is to be read.
    """
    rows, made = deployed.rows, []
    for dataset, split in judged_sets(rows):
        at = np.isin(deployed.judged, rows.where(split, dataset))
        labels = rows.labels[deployed.judged[at]]
        ratios = [Ratio("answers", "right", labels, np.ones_like(labels))]
        for name in deployed.queried:
            intact = deployed.intact(name)[:, at]
            right = (intact > 0) == labels[None]
            printed = deployed.printed(name)
            ratios.append(Ratio(printed, "accuracy", right, np.ones_like(right)))
            for letter in name:
                without = deployed.without(name, letter)[:, at]
                ratios += flip_ratios(f"{printed}-{letter}", intact, without, labels)
        place = deployed.place(dataset, split)
        ids = rows.ids[deployed.judged[at]]
        made += ratio_rows(
            EXPERIMENT, ratios, ids, place, deployed.bootstrap, "no decision flips"
        )
    return made


def boundary(deployed: Deployed) -> list[ResultRow]:
    """Return how many answers lie where, by remaining score and contribution.

    Of the in-domain test rows, all seeds: a cell is a row, `answers at x y in w` with
    its centre and its width, and `flips at x y in w` where decisions changed there. All
    cells of an encoder have one width, the least at which every answer has a cell.
    """
    rows, made = deployed.rows, []
    at = np.isin(deployed.judged, rows.where("test"))
    place = deployed.place(IN_DOMAIN, "test") | {"n": int(at.sum())}
    for name in deployed.queried:
        intact = deployed.intact(name)[:, at]
        rests = {letter: deployed.without(name, letter)[:, at] for letter in name}
        width = max(_width(x) for rest in rests.values() for x in (rest, intact - rest))
        for letter, without in rests.items():
            flipped = (intact > 0) != (without > 0)
            places = np.stack([without, intact - without], axis=-1)
            cells = width * (np.floor(places / width) + 0.5)
            for metric, chosen in (("answers", ~flipped), ("flips", flipped)):
                centres, counts = np.unique(cells[chosen], axis=0, return_counts=True)
                made += [
                    ResultRow(
                        experiment=BAND,
                        detector=f"{deployed.printed(name)}-{letter}",
                        metric=f"{metric} at {x:g} {y:g} in {width:g}",
                        value=float(count),
                        **place,
                    )
                    for (x, y), count in zip(centres, counts, strict=True)
                ]
    return made


def _width(logits: np.ndarray) -> float:
    """Return the width of cells, in logits, of which `_N_CELLS` reach every value."""
    needed = max(float(np.abs(logits).max()) / _N_CELLS, _NARROWEST)
    return _NARROWEST * 2.0 ** np.ceil(np.log2(needed / _NARROWEST))


ANALYSES = (
    Analysis("flips", in_each_setting(flips)),
    Analysis("boundary", in_each_setting(boundary)),
)

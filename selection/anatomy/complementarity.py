"""Which signal gets right what another gets wrong (paper, figure of that name).

Every single-family encoder is thresholded to flag as many answers as are wrong, as in
the paper (section 5.3). A cell is the share of the column family's mistakes, of either
kind, that the row family gets right; two families whose mistakes had nothing to do with
each other would have one minus the row's own error rate there.
"""

import itertools

import numpy as np

from extract.run.results import ResultRow
from jaxprobe.features.subsets import LETTERS
from selection.anatomy.analysis import (
    Analysis,
    Ratio,
    in_each_setting,
    judged_sets,
    ratio_rows,
)
from selection.anatomy.encoders import Deployed

EXPERIMENT = "anatomy_complementarity"


def mistakes(scores: np.ndarray, labels: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Return where a score is wrong that flags as many answers as are wrong.

    Args:
      scores: `[n]`, higher = more likely correct.
      labels: `[n]` bool.
      names: `[n]`, all different; they settle ties, so that order does not.

    Returns:
      `[n]` bool: flagged and right, or wrong and not flagged.
    """
    is_flagged = np.zeros(len(scores), bool)
    is_flagged[np.lexsort((names, scores))[: int((~labels).sum())]] = True
    return is_flagged == labels


def complementarity(deployed: Deployed) -> list[ResultRow]:
    """Return each family's error rate and the share of each other's errors it rights.

    Seeds are counted together: a share is over the mistakes of all seeds, each against
    the same seed of the other family.
    """
    rows, made = deployed.rows, []
    names = np.char.add(np.char.add(rows.ids, " "), rows.variants)
    for dataset, split in judged_sets(rows):
        where = rows.where(split, dataset)
        labels = rows.labels[where]
        wrong = {
            x: np.stack(
                [
                    mistakes(own[where], labels, names[where])
                    for own in deployed.logits_of(x)
                ]
            )
            for x in LETTERS
        }
        every = np.ones_like(wrong["H"])
        ratios = [Ratio(f"encoder:{x}", "error_rate", wrong[x], every) for x in LETTERS]
        ratios += [
            Ratio(f"encoder:{row}", f"rights:{of}", wrong[of] & ~wrong[row], wrong[of])
            for row, of in itertools.permutations(LETTERS, 2)
        ]
        place = deployed.place(dataset, split)
        ids, config = rows.ids[where], deployed.bootstrap
        made += ratio_rows(EXPERIMENT, ratios, ids, place, config, "it has no mistake")
    return made


ANALYSES = (Analysis("complementarity", in_each_setting(complementarity)),)

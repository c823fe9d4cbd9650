"""Every set of three encoders, ranked: how many closed-book ones do the best hold?

Of the ranking that `select --exhaustive` leaves (paper, figure of the combination
search). Its ribbons of families are drawn in the report already; here are the count of
closed-book encoders along the ranking, and what the ten best sets hold.
"""

from collections.abc import Sequence

import numpy as np

from extract.records import IN_DOMAIN
from extract.run.results import ResultRow
from selection.anatomy.analysis import Analysis, AnalysisInput, Findings
from selection.anatomy.encoders import Deployed
from selection.exhaustive import SET_SIZE, Ranking
from selection.ranking import traits

EXPERIMENT = "anatomy_combinations"
N_PARTS = 20  # of the ranking
N_BEST = 10  # the paper's


def counts_along(
    ranking: Ranking, is_closed_book: np.ndarray, n_parts: int
) -> np.ndarray:
    """Return how many closed-book encoders sets hold, along the ranking.

    Args:
      ranking: of all sets.
      is_closed_book: `[n_pool]` bool.
      n_parts: of the ranking, best first.

    Returns:
      `[SET_SIZE + 1, n_parts]`: of a part's sets, the share that holds 0, 1, 2 or 3.
    """
    counts = is_closed_book[ranking.sets[ranking.order]].sum(axis=1)
    parts = np.array_split(counts, min(n_parts, len(counts)))
    return np.stack(
        [[(part == k).mean() for part in parts] for k in range(SET_SIZE + 1)]
    )


def combinations(given: AnalysisInput) -> Findings:
    """Return the rows of every setting's ranking, by validation AUROC."""
    each = (
        _of_ranking(given.rankings[setting], deployed)
        for setting, deployed in given.settings.items()
    )
    return Findings([row for rows in each for row in rows])


def _of_ranking(ranking: Ranking, deployed: Deployed) -> list[ResultRow]:
    n_sets, n_pool = len(ranking.sets), int(ranking.sets.max()) + 1
    by_trait = traits(deployed.setting, n_pool)
    place = deployed.place(IN_DOMAIN, "validation")
    best = ranking.sets[ranking.order[:N_BEST]]
    values: list[tuple[str, str, float, int]] = []
    for name, reads in by_trait.items():
        values.append((name, "encoders in a best set", _mean(reads, best), len(best)))
        values.append((name, "encoders in a set", _mean(reads, ranking.sets), n_sets))
    is_closed_book = np.any(
        [reads for name, reads in by_trait.items() if name.endswith("closed_book")],
        axis=0,
    )
    if not is_closed_book.all():
        shares = counts_along(ranking, is_closed_book, N_PARTS)
        for k, along in enumerate(shares):
            held = is_closed_book[best].sum(axis=1) == k
            fields = f"{k} closed-book", "best sets", float(held.sum()), len(best)
            values.append(fields)
            values += [
                (f"{k} closed-book", f"share in part {part}", float(share), n_sets)
                for part, share in enumerate(along, start=1)
            ]
    return [
        ResultRow(
            experiment=EXPERIMENT,
            detector=name,
            metric=metric,
            value=value,
            n=n,
            **place,
        )
        for name, metric, value, n in values
    ]


def _mean(reads: np.ndarray, sets: Sequence[np.ndarray] | np.ndarray) -> float:
    """Return how many encoders of a set have a trait, on average."""
    return float(reads[np.asarray(sets)].sum(axis=1).mean())


ANALYSES = (Analysis("combinations", combinations, needs=("rankings",)),)

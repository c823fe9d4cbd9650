"""What is gained by combining: families that err apart, pairs, variants, sets of three.

Complementarity (paper, figure of that name): every single-family encoder is thresholded
to flag as many answers as are wrong, as in the paper (section 5.3). A cell is the share
of the column family's mistakes, of either kind, that the row family gets right; two
families whose mistakes had nothing to do with each other would have one minus the row's
own error rate there.

Pairs and fusion: an early-fused pair against each of its members (paper, figure across
backbones, lower half: against the better one), and the selected set against the six
other variants of the paper's table of features and fusion, question by question.

Combinations, of the ranking that `select --exhaustive` leaves (paper, figure of the
combination search): its ribbons of families are drawn in the report already; here are
the count of closed-book encoders along the ranking, and what the ten best sets hold.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.families import LETTERS
from beatrice.selection.ablation import SUBJECTS
from beatrice.selection.analysis import (
    EVERY_FAMILY,
    AnalysisInput,
    AnalysisOutput,
    Deployed,
    Ratio,
    judged_sets,
    per_setting,
    ratio_rows,
    row_of,
)
from beatrice.selection.exhaustive import SET_SIZE, Ranking, traits

COMPLEMENTARITY = "anatomy_complementarity"
PAIRS, VARIANTS = "anatomy_pairs", "anatomy_fusion"
_ALL = "anatomy_all"  # rows that others have already
COMBINATIONS = "anatomy_combinations"
N_PARTS = 20  # of the ranking
N_BEST = 10  # the paper's


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
    rows, result = deployed.rows, []
    names = np.char.add(np.char.add(rows.ids, " "), rows.variants)
    for dataset, split in judged_sets(rows):
        where = rows.where(split, dataset)
        labels = rows.labels[where]
        wrong = {
            x: np.stack(
                [
                    mistakes(logits[where], labels, names[where])
                    for logits in deployed.logits_of(x)
                ]
            )
            for x in LETTERS
        }
        all_answers = np.ones_like(wrong["H"])
        ratios = [
            Ratio(encoder(x), "error_rate", wrong[x], all_answers) for x in LETTERS
        ]
        for row, of in itertools.permutations(LETTERS, 2):
            both = wrong[of] & ~wrong[row], wrong[of]
            ratios.append(Ratio(encoder(row), "rights", *both, {"family": of}))
        set_fields = deployed.set_fields(dataset, split)
        ids, config = rows.ids[where], deployed.bootstrap
        result += ratio_rows(
            COMPLEMENTARITY, ratios, ids, set_fields, config, "it has no mistake"
        )
    return result


def _differences(
    deployed: Deployed,
    scored: list[Scored],
    pairs: Sequence[tuple[Subject | str, Subject | str]],
    name: str,
) -> list[ResultRow]:
    """Return how much more AUROC the first of each pair has, on the judged sets."""
    rows = deployed.rows.take(deployed.judged)
    judged = [scores.take(deployed.judged) for scores in scored]
    result = detection_rows(judged, rows, deployed.bootstrap, _ALL, {name: pairs})
    return [r for r in result if r.experiment == name and r.metric == "auroc"]


def pairs(deployed: Deployed) -> list[ResultRow]:
    """Return what the encoder of two families has more than that of each of them."""
    names = [*LETTERS, *map("".join, itertools.combinations(LETTERS, 2))]
    scored = [
        Scored(name=encoder(name), scores=deployed.logits_of(name)) for name in names
    ]
    compared = [
        (encoder(name), encoder(letter))
        for name in names
        if len(name) == 2
        for letter in name
    ]
    return _differences(deployed, scored, compared, PAIRS)


def fusion(inputs: AnalysisInput) -> AnalysisOutput:
    """Return what the selected set has more than each other variant.

    Without hidden states only where `evaluate --ablations` has searched for it.
    """
    rows: list[ResultRow] = []
    for setting, deployed in inputs.settings.items():
        scores: dict[Subject | str, np.ndarray] = {**inputs.searches[setting].scores}
        scores["hidden_only"] = deployed.logits_of("H")
        scores["early_fusion"] = deployed.logits_of(EVERY_FAMILY)
        if setting == "with_context" and len(inputs.settings) > 1:
            single_pass = inputs.searches["single_pass"]
            scores["without_closed_book"] = single_pass.scores["champion"]
        if setting in inputs.without_hidden:
            scores[SUBJECTS["without_hidden"]] = inputs.without_hidden[setting]
        scored = [Scored(name=name, scores=values) for name, values in scores.items()]
        compared = [("champion", name) for name in scores if name != "champion"]
        rows += _differences(deployed, scored, compared, VARIANTS)
    return rows


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
    parts = ranking.parts(is_closed_book[ranking.sets].sum(axis=1), n_parts)
    return np.stack([[(x == k).mean() for x in parts] for k in range(SET_SIZE + 1)])


def combinations(inputs: AnalysisInput) -> AnalysisOutput:
    """Return the rows of every setting's ranking, by validation AUROC."""
    rankings = inputs.rankings
    return per_setting(lambda x: _of_ranking(rankings[x.setting], x))(inputs)


def _of_ranking(ranking: Ranking, deployed: Deployed) -> list[ResultRow]:
    n_sets, n_pool = len(ranking.sets), int(ranking.sets.max()) + 1
    by_trait = traits(deployed.setting, n_pool)
    set_fields = deployed.set_fields(IN_DOMAIN, "validation")
    best = ranking.sets[ranking.order[:N_BEST]]
    rows: list[ResultRow] = []

    def add(metric: str, value: float, n: int, **columns: Any) -> None:
        columns |= set_fields
        rows.append(row_of(COMBINATIONS, "sets_of_three", metric, value, n, columns))

    for (letter, reads), is_read in by_trait.items():
        trait = {"family": letter, "kind": reads}
        add("encoders_in_best_set", _mean(is_read, best), len(best), **trait)
        add("encoders_in_set", _mean(is_read, ranking.sets), n_sets, **trait)
    is_closed_book = np.any(
        [read for (_, reads), read in by_trait.items() if reads == "closed_book"],
        axis=0,
    )
    if not is_closed_book.all():
        shares = counts_along(ranking, is_closed_book, N_PARTS)
        for k, along in enumerate(shares):
            n_best = float((is_closed_book[best].sum(axis=1) == k).sum())
            add("best_sets", n_best, len(best), n_closed_book=k)
            for bin_index, share in enumerate(along, start=1):
                add("share", float(share), n_sets, n_closed_book=k, bin=bin_index)
    return rows


def _mean(reads: np.ndarray, sets: Sequence[np.ndarray] | np.ndarray) -> float:
    """Return how many encoders of a set have a trait, on average."""
    return float(reads[np.asarray(sets)].sum(axis=1).mean())

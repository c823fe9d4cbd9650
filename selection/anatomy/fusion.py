"""Which combinations pay off: pairs of families, and the ways of fusing them.

An early-fused pair against each of its members (paper, figure across backbones, lower
half: against the better one), and the selected set against the six other variants of
the paper's table of features and fusion, question by question.
"""

import itertools

from extract.run.results import DIFFERENCE, ResultRow
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.subsets import LETTERS
from selection.anatomy.analysis import (
    Analysis,
    AnalysisInput,
    Findings,
    in_each_setting,
    some_rows,
)
from selection.anatomy.encoders import EVERY_FAMILY, Deployed

PAIRS, VARIANTS = "anatomy_pairs", "anatomy_fusion"
_ALL = "anatomy_all"  # rows that others have already


def _differences(
    deployed: Deployed, scored: list[Scored], pairs: list[tuple[str, str]], name: str
) -> list[ResultRow]:
    """Return how much more AUROC the first of each pair has, on the judged sets."""
    rows = some_rows(deployed.rows, deployed.judged)
    judged = [one.take(deployed.judged) for one in scored]
    made = detection_rows(judged, rows, deployed.bootstrap, _ALL, {name: pairs})
    wanted = f"auroc{DIFFERENCE}"
    return [r for r in made if r.experiment == name and r.metric == wanted]


def pairs(deployed: Deployed) -> list[ResultRow]:
    """Return what the encoder of two families has more than that of each of them."""
    names = [*LETTERS, *map("".join, itertools.combinations(LETTERS, 2))]
    scored = [
        Scored(name=f"encoder:{name}", scores=deployed.logits_of(name))
        for name in names
    ]
    compared = [
        (f"encoder:{name}", f"encoder:{one}")
        for name in names
        if len(name) == 2
        for one in name
    ]
    return _differences(deployed, scored, compared, PAIRS)


def fusion(given: AnalysisInput) -> Findings:
    """Return what the selected set has more than each other variant.

    Without hidden states only where `evaluate --ablations` has searched for it.
    """
    rows: list[ResultRow] = []
    for setting, deployed in given.settings.items():
        scores = dict(given.searches[setting].scores)
        scores["hidden_only"] = deployed.logits_of("H")
        scores["early_fusion"] = deployed.logits_of(EVERY_FAMILY)
        if setting == "with_context" and len(given.settings) > 1:
            single_pass = given.searches["single_pass"]
            scores["without_closed_book"] = single_pass.scores["champion"]
        if setting in given.without_hidden:
            scores["without_hidden"] = given.without_hidden[setting]
        scored = [Scored(name=name, scores=own) for name, own in scores.items()]
        compared = [("champion", name) for name in scores if name != "champion"]
        rows += _differences(deployed, scored, compared, VARIANTS)
    return Findings(rows)


ANALYSES = (
    Analysis("pairs", in_each_setting(pairs)),
    Analysis("fusion", fusion, uses=("ablations",)),
)

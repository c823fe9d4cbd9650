"""Which combinations pay off: pairs of families, and the ways of fusing them.

An early-fused pair against each of its members (paper, figure across backbones, lower
half: against the better one), and the selected set against the six other variants of
the paper's table of features and fusion, question by question.
"""

import itertools

from extract.run.results import DIFFERENCE, ResultRow
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.features.subsets import LETTERS
from jaxprobe.stage import run_selection, select_config
from selection.ablation import Ablation
from selection.anatomy.analysis import (
    EVERY_FAMILY,
    Evidence,
    some_rows,
    subset_logits,
)

PAIRS, VARIANTS = "anatomy_pairs", "anatomy_fusion"
_ALL = "anatomy_all"  # rows that others have already


def _differences(
    evidence: Evidence, scored: list[Scored], pairs: list[tuple[str, str]], name: str
) -> list[ResultRow]:
    """Return how much more AUROC the first of each pair has, on the judged sets."""
    rows = some_rows(evidence.rows, evidence.judged)
    own = [one.take(evidence.judged) for one in scored]
    made = detection_rows(own, rows, evidence.bootstrap, _ALL, {name: pairs})
    wanted = f"auroc{DIFFERENCE}"
    return [r for r in made if r.experiment == name and r.metric == wanted]


def pairs(evidence: Evidence) -> list[ResultRow]:
    """Return what the encoder of two families has more than that of each of them."""
    names = [*LETTERS, *map("".join, itertools.combinations(LETTERS, 2))]
    scored = [
        Scored(name=f"encoder:{name}", scores=subset_logits(evidence, name))
        for name in names
    ]
    compared = [
        (f"encoder:{name}", f"encoder:{one}")
        for name in names
        if len(name) == 2
        for one in name
    ]
    return _differences(evidence, scored, compared, PAIRS)


def fusion(evidence: Evidence) -> list[ResultRow]:
    """Return what the selected set has more than each other variant.

    Without hidden states only where `evaluate --ablations` has searched for it.
    """
    run, setting = evidence.run, evidence.setting
    heads, _ = run_selection(run, setting)
    scores = {name: heads[name]["scores"] for name in heads}
    scores["hidden_only"] = subset_logits(evidence, "H")
    scores["early_fusion"] = subset_logits(evidence, EVERY_FAMILY)
    if setting == "with_context" and len(evidence.settings) > 1:
        alone, _ = run_selection(run, "single_pass")
        scores["without_closed_book"] = alone["champion"]["scores"]
    if run.stage_done("ablate"):
        found = Ablation(run, select_config(run)).scores(setting, "without_hidden")
        scores |= {} if found is None else {"without_hidden": found}
    scored = [Scored(name=name, scores=own) for name, own in scores.items()]
    compared = [("champion", name) for name in scores if name != "champion"]
    return _differences(evidence, scored, compared, VARIANTS)

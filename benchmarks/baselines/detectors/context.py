"""Context against own knowledge: P(True), Lookback-Lens, ReDeEP and LUMINA."""

from functools import partial
from typing import NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import (
    chosen_rows,
    column_aurocs,
    defined_rows,
    logistic_log_odds,
    reading,
    scores_where_defined,
)
from beatrice.jaxprobe.rows import Rows


@baseline(
    "p_true",
    title="P(True)",
    source="Kadavath et al. (2022), section 3; jlko/semantic_uncertainty a8d9aa8, "
    "p_true.py",
    needs={"second_prompt"},
    reads=("p_true",),
    variant="without the 20 worked examples, which are labelled answers to other "
    "questions; the brainstormed ideas are the drawn answers where there are any",
)
def p_true(inputs: DetectorInput) -> DetectorOutput:
    """Return the probability of the option "A) True" to the model's own answer.

    NaN where the question cannot be put: the tokenizer has no single token for the
    option, or the prompt is longer than the window.
    """
    return DetectorOutput(reading(inputs, "p_true", 1)[None])


@baseline(
    "lookback_lens",
    title="Lookback-Lens",
    source="Chuang et al. (EMNLP 2024), section 2; voidism/Lookback-Lens f2846ef, "
    "step03_lookback_lens.py",
    reads=("lookback",),
    is_trained=True,
    variant="One example an answer, the mean over all its steps, and the label is "
    "correctness, not faithfulness to the context.",
    settings=("with_context",),
)
def lookback_lens(inputs: DetectorInput) -> DetectorOutput:
    """Return log-odds of a right answer from the lookback ratios of all heads.

    A ratio is the share of a head's attention that goes to the context, in [0, 1], mean
    over the answer's steps: the reading is `[n_rows, n_layers, n_heads]`.
    """
    rows, ratios = inputs.rows, inputs.readings["lookback"]
    features = ratios.reshape(len(ratios), -1)  # layer by layer, as in the code
    fit = partial(logistic_log_odds, max_iter=1000)
    train = rows.where("train")
    return DetectorOutput(scores_where_defined(features, rows.labels, train, fit))


# ReDeEP: external context of some heads against parametric knowledge of some layers.
# The official scripts rank heads and layers, and choose their numbers and the weight,
# on the test answers. Here heads and layers are ranked, and scores scaled, on the
# training answers; validation chooses how many are summed and the weight.
MOST_HEADS = 32
ALPHAS = tuple(np.arange(1, 20) / 10)


def ranked_sums(values: np.ndarray, rows: Rows, most: int) -> np.ndarray:
    """Return sums of the best columns, scaled to [0, 1] on the training rows.

    Args:
      values: `[n_rows, n_columns]`, higher = more likely correct. A column that lacks a
        value where another has one is left out.
      rows: with labels and splits.
      most: columns that are summed at most.

    Returns:
      `[n_rows, n_sums]`: of the best column, of the best two, and so on.
    """
    train = defined_rows(values, rows, "train")
    aurocs = column_aurocs(values[train], rows.labels[train])
    n_sums = min(most, int((~np.isnan(aurocs)).sum()))
    best = np.argsort(-aurocs, kind="stable")[:n_sums]
    if not len(best):
        raise ValueError(
            f"{rows.setting}: every head or layer lacks a value in some training row "
            "that another has, so none can be ranked"
        )
    sums = values[:, best].cumsum(axis=1)
    low, high = sums[train].min(axis=0), sums[train].max(axis=0)
    return (sums - low) / np.where(high > low, high - low, 1.0)


class _Choice(NamedTuple):
    """The best on validation: of equals the fewest heads, then layers, then weight."""

    scores: np.ndarray
    numbers: dict[str, float]


def _choose_sum(sums: np.ndarray, rows: Rows, what: str) -> _Choice:
    """Choose how many columns are summed, on validation; see `ranked_sums`."""
    valid = defined_rows(sums, rows, "validation")
    best = int(np.nanargmax(column_aurocs(sums[valid], rows.labels[valid])))
    return _Choice(sums[:, best], {what: best + 1})


def _choose_both(context: np.ndarray, knowledge: np.ndarray, rows: Rows) -> _Choice:
    """Choose numbers of heads and layers and the weight of the heads, on validation.

    Args:
      context: `[n_rows, n_sums]` of `ranked_sums` of external context scores.
      knowledge: the same of minus parametric knowledge scores.
      rows: with labels and splits.

    Returns:
      Scores `[n_rows]`: knowledge + alpha context, which is minus the paper's h.
    """
    valid = defined_rows(context, rows, "validation")
    labels, best = rows.labels[valid], (-1.0, 0, 0, 0.0)
    alphas = np.array(ALPHAS)
    for n_heads in range(context.shape[1]):
        weighted = alphas * context[valid, n_heads, None]
        # `[n_valid, n_layers, n_alphas]` in one ranking.
        both = knowledge[valid][:, :, None] + weighted[:, None]
        aurocs = column_aurocs(both.reshape(len(valid), -1), labels)
        at = int(np.nanargmax(aurocs))
        if aurocs[at] > best[0]:
            best = (aurocs[at], n_heads, *divmod(at, len(alphas)))
    _, n_heads, n_layers, at = best
    alpha = float(alphas[int(at)])
    scores = knowledge[:, n_layers] + alpha * context[:, n_heads]
    numbers = {"n_heads": n_heads + 1, "n_layers": n_layers + 1, "alpha": alpha}
    return _Choice(scores, numbers)


def _redeep(
    name: str, title: str, variant: str, *, context: bool, knowledge: str | None
) -> None:
    """Register ReDeEP, or one of its two halves alone.

    Args:
      name: of the detector.
      title: as in the tables.
      variant: what differs from the published one.
      context: whether the external context counts.
      knowledge: the reading of parametric knowledge that counts, or None.
    """

    @baseline(
        name,
        title=title,
        source="Sun et al. (ICLR 2025), section 3; Jeryi-Sun/ReDEeP-ICLR e969202, "
        "token level",
        reads=("redeep_ecs",) * context + ((knowledge,) if knowledge else ()),
        is_trained=True,
        variant=variant,
        settings=("with_context",),
    )
    def redeep(inputs: DetectorInput) -> DetectorOutput:
        rows = inputs.rows
        heads = layers = np.empty(0)
        if context:
            values = reading(inputs, "redeep_ecs", 3).reshape(len(rows.ids), -1)
            heads = ranked_sums(values, rows, MOST_HEADS)
        if knowledge is not None:
            values = -reading(inputs, knowledge, 2)
            layers = ranked_sums(values, rows, values.shape[1])
        if context and knowledge is not None:
            choice = _choose_both(heads, layers, rows)
        elif context:
            choice = _choose_sum(heads, rows, "n_heads")
        else:
            choice = _choose_sum(layers, rows, "n_layers")
        return DetectorOutput(
            choice.scores[None], chosen_rows(rows, name, choice.numbers)
        )


_FAIR = (
    "heads and layers are ranked on training answers and their numbers chosen on "
    "validation, not on test; all heads are candidates; answers, not tokens, are the "
    "units that are scaled"
)
_JSD = (
    f"{_FAIR}; the Jensen-Shannon divergence as in the paper, where the code exchanges "
    "its arguments"
)
_PKS = "redeep_pks_swapped"
_redeep("redeep", "ReDeEP", _FAIR, context=True, knowledge=_PKS)
_redeep(
    "redeep:paper",
    "ReDeEP (paper's divergence)",
    _JSD,
    context=True,
    knowledge="redeep_pks",
)
_redeep("redeep_ecs", "ReDeEP-ECS", _FAIR, context=True, knowledge=None)
_redeep("redeep_pks", "ReDeEP-PKS", _FAIR, context=False, knowledge=_PKS)
_redeep(
    "redeep_pks:paper",
    "ReDeEP-PKS (paper's divergence)",
    _JSD,
    context=False,
    knowledge="redeep_pks",
)

# LUMINA: what the model adds by itself against what the passages change, untrained.
_LAMBDA = 0.5  # of the paper, for every model; the two are not scaled


def _lumina(
    name: str, title: str, rate: str | None, variant: str, *, discrepancy: bool
) -> None:
    """Register LUMINA, or one of its two halves alone.

    Args:
      name: of the detector.
      title: as in the tables.
      rate: the reading of the processing rate that counts, or None; a high one means
        that the answer comes from the model's own knowledge.
      variant: what differs from the published one.
      discrepancy: whether the discrepancy counts; a high one means that the passages
        decided the answer.
    """

    @baseline(
        name,
        title=title,
        source="Yeh et al. (2026), arXiv 2509.21875; deeplearning-wisc/LUMINA c43ff41",
        needs={"swapped"} if discrepancy else (),
        reads=((rate,) if rate else ()) + ("lumina_mmd",) * discrepancy,
        variant=variant,
        settings=("with_context",),
    )
    def lumina(inputs: DetectorInput) -> DetectorOutput:
        scores = np.zeros(len(inputs.rows.ids))
        if rate is not None:
            scores = scores - _LAMBDA * reading(inputs, rate, 1)
        if discrepancy:
            scores = scores + (1 - _LAMBDA) * reading(inputs, "lumina_mmd", 1)
        return DetectorOutput(scores[None])


_SWAP = (
    "the other passages are those of the next question of the set that shares no title "
    "with the own ones and whose passages hold no gold answer: the rule is unpublished"
)
_INNER = "the last layer is left out, as in the paper; the code norms its state twice"
_PAPER = "lumina_ipr_inner"
_lumina("lumina", "LUMINA", "lumina_ipr", _SWAP, discrepancy=True)
_lumina(
    "lumina:paper",
    "LUMINA (paper's sum)",
    _PAPER,
    f"{_SWAP}; {_INNER}",
    discrepancy=True,
)
_lumina("lumina_mmd", "LUMINA-MMD", None, _SWAP, discrepancy=True)
_lumina("lumina_ipr", "LUMINA-IPR", "lumina_ipr", "", discrepancy=False)
_lumina(
    "lumina_ipr:paper", "LUMINA-IPR (paper's sum)", _PAPER, _INNER, discrepancy=False
)

"""P(True), and uses of context or own knowledge: Lookback-Lens, ReDeEP and LUMINA."""

from functools import partial

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
from beatrice.jaxprobe.rows import StoreRows


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
    """Return the probability of the option "A) True" for the model's own answer.

    NaN if the tokenizer has no single token for the option, or the prompt is longer
    than the context window.
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

    A ratio is the share of a head's attention to the context, in [0, 1], averaged over
    the answer's steps; the reading is `[n_rows, n_layers, n_heads]`.
    """
    ratios = reading(inputs, "lookback", 3, None)
    features = ratios.reshape(len(ratios), -1)  # layer by layer, as in the code
    fit = partial(logistic_log_odds, max_iter=1000)
    return DetectorOutput(scores_where_defined(features, inputs.rows, fit))


# ReDeEP: external context in some heads against parametric knowledge in some layers.
# The official scripts rank heads and layers, and choose their numbers and the weight,
# on test answers. Here, training answers rank heads and layers and scale scores, and
# validation chooses how many to sum and the weight.
ALPHAS = tuple(np.arange(1, 20) / 10)


def ranked_sums(values: np.ndarray, rows: StoreRows, most: int) -> np.ndarray:
    """Return sums of the best columns, scaled to [0, 1] on the training rows.

    `values` is `[n_rows, n_columns]`, higher = more likely correct. Returns `[n_rows,
    n_sums]`: sums of the best column, the best two, and so on up to `most`. A column
    that lacks a value in a training row where another has one is left out.
    """
    train = defined_rows(np.any(np.isfinite(values), axis=1), rows, "train")
    aurocs = column_aurocs(values[train], rows.labels[train])
    n_sums = min(most, int((~np.isnan(aurocs)).sum()))
    best = np.argsort(-aurocs, kind="stable")[:n_sums]
    if not len(best):
        raise ValueError(
            f"{rows.setting}: every head or layer lacks a value in some training row "
            "in which another has one, so none can be ranked"
        )
    sums = values[:, best].cumsum(axis=1)
    low, high = sums[train].min(axis=0), sums[train].max(axis=0)
    return (sums - low) / np.where(high > low, high - low, 1.0)


def choose_sums(
    heads: np.ndarray | None, layers: np.ndarray | None, rows: StoreRows
) -> tuple[np.ndarray, dict[str, float]]:
    """Choose numbers of heads and layers to sum, and the heads' weight, on validation.

    `heads` are the `ranked_sums` of external context scores, `[n_rows, n_sums]`, or
    None; `layers` the same for minus the parametric knowledge scores.

    Returns:
      Scores `[n_rows]`: knowledge + alpha context, which is minus the paper's h; and
      the choices (ties: the fewest heads, then layers, then the least weight).
    """
    halves = [sums for sums in (heads, layers) if sums is not None]
    alphas = np.array(ALPHAS if len(halves) > 1 else (1.0,))
    nothing = halves[0][:, :1] * 0  # zero, or NaN where the given half is NaN
    context = nothing if heads is None else heads
    knowledge = nothing if layers is None else layers
    valid = defined_rows(np.any(np.isfinite(context), axis=1), rows, "validation")
    labels, best = rows.labels[valid], (-1.0, 0, 0, 0)
    for n_heads in range(context.shape[1]):
        weighted = alphas * context[valid, n_heads, None]
        # `[n_valid, n_layers, n_alphas]`, all ranked in one call.
        both = knowledge[valid][:, :, None] + weighted[:, None]
        aurocs = column_aurocs(both.reshape(len(valid), -1), labels)
        at = int(np.nanargmax(aurocs))
        if aurocs[at] > best[0]:
            best = (float(aurocs[at]), n_heads, *divmod(at, len(alphas)))
    _, n_heads, n_layers, at = best
    scores = knowledge[:, n_layers] + alphas[at] * context[:, n_heads]
    numbers = {"n_heads": (heads, n_heads + 1), "n_layers": (layers, n_layers + 1)}
    chosen = {name: n for name, (sums, n) in numbers.items() if sums is not None}
    weight = {"alpha": float(alphas[at])} if len(halves) > 1 else {}
    return scores, {**chosen, **weight}


_FAIR = (
    "heads and layers are ranked on training answers and their numbers chosen on "
    "validation, not on test; all heads are candidates; answers, not tokens, are the "
    "units that are scaled"
)
_JSD = (
    f"{_FAIR}; the Jensen-Shannon divergence as in the paper, where the code exchanges "
    "its arguments"
)


def _add_redeep(
    name: str, title: str, variant: str, context: str | None, knowledge: str | None
) -> None:
    """Add a variant of ReDeEP to the catalogue.

    `context` and `knowledge` are the readings of external context and of parametric
    knowledge; None leaves that half out.
    """

    @baseline(
        name,
        title=title,
        source="Sun et al. (ICLR 2025), section 3; Jeryi-Sun/ReDEeP-ICLR e969202, "
        "token level",
        reads=tuple(filter(None, (context, knowledge))),
        is_trained=True,
        variant=variant,
        settings=("with_context",),
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        rows, heads, layers = inputs.rows, None, None
        if context is not None:
            values = reading(inputs, context, 3).reshape(len(rows.ids), -1)
            heads = ranked_sums(values, rows, most=32)
        if knowledge is not None:
            values = -reading(inputs, knowledge, 2)
            layers = ranked_sums(values, rows, values.shape[1])
        scores, chosen = choose_sums(heads, layers, rows)
        return DetectorOutput(scores[None], chosen_rows(rows, name, chosen))


_ECS, _PKS, _PAPER_PKS = "redeep_ecs", "redeep_pks_swapped", "redeep_pks"
_DIVERGENCE = "(paper's divergence)"
_add_redeep("redeep", "ReDeEP", _FAIR, _ECS, _PKS)
_add_redeep("redeep:paper", f"ReDeEP {_DIVERGENCE}", _JSD, _ECS, _PAPER_PKS)
_add_redeep("redeep_ecs", "ReDeEP-ECS", _FAIR, _ECS, None)
_add_redeep("redeep_pks", "ReDeEP-PKS", _FAIR, None, _PKS)
_add_redeep("redeep_pks:paper", f"ReDeEP-PKS {_DIVERGENCE}", _JSD, None, _PAPER_PKS)


# LUMINA, untrained: the model's own contribution against the effect of the passages.
_LAMBDA = 0.5  # the paper's, for every model; the two terms are not scaled
_SWAP = (
    "the other passages are those of the next question of the set that shares no title "
    "with the own ones and whose passages hold no gold answer: the rule is unpublished"
)
_INNER = "the last layer is left out, as in the paper; the code norms its state twice"


def _add_lumina(
    name: str, title: str, variant: str, rate: str | None, change: str | None
) -> None:
    """Add a variant of LUMINA to the catalogue; None leaves that half out.

    `rate` is the reading of the processing rate, which is high if the answer comes from
    the model's own knowledge. `change` is the reading of the discrepancy, which is high
    if the passages decided the answer.
    """

    @baseline(
        name,
        title=title,
        source="Yeh et al. (2026), arXiv 2509.21875; deeplearning-wisc/LUMINA c43ff41",
        needs={"swapped"} if change else (),
        reads=tuple(filter(None, (rate, change))),
        variant=variant,
        settings=("with_context",),
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        scores = np.zeros(len(inputs.rows.ids))
        if rate is not None:
            scores = scores - _LAMBDA * reading(inputs, rate, 1)
        if change is not None:
            scores = scores + (1 - _LAMBDA) * reading(inputs, change, 1)
        return DetectorOutput(scores[None])


_IPR, _INNER_IPR, _MMD = "lumina_ipr", "lumina_ipr_inner", "lumina_mmd"
_SUM = "(paper's sum)"
_add_lumina("lumina", "LUMINA", _SWAP, _IPR, _MMD)
_add_lumina("lumina:paper", f"LUMINA {_SUM}", f"{_SWAP}; {_INNER}", _INNER_IPR, _MMD)
_add_lumina("lumina_mmd", "LUMINA-MMD", _SWAP, None, _MMD)
_add_lumina("lumina_ipr", "LUMINA-IPR", "", _IPR, None)
_add_lumina("lumina_ipr:paper", f"LUMINA-IPR {_SUM}", _INNER, _INNER_IPR, None)

"""Context against own knowledge: P(True), Lookback-Lens, ReDeEP and LUMINA."""

from functools import partial
from typing import NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    Baseline,
    DetectorInput,
    DetectorOutput,
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


def p_true(inputs: DetectorInput) -> DetectorOutput:
    """Return the probability of the option "A) True".

    NaN where the question cannot be put: the tokenizer has no single token for the
    option, or the prompt is longer than the window.

    Raises:
      ValueError: it was not read.
    """
    return DetectorOutput(reading(inputs, "p_true", 1)[None])


P_TRUE = Baseline(
    name="p_true",
    title="P(True)",
    source="Kadavath et al. (2022), section 3; jlko/semantic_uncertainty a8d9aa8, "
    "p_true.py",
    score=p_true,
    needs=frozenset({"second_prompt"}),
    reads=("p_true",),
    variant="without the 20 worked examples, which are labelled answers to other "
    "questions; the brainstormed ideas are the drawn answers where there are any",
)
_ONE = (P_TRUE,)


def lookback_lens(ratios: np.ndarray, rows: Rows) -> DetectorOutput:
    """Return log-odds of a right answer from the lookback ratios of all heads.

    Args:
      ratios: `[n_rows, n_layers, n_heads]` in [0, 1], means over the answer's steps;
        NaN where a row was not read.
      rows: what the rows are.

    Returns:
      `[1, n_rows]` scores; NaN where a ratio is.

    Raises:
      ValueError: the training rows hold one class only.
    """
    features = ratios.reshape(len(ratios), -1)  # layer by layer, as in the code
    fit = partial(logistic_log_odds, max_iter=1000)
    return DetectorOutput(
        scores_where_defined(features, rows.labels, rows.where("train"), fit)
    )


def _score(inputs: DetectorInput) -> DetectorOutput:
    return lookback_lens(inputs.readings["lookback"], inputs.rows)


LOOKBACK_LENS = Baseline(
    name="lookback_lens",
    title="Lookback-Lens",
    source="Chuang et al. (EMNLP 2024), section 2; voidism/Lookback-Lens f2846ef, "
    "step03_lookback_lens.py",
    score=_score,
    reads=("lookback",),
    is_trained=True,
    variant="One example an answer, the mean over all its steps, and the label is "
    "correctness, not faithfulness to the context.",
    settings=("with_context",),
)
_TWO = (LOOKBACK_LENS,)


MOST_HEADS = 32
ALPHAS = tuple(np.arange(1, 20) / 10)


def ranked_sums(values: np.ndarray, rows: Rows, most: int) -> np.ndarray:
    """Return sums of the best columns, scaled to [0, 1] on the training rows.

    Args:
      values: `[n_rows, n_columns]`, higher = more likely correct. A column that lacks a
        value where another has one is left out.
      rows: what the rows are.
      most: columns that are summed at most.

    Returns:
      `[n_rows, n_sums]`: of the best column, of the best two, and so on.

    Raises:
      ValueError: the training rows hold one class only, or no column is left.
    """
    train = defined_rows(values, rows, "train")
    aurocs = column_aurocs(values[train], rows.labels[train])
    best = np.argsort(-aurocs, kind="stable")[
        : min(most, int((~np.isnan(aurocs)).sum()))
    ]
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
    chosen: dict[str, float]


def choose_sum(sums: np.ndarray, rows: Rows, what: str) -> _Choice:
    """Choose how many columns are summed, on validation; see `ranked_sums`."""
    valid = defined_rows(sums, rows, "validation")
    best = int(np.nanargmax(column_aurocs(sums[valid], rows.labels[valid])))
    return _Choice(sums[:, best], {what: best + 1})


def choose_both(context: np.ndarray, knowledge: np.ndarray, rows: Rows) -> _Choice:
    """Choose numbers of heads and layers and the weight of the heads, on validation.

    Args:
      context: `[n_rows, n_sums]` of `ranked_sums` of external context scores.
      knowledge: the same of minus parametric knowledge scores.
      rows: what the rows are.

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


def redeep(
    inputs: DetectorInput, *, context: bool, knowledge: str | None, detector: str
) -> DetectorOutput:
    """Return ReDeEP's score, or one of its two halves alone.

    Args:
      inputs: with the readings.
      context: whether the external context counts.
      knowledge: the reading of parametric knowledge that counts, or None.
      detector: its name in the rows.

    Raises:
      ValueError: they were not read, or a split holds one class only.
    """
    rows, found = inputs.rows, None
    sums_of_heads = sums_of_layers = np.empty(0)
    if context:
        heads = reading(inputs, "redeep_ecs", 3).reshape(len(rows.ids), -1)
        sums_of_heads = ranked_sums(heads, rows, MOST_HEADS)
        found = choose_sum(sums_of_heads, rows, "n_heads")
    if knowledge is not None:
        layers = -reading(inputs, knowledge, 2)
        sums_of_layers = ranked_sums(layers, rows, layers.shape[1])
        found = choose_sum(sums_of_layers, rows, "n_layers")
    if context and knowledge is not None:
        found = choose_both(sums_of_heads, sums_of_layers, rows)
    if found is None:
        raise ValueError("ReDeEP reads external context, parametric knowledge, or both")
    return DetectorOutput(found.scores[None], chosen_rows(rows, detector, found.chosen))


_REDEEP = (
    "Sun et al. (ICLR 2025), section 3; Jeryi-Sun/ReDEeP-ICLR e969202, token level"
)
_FAIR = (
    "heads and layers are ranked on training answers and their numbers chosen on "
    "validation, not on test; all heads are candidates; answers, not tokens, are the "
    "units that are scaled"
)
_JSD = (
    "; the Jensen-Shannon divergence as in the paper, where the code exchanges its "
    "arguments"
)
# Baseline: title, whether it reads heads, the reading of layers.
_REDEEP_KINDS = {
    "redeep": ("ReDeEP", True, "redeep_pks_swapped"),
    "redeep:paper": ("ReDeEP (paper's divergence)", True, "redeep_pks"),
    "redeep_ecs": ("ReDeEP-ECS", True, None),
    "redeep_pks": ("ReDeEP-PKS", False, "redeep_pks_swapped"),
    "redeep_pks:paper": ("ReDeEP-PKS (paper's divergence)", False, "redeep_pks"),
}
_THREE = tuple(
    Baseline(
        name=name,
        title=title,
        source=_REDEEP,
        score=partial(redeep, context=heads, knowledge=layers, detector=name),
        reads=(*(("redeep_ecs",) if heads else ()), *((layers,) if layers else ())),
        is_trained=True,
        variant=_FAIR + (_JSD if name.endswith(":paper") else ""),
        settings=("with_context",),
    )
    for name, (title, heads, layers) in _REDEEP_KINDS.items()
)


_LAMBDA = 0.5  # of the paper, for every model; the two are not scaled


def lumina(
    inputs: DetectorInput, *, rate: str | None, discrepancy: bool
) -> DetectorOutput:
    """Return LUMINA's score, or one of its two halves alone.

    Args:
      inputs: with the readings.
      rate: the reading of the processing rate that counts, or None; a high one means
        that the answer comes from the model's own knowledge.
      discrepancy: whether the discrepancy counts; a high one means that the passages
        decided the answer.

    Raises:
      ValueError: they were not read.
    """
    terms = []
    if rate is not None:
        terms.append(-_LAMBDA * reading(inputs, rate, 1))
    if discrepancy:
        terms.append((1 - _LAMBDA) * reading(inputs, "lumina_mmd", 1))
    return DetectorOutput(sum(terms)[None])


_LUMINA = "Yeh et al. (2026), arXiv 2509.21875; deeplearning-wisc/LUMINA c43ff41"
_SWAP = (
    "the other passages are those of the next question of the set that shares no title "
    "with the own ones and whose passages hold no gold answer: the rule is unpublished"
)
_INNER = "the last layer is left out, as in the paper; the code norms its state twice"
# Baseline: title, the reading of the rate, whether it reads the discrepancy, variant.
_LUMINA_KINDS = {
    "lumina": ("LUMINA", "lumina_ipr", True, _SWAP),
    "lumina:paper": (
        "LUMINA (paper's sum)",
        "lumina_ipr_inner",
        True,
        f"{_SWAP}; {_INNER}",
    ),
    "lumina_mmd": ("LUMINA-MMD", None, True, _SWAP),
    "lumina_ipr": ("LUMINA-IPR", "lumina_ipr", False, ""),
    "lumina_ipr:paper": (
        "LUMINA-IPR (paper's sum)",
        "lumina_ipr_inner",
        False,
        _INNER,
    ),
}
_FOUR = tuple(
    Baseline(
        name=name,
        title=title,
        source=_LUMINA,
        score=partial(lumina, rate=rate, discrepancy=discrepancy),
        needs=frozenset({"swapped"} if discrepancy else ()),
        reads=(*((rate,) if rate else ()), *(("lumina_mmd",) if discrepancy else ())),
        variant=variant,
        settings=("with_context",),
    )
    for name, (title, rate, discrepancy, variant) in _LUMINA_KINDS.items()
)
DETECTORS = (*_ONE, *_TWO, *_THREE, *_FOUR)

"""ReDeEP: external context of some heads against parametric knowledge of some layers.

The official scripts rank heads and layers, and choose their numbers and the weight, on
the test answers. Here heads and layers are ranked, and scores scaled, on the training
answers; validation chooses how many are summed and the weight.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from beatrice.benchmarks.baselines.detector import Detector, Evidence, Found
from beatrice.benchmarks.baselines.internal.choice import (
    chosen_rows,
    column_aurocs,
    defined_rows,
    reading,
)
from beatrice.jaxprobe.features.rows import Rows

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
    evidence: Evidence, *, context: bool, knowledge: str | None, detector: str
) -> Found:
    """Return ReDeEP's score, or one of its two halves alone.

    Args:
      evidence: with the readings.
      context: whether the external context counts.
      knowledge: the reading of parametric knowledge that counts, or None.
      detector: its name in the rows.

    Raises:
      ValueError: they were not read, or a split holds one class only.
    """
    rows, found = evidence.rows, None
    sums_of_heads = sums_of_layers = np.empty(0)
    if context:
        heads = reading(evidence, "redeep_ecs", 3).reshape(len(rows.ids), -1)
        sums_of_heads = ranked_sums(heads, rows, MOST_HEADS)
        found = choose_sum(sums_of_heads, rows, "n_heads")
    if knowledge is not None:
        layers = -reading(evidence, knowledge, 2)
        sums_of_layers = ranked_sums(layers, rows, layers.shape[1])
        found = choose_sum(sums_of_layers, rows, "n_layers")
    if context and knowledge is not None:
        found = choose_both(sums_of_heads, sums_of_layers, rows)
    if found is None:
        raise ValueError("ReDeEP reads external context, parametric knowledge, or both")
    return Found(found.scores[None], chosen_rows(rows, detector, found.chosen))


_SOURCE = (
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
# Detector: title, whether it reads heads, the reading of layers.
_KINDS = {
    "redeep": ("ReDeEP", True, "redeep_pks_swapped"),
    "redeep:paper": ("ReDeEP (paper's divergence)", True, "redeep_pks"),
    "redeep_ecs": ("ReDeEP-ECS", True, None),
    "redeep_pks": ("ReDeEP-PKS", False, "redeep_pks_swapped"),
    "redeep_pks:paper": ("ReDeEP-PKS (paper's divergence)", False, "redeep_pks"),
}
DETECTORS = tuple(
    Detector(
        name=name,
        title=title,
        source=_SOURCE,
        score=partial(redeep, context=heads, knowledge=layers, detector=name),
        reads=(*(("redeep_ecs",) if heads else ()), *((layers,) if layers else ())),
        is_trained=True,
        variant=_FAIR + (_JSD if name.endswith(":paper") else ""),
        settings=("with_context",),
    )
    for name, (title, heads, layers) in _KINDS.items()
)

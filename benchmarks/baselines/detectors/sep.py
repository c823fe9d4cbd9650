"""Semantic entropy probes: from one state, whether drawn answers would disagree."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import (
    chosen_rows,
    last_steps,
    logistic_log_odds,
    scores_where_defined,
    states_at,
    validation_auroc,
)
from beatrice.benchmarks.baselines.detectors.clustering import (
    BY_WORDS,
    Equivalences,
    by_entailment,
    by_words,
    requirements,
)
from beatrice.benchmarks.baselines.detectors.entropy import entropies_of
from beatrice.jaxprobe.rows import Rows

FEWEST_LAYERS = 5  # of a range, as in the code


def entropy_threshold(entropies: np.ndarray) -> float:
    """Return the entropy that parts low ones from high ones best (section 4, eq. 3).

    Of 100 thresholds, evenly from just above 0 to the largest entropy, the one with the
    least sum of squared deviations from the means of both parts.

    Args:
      entropies: `[n]` nats, at least one.
    """

    def deviations(threshold: float) -> float:
        parts = entropies[entropies < threshold], entropies[entropies >= threshold]
        return sum(float(((x - x.mean()) ** 2).sum()) for x in parts if len(x))

    return min(np.linspace(1e-10, entropies.max(), 100).tolist(), key=deviations)


def best_range(aurocs: Sequence[float]) -> tuple[int, int]:
    """Return the `[start, stop)` of neighbouring layers with the largest mean AUROC.

    The last layer is in no range, as in the code, and a range has five layers at least.
    Of fewer than six layers it is all but the last; of one, that one. Of equals, the
    first and shortest.

    Args:
      aurocs: one a layer, at least one.
    """
    n = max(1, len(aurocs) - 1)
    fewest = min(FEWEST_LAYERS, n)
    ranges = [(i, j) for i in range(n) for j in range(i + fewest, n + 1)]
    return max(ranges, key=lambda span: float(np.mean(aurocs[slice(*span)])))


def entropy_probe(
    states_of: Callable[[int], np.ndarray],
    layers: Sequence[int],
    entropies: np.ndarray,
    rows: Rows,
    name: str,
) -> DetectorOutput:
    """Return log-odds of low semantic entropy, from neighbouring layers side by side.

    The threshold is of the training rows of all sets together. A probe of each layer
    says how well it tells right answers from wrong ones on validation, and the range of
    layers is chosen by that; the code does so on the test rows. So samples of training
    rows alone are read.

    Args:
      states_of: of a layer, `[n_rows, d_model]`; NaN where an answer has no such state.
      layers: of the store, rising.
      entropies: `[n_rows]` discrete semantic entropy in nats; NaN where no answer was
        drawn.
      rows: with labels and splits.
      name: of the detector.

    Returns:
      `[1, n_rows]` scores.
    """
    train = rows.where("train")
    train = train[np.isfinite(entropies[train])]
    if not len(train):
        raise ValueError(
            f"{name}: no training answer has a semantic entropy, from which it learns; "
            "draw answers with `beatrice sample`"
        )
    threshold = entropy_threshold(entropies[train])
    is_low = entropies < threshold

    def scores_of(*layers: int) -> np.ndarray:
        states = np.concatenate([states_of(layer) for layer in layers], axis=1)
        return scores_where_defined(states, is_low, train, logistic_log_odds)

    start, stop = best_range([validation_auroc(scores_of(x), rows) for x in layers])
    values = {
        "threshold": threshold,
        "first_layer": layers[start],
        "last_layer": layers[stop - 1],
    }
    chosen = chosen_rows(rows, name, values)
    return DetectorOutput(scores_of(*layers[start:stop]), chosen)


def before_generation(last: np.ndarray) -> np.ndarray:
    """Return the step TBG of answers, from their last steps `[n_rows]`."""
    return np.zeros_like(last)


def second_last(last: np.ndarray) -> np.ndarray:
    """Return the step of the second-last answer token, as the paper says it.

    Of one token that is the token before, the last of the prompt; an answer without a
    token has none, and its step is none.
    """
    return last - 1


def official_second_last(last: np.ndarray) -> np.ndarray:
    """Return the step SLT of the code: two before the last.

    Its index n - 2 counts from the prompt's pass, so that it is the third-last token;
    of one token the index is -1, which Python reads as the last step.
    """
    return np.where(last >= 2, last - 2, last)


# Name, title, which step of an answer, and in words.
_STEPS = (
    (
        "sep",
        "SEP",
        official_second_last,
        "the token of the code, which stands one before the second-last",
    ),
    (
        "sep_corrected",
        "SEP, second-last token",
        second_last,
        "corrected: the second-last answer token, which the paper names and the code "
        "misses by one",
    ),
    (
        "sep_tbg",
        "SEP, before the answer",
        before_generation,
        "the last prompt token, before the answer is generated",
    ),
)
_VARIANT = (
    "; the range of layers is chosen on validation answers, the code's on test; fitted "
    "on training answers alone"
)
for (_name, _title, _step_of, _token), (
    _suffix,
    _more,
    _words,
    _equivalences,
) in itertools.product(
    _STEPS,
    (
        ("", "", "", by_entailment),
        (":words", " (words)", f"; {BY_WORDS}", by_words),
    ),
):

    @baseline(
        f"{_name}{_suffix}",
        title=f"{_title}{_more}",
        source="Kossen et al. (2024), arXiv 2406.15927, section 4; "
        "OATML/semantic-entropy-probes 02e2167, train-latent-probe.ipynb",
        needs=requirements(_equivalences),
        is_trained=True,
        variant=f"{_token}{_VARIANT}{_words}",
    )
    def _sep(
        inputs: DetectorInput,
        name: str = f"{_name}{_suffix}",
        step_of: Callable[[np.ndarray], np.ndarray] = _step_of,
        equivalences: Equivalences = _equivalences,
    ) -> DetectorOutput:
        store = inputs.store
        states_of = partial(states_at, store, step_of(last_steps(store)))
        entropies = entropies_of(inputs, equivalences)
        layers = store.spec.hidden_layers
        return entropy_probe(states_of, layers, entropies, inputs.rows, name)

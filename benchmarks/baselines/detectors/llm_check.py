"""LLM-Check: states, attention, perplexity and entropy of one forward, untrained.

Which sign means "wrong" depends on the data (the paper draws both, and the official
notebook takes minus perplexity and minus attention for answers that other models
wrote), and no layer is fixed in the code: validation chooses both.
"""

import numpy as np

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.choice import (
    chosen_rows,
    defined_rows,
    oriented,
    reading,
)
from beatrice.benchmarks.baselines.plain import SURPRISAL
from beatrice.extract.store.store import read_family


def answer_perplexity(inputs: DetectorInput) -> np.ndarray:
    """Return the perplexity of the answer tokens, `[n_rows, 1]`, from the store.

    Without the stop token, as in the official code; NaN for an answer without tokens.
    """
    ragged = read_family(inputs.store, "prob")
    perplexity = np.full((len(inputs.answers), 1), np.nan)
    for i, answer in enumerate(inputs.answers):
        if answer.token_ids:
            start = len(answer.prompt_ids) - 1 - int(ragged.first_tokens[i])
            rows = ragged.example(i)[start : start + len(answer.token_ids)]
            perplexity[i] = np.exp(rows[:, SURPRISAL].astype(np.float64).mean())
    return perplexity


def _candidates(inputs: DetectorInput, name: str) -> tuple[np.ndarray, int | None]:
    """Return what validation chooses from, before a sign is given.

    Returns:
      `[n_rows, n_columns]`; and the layer of the first column, counted from 1, None
      where columns are no layers.
    """
    if name == "perplexity":
        return answer_perplexity(inputs), None
    if name.startswith("llmcheck_hidden"):
        return reading(inputs, name, 2), 1
    if name.startswith("llmcheck_attention"):
        # The official loop over layers begins at its second and never scores the first.
        values = reading(inputs, name, 2)
        return (values[:, 1:], 2) if values.shape[1] > 1 else (values, 1)
    return reading(inputs, name, 1)[:, None], None


def _oriented(inputs: DetectorInput, name: str) -> tuple[np.ndarray, dict[str, float]]:
    """Return a score's `[n_rows]` values, and its sign and layer."""
    values, first_layer = _candidates(inputs, name)
    scores, column, sign = oriented(values, inputs.rows)
    layer = {} if first_layer is None else {"layer": first_layer + column}
    return scores, {"sign": sign, **layer}


_SOURCE = (
    "Sriramanan et al. (NeurIPS 2024), section 3; "
    "GaurangSriramanan/LLM_Check_Hallucination_Detection 2f3bf9e, common_utils.py"
)
_SIGN = "validation chooses the sign, which the code leaves open"
_SIGN_AND_LAYER = (
    "validation chooses the sign and the layer, which the code leaves open"
)
_OWN_TOKENS = (
    "; the answer's tokens alone, a flag of the code that its script leaves off"
)
_ALIGNED = (
    "; of the distributions that predict the answer's tokens, where the code takes "
    "those one token later"
)


def _register(name: str, title: str, score_name: str, variant: str) -> None:
    """Register one score, from the layer and with the sign that validation chooses."""

    @baseline(
        name,
        title=f"LLM-Check ({title})",
        source=_SOURCE,
        reads=() if score_name == "perplexity" else (score_name,),
        variant=variant,
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        scores, chosen = _oriented(inputs, score_name)
        return DetectorOutput(scores[None], chosen_rows(inputs.rows, name, chosen))


for _name, _title, _score_name, _variant in (
    ("llmcheck_hidden", "hidden", "llmcheck_hidden_all", _SIGN_AND_LAYER),
    (
        "llmcheck_hidden:answer",
        "hidden, answer tokens",
        "llmcheck_hidden",
        _SIGN_AND_LAYER + _OWN_TOKENS,
    ),
    ("llmcheck_attention", "attention", "llmcheck_attention_all", _SIGN_AND_LAYER),
    (
        "llmcheck_attention:answer",
        "attention, answer tokens",
        "llmcheck_attention",
        _SIGN_AND_LAYER + _OWN_TOKENS,
    ),
    ("llmcheck_perplexity", "perplexity", "perplexity", _SIGN),
    ("llmcheck_entropy", "entropy", "logit_entropy", _SIGN),
    (
        "llmcheck_entropy:corrected",
        "entropy, corrected",
        "logit_entropy_corrected",
        _SIGN + _ALIGNED,
    ),
    ("llmcheck_window", "window entropy", "window_entropy", _SIGN),
    (
        "llmcheck_window:corrected",
        "window entropy, corrected",
        "window_entropy_corrected",
        _SIGN + _ALIGNED,
    ),
):
    _register(_name, _title, _score_name, _variant)

# What is combined: names in the rows of choices, and readings.
_COMBINED = {
    "hidden": "llmcheck_hidden_all",
    "attention": "llmcheck_attention_all",
    "perplexity": "perplexity",
    "window": "window_entropy",
    "entropy": "logit_entropy",
}


@baseline(
    "llmcheck_combined",
    title="LLM-Check (combined)",
    source=_SOURCE,
    reads=[name for name in _COMBINED.values() if name != "perplexity"],
    # Neither the paper nor the code combines them; the paper leaves it to later work.
    variant="own definition: the mean of hidden, attention, perplexity, window entropy "
    "and entropy, each oriented and standardised on validation answers",
)
def llmcheck_combined(inputs: DetectorInput) -> DetectorOutput:
    """Return the mean of the oriented scores, each standardised on validation rows.

    NaN for a row that lacks one of the scores.
    """
    rows = inputs.rows
    total, chosen = np.zeros(len(rows.ids)), {}
    for prefix, name in _COMBINED.items():
        scores, choices = _oriented(inputs, name)
        valid = scores[defined_rows(scores[:, None], rows, "validation")]
        total += (scores - valid.mean()) / (valid.std() or 1.0)
        chosen |= {f"{prefix}_{metric}": value for metric, value in choices.items()}
    chosen = chosen_rows(rows, "llmcheck_combined", chosen)
    return DetectorOutput(total[None] / len(_COMBINED), chosen)

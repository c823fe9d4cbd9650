"""LLM-Check: untrained scores from states, attention and logits of one forward.

Which sign means "wrong" depends on the data (the paper shows both, and the official
notebook uses minus perplexity and minus attention for answers of other models), and the
code fixes no layer, so validation chooses both.
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
from beatrice.extract.store.store import read_family
from beatrice.jaxprobe.tokens import SURPRISAL


def answer_perplexity(inputs: DetectorInput) -> np.ndarray:
    """Return perplexities without the stop token, as in the code, `[n_rows, 1]`."""
    answers, ragged = inputs.known_answers, read_family(inputs.store, "prob")
    perplexity = np.full((len(answers), 1), np.nan)
    for i, answer in enumerate(answers):
        if answer.token_ids:
            start = len(answer.prompt_ids) - 1 - int(ragged.first_tokens[i])
            rows = ragged.example(i)[start : start + len(answer.token_ids)]
            perplexity[i] = np.exp(rows[:, SURPRISAL].astype(np.float64).mean())
    return perplexity


def _oriented(inputs: DetectorInput, name: str) -> tuple[np.ndarray, dict[str, float]]:
    """Return a score's values `[n_rows]`, and the chosen sign and layer (from 1)."""
    is_by_layer = name.startswith(("llmcheck_hidden", "llmcheck_attention"))
    if name == "perplexity":
        values = answer_perplexity(inputs)
    else:
        values = reading(inputs, name, 1 + is_by_layer)
    values = values.reshape(len(values), -1)
    # The official loop over attention layers starts at the second layer.
    first = int("attention" in name and values.shape[1] > 1)
    scores, column, sign = oriented(values[:, first:], inputs.rows)
    layer = {"layer": 1 + first + column} if is_by_layer else {}
    return scores, {"sign": sign, **layer}


_SOURCE = (
    "Sriramanan et al. (NeurIPS 2024), section 3; "
    "GaurangSriramanan/LLM_Check_Hallucination_Detection 2f3bf9e, common_utils.py"
)
_SIGN = "validation chooses the sign, which the code leaves open"
_SIGN_AND_LAYER = (
    "validation chooses the sign and the layer, which the code leaves open"
)
_ANSWER_ONLY_NOTE = (
    "; the answer's tokens alone, a flag of the code that its script leaves off"
)
_ALIGNED = (
    "; of the distributions that predict the answer's tokens, where the code takes "
    "those one token later"
)


def _add(name: str, title: str, reading_name: str, variant: str) -> None:
    """Add a score to the catalogue, from a reading or "perplexity"."""

    @baseline(
        f"llmcheck_{name}",
        title=f"LLM-Check ({title})",
        source=_SOURCE,
        reads=() if reading_name == "perplexity" else (reading_name,),
        variant=variant,
    )
    def score(inputs: DetectorInput) -> DetectorOutput:
        scores, chosen = _oriented(inputs, reading_name)
        chosen = chosen_rows(inputs.rows, f"llmcheck_{name}", chosen)
        return DetectorOutput(scores[None], chosen)


for _name in ("hidden", "attention"):
    _reading, _of_answer = f"llmcheck_{_name}", _SIGN_AND_LAYER + _ANSWER_ONLY_NOTE
    _add(_name, _name, f"{_reading}_all", _SIGN_AND_LAYER)
    _add(f"{_name}:answer", f"{_name}, answer tokens", _reading, _of_answer)
_add("perplexity", "perplexity", "perplexity", _SIGN)
for _name, _title, _reading in (
    ("entropy", "entropy", "logit_entropy"),
    ("window", "window entropy", "window_entropy"),
):
    _add(_name, _title, _reading, _SIGN)
    _corrected = f"{_name}:corrected", f"{_title}, corrected", f"{_reading}_corrected"
    _add(*_corrected, _SIGN + _ALIGNED)


# Scores to combine: prefix of their rows of choices -> reading.
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
    # Neither the paper, which leaves it to later work, nor the code combines them.
    variant="own definition: the mean of hidden, attention, perplexity, window entropy "
    "and entropy, each oriented and standardised on validation answers",
)
def llmcheck_combined(inputs: DetectorInput) -> DetectorOutput:
    """Return the mean of the oriented scores; NaN for rows that lack any of them."""
    rows = inputs.rows
    total, chosen = np.zeros(len(rows.ids)), {}
    for prefix, name in _COMBINED.items():
        scores, choices = _oriented(inputs, name)
        valid = scores[defined_rows(np.isfinite(scores), rows, "validation")]
        total += (scores - valid.mean()) / (valid.std() or 1.0)
        chosen |= {f"{prefix}_{metric}": value for metric, value in choices.items()}
    chosen = chosen_rows(rows, "llmcheck_combined", chosen)
    return DetectorOutput(total[None] / len(_COMBINED), chosen)

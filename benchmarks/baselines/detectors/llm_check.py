"""LLM-Check: states, attention, perplexity and entropy of one forward, untrained.

Which sign means "wrong" depends on the data (the paper draws both, and the official
notebook takes minus perplexity and minus attention for answers that other models
wrote), and no layer is fixed in the code: validation chooses both.
"""

from collections.abc import Mapping
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
    found = np.full((len(inputs.answers), 1), np.nan)
    for i, answer in enumerate(inputs.answers):
        if answer.token_ids:
            start = len(answer.prompt_ids) - 1 - int(ragged.first_tokens[i])
            rows = ragged.example(i)[start : start + len(answer.token_ids)]
            found[i] = np.exp(rows[:, SURPRISAL].astype(np.float64).mean())
    return found


class _Candidates(NamedTuple):
    """What validation chooses from, before a sign is given.

    Attributes:
      values: `[n_rows, n_columns]`.
      first_layer: of the first column, counted from 1; None where there are no layers.
    """

    values: np.ndarray
    first_layer: int | None = None


def _candidates(inputs: DetectorInput, name: str) -> _Candidates:
    """Return the candidates of one score, by the name of its reading."""
    if name == "perplexity":
        return _Candidates(answer_perplexity(inputs))
    if name.startswith("llmcheck_hidden"):
        return _Candidates(reading(inputs, name, 2), 1)
    if name.startswith("llmcheck_attention"):
        # The official loop over layers begins at its second and never scores the first.
        values = reading(inputs, name, 2)
        return (
            _Candidates(values[:, 1:], 2)
            if values.shape[1] > 1
            else _Candidates(values, 1)
        )
    return _Candidates(reading(inputs, name, 1)[:, None])


def _oriented(inputs: DetectorInput, name: str) -> tuple[np.ndarray, dict[str, float]]:
    """Return a score's `[n_rows]` values, and its sign and layer."""
    values, first_layer = _candidates(inputs, name)
    scores, column, sign = oriented(values, inputs.rows)
    layer = {} if first_layer is None else {"layer": first_layer + column}
    return scores, {"sign": sign, **layer}


def single_score(inputs: DetectorInput, *, name: str, detector: str) -> DetectorOutput:
    """Return one score, from the layer and with the sign that validation chooses.

    Args:
      inputs: with the reading.
      name: of the reading, or "perplexity".
      detector: its name in the rows.

    Raises:
      ValueError: it was not read, or the validation rows hold one class only.
    """
    scores, chosen = _oriented(inputs, name)
    return DetectorOutput(scores[None], chosen_rows(inputs.rows, detector, chosen))


def combined_score(
    inputs: DetectorInput, *, names: Mapping[str, str], detector: str
) -> DetectorOutput:
    """Return the mean of the oriented scores, each standardised on validation rows.

    A row that lacks one of them has NaN.

    Args:
      inputs: with every reading.
      names: of the readings, by what their choices are reported as.
      detector: its name in the rows.

    Raises:
      ValueError: as `single_score`.
    """
    rows = inputs.rows
    total, chosen = np.zeros(len(rows.ids)), {}
    for short, name in names.items():
        scores, own_choice = _oriented(inputs, name)
        own = scores[defined_rows(scores[:, None], rows, "validation")]
        total += (scores - own.mean()) / (own.std() or 1.0)
        chosen |= {f"{short}_{metric}": value for metric, value in own_choice.items()}
    return DetectorOutput(total[None] / len(names), chosen_rows(rows, detector, chosen))


_SOURCE = (
    "Sriramanan et al. (NeurIPS 2024), section 3; "
    "GaurangSriramanan/LLM_Check_Hallucination_Detection 2f3bf9e, common_utils.py"
)
_CHOSEN = "validation chooses the sign{}, which the code leaves open"
_OWN_TOKENS = (
    "; the answer's tokens alone, a flag of the code that its script leaves off"
)
_ALIGNED = (
    "; of the distributions that predict the answer's tokens, where the code takes "
    "those one token later"
)
# Baseline: title, what it reads, what differs.
_SINGLE = {
    "llmcheck_hidden": ("hidden", "llmcheck_hidden_all", ""),
    "llmcheck_hidden:answer": (
        "hidden, answer tokens",
        "llmcheck_hidden",
        _OWN_TOKENS,
    ),
    "llmcheck_attention": ("attention", "llmcheck_attention_all", ""),
    "llmcheck_attention:answer": (
        "attention, answer tokens",
        "llmcheck_attention",
        _OWN_TOKENS,
    ),
    "llmcheck_perplexity": ("perplexity", "perplexity", ""),
    "llmcheck_entropy": ("entropy", "logit_entropy", ""),
    "llmcheck_entropy:corrected": (
        "entropy, corrected",
        "logit_entropy_corrected",
        _ALIGNED,
    ),
    "llmcheck_window": ("window entropy", "window_entropy", ""),
    "llmcheck_window:corrected": (
        "window entropy, corrected",
        "window_entropy_corrected",
        _ALIGNED,
    ),
}
_COMBINED = {
    "hidden": "llmcheck_hidden_all",
    "attention": "llmcheck_attention_all",
    "perplexity": "perplexity",
    "window": "window_entropy",
    "entropy": "logit_entropy",
}


def _single(name: str, title: str, read: str, differs: str) -> Baseline:
    """Return the detector of one score."""
    has_layers = read.startswith(("llmcheck_hidden", "llmcheck_attention"))
    return Baseline(
        name=name,
        title=f"LLM-Check ({title})",
        source=_SOURCE,
        score=partial(single_score, name=read, detector=name),
        reads=() if read == "perplexity" else (read,),
        variant=_CHOSEN.format(" and the layer" if has_layers else "") + differs,
    )


LLM_CHECK_COMBINED = Baseline(
    name="llmcheck_combined",
    title="LLM-Check (combined)",
    source=_SOURCE,
    score=partial(combined_score, names=_COMBINED, detector="llmcheck_combined"),
    reads=tuple(n for n in _COMBINED.values() if n != "perplexity"),
    # Neither the paper nor the code combines them; the paper leaves it to later work.
    variant="own definition: the mean of hidden, attention, perplexity, window entropy "
    "and entropy, each oriented and standardised on validation answers",
)
DETECTORS = (
    *(_single(name, *rest) for name, rest in _SINGLE.items()),
    LLM_CHECK_COMBINED,
)

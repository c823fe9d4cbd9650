"""LLM-Check's scores of one forward (Sriramanan et al., NeurIPS 2024).

Followed: GaurangSriramanan/LLM_Check_Hallucination_Detection at 2f3bf9e. Its script
scores hidden states and attention over the whole sequence (here `_all`); with a flag,
over the answer tokens alone. Its entropies are of the distributions at the answer
tokens, which predict the token behind each: the first token's is missed, and one behind
the last is counted. The `_corrected` ones are of those that predict the answer. All are
higher or lower for wrong answers depending on the data; nothing is oriented here.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.readings.batch import Part

_RIDGE = 1e-3
_N_TOP = 50


def hidden_scores(
    states: torch.Tensor, edges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the mean log singular value of centred Gram matrices, in nats.

    Every row is centred over its own features, as in the code; the paper does not
    centre. In float64: where there are more tokens than features, or equal ones, the
    determinant is of the 0.001 on the diagonal.

    Args:
      states: `[n_examples, n_tokens, d_model]`.
      edges: `[start, stop)` of the tokens of every example.

    Returns:
      `[n_examples]` float64; NaN comes of no token.
    """
    first, stop = torch.tensor(edges, device=states.device).T[..., None]
    counts = stop - first
    positions = first + torch.arange(int(counts.max()), device=states.device)
    every = torch.arange(len(states), device=states.device)[:, None]
    rows = states[every, positions.clamp(max=states.shape[1] - 1)].double()
    rows -= rows.mean(-1, keepdim=True)
    # What pads is a row of zeros, of which the determinant has the 0.001 alone.
    rows.masked_fill_((positions >= stop)[..., None], 0.0)
    n_padded = positions.shape[1] - counts[:, 0]
    scores = _log_determinants(rows) - n_padded.double() * math.log(_RIDGE)
    return (scores / counts[:, 0]).masked_fill(counts[:, 0] == 0, math.nan)


def _log_determinants(rows: torch.Tensor) -> torch.Tensor:
    """Return those of the Gram matrices of rows, with the 0.001 on the diagonal.

    Where rounding leaves a matrix indefinite (more rows than features, far apart in
    size) its determinant is noise, and MKL's LU has given NaN for it. The singular
    values of the rows themselves, of which the matrix has the squares, are exact.
    """
    gram = rows @ rows.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    factors, failed = torch.linalg.cholesky_ex(gram)
    log_dets = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    for i in failed.nonzero()[:, 0].tolist():
        values = torch.linalg.svdvals(rows[i])
        n_null = len(rows[i]) - len(values)
        log_det = (values.square() + _RIDGE).log().sum() + n_null * math.log(_RIDGE)
        log_dets[i] = log_det
    return log_dets


def window_entropy(
    entropies: torch.Tensor, n_words: int, width: int = 1
) -> torch.Tensor:
    """Return the largest mean entropy of a window, divided by the vocabulary's size.

    Args:
      entropies: `[n_tokens]` nats; NaN comes of no token.
      n_words: vocabulary size.
      width: tokens of a window; windows do not overlap, the last may be shorter.
    """
    if not len(entropies):
        return entropies.new_tensor(math.nan)
    means = [window.mean() for window in entropies.split(width)]
    return torch.stack(means).amax() / n_words


def top_entropies(log_probs: torch.Tensor, n_top: int = _N_TOP) -> torch.Tensor:
    """Return the mean of -q log q over the largest words, q their softmax.

    Args:
      log_probs: `[n_tokens, vocab_size]` logits or log-probabilities.
      n_top: words; all of a smaller vocabulary.

    Returns:
      `[n_tokens]`: their entropy in nats, divided by their number.
    """
    top = log_probs.topk(min(n_top, log_probs.shape[-1]), dim=-1).values
    return _entropy(top.log_softmax(-1)) / top.shape[-1]


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Return entropies in nats; a probability that underflows counts zero."""
    return -(log_probs.exp() * log_probs).sum(-1)


class _AnswerOrAll(Part):
    """Two readings: of the answer tokens, and of all tokens of the sequence."""

    @cached_property
    def _edges(self) -> dict[str, list[tuple[int, int]]]:
        edges = self.batch.answer_edges, self.batch.sequence_edges
        pairs = zip(self.names, edges, strict=True)
        return {name: edges for name, edges in pairs if name in self.wanted}

    def first_row(self) -> int:
        """Return the first row of the sequence, or of an answer."""
        return min(start for edges in self._edges.values() for start, _ in edges)


class HiddenScores(_AnswerOrAll):
    """The hidden score of every layer, `[n_layers]`; the last one's states are normed.

    So they are where the official code takes them, Transformers' `hidden_states`.
    """

    names = ("llmcheck_hidden", "llmcheck_hidden_all")

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Score the output of every layer but the last."""
        if layer_pass.index < self.batch.backbone.n_layers - 1:
            self._score(layer_pass.index, layer_pass.h_out)

    def _score(self, layer: int, states: torch.Tensor) -> None:
        for name, edges in self._edges.items():
            self.add(layer, hidden_scores(states, edges), name)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Score the last."""
        self._score(self.batch.backbone.n_layers - 1, final)
        return {name: list(self.stacked(name)) for name in self._edges}


class DiagonalScores(_AnswerOrAll):
    """Sum over heads of the mean log weight that tokens give to themselves.

    `[n_attention_layers]`. The logarithms are taken before the weights are rounded, so
    that they are finite where the official code's can be minus infinity.
    """

    names = ("llmcheck_attention", "llmcheck_attention_all")
    reads_weights = True

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add the diagonal of some rows."""
        diagonal = log_weights.diagonal(start, -2, -1).double().sum(1)
        positions = torch.arange(
            start, start + diagonal.shape[1], device=diagonal.device
        )
        for name, every in self._edges.items():
            edges = torch.tensor(every, device=diagonal.device)[:, :, None]
            in_answer = (positions >= edges[:, 0]) & (positions < edges[:, 1])
            self.add(layer, diagonal.masked_fill(~in_answer, 0.0).sum(1), name)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the tokens; an answer without tokens has NaN."""
        scores = {}
        for name, edges in self._edges.items():
            sums = self.stacked(name)
            counts = sums.new_tensor([stop - start for start, stop in edges])
            scores[name] = list(sums / counts[:, None])
        return scores


class Entropies(Part):
    """Window entropy (of one token) and logit entropy (of 50 words): scalars."""

    names = (
        "window_entropy",
        "window_entropy_corrected",
        "logit_entropy",
        "logit_entropy_corrected",
    )

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Read the distributions at the answer, and where it is predicted."""
        # One stretch holds both: from the predictor of the first token to the last.
        edges = [(start - 1, stop) for start, stop in self.batch.answer_edges]
        rows = self.batch.rows(edges)
        entropies_of, top = [], []
        for _, log_probs in self.batch.log_probs(rows.of(final), is_normed=True):
            entropies_of.append(_entropy(log_probs))
            top.append(top_entropies(log_probs))
        n_words = self.batch.head.weight.shape[0]
        scores: dict[str, list[torch.Tensor]] = {name: [] for name in self.names}
        for at in rows.slices():
            shifts = {"": slice(1, None), "_corrected": slice(0, -1)}
            for suffix, shift in shifts.items():
                entropies = torch.cat(entropies_of)[at][shift]
                window = window_entropy(entropies, n_words)
                scores[f"window_entropy{suffix}"].append(window)
                scores[f"logit_entropy{suffix}"].append(
                    torch.cat(top)[at][shift].mean()
                )
        return {name: scores[name] for name in self.wanted}

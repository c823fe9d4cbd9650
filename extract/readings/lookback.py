"""The lookback ratio of every head (Chuang et al., 2024, "Lookback Lens").

Followed: voidism/Lookback-Lens at f2846ef, step01_extract_attns.py. Its context is the
whole prompt before the answer cue, not the passages alone as in the paper, and the cue
counts among the new tokens, so that there is one when the first token is predicted.
"""

import torch

from beatrice.extract.readings.part import Batch, Part
from beatrice.extract.signals.plan import sequence_of


def lookback_ratio(
    weights: torch.Tensor, n_context: torch.Tensor, n_seen: torch.Tensor
) -> torch.Tensor:
    """Return the share of the mean weight on the context.

    Args:
      weights: `[n_examples, n_heads, n_rows, n_keys]`, zero for keys that a row does
        not see.
      n_context: `[n_examples]` keys of the context, the first ones; the others are new.
      n_seen: `[n_rows]` keys up to the row itself. Where it is not more than
        `n_context` what is returned means nothing.

    Returns:
      `[n_examples, n_heads, n_rows]` in [0, 1]: a / (a + b) of the two means, not of
      the sums.
    """
    is_context = torch.arange(weights.shape[-1], device=weights.device)
    is_context = (is_context < n_context[:, None])[:, None, :, None]
    sums = weights @ torch.cat([is_context, ~is_context], dim=-1).to(weights.dtype)
    n_context = n_context[:, None, None]
    context, new = sums[..., 0] / n_context, sums[..., 1] / (n_seen - n_context)
    return context / (context + new)


class Lookback(Part):
    """The mean ratio over the steps of the answer, `[n_attention_layers, n_heads]`.

    The steps are the positions that predict a token of the answer; that of the stop
    token is one, as in the official code.
    """

    names = ("lookback",)
    reads_weights = True

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        spans = [sequence_of(a).spans[2].tolist() for a in batch.answers]
        device = batch.backbone.device
        self._first, self._stop = torch.tensor(spans, device=device).T
        prompts = [len(answer.prompt_ids) for answer in batch.answers]
        n_context = [max(1, n - batch.n_cue) for n in prompts]
        self._n_context = torch.tensor(n_context, device=device)
        self._least = min(first for first, _ in spans)
        self._sums: dict[int, torch.Tensor] = {}

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add the ratios of some rows; every row has its own number of new tokens."""
        n_examples, n_heads, _, n_keys = log_weights.shape
        added = log_weights.new_zeros((n_examples, n_heads))
        rows = torch.arange(start, n_keys, device=log_weights.device)
        rows = rows[max(0, self._least - start) :]
        if len(rows):
            weights = log_weights[:, :, n_keys - start - len(rows) :].exp()
            ratios = lookback_ratio(weights, self._n_context, rows + 1)
            first, stop = self._first[:, None], self._stop[:, None]
            is_own = ((rows >= first) & (rows < stop))[:, None]
            added = ratios.masked_fill(~is_own, 0.0).sum(-1)
        self._sums[layer] = self._sums.get(layer, 0) + added

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the steps; NaN where there is none."""
        layers = torch.stack([self._sums[layer] for layer in sorted(self._sums)], dim=1)
        counts = (self._stop - self._first)[:, None, None]
        return {"lookback": list(layers / counts)}

"""The lookback ratio of every head (Chuang et al., 2024, "Lookback Lens").

Followed: voidism/Lookback-Lens at f2846ef, step01_extract_attns.py. Its context is the
whole prompt before the answer cue, not the passages alone as in the paper, and the cue
counts among the new tokens, so that there is one when the first token is predicted.
"""

import torch

from extract.readings.part import Batch, Part
from extract.signals.plan import sequence_of


def lookback_ratio(
    weights: torch.Tensor, n_context: int, n_seen: torch.Tensor
) -> torch.Tensor:
    """Return the share of the mean weight on the context.

    Args:
      weights: `[…, n_rows, n_keys]`, zero for keys that a row does not see.
      n_context: keys of the context, `[0, n_context)`; the others are new.
      n_seen: `[n_rows]` keys up to the row itself, more than `n_context`.

    Returns:
      `[…, n_rows]` in [0, 1]: a / (a + b) of the two means, not of the sums.
    """
    context = weights[..., :n_context].sum(-1) / n_context
    new = weights[..., n_context:].sum(-1) / (n_seen - n_context)
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
        self._edges = [sequence_of(a).spans[2].tolist() for a in batch.answers]
        prompts = [len(answer.prompt_ids) for answer in batch.answers]
        self._n_context = [max(1, n - batch.n_cue) for n in prompts]
        self._sums: dict[int, list[torch.Tensor]] = {}

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Add the ratios of some rows; every row has its own number of new tokens."""
        n_examples, n_heads, n_rows, n_keys = log_weights.shape
        empty = [log_weights.new_zeros(n_heads) for _ in range(n_examples)]
        sums = self._sums.setdefault(layer, empty)
        for example, (first, stop) in enumerate(self._edges):
            rows = range(max(first, start), min(stop, n_keys))
            if not rows:
                continue
            own = slice(rows.start - start, rows.stop - start)
            n_seen = torch.tensor(rows, device=log_weights.device) + 1
            ratios = lookback_ratio(
                log_weights[example, :, own].exp(), self._n_context[example], n_seen
            )
            sums[example] = sums[example] + ratios.sum(-1)

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Divide by the steps; NaN where there is none."""
        layers = [self._sums[layer] for layer in sorted(self._sums)]
        found = []
        for example, (first, stop) in enumerate(self._edges):
            every = torch.stack([sums[example] for sums in layers])
            found.append(every / every.new_tensor(stop - first))
        return {"lookback": found}

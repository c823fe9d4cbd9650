"""What the feed-forward part of each layer writes at the end of an answer.

Read by "LLMs Know More Than They Show" (Orgad et al., ICLR 2025); official code:
technion-cs-nlp/LLMsKnow at bee3ec5, where `probe_at="mlp"` hooks each block's MLP.
"""

import torch

from beatrice.extract.backbone.layout import LayerPass
from beatrice.extract.readings.part import Batch, Part


class ExactAnswerStates(Part):
    """Feed-forward contributions at the last answer token, `[n_layers, d_model]`.

    A short answer is its own exact answer, so that no model has to find it in the
    text. What the layer adds to the stream is read, behind the norm of a sandwich
    block (Gemma 3); in the paper's models that is the MLP's output.
    """

    names = ("mlp_exact_answer",)

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch."""
        super().__init__(batch, wanted)
        self._rows = batch.rows([(n - 1, n) for n in batch.lengths])
        self._layers: list[torch.Tensor] = []

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Keep the last token's contribution."""
        self._layers.append(self._rows.of(layer_pass.ffn).float())

    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return them; NaN for an answer without tokens."""
        every = torch.stack(self._layers, dim=1)
        is_empty = [not answer.token_ids for answer in self.batch.answers]
        every[torch.tensor(is_empty, device=every.device)] = torch.nan
        return {"mlp_exact_answer": list(every)}

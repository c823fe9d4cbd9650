"""What the prompts of a setting begin with, run once: mostly its worked examples.

A batch goes on from its keys and values. Parts still see whole sequences: what the
beginning has of a layer is put before what the batch has.
"""

import copy
import dataclasses
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from beatrice.extract.backbone.layout import LayerPass, Layout
from beatrice.extract.backbone.sharing import (
    FEWEST_SHARED,
    begun_cache,
    filled_layers,
    n_shared,
)
from beatrice.extract.signals.attention import run_reading
from beatrice.extract.signals.reductions import AttentionReading
from beatrice.extract.signals.span_sums import AttentionCall, AttentionMap


class _Calls(AttentionReading):
    """Keeps what each layer handed to its attention; the model's own kernel attends."""

    def reduce(
        self,
        layer: int,
        call: AttentionCall | AttentionMap,
        value: torch.Tensor | None,
    ) -> tuple[AttentionCall | AttentionMap, torch.Tensor | None]:
        """Keep the call."""
        if value is None:
            return call, None
        n_examples, n_heads, _ = call.shape
        return call, value.new_empty((n_examples, 0, n_heads, value.shape[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """The first tokens of all sequences, and what a decoder made of them.

    Attributes:
      n_tokens: of it.
      cache: its keys and values.
      calls: by layer, of one example.
      layers: what each did to the stream, of one example.
      final: `[1, n_tokens, d_model]`, final-normed.
    """

    n_tokens: int
    cache: DynamicCache
    calls: dict[int, AttentionCall]
    layers: list[LayerPass]
    final: torch.Tensor

    def cache_of(self, n_examples: int) -> DynamicCache:
        """Return keys and values for a batch, which its forward adds to."""
        own = copy.copy(self.cache)
        own.layers = [copy.copy(layer) for layer in own.layers]
        for layer in filled_layers(own):
            layer.keys = layer.keys.expand(n_examples, -1, -1, -1)
            layer.values = layer.values.expand(n_examples, -1, -1, -1)
        return own

    def before(self, own: torch.Tensor) -> torch.Tensor:
        """Put its final states before those of a batch."""
        return _before(self.final, own)

    def before_pass(self, own: LayerPass) -> LayerPass:
        """Put what a layer did to it before what it did to a batch."""
        first = self.layers[own.index]
        names = ("h_in", "att", "ffn", "h_out")
        pairs = {n: _before(getattr(first, n), getattr(own, n)) for n in names}
        return LayerPass(own.index, **pairs)

    def before_call(self, layer: int, own: AttentionCall) -> AttentionCall:
        """Put its queries before those of a batch, whose keys are of both."""
        first, mask = self.calls[layer], own.mask
        query = torch.cat(
            [first.query.expand(len(own.query), -1, -1, -1), own.query], 2
        )
        if mask is not None:
            square = first.mask
            if square is None:
                square = mask.new_ones((1, 1, self.n_tokens, self.n_tokens)).tril()
            wide = torch.nn.functional.pad(
                square, (0, mask.shape[-1] - self.n_tokens), value=False
            )
            mask = torch.cat([wide.expand(*mask.shape[:2], -1, -1), mask], dim=2)
        return dataclasses.replace(own, query=query, mask=mask)


def _before(first: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Put `[1, n_first, d]` before each of `[n_examples, n_own, d]`."""
    return torch.cat([first.expand(len(own), -1, -1), own], dim=1)


def begin(
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    behind: Beginning | None = None,
) -> Beginning | None:
    """Run what all sequences begin with; of each the last id is left to its own batch.

    Args:
      layout: of the model that reads.
      sequences: ids.
      behind: a shorter beginning of all of them, which was run before.

    Returns:
      `behind` where too little more is common, and where a batch could not go on: other
      states than keys and values, a window shorter than what is common, a softcap or
      sinks (no fused kernel knows them), or attention that the model does not ask for.
    """
    decoder, n_tokens = layout.decoder, 0
    n_behind = 0 if behind is None else behind.n_tokens
    if len(sequences) > 1 and decoder._can_set_attn_implementation():
        n_tokens = n_shared(sequences)
    if n_tokens < n_behind + FEWEST_SHARED:
        return behind
    ids = torch.tensor(
        [list(sequences[0][n_behind:n_tokens])], device=layout.head.weight.device
    )
    reading = _Calls(n_tokens, layout.attention_layers, (n_tokens, n_tokens), 0)
    layers, finals = [], []

    def keep(one: LayerPass) -> None:
        parts = (one.h_in, one.att, one.ffn, one.h_out)
        layers.append(LayerPass(one.index, *(part.clone() for part in parts)))

    def run(cache: DynamicCache) -> None:
        finals.append(run_reading(layout, ids, reading, keep, cache))

    first = None if behind is None else behind.cache_of(1)
    if (cache := begun_cache(layout, n_tokens, run, first)) is None:
        return behind
    calls = dict(zip(layout.attention_layers, reading.found(), strict=True))
    is_plain = all(
        one.softcap is None
        and one.sinks is None
        and (one.mask is None or one.mask.dtype == torch.bool)
        for one in calls.values()
    )
    if not is_plain:
        return behind
    final = finals[0]
    if behind is not None:
        calls = {layer: behind.before_call(layer, one) for layer, one in calls.items()}
        layers, final = (
            [behind.before_pass(one) for one in layers],
            behind.before(final),
        )
    return Beginning(
        n_tokens=n_tokens, cache=cache, calls=calls, layers=layers, final=final
    )


def final_states(
    layout: Layout, ids: torch.Tensor, begun: Beginning | None
) -> torch.Tensor:
    """Run a padded batch, by the model's own attention kernel.

    Args:
      layout: of the model that reads.
      ids: `[n_examples, n_tokens]`, whole sequences.
      begun: what all of them begin with, or None; only what is behind it is run.

    Returns:
      `[n_examples, n_tokens, d_model]`, final-normed.
    """
    decoder = layout.decoder
    if begun is None:
        return decoder(input_ids=ids, use_cache=False).last_hidden_state
    own, cache = ids[:, begun.n_tokens :], begun.cache_of(len(ids))
    output = decoder(input_ids=own, past_key_values=cache, use_cache=True)
    return begun.before(output.last_hidden_state)

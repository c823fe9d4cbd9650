"""What the attention of one forward is reduced to, while the model attends."""

import abc
from typing import Any

import torch

from beatrice.extract.signals.batch import to_device
from beatrice.extract.signals.span_sums import (
    AttentionCall,
    AttentionMap,
    span_readings,
)


class AttentionReading(abc.ABC):
    """What one forward's attention is reduced to, filled layer by layer.

    Attributes:
      attends_to_cache: whether `reduce` attends where keys come out of a cache too.
    """

    attends_to_cache = False

    def __init__(
        self,
        n_tokens: int,
        attention_layers: tuple[int, ...],
        rows: tuple[int, int],
        budget: int,
    ) -> None:
        """Begin a reading.

        Args:
          n_tokens: of the padded batch.
          attention_layers: layers that have an attention matrix, in order.
          rows: `[start, stop)`, up to the last, whose attention output `reduce` gives.
          budget: most attention weights alive at once; bounds the chunk of rows.
        """
        self.n_tokens, self.rows, self.budget = n_tokens, rows, budget
        self.layers: dict[int, Any] = dict.fromkeys(attention_layers)

    def is_map(self, part: Any) -> bool:
        """Return whether something a module returned is a map of this batch."""
        is_tensor = isinstance(part, torch.Tensor) and part.ndim == 4
        return is_tensor and part.shape[-2:] == (self.n_tokens, self.n_tokens)

    @abc.abstractmethod
    def reduce(
        self,
        layer: int,
        call: AttentionCall | AttentionMap,
        value: torch.Tensor | None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Return what is kept of a layer; given values, the output of `self.rows`."""

    def read(
        self,
        layer: int,
        call: AttentionCall | AttentionMap,
        value: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Read one layer; given values, return the attention output of `self.rows`."""
        if layer not in self.layers or self.layers[layer] is not None:
            raise ValueError(
                f"unknown residual layout: layer {layer} attended "
                f"{'twice' if layer in self.layers else 'unexpectedly'}; expected "
                f"each of the layers {tuple(self.layers)} once"
            )
        self.layers[layer], attended = self.reduce(layer, call, value)
        return attended

    def found(self) -> list[Any]:
        """Return what was kept of every layer, in order."""
        missing = [index for index, value in self.layers.items() if value is None]
        if missing:
            raise ValueError(
                f"unknown residual layout: the attention of layers {missing} neither "
                "passed through Transformers' or Torch's attention function nor came "
                "with its weights"
            )
        return list(self.layers.values())


class SpanReading(AttentionReading):
    """The readings between spans of one forward."""

    def __init__(
        self,
        spans: torch.Tensor,
        ids: torch.Tensor,
        attention_layers: tuple[int, ...],
        budget: int,
    ) -> None:
        """Begin a reading.

        Args:
          spans: `[n_examples, 3, 2]` int64 on the host, absolute and half-open,
            context < question < answer.
          ids: `[n_examples, n_tokens]`, the padded batch where the model computes.
          attention_layers: as in `AttentionReading`.
          budget: likewise.
        """
        n_tokens = ids.shape[1]
        positions = torch.arange(n_tokens)
        starts, stops = spans[:, :, :1], spans[:, :, 1:]
        members = (positions >= starts) & (positions < stops)
        self.members = to_device(members, ids.device)
        later = members[:, 1:].any(dim=(0, 1)).nonzero()
        # Only question and answer rows look back at a span. They are mostly the last.
        rows = (int(later[0]) if len(later) else n_tokens, n_tokens)
        super().__init__(n_tokens, attention_layers, rows, budget)

    def reduce(
        self,
        layer: int,
        call: AttentionCall | AttentionMap,
        value: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return entropies and masses between spans, see `span_readings`."""
        return span_readings(call, self.members, self.rows, self.budget, value)

    def readings(self) -> torch.Tensor:
        """Return `[n_examples, n_tokens, 2, 2, n_attention_layers, n_heads]`."""
        found = self.found()
        n_heads = sorted({reading.shape[-1] for reading in found})
        if len(n_heads) != 1:
            listed = "layers with " + ", ".join(map(str, n_heads))
            raise ValueError(
                "unknown residual layout: expected the same number of attention heads "
                f"in every layer, found {listed if found else 'no attention'}; use "
                "another backbone"
            )
        return torch.stack(found, dim=-2)

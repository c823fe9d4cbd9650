"""The four signal families of teacher-forced examples, from one forward pass.

The decoder is called once on the right-padded batch, without an attention mask: a
causal decoder never looks right, so padding is inert. Hooks and a registered
attention function read the pass while it happens; no map and no distribution
survives it.
"""

import contextlib
from typing import Self, get_args

import numpy as np
import torch

from extract.backbone.layout import watch_layers
from extract.backbone.loading import Backbone
from extract.backbone.parity import check_parity
from extract.signals import probability, residual
from extract.signals.attention import SpanReading, read_spans
from extract.signals.batch import (
    Family,
    PendingSignals,
    ReadingBudget,
    Rows,
    Signals,
    budget_for,
    host_copies,
    pad_batch,
)
from extract.signals.plan import TokenSequence
from extract.store.config import StoreConfig
from extract.store.families import Spans


class SignalReader:
    """Reads signals from one backbone.

    Construction runs the backbone on a few tokens and checks that what is read sums
    to what the model does.
    """

    def __init__(
        self,
        backbone: Backbone,
        hidden_layers: tuple[int, ...] | None = None,
        *,
        hidden_spans: Spans = "all",
        budget: ReadingBudget | None = None,
    ) -> None:
        """Check the backbone and prepare to read it.

        Args:
          backbone: the frozen model.
          hidden_layers: entries of the resid axis to keep, out of `n_layers + 1`: 0 is
            the embedding, l the output of layer l, un-normed. None keeps all.
          hidden_spans: tokens whose hidden states are read; the other families are
            read for all.
          budget: sizes of chunks; None chooses by the backbone's device.

        Raises:
          ValueError: an entry out of range, or "unknown residual layout".
        """
        n_entries = backbone.n_layers + 1
        if hidden_layers is None:
            hidden_layers = tuple(range(n_entries))
        if any(not 0 <= entry < n_entries for entry in hidden_layers):
            raise ValueError(
                f"hidden_layers: expected entries of 0 (embedding) to "
                f"{n_entries - 1}, found {list(hidden_layers)}"
            )
        if len(set(hidden_layers)) < len(hidden_layers):
            raise ValueError(f"hidden_layers: found one twice, {list(hidden_layers)}")
        if hidden_spans not in get_args(Spans):
            raise ValueError(
                f"hidden_spans: expected one of {', '.join(get_args(Spans))}, found "
                f"{hidden_spans!r}"
            )
        self.backbone = backbone
        self.hidden_layers = tuple(hidden_layers)
        self.hidden_spans = hidden_spans
        self._budget = budget or budget_for(backbone.device)
        self._copies = host_copies(backbone.device)
        self._final_norm = residual.measure_final_norm(backbone.layout)
        self._head = probability.head_of(backbone.model)
        check_parity(backbone, self._final_norm, self._head)

    @classmethod
    def for_kept(cls, backbone: Backbone, kept: StoreConfig) -> Self:
        """Return a reader of the hidden states that are kept, and of no others."""
        return cls(backbone, kept.hidden_layers, hidden_spans=kept.hidden_spans)

    @property
    def shapes(self) -> dict[Family, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""
        model = self.backbone
        return {
            "hidden": (len(self.hidden_layers), model.d_model),
            "prob": (probability.N_SCALARS,),
            "resid": (residual.N_SCALARS * model.n_layers,),
            "attn": (2, 2, len(model.attention_layers), model.n_heads),
        }

    def _check_lengths(self, sequences: list[TokenSequence]) -> None:
        """Refuse a sequence longer than the window; nothing is ever cut."""
        longest = max(len(sequence.ids) for sequence in sequences)
        window = self.backbone.max_length
        if window is not None and longest > window:
            raise ValueError(
                f"a sequence has {longest} tokens, backbone {self.backbone.name!r} "
                f"reads at most {window}; shorten the context or use another backbone"
            )

    def read(self, sequences: list[TokenSequence]) -> list[Signals]:
        """Read all families of a batch in one forward of the decoder.

        Args:
          sequences: any lengths; of similar length costs least.

        Returns:
          One `Signals` each, in order; what is read of an example does not depend on
          its batch, up to rounding.
        """
        return list(self.start(sequences).result()) if sequences else []

    def _rows_of(self, sequences: list[TokenSequence], spans: Spans) -> Rows:
        """Return the tokens of those spans."""
        lengths = [len(sequence.ids) for sequence in sequences]
        if spans == "all":
            edges = [(0, length) for length in lengths]
        else:
            edges = [tuple(sequence.spans[2].tolist()) for sequence in sequences]
        return Rows(edges, max(lengths), self.backbone.device)

    @torch.no_grad()
    def start(self, sequences: list[TokenSequence]) -> PendingSignals:
        """Begin to read a batch of at least one sequence, see `read`.

        On a GPU this returns when the work is queued. The next batch may be started
        before this one's result is taken.
        """
        self._check_lengths(sequences)
        device, layout = self.backbone.device, self.backbone.layout
        ids = pad_batch([sequence.ids for sequence in sequences], device)
        targets = pad_batch([sequence.targets for sequence in sequences], device)
        rows = self._rows_of(sequences, "all")
        hidden_rows = self._rows_of(sequences, self.hidden_spans)
        copies, budget = self._copies(), self._budget
        scores = residual.LogitLens(self._final_norm, layout.head, targets)
        stream = residual.StreamReading(self.hidden_layers, hidden_rows, scores, copies)
        attention = SpanReading(
            torch.from_numpy(np.stack([item.spans for item in sequences])),
            ids.shape[1],
            self.backbone.attention_layers,
            budget.n_attention_weights,
            device,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(read_spans(layout.decoder, attention))
            stack.enter_context(watch_layers(layout, stream.on_layer))
            final = layout.decoder(input_ids=ids, use_cache=False).last_hidden_state
        prob = probability.token_probabilities(
            rows.of(final),
            rows.of(targets),
            self._head,
            n_tokens_per_chunk=budget.n_tokens_per_chunk,
            n_words_per_block=budget.n_words_per_block,
        )
        resid = rows.of(torch.cat(stream.resid, dim=-1))
        scalars = {"prob": prob, "resid": resid, "attn": rows.of(attention.readings())}
        return PendingSignals(
            hidden=stream.states(),
            scalars={name: copies.take(values) for name, values in scalars.items()},
            hidden_rows=hidden_rows.slices(),
            rows=rows.slices(),
            copies=copies,
        )

"""The four signal families of teacher-forced examples, read in one forward pass.

The decoder is called once on the right-padded batch, without an attention mask: a
causal decoder never looks right, so padding has no effect. Hooks and a registered
attention function read the pass while it runs; no map or distribution is kept.
"""

import dataclasses
from collections.abc import Iterator
from typing import Self

import numpy as np
import torch
from transformers import DynamicCache

from beatrice.extract.backbone.layout import layer_values
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.backbone.names import fingerprint_of
from beatrice.extract.generate.local import (
    FEWEST_SHARED,
    cache_for_rows,
    n_shared,
    prefix_cache,
)
from beatrice.extract.signals import probability, residual
from beatrice.extract.signals.attention import SpanReading, run_decoder
from beatrice.extract.signals.batch import (
    HostCopies,
    ReadingBudget,
    TokenRows,
    budget_for,
    pad_batch,
)
from beatrice.extract.signals.parity import check_parity
from beatrice.extract.signals.sequence import TokenSequence, first_read_token
from beatrice.extract.store.spec import (
    ReadingPath,
    Spans,
    StoreConfig,
    check_layers,
    model_shapes,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSignals:
    """The four families of one example, with a row per token from `first_token` on."""

    first_token: int  # of the first row, see `signals.sequence.first_read_token`
    # `[n_rows, n_layers_kept, d_model]` float32, un-normed residual states; only rows
    # of the answer span if the reader keeps no others.
    hidden: np.ndarray
    # `[n_rows, 5]` float32: p(v), -log p(v) and entropy in nats, top p, margin.
    prob: np.ndarray
    # `[n_rows, 4 * n_layers]` float32: per layer attention norm, attention push,
    # feed-forward norm, feed-forward push.
    resid: np.ndarray
    # `[n_rows, 2, 2, n_attention_layers, n_heads]` float32: per partner span (the other
    # two, in order) entropy in nats and mass.
    attn: np.ndarray
    path: ReadingPath  # how the signals were read

    @property
    def nbytes(self) -> int:
        """Bytes of all families."""
        families = self.hidden, self.prob, self.resid, self.attn
        return sum(family.nbytes for family in families)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingSignals:
    """A batch that the device may still be working on."""

    # `[n_entries, n_hidden_rows, d_model]`, the examples end to end.
    hidden: torch.Tensor
    # prob, resid and attn, each `[n_rows, …]` float32, likewise.
    scalars: dict[str, torch.Tensor]
    hidden_rows: list[slice]  # the rows of each example in `hidden`
    rows: list[slice]  # its rows in the other families
    firsts: list[int]  # the token of each example that has its first row
    copies: HostCopies  # which must finish before anything is read

    def result(self) -> Iterator[AnswerSignals]:
        """Wait for the device, then yield the examples in order, without padding.

        Arrays are views of the batch unless their dtype changes. They come one example
        at a time: a batch's float32 hidden states can be twice the size of its copy.
        """
        self.copies.wait()
        scalars = {name: values.numpy() for name, values in self.scalars.items()}
        slices = zip(self.firsts, self.hidden_rows, self.rows, strict=True)
        for first, hidden_rows, rows in slices:
            yield AnswerSignals(
                first_token=first,
                hidden=self.hidden[:, hidden_rows].float().transpose(0, 1).numpy(),
                path="teacher_forced",
                **{name: values[rows] for name, values in scalars.items()},
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingBatches:
    """A batch read in several parts, each with the positions of its examples."""

    parts: list[tuple[list[int], PendingSignals]]

    def result(self) -> Iterator[AnswerSignals]:
        """Yield the examples in the order of the whole batch."""
        signals: dict[int, AnswerSignals] = {}
        for indices, batch in self.parts:
            signals |= zip(indices, batch.result(), strict=True)
        yield from (signals[index] for index in sorted(signals))


class SignalReader:
    """Reads signals from one backbone, which it checks when created."""

    def __init__(
        self,
        backbone: Backbone,
        hidden_layers: tuple[int, ...] | None = None,
        *,
        hidden_spans: Spans = "all",
        budget: ReadingBudget | None = None,
    ) -> None:
        """Check the backbone and prepare to read it.

        `hidden_layers` lists the entries of the resid axis `[n_layers + 1]` to keep: 0
        is the embedding, l the un-normed output of layer l; None keeps all. Hidden
        states are read for the tokens of `hidden_spans`, other families for all tokens
        from `first_read_token` on. A `budget` of None is chosen by device.
        """
        self.hidden_layers = check_layers(hidden_layers, backbone.n_layers + 1)
        self.hidden_spans: Spans = hidden_spans
        self.budget = budget or budget_for(backbone.device)
        is_cuda = backbone.device.type == "cuda"
        self._stream = torch.cuda.Stream(backbone.device) if is_cuda else None
        self.final_norm = residual.measure_final_norm(backbone.layout)
        self.head = probability.head_of(backbone.model)
        config = backbone.model.config.get_text_config()
        self._n_chosen = min(layer_values(config, "index_topk"), default=None)
        self.forget_beginning()
        with backbone.splitter.lock:
            n_heads = backbone.check_once(
                "parity", [], lambda: check_parity(backbone, self.final_norm, self.head)
            )
        self.backbone = dataclasses.replace(backbone, n_heads=n_heads)

    @classmethod
    def for_config(cls, backbone: Backbone, config: StoreConfig) -> Self:
        """Return a reader that keeps exactly the hidden states that are stored."""
        return cls(backbone, config.hidden_layers, hidden_spans=config.hidden_spans)

    def forget_beginning(self) -> None:
        """Drop the remembered beginning, so that the next batch computes its own."""
        # The beginning computed last and its states; None if it cannot be reused.
        self._begun: tuple[np.ndarray, DynamicCache | None] = np.zeros(0, int), None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Return what the values depend on, see `fingerprint_of`."""
        backbone = self.backbone
        return fingerprint_of(
            backbone.revision, str(backbone.dtype), backbone.attention
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of one token's reading, per family."""
        every = model_shapes(
            d_model=self.backbone.d_model,
            n_layers=self.backbone.n_layers,
            n_attention_layers=len(self.backbone.attention_layers),
            n_heads=self.backbone.n_heads,
        )
        return {**every, "hidden": (len(self.hidden_layers), self.backbone.d_model)}

    def lens(self, targets: torch.Tensor) -> residual.LogitLens:
        """Return a lens for the pushes towards the next tokens, see `LogitLens`."""
        return residual.LogitLens(self.final_norm, self.head, targets)

    def probabilities(
        self, states: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return `[n_tokens, 5]`, see `probability.token_probabilities`."""
        return probability.token_probabilities(states, targets, self.head, self.budget)

    def read(self, sequences: list[TokenSequence]) -> list[AnswerSignals]:
        """Read all families of a batch in one forward pass of the decoder.

        Similar lengths cost least. Signals depend on the batch only by rounding.
        """
        return list(self.start(sequences).result()) if sequences else []

    def start(self, sequences: list[TokenSequence]) -> PendingSignals | PendingBatches:
        """Begin to read a batch of at least one sequence, see `read`.

        On a GPU, this returns as soon as the work is queued. The next batch may be
        started before this one's result is taken.

        A layer that attends only to the highest-ranked keys breaks ties by the number
        of columns, so padding may change its keys. Such batches are read one length at
        a time. A batch that the device cannot hold is read in halves.
        """
        by_length: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence.ids), []).append(index)
        is_safe = self._n_chosen is None or max(by_length) <= self._n_chosen
        groups = [range(len(sequences))] if is_safe else by_length.values()
        parts = [
            part
            for group in groups
            for part in self.backbone.splitter.run(
                lambda rows: self._start([sequences[i] for i in rows]),
                group,
                lambda i: len(sequences[i].ids),
            )
        ]
        return parts[0][1] if len(parts) == 1 else PendingBatches(parts=parts)

    @torch.no_grad()
    def _start(self, sequences: list[TokenSequence]) -> PendingSignals:
        self.backbone.check_length(max(len(sequence.ids) for sequence in sequences))
        device, layout = self.backbone.device, self.backbone.layout
        starts = [first_read_token(sequence.spans[0, 0]) for sequence in sequences]
        n_begun, cache = self._begin(sequences, min(starts))
        sequences = [sequence.behind(n_begun) for sequence in sequences]
        lengths = [len(sequence.ids) for sequence in sequences]
        n_tokens = max(lengths)
        ids = pad_batch([sequence.ids for sequence in sequences], device)
        targets = pad_batch([sequence.targets for sequence in sequences], device)
        spans = np.stack([sequence.spans for sequence in sequences])
        firsts = [start - n_begun for start in starts]
        read = list(zip(firsts, lengths, strict=True))
        rows = hidden_rows = TokenRows(read, n_tokens, device)
        if self.hidden_spans == "answer":
            hidden_rows = TokenRows(spans[:, 2].tolist(), n_tokens, device)
        copies, budget = HostCopies(self._stream), self.budget.n_attention_weights
        first, passed_over = min(firsts), self.backbone.passed_over
        lens = self.lens(targets[:, first:])
        stream = residual.StreamReading(self.hidden_layers, hidden_rows, lens, copies)
        layers = self.backbone.attention_layers
        reading = SpanReading(torch.from_numpy(spans), ids, layers, budget, passed_over)
        final = run_decoder(
            layout, ids, on_layer=stream.on_layer, reading=reading, cache=cache
        )
        prob = self.probabilities(rows.of(final), rows.of(targets))
        resid = torch.cat(stream.resid, dim=-1)
        resid = torch.nn.functional.pad(resid, (0, 0, first, 0))
        attn = rows.of(reading.readings())
        scalars = {"prob": prob, "resid": rows.of(resid), "attn": attn}
        return PendingSignals(
            hidden=stream.states(),
            scalars={name: copies.copy(values) for name, values in scalars.items()},
            hidden_rows=hidden_rows.slices(),
            rows=rows.slices(),
            firsts=starts,
            copies=copies,
        )

    def _begin(
        self, sequences: list[TokenSequence], n_most: int
    ) -> tuple[int, DynamicCache | None]:
        """Return how many first tokens are computed once for all, and their states.

        They are tokens that all sequences begin with and whose signals are not read.
        Which ones depends only on the batch, so that the bytes of a store do too. They
        are kept for the next batch, which usually begins in the same way.
        """
        layout = self.backbone.layout
        n = min(n_most, n_shared([sequence.ids.tolist() for sequence in sequences]))
        asks = layout.decoder._can_set_attn_implementation()
        if n < FEWEST_SHARED or not asks or self._n_chosen is not None:
            return 0, None
        beginning = sequences[0].ids[:n]
        if not np.array_equal(self._begun[0], beginning):
            ids = torch.from_numpy(beginning.copy())[None].to(self.backbone.device)
            self._begun = beginning, prefix_cache(layout, ids)
        if (cache := self._begun[1]) is None:
            return 0, None
        return n, cache_for_rows(cache, len(sequences))

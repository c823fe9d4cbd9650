"""A batch that is read for rival detectors, and `Part`, one group of its readings.

A part sees the pass while it runs (log attention weights in chunks of rows, then the
layer's states) and returns its readings after the decoder has finished. Token t of an
answer that follows `n_prompt` ids is predicted at position `n_prompt + t - 1`.

What all prompts of a setting begin with (mostly worked examples) is run only once, and
each batch continues from its keys and values. Parts still see whole sequences: each
layer's states of the beginning are put before those of the batch.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from transformers import DynamicCache

from beatrice.extract.backbone.layout import LayerPass, Layout
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.local import (
    FEWEST_SHARED,
    cache_for_rows,
    empty_cache,
    is_complete_cache,
    n_shared,
)
from beatrice.extract.records import Answer
from beatrice.extract.signals.attention import (
    AttentionReading,
    CallReading,
    run_decoder,
)
from beatrice.extract.signals.batch import ReadingBudget, TokenRows, pad_batch
from beatrice.extract.signals.probability import Head, head_of
from beatrice.extract.signals.span_sums import AttentionCall


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """The first tokens of all sequences, and a decoder's states for them."""

    n_tokens: int  # length of the beginning
    cache: DynamicCache  # its keys and values, from which batches can continue
    # For one example, if parts see it: each layer's attention call and what it did to
    # the stream, and `[1, n_tokens, d_model]` final-normed states.
    calls: dict[int, AttentionCall]
    layers: list[LayerPass]
    final: torch.Tensor

    def before(self, states: torch.Tensor) -> torch.Tensor:
        """Put the beginning's final states before those of a batch."""
        return _before(self.final, states)

    def before_pass(self, layer_pass: LayerPass) -> LayerPass:
        """Put a layer's states for the beginning before those for a batch."""
        first = self.layers[layer_pass.index]
        names = ("h_in", "att", "ffn", "h_out")
        pairs = {n: _before(getattr(first, n), getattr(layer_pass, n)) for n in names}
        return LayerPass(layer_pass.index, **pairs)

    def before_call(self, layer: int, call: AttentionCall) -> AttentionCall:
        """Put the beginning's queries before a batch's; the keys already include it."""
        first, mask = self.calls[layer], call.mask
        queries = first.query.expand(len(call.query), -1, -1, -1), call.query
        query = torch.cat(queries, dim=2)
        if mask is not None:
            n, square = self.n_tokens, first.mask
            if square is None:
                square = mask.new_ones((1, 1, n, n)).tril()
            edges = (0, mask.shape[-1] - n)
            wide = torch.nn.functional.pad(square, edges, value=False)
            mask = torch.cat([wide.expand(*mask.shape[:2], -1, -1), mask], dim=2)
        return dataclasses.replace(call, query=query, mask=mask)


def _before(first: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Put `[1, n_first, d]` before each example of `[n_examples, n_own, d]`."""
    return torch.cat([first.expand(len(states), -1, -1), states], dim=1)


def begin(
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    behind: Beginning | None = None,
    *,
    is_seen: bool = True,
) -> Beginning | None:
    """Run what all sequences begin with, leaving out each sequence's last id.

    With `is_seen`, keep what parts need to see. Returns `behind`, a shorter beginning
    that was run earlier, if too little (more) is shared or if a batch could not
    continue: with states other than keys and values, a window shorter than the
    beginning, a softcap or sinks (which no fused kernel supports), or no registered
    attention function.
    """
    layers: list[LayerPass] = []

    def keep(item: LayerPass) -> None:
        tensors = (item.h_in, item.att, item.ffn, item.h_out)
        layers.append(LayerPass(item.index, *(tensor.clone() for tensor in tensors)))

    n_behind = 0 if behind is None else behind.n_tokens
    asks = layout.decoder._can_set_attn_implementation()
    n_tokens = n_shared(sequences) if asks and len(sequences) > 1 else 0
    if n_tokens < n_behind + FEWEST_SHARED:
        return behind
    cache = empty_cache(layout) if behind is None else cache_for_rows(behind.cache, 1)
    if cache is None:
        return behind
    device = layout.head.weight.device
    ids = torch.tensor([list(sequences[0][n_behind:n_tokens])], device=device)
    layers_read = layout.attention_layers
    reading = CallReading(n_tokens, layers_read, 0, see=lambda _, call: call)
    on_layer = keep if is_seen else None
    final = run_decoder(layout, ids, on_layer=on_layer, reading=reading, cache=cache)
    is_plain = is_complete_cache(cache, n_tokens) and all(
        item.softcap is None
        and item.sinks is None
        and (item.mask is None or item.mask.dtype == torch.bool)
        for item in reading.per_layer()
    )
    if not is_plain:
        return behind
    calls = reading.layers if is_seen else {}
    return Beginning(
        n_tokens=n_tokens, cache=cache, calls=calls, layers=layers, final=final
    )


def final_states(
    layout: Layout,
    ids: torch.Tensor,
    begun: Beginning | None,
    on_layer: Callable[[LayerPass], None] | None = None,
    reading: AttentionReading | None = None,
) -> torch.Tensor:
    """Run a padded batch `[n_examples, n_tokens]`, or what follows its beginning.

    Returns final-normed states `[n_examples, n_tokens, d_model]`; see `run_decoder`.
    """
    run = functools.partial(run_decoder, layout, on_layer=on_layer, reading=reading)
    if begun is None:
        return run(ids)
    cache = cache_for_rows(begun.cache, len(ids))
    return begun.before(run(ids[:, begun.n_tokens :], cache=cache))


# Next-token distributions in memory at once: 256 MiB, or 256 rows of the largest
# vocabularies, which share reading and converting the head's weights. On one core,
# 262,144 words of 640 numbers take 3.0 ns per logit then, 8 ns with 64 rows (bfloat16).
_LOGITS_PER_CHUNK = 2**26


def cue_length(answers: Sequence[Answer]) -> int:
    """Return how many tokens all prompts end with, at least 1.

    They are the answer cue with whatever closes a turn in a chat template (also "?" if
    every question ends with it). Lookback Lens counts them among the new tokens.
    """
    prompts = {answer.prompt_ids for answer in answers}
    if len(prompts) < 2:
        return 1
    return max(1, n_shared([ids[::-1] for ids in prompts]))


def rows_in_cache(logits: torch.Tensor) -> int:
    """Return how many rows of `[n_rows, vocab_size]` to process at once.

    On a CPU, as many as stay in its level-2 cache for several passes; on a GPU, all.
    """
    return max(1, len(logits) if logits.is_cuda else 2**18 // logits.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Answers that are read together."""

    backbone: Backbone  # the model that reads
    answers: Sequence[Answer]  # at least one
    # For parts that need them: prompts with other passages, None if there are none.
    swapped: Sequence[tuple[int, ...] | None]
    n_cue: int  # tokens of the answer cue, see `cue_length`
    budget: ReadingBudget  # chunk sizes
    beginning: Beginning | None = None  # of all these prompts, if it was run before

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of every sequence."""
        return [len(a.prompt_ids) + len(a.token_ids) for a in self.answers]

    @cached_property
    def ids(self) -> torch.Tensor:
        """Return `[n_examples, n_tokens]`, padded on the right with inert ids."""
        rows = [np.array(a.prompt_ids + a.token_ids) for a in self.answers]
        return pad_batch(rows, self.backbone.device)

    @cached_property
    def head(self) -> Head:
        """Return the output side of the model."""
        return head_of(self.backbone.model)

    @property
    def sequence_edges(self) -> list[tuple[int, int]]:
        """Return `[start, stop)` of prompt and answer."""
        return [(0, n_tokens) for n_tokens in self.lengths]

    @cached_property
    def answer_edges(self) -> list[tuple[int, int]]:
        """Return `[start, stop)` of the answer tokens, without the stop token."""
        firsts = [len(answer.prompt_ids) for answer in self.answers]
        return list(zip(firsts, self.lengths, strict=True))

    @cached_property
    def predictor_edges(self) -> list[tuple[int, int]]:
        """Return `[start, stop)` of the positions that predict the answer tokens."""
        return [(start - 1, stop - 1) for start, stop in self.answer_edges]

    def rows(self, edges: list[tuple[int, int]]) -> TokenRows:
        """Return a selection of these positions from `[n_examples, n_tokens, …]`."""
        return TokenRows(edges, max(self.lengths), self.backbone.device)

    def log_probs(
        self, states: torch.Tensor, *, is_normed: bool
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield next-token distributions of states, a chunk of rows at a time.

        Pass the states `[n_rows, d_model]` of several layers at once: a chunk of few
        rows costs nearly as much as one of many.

        Yields:
          Rows, and float32 logs `[n_chunk, vocab_size]` that the next chunk overwrites.
        """
        n_words = self.head.weight.shape[0]
        width = self.head.n_words_at_once(self.budget)
        size = max(2, _LOGITS_PER_CHUNK // n_words // 2 * 2)  # pairs stay together
        # Reused by every chunk: on a CPU, fresh pages cost more than the sums.
        shape = (min(size, len(states)), n_words)
        buffer = torch.empty(shape, device=states.device)
        for start in range(0, len(states), size):
            rows = slice(start, min(start + size, len(states)))
            chunk = states[rows].to(self.head.weight.dtype)
            if not is_normed:
                chunk = self.backbone.layout.final_norm(chunk)
            logits = buffer[: len(chunk)]
            # In blocks of words, since a float32 product converts the head's weights.
            for word in range(0, n_words, width):
                stop = min(word + width, n_words)
                self.head.logits(chunk, word, stop, out=logits[:, word:stop])
            for some in logits.split(rows_in_cache(logits)):
                some.sub_(some.logsumexp(-1, keepdim=True))
            yield rows, logits


class Part(abc.ABC):
    """One group of readings of a batch; methods not overridden cost nothing."""

    names: tuple[str, ...] = ()  # of its readings
    reads_weights = False  # whether it needs `on_weights`

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch; `finish` returns the part's names that are `wanted`."""
        self.batch = batch
        self.wanted = [name for name in self.names if name in wanted]
        self._by_layer: dict[tuple[str, int], torch.Tensor] = {}

    def add(self, layer: int, values: torch.Tensor, name: str = "") -> torch.Tensor:
        """Add to the values kept for a layer under a name; return the sum."""
        key = name, layer
        if key in self._by_layer:
            values = self._by_layer[key] + values
        self._by_layer[key] = values
        return values

    def stacked(self, name: str = "") -> torch.Tensor:
        """Return a name's values, `[n, …]` for each layer, as `[n, n_layers, …]`."""
        layers = sorted(layer for key, layer in self._by_layer if key == name)
        return torch.stack([self._by_layer[name, layer] for layer in layers], dim=1)

    def first_row(self) -> int:
        """Return the first row of attention that the part needs."""
        return min(start for start, _ in self.batch.predictor_edges)

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Read consecutive rows of a layer's attention; the first row is `start`.

        They are `[n_examples, n_heads, n_rows, start + n_rows]` float32 in nats, below
        -1e29 for unseen keys. They must not be changed.
        """
        return  # most parts read no attention

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Read what a layer did to the stream; copy whatever is to be kept."""
        return  # some parts read no layer

    @abc.abstractmethod
    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return readings; `final` is `[n_examples, n_tokens, d_model]`, normed."""


def mean_rows(values: torch.Tensor, slices: Sequence[slice]) -> list[torch.Tensor]:
    """Return the mean row of each slice of `[n_rows, …]`; NaN if it is empty."""
    return [values[rows].mean(0) for rows in slices]

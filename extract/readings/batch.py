"""A batch that is read for rival detectors, and `Part`: one group of readings of it.

A part sees the pass while it happens (log attention weights in chunks of rows, then the
layer's states) and returns its readings when the decoder has ended. The token t of an
answer behind `n_prompt` ids is predicted at position `n_prompt + t - 1`.

What the prompts of a setting begin with (mostly worked examples) is run once, and a
batch continues from its keys and values. Parts still see whole sequences: the
beginning's states of a layer are put before those of the batch.
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
    continued_by,
    empty_cache,
    is_whole,
    n_shared,
)
from beatrice.extract.records import Answer
from beatrice.extract.signals.attention import (
    AttentionReading,
    CallReading,
    run_decoder,
)
from beatrice.extract.signals.batch import ReadingBudget, Rows, pad_batch
from beatrice.extract.signals.probability import Head, head_of
from beatrice.extract.signals.span_sums import AttentionCall


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """The first tokens of all sequences, and what a decoder made of them."""

    n_tokens: int  # of them
    cache: DynamicCache  # their keys and values, which a batch may go on from
    # Of one example, and where parts see it: by layer what it attended with, what each
    # did to the stream, and `[1, n_tokens, d_model]`, final-normed.
    calls: dict[int, AttentionCall]
    layers: list[LayerPass]
    final: torch.Tensor

    def before(self, states: torch.Tensor) -> torch.Tensor:
        """Put its final states before those of a batch."""
        return _before(self.final, states)

    def before_pass(self, layer_pass: LayerPass) -> LayerPass:
        """Put what a layer did to it before what it did to a batch."""
        first = self.layers[layer_pass.index]
        names = ("h_in", "att", "ffn", "h_out")
        pairs = {n: _before(getattr(first, n), getattr(layer_pass, n)) for n in names}
        return LayerPass(layer_pass.index, **pairs)

    def before_call(self, layer: int, call: AttentionCall) -> AttentionCall:
        """Put its queries before those of a batch, whose keys are of both."""
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
    """Put `[1, n_first, d]` before each of `[n_examples, n_own, d]`."""
    return torch.cat([first.expand(len(states), -1, -1), states], dim=1)


def begin(
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    behind: Beginning | None = None,
    *,
    is_seen: bool = True,
) -> Beginning | None:
    """Run what all sequences begin with; of each the last id is left to its own batch.

    What parts see of it is kept where `is_seen`. Returns `behind`, a shorter beginning
    that was run before, where too little (more) is common, and where a batch could not
    go on: other states than keys and values, a window shorter than what is common, a
    softcap or sinks (no fused kernel knows them), or attention that the model does not
    ask for.
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
    cache = empty_cache(layout) if behind is None else continued_by(behind.cache, 1)
    if cache is None:
        return behind
    device = layout.head.weight.device
    ids = torch.tensor([list(sequences[0][n_behind:n_tokens])], device=device)
    layers_read = layout.attention_layers
    reading = CallReading(n_tokens, layers_read, 0, see=lambda _, call: call)
    on_layer = keep if is_seen else None
    final = run_decoder(layout, ids, on_layer=on_layer, reading=reading, cache=cache)
    is_plain = is_whole(cache, n_tokens) and all(
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
    """Run a padded batch `[n_examples, n_tokens]`, or what is behind its beginning.

    Returns `[n_examples, n_tokens, d_model]`, final-normed; see `run_decoder`.
    """
    run = functools.partial(run_decoder, layout, on_layer=on_layer, reading=reading)
    if begun is None:
        return run(ids)
    cache = continued_by(begun.cache, len(ids))
    return begun.before(run(ids[:, begun.n_tokens :], cache=cache))


# Next-token distributions in memory at once, 256 MiB: 256 rows of the largest
# vocabularies, which share reading and converting the head's weights. On one core
# 262,144 words of 640 numbers take 3.0 ns a logit then, 8 ns with 64 rows (bfloat16).
_LOGITS_PER_CHUNK = 2**26


def cue_length(answers: Sequence[Answer]) -> int:
    """Return how many tokens all prompts end with, at least 1.

    This is the answer cue with what a chat template closes a turn by ("?" too, where
    every question ends with it). Lookback-Lens counts it among the new tokens.
    """
    prompts = {answer.prompt_ids for answer in answers}
    if len(prompts) < 2:
        return 1
    return max(1, n_shared([ids[::-1] for ids in prompts]))


def rows_in_cache(logits: torch.Tensor) -> int:
    """Return how many rows of `[n_rows, vocab_size]` to pass over at once.

    On a CPU those that stay in its second-level cache for several passes, on a GPU all.
    """
    return max(1, len(logits) if logits.is_cuda else 2**18 // logits.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Some answers that are read together."""

    backbone: Backbone  # that reads
    answers: Sequence[Answer]  # at least one
    # Prompts of the same questions behind other passages, None where there is none;
    # read by those who ask for them alone.
    swapped: Sequence[tuple[int, ...] | None]
    n_cue: int  # tokens of the answer cue, see `cue_length`
    budget: ReadingBudget  # sizes of chunks
    beginning: Beginning | None = None  # of all these prompts, if it was run before

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of every sequence."""
        return [len(a.prompt_ids) + len(a.token_ids) for a in self.answers]

    @cached_property
    def ids(self) -> torch.Tensor:
        """Return `[n_examples, n_tokens]`, padded to the right with inert ids."""
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

    def rows(self, edges: list[tuple[int, int]]) -> Rows:
        """Return what picks these positions out of `[n_examples, n_tokens, …]`."""
        return Rows(edges, max(self.lengths), self.backbone.device)

    def log_probs(
        self, states: torch.Tensor, *, is_normed: bool
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield next-token distributions of states, a chunk of rows at a time.

        The states are `[n_rows, d_model]`, of several layers at once: a chunk of few
        rows costs nearly what one of many does.

        Yields:
          Which rows, and `[n_chunk, vocab_size]` float32 log-probabilities; the next
          chunk is written over them.
        """
        n_words, width = self.head.weight.shape[0], self.budget.n_words_per_block
        size = max(2, _LOGITS_PER_CHUNK // n_words // 2 * 2)  # pairs are not parted
        # Reused by every chunk: fresh pages cost more than the sums on a CPU.
        shape = (min(size, len(states)), n_words)
        buffer = torch.empty(shape, device=states.device)
        for start in range(0, len(states), size):
            rows = slice(start, min(start + size, len(states)))
            chunk = states[rows].to(self.head.weight.dtype)
            if not is_normed:
                chunk = self.backbone.layout.final_norm(chunk)
            logits = buffer[: len(chunk)]
            # By blocks of words, for a product in float32 converts the head's weights.
            for word in range(0, n_words, width):
                stop = min(word + width, n_words)
                self.head.logits(chunk, word, stop, out=logits[:, word:stop])
            for some in logits.split(rows_in_cache(logits)):
                some.sub_(some.logsumexp(-1, keepdim=True))
            yield rows, logits


class Part(abc.ABC):
    """One group of readings of a batch; what a part does not override costs nothing."""

    names: tuple[str, ...] = ()  # of its readings
    reads_weights = False  # whether it needs `on_weights`

    def __init__(self, batch: Batch, wanted: frozenset[str]) -> None:
        """Begin a batch; of the part's names only those wanted are given."""
        self.batch = batch
        self.wanted = [name for name in self.names if name in wanted]
        self._by_layer: dict[tuple[str, int], torch.Tensor] = {}

    def add(self, layer: int, values: torch.Tensor, name: str = "") -> torch.Tensor:
        """Add to what is kept of a layer under a name; return the sum."""
        key = name, layer
        if key in self._by_layer:
            values = self._by_layer[key] + values
        self._by_layer[key] = values
        return values

    def stacked(self, name: str = "") -> torch.Tensor:
        """Return what is kept under a name, `[n, …]` each, as `[n, n_layers, …]`."""
        layers = sorted(layer for key, layer in self._by_layer if key == name)
        return torch.stack([self._by_layer[name, layer] for layer in layers], dim=1)

    def first_row(self) -> int:
        """Return the first row of attention that the part needs."""
        return min(start for start, _ in self.batch.predictor_edges)

    def on_weights(self, layer: int, log_weights: torch.Tensor, start: int) -> None:
        """Read some rows of a layer's attention, in order, the first at `start`.

        They are `[n_examples, n_heads, n_rows, start + n_rows]` float32, nats; below
        -1e29 where a key is not seen. They may not be changed.
        """
        return  # most parts read no attention

    def on_layer(self, layer_pass: LayerPass) -> None:
        """Read what a layer did to the stream; nothing of it may be kept uncopied."""
        return  # nor every part the stream

    @abc.abstractmethod
    def finish(self, final: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """Return the readings of every example.

        The states are `[n_examples, n_tokens, d_model]`, final-normed.
        """


def mean_rows(values: torch.Tensor, slices: Sequence[slice]) -> list[torch.Tensor]:
    """Return the mean row of each slice of `[n_rows, …]`; NaN where it is empty."""
    return [values[rows].mean(0) for rows in slices]

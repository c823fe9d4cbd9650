"""How attention flows between spans, read while the model attends.

An attention function and its mask function are registered with Transformers under the
name `span_readings`. Without the mask function sliding windows would be lost in
silence. The function computes, from queries and keys (past norms and rotary embedding),
the attention weights of question and answer rows in bounded chunks, reduces them over
spans (`span_sums`), and returns the model's ordinary attention output. In float32 on a
CPU the rows that were read are attended with these weights, the others by the fused
kernel.

Older decoders ask for no attention function. Of those that call Torch's (Falcon) the
call is read. The others (MPT, BLOOM, and GPT-J until Transformers 5.24) return the
weights that they used, in half precision rounded as they rounded them; these are read
layer by layer and taken out of what a layer returns, so that at most one map is in
memory.
"""

import abc
import contextlib
import contextvars
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from beatrice.extract.backbone.layout import LayerPass, Layout, evaluating, watch_layers
from beatrice.extract.signals.batch import to_device
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.span_sums import (
    Attention,
    AttentionCall,
    AttentionMap,
    row_chunks,
    span_readings,
)


@dataclasses.dataclass(eq=False)
class AttentionReading(abc.ABC):
    """What one forward of a padded batch is reduced to, filled layer by layer."""

    n_tokens: int
    attention_layers: tuple[int, ...]  # that are read
    budget: int  # most weights that are alive at once
    passed_over: tuple[int, ...] = ()  # layers that attend too, and are not read
    # What is kept of those that were read.
    layers: dict[int, Any] = dataclasses.field(init=False, default_factory=dict)
    # `[start, stop)`, up to the last, whose attention output `reduce` gives, if it
    # gives any; the model's own kernel attends for the others.
    rows = (0, 0)
    attends_on_gpus = False  # gives them there, too, where that kernel is faster

    @abc.abstractmethod
    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None]:
        """Return what is kept of a layer, and the attention output of `self.rows`.

        The latter is None without values, or where no row is to be attended here.
        """

    def read(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Read one layer; return the attention output that `reduce` gives.

        In half precision, and on a GPU, the fused kernel's own rounding is the model's,
        and rows are not attended with the weights that were read.
        """
        if layer in self.passed_over:
            return None
        if layer in self.layers or layer not in self.attention_layers:
            raise ValueError(
                f"unknown residual layout: layer {layer} attended "
                f"{'twice' if layer in self.layers else 'unexpectedly'}; expected "
                f"each of the layers {self.attention_layers} once"
            )
        if value is not None and (
            value.dtype != torch.float32 or (value.is_cuda and not self.attends_on_gpus)
        ):
            value = None
        self.layers[layer], attended = self.reduce(layer, call, value)
        return attended

    def check_complete(self) -> None:
        """Check that every layer attended."""
        if missing := [i for i in self.attention_layers if i not in self.layers]:
            raise ValueError(
                f"unknown residual layout: the attention of layers {missing} neither "
                "passed through Transformers' or Torch's attention function nor came "
                "with its weights"
            )

    def per_layer(self) -> list[Any]:
        """Return what was kept of every layer, in order."""
        return [self.layers[layer] for layer in self.attention_layers]


@dataclasses.dataclass(eq=False)
class CallReading(AttentionReading):
    """What a function makes of each layer's call; the model's own kernel attends."""

    # Is given a layer's index and call.
    see: Callable[[int, Attention], Any] = dataclasses.field(kw_only=True)

    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[Any, None]:
        """Return what the function returns."""
        return self.see(layer, call), None


class SpanReading(AttentionReading):
    """The readings between spans of one forward; keys out of a cache are of no span."""

    def __init__(
        self,
        spans: torch.Tensor,
        ids: torch.Tensor,
        attention_layers: tuple[int, ...],
        budget: int,
        passed_over: tuple[int, ...] = (),
    ) -> None:
        """Begin a padded batch of ids `[n_examples, n_tokens]`, on the model's device.

        Spans are `[n_examples, 3, 2]` int64 on the host, absolute and half-open,
        context < question < answer.
        """
        n_tokens = ids.shape[1]
        positions = torch.arange(n_tokens)
        starts, stops = spans[:, :, :1], spans[:, :, 1:]
        members = (positions >= starts) & (positions < stops)
        self.members = to_device(members, ids.device)
        later = members[:, 1:].any(dim=(0, 1)).nonzero()
        # Only question and answer rows look back at a span. They are mostly the last.
        self.rows = (int(later[0]) if len(later) else n_tokens, n_tokens)
        super().__init__(n_tokens, attention_layers, budget, passed_over)

    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return entropies and masses between spans, see `span_readings`."""
        return span_readings(call, self.members, self.rows, self.budget, value)

    def readings(self) -> torch.Tensor:
        """Return `[n_examples, n_tokens, 2, 2, n_attention_layers, n_heads]`."""
        readings = self.per_layer()
        n_heads = sorted({reading.shape[-1] for reading in readings})
        if len(n_heads) != 1:
            listed = "layers with " + ", ".join(map(str, n_heads))
            raise ValueError(
                "unknown residual layout: expected the same number of attention heads "
                f"in every layer, found {listed if readings else 'no attention'}; use "
                "another backbone"
            )
        return torch.stack(readings, dim=-2)


# What this Transformers calls a cache, taken and given: `past_key_values` until 5.23.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in BaseModelOutputWithPast.__dataclass_fields__
)
NAME = "span_readings"
# What models of Transformers hand over that changes no weight: positions are in
# queries and keys by then, windows in the mask, and nothing is dropped outside
# training. Any other keyword may be a part of the attention, and is refused.
_INERT = frozenset(
    "dropout position_ids use_cache output_attentions output_router_logits "
    "sliding_window".split()
)
_active: contextvars.ContextVar[AttentionReading] = contextvars.ContextVar("reading")


def _check_readable(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Check that attention is a causal softmax of queries and keys."""
    unread = [n for n, value in kwargs.items() if value is not None and n not in _INERT]
    if not getattr(module, "is_causal", True):
        unread = ["attention to later tokens"]
    if unread:
        raise ValueError(
            f"cannot read the attention of {type(module).__name__}: expected a causal "
            f"softmax over queries and keys, found {', '.join(sorted(unread))}, which "
            "this version does not read; use another backbone"
        )


def _selected(
    module: Any,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    n_cached: int,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Hide the keys that a sparse layer did not select; takes the keyword that says so.

    Only for the names "eager" and "sdpa" such models put their choice into the mask.
    DeepSeek's indexer (`indices`, `[n_examples, n_tokens, n_chosen]`) chooses keys for
    all heads, MiniMax's (`block_indices`, `[n_examples, n_groups, n_tokens, n_chosen]`)
    blocks of keys for a group of heads, and -1 is no block.
    """
    chosen, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    if chosen is None and blocks is None:
        return mask
    if n_cached:
        raise ValueError(
            f"cannot read the attention of {type(module).__name__} to keys out of a "
            "cache, of which it chooses some"
        )
    if blocks is None:  # a key is a block of one, and all heads are one group
        blocks, size = torch.atleast_1d(chosen)[:, None], 1
    else:
        indexer = getattr(module, "indexer", None) if chosen is None else None
        size = getattr(indexer, "block_size", 0)
    n_examples, n_heads, n_tokens, _ = query.shape
    is_known = (
        size > 0
        and blocks.ndim == 4
        and (len(blocks), blocks.shape[2]) == (n_examples, n_tokens)
        and n_heads % max(1, blocks.shape[1]) == 0
    )
    if not is_known:
        raise ValueError(
            f"cannot read the attention of {type(module).__name__}: expected the keys "
            f"that are chosen for each of {n_examples} x {n_tokens} tokens, as indices "
            "or as blocks of an indexer, found the shape (examples, groups of heads, "
            f"tokens, chosen) = {tuple(blocks.shape)}; use another backbone"
        )
    keys = torch.arange(n_tokens, device=query.device)
    n_blocks = -(-n_tokens // size)
    blocks = blocks.long().masked_fill(blocks < 0, n_blocks)  # a column that is cut off
    is_selected = torch.zeros(
        (*blocks.shape[:-1], n_blocks + 1), dtype=torch.bool, device=query.device
    )
    is_selected = is_selected.scatter_(-1, blocks, True)[..., keys // size]
    if is_selected.shape[1] > 1:
        n_in_group = n_heads // is_selected.shape[1]
        is_selected = is_selected.repeat_interleave(n_in_group, dim=1)
    return is_selected & (keys <= keys[:, None] if mask is None else mask)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, None]:
    """Read, then attend as the model would have; Transformers' signature."""
    n_cached = key.shape[2] - query.shape[2]
    mask = _selected(module, query, attention_mask, n_cached, kwargs)
    _check_readable(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, mask, scale, softcap, s_aux)
    reading = _active.get()
    layer: Any = module.layer_idx
    attended = reading.read(layer, call, value)
    n_fused = query.shape[2] if attended is None else reading.rows[0]
    if n_fused == 0:
        return attended, None
    first = call.first(n_fused)
    fused = _plain_attention(module, first, value, reading.budget, kwargs)
    if attended is None:
        return fused, None
    return torch.cat([fused, attended], dim=1), None


def _plain_attention(
    module: torch.nn.Module,
    call: AttentionCall,
    value: torch.Tensor,
    budget: int,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attend as the model would have.

    No fused kernel knows a softcap (Gemma 2) or sinks (gpt-oss). Such models attend
    eagerly, by the function of their own file; called a few rows at a time it rounds as
    they do, and keeps no map. Returns `[n_examples, n_tokens, n_heads, d_head]` in the
    value's dtype.
    """
    n_examples, n_heads, n_tokens = call.shape
    n_keys = call.n_cached + n_tokens
    value = value[:, :, :n_keys]
    options = {**kwargs, "scaling": call.scaling}
    if call.softcap is None and call.sinks is None:
        tensors = call.query, call.key, value, call.mask
        return sdpa_attention_forward(module, *tensors, **options)[0]
    options |= {"softcap": call.softcap, "s_aux": call.sinks}
    eager = sys.modules[type(module).__module__].eager_attention_forward
    chunks = [
        eager(
            module,
            call.query[:, :, start:stop],
            call.key[:, :, : call.n_cached + stop],
            value[:, :, : call.n_cached + stop],
            call.added(start, stop),
            **options,
        )[0]
        for start, stop in row_chunks(
            (0, n_tokens), n_examples * n_heads * n_keys, budget
        )
    ]
    return torch.cat(chunks, dim=1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _CustomAttention(TorchFunctionMode):
    """Reads the attention of modules that ask for no attention function."""

    def __init__(self, reading: AttentionReading) -> None:
        super().__init__()
        self.reading = reading
        self.layer: int | None = None  # whose attention module is running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention and self.layer is not None:
            attended = self._read_call(*args, **(kwargs or {}))
            if attended is not None:
                # So that the check of the logits is one of these weights too.
                out[:, :, self.reading.rows[0] :] = attended.transpose(1, 2)
        return out

    def _read_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor | None:
        """Read one call of Torch's attention; without a mask it must be causal."""
        if attn_mask is None and not is_causal:
            raise ValueError(
                f"cannot read the attention of layer {self.layer}: expected causal "
                "softmax attention, found bidirectional attention"
            )
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        assert self.layer is not None  # an attention module is running
        call = AttentionCall(query, key, attn_mask, scaling, None)
        return self.reading.read(self.layer, call, value)

    @contextlib.contextmanager
    def watching(self, layout: Layout) -> Iterator[None]:
        with contextlib.ExitStack() as handles, self:
            for index in layout.attention_layers:
                mixer = layout.layers[index].mixer
                before = functools.partial(self._before, index)
                handles.enter_context(mixer.register_forward_pre_hook(before))
                handles.enter_context(mixer.register_forward_hook(self._after))
            yield

    def _before(self, index: int, module: Any, inputs: Any) -> None:
        self.layer = index

    def _after(self, module: Any, inputs: Any, output: Any) -> Any:
        index, self.layer = self.layer, None
        assert index is not None  # its module ran
        done = (*self.reading.passed_over, *self.reading.layers)
        if index in done or not isinstance(output, tuple):
            return output
        square = (self.reading.n_tokens,) * 2
        for at, item in enumerate(output):
            if isinstance(item, torch.Tensor) and item.shape[2:] == square:
                self.reading.read(index, AttentionMap(item), None)
                return (*output[:at], None, *output[at + 1 :])
        return output


def attend_alone(
    mixer: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reading: AttentionReading | None,
) -> torch.Tensor:
    """Call an attention module by itself, through a reading or as it would attend.

    It asks for an attention function, and has a config of its own. Returns what it puts
    out, `[n_examples, n_tokens, d_model]`.
    """
    with contextlib.ExitStack() as stack:
        if reading is not None:
            config: Any = mixer.config
            config._attn_implementation = NAME
            stack.callback(_active.reset, _active.set(reading))
        output = mixer(*args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def run_decoder(
    layout: Layout,
    ids: torch.Tensor,
    *,
    on_layer: Callable[[LayerPass], None] | None = None,
    reading: AttentionReading | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Run a decoder once on ids `[n_examples, n_tokens]` of its device, watched or not.

    `on_layer` sees every layer, see `watch_layers`, and a reading the attention, which
    is else left to the model. All examples go on from a cache. What a reading then sees
    has the queries of the ids and the keys of both; only where the model asks for an
    attention function. Returns final-normed states `[n_examples, n_tokens, d_model]`.
    """
    decoder, options = layout.decoder, {}
    if cache is not None:
        options[CACHE] = cache
    with contextlib.ExitStack() as stack:
        if reading is not None:
            asks = decoder._can_set_attn_implementation()
            calls_torch = decoder.config._attn_implementation == "sdpa"
            # Who calls Torch's attention would compute the weights once more to return
            # them.
            if not (asks or calls_torch):
                options["output_attentions"] = True
            stack.enter_context(attending_through(layout, reading))
        if on_layer is not None:
            stack.enter_context(watch_layers(layout, on_layer))
        stack.enter_context(evaluating(decoder))
        stack.enter_context(exact_products())
        output = decoder(input_ids=ids, use_cache=cache is not None, **options)
    if reading is not None:
        reading.check_complete()
    return output.last_hidden_state


@contextlib.contextmanager
def attending_through(layout: Layout, reading: AttentionReading) -> Iterator[None]:
    """Let a reading see the attention of every forward inside the block."""
    decoder = layout.decoder
    before = decoder.config._attn_implementation
    # An interrupt may come at any line of these.
    with contextlib.ExitStack() as stack:
        if asks := decoder._can_set_attn_implementation():
            stack.callback(decoder.set_attn_implementation, before)
            decoder.set_attn_implementation(NAME)
        stack.callback(_active.reset, _active.set(reading))
        if not asks:
            stack.enter_context(_CustomAttention(reading).watching(layout))
        yield

"""How attention flows between spans, read while the model attends.

An attention function and a mask function are registered with Transformers under the
name `span_readings`; without the mask function, sliding windows would silently be lost.
From queries and keys (after norms and rotary embedding), the function computes the
attention weights of question and answer rows in bounded chunks, reduces them over spans
(`span_sums`), and returns the model's ordinary attention output. In float32 on a CPU,
rows that were read attend with these weights, other rows with the fused kernel.

Older decoders use no registered attention function. If they call Torch's (Falcon), that
call is read. The others (MPT, BLOOM, and GPT-J until Transformers 5.24) return the
weights that they used, with their own rounding in half precision; these are read layer
by layer and removed from what a layer returns, so at most one map is in memory.
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
    """Reduces the attention of one forward pass over a padded batch, layer by layer."""

    n_tokens: int
    attention_layers: tuple[int, ...]  # layers that are read
    budget: int  # most attention weights alive at once
    passed_over: tuple[int, ...] = ()  # layers that attend too, but are not read
    # What is kept of each layer read so far.
    layers: dict[int, Any] = dataclasses.field(init=False, default_factory=dict)
    # Rows `[start, stop)`, up to the last, whose attention output `reduce` returns if
    # it returns any; the model's own kernel attends for other rows.
    rows = (0, 0)
    attends_on_gpus = False  # whether `reduce` does so on GPUs too, where it is slower

    @abc.abstractmethod
    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None]:
        """Return what to keep of a layer, and the attention output of `self.rows`.

        The output is None without values, or if no row needs to attend here.
        """

    def read(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Read one layer; return the attention output from `reduce`, if any.

        In half precision, and on a GPU, the model's output is rounded as its fused
        kernel does, so rows do not attend with the weights that were read.
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
        """Check that every layer that is to be read has attended."""
        if missing := [i for i in self.attention_layers if i not in self.layers]:
            raise ValueError(
                f"unknown residual layout: the attention of layers {missing} neither "
                "used Transformers' or Torch's function nor returned its weights"
            )

    def per_layer(self) -> list[Any]:
        """Return what was kept of every layer, in order."""
        return [self.layers[layer] for layer in self.attention_layers]


@dataclasses.dataclass(eq=False)
class CallReading(AttentionReading):
    """Keeps what a function returns for each layer; the model's own kernel attends."""

    # Called with a layer's index and its attention call.
    see: Callable[[int, Attention], Any] = dataclasses.field(kw_only=True)

    def reduce(
        self, layer: int, call: Attention, value: torch.Tensor | None
    ) -> tuple[Any, None]:
        """Return the function's result."""
        return self.see(layer, call), None


class SpanReading(AttentionReading):
    """Reads attention between spans in one pass; keys from a cache are in no span."""

    def __init__(
        self,
        spans: torch.Tensor,
        ids: torch.Tensor,
        attention_layers: tuple[int, ...],
        budget: int,
        passed_over: tuple[int, ...] = (),
    ) -> None:
        """Begin a padded batch of ids `[n_examples, n_tokens]` on the model's device.

        `spans` are `[n_examples, 3, 2]` int64 on the host, absolute and half-open,
        ordered context < question < answer.
        """
        n_tokens = ids.shape[1]
        positions = torch.arange(n_tokens)
        starts, stops = spans[:, :, :1], spans[:, :, 1:]
        members = (positions >= starts) & (positions < stops)
        self.members = to_device(members, ids.device)
        later = members[:, 1:].any(dim=(0, 1)).nonzero()
        # Only question and answer rows look back at a span, mostly the last rows.
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


# The argument and field for a cache in this Transformers: `past_key_values` until 5.23.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in BaseModelOutputWithPast.__dataclass_fields__
)
NAME = "span_readings"
# Keywords from Transformers models that change no weight here: positions are already in
# queries and keys, windows in the mask, and there is no dropout outside training. Any
# other keyword may change the attention, so it is refused.
_INERT = frozenset(
    "dropout position_ids use_cache output_attentions output_router_logits "
    "sliding_window".split()
)
_active: contextvars.ContextVar[AttentionReading] = contextvars.ContextVar("reading")


def _reading_of_this_thread() -> AttentionReading:
    """Return the reading that the running pass belongs to."""
    if (reading := _active.get(None)) is None:
        raise RuntimeError(
            "this model runs in one thread while another reads its signals, which "
            "would mix both; run it inside `with language_model.lock:`, where "
            "language_model is its LanguageModel"
        )
    return reading


def _check_readable(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Check that attention is a causal softmax over queries and keys."""
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
    """Mask the keys that a sparse layer did not select, and remove its keywords.

    Such models put their selection into the mask only for the names "eager" and "sdpa".
    DeepSeek's indexer (`indices`, `[n_examples, n_tokens, n_chosen]`) selects keys for
    all heads, MiniMax's (`block_indices`, `[n_examples, n_groups, n_tokens, n_chosen]`)
    selects blocks of keys for a group of heads, where -1 means no block.
    """
    chosen, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    if chosen is None and blocks is None:
        return mask
    if n_cached:
        raise ValueError(
            f"cannot read the attention of {type(module).__name__}: it selects some of "
            "the keys in a cache"
        )
    if blocks is None:  # a key is a block of size one, and all heads form one group
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
            f"selected for each of {n_examples} x {n_tokens} tokens, as indices or as "
            "blocks of an indexer, found the shape (examples, groups of heads, "
            f"tokens, chosen) = {tuple(blocks.shape)}; use another backbone"
        )
    keys = torch.arange(n_tokens, device=query.device)
    n_blocks = -(-n_tokens // size)
    blocks = blocks.long().masked_fill(blocks < 0, n_blocks)  # a column dropped below
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
    """Read, then attend as the model would have, with Transformers' signature."""
    reading = _reading_of_this_thread()
    n_cached = key.shape[2] - query.shape[2]
    mask = _selected(module, query, attention_mask, n_cached, kwargs)
    _check_readable(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, mask, scale, softcap, s_aux)
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

    No fused kernel supports a softcap (Gemma 2) or sinks (gpt-oss). Such models attend
    eagerly, with the function of their own file. It is called for a few rows at a time,
    which rounds in the same way and keeps no map. Returns
    `[n_examples, n_tokens, n_heads, d_head]` in the dtype of `value`.
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
    """Reads the attention of modules that use no registered attention function."""

    def __init__(self, reading: AttentionReading) -> None:
        super().__init__()
        self.reading = reading
        self.layer: int | None = None  # the layer whose attention module is running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention and self.layer is not None:
            attended = self._read_call(*args, **(kwargs or {}))
            if attended is not None:
                # So that checking the logits checks these weights too.
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
        """Read one call of Torch's attention, which must be causal without a mask."""
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
        _reading_of_this_thread()
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


def call_attention_module(
    mixer: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reading: AttentionReading | None,
) -> torch.Tensor:
    """Call an attention module by itself, with a reading or without.

    The module must use registered attention functions and have a config of its own.
    Returns its output, `[n_examples, n_tokens, d_model]`.
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
    """Run a decoder once on ids `[n_examples, n_tokens]`, which are on its device.

    `on_layer` is called for every layer, see `watch_layers`. `reading` reads the
    attention, which is otherwise left to the model. A `cache` is continued for all
    examples; a reading then gets the queries of the ids and the keys of both, but only
    if the model uses registered attention functions. Returns final-normed states
    `[n_examples, n_tokens, d_model]`.
    """
    decoder, options = layout.decoder, {}
    if cache is not None:
        options[CACHE] = cache
    with contextlib.ExitStack() as stack:
        if reading is not None:
            asks = decoder._can_set_attn_implementation()
            calls_torch = decoder.config._attn_implementation == "sdpa"
            # With Torch's attention, returning the weights would compute them again.
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
    """Let a reading see the attention of every forward pass inside the block."""
    decoder = layout.decoder
    before = decoder.config._attn_implementation
    # Undone step by step, since an interrupt may come at any line below.
    with contextlib.ExitStack() as stack:
        if asks := decoder._can_set_attn_implementation():
            stack.callback(decoder.set_attn_implementation, before)
            # Again: an interrupt may come in the middle of one.
            stack.callback(decoder.set_attn_implementation, before)
            decoder.set_attn_implementation(NAME)
        stack.callback(_active.reset, _active.set(reading))
        if not asks:
            stack.enter_context(_CustomAttention(reading).watching(layout))
        yield

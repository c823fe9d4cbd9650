"""Where a decoder adds to its residual stream, and how to watch it do so.

In a pre-norm block the attention contribution is the attention module's output; in a
sandwich or post-norm block it has first gone through a norm. The name
`post_attention_layernorm` means either, so the presence of `post_feedforward_layernorm`
decides. Gemma 4 adds a third time (per-layer embeddings), which is folded into the
feed-forward contribution, and then scales the whole stream. GPT-NeoX adds both to the
same state; taken in the order attention, feed-forward their pushes still telescope.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LAYER_LISTS = ("layers", "h")
_ATTENTION_NAMES = ("self_attn", "attention", "attn")
_RECURRENT_NAMES = ("linear_attn",)
_FINAL_NORMS = ("norm", "final_layer_norm", "ln_f", "final_layernorm")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer and the modules whose outputs it adds.

    Attributes:
      module: the layer.
      att: its output is the attention contribution.
      ffn: their outputs sum to the feed-forward contribution.
      mixer: the attention or recurrent module itself.
      has_attention: False where the mixer has no attention matrix.
    """

    module: torch.nn.Module
    att: torch.nn.Module
    ffn: tuple[torch.nn.Module, ...]
    mixer: torch.nn.Module
    has_attention: bool

    def scale(self) -> torch.Tensor | float:
        """Return what the layer multiplies its output by (Gemma 4), else 1."""
        return getattr(self.module, "layer_scalar", 1.0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The modules of one model that are watched or called.

    Attributes:
      decoder: called with ids, returns the final-normed states.
      layers: in order.
      final_norm: N of the paper's section 3.2.
      head: W_U, a linear module `[vocab_size, d_model]`.
    """

    decoder: torch.nn.Module
    layers: tuple[Layer, ...]
    final_norm: torch.nn.Module
    head: torch.nn.Module

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that have an attention matrix."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.has_attention)


@dataclasses.dataclass(frozen=True)
class LayerPass:
    """What one layer did to the stream; all `[n_examples, n_tokens, d_model]`.

    `h_out` equals `(h_in + att + ffn)` times the layer's scale, up to rounding.
    """

    index: int
    h_in: torch.Tensor
    att: torch.Tensor
    ffn: torch.Tensor
    h_out: torch.Tensor


def _first_child(parent: torch.nn.Module, names: tuple[str, ...]) -> Any:
    """Return the first child module present under one of the names, or None."""
    found = (getattr(parent, name, None) for name in names)
    return next((child for child in found if isinstance(child, torch.nn.Module)), None)


def _required_child(parent: torch.nn.Module, names: tuple[str, ...], what: str) -> Any:
    """Return such a child, or name those that are there."""
    child = _first_child(parent, names)
    if child is None:
        found = ", ".join(name for name, _ in parent.named_children()) or "nothing"
        raise ValueError(
            f"unknown residual layout: expected {what} of {type(parent).__name__} "
            f"under {' or '.join(names)}, found {found}; "
            "teach extract/backbone/layout.py this family"
        )
    return child


def _layer(module: torch.nn.Module) -> Layer:
    """Classify one decoder layer."""
    names = _ATTENTION_NAMES + _RECURRENT_NAMES
    att = mixer = _required_child(module, names, "the token mixer")
    has_attention = _first_child(module, _ATTENTION_NAMES) is not None
    ffn = (_required_child(module, ("mlp",), "the feed-forward part"),)
    post_ffn = _first_child(module, ("post_feedforward_layernorm",))
    if post_ffn is not None:
        names = ("post_attention_layernorm",)
        att = _required_child(module, names, "the norm after attention")
        ffn = (post_ffn,)
    per_layer_embedding = _first_child(module, ("post_per_layer_input_norm",))
    if per_layer_embedding is not None:
        ffn = (*ffn, per_layer_embedding)
    return Layer(module, att, ffn, mixer, has_attention)


def find_layout(model: Any) -> Layout:
    """Find the watched modules of a causal language model.

    Args:
      model: a Transformers causal LM, or a multimodal wrapper around one.

    Raises:
      ValueError: "unknown residual layout", naming what was not found. A layout
        that is found can still be wrong; `parity` checks it by its sums.
    """
    decoder = model.get_decoder()
    blocks = _required_child(decoder, _LAYER_LISTS, "the list of layers")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            "unknown residual layout: expected a linear output embedding, "
            f"found {type(head).__name__} in {type(model).__name__}"
        )
    return Layout(
        decoder=decoder,
        layers=tuple(_layer(block) for block in blocks),
        final_norm=_required_child(decoder, _FINAL_NORMS, "the final norm"),
        head=head,
    )


def _tensor(output: Any) -> torch.Tensor:
    """Return the state out of a module's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) else output


@dataclasses.dataclass
class _LayerWatch:
    """Collects one layer's contributions and hands them on when it ends."""

    index: int
    layer: Layer
    on_layer: Callable[[LayerPass], None]
    att: torch.Tensor | None = None
    ffn: torch.Tensor | None = None

    def hook(self) -> Iterator[Any]:
        """Register all hooks; yields their handles."""
        yield self.layer.att.register_forward_hook(self._after_att)
        for part in self.layer.ffn:
            yield part.register_forward_hook(self._after_ffn)
        yield self.layer.module.register_forward_hook(
            self._after_layer, with_kwargs=True
        )

    def _after_att(self, module: Any, inputs: Any, output: Any) -> None:
        self.att = _tensor(output)

    def _after_ffn(self, module: Any, inputs: Any, output: Any) -> None:
        if self.att is None:
            # Exchanged taps would satisfy every sum.
            raise ValueError(
                f"unknown residual layout: layer {self.index} called its feed-forward "
                "part before its token mixer"
            )
        part = _tensor(output)
        # Only Gemma 4 adds twice, in the stream's dtype.
        self.ffn = part if self.ffn is None else self.ffn.float() + part.float()

    def _after_layer(self, module: Any, inputs: Any, kwargs: Any, output: Any) -> None:
        h_in = inputs[0] if inputs else kwargs["hidden_states"]
        att, ffn = self.att, self.ffn
        self.att = self.ffn = None
        if att is None or ffn is None:
            raise ValueError(
                f"unknown residual layout: layer {self.index} "
                f"({type(module).__name__}) did not call its "
                f"{'token mixer' if att is None else 'feed-forward part'}"
            )
        self.on_layer(LayerPass(self.index, h_in, att, ffn, _tensor(output)))


@contextlib.contextmanager
def watch_layers(
    layout: Layout, on_layer: Callable[[LayerPass], None]
) -> Iterator[None]:
    """Call `on_layer` after every layer of every forward inside the block.

    Nothing is kept from one layer to the next. The callback must neither keep nor
    change the tensors it is given.
    """
    with contextlib.ExitStack() as handles:
        for index, layer in enumerate(layout.layers):
            for handle in _LayerWatch(index, layer, on_layer).hook():
                handles.callback(handle.remove)
        yield

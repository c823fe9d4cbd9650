"""Where a decoder adds to its residual stream, and hooks that watch it do so.

In a pre-norm block, the attention contribution is the output of the attention module;
in a sandwich or post-norm block, it first passes through a norm. Both kinds may have a
`post_attention_layernorm`, so the presence of `post_feedforward_layernorm` decides;
`_KINDS` lists what each kind of block adds. Some blocks multiply what they add
(`_MULTIPLIERS`). Gemma 4 adds a third time (per-layer embeddings), which counts as part
of the feed-forward contribution, and then scales the whole stream. GPT-NeoX, GPT-J,
Cohere and Falcon add both contributions to the same state; taken in the order
attention, feed-forward, their pushes still telescope.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_LAYER_LISTS = ("layers", "h", "blocks")
_ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")
_RECURRENT_NAMES = ("linear_attn", "conv", "mamba")
_MULTIPLIERS = ("residual_multiplier", "residual_scale")  # Granite, MiniCPM 3
_FINAL_NORMS = (
    "norm final_layer_norm ln_f final_layernorm embedding_norm norm_f".split()
)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What one kind of block adds; a dot in a name leads into a submodule."""

    ffn: tuple[str, ...]  # modules whose outputs sum to the feed-forward contribution
    att: str | None = None  # outputs the attention contribution; None: the mixer
    is_overwritten: bool = False  # the block may overwrite the last of these outputs


# A layer belongs to the first kind of which it has all modules.
_KINDS = (
    _Kind(  # Gemma 4
        att="post_attention_layernorm",
        ffn=("post_feedforward_layernorm", "post_per_layer_input_norm"),
    ),
    # Gemma 2 and 3, OLMo 2 and 3
    _Kind(att="post_attention_layernorm", ffn=("post_feedforward_layernorm",)),
    # GLM-4, whose post_attention_layernorm comes before the feed-forward part
    _Kind(att="post_self_attn_layernorm", ffn=("post_mlp_layernorm",)),
    # HyperCLOVA X, which has these norms only if its config says so
    _Kind(att="post_norm1", ffn=("post_norm2",)),
    # BLOOM's modules add the stream themselves, so modules inside them are watched;
    # Falcon's block then adds the attention to the feed-forward tensor in place.
    _Kind(att="self_attention.dense", ffn=("mlp.dense_4h_to_h",), is_overwritten=True),
    _Kind(ffn=("mlp",)),
    _Kind(ffn=("block_sparse_moe", "shared_mlp")),  # Granite 4
    _Kind(ffn=("block_sparse_moe",)),  # Granite's experts
    _Kind(ffn=("shared_mlp",)),  # Granite 4 without experts
    _Kind(ffn=("feed_forward",)),  # Llama 4, LFM2
    _Kind(ffn=("fc2",)),  # OPT
    _Kind(ffn=("ffn.down_proj",)),  # MPT, whose FFN module adds the stream itself
)

# Config entries with which a contribution, or its push, would mean something else.
_IN_THE_WAY = {
    ("do_layer_norm_before", False): "its blocks norm the stream after every addition, "
    "so what they add is not the change of the stream",
    ("apply_residual_connection_post_layernorm", True): "its blocks add to the normed "
    "state and drop the stream itself",
}
# Numbers of streams: of AltUp (Gemma 3n), of hyper-connections (DeepSeek V4).
_N_STREAMS = ("altup_num_inputs", "hc_mult", "hc_count")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer and the modules whose outputs it adds to the stream."""

    module: torch.nn.Module
    att: torch.nn.Module  # its output is the attention contribution
    ffn: tuple[torch.nn.Module, ...]  # outputs sum to the feed-forward contribution
    mixer: torch.nn.Module  # the attention or recurrent module itself
    has_attention: bool  # False if the mixer has no attention matrix
    is_overwritten: bool = False  # the layer may overwrite the feed-forward output

    def scale(self) -> torch.Tensor | float:
        """Return the factor that the layer multiplies its output by (Gemma 4), or 1."""
        return getattr(self.module, "layer_scalar", 1.0)

    def multiplier(self) -> float:
        """Return the factor that the layer multiplies each contribution by, or 1."""
        values = (getattr(self.module, name, None) for name in _MULTIPLIERS)
        return next((value for value in values if value is not None), 1.0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The modules of a model that are watched or called."""

    decoder: Any  # called with ids, returns the states after the final norm
    layers: tuple[Layer, ...]  # in order
    final_norm: torch.nn.Module  # N of the paper's section 3.2
    head: torch.nn.Linear  # W_U, a linear module `[vocab_size, d_model]`

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


def _first_child(parent: torch.nn.Module, names: Sequence[str]) -> Any:
    """Return the first child module found under one of the names, or None."""
    children = (getattr(parent, name, None) for name in names)
    return next((c for c in children if isinstance(c, torch.nn.Module)), None)


def _required_child(parent: torch.nn.Module, names: Sequence[str], what: str) -> Any:
    """Return `_first_child`, or raise an error that lists the children."""
    child = _first_child(parent, names)
    if child is None:
        children = ", ".join(name for name, _ in parent.named_children()) or "nothing"
        raise ValueError(
            f"unknown residual layout: expected {what} of {type(parent).__name__} "
            f"under {' or '.join(names)}, found {children}; "
            "teach extract/backbone/layout.py this family"
        )
    return child


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _layer(module: torch.nn.Module) -> Layer:
    names = _ATTENTION_NAMES + _RECURRENT_NAMES
    mixer = _required_child(module, names, "the token mixer")
    for kind in _KINDS:
        paths = kind.ffn if kind.att is None else (kind.att, *kind.ffn)
        outputs = [_submodule(module, path) for path in paths]
        taps = [output for output in outputs if output is not None]
        if len(taps) == len(outputs):
            break
    else:
        names = tuple(dict.fromkeys(k.ffn[0] for k in _KINDS if k.att is None))
        return _required_child(module, names, "the feed-forward part")
    return Layer(
        module=module,
        att=mixer if kind.att is None else taps[0],
        ffn=tuple(taps[-len(kind.ffn) :]),
        mixer=mixer,
        has_attention=_first_child(module, _ATTENTION_NAMES) is not None,
        is_overwritten=kind.is_overwritten,
    )


def _check_config(model: Any) -> None:
    config = model.config.get_text_config()
    for (name, value), reason in _IN_THE_WAY.items():
        if getattr(config, name, None) is value:
            raise ValueError(
                f"cannot read {type(model).__name__} with {name} {value}: {reason}; "
                "use a model without it"
            )
    for name in _N_STREAMS:
        if (n_streams := getattr(config, name, None)) is not None:
            raise ValueError(
                f"cannot read {type(model).__name__}: its layers mix {n_streams} "
                f"residual streams ({name}), so what a layer adds is not the change of "
                "any stream; use a model with one stream"
            )


def _switch_lengths(rope: Any) -> list[int]:
    """Return the sequence lengths at which a config's rotary frequencies change."""
    if not isinstance(rope, dict):
        return []
    if rope.get("rope_type") == "longrope":
        return [int(rope["original_max_position_embeddings"])]
    # Nested if each layer type has its own.
    return [n for layer_type in rope.values() for n in _switch_lengths(layer_type)]


def layer_values(config: Any, *names: str) -> list[Any]:
    """Return the distinct values of the named entries of a text model's config.

    Some configs hold entries per layer, which Transformers refuses to read from the
    config as a whole. Absent entries and None are left out.
    """
    is_per_layer = getattr(config, "is_heterogeneous", False)
    configs = config.per_layer_config if is_per_layer else [config]
    values = (getattr(layer, name, None) for layer in configs for name in names)
    return list(dict.fromkeys(value for value in values if value is not None))


def n_heads_of(config: Any) -> int:
    """Return the number of query heads, which every attention layer must share."""
    values = layer_values(config, "num_attention_heads")
    lists = [n if isinstance(n, list | tuple) else [n] for n in values]
    counts = sorted({n for heads in lists for n in heads})
    if len(counts) != 1:
        listed = ", ".join(map(str, counts)) or "none"
        raise ValueError(
            "unknown residual layout: expected the same number of attention heads in "
            f"every layer, found {listed} in the config; use another backbone"
        )
    return counts[0]


def window_of(config: Any) -> int | None:
    """Return the longest readable sequence in tokens, or None if there is no limit.

    Longrope (Phi-3's long models) has two sets of frequencies, and Transformers uses
    the long one for a whole batch as soon as its longest sequence is longer than
    `original_max_position_embeddings`. Signals of a short example would then depend on
    the rest of its batch, so the window ends where the short set does. Dynamic rotary
    scaling changes only beyond `max_position_embeddings`, where nothing is read. MPT,
    whose linear biases end there too, has its own name for that entry.
    """
    names = "max_position_embeddings", "max_seq_len"
    limits = [getattr(config, name, None) for name in names]
    limits += _switch_lengths(getattr(config, "rope_parameters", None))
    return min((n for n in limits if n is not None), default=None)


def find_layout(model: Any) -> Layout:
    """Find the modules to watch in a Transformers causal LM, bare or wrapped."""
    _check_config(model)
    if hasattr(model, "ct_decompress_hook"):  # set by the package compressed-tensors
        raise ValueError(
            f"cannot read {type(model).__name__}: its weights are compressed until its "
            "first forward pass; run one first, or load the model by its name"
        )
    decoder = model.get_decoder()
    if _first_child(decoder, _LAYER_LISTS) is None:
        # Llama 4 returns the language model as its decoder.
        decoder = _first_child(decoder, ("model",)) or decoder
    if _first_child(decoder, ("project_out",)) is not None:
        raise ValueError(
            f"cannot read {type(model).__name__}: it projects the states after its "
            "final norm (project_out), where no push is defined; use a model without it"
        )
    blocks = _required_child(decoder, _LAYER_LISTS, "the list of layers")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            "unknown residual layout: expected a linear output embedding, "
            f"found {type(head).__module__}.{type(head).__name__} in "
            f"{type(model).__name__}; if it is an adapter, merge it into the weights "
            "(merge_and_unload)"
        )
    return Layout(
        decoder=decoder,
        layers=tuple(_layer(block) for block in blocks),
        final_norm=_required_child(decoder, _FINAL_NORMS, "the final norm"),
        head=head,
    )


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Keep a module in evaluation mode; its owner may train it between passes."""
    modules = [each for each in module.modules() if each.training]
    for each in modules:
        each.training = False
    try:
        yield
    finally:
        for each in modules:
            each.training = True


def plain_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a weight consists of; one that torchao packs has several.

    Such a weight cannot be viewed as bytes.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = () if flatten is None else flatten()[0]
    return [part for n in names for part in plain_parts(getattr(tensor, n))] or [tensor]


def _tensor(output: Any) -> torch.Tensor:
    """Return the state from a module's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) else output


@dataclasses.dataclass
class _LayerWatch:
    """Collects one layer's contributions, and calls back when the layer ends."""

    index: int
    layer: Layer
    on_layer: Callable[[LayerPass], None]
    multiplier: float
    att: torch.Tensor | None = None
    ffn: torch.Tensor | None = None
    is_over: bool = False  # an interrupt may have left some hooks: they then do nothing

    def hook(self) -> Iterator[Any]:
        module = self.layer.module
        yield self.layer.att.register_forward_hook(self._after_att)
        for each in self.layer.ffn:
            yield each.register_forward_hook(self._after_ffn)
        yield module.register_forward_hook(self._after_layer, with_kwargs=True)

    def _after_att(self, module: Any, inputs: Any, output: Any) -> None:
        self.att = None if self.is_over else _tensor(output)

    def _after_ffn(self, module: Any, inputs: Any, output: Any) -> None:
        if self.is_over:
            return
        if self.att is None:
            # With taps exchanged, all sums would still hold.
            raise ValueError(
                f"unknown residual layout: layer {self.index} called its feed-forward "
                "part before its token mixer"
            )
        added = _tensor(output)
        if self.layer.is_overwritten:
            added = added.clone()
        # Gemma 4 and Granite 4 add twice, in the stream's dtype.
        self.ffn = added if self.ffn is None else self.ffn.float() + added.float()

    def _after_layer(self, module: Any, inputs: Any, kwargs: Any, output: Any) -> None:
        if self.is_over:
            return
        h_in = inputs[0] if inputs else kwargs["hidden_states"]
        att, ffn = self.att, self.ffn
        self.att = self.ffn = None
        if att is None or ffn is None:
            raise ValueError(
                f"unknown residual layout: layer {self.index} "
                f"({type(module).__name__}) did not call its "
                f"{'token mixer' if att is None else 'feed-forward part'}"
            )
        att, ffn = self._contribution(att, h_in), self._contribution(ffn, h_in)
        self.on_layer(LayerPass(self.index, h_in, att, ffn, _tensor(output)))

    def _contribution(self, output: torch.Tensor, h_in: torch.Tensor) -> torch.Tensor:
        """Return what the layer adds of a module's output, in the stream's shape."""
        if output.shape != h_in.shape:
            # Llama 4's experts and OPT flatten the tokens of all examples.
            if output.numel() != h_in.numel() or output.shape[-1] != h_in.shape[-1]:
                raise ValueError(
                    f"unknown residual layout: {type(self.layer.module).__name__} adds "
                    f"to a stream of shape {tuple(h_in.shape)}, its parts having shape "
                    f"{tuple(output.shape)}"
                )
            output = output.view(h_in.shape)
        # In the stream's dtype, which is how the model rounds it.
        is_scaled = self.multiplier != 1.0
        return (output * self.multiplier).to(h_in.dtype) if is_scaled else output


@contextlib.contextmanager
def watch_layers(
    layout: Layout, on_layer: Callable[[LayerPass], None]
) -> Iterator[None]:
    """Call `on_layer` after every layer of every forward pass inside the block.

    Nothing is kept between layers; the callback must neither keep nor change tensors.
    """
    with contextlib.ExitStack() as handles:
        for index, layer in enumerate(layout.layers):
            watch = _LayerWatch(index, layer, on_layer, layer.multiplier())
            handles.callback(setattr, watch, "is_over", True)
            for handle in watch.hook():
                handles.enter_context(handle)
        yield

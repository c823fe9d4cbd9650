"""What a model does in one forward, caught by other taps than the reader's.

Attention maps come from Transformers' eager path, or from the queries and keys of the
fused one; states are what layers are handed. What a layer adds is caught where it is
added: every addition that PyTorch executes is seen, and those to the residual stream
count, whatever the modules are called.
"""

import contextlib
import copy
import dataclasses
import sys
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, HyperCLOVAXConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

FUSED = "oracle_fused"
_LISTS = ("h", "blocks", "layers")
_maps: list[np.ndarray] = []  # of the fused run under way
_NORMS = "norm final_layer_norm ln_f final_layernorm embedding_norm norm_f".split()
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one forward of the model left behind.

    Attributes:
      logits: `[n_tokens, vocab_size]` float64.
      states: `n_layers + 1` tensors `[n_tokens, d_model]`, un-normed.
      contributions: per layer attention's and feed-forward's, float64.
      maps: `[n_heads, n_tokens, n_tokens]` float64 per attention layer.
    """

    logits: np.ndarray
    states: list[torch.Tensor]
    contributions: list[tuple[torch.Tensor, torch.Tensor]]
    maps: list[np.ndarray]


class _Additions(TorchDispatchMode):
    """Notes every addition of two tensors of the stream's size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[torch.Tensor] = []
        self.seen: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
        self.n_run, self.made_at = 0, {}

    def begin_layer(self, module: Any, inputs: tuple[Any, ...], kwargs: Any) -> None:
        """Note the stream as a layer is handed it; a forward pre-hook."""
        self.layers.append(inputs[0] if inputs else kwargs["hidden_states"])
        self.seen.append([])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        pair = args[:2] if func in _ADDITIONS and self.layers else ()
        pair = [arg for arg in pair if isinstance(arg, torch.Tensor)]
        # Attention's comes first: where both are added at once, it was made first.
        pair.sort(key=lambda arg: self.made_at.get(arg.data_ptr(), 0))
        if func is _ADDITIONS[1]:  # writes over what it adds to
            pair = [arg.clone() if arg is args[0] else arg for arg in pair]
        out = func(*args, **(kwargs or {}))
        self.n_run += 1
        if isinstance(out, torch.Tensor):
            self.made_at[out.data_ptr()] = self.n_run
            if len(pair) == 2 and out.numel() == self.layers[0].numel():
                self.seen[-1].append((*pair, out))
        return out

    def added(self, index: int) -> list[torch.Tensor]:
        """Return what one layer added to its stream, in order."""
        stream, parts, made_of = self.layers[index], [], {}
        for left, right, out in self.seen[index]:
            made_of[out.data_ptr()] = [left, right]
            if stream.data_ptr() in (left.data_ptr(), right.data_ptr()):
                is_left = left.data_ptr() == stream.data_ptr()
                parts.append(right if is_left else left)
                stream = out
        if len(parts) == 1:  # a parallel block adds both at once
            parts = made_of[parts[0].data_ptr()]
        return [part.reshape(self.layers[index].shape)[0].double() for part in parts]


def exact_map(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention weights `[n_heads, n_tokens, n_tokens]` in float64.

    With sinks `[n_heads]` every row has one more column, whose weight is left out.
    """
    keys = key[0].double().repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    logits = query[0].double() @ keys.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype != torch.bool:
        logits, mask = logits + mask[0].double(), mask > -1e4
    visible = causal if mask is None else mask[0]
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.double()[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]


def _fused(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the fused kernel, and note the map that follows from q and k."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = exact_map(query, key, attention_mask, scale, softcap, s_aux)
    _maps.append(found.numpy())
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # No fused kernel has a softcap (Gemma 2) or sinks (gpt-oss): models that have one
    # attend eagerly under every name.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    causal = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
    visible = causal if attention_mask is None else attention_mask
    added = torch.zeros(visible.shape).masked_fill(
        ~visible, torch.finfo(query.dtype).min
    )
    options = {**kwargs, "scaling": scale, "softcap": softcap, "s_aux": s_aux}
    return eager(module, query, key, value, added.to(query.dtype), **options)


class _Calls(TorchFunctionMode):
    """Notes the maps of a decoder that calls Torch's attention by itself (Falcon)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, _ = args
            scale = options.get("scale") or query.shape[-1] ** -0.5
            found = exact_map(query, key, options["attn_mask"], scale, None)
            _maps.append(found.numpy())
        return func(*args, **options)


AttentionInterface.register(FUSED, _fused)
AttentionMaskInterface.register(FUSED, sdpa_mask)


def copy_with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a copy that attends by "eager" or by the fused kernel (`FUSED`).

    Decoders that ask for no attention function (Falcon, GPT-J, BLOOM) attend in their
    own way under either name.
    """
    twin = copy.deepcopy(model)
    decoder_of(twin).set_attn_implementation(name)
    return twin


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder; Llama 4 gives the language model in its place."""
    body = model.get_decoder()
    return getattr(body, "model", body)


def layers_and_norm(model: PreTrainedModel) -> tuple[Any, torch.nn.Module]:
    """Return the decoder's layers and its final norm."""
    body = decoder_of(model)
    norm = next(getattr(body, name) for name in _NORMS if hasattr(body, name))
    return next(getattr(body, n) for n in _LISTS if hasattr(body, n)), norm


def logit_scale(model: PreTrainedModel) -> float:
    """Return what the model multiplies its logits by."""
    config = model.config.get_text_config()
    factor = getattr(config, "logits_scaling", None) or 1.0
    if not isinstance(config, HyperCLOVAXConfig):
        factor = 1.0 / factor
    return factor * (getattr(config, "logit_scale", None) or 1.0)


def _exact_logits(model: PreTrainedModel, final: torch.Tensor) -> torch.Tensor:
    """Return the logits of normed states without the rounding of the model's dtype."""
    head = model.get_output_embeddings()
    logits = final.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * logit_scale(model)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def run_model(model: PreTrainedModel, ids: np.ndarray) -> Run:
    """Run a copy made by `copy_with_attention` on one example.

    In float32 the logits are the model's own. Half-precision models round theirs,
    which no reading does, so there they are computed from the normed states.
    """
    layers, norm = layers_and_norm(model)
    is_eager = decoder_of(model).config._attn_implementation == "eager"
    additions, ends = _Additions(), []
    handles = [
        layer.register_forward_pre_hook(additions.begin_layer, with_kwargs=True)
        for layer in layers
    ]
    handles.append(norm.register_forward_hook(lambda m, a, o: ends.extend([a[0], o])))
    _maps.clear()
    asks = decoder_of(model)._can_set_attn_implementation()
    with additions, contextlib.nullcontext() if asks else _Calls():
        output = model(
            input_ids=torch.from_numpy(ids)[None],
            output_attentions=is_eager,
            use_cache=False,
        )
    for handle in handles:
        handle.remove()
    added = [additions.added(index) for index in range(len(layers))]
    logits = output.logits
    if logits.dtype != torch.float32:
        logits = _exact_logits(model, ends[-1])
    maps = [item[0].double().numpy() for item in output.attentions or ()] or [*_maps]
    return Run(
        logits=logits[0].double().numpy(),
        # The norm's last call: some norm their embedding by the same module.
        states=[state[0] for state in (*additions.layers, ends[-2])],
        contributions=[(att, sum(ffn)) for att, *ffn in added],
        maps=maps,
    )

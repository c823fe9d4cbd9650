"""The signals once more, by brute force and through other taps.

One unpadded example at a time. Attention maps come from Transformers' eager path,
states from `output_hidden_states`, probabilities from the full vocabulary. What a
layer adds is caught where it is added: every addition that PyTorch executes is seen,
and those to the residual stream count, whatever the modules are called. The final
norm is the model's own module. Everything after the model is a float64 loop over
single numbers.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from extract.signals.plan import TokenSequence

FUSED = "oracle_fused"
_NORMS = ("norm", "final_layer_norm", "ln_f")


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
    """Notes every addition of two tensors of the stream's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[torch.Tensor] = []
        self.seen: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []

    def begin_layer(self, module: Any, inputs: tuple[Any, ...], kwargs: Any) -> None:
        """Note the stream as a layer is handed it; a forward pre-hook."""
        self.layers.append(inputs[0] if inputs else kwargs["hidden_states"])
        self.seen.append([])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_sum = func is torch.ops.aten.add.Tensor
        if is_sum and self.layers and out.shape == self.layers[0].shape:
            if all(isinstance(arg, torch.Tensor) for arg in args[:2]):
                self.seen[-1].append((args[0], args[1], out))
        return out

    def added(self, index: int, is_parallel: bool) -> list[torch.Tensor]:
        """Return what one layer added to its stream, in order."""
        stream, parts, made_of = self.layers[index], [], {}
        for left, right, out in self.seen[index]:
            made_of[out.data_ptr()] = [right, left]
            if stream.data_ptr() in (left.data_ptr(), right.data_ptr()):
                is_left = left.data_ptr() == stream.data_ptr()
                parts.append(right if is_left else left)
                stream = out
        if is_parallel:  # it adds (feed-forward + attention) at once
            parts = made_of[parts[0].data_ptr()]
        return [part[0].double() for part in parts]


_maps: list[np.ndarray] = []


def exact_map(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return attention weights `[n_heads, n_tokens, n_tokens]` in float64."""
    keys = key[0].double().repeat_interleave(query.shape[1] // key.shape[1], dim=0)
    logits = query[0].double() @ keys.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    visible = causal if mask is None else mask[0, 0]
    return logits.masked_fill(~visible, -torch.inf).softmax(-1)


def _fused(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the fused kernel, and note the map that follows from q and k."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = exact_map(query, key, attention_mask, scale, softcap)
    _maps.append(found.numpy())
    if softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # The fused kernel has no softcap (Gemma 2): the exact product stands in for it.
    values = value[0].double().repeat_interleave(len(found) // value.shape[1], dim=0)
    return (found @ values).to(value.dtype).transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(FUSED, _fused)
AttentionMaskInterface.register(FUSED, sdpa_mask)


def copy_with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a copy that attends by "eager" or by the fused kernel (`FUSED`)."""
    twin = copy.deepcopy(model)
    twin.get_decoder().set_attn_implementation(name)
    return twin


def _layers_and_norm(model: PreTrainedModel) -> tuple[Any, torch.nn.Module]:
    """Return the decoder's layers and its final norm."""
    body = model.get_decoder()
    norm = next(getattr(body, name) for name in _NORMS if hasattr(body, name))
    return body.h if hasattr(body, "h") else body.layers, norm


def _exact_logits(model: PreTrainedModel, final: torch.Tensor) -> torch.Tensor:
    """Return the logits of normed states without the rounding of the model's dtype."""
    head = model.get_output_embeddings()
    logits = final.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def run_model(model: PreTrainedModel, ids: np.ndarray) -> Run:
    """Run a copy made by `copy_with_attention` on one example.

    In float32 the logits are the model's own. Half-precision models round theirs,
    which no reading does, so there they are computed from the normed states.
    """
    layers, norm = _layers_and_norm(model)
    is_eager = model.get_decoder().config._attn_implementation == "eager"
    additions, ends = _Additions(), []
    handles = [
        layer.register_forward_pre_hook(additions.begin_layer, with_kwargs=True)
        for layer in layers
    ]
    handles.append(norm.register_forward_hook(lambda m, a, o: ends.extend([a[0], o])))
    _maps.clear()
    with additions:
        output = model(
            input_ids=torch.from_numpy(ids)[None],
            output_hidden_states=True,
            output_attentions=is_eager,
            use_cache=False,
        )
    for handle in handles:
        handle.remove()
    is_parallel = getattr(model.config, "use_parallel_residual", False)
    contributions = []
    for index in range(len(layers)):
        att, *ffn = additions.added(index, is_parallel)
        contributions.append((att, sum(ffn)))
    is_single = output.logits.dtype == torch.float32
    logits = output.logits if is_single else _exact_logits(model, ends[1])
    maps = [item[0].double().numpy() for item in output.attentions or ()] or [*_maps]
    return Run(
        logits=logits[0].double().numpy(),
        # The last of Transformers' hidden states is normed already.
        states=[state[0] for state in (*output.hidden_states[:-1], ends[0])],
        contributions=contributions,
        maps=maps,
    )


def prob_scalars(logits: Items[float], target: int) -> list[float]:
    """Return the five scalars of one next-token distribution."""
    peak = max(logits)
    exponentials = [math.exp(value - peak) for value in logits]
    total = sum(exponentials)
    p = [value / total for value in exponentials]
    first, second = sorted(p, reverse=True)[:2]
    entropy = -sum(value * math.log(value) for value in p if value > 0)
    return [p[target], -math.log(p[target]), entropy, first, first - second]


def entropy_and_mass(weights: Items[float]) -> tuple[float, float]:
    """Return the entropy in nats of weights made to sum to one, and their sum."""
    mass = sum(weights)
    if mass == 0:
        return 0.0, 0.0
    shares = [weight / mass for weight in weights if weight > 0]
    return -sum(share * math.log(share) for share in shares), mass


def attention_reading(
    attention_map: np.ndarray, spans: Items[tuple[int, int]], position: int
) -> list[tuple[float, float]]:
    """Return `[2 partners][entropy, mass]` of one token in one head."""
    own = [i for i, (a, b) in enumerate(spans) if a <= position < b]
    if not own:
        return [(0.0, 0.0), (0.0, 0.0)]
    readings = []
    for partner in [i for i in range(3) if i != own[0]]:
        tokens = range(*spans[partner])
        if partner < own[0]:
            weights = [attention_map[position, key] for key in tokens]
        else:
            weights = [attention_map[query, position] for query in tokens]
        readings.append(entropy_and_mass(weights))
    return readings


@torch.no_grad()
def resid_scalars(model: PreTrainedModel, run: Run, targets: np.ndarray) -> np.ndarray:
    """Return `[n_tokens, 4 * n_layers]`: norms, and pushes through the norm itself."""
    _, own_norm = _layers_and_norm(model)
    norm = copy.deepcopy(own_norm).float()
    words = model.get_output_embeddings().weight.double()[torch.from_numpy(targets)]

    def lens(state: torch.Tensor) -> torch.Tensor:
        return (norm(state.float()).double() * words).sum(-1)

    columns = []
    for state, (att, ffn) in zip(run.states[:-1], run.contributions, strict=True):
        before = state.double()
        middle, after = before + att, before + att + ffn
        columns += [
            att.norm(dim=-1),
            lens(middle) - lens(before),
            ffn.norm(dim=-1),
            lens(after) - lens(middle),
        ]
    return torch.stack(columns, dim=-1).numpy()


def _attn_readings(maps: list[np.ndarray], spans: Items[tuple[int, int]]) -> np.ndarray:
    """Return `[n_tokens, 2, 2, n_attention_layers, n_heads]`."""
    n_heads, n_tokens, _ = maps[0].shape
    attn = np.zeros((n_tokens, 2, 2, len(maps), n_heads))
    for layer, layer_map in enumerate(maps):
        for head in range(n_heads):
            for t in range(n_tokens):
                found = attention_reading(layer_map[head], spans, t)
                attn[t, :, :, layer, head] = found
    return attn


def oracle_signals(
    model: PreTrainedModel, sequence: TokenSequence
) -> dict[str, np.ndarray]:
    """Return the four families of one sequence in float64.

    Args:
      model: a copy made by `copy_with_attention`.
      sequence: one teacher-forced example.
    """
    run = run_model(model, sequence.ids)
    rows = zip(run.logits, sequence.targets, strict=True)
    return {
        "hidden": torch.stack(run.states, dim=1).double().numpy(),
        "prob": np.array([prob_scalars(row, target) for row, target in rows]),
        "resid": resid_scalars(model, run, sequence.targets),
        "attn": _attn_readings(
            run.maps, [tuple(map(int, span)) for span in sequence.spans]
        ),
    }

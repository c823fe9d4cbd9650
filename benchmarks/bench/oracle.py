"""`beatrice bench oracle`, `survey` and `written`: the reader against brute force.

The oracle reads each example alone and taps other places than the reader: attention
maps come from Transformers' eager path, or from the queries and keys of the fused one;
states are the inputs of layers; probabilities use the full vocabulary. A layer's
contributions are caught as they are added: every addition that PyTorch executes is
observed, and those to the residual stream count, whatever the modules are called. The
final norm is the model's own module; everything after the model is a float64 loop over
single numbers.

`oracle`: the reader reads four examples on a tiny random model of each architecture, in
small odd chunks. In float32, the reader gets one padded batch and the oracle attends
eagerly. In bfloat16, the oracle uses the same fused kernel as the reader, and the
reader's error is shown next to the change that the model's own eager attention causes.

`survey`: a narrow random twin of every causal language model of Transformers is made
from its default config, and must be read exactly or refused in a sentence: on a ragged
batch, with its default windows and with windows of eight tokens, which most rows
exceed, and on one text longer than the 2,048 keys that sparse layers choose by default.

`written`: readings from the passes that generate an answer are compared with a second
reading of the same ids, and the model's own logits with and without its cache; both
differences are relative to the norm.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, HyperCLOVAXConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from beatrice.benchmarks.bench.commands import Row, RowPrinter
from beatrice.benchmarks.bench.tiny_models import (
    architectures,
    make_batch,
    make_sequence,
)
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.run.console import (
    Progress,
    silence_transformers,
    table_head,
    table_row,
)
from beatrice.extract.run.verbs import AS_JSON, did_you_mean
from beatrice.extract.signals import parity
from beatrice.extract.signals.attention import CACHE
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.decode import check_decoding, decoding_differences
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import TokenSequence

FUSED = "oracle_fused"
_LISTS = ("h", "blocks", "layers")
_maps: list[np.ndarray] = []  # attention maps of the current fused run
_NORMS = "norm final_layer_norm ln_f final_layernorm embedding_norm norm_f".split()
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedForward:
    """Values recorded in one forward of the model."""

    logits: np.ndarray  # `[n_tokens, vocab_size]` float64
    # `n_layers + 1` tensors `[n_tokens, d_model]`, before any norm
    states: list[torch.Tensor]
    # what attention and feed-forward add in each layer, float64
    contributions: list[tuple[torch.Tensor, torch.Tensor]]
    # `[n_heads, n_tokens, n_tokens]` float64 per attention layer
    maps: list[np.ndarray]


class _Additions(TorchDispatchMode):
    """Records every addition of two tensors of the residual stream's size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[torch.Tensor] = []
        self.seen: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
        self.n_run, self.created_at = 0, {}

    def begin_layer(self, module: Any, inputs: tuple[Any, ...], kwargs: Any) -> None:
        """Record a layer's input; a forward pre-hook."""
        self.layers.append(inputs[0] if inputs else kwargs["hidden_states"])
        self.seen.append([])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        pair = args[:2] if func in _ADDITIONS and self.layers else ()
        pair = [arg for arg in pair if isinstance(arg, torch.Tensor)]
        # Attention's output comes first: if both are added at once, it is the older.
        pair.sort(key=lambda arg: self.created_at.get(arg.data_ptr(), 0))
        if func is _ADDITIONS[1]:  # overwrites one operand
            pair = [arg.clone() if arg is args[0] else arg for arg in pair]
        out = func(*args, **(kwargs or {}))
        self.n_run += 1
        if isinstance(out, torch.Tensor):
            self.created_at[out.data_ptr()] = self.n_run
            if len(pair) == 2 and out.numel() == self.layers[0].numel():
                self.seen[-1].append((pair[0], pair[1], out))
        return out

    def added(self, index: int) -> list[torch.Tensor]:
        """Return what one layer added to the residual stream, in order."""
        stream, parts, operands = self.layers[index], [], {}
        for left, right, out in self.seen[index]:
            operands[out.data_ptr()] = [left, right]
            if stream.data_ptr() in (left.data_ptr(), right.data_ptr()):
                is_left = left.data_ptr() == stream.data_ptr()
                parts.append(right if is_left else left)
                stream = out
        if len(parts) == 1:  # a parallel block adds both at once
            parts = operands[parts[0].data_ptr()]
        return [
            tensor.reshape(self.layers[index].shape)[0].double() for tensor in parts
        ]


def exact_map(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention weights `[n_heads, n_tokens, n_tokens]` in float64.

    With sinks `[n_heads]`, the softmax has one more column, which is then left out.
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
    """Attend by the fused kernel, and record the map computed from q and k."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = exact_map(query, key, attention_mask, scale, softcap, s_aux)
    _maps.append(weights.numpy())
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # No fused kernel has a softcap (Gemma 2) or sinks (gpt-oss): models with either
    # attend eagerly under every name.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    causal = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
    visible = causal if attention_mask is None else attention_mask
    added = torch.zeros(visible.shape).masked_fill(
        ~visible, torch.finfo(query.dtype).min
    )
    options = {**kwargs, "scaling": scale, "softcap": softcap, "s_aux": s_aux}
    return eager(module, query, key, value, added.to(query.dtype), **options)


class _AttentionCalls(TorchFunctionMode):
    """Records the maps of decoders that call Torch's attention directly (Falcon)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, _ = args
            scale = options.get("scale") or query.shape[-1] ** -0.5
            weights = exact_map(query, key, options["attn_mask"], scale, None)
            _maps.append(weights.numpy())
        return func(*args, **options)


AttentionInterface.register(FUSED, _fused)
AttentionMaskInterface.register(FUSED, sdpa_mask)


def copy_with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a copy that attends by "eager" or by the fused kernel (`FUSED`).

    Decoders that do not use Transformers' attention functions (Falcon, MPT, BLOOM)
    attend in their own way under either name.
    """
    twin = copy.deepcopy(model)
    decoder_of(twin).set_attn_implementation(name)
    return twin


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder; Llama 4's `get_decoder` returns the language model."""
    body = model.get_decoder()
    return getattr(body, "model", body)


def layers_and_norm(model: PreTrainedModel) -> tuple[Any, torch.nn.Module]:
    """Return the decoder's layers and its final norm."""
    body = decoder_of(model)
    norm = next(getattr(body, name) for name in _NORMS if hasattr(body, name))
    return next(getattr(body, n) for n in _LISTS if hasattr(body, n)), norm


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor by which the model multiplies its logits."""
    config = model.config.get_text_config()
    factor = getattr(config, "logits_scaling", None) or 1.0
    if not isinstance(config, HyperCLOVAXConfig):
        factor = 1.0 / factor
    return factor * (getattr(config, "logit_scale", None) or 1.0)


def _exact_logits(model: PreTrainedModel, final: torch.Tensor) -> torch.Tensor:
    """Return the logits of normed states, not rounded to the model's dtype."""
    head = model.get_output_embeddings()
    assert head is not None
    logits = final.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * logit_scale(model)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def run_model(model: PreTrainedModel, ids: np.ndarray) -> RecordedForward:
    """Run a copy made by `copy_with_attention` on one example.

    In float32, the logits are the model's own. Half-precision models round theirs, and
    readings do not, so in that case they are computed from the normed states.
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
    with additions, contextlib.nullcontext() if asks else _AttentionCalls():
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
    return RecordedForward(
        logits=logits[0].double().numpy(),
        # The norm's last call: some models also norm their embedding with it.
        states=[state[0] for state in (*additions.layers, ends[-2])],
        contributions=[(att, functools.reduce(torch.add, ffn)) for att, *ffn in added],
        maps=maps,
    )


Readings = dict[str, np.ndarray]  # by signal family
SIGNALS = ("hidden", "prob", "resid", "attn")

# float32 states of size 30 have rounding errors of 4e-6; the worst error observed is
# 6e-5 (Gemma 4, whose six layers rescale the stream).
TOLERANCE = 1e-4
ZERO_MASS = 1e-30  # smaller float32 weights have no digits left, and count as zero


def prob_scalars(logits: Sequence[float], target: int) -> list[float]:
    """Return the five scalars of one next-token distribution."""
    peak = max(logits)
    exponentials = [math.exp(value - peak) for value in logits]
    total = sum(exponentials)
    p = [value / total for value in exponentials]
    first, second = sorted(p, reverse=True)[:2]
    entropy = -sum(value * math.log(value) for value in p if value > 0)
    return [p[target], -math.log(p[target]), entropy, first, first - second]


def entropy_and_mass(weights: Sequence[float]) -> tuple[float, float]:
    """Return the entropy in nats of normalised weights, and the weights' sum."""
    mass = sum(weights)
    if mass < ZERO_MASS:
        return 0.0, 0.0
    shares = [weight / mass for weight in weights if weight > 0]
    return -sum(share * math.log(share) for share in shares), mass


def attention_reading(
    attention_map: np.ndarray, spans: Sequence[tuple[int, int]], position: int
) -> list[tuple[float, float]]:
    """Return entropy and mass towards both other spans for a token in a head."""
    spans_around = [i for i, (a, b) in enumerate(spans) if a <= position < b]
    if not spans_around:
        return [(0.0, 0.0), (0.0, 0.0)]
    readings = []
    for partner in [i for i in range(3) if i != spans_around[0]]:
        tokens = range(*spans[partner])
        is_before = partner < spans_around[0]  # else it attends to the token
        seen = attention_map[position] if is_before else attention_map[:, position]
        readings.append(entropy_and_mass([seen[token] for token in tokens]))
    return readings


@torch.no_grad()
def resid_scalars(
    model: PreTrainedModel, run: RecordedForward, targets: np.ndarray
) -> np.ndarray:
    """Return `[n_tokens, 4 * n_layers]`: norms, and pushes through the final norm."""
    norm = copy.deepcopy(layers_and_norm(model)[1]).float()
    head = model.get_output_embeddings()
    assert head is not None
    words = head.weight.double()[torch.from_numpy(targets)]
    words = words * logit_scale(model)

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


def oracle_signals(model: PreTrainedModel, sequence: TokenSequence) -> Readings:
    """Read the four families in float64, on a copy made by `copy_with_attention`."""
    run, spans = run_model(model, sequence.ids), sequence.spans.tolist()
    rows = zip(run.logits, sequence.targets, strict=True)
    (n_heads, n_tokens, _), n_layers = run.maps[0].shape, len(run.maps)
    attn = np.zeros((n_tokens, 2, 2, n_layers, n_heads))
    for t, layer, head in np.ndindex(n_tokens, n_layers, n_heads):
        attn[t, :, :, layer, head] = attention_reading(run.maps[layer][head], spans, t)
    return {
        "hidden": torch.stack(run.states, dim=1).double().numpy(),
        "prob": np.array([prob_scalars(row, target) for row, target in rows]),
        "resid": resid_scalars(model, run, sequence.targets),
        "attn": attn,
    }


def reader_signals(model: PreTrainedModel, *, together: bool) -> list[Readings]:
    """Read the examples with the reader, in one padded batch or one at a time."""
    small = ReadingBudget(  # small, so that every seam between chunks is crossed
        n_attention_weights=1000, n_tokens_per_chunk=7, n_words_per_block=13
    )
    reader, batch = SignalReader(Backbone.from_model(model), budget=small), make_batch()
    groups = [batch] if together else [[sequence] for sequence in batch]
    signals = [item for group in groups for item in reader.read(group)]
    return [{name: getattr(item, name) for name in SIGNALS} for item in signals]


def oracle_batch(model: PreTrainedModel, attention: str) -> list[Readings]:
    """Read the batch with the oracle; `attention` is "eager" or `FUSED`."""
    twin = copy_with_attention(model, attention)
    return [oracle_signals(twin, sequence) for sequence in make_batch()]


def largest_errors(
    readings: list[Readings],
    expected: list[Readings],
    *,
    is_relative: bool = False,
    n_spared: int = 0,
) -> dict[str, float]:
    """Return the largest error per family, infinite if any is not finite.

    Readings are `[n_tokens, …]` per text and family; errors are absolute, or relative
    to the family's largest value; `n_spared` tokens in all may be further off.
    """
    errors = {}
    for name in SIGNALS:
        pairs = [(a[name], b[name]) for a, b in zip(readings, expected, strict=True)]
        errors[name] = math.inf
        if all(left.shape == right.shape for left, right in pairs):
            gaps = [np.abs(a - b).reshape(len(a), -1).max(1) for a, b in pairs]
            gap = np.sort(np.concatenate(gaps))  # infinite ones come last, then NaN
            if np.isfinite(gap[-1]):
                scale = max(float(np.abs(right).max()) for _, right in pairs)
                errors[name] = float(gap[len(gap) - 1 - n_spared])
                errors[name] /= (scale if is_relative else 1.0) or 1.0
    return errors


def measure(name: str, build: Callable[[], PreTrainedModel]) -> Row:
    """Return the largest absolute errors of an architecture for each family.

    In bfloat16, each is paired with the oracle's change from fused to eager attention.
    """
    single, half = build(), build().bfloat16()
    read = reader_signals(single, together=True)
    errors = largest_errors(read, oracle_batch(single, "eager"))
    fused = oracle_batch(half, FUSED)
    # One at a time: the model's products round differently in other batch shapes.
    of_half = largest_errors(reader_signals(half, together=False), fused)
    gaps = largest_errors(oracle_batch(half, "eager"), fused)
    return {
        "architecture": name,
        **{f"fp32 {n}": errors[n] for n in SIGNALS},
        **{f"bf16 {n}": (of_half[n], gaps[n]) for n in SIGNALS},
    }


def require(rows: Sequence[Row]) -> None:
    """Check that every row's errors are within its limits."""
    of_itself = ", the difference between the model's eager and fused attention"
    for row, name in itertools.product(rows, SIGNALS):
        half, gap = row[f"bf16 {name}"]
        for dtype, error, limit, why in (
            ("float32", row[f"fp32 {name}"], TOLERANCE, ""),
            ("bfloat16", half, gap, of_itself),
        ):
            if not error <= max(limit, TOLERANCE):  # so that NaN fails
                raise ValueError(
                    f"{row['architecture']}: {dtype} {name} differs by {error:.1e} "
                    f"from the oracle, expected at most {max(limit, TOLERANCE):.1e}"
                    f"{why if limit > TOLERANCE else ''}"
                )


@click.command()
@AS_JSON
def oracle(as_json: bool) -> None:
    """Compare every architecture with a brute-force oracle; print a table.

    Cells are largest absolute errors on tiny random models, fp32 and bf16; after each
    bf16 error, brackets show how much the model's own eager attention changes that
    reading. Architectures that Transformers itself cannot run are listed at the end.

    Example: beatrice bench oracle
    """
    silence_transformers()
    rows, every, printer = [], list(architectures()), RowPrinter(as_json)
    broken = []
    with Progress().stage("oracle") as update:
        for done, (name, build) in enumerate(every, start=1):
            try:
                rows.append(measure(name, build))
                printer.row(rows[-1])
            except parity.CannotRun as error:
                broken.append(f"{name}: {error}")
            update(done, len(every))
    require(rows)
    for line in broken:
        Progress().note(line)


Outcome = Literal["exact", "refused", "wrong", "not built"]
# Texts of up to 26 tokens; the same with windows of eight tokens, which they exceed; or
# one text of 2,300 tokens, without its two worst.
Lengths = Literal["short", "beyond", "long"]
# Relative to the largest value of a family; float32 rounding is about 1e-6.
SURVEY_TOLERANCE = 1e-5
WINDOW = 8
_WINDOWS = re.compile(
    r"sliding_window(_size)?|attention_chunk_size|window_size|index_topk"
)
_POSITIONS = re.compile("max_position_embeddings|n_positions|n_ctx|max_seq_len")
_N_LONG = 2300
_OURS = Path(__file__).parents[2] / "extract"
# Entries that twins need besides small sizes, since some entries constrain others.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
_DOTS = {"num_key_value_heads": 4, "swa_num_attention_heads": 2}
_DOTS |= {"swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_q_lora_rank": 16}
_DOTS |= {"swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
_EXPERTS = {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_TOWER |= {"num_attention_heads": 2}
_ENTRIES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"),
            {"rope_type": "default", "rope_theta": 1e4},
        ),
    },
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}
    ),
    # With fewer than eight indexer heads, the ReLU would leave ties among scores.
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), {"index_n_heads": 8}),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": _EXPERTS,
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS),
    "falcon_h1": _MAMBA,
    "git": {"vision_config": {**_TOWER, "image_size": 16, "patch_size": 8}},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "qk_head_dim": 16,
    },
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "num_key_value_heads": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
}


def survey_batch(lengths: Lengths) -> list[TokenSequence]:
    """Return the texts on which twins are read."""
    if lengths == "long":
        return [make_sequence(5, _N_LONG, [1, 2270], [2270, 2290], [2290, _N_LONG])]
    return make_batch()


def twin_of(name: str, lengths: Lengths = "short") -> Any:
    """Build the twin of a type; errors of Transformers are passed on."""
    config = CONFIG_MAPPING[name]().get_text_config()
    entries, changes = config.to_dict(), dict(_ENTRIES.get(name, {}))
    if lengths == "beyond":
        windows = [k for k, v in entries.items() if _WINDOWS.fullmatch(k) and v]
        changes |= dict.fromkeys(windows, WINDOW)
    elif lengths == "long":
        known = [k for k in entries if _POSITIONS.fullmatch(k)]
        changes |= dict.fromkeys(known, parity.N_POSITIONS)
    kind = None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return parity.narrow_twin(config, kind=kind, **changes)


def _is_sentence(error: Exception) -> bool:
    """Return whether an error is a message of ours, and not a library's."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(last).is_relative_to(_OURS)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if _is_sentence(error) else f"{type(error).__name__}: {text[:200]}"


def _expected(model: Any, batch: list[TokenSequence]) -> list[Readings]:
    """Return the oracle's readings with the model's own eager attention."""
    eager = copy_with_attention(model, "eager")
    expected = [oracle_signals(eager, sequence) for sequence in batch]
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        # Granite returns attention weights before its sinks take their share.
        fused = copy_with_attention(model, FUSED)
        for item, sequence in zip(expected, batch, strict=True):
            item["attn"] = oracle_signals(fused, sequence)["attn"]
    return expected


def survey_one(name: str, lengths: Lengths = "short") -> Row:
    """Build a twin of one type, read it, compare, and return the outcome as a row.

    The outcome is "exact" if every error is below the tolerance; errors are by family,
    None if nothing was read; "reason" says why it was refused, wrong or not built.
    """
    began = time.monotonic()
    errors: Mapping[str, float | None] = dict.fromkeys(SIGNALS)
    outcome: Outcome = "not built"
    try:
        model = twin_of(name, lengths)
        outcome, batch = "wrong", survey_batch(lengths)
        read = SignalReader(Backbone.from_model(model)).read(batch)
        readings = [{key: getattr(item, key) for key in SIGNALS} for item in read]
        # By rounding, a token may go to either of two equally good experts, or a sparse
        # layer may choose either of two keys; a wrong mask moves hundreds of tokens.
        n_spared = 2 if lengths == "long" else 0
        expected = _expected(model, batch)
        errors = largest_errors(readings, expected, is_relative=True, n_spared=n_spared)
        reason = "the errors are too large"
        if max(errors.values()) < SURVEY_TOLERANCE:
            outcome, reason = "exact", ""
    except Exception as error:
        reason = _in_one_line(error)
        if outcome == "wrong" and _is_sentence(error):
            outcome = "refused"
    became = {"type": name, "lengths": lengths, "outcome": outcome, **errors}
    return {**became, "seconds": time.monotonic() - began, "reason": reason}


def survey_types(names: Sequence[str], printer: RowPrinter) -> list[Row]:
    """Survey types (default: all) at all lengths; print each row when it is ready."""
    names, rows = names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), []
    with Progress().stage("survey") as update:
        for done, name in enumerate(names, start=1):
            for lengths in get_args(Lengths):
                rows.append(survey_one(name, lengths))
                printer.row(rows[-1])
                # A layout that is refused is refused at any length.
                if lengths == "beyond" and rows[-1]["outcome"] != "exact":
                    break
            update(done, len(names))
    return rows


def _kind_of(reason: str) -> str:
    """Return a reason without the type's names and numbers, to group reasons."""
    start = re.split(r", found|; use|, its parts", reason)[0]
    return re.sub(r"\b[A-Z]\w*[A-Z]\w*\b|\b\d[\w.-]*|\[[\d, ]+\]", "…", start)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield Markdown lines: counts by lengths, then types by outcome and reason."""
    yield ""
    yield table_head(["lengths", *get_args(Outcome), "seconds"])
    for lengths in get_args(Lengths):
        there = [row for row in rows if row["lengths"] == lengths]
        counts = Counter(row["outcome"] for row in there)
        seconds = sum(row["seconds"] for row in there)
        cells = [counts[outcome] for outcome in get_args(Outcome)]
        yield table_row([lengths, *cells, f"{seconds:.0f}"])
    kinds: dict[str, list[str]] = {}
    for row in rows:
        outcome, why = row["outcome"], row["reason"]
        if row["lengths"] == "short" or outcome == "wrong":
            why = _kind_of(why) if outcome == "refused" else why
            kind = ": ".join(filter(None, (outcome, why)))
            kinds.setdefault(kind, []).append(row["type"])
    for kind, names in sorted(kinds.items()):
        yield f"* {kind} ({len(names)}): {', '.join(dict.fromkeys(names))}"


def require_types(rows: Sequence[Row]) -> None:
    """Check that every type is exact or refused."""
    wrong = [
        f"{row['type']} ({row['lengths']})" for row in rows if row["outcome"] == "wrong"
    ]
    if wrong:
        raise ValueError(
            "types must be read exactly or refused in a sentence, found wrong: "
            + ", ".join(wrong)
        )


def _check_types(
    context: click.Context, parameter: click.Parameter, types: tuple[str, ...]
) -> tuple[str, ...]:
    for name in types:
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            hint = did_you_mean(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            raise click.UsageError(f"no model type is called {name!r}{hint}")
    return types


TYPES = click.argument("types", nargs=-1, callback=_check_types)


@click.command()
@TYPES
@AS_JSON
def survey(types: tuple[str, ...], as_json: bool) -> None:
    """Check which causal language models of Transformers can be read.

    Compares narrow random twins of all of them, or of model TYPES (llama gpt2), with a
    brute-force oracle. Prints a row each for short texts, texts beyond small windows
    and a text of 2,300 tokens, then counts, and why types are refused.

    Example: beatrice bench survey llama gpt_oss
    """
    silence_transformers()
    printer = RowPrinter(as_json)
    rows = survey_types(types, printer)
    for line in summary(rows):
        printer.text(line)
    require_types(rows)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_N_TOKENS, _N_STEPS = 20, 4


class Numbers:
    """A stand-in tokenizer that decodes ids as numbers."""

    chat_template = None

    def decode(self, ids: Any, **_: Any) -> str:
        """Return ids as a text of numbers."""
        return " ".join(map(str, ids))


@torch.no_grad()
def cache_difference(backbone: Backbone) -> float | None:
    """Return how much a cache changes the last logits; None if the model takes none."""
    ids = parity.probe_ids(backbone, (_N_TOKENS, 2))[:1]
    expected = backbone.model(ids, use_cache=False).logits[:, -_N_STEPS:].float()
    stops, cache, logits = range(_N_TOKENS - _N_STEPS + 1, _N_TOKENS + 1), None, []
    for start, stop in zip((0, *stops), stops, strict=False):
        output = backbone.model(ids[:, start:stop], use_cache=True, **{CACHE: cache})
        cache = output.get(CACHE)
        if cache is None:
            return None
        logits.append(output.logits[:, -1].float())
    gap = torch.stack(logits, dim=1) - expected
    return float(gap.norm() / expected.norm())


def measure_written(name: str) -> Row:
    """Return whether a type is read while it generates, in a second pass, or not.

    The row also has the reason; the largest difference of any family, None if nothing
    was read; and that of the model's own logits, None if it takes no cache.
    """
    labels = (f"{label}{of}" for label in DTYPES for of in ("", " of its own"))
    numbers: dict[str, float | None] = dict.fromkeys(labels)
    reasons = []
    for label, dtype in DTYPES.items():
        try:
            model = twin_of(name).to(dtype)
            model.generation_config.eos_token_id = 1
            backbone = Backbone.from_model(model, Numbers())
            reader = SignalReader(backbone)
        except Exception as error:
            reason = _in_one_line(error)
            return {"type": name, "read": "not at all", **numbers, "reason": reason}
        reasons.append(check_decoding(reader) or "")
        with contextlib.suppress(ValueError):  # already in `reasons`
            numbers[label] = float(np.max([*decoding_differences(reader).values()]))
        numbers[f"{label} of its own"] = cache_difference(backbone)
    reason = next(filter(None, reasons), "")
    read = "again" if reason else "while writing"
    reason = reason.partition(": ")[2] or reason
    return {"type": name, "read": read, **numbers, "reason": reason}


@click.command()
@TYPES
@AS_JSON
def written(types: tuple[str, ...], as_json: bool) -> None:
    """List which model types of Transformers are read while they generate.

    Prints a row for a narrow random twin of each of them, or of TYPES (llama gpt2).

    Example: beatrice bench written llama gpt_oss
    """
    silence_transformers()
    printer = RowPrinter(as_json)
    for name in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        printer.row(measure_written(name))

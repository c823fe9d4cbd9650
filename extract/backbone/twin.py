"""A narrow twin of a model: its own config with small sizes, and random weights.

Where a family adds to its stream and what it multiplies does not depend on widths. So
whether it can be read is seen on a model of kilobytes, before weights are loaded, and
all of Transformers' families can be surveyed in minutes.
"""

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM

N_WORDS = 61
N_POSITIONS = 4096
_D_MODEL = 32
# Layers of every kind that a config lists come in the twin, in this many at least.
_N_LAYERS = 4
_LAYER_COUNT = r"(num_(hidden_)?|n_|decoder_|num_decoder_)layers?"
_HEAD_COUNT = r"(num_attention_|n_|num_|(decoder_)?attention_)heads?"
# Sizes by the names under which families keep them; the first pattern that fits.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size(_per_layer_input)?", N_WORDS),
    (_LAYER_COUNT, _N_LAYERS),
    (_HEAD_COUNT, 4),
    (r"(num_)?encoder_layers", 1),
    (r"(linear_num_|mamba_n_|n_mamba_|encoder_attention_)heads?", 4),
    (r"index_n_heads|num_query_groups|.*k(ey_)?v(alue)?_heads", 2),
    (r"(.*_)?head_dim|dim_head|d_head|kv_channels|mamba_headdim|qk_.*_dim", 8),
    (r"rotary_dim|mamba_dt_rank|time_step_rank", 4),
    (r".*intermediate_size|.*ffn_dim|ffn_hidden_size|dim_ff|dff|d_inner|d_ff", 48),
    (r".*feed_forward_size", 48),
    (
        r".*position_embeddings|n_positions|n_ctx|max_seq_len|context_length",
        N_POSITIONS,
    ),
    (r"model_max_length|max_sequence_length|max_(source|target)_pos.*", N_POSITIONS),
    (r".*(num|n)_(local_|routed_)?experts", 6),
    (r".*experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|mamba_n_?groups", 1),
    (r".*lora_rank|adapter_rank|laurel_rank", 16),
    (r"mamba_d_state|state_size", 8),
    (r"num_kv_shared_layers", 1),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r".*_token_id", 2),
)
_WIDTH = re.compile(
    "(embedding_|attention_|(in|out)put_embedding_)?(hidden_)?size|d_model|n_embd"
    "|emb_dim|embedding_dim|word_embed_proj_dim|lru_width"
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
# What a twin may weigh; a config with towers or widths of other names makes more.
_MOST_PARAMETERS = 20_000_000


def _size_of(name: str) -> int | None:
    """Return the small size for a config's entry, or None to keep what is there."""
    return next((n for pattern, n in _SIZES if re.fullmatch(pattern, name)), None)


def _shortened(values: list[Any], n_layers: int) -> list[Any]:
    """Return a list of as many layers in which every kind comes, the last one last."""
    if len(values) <= n_layers:
        return values
    kinds = [values[i] for i in range(len(values)) if values[i] not in values[:i]]
    return (kinds * n_layers)[: n_layers - 1] + values[-1:]


def _narrow_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that its twin has otherwise; windows stay."""
    entries = {k: v for k, v in config.items() if not isinstance(v, bool)}
    counts = [v for k, v in entries.items() if re.fullmatch(_LAYER_COUNT, k)]
    changed: dict[str, Any] = {}
    for name, value in entries.items():
        size = _D_MODEL if _WIDTH.fullmatch(name) else _size_of(name)
        if isinstance(value, list) and len(value) > 1 and len(value) in counts:
            n_layers = min(_N_LAYERS, len(value))
            changed[name] = _shortened(value, n_layers)
            if name == "num_attention_heads_per_layer":  # Laguna: what differs stays so
                changed[name] = [4 if n == max(value) else 2 for n in changed[name]]
            elif size is not None:
                changed[name] = [size] * n_layers
        elif isinstance(value, int) and size is not None:
            changed[name] = min(size, value) if value > 0 else value
        elif isinstance(value, list) and size is not None:
            changed[name] = size
    return changed


@torch.no_grad()
def spread_weights(model: torch.nn.Module) -> None:
    """Spread weights out: initial ones give nearly uniform attention and logits.

    At their initial values a dropped gain, bias or scalar would go unnoticed as well.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        if name.endswith("bias"):
            tensor.normal_(0.0, 0.2)
        elif "q_norm" in name or "k_norm" in name:
            # Gemma 4 scales no logit: with gains of one a row would be a single weight.
            tensor.mul_(0.5).add_(0.15 * torch.randn_like(tensor))
        elif tensor.ndim < 2:  # gains, scalars, sinks
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif tensor.ndim >= 2 and ("embed" in name or "wte" in name or "wpe" in name):
            tensor.normal_(0.0, 0.5)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


def narrow_twin(config: Any, *, kind: Any = None, seed: int = 7, **changes: Any) -> Any:
    """Build a random narrow model of a text model's config, the same on every call.

    Args:
      config: a text model's, as Transformers completes it.
      kind: the model's class; None is the one that Transformers has for the config.
      seed: of the weights.
      **changes: further entries of the config.

    Raises:
      ValueError: the twin would not be small. Transformers raises whatever comes
        first where it cannot make a model of these sizes.
    """
    entries = {**config.to_dict(), **changes}
    entries |= _narrow_sizes(entries) | changes
    entries.pop("per_layer_config", None)  # made anew: it names layers by number
    names = [n for n in _KV_HEADS if n in entries and n not in changes]
    # One of these fits wherever keys and values have a number of heads of their own.
    counts = [2, 1, entries.get("num_attention_heads")]
    while True:
        entries |= dict.fromkeys(names, counts.pop(0))
        try:
            return _built(type(config).from_dict(entries), kind, seed)
        except Exception:
            if not names or not counts:
                raise


def _built(config: Any, kind: Any, seed: int) -> Any:
    build = AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.device("meta"):
        outline = build(config)
    n_parameters = sum(tensor.numel() for tensor in outline.parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"the twin of {type(outline).__name__} is not small")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(config)
        spread_weights(model)
        model.eval().requires_grad_(False)
        model(input_ids=torch.arange(3, 14)[None], use_cache=False)
    return model

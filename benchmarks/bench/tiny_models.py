"""Tiny random models of every supported architecture, and four examples for them.

Norm weights, biases and layer scalars are randomised, since a dropped gain or scalar
would go unnoticed at its initial value. Windows have 8 tokens, so that some attention
masses are zero.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from beatrice.extract.signals.sequence import TokenSequence

VOCAB_SIZE = 61
# In a multimodal wrapper, ids from here on stand for images and sounds, and get other
# embeddings; texts do not contain them.
N_TEXT_IDS = 56
WINDOW = 8

# By Transformers' common names, which configs map to their own (`n_embd`); entries that
# a family does not know stay in its config unread.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts, and linear attention.
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING = ["sliding_attention", "full_attention"] * 3
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _SLIDING[:3]}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": _SLIDING,
    "global_head_dim": 16,
    "final_logit_softcapping": 3.0,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    **_GRANITE,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}

# Architecture -> changes to its config, in the order of the table; its name is the
# model type, unless the changes give one.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral_window": {"model_type": "mistral", "sliding_window": WINDOW},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "mlp_only_layers": [1]},
    **{
        name: {"model_type": f"{name}_text", "head_dim": 8, "num_hidden_layers": 4}
        for name in ("qwen3_5", "qwen3_5_moe")
    },
    "gemma": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, **_WINDOWS},
    "gemma4": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        **_GEMMA4,
    },
    # Like the 26B: no per-layer embeddings, keys as values, experts next to the MLP.
    "gemma4_moe": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "top_k_experts": 2,
        **_GEMMA4,
    },
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "gpt_neox_parallel": {"model_type": "gpt_neox", "use_parallel_residual": True},
    "gpt_neox_sequential": {"model_type": "gpt_neox", "use_parallel_residual": False},
    "gpt2": {},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    # Granite 4: with recurrent layers, with and without experts
    "granitemoehybrid": _HYBRID,
    "granitemoehybrid_dense": {**_HYBRID, "num_local_experts": 0},
    "hyperclovax": {"use_post_norm": True, **_GRANITE},
    "minicpm3": {
        "num_key_value_heads": 4,
        "dim_model_base": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, **_WINDOWS},
    "gpt_oss": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        **_WINDOWS,
    },
    "glm4": {"head_dim": 8},
    "falcon": {"bias": True},
    "falcon_40b": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon_alibi": {
        "model_type": "falcon",
        "bias": True,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
    },
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": WINDOW,
        # Positions from here on scale queries, counted in the batch with its padding: a
        # padded row must be shorter than this to read as it does alone.
        "floor_scale": 16,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gptj": {"rotary_dim": 4},
    "mpt": {},
    "bloom": {},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, "num_dense_layers": 1},
}


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Widen the weights: initial ones give nearly uniform attention and logits."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("embed_positions"):
            continue  # GPT-J's sines, which are not in checkpoints
        is_router = "router" in name and name.endswith("scale")
        is_norm = "norm" in name or "ln_" in name
        if is_norm or is_router or name.endswith("layer_scalar"):
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif name.endswith("sinks"):
            tensor.normal_()
        elif "per_layer_input_gate" in name:
            # Gemma 4's gate reads the raw stream and its output is normed: if the
            # activation saturates at zero, the norm amplifies rounding to 1e-4.
            tensor.normal_(0.0, 0.1 * 32**-0.5)
        elif tensor.ndim == 2 and ("embed" in name or "wte" in name or "wpe" in name):
            tensor.normal_(0.0, 0.5)
        elif tensor.ndim == 2 or "experts" in name:
            tensor.normal_(0.0, 1.2 * 32**-0.5)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.2)


def tiny_model(family: str) -> PreTrainedModel:
    """Build one model, the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        entries = {"model_type": family, **_SIZES, **FAMILIES[family]}
        config = AutoConfig.for_model(**entries)
        model = AutoModelForCausalLM.from_config(config)
        _randomise(model)
    return model.eval().requires_grad_(False)


_TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
_SHALLOW: dict[str, Any] = {**_TINY, "num_hidden_layers": 1, "num_attention_heads": 2}


def _ids(*names: str, kind: str = "token_id") -> dict[str, int]:
    return {f"{name}_{kind}": N_TEXT_IDS + i for i, name in enumerate(names)}


_QWEN = {
    **_ids("image", "video", "vision_start", "vision_end"),
    "vision_config": {
        **_TINY,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
}
_IMAGE_IDS = _ids("boi", "eoi", "image", kind="token_index")
_GEMMA3 = {
    "vision_config": {
        **_SHALLOW,
        "model_type": "siglip_vision_model",
        "image_size": 16,
        "patch_size": 8,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    **_IMAGE_IDS,
}
_GEMMA4_WRAPPER = {
    **_ids("eoi", "boi", "image", "audio", "video"),
    "audio_config": None,
    "vision_config": {
        **_SHALLOW,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
}
_LLAMA4 = {
    "vision_config": {
        **_SHALLOW,
        "image_size": 28,
        "patch_size": 14,
        "intermediate_size": 64,  # four patches become one
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    },
    **_IMAGE_IDS,
}
# Family -> class and sizes of its released form: the text model with towers, which are
# as small as their configs allow and never called.
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", _QWEN),
    "qwen3_5_moe": ("Qwen3_5Moe", _QWEN),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma4": ("Gemma4", _GEMMA4_WRAPPER),
    "gemma4_moe": ("Gemma4", _GEMMA4_WRAPPER),
    "llama4": ("Llama4", _LLAMA4),
}


def multimodal_wrapper(family: str) -> PreTrainedModel:
    """Build the released form: the text model of `tiny_model` with its towers."""
    text = tiny_model(family)
    name, sizes = WRAPPERS[family]
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    wrapper = model(config(text_config=text.config.to_dict(), **sizes))
    wrapper.get_decoder().load_state_dict(text.get_decoder().state_dict())
    head: Any = text.get_output_embeddings()
    wrapper.get_output_embeddings().load_state_dict(head.state_dict())
    return wrapper.eval().requires_grad_(False)


def make_sequence(seed: int, n_tokens: int, *spans: list[int]) -> TokenSequence:
    """Return random tokens with the given context, question and answer spans."""
    rng = np.random.default_rng(seed)
    text = rng.integers(3, N_TEXT_IDS, n_tokens + 1)
    return TokenSequence(ids=text[:-1], targets=text[1:], spans=np.array(spans))


def make_batch() -> list[TokenSequence]:
    """Return four examples of uneven lengths."""
    return [
        make_sequence(1, 26, [2, 15], [15, 22], [22, 26]),
        make_sequence(2, 17, [0, 9], [9, 12], [12, 17]),  # no template tokens
        make_sequence(3, 9, [1, 1], [1, 8], [8, 9]),  # no context, one-token answer
        make_sequence(4, 20, [1, 12], [12, 20], [20, 20]),  # no answer
    ]


def architectures() -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """Yield every architecture's name and a function that builds it."""
    for family in FAMILIES:
        yield family, lambda family=family: tiny_model(family)
    for family in WRAPPERS:
        yield f"{family} (wrapper)", lambda family=family: multimodal_wrapper(family)

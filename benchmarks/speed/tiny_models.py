"""Tiny random models of every supported architecture, for the oracle.

Norm weights, biases and layer scalars are randomised: at their initial values a
dropped gain or scalar would go unnoticed. Windows are 8 tokens, so that some
attention masses are zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 61
# The ids from here on stand for images and sounds in a multimodal wrapper, which puts
# another embedding in their place; text has none of them.
N_TEXT_IDS = 56
WINDOW = 8

_SIZE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_HEAD_DIM = {key: size for key, size in _SIZE.items() if key != "head_dim"}
_MOE = {"moe_intermediate_size": 16, "num_experts": 6}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING = ["sliding_attention", "full_attention"] * 3

Build = Callable[[], PreTrainedModel]


def _plain(model: type, config: type, **changes: Any) -> Build:
    """Return what builds a model whose config takes the common sizes."""
    return lambda: model(config(**{**_SIZE, **changes}))


def _without_head_dim(model: type, config: type, **changes: Any) -> Build:
    """Return the same for configs that derive the head's width."""
    return lambda: model(config(**{**_NO_HEAD_DIM, **changes}))


def _gemma4(**changes: Any) -> Build:
    """Return what builds a Gemma 4 text model."""
    return _plain(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        global_head_dim=16,
        final_logit_softcapping=3.0,
        **changes,
    )


_GEMMA4_E = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
# As the 26B: no per-layer embeddings, keys that are values, experts beside the MLP.
_GEMMA4_MOE = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "top_k_experts": 2,
    **_MOE,
}
_GPT = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}


def _gpt_neox(use_parallel_residual: bool) -> Build:
    """Return what builds a GPT-NeoX with either kind of block."""
    config = GPTNeoXConfig(
        **_GPT,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_parallel_residual=use_parallel_residual,
    )
    return lambda: GPTNeoXForCausalLM(config)


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(**_GPT, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    return GPT2LMHeadModel(config)


# Architecture -> what builds it, in the order of the table.
FAMILIES: dict[str, Build] = {
    "llama": _plain(LlamaForCausalLM, LlamaConfig),
    "mistral_window": _plain(MistralForCausalLM, MistralConfig, sliding_window=WINDOW),
    "mixtral": _plain(
        MixtralForCausalLM, MixtralConfig, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen2": _without_head_dim(Qwen2ForCausalLM, Qwen2Config),
    "qwen3": _plain(Qwen3ForCausalLM, Qwen3Config),
    "qwen3_moe": _plain(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        **_MOE,
    ),
    "qwen3_5": _plain(
        Qwen3_5ForCausalLM, Qwen3_5TextConfig, num_hidden_layers=4, **_LINEAR
    ),
    "qwen3_5_moe": _plain(
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        num_hidden_layers=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=16,
        **_LINEAR,
        **_MOE,
    ),
    "gemma": _plain(GemmaForCausalLM, GemmaConfig),
    "gemma2": _plain(
        Gemma2ForCausalLM,
        Gemma2Config,
        num_hidden_layers=2,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": _plain(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        sliding_window=WINDOW,
        layer_types=_SLIDING[:3],
    ),
    "gemma4": _gemma4(**_GEMMA4_E),
    "gemma4_moe": _gemma4(**_GEMMA4_MOE),
    "phi3": _plain(Phi3ForCausalLM, Phi3Config),
    "olmo": _without_head_dim(OlmoForCausalLM, OlmoConfig),
    "olmo2": _without_head_dim(Olmo2ForCausalLM, Olmo2Config),
    "olmo3": _without_head_dim(
        Olmo3ForCausalLM,
        Olmo3Config,
        sliding_window=WINDOW,
        layer_types=_SLIDING[:3],
    ),
    "gpt_neox_parallel": _gpt_neox(True),
    "gpt_neox_sequential": _gpt_neox(False),
    "gpt2": _gpt2,
}


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Spread weights out: initial ones give nearly uniform attention and logits."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "ln_" in name or name.endswith("layer_scalar"):
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif "router" in name and name.endswith("scale"):
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif "per_layer_input_gate" in name:
            # Gemma 4's gate reads the raw stream and its output is normed: where the
            # activation saturates at zero the norm blows rounding up to 1e-4.
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
        model = FAMILIES[family]()
        _randomise(model)
    return model.eval().requires_grad_(False)

"""The two backbones of the paper at full size, with random weights, to be timed."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

# What differs from the defaults of the classes; a test counts parameters.
_QWEN = {
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,  # the class's default is 1e4
        "partial_rotary_factor": 0.25,
    },
}
_GEMMA = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "global_head_dim": 512,
    "num_kv_shared_layers": 18,
    "final_logit_softcapping": 30.0,
}
# Name -> class, class of its configuration, and those sizes.
FULL_MODELS: Mapping[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "Qwen3.5-9B": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _QWEN),
    "Gemma 4 E4B": (Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA),
}


def full_model(name: str, device: str) -> PreTrainedModel:
    """Return a model of `FULL_MODELS` in bfloat16 with random weights, made there."""
    model_class, config_class, sizes = FULL_MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config_class(**sizes), dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = 1  # the released ones name one, too
    # Gemma norms queries and keys, and leaves their products as they are: of random
    # ones each query picks a single key, and rounding picks another one.
    for path, weights in model.named_parameters():
        if path.endswith("q_norm.weight"):
            weights.mul_(weights.numel() ** -0.5)
    return model

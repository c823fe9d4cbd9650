"""Two real backbones at full size with random weights, built where they run.

What a reading costs does not depend on what the weights say. The sizes are those of
the released checkpoints (Qwen3.5-9B, and the text model of Gemma 4 E4B); the same
builders make them small, for machines that could not hold them.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullModel:
    """One backbone.

    Attributes:
      name: as people call it.
      model: its class.
      config: its configuration's class.
      sizes: of the released checkpoint, where they are not the class's defaults.
      small: what is changed to make it small; the layout stays.
    """

    name: str
    model: type[PreTrainedModel]
    config: type
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]

    def build(
        self, device: str, dtype: torch.dtype, *, is_small: bool = False
    ) -> PreTrainedModel:
        """Return the model with random weights, made on the device."""
        sizes = {**self.sizes, **(self.small if is_small else {})}
        torch.manual_seed(0)
        with torch.device(device):
            model = self.model._from_config(self.config(**sizes), dtype=dtype)
        return model.eval().requires_grad_(False)


QWEN = FullModel(
    name="Qwen3.5-9B",
    model=Qwen3_5ForCausalLM,
    config=Qwen3_5TextConfig,
    sizes={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,  # the class's default is 1e4
            "partial_rotary_factor": 0.25,
        },
    },
    small={
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
)
GEMMA = FullModel(
    name="Gemma 4 E4B",
    model=Gemma4ForCausalLM,
    config=Gemma4TextConfig,
    sizes={
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    small={
        "vocab_size": 61,
        "vocab_size_per_layer_input": 61,
        "hidden_size": 32,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 6,
        "sliding_window": 8,
    },
)
FULL_MODELS = (QWEN, GEMMA)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the floating-point operations of one token's forward with its logits.

    Two per weight of every linear module, the head among them; lookups, norms,
    attention's own products and recurrent scans, together a few percent at 400
    tokens, are left out, so that a share of the peak is rather told too low.
    """
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return 2.0 * sum(linear.weight.numel() for linear in linears)


def gemm_peak(device: str, dtype: torch.dtype, width: int = 8192) -> float:
    """Return the best FLOP/s of a square matrix product, of ten."""
    left, right = (
        torch.randn(width, width, device=device, dtype=dtype) for _ in range(2)
    )
    best = float("inf")
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        left @ right
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return 2.0 * width**3 / best

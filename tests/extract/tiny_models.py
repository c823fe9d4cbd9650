"""Tiny random models of every supported family.

Norm weights, biases and layer scalars are randomised: at their initial values a
dropped gain or scalar would go unnoticed. Windows are 8 tokens, so that some
attention masses are zero.
"""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 61
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
_SLIDING = ["sliding_attention", "full_attention"] * 3


def _llama():
    return LlamaForCausalLM(LlamaConfig(**_SIZE))


def _qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**_SIZE))


def _qwen3_5():
    config = Qwen3_5TextConfig(
        **{**_SIZE, "num_hidden_layers": 4},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return Qwen3_5ForCausalLM(config)


def _mistral():
    return MistralForCausalLM(MistralConfig(**_SIZE, sliding_window=WINDOW))


def _phi3():
    return Phi3ForCausalLM(Phi3Config(**_SIZE))


def _olmo2():
    size = {key: value for key, value in _SIZE.items() if key != "head_dim"}
    return Olmo2ForCausalLM(Olmo2Config(**size))


def _gemma2():
    config = Gemma2Config(
        **{**_SIZE, "num_hidden_layers": 2},
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    )
    return Gemma2ForCausalLM(config)


def _gemma3():
    config = Gemma3TextConfig(**_SIZE, sliding_window=WINDOW, layer_types=_SLIDING[:3])
    return Gemma3ForCausalLM(config)


def _gemma4():
    config = Gemma4TextConfig(
        **{**_SIZE, "num_hidden_layers": 6},
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        num_kv_shared_layers=2,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=3.0,
    )
    return Gemma4ForCausalLM(config)


def _gpt_neox(use_parallel_residual):
    config = GPTNeoXConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        use_parallel_residual=use_parallel_residual,
    )
    return GPTNeoXForCausalLM(config)


def _gpt2():
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


FAMILIES = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral_window": _mistral,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "qwen3_5": _qwen3_5,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt_neox_parallel": lambda: _gpt_neox(True),
    "gpt_neox_sequential": lambda: _gpt_neox(False),
    "gpt2": _gpt2,
}


@torch.no_grad()
def _randomise(model):
    """Spread weights out: initial ones give nearly uniform attention and logits."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "ln_" in name or name.endswith("layer_scalar"):
            tensor.add_(0.3 * torch.randn_like(tensor))
        elif "per_layer_input_gate" in name:
            # Gemma 4's gate reads the raw stream and its output is normed: where the
            # activation saturates at zero the norm blows rounding up to 1e-4.
            tensor.normal_(0.0, 0.1 * 32**-0.5)
        elif tensor.ndim == 2 and ("embed" in name or "wte" in name or "wpe" in name):
            tensor.normal_(0.0, 0.5)
        elif tensor.ndim == 2:
            tensor.normal_(0.0, 1.2 * 32**-0.5)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.2)


def tiny_model(family):
    """Build one model, the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = FAMILIES[family]()
        _randomise(model)
    return model.eval().requires_grad_(False)


def _qwen3_5_wrapper(text_config):
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config=text_config, vision_config=vision)
    return Qwen3_5ForConditionalGeneration(config)


def _gemma4_wrapper(text_config):
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    }
    tokens = ("eoi", "boi", "image", "audio", "video")
    ids = {f"{name}_token_id": 56 + index for index, name in enumerate(tokens)}
    config = Gemma4Config(
        text_config=text_config, vision_config=vision, audio_config=None, **ids
    )
    return Gemma4ForConditionalGeneration(config)


WRAPPERS = {"qwen3_5": _qwen3_5_wrapper, "gemma4": _gemma4_wrapper}


def multimodal_wrapper(family):
    """Build the released form: the text model of `tiny_model` beside a vision tower."""
    text = tiny_model(family)
    wrapper = WRAPPERS[family](text.config.to_dict())
    wrapper.get_decoder().load_state_dict(text.get_decoder().state_dict())
    wrapper.lm_head.load_state_dict(text.lm_head.state_dict())
    return wrapper.eval().requires_grad_(False)

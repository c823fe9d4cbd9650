"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<stop>")
WORDS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "lo")
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
K_QUANTS = {"Q4_K": ((0, 2),), "Q6_K": ((208,),)}  # where a block's float16 scales lie


def tiny(architecture, **changes):
    """Return a random model of two layers, its norms away from their defaults."""
    torch.manual_seed(0)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    elif architecture == "lfm2":
        kinds = {"layer_types": ["conv", "full_attention"], "norm_eps": 1e-5}
        kinds |= {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}
        model = Lfm2ForCausalLM(Lfm2Config(**{**SHAPE, **kinds, **changes}))
    else:
        shape = {**SHAPE, "sliding_window": 4, "tie_word_embeddings": True, **changes}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval().requires_grad_(False)


def _as_llama_cpp(architecture, name, values, config):
    """Return a tensor as llama.cpp's converter lays it out."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if name.endswith("conv.conv.weight"):
        return values[:, 0]
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }
    n_heads = next((n for part, n in heads.items() if part in name), None)
    if architecture != "llama" or n_heads is None:
        return values
    split = values.reshape(n_heads, 2, len(values) // n_heads // 2, -1)
    return split.swapaxes(1, 2).reshape(values.shape)


def _packed(values, kind):
    if kind not in K_QUANTS:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    # The package unpacks these and does not pack them: any bytes with small scales do.
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (values.size // n_block, n_bytes), np.uint8)
    scales = (blocks.shape[0], 1)
    for at in K_QUANTS[kind][0]:
        scale = random.uniform(1e-4, 2e-4, scales).astype(np.float16).view(np.uint8)
        blocks[:, at : at + 2] = scale
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path, model, *, kind="F32", add_bos=True, scaling=None, more=None, without=()
):
    """Write a model with its tokenizer; matrices are of a kind, vectors float32."""
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "lfm2":
        writer.add_head_count_kv([0, config.num_key_value_heads])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1e6)
    else:
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
        writer.add_rope_scaling_factor(8.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "l o"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    tensors = {k: v.float().numpy() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): _as_llama_cpp(
            architecture, name, values, config
        )
        for name, values in tensors.items()
    }
    for name, values in {**tensors, **(more or {})}.items():
        if name in without:
            continue
        of = kind if values.ndim > 1 else "F32"
        raw = gguf.GGMLQuantizationType[of]
        writer.add_tensor(name, _packed(np.ascontiguousarray(values), of), None, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

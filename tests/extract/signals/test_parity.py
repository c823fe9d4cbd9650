import copy

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.tiny_models import (
    VOCAB_SIZE,
    make_batch,
    make_sequence,
    tiny_model,
)
from beatrice.doctor import outline_shapes
from beatrice.extract.backbone.loading import Backbone, Outline
from beatrice.extract.backbone.twin import narrow_twin
from beatrice.extract.signals import attention
from beatrice.extract.signals.reader import SignalReader

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_stream_that_is_normed_after_every_addition_is_refused_by_name():
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    config = OPTConfig(**SMALL, **sizes, do_layer_norm_before=False)
    with pytest.raises(ValueError, match="OPT.*do_layer_norm_before False.*norm the"):
        Backbone.from_model(OPTForCausalLM(config))


def test_a_stream_that_is_dropped_for_its_norm_is_refused_by_name():
    sizes = {"apply_residual_connection_post_layernorm": True, "hidden_size": 32}
    config = BloomConfig(vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, **sizes)
    with pytest.raises(ValueError, match="Bloom.*drop the stream"):
        Backbone.from_model(BloomForCausalLM(config))


def test_a_projection_behind_the_final_norm_is_refused_by_name():
    config = OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16)
    with pytest.raises(ValueError, match="OPT.*project_out"):
        Backbone.from_model(OPTForCausalLM(config))


def test_a_block_without_a_known_token_mixer_is_refused_by_name():
    config = CTRLConfig(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, dff=48)
    with pytest.raises(ValueError, match="unknown residual layout.*token mixer of"):
        Backbone.from_model(CTRLLMHeadModel(config))


def windowed(window):
    """A Mistral that sees so many tokens, with room for more."""
    torch.manual_seed(0)
    config = MistralConfig(
        **SMALL,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=window,
        initializer_range=0.3,
    )
    return Backbone.from_model(MistralForCausalLM(config))


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (8, torch.float32),
        (16, torch.float32),
        (1024, torch.float32),
        (16, torch.bfloat16),
        (100, torch.bfloat16),
    ],
)
def test_a_window_lost_with_the_mask_function_is_refused(window, dtype, monkeypatch):
    backbone = windowed(window)
    backbone.model.to(dtype)
    SignalReader(backbone)
    # Transformers then hands over no mask at all, without a word.
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, attention.NAME)
    with pytest.raises(ValueError, match="unknown residual layout: the logits"):
        SignalReader(backbone)


def test_a_window_too_long_to_be_crossed_is_not_checked(monkeypatch):
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, attention.NAME)
    SignalReader(windowed(2000))


def with_two_heads(model, layers):
    """Give some layers two heads of attention where the config says four."""
    for layer in layers:
        mixer = model.model.layers[layer].self_attn
        narrow = copy.deepcopy(model.config)
        narrow.num_attention_heads = 2
        layer_attention = type(mixer)(narrow, layer)
        layer_attention.config = model.config  # which names how to attend
        model.model.layers[layer].self_attn = layer_attention.requires_grad_(False)
    return model.eval()


def test_layers_with_other_numbers_of_heads_are_refused_in_a_sentence():
    model = with_two_heads(tiny_model("llama"), [1])
    with pytest.raises(ValueError, match="same number of .* heads .* with 2, 4;"):
        SignalReader(Backbone.from_model(model))


def test_the_announced_heads_are_the_layers_where_the_config_says_otherwise():
    model = with_two_heads(tiny_model("llama"), [0, 1, 2])
    reader = SignalReader(Backbone.from_model(model))
    found = reader.read(make_batch())[0]
    assert reader.shapes["attn"] == found.attn.shape[1:] == (2, 2, 3, 2)
    assert reader.backbone.n_heads == 2
    expected = oracle.oracle_batch(model, "eager")[0]["attn"]
    np.testing.assert_allclose(found.attn, expected, atol=oracle.TOLERANCE)


SLIDING = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def test_a_config_with_heads_per_layer_is_refused_in_a_sentence():
    config = CONFIG_MAPPING["dots3_note_text"]()
    sliding = {f"swa_{name}": size for name, size in SLIDING.items()}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = narrow_twin(config, **heads, **sliding)
    message = "same number of attention heads in every layer, found 2, 4 in the config"
    with pytest.raises(ValueError, match=message):
        Backbone.from_model(model)
    with pytest.raises(ValueError, match=message):
        outline_shapes(Outline(model, model.config, None, None))


def with_positions(n_positions):
    """A GPT-2 with a table of so many positions."""
    model = tiny_model("gpt2")
    table = model.transformer.wpe.weight[:n_positions]
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(table)
    model.config.max_position_embeddings = n_positions
    return model


@pytest.mark.parametrize("n_positions", [4, 6, 8, 10])
def test_a_model_of_few_positions_is_read(n_positions):
    model = with_positions(n_positions)
    reader = SignalReader(Backbone.from_model(model))
    sequence = make_sequence(1, n_positions, [0, 1], [1, 2], [2, n_positions])
    expected = oracle.oracle_signals(
        oracle.copy_with_attention(model, "eager"), sequence
    )
    found = reader.read([sequence])[0]
    for field in oracle.SIGNALS:
        np.testing.assert_allclose(
            getattr(found, field), expected[field], atol=oracle.TOLERANCE
        )


def test_a_model_of_too_few_positions_is_refused_in_a_sentence():
    model = with_positions(3)
    with pytest.raises(ValueError, match="reads at most 3 tokens.*need 4"):
        SignalReader(Backbone.from_model(model))

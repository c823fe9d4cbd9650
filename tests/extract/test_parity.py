import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface

from benchmarks.speed.tiny_models import VOCAB_SIZE
from extract.backbone.loading import Backbone
from extract.signals import attention
from extract.signals.reader import SignalReader

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


def test_a_block_without_a_known_feed_forward_part_is_refused_by_name():
    config = MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_heads=4, n_layers=2)
    with pytest.raises(ValueError, match="unknown residual layout.*MptModel"):
        Backbone.from_model(MptForCausalLM(config))


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

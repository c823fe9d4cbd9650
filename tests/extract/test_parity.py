import pytest
from transformers import GraniteConfig, GraniteForCausalLM, OPTConfig, OPTForCausalLM

from benchmarks.tiny_models import VOCAB_SIZE
from extract.backbone import Backbone
from extract.signals import SignalReader

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_residual_multiplier_is_refused_as_an_unknown_layout():
    config = GraniteConfig(**SMALL, intermediate_size=48, residual_multiplier=0.5)
    with pytest.raises(ValueError, match="unknown residual layout: in layer"):
        SignalReader(Backbone.from_model(GraniteForCausalLM(config)))


def test_a_scaled_logit_is_refused_as_an_unknown_layout():
    config = GraniteConfig(**SMALL, intermediate_size=48, logits_scaling=4.0)
    with pytest.raises(ValueError, match="unknown residual layout: the logits"):
        SignalReader(Backbone.from_model(GraniteForCausalLM(config)))


def test_a_block_without_a_known_feed_forward_part_is_refused_by_name():
    config = OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32)
    with pytest.raises(ValueError, match="unknown residual layout.*OPTDecoder"):
        Backbone.from_model(OPTForCausalLM(config))

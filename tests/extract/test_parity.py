import dataclasses

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, OPTConfig, OPTForCausalLM

from extract import parity, probability, residual
from extract.backbone import Backbone
from extract.signals import SignalReader
from tests.extract.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

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


def break_layers(backbone, change):
    """Return the backbone with every layer's taps changed."""
    layers = tuple(map(change, backbone.layout.layers))
    layout = dataclasses.replace(backbone.layout, layers=layers)
    return dataclasses.replace(backbone, layout=layout)


def without_per_layer_embedding(layer):
    return dataclasses.replace(layer, ffn=layer.ffn[:1])


def before_the_sandwich_norm(layer):
    return dataclasses.replace(layer, att=layer.mixer)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma4", without_per_layer_embedding),
        ("gemma3", before_the_sandwich_norm),
        ("olmo2", before_the_sandwich_norm),
    ],
)
def test_a_wrong_tap_does_not_pass_the_parity_check(family, change):
    broken = break_layers(Backbone.from_model(tiny_model(family)), change)
    with pytest.raises(ValueError, match="contributions miss the change"):
        SignalReader(broken)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_forgotten_gain_does_not_pass_the_parity_check(family):
    backbone = Backbone.from_model(tiny_model(family))
    final_norm = residual.measure_final_norm(backbone.layout)
    flat = dataclasses.replace(final_norm, gain=torch.ones_like(final_norm.gain))
    with pytest.raises(ValueError, match="summed pushes"):
        parity.check_parity(backbone, flat, probability.head_of(backbone.model))


def test_a_forgotten_softcap_does_not_pass_the_parity_check():
    backbone = Backbone.from_model(tiny_model("gemma2"))
    head = dataclasses.replace(probability.head_of(backbone.model), softcap=None)
    with pytest.raises(ValueError, match="the logits"):
        parity.check_parity(
            backbone, residual.measure_final_norm(backbone.layout), head
        )

"""One mistake at a time, planted in the reading path: is it noticed?

Every mistake here leaves numbers that look like signals. Most are refused when the
backbone is loaded; the others are told apart by the oracle.
"""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.oracle import TOLERANCE
from beatrice.benchmarks.bench.tiny_models import FAMILIES, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.signals import attention, parity, probability, residual
from beatrice.extract.signals.reader import SignalReader
from tests.extract.signals.families import representatives

# Its norm has no weight to forget.
WITH_GAIN = [family for family in FAMILIES if family != "olmo"]
ONE_PLUS = ["qwen3_5", "qwen3_5_moe", "gemma", "gemma2", "gemma3"]


def check(backbone, *, norm=None, head=None):
    right = residual.measure_final_norm(backbone.layout)
    parity.check_parity(
        backbone, norm or right, head or probability.head_of(backbone.model)
    )


@pytest.mark.parametrize("family", representatives(FAMILIES))
def test_without_a_mistake_every_family_passes(family):
    check(Backbone.from_model(tiny_model(family)))


@pytest.mark.parametrize("family", representatives(WITH_GAIN))
def test_a_forgotten_gain_is_refused(family):
    backbone = Backbone.from_model(tiny_model(family))
    norm = residual.measure_final_norm(backbone.layout)
    flat = dataclasses.replace(norm, gain=torch.ones_like(norm.gain))
    with pytest.raises(ValueError, match="summed pushes"):
        check(backbone, norm=flat)


@pytest.mark.parametrize("family", ONE_PLUS)
def test_a_norm_without_its_one_plus_is_refused(family):
    backbone = Backbone.from_model(tiny_model(family))
    norm = residual.measure_final_norm(backbone.layout)
    # The planted gain is the stored weight, so these families do add one.
    weight = backbone.layout.final_norm.weight
    torch.testing.assert_close(norm.gain, 1 + weight)
    with pytest.raises(ValueError, match="summed pushes"):
        check(backbone, norm=dataclasses.replace(norm, gain=weight))


def test_a_norm_taken_as_centred_is_refused():
    backbone = Backbone.from_model(tiny_model("llama"))
    norm = residual.measure_final_norm(backbone.layout)
    with pytest.raises(ValueError, match="summed pushes"):
        check(backbone, norm=dataclasses.replace(norm, is_centred=True))


def test_a_forgotten_softcap_is_refused():
    backbone = Backbone.from_model(tiny_model("gemma2"))
    head = dataclasses.replace(probability.head_of(backbone.model), softcap=None)
    with pytest.raises(ValueError, match="the logits"):
        check(backbone, head=head)


@pytest.mark.parametrize("family", ["granite", "granitemoehybrid", "cohere", "cohere2"])
def test_a_forgotten_scale_of_the_logits_is_refused(family):
    backbone = Backbone.from_model(tiny_model(family))
    head = dataclasses.replace(probability.head_of(backbone.model), scale=1.0)
    with pytest.raises(ValueError, match="the logits"):
        check(backbone, head=head)


def break_layers(backbone, change):
    """Return the backbone with every layer's taps changed."""
    layers = tuple(map(change, backbone.layout.layers))
    layout = dataclasses.replace(backbone.layout, layers=layers)
    return dataclasses.replace(backbone, layout=layout)


def without_the_second_part(layer):
    return dataclasses.replace(layer, ffn=layer.ffn[:1])


def before_the_sandwich_norm(layer):
    return dataclasses.replace(layer, att=layer.mixer)


def with_the_stream_itself(layer):
    return dataclasses.replace(layer, att=layer.mixer, ffn=(layer.module.mlp,))


def without_a_copy(layer):
    return dataclasses.replace(layer, is_overwritten=False)


def without_the_experts(layer):
    return dataclasses.replace(layer, ffn=(layer.module.mlp,))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma4", without_the_second_part),
        ("gemma4_moe", without_the_experts),
        ("gemma3", before_the_sandwich_norm),
        ("olmo2", before_the_sandwich_norm),
        ("olmo3", before_the_sandwich_norm),
        ("glm4", before_the_sandwich_norm),
        ("granitemoeshared", without_the_second_part),
        ("bloom", with_the_stream_itself),
        ("falcon", without_a_copy),
    ],
)
def test_a_wrong_tap_is_refused(family, change):
    broken = break_layers(Backbone.from_model(tiny_model(family)), change)
    with pytest.raises(ValueError, match="contributions miss the change"):
        SignalReader(broken)


def exchanged(layer):
    return dataclasses.replace(layer, att=layer.ffn[0], ffn=(layer.att,))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox_parallel", "gpt2"])
def test_attention_and_feed_forward_exchanged_are_refused(family):
    broken = break_layers(Backbone.from_model(tiny_model(family)), exchanged)
    with pytest.raises(ValueError, match="feed-forward part before its token mixer"):
        SignalReader(broken)


@pytest.mark.parametrize(
    "family",
    ["gemma4", "gemma4_moe", "granite", "granitemoe", "granitemoehybrid_dense"],
)
def test_a_forgotten_layer_scalar_or_multiplier_is_refused(family):
    backbone = Backbone.from_model(tiny_model(family))

    class Unscaled(type(backbone.layout.layers[0])):
        def scale(self):
            return 1.0

        multiplier = scale

    def unscale(layer):
        return Unscaled(**vars(layer))

    with pytest.raises(ValueError, match="contributions miss the change"):
        SignalReader(break_layers(backbone, unscale))


@pytest.mark.parametrize("family", ["mistral_window", "gemma3", "gemma4", "olmo3"])
def test_a_forgotten_mask_function_is_refused(family, monkeypatch):
    # Transformers then hands over no mask at all, without a word.
    masks = AttentionMaskInterface._global_mapping
    monkeypatch.delitem(masks, attention.NAME)
    with pytest.raises(ValueError, match="the logits"):
        SignalReader(Backbone.from_model(tiny_model(family)))


def test_a_forgotten_sink_is_refused(monkeypatch):
    functions = AttentionInterface._global_mapping
    read = functions[attention.NAME]
    monkeypatch.setitem(
        functions,
        attention.NAME,
        lambda *args, s_aux, **kwargs: read(*args, **kwargs),
    )
    with pytest.raises(ValueError, match="the logits"):
        SignalReader(Backbone.from_model(tiny_model("gpt_oss")))


@pytest.fixture(scope="module")
def llama():
    model = tiny_model("llama")
    return model, oracle.oracle_batch(model, "eager")


def errors_of(model, batch, expected):
    reader = SignalReader(Backbone.from_model(model))
    found = [
        {field: getattr(item, field) for field in oracle.SIGNALS}
        for item in reader.read(batch)
    ]
    return oracle.largest_errors(found, expected)


def test_next_tokens_shifted_by_one_are_told_apart_by_the_oracle(llama):
    model, expected = llama
    shifted = [
        dataclasses.replace(sequence, targets=np.roll(sequence.targets, 1))
        for sequence in oracle.make_batch()
    ]
    errors = errors_of(model, shifted, expected)
    assert errors["prob"] > 0.1 and errors["resid"] > 0.1
    assert errors["hidden"] < TOLERANCE and errors["attn"] < TOLERANCE


def test_spans_shifted_by_one_are_told_apart_by_the_oracle(llama):
    model, expected = llama
    shifted = [
        dataclasses.replace(
            sequence, spans=np.clip(sequence.spans + 1, 0, len(sequence.ids))
        )
        for sequence in oracle.make_batch()
    ]
    errors = errors_of(model, shifted, expected)
    assert errors["attn"] > 0.1
    assert max(errors["hidden"], errors["prob"], errors["resid"]) < TOLERANCE


def test_a_normed_hidden_state_is_told_apart_by_the_oracle(llama):
    model, expected = llama
    norm = oracle.copy_with_attention(model, "eager").get_decoder().norm
    normed = [
        {**item, "hidden": norm(torch.from_numpy(item["hidden"]).float()).numpy()}
        for item in expected
    ]
    assert oracle.largest_errors(normed, expected)["hidden"] > 0.1

"""Models that do more than their layout says, each in one place that no name shows."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.masking_utils import sdpa_mask

from beatrice.benchmarks.bench.tiny_models import _SIZE, _randomise, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.signals.reader import SignalReader


class ProjectedDecoder(LlamaModel):
    """Llama's decoder with a projection behind its final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.project = torch.nn.Linear(32, 32, bias=False)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = self.project(output.last_hidden_state)
        return output


class Projected(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = ProjectedDecoder(config)


class Cut(LlamaForCausalLM):
    """Llama that gives no logits to the last rows of its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[..., :56]
        return output


def refused(model, message):
    with pytest.raises(ValueError, match=f"unknown residual layout: {message}"):
        SignalReader(Backbone.from_model(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Projected, "what the decoder puts out and the final norm of its last state"),
        (Cut, "the model's logits are of 56 words.*has 61 rows"),
    ],
)
def test_what_follows_the_last_layer_is_as_the_layout_says_or_refused(
    kind, message, dtype
):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind(LlamaConfig(**_SIZE))
        _randomise(model)
    refused(model.to(dtype), message)


def attending(change):
    """Return an attention function whose logits or weights are changed."""

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        n_groups = query.shape[1] // key.shape[1]
        keys, values = [x.repeat_interleave(n_groups, dim=1) for x in (key, value)]
        logits = query.float() @ keys.mT.float() * scaling
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if attention_mask is not None:
            visible = visible & attention_mask
        weights = change(logits, visible)
        return (weights @ values.float()).to(query.dtype).transpose(1, 2), None

    return attend


def softmax(logits, visible):
    return logits.masked_fill(~visible, -1e30).softmax(-1)


def with_sink(logits, visible):
    """One more column, which takes its share and gives nothing."""
    hidden = logits.masked_fill(~visible, -1e30)
    sink = torch.full_like(hidden[..., :1], -2.0)
    return torch.cat([hidden, sink], dim=-1).softmax(-1)[..., :-1]


# Each moves logits by 7 to 8 % of the largest; rounding in bf16 by less than 1 %.
HIDDEN = {
    "sink": with_sink,
    "soft_cap": lambda logits, seen: softmax(3.0 * (logits / 3.0).tanh(), seen),
    "temperature": lambda logits, seen: softmax(logits / 1.2, seen),
}


def with_attention(name, change):
    AttentionInterface.register(f"hidden_{name}", attending(change))
    AttentionMaskInterface.register(f"hidden_{name}", sdpa_mask)
    model = tiny_model("llama")
    model.set_attn_implementation(f"hidden_{name}")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(HIDDEN))
def test_a_change_that_only_the_models_own_attention_knows_is_refused(name, dtype):
    model = with_attention(name, HIDDEN[name]).to(dtype)
    refused(model, "the logits of the reading pass and of the untouched model differ")


def weak_sink(logits, visible):
    """Takes four percent of what attention gives, and moves logits by less than two."""
    return with_sink(logits + 2.0, visible)


def test_a_sink_too_weak_for_rounded_logits_is_refused_all_the_same():
    model = with_attention("weak_sink", weak_sink).to(torch.bfloat16)
    refused(model, "what the attention of layer 0 puts out by itself and as it is read")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_implementation_of_the_same_attention_passes(dtype):
    SignalReader(Backbone.from_model(with_attention("none", softmax).to(dtype)))

"""Signals add up to what the model does, or the model is refused with the reason.

Models that do more than their layout says, and mistakes planted in the reading path.
"""

import copy
import dataclasses
import shutil

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from beatrice.benchmarks.bench.tiny_models import (
    _SIZES,
    FAMILIES,
    VOCAB_SIZE,
    _randomise,
    make_batch,
    make_sequence,
    tiny_model,
)
from beatrice.extract.backbone.layout import Layer
from beatrice.extract.backbone.loading import Backbone, Outline
from beatrice.extract.signals import attention, parity, probability, residual
from beatrice.extract.signals.extract import outline_shapes
from beatrice.extract.signals.parity import narrow_twin, require_readable
from beatrice.extract.signals.reader import SignalReader
from tests.extract.backbone.test_loading import save
from tests.extract.signals.readers import representatives
from tests.extract.signals.test_signals import assert_same_as_oracle
from tests.extract.small_run import beatrice
from tests.extract.test_doctor import doctor

OPT = {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}
SIZES = {"vocab_size": VOCAB_SIZE, "n_layer": 2, "n_head": 4}
DROPPING = {"apply_residual_connection_post_layernorm": True, "hidden_size": 32}
REFUSED = {
    "a stream that is normed after every addition": (
        lambda: OPTForCausalLM(OPTConfig(**OPT, do_layer_norm_before=False)),
        "OPT.*do_layer_norm_before False.*norm the",
    ),
    "a stream that is dropped for its norm": (
        lambda: BloomForCausalLM(BloomConfig(**SIZES, **DROPPING)),
        "Bloom.*drop the stream",
    ),
    "a projection behind the final norm": (
        lambda: OPTForCausalLM(OPTConfig(**OPT | {"word_embed_proj_dim": 16})),
        "OPT.*project_out",
    ),
    "a block without a known token mixer": (
        lambda: CTRLLMHeadModel(CTRLConfig(**SIZES, n_embd=32, dff=48)),
        "unknown residual layout.*token mixer of",
    ),
    "a block without a known feed-forward part": (
        lambda: without_feed_forward(tiny_model("llama")),
        "part of LlamaDecoderLayer under mlp or block_sparse_moe or shared_mlp or ",
    ),
    "a pass of its own that fails": (
        lambda: Broken(LlamaConfig(**_SIZES)),
        "cannot read Broken: .*image_outputs.*5",
    ),
    "different numbers of heads": (
        lambda: with_two_heads(tiny_model("llama"), [1]),
        "unknown residual layout: .*same number of .* heads .* with 2, 4;",
    ),
    "too few positions": (
        lambda: with_positions(3),
        "reads at most 3 tokens.*need 4",
    ),
}


def without_feed_forward(model):
    for layer in model.model.layers:
        layer.other = layer._modules.pop("mlp")
    return model


def refused(model, message, start="unknown residual layout: "):
    with pytest.raises(ValueError, match=start + message):
        SignalReader(Backbone.from_model(model))


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_read_is_refused_with_the_reason(what):
    make, message = REFUSED[what]
    refused(make(), message, start="")


class Broken(LlamaForCausalLM):
    """A model whose own pass fails, like Llama 4's wrapper in Transformers 5.24."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).image_outputs


def windowed(window):
    """Return a Mistral with this sliding window and many more positions."""
    torch.manual_seed(0)
    sizes = _SIZES | {"max_position_embeddings": 4096, "sliding_window": window}
    config = MistralConfig(**sizes, initializer_range=0.3)
    return Backbone.from_model(MistralForCausalLM(config))


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("window", "dtype"), [(8, F32), (16, F32), (1024, F32), (16, BF16), (100, BF16)]
)
def test_a_window_lost_with_the_mask_function_is_refused(window, dtype, monkeypatch):
    backbone = windowed(window)
    backbone.model.to(dtype)
    SignalReader(backbone)
    # Transformers then silently passes no mask at all.
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, attention.NAME)
    with pytest.raises(ValueError, match="unknown residual layout: the logits"):
        SignalReader(backbone)


def test_a_window_too_long_for_the_checks_texts_is_not_checked(monkeypatch):
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, attention.NAME)
    SignalReader(windowed(2000))


def test_a_window_is_crossed_without_the_logits_of_its_tokens():
    backbone, rows = windowed(200), []
    head = backbone.model.get_output_embeddings()
    head.register_forward_hook(lambda *given: rows.append(given[2].shape[:-1].numel()))
    SignalReader(backbone)
    assert rows and max(rows) <= 2 * 16


def with_two_heads(model, layers):
    """Give some layers two heads of attention where the config says four."""
    for layer in layers:
        mixer = model.model.layers[layer].self_attn
        narrow = copy.deepcopy(model.config)
        narrow.num_attention_heads = 2
        layer_attention = type(mixer)(narrow, layer)
        layer_attention.config = model.config  # names the attention function
        model.model.layers[layer].self_attn = layer_attention.requires_grad_(False)
    return model.eval()


def test_the_number_of_heads_is_that_of_the_layers_not_of_the_config():
    model = with_two_heads(tiny_model("llama"), [0, 1, 2])
    reader = SignalReader(Backbone.from_model(model))
    readings = reader.read(make_batch())
    assert reader.shapes["attn"] == readings[0].attn.shape[1:] == (2, 2, 3, 2)
    assert reader.backbone.n_heads == 2
    assert_same_as_oracle(model, make_batch(), readings)


def test_a_config_with_different_heads_per_layer_is_refused():
    config = CONFIG_MAPPING["dots3_note_text"]()
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 8}
    sliding = {f"swa_{name}": size for name, size in sizes.items()}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = narrow_twin(config, **heads, **sliding)
    message = "same number of attention heads in every layer, found 2, 4 in the config"
    with pytest.raises(ValueError, match=message):
        Backbone.from_model(model)
    with pytest.raises(ValueError, match=message):
        outline_shapes(Outline(model, model.config, None, None))


def with_positions(n_positions):
    """Return a GPT-2 with a table of this many positions."""
    model = tiny_model("gpt2")
    table = model.transformer.wpe.weight[:n_positions]
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(table)
    model.config.max_position_embeddings = n_positions
    return model


@pytest.mark.parametrize("n_positions", [4, 6, 8, 10])
def test_a_model_with_few_positions_is_read(n_positions):
    model = with_positions(n_positions)
    sequence = make_sequence(1, n_positions, [0, 1], [1, 2], [2, n_positions])
    readings = SignalReader(Backbone.from_model(model)).read([sequence])
    assert_same_as_oracle(model, [sequence], readings)


class Projected(LlamaForCausalLM):
    """Llama with a projection after its decoder's final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.project = torch.nn.Linear(32, 32, bias=False)
        self.model.register_forward_hook(self.projected)

    def projected(self, module, inputs, output):
        output.last_hidden_state = self.project(output.last_hidden_state)


class Cut(LlamaForCausalLM):
    """Llama without logits for the last rows of its head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[..., :56]
        return output


class Skipping(LlamaDecoderLayer):
    """A layer that attends and has a feed-forward part, which it does not call."""

    def forward(self, hidden_states, **kwargs):
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + mixed


def test_a_layer_that_does_not_call_one_of_its_parts_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    model.model.layers[1] = Skipping(model.config, 1)
    refused(model, r"layer 1 \(Skipping\) did not call its feed-forward part")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Projected, "the decoder's output and the final norm of its last state"),
        (Cut, "the model has 56 logits per token.*embedding has 61 rows"),
    ],
)
def test_anything_unknown_after_the_last_layer_is_refused(kind, message, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind(LlamaConfig(**_SIZES))
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
    """Add a column that takes its share of the weights and contributes nothing."""
    hidden = logits.masked_fill(~visible, -1e30)
    sink = torch.full_like(hidden[..., :1], -2.0)
    return torch.cat([hidden, sink], dim=-1).softmax(-1)[..., :-1]


# Each changes logits by 7 to 8 % of the largest; rounding in bf16 by less than 1 %.
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


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", list(HIDDEN))
def test_a_change_that_only_the_models_own_attention_makes_is_refused(name, dtype):
    model = with_attention(name, HIDDEN[name]).to(dtype)
    refused(model, "the logits of the reading pass and of the untouched model differ")


def weak_sink(logits, visible):
    """Take four percent of the attention output, changing logits by less than two."""
    return with_sink(logits + 2.0, visible)


def test_a_sink_too_weak_to_show_in_rounded_logits_is_still_refused():
    model = with_attention("weak_sink", weak_sink).to(BF16)
    refused(model, "the outputs of layer 0's attention by itself and as it is read")


class Packed(torch.nn.Module):
    """A projection like bitsandbytes' of four bits: integers, products in bfloat16."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("packed", linear.weight.to(BF16).view(torch.int16))

    def forward(self, states):
        weight = self.packed.view(BF16)
        return torch.nn.functional.linear(states.to(BF16), weight).to(states.dtype)


class PackedForHalf(Packed):
    """A projection whose kernel refuses float32, like Marlin's (GPTQ, AWQ)."""

    def forward(self, states):
        if states.dtype != BF16:
            raise RuntimeError("gptq_marlin_gemm only supports bfloat16 and float16")
        return super().forward(states)


def packed_model(dtype, attention_name, kind):
    """Return a model wide enough for some state to be rounded the other way."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**_SIZES | sizes))
        parity.spread_weights(model)
    for part in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        for name, child in list(part.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(part, name, kind(child))
    model.is_quantized = True  # as Transformers' quantisers set it
    model.set_attn_implementation(attention_name)
    return model.eval().to(dtype)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(F32, Packed), (BF16, Packed), (BF16, PackedForHalf)]
)
def test_a_model_with_packed_weights_is_checked_to_its_products_rounding(dtype, kind):
    SignalReader(Backbone.from_model(packed_model(dtype, "sdpa", kind)))
    with_attention("weak_sink", weak_sink)
    model = packed_model(dtype, "hidden_weak_sink", kind)
    refused(model, "the outputs of layer 0's attention by itself and as it is read")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_another_implementation_of_the_same_attention_passes(dtype):
    SignalReader(Backbone.from_model(with_attention("none", softmax).to(dtype)))


def only_in_half_precision(module, query, *args, **kwargs):
    if query.dtype != BF16:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return attending(softmax)(module, query, *args, **kwargs)


def test_a_model_whose_kernel_takes_only_half_precision_is_read():
    AttentionInterface.register("half", only_in_half_precision)
    AttentionMaskInterface.register("half", sdpa_mask)
    model = tiny_model("llama").to(BF16)
    model.set_attn_implementation("half")
    SignalReader(Backbone.from_model(model))
    assert model.config._attn_implementation == "half"


@pytest.fixture(scope="module")
def doge(tmp_path_factory):
    """Its blocks multiply the stream before adding, which only a forward pass shows."""
    model = narrow_twin(CONFIG_MAPPING["doge"]())
    return save(model, tmp_path_factory.mktemp("doge") / "model")


def test_the_doctor_and_a_new_run_refuse_what_cannot_be_read(doge, tmp_path):
    result = doctor("--model", doge, code=1)["model"]
    assert result["status"] == "problem"
    assert "contributions miss the change of the residual stream" in result["text"]
    new_run = ("data", tmp_path / "run", "--world", "--preset", "smoke")
    done = beatrice(*new_run, "--model", doge, code=1)
    assert "miss the change of the residual stream" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "examples.jsonl").exists()


def test_answering_refuses_weights_that_cannot_be_read(doge, tmp_path):
    model, run = save(tiny_model("llama"), tmp_path / "model"), tmp_path / "run"
    beatrice("data", run, "--world", "--preset", "smoke", "--model", model)
    shutil.rmtree(model)
    shutil.copytree(doge, model)
    done = beatrice("answer", run, code=1)
    assert "miss the change of the residual stream" in done.stderr
    assert not list((run / "answers").glob("answers.jsonl"))


@pytest.mark.parametrize("family", representatives(FAMILIES))
def test_no_readable_family_is_refused_because_of_its_twin(family):
    config = tiny_model(family).config.get_text_config()
    require_readable(family, Outline(None, config, None, None))
    narrow_twin(config)  # control: there is a twin


def test_a_twin_too_short_for_an_attention_layer_refuses_nothing():
    config = CONFIG_MAPPING["jamba"]()
    assert config.attn_layer_offset == 4  # none of a twin's four layers
    refused(narrow_twin(config), ".*found no attention")
    require_readable("jamba", Outline(None, config, None, None))


# OLMo's norm has no gain to forget.
WITH_GAIN = representatives([family for family in FAMILIES if family != "olmo"])


def assert_end_refused(family, message, norm=lambda norm: {}, **of_head):
    """Check that reading with a changed final norm or head is refused."""
    backbone = Backbone.from_model(tiny_model(family))
    measured = residual.measure_final_norm(backbone.layout)
    changed = dataclasses.replace(measured, **norm(measured))
    head = dataclasses.replace(probability.head_of(backbone.model), **of_head)
    with pytest.raises(ValueError, match=message):
        parity.check_parity(backbone, changed, head)


@pytest.mark.parametrize("family", WITH_GAIN)
def test_a_forgotten_gain_is_refused(family):
    assert_end_refused(
        family, "summed pushes", lambda norm: {"gain": torch.ones_like(norm.gain)}
    )


def test_a_norm_that_forgets_to_add_one_or_is_taken_as_centred_is_refused():
    assert_end_refused("gemma2", "summed pushes", lambda x: {"gain": x.gain - 1})
    assert_end_refused("llama", "summed pushes", lambda x: {"is_centred": True})


SCALED = "granite granitemoehybrid cohere cohere2".split()


@pytest.mark.parametrize(
    ("family", "change"),
    [("gemma2", {"softcap": None}), *((name, {"scale": 1.0}) for name in SCALED)],
)
def test_a_forgotten_softcap_or_scale_of_the_logits_is_refused(family, change):
    assert_end_refused(family, "the logits", **change)


MISS = "contributions miss the change"


def break_layers(backbone, change):
    """Return the backbone with every layer's taps changed."""
    layers = tuple(map(change, backbone.layout.layers))
    layout = dataclasses.replace(backbone.layout, layers=layers)
    return dataclasses.replace(backbone, layout=layout)


TAPS = {
    "without the second part": (
        "gemma4 granitemoeshared",
        lambda x: {"ffn": x.ffn[:1]},
    ),
    "without the experts": ("gemma4_moe", lambda x: {"ffn": (x.module.mlp,)}),
    "before the sandwich norm": ("gemma3 olmo2 olmo3 glm4", lambda x: {"att": x.mixer}),
    "with the stream": ("bloom", lambda x: {"att": x.mixer, "ffn": (x.module.mlp,)}),
    "without a copy": ("falcon", lambda x: {"is_overwritten": False}),
    "exchanged": (
        "llama gemma3 gpt_neox_parallel gpt2",
        lambda x: {"att": x.ffn[0], "ffn": (x.att,)},
    ),
}


@pytest.mark.parametrize(
    ("family", "tap"),
    [(name, tap) for tap, (names, _) in TAPS.items() for name in names.split()],
)
def test_a_wrong_tap_is_refused(family, tap):
    broken = break_layers(
        Backbone.from_model(tiny_model(family)),
        lambda layer: dataclasses.replace(layer, **TAPS[tap][1](layer)),
    )
    is_late = tap == "exchanged"
    words = "feed-forward part before its token mixer" if is_late else MISS
    with pytest.raises(ValueError, match=words):
        SignalReader(broken)


@pytest.mark.parametrize(
    "family",
    ["gemma4", "gemma4_moe", "granite", "granitemoe", "granitemoehybrid_dense"],
)
def test_a_forgotten_layer_scalar_or_multiplier_is_refused(family):
    class Unscaled(Layer):
        def scale(self):
            return 1.0

        multiplier = scale

    backbone = Backbone.from_model(tiny_model(family))
    with pytest.raises(ValueError, match=MISS):
        SignalReader(break_layers(backbone, lambda layer: Unscaled(**vars(layer))))


def test_a_forgotten_sink_is_refused(monkeypatch):
    functions = AttentionInterface._global_mapping
    read = functions[attention.NAME]
    monkeypatch.setitem(
        functions, attention.NAME, lambda *args, s_aux, **kwargs: read(*args, **kwargs)
    )
    refused(tiny_model("gpt_oss"), "the logits")

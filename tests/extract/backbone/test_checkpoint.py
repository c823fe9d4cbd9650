"""What a checkpoint's files may hold, and the sentence for what they may not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

from beatrice.benchmarks.bench.tiny_models import VOCAB_SIZE, tiny_model
from beatrice.extract.backbone.loading import (
    check_quantization_support,
    load_backbone,
    load_outline,
)
from beatrice.extract.signals.reader import SignalReader


def save_words(path, n_words, **special):
    words = {f"w{i}": i for i in range(n_words)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    save_words(path, VOCAB_SIZE)
    return path


def edit(path, file="config.json", **changes):
    content = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**content, **changes}))


def refused(load, path, *words):
    with pytest.raises(ValueError, match=f"^backbone '{path}'") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


WRONG_CONFIGS = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
    ({"quantization_config": {"quant_method": "fp8"}}, "accelerate"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "accelerate",
    ),
    ({"quantization_config": {"quant_method": "no-such"}}, "quantised by 'no-such'"),
    ({"_attn_implementation": "flash_attention_2"}, "FlashAttention2"),
    ({"rope_scaling": {"rope_type": "no-such"}}, "KeyError: 'no-such'"),
    ({"hidden_act": "no-such"}, "KeyError: 'no-such'"),
    ({"dtype": "no-such"}, "no-such"),
    ({"num_attention_heads": "four"}, "'num_attention_heads' expected int"),
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("changes", "word"), WRONG_CONFIGS)
def test_a_config_that_cannot_be_used_is_one_sentence(checkpoint, changes, word):
    load_backbone(checkpoint)  # as it was, it can
    edit(checkpoint, **changes)
    refused(load_backbone, str(checkpoint), word)
    refused(
        lambda path: check_quantization_support(path, load_outline(path)),
        str(checkpoint),
        word,
    )


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_config_that_is_a_list_is_one_sentence(checkpoint, file):
    (checkpoint / file).write_text("[]")
    refused(load_backbone, str(checkpoint), "could not be loaded")
    refused(load_outline, str(checkpoint), "could not be loaded")


def test_an_outline_describes_the_model_without_its_weights(checkpoint):
    outline = load_outline(str(checkpoint))
    assert outline.config.num_hidden_layers == 3
    assert {p.device.type for p in outline.model.parameters()} == {"meta"}
    assert outline.tokenizer.convert_tokens_to_ids("w5") == 5


def test_an_outline_refuses_code_as_loading_does(checkpoint):
    edit(checkpoint, auto_map={"AutoModelForCausalLM": "evil.Model"})
    refused(load_backbone, str(checkpoint), "config.json asks for evil.Model")
    refused(load_outline, str(checkpoint), "config.json asks for evil.Model")


def add_tensor(path, name):
    tensors = load_file(path / "model.safetensors")
    tensors[name] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_weights_of_more_layers_than_the_config_has_are_refused(checkpoint):
    edit(checkpoint, num_hidden_layers=2)
    refused(load_backbone, str(checkpoint), "9 tensors", "model.layers.2.")


def test_weights_of_another_width_are_refused_by_name(checkpoint):
    edit(checkpoint, intermediate_size=40)
    refused(load_backbone, str(checkpoint), "down_proj", "[32, 48]", "[32, 40]")


def test_a_tensor_without_a_place_is_refused_by_name(checkpoint):
    add_tensor(checkpoint, "adapter.weight")
    refused(load_backbone, str(checkpoint), "adapter.weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.visual.blocks.0.weight",
        "vision_tower.encoder.weight",
        "mtp.layers.0.weight",
        "transformer.h.0.attn.bias",  # GPT-J's causal mask
    ],
)
def test_what_a_text_model_leaves_out_is_no_reason_to_refuse(checkpoint, name):
    add_tensor(checkpoint, name)
    load_backbone(checkpoint)


def test_a_tokenizer_of_more_words_than_the_model_is_refused_with_numbers(checkpoint):
    save_words(checkpoint, 80)
    words = ("ids up to 79", "61 tokens (0 to 60)")
    refused(load_backbone, str(checkpoint), *words)
    refused(load_outline, str(checkpoint), *words)


def test_a_word_for_padding_beyond_the_embedding_is_accepted(checkpoint):
    save_words(checkpoint, VOCAB_SIZE, pad_token="[PAD]")
    backbone = load_backbone(checkpoint)
    assert backbone.tokenizer.pad_token_id == VOCAB_SIZE


FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def four_bit_tensors(name, n_experts, n_in, n_out):
    """Return packed weights as gpt-oss is released, and the numbers they stand for."""
    codes = torch.randint(0, 16, (n_experts, n_out, n_in // 32, 32))
    scales = torch.randint(122, 126, codes.shape[:-1])
    values = torch.tensor(FOUR_BITS + [-value for value in FOUR_BITS])[codes]
    values = values * torch.exp2(scales - 127.0)[..., None]
    packed = {
        f"{name}_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        f"{name}_scales": scales.to(torch.uint8),
    }
    return packed, values.flatten(2).mT


def test_four_bit_experts_are_unpacked_to_the_numbers_they_stand_for(tmp_path):
    config = GptOssConfig(
        **{**tiny_model("gpt_oss").config.to_dict(), "intermediate_size": 32}
    )
    path, wanted = tmp_path / "model", {}
    GptOssForCausalLM(config).save_pretrained(path)
    save_words(path, VOCAB_SIZE)
    tensors = load_file(path / "model.safetensors")
    for name in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
        packed, wanted[name] = four_bit_tensors(name, *tensors.pop(name).shape)
        tensors |= packed
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit(path, quantization_config={"quant_method": "mxfp4"})
    backbone = load_backbone(path)
    assert len(wanted) == 2 * 3
    for name, values in wanted.items():
        torch.testing.assert_close(backbone.model.get_parameter(name).data, values)
    SignalReader(backbone)
    check_quantization_support(str(path), load_outline(str(path)))

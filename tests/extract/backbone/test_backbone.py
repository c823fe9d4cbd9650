import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from beatrice.benchmarks.bench.tiny_models import VOCAB_SIZE, tiny_model
from beatrice.extract.backbone.loading import Backbone, load_backbone


def save_tokenizer(path):
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    tiny_model("qwen3_5").save_pretrained(path)
    save_tokenizer(path)
    return path


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_saved_model_comes_back_frozen_and_described(checkpoint):
    backbone = load_backbone(checkpoint)
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert (backbone.n_layers, backbone.d_model, backbone.n_heads) == (4, 32, 4)
    assert backbone.attention_layers == (3,)
    assert backbone.max_length == 128
    assert backbone.name == str(checkpoint)
    assert backbone.tokenizer.convert_tokens_to_ids("w5") == 5
    ids = torch.arange(3, 13)[None]
    expected = tiny_model("qwen3_5")(input_ids=ids).logits
    torch.testing.assert_close(backbone.model(input_ids=ids).logits, expected)


def test_dtype_is_as_asked(checkpoint):
    assert load_backbone(checkpoint).dtype == torch.float32
    assert load_backbone(checkpoint, dtype="bfloat16").dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(checkpoint):
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        load_backbone(checkpoint, dtype="int8")


def test_the_revision_follows_weights_and_config(checkpoint):
    first = load_backbone(checkpoint).revision
    assert len(first) == 64
    assert load_backbone(checkpoint).revision == first
    edit_config(checkpoint, max_position_embeddings=64)
    assert load_backbone(checkpoint).revision != first


def test_a_model_in_memory_has_a_revision_too():
    revision = Backbone.from_model(tiny_model("gpt2")).revision
    assert Backbone.from_model(tiny_model("gpt2")).revision == revision
    changed = tiny_model("gpt2")
    changed.transformer.wpe.weight[0, 0] += 1
    assert Backbone.from_model(changed).revision != revision


def expect_refusal(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_backbone(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/place", "./runs/none", "a/b/c"])
def test_a_path_that_is_neither_directory_nor_hub_id_is_refused(path):
    expect_refusal(path, "no such directory")


def test_a_hub_id_that_cannot_be_fetched_is_refused():
    expect_refusal("nobody/nothing", "could not be loaded")


def test_a_file_is_refused(checkpoint):
    expect_refusal(checkpoint / "config.json", "expected a model directory")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("config.json", "no config.json"),
        ("*.safetensors", "no .*safetensors file"),
        ("tokenizer.json", "expected a tokenizer"),
    ],
)
def test_a_missing_part_is_named(checkpoint, pattern, message):
    for path in checkpoint.glob(pattern):
        path.unlink()
    expect_refusal(checkpoint, message)


def test_code_from_the_checkpoint_is_refused_by_name(checkpoint):
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "evil.Model"})
    expect_refusal(checkpoint, f"{checkpoint}.*config.json asks for evil.Model")


def test_code_of_the_tokenizer_is_refused_by_name(checkpoint):
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    path.write_text(json.dumps(config))
    expect_refusal(checkpoint, "tokenizer_config.json asks for .*evil.Tokenizer")


def test_an_empty_request_for_code_asks_for_nothing(checkpoint):
    edit_config(checkpoint, auto_map={})
    load_backbone(checkpoint)


def test_damaged_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"not a tensor")
    expect_refusal(checkpoint, "could not be loaded")


def test_a_damaged_config_is_refused(checkpoint):
    (checkpoint / "config.json").write_text("{")
    expect_refusal(checkpoint, "could not be loaded")


def test_an_unknown_architecture_is_refused(checkpoint):
    edit_config(checkpoint, model_type="no_such_type", architectures=["NoSuch"])
    expect_refusal(checkpoint, "could not be loaded")


def test_weights_that_would_be_filled_with_random_numbers_are_refused(checkpoint):
    edit_config(
        checkpoint,
        num_hidden_layers=5,
        layer_types=["linear_attention"] * 3 + ["full_attention"] * 2,
    )
    expect_refusal(checkpoint, "lack .* tensors")

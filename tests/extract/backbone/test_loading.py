"""What a checkpoint's files may contain, and the errors for everything else."""

import concurrent.futures
import contextlib
import functools
import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MptConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from beatrice.benchmarks.bench.tiny_models import (
    _SIZES,
    VOCAB_SIZE,
    _randomise,
    tiny_model,
)
from beatrice.extract.backbone.layout import window_of
from beatrice.extract.backbone.loading import (
    Backbone,
    check_quantization_support,
    load_backbone,
    load_outline,
    require_answering_model,
)
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.decode import check_decoding
from beatrice.extract.signals.precision import float32_precision, rounding_of
from beatrice.extract.signals.reader import SignalReader
from tests.extract.generate.loopback import Numbers
from tests.extract.small_run import beatrice, make_run


def save_words(path, n_words=VOCAB_SIZE, **special):
    words = {f"w{i}": i for i in range(n_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def save(model, path):
    model.save_pretrained(path)
    save_words(path)
    return path


@pytest.fixture
def checkpoint(tmp_path):
    return save(tiny_model("llama"), tmp_path / "model")


def edit(path, file="config.json", **changes):
    content = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**content, **changes}))


def add_tensor(path, name):
    tensors = load_file(path / "model.safetensors")
    tensors[name] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load_quantized(path):
    check_quantization_support(path, load_outline(path))


def assert_refused(path, *words, load=load_backbone):
    with pytest.raises(ValueError, match=f"^backbone '{path}'") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_saved_model_comes_back_frozen_and_described(tmp_path):
    path = save(tiny_model("qwen3_5"), tmp_path / "model")
    backbone = load_backbone(path)
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert (backbone.n_layers, backbone.d_model, backbone.n_heads) == (4, 32, 4)
    assert backbone.attention_layers == (3,)
    assert backbone.max_length == 128
    assert backbone.name == str(path)
    assert backbone.tokenizer.convert_tokens_to_ids("w5") == 5
    ids = torch.arange(3, 13)[None]
    expected = tiny_model("qwen3_5")(input_ids=ids).logits
    torch.testing.assert_close(backbone.model(input_ids=ids).logits, expected)
    assert load_backbone(path, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        load_backbone(path, dtype="int8")


def test_the_revision_follows_weights_and_config(checkpoint):
    first = load_backbone(checkpoint).revision
    assert len(first) == 64
    assert load_backbone(checkpoint).revision == first
    edit(checkpoint, max_position_embeddings=64)
    assert load_backbone(checkpoint).revision != first


def test_a_path_that_begins_with_a_tilde_is_the_same_model(checkpoint, monkeypatch):
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    first = load_backbone(f"~/{checkpoint.name}")
    assert first.name == str(checkpoint)
    save_words(checkpoint, VOCAB_SIZE - 1)
    assert load_backbone("~/model").hashes.tokenizer != first.hashes.tokenizer


class Adapted(torch.nn.Module):
    """A wrapper like PEFT's: the model's attributes and a forward of its own."""

    def __init__(self, model, is_prompt_learning=False):
        super().__init__()
        self.base_model = model
        kind = types.SimpleNamespace(value="PREFIX_TUNING")
        peft = {"is_prompt_learning": is_prompt_learning, "peft_type": kind}
        self.active_peft_config = types.SimpleNamespace(**peft)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def with_compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Torch's own
@pytest.mark.parametrize("wrap", [torch.compile, Adapted, with_compiled_layers])
def test_a_wrapped_model_has_the_same_revision_and_is_read_as_it_writes(wrap):
    plain = Backbone.from_model(tiny_model("llama"), Numbers())
    wrapped = Backbone.from_model(wrap(tiny_model("llama")), Numbers())
    assert wrapped.revision == plain.revision
    assert check_decoding(SignalReader(wrapped)) is None


def offloaded():
    model = tiny_model("llama")
    model.model.layers[-1].to("meta")
    return model


def with_adapted_head():
    model = tiny_model("llama")
    model.lm_head = Adapted(model.lm_head)
    return model


def in_mixed_precision():
    model = tiny_model("llama")
    model._original_forward = model.forward  # as in accelerate's prepare_model
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    return model


def of_eight_bits():
    model = tiny_model("llama")
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    return model


def still_compressed():
    model = tiny_model("llama")
    hook = model.register_forward_pre_hook(lambda module, args: None)
    model.ct_decompress_hook = hook  # as in compressed-tensors
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "Transformers causal language model.* Linear$"),
        (lambda: tiny_model("llama").double(), "float64: expected one of float32, .*"),
        (lambda: Adapted(tiny_model("llama"), True), "PREFIX_TUNING puts trained .*"),
        (offloaded, "are on cpu, meta .*; expected one device"),
        (of_eight_bits, "quantised by LLM.int8"),
        (still_compressed, "compressed until its first forward pass; run one"),
        (in_mixed_precision, r"unwrap_model\(model, keep_fp32_wrapper=False\)"),
        (with_adapted_head, "found .*Adapted in .*; if it is an adapter, merge"),
    ],
)
def test_an_unreadable_model_in_memory_is_refused_with_the_reason(make, message):
    model = make().train()
    with pytest.raises(ValueError, match=message):
        Backbone.from_model(model)
    assert model.training  # unchanged


def test_threads_that_load_models_at_once_leave_the_process_as_it_was(checkpoint):
    """Transformers replaces methods, the default dtype and its verbosity meanwhile."""
    before = PreTrainedModel.tie_weights, logging.get_verbosity()
    shown, dtypes = logging.is_progress_bar_enabled(), ("bfloat16", "float16")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        load = functools.partial(load_backbone, checkpoint)
        loads = [pool.submit(load, dtype=dtype) for dtype in dtypes * 8]
        assert {str(load.result().dtype)[6:] for load in loads} == {*dtypes}
    assert (PreTrainedModel.tie_weights, logging.get_verbosity()) == before
    assert logging.is_progress_bar_enabled() == shown
    assert torch.get_default_dtype() == torch.float32


def test_a_weight_that_packs_several_tensors_is_hashed_by_each():
    def revision_of(distance):
        model = tiny_model("llama")
        plain = model.lm_head.weight.data
        weight = TwoTensor(plain, plain + distance)
        model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
        return Backbone.from_model(model).revision

    assert revision_of(1) == revision_of(1) != revision_of(2)


def test_a_change_of_any_column_and_of_a_part_of_packed_weights_is_noticed():
    model = tiny_model("llama")
    plain = model.lm_head.weight.data
    packed = TwoTensor(plain, plain.clone())
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    for weight in (model.model.layers[0].mlp.up_proj.weight, packed.b):
        backbone = Backbone.from_model(model)
        backbone.require_unchanged()
        weight.data[:, 1:] = 0  # rows and columns are multiples of eight
        with pytest.raises(ValueError, match="have changed"):
            backbone.require_unchanged()


def test_a_default_type_other_than_float32_is_refused():
    model = tiny_model("llama")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(ValueError, match="type is bfloat16, .* float32: call"):
            Backbone.from_model(model)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/place", "no such directory"),
        ("./runs/none", "no such directory"),
        ("~no-such-user/model", "no such directory"),
        ("a/b/c", "no such directory"),
        ("gema3-270m", "did you mean gemma3-270m"),
        ("nobody/nothing", "couldn't find them in the cached files"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(path, words):
    assert_refused(path, words)


DAMAGES = [
    ("config.json", None, "no config.json"),
    ("model.safetensors", None, "no *.safetensors file"),
    ("tokenizer.json", None, "expected a tokenizer"),
    ("model.safetensors", "not a tensor", "Error while deserializing header"),
    ("config.json", "{", "is not a valid JSON file"),
    ("config.json", "[]", "is not one that Transformers can use"),
    ("tokenizer_config.json", "[]", "is not one that Transformers can use"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGES)
def test_a_missing_or_damaged_file_is_refused(checkpoint, name, content, words):
    file = checkpoint / name
    file.write_text(content) if content else file.unlink()
    assert_refused(checkpoint, words)


BY_BITS = {"quant_method": "bitsandbytes"}
WRONG_CONFIGS = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
    ({"quantization_config": {"quant_method": "fp8"}}, "accelerate"),
    ({"quantization_config": BY_BITS | {"load_in_4bit": True}}, "accelerate"),
    (
        {"quantization_config": BY_BITS | {"load_in_8bit": True}},
        "quantised by LLM.int8, which treats a column as an outlier if any token of "
        "the batch is large there, so that a token's signals would depend on its batch",
    ),
    ({"quantization_config": {"quant_method": "no-such"}}, "quantised by 'no-such'"),
    ({"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
    ({"attn_implementation": "evil/kernel@main"}, "'evil/kernel@main', code"),
    ({"text_config": {"experts_implementation": {"": "evil/kernel"}}}, "'evil/kernel'"),
    ({"rope_scaling": {"rope_type": "no-such"}}, "KeyError: 'no-such'"),
    ({"hidden_act": "no-such"}, "KeyError: 'no-such'"),
    ({"dtype": "no-such"}, "no-such"),
    ({"num_attention_heads": "four"}, "'num_attention_heads' expected int"),
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ({"model_type": "no_such_type", "architectures": ["NoSuch"]}, "could not be"),
    ({"num_hidden_layers": 5000}, "num_hidden_layers=5000"),
    ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "config.json asks for evil"),
]


@pytest.mark.parametrize(("changes", "word"), WRONG_CONFIGS)
def test_an_unusable_config_is_refused_in_one_sentence(checkpoint, changes, word):
    edit(checkpoint, **changes)
    assert_refused(checkpoint, word)
    assert_refused(checkpoint, word, load=load_quantized)


def test_the_doctor_escapes_terminal_commands_in_a_config(checkpoint):
    edit(checkpoint, auto_map={"AutoModelForCausalLM": "evil\x1b]52;c;eA==\x07"})
    stdout = beatrice("doctor", "--model", checkpoint, code=1).stdout
    assert r"evil\x1b]52;c;eA==\x07" in stdout and "\x1b" not in stdout


def test_an_adapter_is_refused_with_its_models_weights_and_without(checkpoint):
    (checkpoint / "adapter_config.json").write_text("{}")
    assert_refused(checkpoint, "an adapter next to them", "merge_and_unload")
    (checkpoint / "config.json").unlink()
    assert_refused(checkpoint, "an adapter without its model", "merge_and_unload")


def test_code_for_the_tokenizer_is_refused_and_an_empty_auto_map_is_not(checkpoint):
    edit(checkpoint, auto_map={})
    load_backbone(checkpoint)
    evil = {"AutoTokenizer": ["evil.Tokenizer", None]}
    edit(checkpoint, "tokenizer_config.json", auto_map=evil)
    assert_refused(checkpoint, "tokenizer_config.json asks for", "evil.Tokenizer")


def test_an_outline_describes_the_model_without_its_weights(checkpoint):
    outline = load_outline(str(checkpoint))
    assert outline.config.num_hidden_layers == 3
    assert {p.device.type for p in outline.model.parameters()} == {"meta"}
    assert outline.tokenizer.convert_tokens_to_ids("w5") == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, ("(9, first", "model.layers.2.")),
        ({"num_hidden_layers": 4}, ("lack tensors of", "(9, first")),
        ({"intermediate_size": 40}, ("down_proj", "[32, 48]", "[32, 40]")),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(checkpoint, changes, words):
    edit(checkpoint, **changes)
    assert_refused(checkpoint, *words)


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(checkpoint):
    add_tensor(checkpoint, "adapter.weight")
    assert_refused(checkpoint, "adapter.weight")


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
def test_tensors_that_a_text_model_ignores_are_no_reason_to_refuse(checkpoint, name):
    add_tensor(checkpoint, name)
    load_backbone(checkpoint)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_numbers(checkpoint):
    save_words(checkpoint, VOCAB_SIZE, pad_token="[PAD]")  # never an input
    assert load_backbone(checkpoint).tokenizer.pad_token_id == VOCAB_SIZE
    save_words(checkpoint, 80)
    words = ("ids up to 79", "61 tokens (0 to 60)")
    assert_refused(checkpoint, *words)
    assert_refused(checkpoint, *words, load=load_outline)


FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def four_bit_tensors(name, n_experts, n_in, n_out):
    """Return weights packed as in the released gpt-oss, and their values."""
    codes = torch.randint(0, 16, (n_experts, n_out, n_in // 32, 32))
    scales = torch.randint(122, 126, codes.shape[:-1])
    values = torch.tensor(FOUR_BITS + [-value for value in FOUR_BITS])[codes]
    values = values * torch.exp2(scales - 127.0)[..., None]
    packed = {
        f"{name}_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        f"{name}_scales": scales.to(torch.uint8),
    }
    return packed, values.flatten(2).mT


def test_four_bit_experts_are_unpacked_to_their_values(tmp_path):
    config = tiny_model("gpt_oss").config.to_dict() | {"intermediate_size": 32}
    model, wanted = GptOssForCausalLM(GptOssConfig(**config)), {}
    path = save(model, tmp_path / "model")
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
    load_quantized(str(path))


def test_weights_in_fp8_are_unpacked_except_those_that_are_not_packed(checkpoint):
    about = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    edit(checkpoint, quantization_config=about)
    packing = load_outline(str(checkpoint)).quantization
    assert packing.dequantize and packing.modules_to_not_convert == ["lm_head"]


def test_compressed_tensors_are_unpacked_before_they_are_read(checkpoint):
    pytest.importorskip("compressed_tensors")
    tensors, wanted = load_file(checkpoint / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = (tensors[name].abs().max() / 448).reshape(1)
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        wanted[name] = tensors[name].float() * scale
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    packing = {"format": "float-quantized", "quantization_status": "compressed"}
    packing |= {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    packing |= {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    edit(checkpoint, quantization_config=packing)
    backbone = load_backbone(checkpoint)
    for name, values in wanted.items():
        torch.testing.assert_close(backbone.model.get_parameter(name).data, values)
    SignalReader(backbone)


HERE, OTHER = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("backend", "is_refused"),
    [
        ({"backend": "transformers", "revision": "f" * 64}, True),
        ({"backend": "served", "revision": OTHER}, True),
        ({"backend": "transformers", "revision": HERE}, False),
        ({"backend": "served", "revision": HERE}, False),
        ({"backend": "served", "revision": "my-tuned-v2"}, False),
        (None, False),  # from an earlier version, which did not record the backend
    ],
)
def test_answers_of_other_weights_are_refused(tmp_path, backend, is_refused):
    backbone = types.SimpleNamespace(name="m", revision=HERE)
    if backend is not None:
        (tmp_path / "backend.json").write_text(json.dumps(backend))
    refused = pytest.raises(ValueError, match="by revision .* m is now a{12};")
    with refused if is_refused else contextlib.nullcontext():
        require_answering_model(tmp_path, backbone)


def test_weights_changed_between_answer_and_extract_are_refused(tmp_path):
    model, path = shutil.copytree(WEIGHTS, tmp_path / "model"), tmp_path / "run"
    make_run(path, model=model)
    beatrice("answer", path, "--no-read")
    backend = json.loads((path / "answers" / "backend.json").read_text())
    tensors = load_file(model / "model.safetensors")
    changed = {k: t * 0.5 if "down_proj" in k else t for k, t in tensors.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    output = beatrice("extract", path, code=1).output
    assert f"written by revision {backend['revision'][:12]}" in output
    assert str(model) in output and "delete" in output
    assert not (path / "features").exists()
    shutil.copy(WEIGHTS / "model.safetensors", model)
    # So few answers form one range per setting, which worker 0 reads.
    output = beatrice("extract", path, RANK="1", WORLD_SIZE="2").output
    assert "extract 1/2: ranges of other workers are missing (2)" in output
    assert not RunDir(path).stage_done("extract")
    beatrice("extract", path, "--shard", "0/2")
    assert RunDir(path).stage_done("extract")
    assert "already done" in beatrice("extract", path, "--shard", "1/2").output


def test_a_model_loads_after_the_precision_of_one_device_was_set(checkpoint):
    """After that, Torch's own query for the precision raises an error."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="matmul precision"):
            torch.get_float32_matmul_precision()
        backbone = load_backbone(checkpoint)
        assert backbone.check_once("a question", [], lambda: 3) == 3
        gpu, host = torch.device("cuda"), torch.device("cpu")
        assert float32_precision(gpu) == "tf32" != float32_precision(host)
        # Checks then allow the differences of a type with as few bits.
        assert rounding_of(torch.float32, gpu) == torch.float16
        assert rounding_of(torch.float32, host) == torch.float32
        assert rounding_of(torch.bfloat16, gpu) == torch.bfloat16
    finally:
        products.fp32_precision = before


SWITCH = 16  # tokens, beyond which the longrope model below changes its positions
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SWITCHING = {"original_max_position_embeddings": SWITCH}
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, **SWITCHING}


@pytest.fixture(scope="module")
def longrope():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = Phi3Config(**_SIZES, **SWITCHING, rope_parameters=ROPE)
        model = Phi3ForCausalLM(config)
        _randomise(model)
    return model.eval()


def test_a_longrope_window_ends_where_its_positions_change(longrope):
    """Beyond the window the model's own logits depend on the batch."""
    backbone = Backbone.from_model(longrope)
    assert backbone.max_length == SWITCH
    with pytest.raises(ValueError, match="17 tokens.*reads at most 16"):
        backbone.check_length(SWITCH + 1)
    ids = torch.arange(3, 15)[None]
    padded = torch.nn.functional.pad(ids, (0, SWITCH - 11), value=3)
    with torch.no_grad():
        alone = longrope(input_ids=ids).logits
        in_long_batch = longrope(input_ids=padded).logits[:, : ids.shape[1]]
        in_window = longrope(input_ids=padded[:, :SWITCH]).logits[:, : ids.shape[1]]
    assert (alone - in_long_batch).abs().max() > 1e-2
    torch.testing.assert_close(alone, in_window, atol=1e-4, rtol=0)


def test_longrope_of_one_layer_type_limits_the_window_and_dynamic_rope_does_not():
    config = Phi3Config(**_SIZES)
    assert window_of(config) == 128
    config.rope_parameters = {"full_attention": ROPE, "sliding_attention": {}}
    assert window_of(config) == SWITCH
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert window_of(config) == 128


def test_mpts_window_ends_with_its_positions():
    assert window_of(MptConfig(max_seq_len=64)) == 64


@pytest.mark.parametrize(
    "there", ["pytorch_model.bin", "../model.safetensors", "sub/a.safetensors"]
)
@pytest.mark.parametrize("by", ["index", "config"])
def test_a_weights_file_in_another_folder_or_format_is_refused(checkpoint, there, by):
    """Such a file would be left out of the revision, or is pickled."""
    weights = checkpoint / "model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), there)}
    weights.rename(checkpoint / "decoy.safetensors")
    if by == "config":
        edit(checkpoint, transformers_weights=there)
    else:
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(checkpoint, repr(there), "expected *.safetensors files in the same")

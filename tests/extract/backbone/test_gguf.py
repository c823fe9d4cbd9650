"""A GGUF file as a backbone: the same model, unpacked once; errors in one sentence."""

import hashlib
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from beatrice.extract.backbone.gguf import (
    Header,
    Weights,
    _write_weights,
    config_of,
    generation_of,
    loadable_path,
    read_header,
    tokenizer_of,
)
from beatrice.extract.backbone.loading import load_backbone, load_outline
from beatrice.extract.run.files import user_cache
from tests.extract.small_run import beatrice
from tests.process import ROOT

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<stop>")
# No merges produce the last word.
WORDS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "lo", "ĊĊ", "hello")
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
K_QUANTS = {"Q4_K": ((0, 2),), "Q6_K": ((208,),)}  # offsets of a block's float16 scales


def tiny(architecture, **changes):
    """Return a random model of two layers with norms other than the default."""
    torch.manual_seed(0)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    elif architecture == "lfm2":
        kinds = {"layer_types": ["conv", "full_attention"], "norm_eps": 1e-5}
        kinds |= {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}
        model = Lfm2ForCausalLM(Lfm2Config(**{**SHAPE, **kinds, **changes}))
    else:
        shape = {**SHAPE, "sliding_window": 4, "tie_word_embeddings": True, **changes}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval().requires_grad_(False)


def _as_llama_cpp(architecture, name, values, config):
    """Return a tensor as llama.cpp's converter lays it out."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if name.endswith("conv.conv.weight"):
        return values[:, 0]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = next((n for projection, n in heads.items() if projection in name), None)
    if architecture != "llama" or n_heads is None:
        return values
    split = values.reshape(n_heads, 2, len(values) // n_heads // 2, -1)
    return split.swapaxes(1, 2).reshape(values.shape)


def _packed(values, kind):
    if kind not in K_QUANTS:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    # The package can only unpack these, so take random bytes with small scales.
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (values.size // n_block, n_bytes), np.uint8)
    scales = (blocks.shape[0], 1)
    for at in K_QUANTS[kind][0]:
        scale = random.uniform(1e-4, 2e-4, scales).astype(np.float16).view(np.uint8)
        blocks[:, at : at + 2] = scale
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path,
    model,
    *,
    kind="F32",
    add_bos=True,
    pre="gpt-2",
    scaling=(),
    more=None,
    without=(),
):
    """Write a model and its tokenizer: matrices of this kind, vectors in float32."""
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "lfm2":
        writer.add_head_count_kv([0, config.num_key_value_heads])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1e6)
    else:
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in dict(scaling).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.rope.{name}", value)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "l o", "Ċ Ċ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    tensors = {k: v.float().numpy() for k, v in model.state_dict().items()}
    tensors.pop("lm_head.weight" if config.tie_word_embeddings else "", None)
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): _as_llama_cpp(
            architecture, name, values, config
        )
        for name, values in tensors.items()
    }
    for name, values in {**tensors, **(more or {})}.items():
        of = kind if values.ndim > 1 else "F32"
        raw, packed = gguf.GGMLQuantizationType[of], np.ascontiguousarray(values)
        if name not in without:
            writer.add_tensor(name, _packed(packed, of), None, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IDS = torch.tensor([[1, 30, 41, 52, 7, 99, 100, 12, 60, 33, 20, 19]])
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache("gguf")


@pytest.fixture
def llama_file(tmp_path):
    return write_gguf(tmp_path / "m.gguf", tiny("llama"))


def files_in(folder):
    return sorted(p.name for p in folder.glob("*") if p.name != ".lock")


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_the_loaded_model_is_the_one_that_was_written(tmp_path, architecture):
    model = tiny(architecture)
    loaded = load_backbone(write_gguf(tmp_path / "m.gguf", model)).model
    assert torch.equal(logits(loaded), logits(model))
    model.get_input_embeddings().weight[30] += 1
    assert not torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("llama", kind) for kind in KINDS), ("gemma3", "F16"), ("gemma3", "Q6_K")],
)
def test_weights_are_those_that_transformers_itself_loads(tmp_path, architecture, kind):
    path = write_gguf(tmp_path / "m.gguf", tiny(architecture), kind=kind)
    model = load_backbone(path).model
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    assert theirs["tensors"]
    state = model.state_dict()
    assert all(torch.equal(state[name], v) for name, v in theirs["tensors"].items())
    assert logits(model).isfinite().all()


def test_half_precision_takes_half_the_disk_space(tmp_path, cache):
    sizes = {}
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        path = write_gguf(tmp_path / f"{kind}.gguf", tiny("llama"), kind=kind)
        sizes[kind] = (
            (Path(loadable_path(str(path))) / "model.safetensors").stat().st_size
        )
    assert sizes["F16"] < 0.51 * sizes["F32"] > sizes["BF16"]
    assert sizes["Q8_0"] == sizes["F32"]


def test_progress_of_unpacking_is_counted_in_bytes(tmp_path, llama_file):
    """Gemma's embedding is one of 236 tensors but six tenths of the bytes."""
    header, updates = read_header(llama_file), []
    weights, path = Weights(header, config_of(header)), tmp_path / "model.safetensors"
    _write_weights(weights, path, lambda *counts: updates.append(counts))
    sizes = [values.nbytes for _, values in weights.read()]
    assert updates == [(sum(sizes[: i + 1]), sum(sizes)) for i in range(len(sizes))]


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_tokenizer_is_that_of_the_file(tmp_path, add_bos):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), add_bos=add_bos)
    (tmp_path / "chat_template.jinja").write_text("of another model")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "no"}')
    tokenizer = load_backbone(path).tokenizer
    ids = tokenizer("hello<|im_end|> é").input_ids
    assert (ids[0] == tokenizer.bos_token_id == 1) == add_bos
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello é"
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_llama_3_texts_begin_with_a_bos_token_unless_the_file_forbids_it(
    tmp_path, add_bos
):
    path = write_gguf(
        tmp_path / "m.gguf", tiny("llama"), add_bos=add_bos, pre="llama-bpe"
    )
    tokenizer = load_backbone(path).tokenizer
    words = tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids)
    assert words == ["<|im_start|>"] * (add_bos is not False) + ["hello"]


# GPT-2 separates line feeds before a word or a number, SmolLM only before a word.
CUTS = {"gpt-2": "Ċ Ċ Q Ċ Ċ 1", "smollm": "Ċ Ċ Q ĊĊ 1", "stablelm2": "ĊĊ Q ĊĊ 1"}


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_split_by_the_pre_tokenizer_that_a_file_names(tmp_path, pre):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), add_bos=False, pre=pre)
    tokenizer = load_backbone(path).tokenizer
    assert tokenizer.tokenize("\n\nQ\n\n1") == CUTS[pre].split()


def test_an_unknown_or_missing_pre_tokenizer_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), pre="deepseek-llm")
    assert "(tokenizer.ggml.pre) is 'deepseek-llm'" in refusal(path)
    write_gguf(path, tiny("llama"), pre=None)
    assert "(tokenizer.ggml.pre) is None" in refusal(path)
    header = read_header(path)
    config = config_of(header)
    header.values["general.architecture"] = "qwen2"  # older than the field
    tokenizer = tokenizer_of(header, config)
    assert tokenizer.tokenize("\n\nQ") == ["ĊĊ", "Q"]


@pytest.mark.parametrize(("adds", "first"), [(None, "▁"), (True, "▁"), (False, "h")])
def test_a_sentencepiece_text_begins_with_a_space_unless_the_file_forbids_it(
    tmp_path, adds, first
):
    words = ("<unk>", "<s>", "</s>", "▁", "h", "i")
    header = header_of(tmp_path / "m.gguf", "llama", NUMBERS, words=words, adds=adds)
    tokenizer = tokenizer_of(header, config_of(header))
    ids = tokenizer("hi hi", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[0] == first
    assert tokenizer.decode(ids) == "hi hi"


def test_stop_tokens_name_and_revision_come_from_the_file(llama_file, cache):
    """The ends of text and of turn; the path; the SHA-256."""
    backbone = load_backbone(llama_file)
    assert backbone.model.generation_config.eos_token_id == [3, 2]
    sha256 = hashlib.sha256(llama_file.read_bytes()).hexdigest()
    assert (backbone.name, backbone.revision) == (str(llama_file), sha256)
    assert [name.partition("-")[0] for name in files_in(cache)] == [sha256]


def test_a_token_that_ends_messages_before_the_answer_does_not_end_answers(bytewise):
    """gpt-oss ends its analysis with the token that ends Phi's turns."""

    def ends_of(*texts):
        bytewise.add_tokens([AddedToken(text, special=True) for text in texts])
        size, end = len(bytewise), bytewise.convert_tokens_to_ids("<|end|>")
        values = {"tokenizer.ggml.eot_token_id": end}
        header = Header(Path("m.gguf"), values=values, n_tokens=size, tensors={})
        ids = generation_of(header, LlamaConfig(), bytewise).eos_token_id
        return bytewise.convert_ids_to_tokens(ids)

    assert ends_of("<|end|>") == ["<|end|>"]
    assert ends_of("<|return|>", "<|call|>") == ["<|return|>", "<|call|>"]


def test_a_file_is_unpacked_once_and_again_only_when_damaged(llama_file):
    weights = Path(loadable_path(str(llama_file))) / "model.safetensors"
    first = weights.stat().st_mtime_ns, weights.read_bytes()
    assert loadable_path(str(llama_file)) == str(weights.parent)
    assert weights.stat().st_mtime_ns == first[0]
    weights.write_bytes(first[1][:-1] + b"?")
    loadable_path(str(llama_file))
    assert weights.read_bytes() == first[1]


def test_an_outline_is_read_without_unpacking(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", tiny("gemma3"))
    outline = load_outline(str(path))
    assert (outline.config.sliding_window, outline.tokenizer.bos_token_id) == (4, 1)
    assert files_in(cache) == []


def test_rotary_scaling_of_llama_3_is_read_from_its_factors(tmp_path):
    rope = {"rope_theta": 10_000.0, "rope_type": "llama3", "factor": 8.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    model = tiny("llama", rope_parameters=rope)
    plain = tiny("llama")
    inv_freq = model.model.rotary_emb.inv_freq
    factors = (plain.model.rotary_emb.inv_freq / inv_freq).numpy()
    path = tmp_path / "m.gguf"
    write_gguf(path, model, more={"rope_freqs.weight": factors})
    loaded = load_backbone(path).model.model.rotary_emb.inv_freq
    # The factors are float32 quotients, so the frequencies agree to a few roundings.
    assert torch.allclose(loaded, inv_freq, rtol=1e-5)
    assert factors.max() == pytest.approx(8)
    write_gguf(path, model, more={"rope_freqs.weight": factors[::-1].copy()})
    assert "not those of Llama 3" in refusal(path)


def test_linear_rotary_scaling_is_read_and_yarn_is_refused(tmp_path):
    scaled = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    plain = {"rope_theta": 10_000.0, "rope_type": "default"}
    rope = {"full_attention": scaled, "sliding_attention": plain}
    layers = ["sliding_attention", "full_attention"]
    model = tiny("gemma3", rope_parameters=rope, layer_types=layers)
    path, factor = tmp_path / "m.gguf", {"scaling.factor": 8.0}
    for scaling in (factor | {"scaling.type": "linear"}, factor, {"scale_linear": 8.0}):
        write_gguf(path, model, scaling=scaling)
        assert load_outline(str(path)).config.rope_parameters == rope
    write_gguf(path, model, scaling=factor | {"scaling.type": "yarn"})
    assert "scaled by 'yarn'" in refusal(path)


def header_of(path, architecture, numbers, *, words=None, adds=None):
    """Return the header of a file with only a vocabulary and these numbers.

    `words` are a sentencepiece vocabulary; `adds` tells if it adds a leading space.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in numbers.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("llama" if words else "gpt2")
    writer.add_token_list(words or WORDS)
    writer.add_token_scores([0.0] * len(words or WORDS))
    if adds is not None:
        writer.add_add_space_prefix(adds)
    writer.add_tensor("token_embd.weight", np.zeros((len(WORDS), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


NUMBERS = {
    "context_length": 128,
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


@pytest.mark.parametrize(
    ("architecture", "n_layers", "d_model", "n_heads", "scalar"),
    [
        ("gemma2", 46, 4608, 32, 144),
        ("gemma3", 62, 5376, 32, 168),
        ("gemma3", 34, 2560, 8, 256),
    ],
)
def test_the_largest_gemmas_have_an_attention_scale_of_their_own(
    tmp_path, architecture, n_layers, d_model, n_heads, scalar
):
    numbers = {"block_count": n_layers, "embedding_length": d_model}
    numbers |= {"attention.head_count": n_heads}
    header = header_of(tmp_path / "m.gguf", architecture, NUMBERS | numbers)
    assert config_of(header).query_pre_attn_scalar == scalar


@pytest.mark.parametrize("architecture", ["llama", "stablelm", "starcoder2", "gemma3"])
def test_rotary_frequencies_have_the_base_of_the_file(tmp_path, architecture):
    numbers = NUMBERS | {"rope.freq_base": 123456.0}
    rope = config_of(header_of(tmp_path / "m.gguf", architecture, numbers))
    rope = rope.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == 123456.0


def refusal(path):
    with pytest.raises(ValueError, match=f"^backbone '{path}'") as caught:
        load_backbone(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_byte(name, n_after, byte):
    """Return a function that sets the byte `n_after` bytes after a header's name."""

    def change(content):
        at = content.index(name) + len(name) + n_after
        return content[:at] + byte + content[at + 1 :]

    return change


HEADER = "header is damaged"
DAMAGES = {
    "its end is cut off": (lambda content: content[:-100], "cut short"),
    "its header is cut": (lambda content: content[:300], HEADER),
    "another architecture": (
        lambda x: x.replace(b"llama", b"lLama"),
        "lLama is not supported yet.); use the model's safetensors",
    ),
    "version one": (with_byte(b"GGUF", 0, b"\x01"), "version 2 or 3"),
    "too many values": (lambda x: x[:16] + b"\xff" * 8 + x[24:], HEADER),
    "an unknown type": (with_byte(b"token_embd.weight", 4 + 16, b"\x63"), HEADER),
    "layers without end": (
        with_byte(b"llama.block_count", 7, b"\x7f"),
        "2130706434 layers, expected at most 1000",
    ),
    "another width": (
        with_byte(b"llama.feed_forward_length", 4, b"\x03"),
        "'model.layers.0.mlp.gate_proj.weight'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_file_is_refused_in_one_sentence(llama_file, cache, damage):
    change, words = DAMAGES[damage]
    llama_file.write_bytes(change(llama_file.read_bytes()))
    assert words in refusal(llama_file)
    assert files_in(cache) == []


def test_a_flipped_byte_of_a_header_never_causes_a_traceback(llama_file, cache):
    path = llama_file
    whole = path.read_bytes()
    end = whole.index(b"output_norm.weight")
    words = range(whole.index(b"ggml.tokens") + 40, whole.index(b"add_bos_token") - 40)
    random, refusals = np.random.default_rng(0), []
    for at in random.choice([i for i in range(end) if i not in words], 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            load_outline(str(path))
        except ValueError as error:
            refusals.append(str(error))
    assert all(x.startswith("backbone ") and "\n" not in x for x in refusals)
    assert len(refusals) > 50 and files_in(cache) == []


def test_an_extra_or_missing_tensor_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    more = {"rope_factors_long.weight": np.ones(32, np.float32)}
    write_gguf(path, tiny("llama"), more=more)
    assert "'rope_factors_long.weight'" in refusal(path)
    write_gguf(path, tiny("llama"), without=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match=r"lack tensors of \w+ \(1, first"):
        load_backbone(path)


def test_a_missing_file_or_one_of_another_format_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "m.gguf"
    assert "no such file" in refusal(path)
    path.write_bytes(b"PK\x03\x04 and more")
    assert "expected a model directory or a GGUF file" in refusal(path)


def test_a_verb_refuses_a_damaged_file_with_an_exit_code(tmp_path, llama_file):
    words = ("data", tmp_path / "run", "--world", "--model", llama_file)
    llama_file.write_bytes(llama_file.read_bytes()[:-100])
    output = beatrice(*words, code=1).output
    assert "cut short" in output and "Traceback" not in output
    llama_file.write_bytes(b"PK")
    assert "GGUF file" in beatrice(*words, code=2).output


def test_two_processes_can_unpack_the_same_file_at_once(llama_file, cache):
    code = "from beatrice.extract.backbone.gguf import loadable_path; import sys; "
    code += "print(loadable_path(sys.argv[1]))"
    words = [sys.executable, "-c", code, str(llama_file)]
    both = [
        subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("unpack m.gguf: done" in stderr for _, stderr in outputs) == 1
    assert len(files_in(cache)) == 1

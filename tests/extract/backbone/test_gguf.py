"""A GGUF file as a backbone: the same model, unpacked once, refused in a sentence."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from beatrice.cli import main
from beatrice.extract.backbone.gguf import (
    Weights,
    _unpack,
    cache_folder,
    config_of,
    read_header,
    unpacked,
)
from beatrice.extract.backbone.loading import load_backbone, load_outline
from tests.extract.backbone.gguf_files import TEMPLATE, tiny, write_gguf
from tests.process import ROOT

IDS = torch.tensor([[1, 30, 41, 52, 7, 99, 100, 12, 60, 33, 20, 19]])
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")


@pytest.fixture(autouse=True)
def cache(tmp_path):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    yield cache_folder()
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def kept(folder):
    return sorted(p.name for p in folder.glob("*") if p.name != ".lock")


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_the_model_of_a_file_is_the_one_that_was_written(tmp_path, architecture):
    model = tiny(architecture)
    found = load_backbone(write_gguf(tmp_path / "m.gguf", model)).model
    assert torch.equal(logits(found), logits(model))
    model.get_input_embeddings().weight[30] += 1
    assert not torch.equal(logits(found), logits(model))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("llama", kind) for kind in KINDS), ("gemma3", "F16"), ("gemma3", "Q6_K")],
)
def test_weights_are_those_of_transformers_own_loading(tmp_path, architecture, kind):
    path = write_gguf(tmp_path / "m.gguf", tiny(architecture), kind=kind)
    found = load_backbone(path).model
    own = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=found)
    assert own["tensors"]
    state = found.state_dict()
    assert all(torch.equal(state[name], v) for name, v in own["tensors"].items())
    assert logits(found).isfinite().all()


def test_half_precision_takes_half_of_the_disk(tmp_path, cache):
    sizes = {}
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        path = write_gguf(tmp_path / f"{kind}.gguf", tiny("llama"), kind=kind)
        sizes[kind] = (Path(unpacked(str(path))) / "model.safetensors").stat().st_size
    assert sizes["F16"] < 0.51 * sizes["F32"] > sizes["BF16"]
    assert sizes["Q8_0"] == sizes["F32"]


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


def test_an_answer_stops_where_the_file_and_the_turn_end(tmp_path):
    model = load_backbone(write_gguf(tmp_path / "m.gguf", tiny("llama"))).model
    assert model.generation_config.eos_token_id == [3, 2]


def test_a_files_name_is_its_path_and_its_revision_the_sha256(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    found = load_backbone(path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (found.name, found.revision) == (str(path), sha256)
    assert [name.partition("-")[0] for name in kept(cache)] == [sha256]


def test_a_file_is_unpacked_once_and_again_only_when_damaged(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    weights = Path(unpacked(str(path))) / "model.safetensors"
    first = weights.stat().st_mtime_ns, weights.read_bytes()
    assert unpacked(str(path)) == str(weights.parent)
    assert weights.stat().st_mtime_ns == first[0]
    weights.write_bytes(first[1][:-1] + b"?")
    unpacked(str(path))
    assert weights.read_bytes() == first[1]


def test_an_outline_is_read_without_unpacking(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", tiny("gemma3"))
    outline = load_outline(str(path))
    assert (outline.config.sliding_window, outline.tokenizer.bos_token_id) == (4, 1)
    assert kept(cache) == []


def test_rotary_scaling_of_llama_3_is_read_from_its_factors(tmp_path):
    rope = {
        "rope_theta": 10_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", rope_parameters=rope)
    plain = tiny("llama")
    inv_freq = model.model.rotary_emb.inv_freq
    factors = (plain.model.rotary_emb.inv_freq / inv_freq).numpy()
    path = tmp_path / "m.gguf"
    write_gguf(path, model, more={"rope_freqs.weight": factors})
    found = load_backbone(path).model
    # The factors are float32 quotients, so the frequencies agree to a few roundings.
    assert torch.allclose(found.model.rotary_emb.inv_freq, inv_freq, rtol=1e-5)
    assert factors.max() == pytest.approx(8)
    write_gguf(path, model, more={"rope_freqs.weight": factors[::-1].copy()})
    assert "not those of Llama 3" in refusal(path)


def test_linear_rotary_scaling_is_read_and_another_is_refused(tmp_path):
    scaled = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    plain = {"rope_theta": 10_000.0, "rope_type": "default"}
    rope = {"full_attention": scaled, "sliding_attention": plain}
    layers = ["sliding_attention", "full_attention"]
    model = tiny("gemma3", rope_parameters=rope, layer_types=layers)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, scaling="linear")
    assert load_outline(str(path)).config.rope_parameters == rope
    write_gguf(path, model, scaling="yarn")
    assert "scaled by 'yarn'" in refusal(path)


def cut(content):
    return content[:-100]


def cut_in_the_header(content):
    return content[:300]


def other_architecture(content):
    return content.replace(b"llama", b"lLama")


def version_one(content):
    return content[:4] + b"\x01" + content[5:]


def many_values(content):
    return content[:16] + b"\xff" * 8 + content[24:]


def unknown_type(content):
    at = content.index(b"token_embd.weight") + 17 + 4 + 16
    return content[:at] + b"\x63" + content[at + 1 :]


def other_width(content):
    at = content.index(b"llama.feed_forward_length") + 25 + 4
    return content[:at] + b"\x03" + content[at + 1 :]


DAMAGES = {
    cut: "cut short",
    cut_in_the_header: "header is damaged",
    other_architecture: "'lLama'",
    version_one: "version 2 or 3",
    many_values: "header is damaged",
    unknown_type: "header is damaged",
    other_width: "'model.layers.0.mlp.gate_proj.weight'",
}


def refusal(path, load=load_backbone):
    with pytest.raises(ValueError, match=f"^backbone '{path}'") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, cache, damage):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    path.write_bytes(damage(path.read_bytes()))
    assert DAMAGES[damage] in refusal(path)
    assert kept(cache) == []


def test_no_flipped_byte_of_a_header_is_a_traceback(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    whole = path.read_bytes()
    end = whole.index(b"output_norm.weight")
    words = range(whole.index(b"ggml.tokens") + 40, whole.index(b"add_bos_token") - 40)
    random = np.random.default_rng(0)
    for at in random.choice([i for i in range(end) if i not in words], 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            load_outline(str(path))
        except ValueError as error:
            assert str(error).startswith("backbone ") and "\n" not in str(error)
    assert kept(cache) == []


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    more = {"rope_factors_long.weight": np.ones(32, np.float32)}
    write_gguf(path, tiny("llama"), more=more)
    assert "'rope_factors_long.weight'" in refusal(path)
    write_gguf(path, tiny("llama"), without=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match="lack 1 tensors"):
        load_backbone(path)


def test_what_is_no_gguf_file_is_one_sentence(tmp_path):
    path = tmp_path / "m.gguf"
    assert "no such file" in refusal(path)
    path.write_bytes(b"PK\x03\x04 and more")
    assert "expected a model directory or a GGUF file" in refusal(path)


def test_a_verb_refuses_a_damaged_file_with_an_exit_code(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    words = ["data", str(tmp_path / "run"), "--world", "--model", str(path)]
    path.write_bytes(path.read_bytes()[:-100])
    found = CliRunner().invoke(main, words)
    assert (found.exit_code, "Traceback" in found.output) == (1, False)
    assert "cut short" in found.output
    path.write_bytes(b"PK")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2 and "GGUF file" in found.output


def test_two_processes_at_once_do_not_harm_each_other(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    code = "from beatrice.extract.backbone.gguf import unpacked; import sys; "
    code += "print(unpacked(sys.argv[1]))"
    words = [sys.executable, "-c", code, str(path)]
    both = [
        subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum("unpack m.gguf: done" in stderr for _, stderr in said) == 1
    assert len(kept(cache)) == 1


def test_an_interrupted_unpacking_leaves_nothing(tmp_path, cache):
    class Interrupted(Weights):
        def read(self):
            yield next(super().read())
            raise KeyboardInterrupt

    header = read_header(write_gguf(tmp_path / "m.gguf", tiny("llama")))
    killed = cache / ".model.left"
    killed.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        _unpack(Interrupted(header, config_of(header)), header, cache / "model")
    assert kept(cache) == []

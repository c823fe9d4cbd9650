"""What cannot be read is refused before anything is answered, with the reason."""

import shutil

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beatrice.benchmarks.bench.tiny_models import FAMILIES, tiny_model
from beatrice.extract.backbone.loading import Backbone, Outline, load_outline
from beatrice.extract.backbone.twin import narrow_twin
from beatrice.extract.signals.parity import require_readable
from beatrice.extract.signals.reader import SignalReader
from tests.extract.backbone.test_backbone import edit_config, save_tokenizer
from tests.extract.signals.families import representatives
from tests.extract.small_run import beatrice
from tests.extract.test_doctor import doctor


def save(model, path):
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def doge(tmp_path_factory):
    """Its blocks multiply the stream before they add, which only a forward shows."""
    model = narrow_twin(CONFIG_MAPPING["doge"]())
    return save(model, tmp_path_factory.mktemp("doge") / "model")


def test_the_doctor_and_a_new_run_refuse_what_cannot_be_read(doge, tmp_path):
    found = doctor("--model", doge, code=1)["model"]
    assert found["status"] == "problem"
    assert "contributions miss the change of the residual stream" in found["text"]
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
def test_no_family_that_is_read_is_refused_by_its_twin(family):
    config = tiny_model(family).config.get_text_config()
    require_readable(family, Outline(None, config, None, None))
    narrow_twin(config)  # so that the twin was asked


def test_a_twin_too_short_for_an_attention_layer_refuses_nothing():
    config = CONFIG_MAPPING["jamba"]()
    assert config.attn_layer_offset == 4  # of a twin's four layers none
    with pytest.raises(ValueError, match="found no attention"):
        SignalReader(Backbone.from_model(narrow_twin(config)))
    require_readable("jamba", Outline(None, config, None, None))


def test_gemma_3n_is_refused_for_its_streams():
    model = narrow_twin(CONFIG_MAPPING["gemma3n_text"]())
    with pytest.raises(ValueError, match="4 residual streams .altup_num_inputs"):
        Backbone.from_model(model)


def test_llm_int8_is_refused_for_what_it_does_to_a_batch(tmp_path):
    path = save(tiny_model("llama"), tmp_path)
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    edit_config(path, quantization_config=eight)
    with pytest.raises(ValueError, match="LLM.int8.*would depend on its batch"):
        load_outline(str(path))

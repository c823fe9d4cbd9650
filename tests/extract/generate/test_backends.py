"""The options of a backend: what they default to, and what of them is in the keys."""

import dataclasses
import json

import pytest

from beatrice.extract.backbone.names import default_dtype
from beatrice.extract.generate.answers import (
    answer_identity,
    load_tokenizer_only,
    record_backend,
)
from beatrice.extract.generate.generator import (
    GeneratorPrompt,
    SamplingConfig,
    reply_key,
    tokenizer_identity,
)
from beatrice.extract.generate.options import BackendOptions, open_generator
from beatrice.extract.generate.requests import ANSWER_PRESETS
from beatrice.extract.run.directory import RunDir, read_manifest
from tests.extract.datasets import published as pub
from tests.extract.small_run import beatrice, smoke

SERVED = BackendOptions(
    server="http://x/v1", revision="r", concurrency=1, retries=0, timeout=1.0
)


def test_weights_are_bfloat16_on_a_gpu_and_exact_elsewhere():
    found = {device: default_dtype(device) for device in ("cuda", "cuda:3", "cpu")}
    assert found == {"cuda": "bfloat16", "cuda:3": "bfloat16", "cpu": "float32"}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ((), "float32"),
        (("--device", "cuda"), "bfloat16"),
        (("--device", "cuda", "--model-dtype", "float32"), "float32"),
        (("--model-dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_a_runs_manifest_says_how_its_weights_are_held(tmp_path, options, dtype):
    path = pub.write_array(tmp_path / "h.json", [pub.hotpot(i) for i in range(14)])
    line = ("data", tmp_path / "run", "--dev", f"hotpotqa={path}", "--n-evaluation", 7)
    beatrice(*line, "--model", "embedded", "--preset", "smoke", *options)
    assert read_manifest(tmp_path / "run")["sections"]["backbone"]["dtype"] == dtype


def test_a_local_backend_is_loaded_as_its_device_wants():
    local = dataclasses.replace(SERVED, server=None)
    with open_generator("embedded", local) as generator:
        assert generator.identity["dtype"] == "float32"
    half = dataclasses.replace(local, model_dtype="bfloat16")
    with open_generator("embedded", half) as generator:
        assert generator.identity["dtype"] == "bfloat16"


def test_a_server_of_the_runs_backbone_has_its_tokenizer_in_the_keys(tmp_path):
    """Thrown in: another template, another tokenizer, another stated dtype."""
    with RunDir.open(tmp_path / "run", smoke()) as run:
        words, _ = load_tokenizer_only(run)

    def key(options=SERVED, tokenizer=words.tokenizer):
        with open_generator("m", options, tokenizer=tokenizer) as generator:
            prompt = GeneratorPrompt(text="p")
            return reply_key(generator.identity, prompt, SamplingConfig())

    keys = [key(), key(tokenizer=None)]
    keys.append(key(dataclasses.replace(SERVED, served_dtype="bfloat16")))
    keys.append(key(dataclasses.replace(SERVED, revision="s")))
    assert key() == keys[0]
    words.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    keys.append(key())
    words.tokenizer.add_tokens(["<another>"])
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert None not in tokenizer_identity(words.tokenizer).values()


def test_every_ingredient_of_an_answer_is_in_the_answers_key(tmp_path):
    config = ANSWER_PRESETS["smoke"]
    run = RunDir(tmp_path)
    backend = {"backend": "transformers", "revision": "r", "dtype": "float32"}

    def identity(config=config, **fields):
        return backend | fields | answer_identity(config)

    record_backend(run.answers, identity())
    record_backend(run.answers, identity())  # the same again
    asking, longest = config.prompt, config.generation
    others = [
        identity(revision="s"),
        identity(dtype="bfloat16"),
        identity(
            dataclasses.replace(
                config, generation=dataclasses.replace(longest, max_new_tokens=3)
            )
        ),
        *(
            identity(
                dataclasses.replace(config, prompt=dataclasses.replace(asking, **other))
            )
            for other in (
                {"template": "paper"},
                {"chat": True},
                {"overlong": "drop-passages"},
                {"window": 99},
            )
        ),
    ]
    others.append(identity() | {"schema": identity()["schema"] + 1})
    for other in others:
        with pytest.raises(ValueError, match="start another run directory"):
            record_backend(run.answers, other)


def test_answers_from_before_the_key_had_a_schema_are_continued(tmp_path):
    run = RunDir(tmp_path)
    identity = {"backend": "b"} | answer_identity(ANSWER_PRESETS["smoke"])
    record_backend(run.answers, identity)
    path = run.answers / "backend.json"
    found = json.loads(path.read_text())
    assert found.pop("schema") == 1
    path.write_text(json.dumps(found))
    record_backend(run.answers, identity)

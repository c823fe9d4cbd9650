"""What is kept is chosen on the command line, recorded in the run, and not changed."""

import dataclasses
import json

import click
import pytest
from benchmarks.stages.configurations import config_from_manifest
from benchmarks.stages.presets import make_config
from benchmarks.verbs.keepoptions import keep_as_asked, keep_options, take_kept
from benchmarks.verbs.opening import config_of
from click.testing import CliRunner

from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from extract.store.config import StoreConfig, store_config_of
from extract.store.families import SHORT_NAMES


@click.command()
@keep_options
def verb(**options):
    print(json.dumps(take_kept(options)))


def given(*words):
    done = CliRunner().invoke(verb, words)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def made(path, **kept):
    with RunDir.open(path, make_config("smoke", kept=StoreConfig(**kept)).as_json()):
        return path


def test_options_become_fields_and_those_not_given_are_left_out():
    assert given() == {}
    assert given("--hidden-layers", "16,8") == {"hidden_layers": [8, 16]}
    assert given("--hidden-layers", "all") == {"hidden_layers": None}
    words = "--dtype int8 --scalars bf16 --hidden-spans answer".split()
    assert given(*words) == {
        "dtype": "int8",
        "scalars": "bfloat16",
        "hidden_spans": "answer",
    }


def test_every_type_has_its_name_on_the_command_line():
    (option,) = (p for p in verb.params if p.name == "dtype")
    assert list(option.type.choices) == list(SHORT_NAMES)
    for short, name in SHORT_NAMES.items():
        assert given("--dtype", short) == {"dtype": name}


@pytest.mark.parametrize(
    "words", ["--hidden-layers 8;16", "--dtype fp8", "--hidden-spans question"]
)
def test_a_wrong_choice_is_wrong_usage(words):
    assert CliRunner().invoke(verb, words.split()).exit_code == 2


def test_a_choice_at_extraction_is_recorded_and_serves_the_later_verbs(tmp_path):
    run = made(tmp_path / "run")
    config = keep_as_asked(run, {"dtype": "int8", "hidden_layers": (2, 4)})
    assert config_of(run) == config
    assert config.extract.dtype == "int8"
    assert config.extract.hidden_layers == (2, 4)
    before = (run / "manifest.json").read_bytes()
    assert keep_as_asked(run, {}) == config  # the same line without options goes on
    assert keep_as_asked(run, {"dtype": "int8"}) == config
    assert (run / "manifest.json").read_bytes() == before


def test_nothing_else_of_a_run_changes_with_what_it_keeps(tmp_path):
    run = made(tmp_path / "run")
    before = read_manifest(run)
    keep_as_asked(run, {"hidden_spans": "answer"})
    after = read_manifest(run)
    assert after["config"]["extract"].pop("hidden_spans") == "answer"
    assert before["config"]["extract"].pop("hidden_spans") == "all"
    assert after == before


def test_features_that_are_there_are_not_mixed_with_another_choice(tmp_path):
    run = made(tmp_path / "run")
    store = run / "features" / "with_context"
    store.mkdir(parents=True)
    (store / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="as bfloat16.*asked for .* as int8.*delete"):
        keep_as_asked(run, {"dtype": "int8"})
    assert keep_as_asked(run, {"dtype": "bfloat16"}) == config_of(run)


def test_a_run_that_is_in_use_is_left_as_it_is(tmp_path):
    run = made(tmp_path / "run")
    before = (run / "manifest.json").read_bytes()
    with RunDir.open(run, config_of(run).as_json()):
        with pytest.raises(ValueError, match="in use by process"):
            keep_as_asked(run, {"dtype": "int8"})
    assert (run / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("preset", ["smoke", "demo", "paper"])
def test_a_configuration_survives_the_manifest(preset):
    kept = StoreConfig(hidden_layers=(1, 5), dtype="float16", scalars="bfloat16")
    config = make_config(preset, kept=kept)
    assert store_config_of(dataclasses.asdict(config.extract)) == kept
    assert config_from_manifest(json.loads(json.dumps(config.as_json()))) == config

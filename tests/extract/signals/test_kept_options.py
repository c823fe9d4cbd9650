"""What is kept is chosen on the command line, recorded in the run, and not changed."""

import json

import click
import pytest
from click.testing import CliRunner

from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.verbs import options
from beatrice.extract.signals.commands import KeptOptions
from beatrice.extract.signals.extract import ExtractConfig, extract_config, settle_kept
from beatrice.extract.store.families import SHORT_NAMES
from tests.extract.small_run import beatrice, smoke


@click.command()
@options(kept=KeptOptions)
def verb(kept):
    print(json.dumps(kept.fields()))


def given(*words):
    done = CliRunner().invoke(verb, words)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", smoke(extract=ExtractConfig())) as run:
        yield run


def test_options_become_fields_and_those_not_given_are_left_out():
    assert given() == {}
    assert given("--hidden-layers", "16,8") == {"hidden_layers": [8, 16]}
    assert given("--hidden-layers", "all") == {"hidden_layers": None}
    rare = "--set scalars=bf16 --set answer_span=literal"
    assert given(*f"--dtype int8 --hidden-spans answer {rare}".split()) == {
        "dtype": "int8",
        "scalars": "bfloat16",
        "hidden_spans": "answer",
        "answer_span": "literal",
    }


def test_every_type_has_its_name_on_the_command_line():
    (option,) = (p for p in verb.params if p.name == "dtype")
    assert list(option.type.choices) == list(SHORT_NAMES)
    for short, name in SHORT_NAMES.items():
        assert given("--dtype", short) == {"dtype": name}


@pytest.mark.parametrize(
    "words",
    [
        "--hidden-layers 8;16",
        "--dtype fp8",
        "--hidden-spans question",
        "--set answer_span=sideways",
        "--set answer_spam=literal",
        "--set scalars=bf16 --set scalars=fp32",
        "--set scalars",
    ],
)
def test_a_wrong_choice_is_wrong_usage(words):
    assert CliRunner().invoke(verb, words.split()).exit_code == 2


def test_a_choice_at_extraction_is_recorded_and_serves_the_later_verbs(run):
    config = settle_kept(run, {"dtype": "int8", "hidden_layers": (2, 4)})
    assert (config.dtype, config.hidden_layers) == ("int8", (2, 4))
    assert extract_config(run) == config
    before = run.manifest.read_bytes()
    assert settle_kept(run, {}) == config  # the same line without options goes on
    assert settle_kept(run, {"dtype": "int8"}) == config
    assert run.manifest.read_bytes() == before


def test_nothing_else_of_a_run_changes_with_what_it_keeps(run):
    before = read_manifest(run.path)
    settle_kept(run, {"hidden_spans": "answer"})
    after = read_manifest(run.path)
    assert after["sections"]["extract"].pop("hidden_spans") == "answer"
    assert before["sections"]["extract"].pop("hidden_spans") == "all"
    assert after == before


def test_features_that_are_there_are_not_mixed_with_another_choice(run):
    store = run.features("with_context")
    store.mkdir(parents=True)
    (store / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="as bfloat16.*asked for .* as int8.*delete"):
        settle_kept(run, {"dtype": "int8"})
    assert settle_kept(run, {"dtype": "bfloat16"}) == extract_config(run)


def test_a_run_that_is_in_use_is_left_as_it_is(run):
    before = run.manifest.read_bytes()
    done = beatrice("extract", run.path, "--dtype", "int8", code=1)
    assert "in use by process" in done.stderr
    assert run.manifest.read_bytes() == before


def test_a_run_that_is_made_says_what_it_will_keep(tmp_path):
    words = "--hidden-layers 4 --dtype int8 --set answer_span=literal".split()
    beatrice("data", tmp_path / "run", "--world", "--preset", "smoke", *words)
    config = RunDir(tmp_path / "run").section("extract", ExtractConfig)
    assert (config.hidden_layers, config.dtype) == ((4,), "int8")
    assert config.answer_span == "literal"

"""Which signals are kept: chosen, recorded in the run, and stored as chosen."""

import dataclasses
import json
import threading
from typing import get_args

import click
import numpy as np
import pytest
from click.testing import CliRunner

from beatrice.extract.commands import STORED_TYPES, StorageOptions
from beatrice.extract.run.directory import RunDir, read_manifest
from beatrice.extract.run.verbs import options
from beatrice.extract.signals.extract import (
    ExtractConfig,
    extract_config,
    record_storage,
)
from beatrice.extract.store.spec import (
    Dtype,
    StoreConfig,
    as_written,
    parse_layers,
    stored_bytes,
)
from beatrice.extract.store.store import done_ranges, open_store, read_family, verify
from tests.extract.signals.readers import (
    SMALL,
    WaveReader,
    sequence_of_ids,
    sequences_of,
    write_store,
)
from tests.extract.small_run import beatrice, smoke


@pytest.fixture
def memory(tmp_path):
    return f"memory://{tmp_path.name}"


def extracted(where, reader=None, **fields):
    config = dataclasses.replace(SMALL, **fields)
    write_store(where, sequences_of(), reader or WaveReader(), config)
    return open_store(where)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize("spans", ["all", "answer"])
def test_a_store_returns_values_in_its_type_for_its_spans(memory, dtype, spans):
    store = extracted(memory, dtype=dtype, hidden_spans=spans, scalars="bfloat16")
    hidden, prob = read_family(store, "hidden"), read_family(store, "prob")
    for i, item in enumerate(sequences_of()):
        reading = WaveReader().read_ids(item.ids)
        first, last = item.spans[2] if spans == "answer" else (0, len(item.ids))
        assert hidden.first_tokens[i] == first
        written = as_written(reading.hidden[first:last], dtype)
        np.testing.assert_array_equal(hidden.example(i).astype(np.float32), written)
        written = as_written(reading.prob, "bfloat16")
        np.testing.assert_array_equal(prob.example(i).astype(np.float32), written)
    assert verify(store) == []


@pytest.mark.parametrize("spans", ["all", "answer"])
def test_worked_examples_before_the_spans_have_no_rows(memory, spans):
    ids = np.arange(80)
    with_examples = [(48, 48), (48, 70), (70, 79)]
    without = [(47, 60), (60, 70), (70, 80)]
    sequences = [sequence_of_ids(ids, item) for item in (with_examples, without)]
    reader = WaveReader()
    config = ExtractConfig(hidden_spans=spans, dtype="float32")
    write_store(memory, sequences, reader, config)
    store, every = open_store(memory), reader.read_ids(ids)
    assert verify(store) == []
    prob, hidden = read_family(store, "prob"), read_family(store, "hidden")
    assert prob.first_tokens.tolist() == [48, 0]
    np.testing.assert_array_equal(prob.example(0), every.prob[48:])
    np.testing.assert_array_equal(prob.example(1), every.prob)
    first, last = (70, 79) if spans == "answer" else (48, 80)
    np.testing.assert_array_equal(hidden.example(0), every.hidden[first:last])
    answers = read_family(store, "prob", span=2)
    np.testing.assert_array_equal(answers.example(0), every.prob[70:79])


@pytest.mark.parametrize("spans", ["all", "answer"])
def test_one_span_of_one_layer_is_that_part_of_all_values(memory, spans):
    store = extracted(memory, dtype="int8", hidden_spans=spans)
    every = read_family(store, "hidden")
    chosen = [30, 3, 7, 15]
    answers = read_family(store, "hidden", chosen, layer=5, span=2)
    for i, example in enumerate(chosen):
        first, last = store.spec.spans[example, 2] - every.first_tokens[example]
        np.testing.assert_array_equal(
            answers.example(i), every.example(example)[first:last, 1]
        )
    layer = read_family(store, "hidden", layer=2)
    np.testing.assert_array_equal(layer.values, every.values[:, 0])


def test_a_span_that_was_not_kept_is_refused(memory):
    store = extracted(memory, hidden_spans="answer")
    with pytest.raises(ValueError, match="only for the answer span.*hidden_spans=all"):
        read_family(store, "hidden", span=1)
    assert len(read_family(store, "prob", span=1).values)


def test_half_precision_overflow_is_counted_over_the_range_and_refused(memory):
    reader = WaveReader(scale=65530.0)  # only cosines near one overflow
    with pytest.raises(ValueError, match=r"q0.* in range 0: \d+\).*: \d+ overflow, 0"):
        extracted(memory, reader, dtype="float16")
    assert 0 not in done_ranges(open_store(memory))
    wide = extracted(f"{memory}-wide", reader, dtype="bfloat16")
    assert verify(wide) == []


def test_a_store_with_another_choice_is_refused(memory):
    extracted(memory)
    others = [{"dtype": "int8"}, {"dtype": "float16"}, {"hidden_spans": "answer"}]
    for other in (*others, {"scalars": "bfloat16"}):
        with pytest.raises(ValueError, match="holds another store: .*families"):
            extracted(memory, **other)


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": "int8"}, {"hidden_spans": "answer", "scalars": "bfloat16"}]
)
def test_forecast_bytes_are_those_of_the_files_within_a_percent(tmp_path, fields):
    ids = np.arange(32)
    spans = [(0, 8), (8, 16), (16, 32)]
    sequences = [sequence_of_ids(ids + i, spans) for i in range(256)]
    reader = WaveReader(width=512)  # as wide as a small model
    config = ExtractConfig(rows_per_shard=4096, **fields)
    write_store(tmp_path, sequences, reader, config)
    names = open_store(tmp_path).spec.families
    files = [path for name in names for path in (tmp_path / name).rglob("*")]
    on_disk = sum(path.stat().st_size for path in files if path.is_file())
    forecast = stored_bytes(
        {"hidden": (7, 512), "prob": (5,)},
        StoreConfig(hidden_layers=(2, 5), **fields),
        n_tokens=256 * 32,
        n_answer=256 * 16,
    )
    n_bytes = sum(forecast.values())
    assert n_bytes <= on_disk <= 1.01 * n_bytes


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", None), ("16", (16,)), ("24,8, 16", (8, 16, 24)), ("0", (0,))],
)
def test_a_typed_list_of_layers_is_parsed(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "8,", "-1", "8;16", "every", "1.5", "8,8", "²"])
def test_text_that_is_not_a_list_of_layers_is_refused(text):
    with pytest.raises(ValueError, match="layer"):
        parse_layers(text)


WRONG = {"dtype": "fp8", "hidden_spans": "question", "scalars": "float16"}
WRONG["answer_span"] = "whole"


@pytest.mark.parametrize("name", WRONG)
def test_an_unknown_choice_is_refused(name):
    message = f"expected one of .*, found '{WRONG[name]}'"
    with pytest.raises(ValueError, match=message):
        StoreConfig(**{name: WRONG[name]})


@pytest.mark.parametrize("layers", [8, "all", ("8",)])
def test_layers_that_are_not_a_list_of_numbers_are_refused(layers):
    with pytest.raises(ValueError, match="hidden_layers: expected numbers"):
        ExtractConfig(hidden_layers=layers)


@click.command()
@options(storage=StorageOptions)
def verb(storage):
    print(json.dumps(storage.fields()))


def given(*words, **defaults):
    done = CliRunner().invoke(verb, words, default_map=defaults)
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
    rare = "dtype=int8 hidden_spans=answer scalars=bf16 answer_span=literal".split()
    assert given(*(word for text in rare for word in ("--set", text))) == {
        "dtype": "int8",
        "scalars": "bfloat16",
        "hidden_spans": "answer",
        "answer_span": "literal",
    }


def test_a_verbs_own_defaults_also_apply_to_rare_options():
    assert given(hidden_spans="answer") == {"hidden_spans": "answer"}
    line = "--set", "hidden_spans=all", "--set", "dtype=fp32"
    assert given(*line, hidden_spans="answer", hidden_layers="4") == {
        "hidden_layers": [4],
        "hidden_spans": "all",
        "dtype": "float32",
    }


def test_every_type_has_its_name_on_the_command_line():
    assert sorted(STORED_TYPES.values()) == sorted(get_args(Dtype))
    for short, name in STORED_TYPES.items():
        assert given("--set", f"dtype={short}") == {"dtype": name}


def test_an_unknown_option_or_value_is_wrong_usage():
    wrong = "dtype=fp8 hidden_spans=question answer_span=sideways answer_spam=literal"
    lines = [["--set", text] for text in (*wrong.split(), "scalars")]
    lines.append("--set scalars=bf16 --set scalars=fp32".split())
    for line in (*lines, ["--hidden-layers", "8;16"]):
        assert CliRunner().invoke(verb, line).exit_code == 2, line


def test_a_choice_at_extraction_is_recorded_and_used_by_later_verbs(run):
    config = record_storage(run, {"dtype": "int8", "hidden_layers": (2, 4)})
    assert (config.dtype, config.hidden_layers) == ("int8", (2, 4))
    assert extract_config(run) == config
    before = run.manifest.read_bytes()
    assert record_storage(run, {}) == config  # the verb again, without options
    assert record_storage(run, {"dtype": "int8"}) == config
    assert run.manifest.read_bytes() == before


def test_a_worker_records_its_choice_after_waiting_for_the_runs_holder(run):
    joined = threading.Timer(1.0, run.close)
    joined.start()
    line = ("extract", run.path, "--set", "dtype=int8", "--shard", "0/2")
    assert "examples.jsonl is missing" in beatrice(*line, code=1).output
    assert extract_config(run).dtype == "int8"


def test_choosing_what_to_keep_changes_nothing_else_in_a_run(run):
    before = read_manifest(run.path)
    record_storage(run, {"hidden_spans": "answer"})
    after = read_manifest(run.path)
    assert after["sections"]["extract"].pop("hidden_spans") == "answer"
    assert before["sections"]["extract"].pop("hidden_spans") == "all"
    assert after == before


def test_existing_features_are_not_mixed_with_another_choice(run):
    store = run.features("with_context")
    store.mkdir(parents=True)
    (store / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="as bfloat16.*asked for .* as int8.*delete"):
        record_storage(run, {"dtype": "int8"})
    assert record_storage(run, {"dtype": "bfloat16"}) == extract_config(run)


def test_a_new_run_records_what_it_will_keep(tmp_path):
    words = "--hidden-layers 4 --set dtype=int8 --set answer_span=literal".split()
    beatrice("data", tmp_path / "run", "--world", "--preset", "smoke", *words)
    config = RunDir(tmp_path / "run").section("extract", ExtractConfig)
    assert (config.hidden_layers, config.dtype) == ((4,), "int8")
    assert config.answer_span == "literal"

"""Signals that wait between `answer` and `extract`."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from beatrice.extract import engines
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.generate.answers import answer_stage
from beatrice.extract.generate.prompts import (
    ANSWER_PRESETS,
    GenerationConfig,
    make_requests,
)
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.console import Progress
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import run_stage
from beatrice.extract.signals.extract import EXTRACT_PRESETS, extract_stage
from beatrice.extract.signals.written import (
    WrittenSignals,
    save_batch,
    waiting_config,
)
from beatrice.extract.store.spec import family_bytes, stored_families
from beatrice.extract.store.store import open_store, read_family, verify
from tests.extract import small_run
from tests.extract.signals.readers import files_under
from tests.extract.small_run import beatrice, questions
from tests.records import an_answer, flip_bit

SMALL_BATCHES = dataclasses.replace(
    ANSWER_PRESETS["smoke"],
    generation=GenerationConfig(max_new_tokens=10, tokens_per_batch=600),
)
EXTRACT = dataclasses.replace(EXTRACT_PRESETS["smoke"], rows_per_shard=256)


class Killed(BaseException):
    """Raised where a process would be killed."""


def dying(n_batches, *, is_saved):
    """Return an `answer` stage killed in a batch, whose signals are saved or not."""

    def open_engine(run, config):
        engine = engines.open_reading(run, config)

        def reading(requests):
            generator, n_done = engine.reading(requests), iter(range(1, 100))

            def on_batch(answers, signals):
                is_last = next(n_done) == n_batches
                if not is_last or is_saved:
                    generator.on_batch(answers, signals)
                if is_last:
                    raise Killed

            return dataclasses.replace(generator, on_batch=on_batch)

        return engine._replace(reading=reading)

    return answer_stage(open_engine)


def make_run(path, **sections):
    rows = [msgspec.structs.replace(e, rewritten=()) for e in questions(10, 5, 2)]
    sections = {"answer": SMALL_BATCHES, "extract": EXTRACT, **sections}
    return small_run.make_run(path, rows, **sections).path


@pytest.fixture(scope="module")
def unanswered(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("unanswered") / "run")


@pytest.fixture(scope="module")
def answered(unanswered, tmp_path_factory):
    path = shutil.copytree(unanswered, tmp_path_factory.mktemp("answered") / "run")
    beatrice("answer", path)
    return path


@pytest.fixture(scope="module")
def whole(answered, tmp_path_factory):
    path = shutil.copytree(answered, tmp_path_factory.mktemp("whole") / "run")
    notes = beatrice("extract", path).stderr
    assert "answers were read while they were written" in notes
    assert "; 0 are read again" in notes
    assert not (path / "written").exists()
    return path


@pytest.fixture
def run(answered, tmp_path):
    return shutil.copytree(answered, tmp_path / "run")


def test_a_run_killed_in_batches_has_the_same_signals_as_one_that_was_not(
    unanswered, whole, tmp_path
):
    path = shutil.copytree(unanswered, tmp_path / "run")
    for n_batches, is_saved in ((3, False), (2, True)):
        with RunDir.open(path) as opened, pytest.raises(Killed):
            run_stage(dying(n_batches, is_saved=is_saved), opened, Progress())
    with RunDir.open(path, share=Share(1, 2)) as opened, pytest.raises(Killed):
        run_stage(dying(1, is_saved=True), opened, Progress())
    beatrice("answer", path, "--shard", "0/2")
    beatrice("answer", path, "--shard", "1/2")
    beatrice("extract", path)
    for folder in ("answers", "features"):
        assert files_under(path / folder) == files_under(whole / folder)


def test_signals_larger_than_the_free_disk_are_refused_before_the_first_answer(
    unanswered, run
):
    opened = RunDir(unanswered)
    engine = engines.open_reading(opened, SMALL_BATCHES)
    listed = make_requests(
        read_examples(opened), engine.model, SMALL_BATCHES.prompt, 10, SETTINGS
    )
    shapes = engine.reading(listed.requests).reader.shapes
    # They wait next to the store until it is complete: one copy would fit, two do not.
    families = stored_families(shapes, EXTRACT)
    per_token = sum(family_bytes(families, n_tokens=1, n_answer=1).values())
    n_tokens = int(0.75 * shutil.disk_usage(unanswered).free / per_token)
    prompt = dataclasses.replace(listed.requests[0].prompt, ids=range(n_tokens))
    huge = dataclasses.replace(listed.requests[0], prompt=prompt)
    with pytest.raises(ValueError, match=r"are free at .* --no-read, or make the run"):
        engine.reading([huge])
    eight_bits = dataclasses.replace(EXTRACT, dtype="int8")
    assert waiting_config(eight_bits).dtype == "float32"
    shapes = {"prob": (5,), "resid": (8,), "attn": (2, 2, 2, 1)}
    reader = SimpleNamespace(shapes=shapes | {"hidden": (1 << 20, 1 << 30)})
    with RunDir.open(run) as opened, pytest.raises(ValueError, match="keep less: extr"):
        run_stage(extract_stage(lambda *_: reader), opened, Progress())


def families(path, setting):
    store = open_store(path / "features" / setting)
    return store.spec, {
        name: np.asarray(read_family(store, name).values, np.float32)
        for name in store.spec.families
    }


def test_signals_of_a_second_pass_are_equal_and_marked(unanswered, whole, run):
    """With the file of one batch deleted, and with no files at all."""
    min((run / "written").iterdir()).unlink()
    beatrice("extract", run)
    alone = shutil.copytree(unanswered, run.with_name("alone"))
    beatrice("answer", alone, "--no-read")
    assert not (alone / "written").exists()
    beatrice("extract", alone)
    name = "answers/answers.jsonl"
    assert (alone / name).read_bytes() == (whole / name).read_bytes()
    n_written = {path: 0 for path in (whole, run, alone)}
    for setting in SETTINGS:
        _, expected = families(whole, setting)
        for path in n_written:
            spec, values = families(path, setting)
            n_written[path] += int(spec.is_written.sum())
            for family, wanted in expected.items():
                error = np.linalg.norm(values[family] - wanted)
                assert error < 1e-3 * np.linalg.norm(wanted), family
        assert families(alone, setting)[0].path == "teacher_forced"
        assert families(whole, setting)[0].path == "decode"
    n_all = sum(len(families(whole, s)[0].keys) for s in SETTINGS)
    assert n_written[whole] == n_all > n_written[run] > n_written[alone] == 0


@pytest.mark.parametrize(
    ("options", "is_enough"),
    [
        ("--hidden-layers 1,4", True),
        ("--set hidden_spans=answer", True),
        ("--set dtype=fp32", False),
        ("--set answer_span=literal", False),
    ],
)
def test_narrower_choices_use_waiting_signals_and_wider_ones_read_again(
    options, is_enough, whole, run
):
    notes = beatrice("extract", run, *options.split()).stderr
    assert ("; 0 are read again" in notes) == is_enough
    spec, values = families(run, "with_context")
    _, every = families(whole, "with_context")
    assert (spec.path == "decode") == is_enough
    if "layers" in options:
        np.testing.assert_array_equal(values["hidden"], every["hidden"][:, [1, 4]])


def test_answer_and_extract_read_the_attention_that_the_run_chose(tmp_path):
    backbone = BackboneConfig(attention_layers="full")
    path = make_run(tmp_path / "run", backbone=backbone)
    beatrice("answer", path)
    assert "; 0 are read again" in beatrice("extract", path).stderr
    spec, _ = families(path, "closed_book")
    assert spec.fingerprint["attention_layers"] == "full"


def save_one(folder, config, entries, scale=1, i=0):
    """Save the signals of an answer, with states of these layers."""
    shapes = {"prob": (5,), "resid": (8,), "attn": (2, 2, 2, 1)}
    answer = an_answer(example_id=f"q{i}", prompt_ids=(1, 2 + i), stop_id=2)
    reader = SimpleNamespace(hidden_layers=entries, hidden_spans="all")
    reader.fingerprint = {"model": "m"}
    reader.shapes = shapes | {"hidden": (len(entries), 1)}
    values = {name: np.zeros((3, *shape)) for name, shape in shapes.items()}
    hidden = scale * np.tile(np.float32(entries)[:, None], (3, 1, 1))
    save_batch(
        folder, reader, config, [answer], [SimpleNamespace(**values, hidden=hidden)]
    )


@pytest.mark.parametrize("layers", [[(0, 1, 2), (2,)], [(2,), (0, 1, 2)]])
def test_layers_chosen_between_two_starts_apply_to_every_answer(layers, tmp_path):
    wanted = dataclasses.replace(EXTRACT, hidden_layers=(2,))
    for i, entries in enumerate(layers):
        save_one(tmp_path, wanted, entries, i=i)
    signals = WrittenSignals.open(tmp_path, {"model": "m"}, wanted)
    assert [np.unique(of_answer.hidden) for of_answer in signals.values()] == [2, 2]


def test_states_too_large_for_their_dtype_are_refused_while_they_are_read(tmp_path):
    half = dataclasses.replace(EXTRACT, dtype="float16")
    with pytest.raises(ValueError, match="3 values of .*'hidden'.*float16.*=bf16"):
        save_one(tmp_path, half, (0, 2), scale=4e4)
    assert not [*tmp_path.iterdir()]
    save_one(tmp_path, half, (0, 2), scale=3e4)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_states_of_few_bits_are_rounded_once_and_scalars_not_at_all(tmp_path, dtype):
    extract = dataclasses.replace(EXTRACT, dtype=dtype)
    path = make_run(tmp_path / "run", extract=extract)
    beatrice("answer", path)
    again = shutil.copytree(path, tmp_path / "again")
    shutil.rmtree(again / "written")
    for each in (path, again):
        beatrice("extract", each)
    (spec, values), (_, wanted) = (families(p, "closed_book") for p in (path, again))
    assert spec.path == "decode"
    sizes = np.abs(wanted["hidden"])
    largest = sizes.max(axis=-1, keepdims=True)  # sets the rounding of the whole state
    step = largest / 127 if dtype == "int8" else sizes / 128
    difference = np.abs(values["hidden"] - wanted["hidden"])
    assert (difference <= 1.01 * step + 1e-5 * np.maximum(largest, 1)).all()
    for name in ("prob", "resid", "attn"):  # bfloat16 would be off by 1e-3 or more
        np.testing.assert_allclose(values[name], wanted[name], rtol=1e-4, atol=5e-5)


def test_signals_deleted_as_a_message_advises_are_read_again(run):
    waiting = min((run / "written").iterdir())
    flip_bit(waiting)
    message = beatrice("extract", run, code=1).stderr
    assert f"{waiting} is damaged" in message and "also the feature store" in message
    waiting.unlink()
    shutil.rmtree(run / "features")
    beatrice("extract", run)
    store = open_store(run / "features" / "closed_book")
    flip_bit(run / "features" / "closed_book" / store.shard_keys(0, "resid")[0], 99)
    (problem,) = verify(open_store(store.url))
    assert f"delete {store.url} and run extract again" in problem
    shutil.rmtree(run / "features" / "closed_book")
    message = beatrice("extract", run, code=1).stderr  # the other store, too
    assert f"{run}/features/with_context/ holds another store" in message
    assert "or delete it to extract again" in message
    shutil.rmtree(run / "features" / "with_context")
    beatrice("extract", run)
    assert "every checksum holds" in beatrice("doctor", run, "--verify").stdout


def fingerprint_of(path):
    with safetensors.safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["about"])["fingerprint"]


def test_whether_an_answer_waits_is_known_without_reading_its_signals(run):
    path = min((run / "written").iterdir())
    signals = WrittenSignals.open(run / "written", fingerprint_of(path), EXTRACT)
    flip_bit(path)
    assert all(key in signals for key in signals.places)
    with pytest.raises(ValueError, match="is damaged"):
        list(signals.values())


@pytest.mark.parametrize("about", ["[" * 10**5, "[]", '{"version": 2}', "{}", None])
def test_a_file_with_wrong_metadata_or_cut_short_is_named_as_damaged(tmp_path, about):
    path = tmp_path / "0.safetensors"
    safetensors.numpy.save_file({}, path, {"about": about or "{}"})
    if about is None:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="0.safetensors is damaged"):
        WrittenSignals.open(tmp_path, {"model": "m"}, EXTRACT)


def test_signals_of_other_weights_spans_or_versions_do_not_count(run, tmp_path):
    folder = run / "written"
    fingerprint = fingerprint_of(min(folder.iterdir()))
    assert WrittenSignals.open(folder, fingerprint, EXTRACT)
    other = fingerprint | {"model": "other"}
    assert WrittenSignals.open(folder, other, EXTRACT) is None
    other = dataclasses.replace(EXTRACT, answer_span="literal")
    assert WrittenSignals.open(folder, fingerprint, other) is None
    about = {"about": json.dumps({"version": 1, "keys": ["0"]})}
    safetensors.numpy.save_file({}, tmp_path / "0.safetensors", about)
    assert WrittenSignals.open(tmp_path, fingerprint, EXTRACT) is None

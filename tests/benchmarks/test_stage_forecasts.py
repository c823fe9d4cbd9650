"""Forecasts of the stages that train and measure, against what they then take."""

import dataclasses
import shutil

import pytest
from benchmarks.forecasts.forecast_stages import forecast_extract
from benchmarks.stages.forecast import Forecast, Tally, compare
from benchmarks.stages.presets import make_config
from benchmarks.stages.tallies import count_stage, disk_bytes
from extract.pipeline import read_answers

from extract.records import SETTINGS, write_lines
from extract.run.directory import RunDir
from extract.signals.plan import ExtractConfig
from extract.world.facts import make_world
from extract.world.questions import QuestionConfig, make_examples
from tests.benchmarks.test_forecast import beatrice, files_of

KEPT = (
    {"dtype": "bfloat16"},
    {"dtype": "int8"},
    {"dtype": "bfloat16", "hidden_spans": "answer", "scalars": "bfloat16"},
)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    config = make_config("smoke")
    wanted = QuestionConfig(n_train=64, n_evaluation=24, n_ood=4)
    with RunDir.open(path, config.as_json()) as run:
        world = make_world(config.world)
        run.examples.write_text(write_lines(make_examples(world, wanted)))
        passages = [p for e in make_examples(world, wanted) for p in e.passages]
        run.passages.write_text(write_lines(passages))
    beatrice("answer", path)
    beatrice("label", path)
    return path


@pytest.mark.parametrize("kept", KEPT)
def test_the_stores_bytes_are_forecast_with_everything_that_is_kept(
    answered, tmp_path, kept
):
    """Against the sum over tokens and families, written out by hand."""
    path = tmp_path / "run"
    shutil.copytree(answered, path)
    config = make_config("smoke")
    extract = dataclasses.replace(config.extract, **kept)
    found = forecast_extract(RunDir(path), dataclasses.replace(config, extract=extract))
    expected = 0
    for setting in SETTINGS:
        for answer in read_answers(RunDir(path), setting):
            n_tokens = len(answer.prompt_ids) + len(answer.token_ids)
            n_answer = len(answer.token_ids) + (answer.stop_id is not None)
            expected += bytes_of(extract, n_tokens, n_answer)
    assert found.disk_bytes == pytest.approx(expected, rel=0.02)


def bytes_of(extract: ExtractConfig, n_tokens: int, n_answer: int) -> int:
    n_layers, d_model, n_heads = 6, 160, 5  # of the embedded model
    scalar = 2 if extract.scalars == "bfloat16" else 4
    code, scale = (1, 4) if extract.dtype == "int8" else (2, 0)
    hidden = (n_layers + 1) * (d_model * code + scale)
    others = (5 + 4 * n_layers + 2 * 2 * n_layers * n_heads) * scalar
    n_hidden = n_answer if extract.hidden_spans == "answer" else n_tokens
    return n_hidden * hidden + n_tokens * others


def test_requests_stand_beside_what_was_asked():
    forecast = Forecast(stage="answer", n_requests=10, basis="b")
    line = compare("answer", forecast, None, Tally(n_requests=9), 6.0)
    assert "requests 10 → 9" in line


@pytest.mark.slow
def test_a_dry_run_of_every_later_stage_says_time_memory_and_disk(answered):
    """A wide margin: it is a probe of seconds on a machine that does other work."""
    beatrice("extract", answered)
    run = RunDir(answered)
    stored = disk_bytes([run.features(setting) for setting in SETTINGS])
    assert count_stage(run, "extract", []).disk_bytes == stored > 1_000_000
    beatrice("sweep", answered)
    said = {"train": ("time", "memory", "disk"), "select": ("time", "memory")}
    said |= {"calibrate": ("reads",), "evaluate": ("time", "memory", "disk")}
    said |= {"control": ("time", "requests")}
    for verb, parts in said.items():
        before = files_of(answered)
        dry = beatrice(verb, answered, "--dry-run").stdout
        assert files_of(answered) == before, verb
        for part in parts:
            assert part in dry, (verb, dry)
        real = beatrice(verb, answered).stderr
        if verb == "calibrate":
            continue
        (line,) = [x for x in real.splitlines() if "a dry run) → actual" in x]
        assert "time" in line
        if "disk" in parts:
            predicted, actual = forecast_of(run, verb), done_by(run, verb)
            assert 0.5 < predicted / actual < 2, line


def forecast_of(run, verb):
    from benchmarks.stages.forecast import kept_forecast

    return kept_forecast(run, verb).disk_bytes


def done_by(run, verb):
    from benchmarks.stages.chain import STAGES

    return disk_bytes(STAGES[verb].outputs(run))

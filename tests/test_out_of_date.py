"""Outdated results are neither reported, compared nor exported."""

import re
import shutil

import pytest

from beatrice.benchmarks.stages import EVALUATE
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.console import Progress
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import read_result_rows
from beatrice.extract.run.stages import is_done
from beatrice.jaxprobe.stages import TRAIN, select_config
from beatrice.selection.anatomy import ANATOMY
from beatrice.selection.exhaustive import EXHAUSTIVE
from tests.extract.label.test_audit import fill
from tests.extract.small_run import assert_error_sentence, beatrice


@pytest.fixture
def run(smoke_run, tmp_path):
    return RunDir(shutil.copytree(smoke_run, tmp_path / "run"))


def test_verdicts_on_outdated_labels_give_no_rows_until_a_new_sample_is_judged(
    run, tmp_path
):
    def experiments():
        EVALUATE.work(run, None, lambda *_: None, Progress())
        return {row.experiment for row in read_result_rows(run)}

    beatrice("label", run.path, "--audit")
    filled = shutil.copy(run.audit / "sample.csv", tmp_path / "filled.csv")
    fill(filled)
    read = ("label", run.path, "--audit", "--annotations", filled)
    beatrice(*read)
    before = run.labels.read_bytes()
    beatrice("label", run.path, "--match", "containment")
    assert run.labels.read_bytes() != before
    assert not {"label_noise", "annotated"} & experiments()
    done = beatrice(*read)
    assert "drawn under other labels" in done.stdout
    assert "move it away to draw again" in done.stdout
    assert not {"label_noise", "annotated"} & experiments()
    (run.audit / "sample.csv").unlink()
    assert "move it away" not in beatrice("label", run.path, "--audit").stdout
    fill(shutil.copy(run.audit / "sample.csv", filled))
    beatrice(*read)
    assert {"label_noise", "annotated"} <= experiments()


def test_rows_of_an_earlier_detector_are_neither_exported_nor_compared(
    run, smoke_run, tmp_path
):
    lines = (
        ("export", run.path, tmp_path / "probe", "--untrustworthy"),
        ("report", smoke_run, run.path),
    )
    beatrice("calibrate", run.path, "--set", "maps=isotonic")
    for line in lines:
        done = beatrice(*line, code=1)
        assert_error_sentence(done, "input detector", "run `beatrice evaluate` first")
    beatrice("evaluate", run.path)
    for line in lines:
        beatrice(*line)


def test_another_format_ranking_or_other_run_makes_the_anatomy_outdated(
    run, smoke_run, tmp_path
):
    other = shutil.copytree(smoke_run, tmp_path / "other")
    beatrice("anatomy", run.path, other, "--only", "backbones")
    assert is_done(run.path, ANATOMY)
    ranking = run.path / "exhaustive"
    ranking.mkdir()
    (ranking / "closed_book.safetensors").write_text("a ranking")
    run.mark_stage("exhaustive", {}, 1.0, [ranking])
    assert not is_done(run.path, ANATOMY)
    (run.stages / "exhaustive.json").unlink()
    assert is_done(run.path, ANATOMY)
    inputs, outputs = run.stage_record("anatomy").inputs, ANATOMY.outputs(run)
    earlier = {name: sha for name, sha in inputs.items() if name != "format"}
    run.mark_stage("anatomy", earlier, 1.0, outputs)
    assert not is_done(run.path, ANATOMY)
    run.mark_stage("anatomy", inputs, 1.0, outputs)
    assert is_done(run.path, ANATOMY)
    beatrice("label", other, "--match", "containment")
    assert not is_done(run.path, ANATOMY)
    other.rename(tmp_path / "gone")
    done = beatrice("anatomy", run.path, "--only", "backbones")
    assert f"no run is at {other} now; its rows are left out" in done.stderr
    assert "backbones needs another backbone" in done.stderr


def test_encoders_of_another_protocol_count_as_untrained_and_are_not_compared(run):
    assert is_done(run.path, TRAIN)
    inputs, outputs = run.stage_record("train").inputs, TRAIN.outputs(run)
    earlier = {name: sha for name, sha in inputs.items() if name != "protocol"}
    run.mark_stage("train", earlier, 1.0, outputs)
    assert not is_done(run.path, TRAIN)
    done = beatrice("evaluate", run.path, "--ablations", code=1)
    assert_error_sentence(done, "another version trained", "`beatrice train` again")


@pytest.mark.slow
def test_heads_of_a_ranking_not_yet_recorded_are_not_trained_again(run, capsys):
    for n_missing in ("[1-9][0-9]*", "0"):
        EXHAUSTIVE.work(run, select_config(run), lambda *_: None, Progress())
        assert re.search(f"exhaustive: {n_missing} of ", capsys.readouterr().err)
        ranking, pieces = run.path / "exhaustive", run.path / "exhaustive.pieces"
        assert {*ranking.glob("*")} == {ranking / f"{s}.safetensors" for s in SETTINGS}
        (pieces / "closed_book").rename(ranking / "closed_book.pieces")  # as before


def test_newer_code_draws_a_report_again_but_prints_its_rows_without_a_lock(run):
    record = run.stage_record("report")
    run.mark_stage("report", {**record.inputs, "code": "older"}, 1.0, record.outputs)
    with RunDir.open(run.path):
        printed = beatrice("report", run.path, "--print", "detectors").stdout
    assert "BEATRICE" in printed
    assert "its input code has changed" in beatrice("report", run.path).stderr
    assert run.stage_record("report").inputs["code"] == record.inputs["code"]

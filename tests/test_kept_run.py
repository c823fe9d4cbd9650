"""A whole run on one layer of the answers' states in 8 bits, up to the score."""

import json

import numpy as np
import pytest

import beatrice
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.jaxprobe.calibrate import run_selection
from beatrice.jaxprobe.train import open_rows
from tests.process import call

WORDS = "--hidden-layers 4 --hidden-spans answer --dtype int8 --set scalars=bf16"
CHOICE = WORDS.split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "run"
    done = call("demo", path, "--preset", "smoke", *CHOICE)
    assert "the store keeps layer 4 alone" in done.stderr
    return path


@pytest.mark.slow
def test_one_layer_is_what_the_sweep_finds_and_everything_verifies(run):
    sweep = json.loads((run / "sweep.json").read_text())
    assert sweep["layer"] == 4
    assert [found["layers"] for found in sweep["settings"].values()] == [[4], [4]]
    assert "int8" in (run / "report.html").read_text()
    call("doctor", run, "--verify")


@pytest.mark.slow
def test_a_live_score_is_that_of_the_evaluation(run):
    directory = RunDir(run)
    _, rows = open_rows(directory, "closed_book")
    tree, _ = run_selection(directory, "closed_book")
    stored = tree["champion"]["scores"].mean(axis=0)
    questions = {e.id: e.question for e in read_examples(directory)}
    answers = {a.example_id: a for a in read_answers(directory, "closed_book")}
    scorer = beatrice.load(run)
    chosen = [
        i for i in rows.where("test") if answers[rows.ids[i]].stop_id is not None
    ][:20]
    live = [
        scorer.score(questions[rows.ids[i]], answers[rows.ids[i]].text).raw
        for i in chosen
    ]
    # The batch decides the last bit of a sum, which may be one step of 127.
    np.testing.assert_allclose(live, stored[chosen], atol=2e-3)
    assert np.ptp(live) > 0.01


@pytest.mark.slow
def test_the_ledger_lays_the_run_beside_the_paper_and_says_what_differs(run):
    told = call("report", run, "--ledger").stdout
    assert "| Backbone | Qwen3.5-9B and Gemma 4 E4B | embedded |" in told
    assert "## tab:main-detection (Qwen3.5-9B)" in told
    assert "## tab:pgir-application (Qwen3.5-9B)" in told
    assert "of 1,500" not in told and "1,500 questions in the paper" in told
    written = (run / "panorama.md").read_text()
    assert "| Random AUPRC (error rate) |" in written
    assert "### Against the strongest rival of each column" in written
    assert written.count("After Holm's correction over 8 columns") == 2

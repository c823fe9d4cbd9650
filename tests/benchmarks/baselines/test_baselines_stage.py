"""Rivals are judged on a run's answers: once each, with what they lack said."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.baselines import stage
from benchmarks.baselines.catalogue import catalogue
from benchmarks.baselines.detector import Detector, Found
from benchmarks.baselines.readings import Kept
from benchmarks.baselines.scores import KeptScores, Scores, models_beside, models_file
from benchmarks.baselines.stage import (
    BaselinesConfig,
    chosen_detectors,
    unmet,
)
from extract.run.contents import draw_seconds_file, samples_file
from extract.run.directory import RunDir
from extract.run.files import write_json_atomic
from extract.run.results import read_result_rows, read_rows, rows_file
from jaxprobe.evaluation import Scored, detection_rows
from jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.baselines.drawn import evidence
from tests.extract.small_run import beatrice
from tests.process import call


def one(score, **fields):
    return Detector(name="own", title="Own", source="here", score=score, **fields)


def test_a_detector_that_cannot_learn_has_its_reason_in_its_rows(tmp_path):
    given = evidence(tmp_path, [["a"]] * 6, labels=[0, 1, 0, 1, 0, 1])

    def refuse(_):
        raise ValueError("one class alone teaches nothing")

    read = Kept({}, {"x": 3.0}, {"x": 2**60})
    scores = stage._score(one(refuse, reads=("x",)), given, read)
    assert np.isnan(scores.found.scores).all() and scores.seconds >= 3
    assert scores.peak_bytes == 2**60
    scored = Scored(name="own", scores=scores.found.scores, reason=scores.reason)
    other = Scored(name="other", scores=np.arange(6.0)[None])
    rows = detection_rows(
        [other, scored],
        given.rows,
        BootstrapConfig(n_resamples=20),
        pairs={"paired": [("other", "own")]},
    )
    own = [r for r in rows if "own" in (r.detector, r.against)]
    assert {r.experiment for r in own} == {"detection", "paired"}
    assert all(r.value is None and r.n_failed == 5 for r in own)
    assert {r.reason for r in own} == {"one class alone teaches nothing"}
    assert all(r.value is not None for r in rows if r not in own and r.seed == "mean")


def test_a_question_costs_what_its_draws_took_and_nobody_guesses(tmp_path):
    given = evidence(tmp_path, [["a", "b"], ["a", "c"]])
    scores = Scores(Found(np.zeros((1, 2))), seconds=3.0, peak_bytes=1)

    def seconds(**fields):
        return stage._judged(one(None, **fields), given, scores).seconds

    drawn = {"needs": frozenset({"samples"})}
    assert seconds() == 1.5
    assert seconds(**drawn) is None  # drawn before drawing was timed
    file = draw_seconds_file(given.run)
    write_json_atomic(file, {"closed_book": 0.25, "with_context": 7.0})
    assert seconds(**drawn) == 1.5 + 2 * 0.25
    assert seconds() == 1.5
    write_json_atomic(file, {"closed_book": None})
    assert seconds(**drawn) is None


def test_scores_are_kept_until_what_they_depend_on_changes(tmp_path):
    given = evidence(tmp_path, [["a"]] * 3)
    shas = {"run": "1", "samples": "2", "entailment": "3"}
    found = Found(np.array([[0.1, np.nan, 0.3]]))
    plain, drawn = (
        one(None, needs=frozenset(needs)) for needs in ((), ("samples", "entailment"))
    )
    kept = KeptScores(evidence=given, shas=shas)
    for detector in (plain, drawn):
        kept.save(detector, Scores(found, 1.5, 7, "why"))
        held = kept.load(detector)
        np.testing.assert_array_equal(held.found.scores, found.scores)
        assert held[1:] == (1.5, 7, "why")
        for name in shas:
            other = KeptScores(evidence=given, shas=shas | {name: "9"})
            is_read = name == "run" or bool(detector.needs)
            assert (other.load(detector) is None) == is_read


def test_a_model_that_is_not_given_again_is_the_last_one_given(tmp_path):
    run = RunDir(tmp_path / "run")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    assert models_beside(run, {"encoder": None, "entailment": None}) == {}
    first = models_beside(run, {"encoder": str(tmp_path / "a"), "entailment": None})
    assert set(first) == {"encoder"}
    models_file(run).parent.mkdir(parents=True)
    write_json_atomic(models_file(run), first)
    assert models_beside(run, {"encoder": None}) == first
    other = models_beside(run, {"encoder": str(tmp_path / "b")})
    assert set(other) == {"encoder"} and other != first
    models_file(run).write_text("[]")
    with pytest.raises(ValueError, match="--encoder again"):
        models_beside(run, {})


def test_scores_from_readings_are_made_again_when_the_readings_are(tmp_path):
    given = evidence(tmp_path, [["a"]] * 3)
    kept = KeptScores(evidence=given, shas={"run": "1"})
    shown, blind = (one(None, reads=(name,)) for name in ("p_true", "lookback"))
    for detector, is_gone in ((shown, True), (blind, False)):
        text = samples_file(given.run).read_text()
        kept.save(detector, Scores(Found(np.zeros((1, 3))), 1.0))
        samples_file(given.run).write_text(text + text.splitlines(True)[-1])
        assert (kept.load(detector) is None) == is_gone
        samples_file(given.run).write_text(text)


def test_a_pair_of_texts_is_read_once_and_charged_to_all_that_ask():
    asked = []

    def relations(pairs):
        asked.extend(pairs)
        return np.zeros((len(pairs), 3))

    metered = stage._Metered(relations)
    metered([("a", "b")])
    assert metered.owed == 0.0
    metered([("a", "b"), ("b", "c")])
    assert metered.owed > 0.0


def test_what_a_run_lacks_is_said(tmp_path):
    run, known = RunDir(tmp_path), catalogue()
    told = unmet(known["semantic_entropy"], run, BaselinesConfig())
    assert "beatrice sample" in told
    samples_file(run).parent.mkdir()
    samples_file(run).touch()
    assert "--nli" in unmet(known["semantic_entropy"], run, BaselinesConfig())
    for name in ("semantic_entropy:words", "saplma_last"):
        assert unmet(known[name], run, BaselinesConfig()) is None
    assert unmet(known["semantic_entropy"], run, BaselinesConfig(nli="x")) is None


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="no detector 'sapmla'; there are .*saplma"):
        chosen_detectors(BaselinesConfig(only=("sapmla",)))
    found = chosen_detectors(BaselinesConfig(only=("p_true", "saplma_last")))
    assert [x.name for x in found] == ["saplma_last", "p_true"]


def test_the_list_has_a_line_for_every_detector():
    lines = beatrice("baselines", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(catalogue())


@pytest.fixture(scope="module")
def run(smoke_run, tmp_path_factory):
    path = shutil.copytree(smoke_run, tmp_path_factory.mktemp("judged") / "run")
    found = RunDir(path)
    quick = {name for name, x in catalogue().items() if not (x.needs or x.reads)}
    assert {name for name, _ in judged(found)} == quick
    done = call("baselines", path, "--again")
    assert "baselines: eigenscore needs drawn answers" in done.stderr
    call("report", path)
    return found


def stamps(run):
    """When the kept scores and readings were written."""
    files = [
        *run.path.glob("baselines/*/*.safetensors"),
        *run.path.glob("readings/*/*/*.safetensors"),
    ]
    return {file: file.stat().st_mtime_ns for file in files}


def judged(run):
    return {
        (x["name"], x["setting"]): x
        for x in json.loads(stage.judged_file(run).read_text())
    }


@pytest.mark.slow
def test_every_rival_without_samples_has_its_rows_and_its_costs(run):
    possible = {
        (name, setting)
        for name, x in catalogue().items()
        for setting in x.settings
        if unmet(x, run, BaselinesConfig()) is None
    }
    costs = judged(run)
    assert set(costs) == possible
    assert all(x["seconds"] > 0 and not x["reason"] for x in costs.values())
    assert costs["lumina", "with_context"]["n_forwards"] == 2
    assert costs["p_true", "closed_book"]["n_forwards"] == 1
    assert costs["saplma_last", "closed_book"]["n_forwards"] == 0
    rows = list(read_rows(rows_file(run, "baselines")))
    own = [r for r in rows if r.experiment == "detection"]
    assert {(r.detector, r.setting) for r in own} == possible
    paired = [r for r in rows if r.experiment == "paired"]
    assert {(r.against, r.setting) for r in paired} == possible
    assert {r.detector for r in paired} == {"champion"}
    assert {r.detector for r in read_result_rows(run)} > {name for name, _ in possible}
    assert "What each costs" in (run.path / "panorama.md").read_text()


@pytest.mark.slow
def test_what_was_judged_stays_and_only_what_is_asked_for_is_added(run):
    gone = ("llmcheck_perplexity", "tfidf_svm")
    before = stamps(run)
    files = [f for f in before if f.stem in gone]
    first = {f: f.read_bytes() for f in files}
    for file in files:
        file.unlink()
    for i, name in enumerate(gone, start=1):
        beatrice("baselines", run.path, "--only", name)
        names = {x for x, _ in judged(run)}
        assert set(gone[:i]) <= names and not set(gone[i:]) & names
        assert "p_true" in names
    after = stamps(run)
    assert set(after) == set(before)
    assert {f for f in before if before[f] != after[f]} == set(files)
    assert len(first) == 4


@pytest.mark.slow
def test_a_name_that_is_not_known_and_a_missing_sample_are_one_sentence(run):
    done = beatrice("baselines", run.path, "--only", "sapmla", code=1)
    assert "no detector 'sapmla'" in done.output and "Traceback" not in done.output
    done = beatrice("baselines", run.path, "--check", "eigenscore", code=1)
    assert "needs drawn answers" in done.output


@pytest.mark.slow
def test_every_rival_without_samples_is_made_rightly(run):
    possible = [
        n for n, x in catalogue().items() if not unmet(x, run, BaselinesConfig())
    ]
    told = {
        n: beatrice("baselines", run.path, "--check", n, code=None) for n in possible
    }
    faults = {n: d.output for n, d in told.items() if d.exit_code}
    assert faults == {}

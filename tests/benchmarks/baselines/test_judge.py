"""Detectors judged on a run and in a notebook, also a user's own as in the README."""

import dataclasses
import math
import re
import shlex
import shutil
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pytest

import beatrice as api
from beatrice.benchmarks import stages
from beatrice.benchmarks.baselines.detector import (
    DetectorOutput,
    catalogue,
    find_detector,
)
from beatrice.benchmarks.baselines.judge import (
    JudgedOutput,
    ScoreCache,
    _open_backbone,
    chosen_detectors,
    cost_of,
    judge,
    models_beside,
    run_inputs,
    score,
    unmet,
)
from beatrice.benchmarks.baselines.plain import chosen_row
from beatrice.benchmarks.baselines.readings import (
    AnswerReader,
    CachedReadings,
    MeteredRelations,
    cached_readings,
    chunks_of,
    load_chunk,
    reading_keys,
    rows_read,
    stacked,
)
from beatrice.benchmarks.commands import BaselinesOptions
from beatrice.benchmarks.stages import BASELINES, BaselinesConfig
from beatrice.extract.commands import sample
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_json_atomic
from beatrice.extract.run.rows import read_result_rows, read_rows, rows_file
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.baselines import planted
from tests.benchmarks.baselines.planted import baseline_of, drawn_inputs
from tests.extract.small_run import beatrice, make_run
from tests.process import call
from tests.records import a_label, a_sample, an_example

README = Path(__file__).parents[3] / "benchmarks" / "README.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", README.read_text(), re.S))
COMMANDS = re.findall(
    r"^beatrice baselines RUN (--\w+ hedges\S+)", README.read_text(), re.M
)
INTERVALS = BootstrapConfig(n_resamples=50)


@pytest.fixture
def here(working_folder):
    """A user's current folder, with the file from the README."""
    (working_folder / "hedges.py").write_text(BLOCKS["hedges"])
    yield working_folder
    sys.modules.pop("hedges", None)


def test_the_readmes_detector_gets_rows_in_the_same_tables(here, smoke_run):
    run = shutil.copytree(smoke_run, here / "run")
    check, only = (command.split() for command in COMMANDS)
    output = beatrice("baselines", run, *check).output
    assert "hedges:hedging: nothing wrong was found" in output
    before = read_result_rows(RunDir(run))
    beatrice("baselines", run, *only)
    rows = read_result_rows(RunDir(run))
    new_rows = [row for row in rows if "hedging" in (row.detector, row.against)]
    assert {row.experiment for row in new_rows} == {"detection", "paired"}
    assert {row.setting for row in new_rows} == {"closed_book", "with_context"}
    assert [row for row in rows if row not in new_rows] == before
    titles = [x.title for x in judged(RunDir(run)).values()]
    assert titles.count("Hedging") == 2
    # Asked for another detector, the run keeps the first.
    beatrice("baselines", run, "--only", "saplma_last")
    assert read_result_rows(RunDir(run)) == rows
    (here / "hedges.py").unlink()
    del sys.modules["hedges"]
    done = beatrice("baselines", run, "--only", "saplma_mean")
    assert "hedges:hedging is left out" in done.stderr
    names = {row.detector for row in read_result_rows(RunDir(run))}
    assert "hedging" not in names and "saplma_last" in names


def test_a_runs_detector_is_loaded_only_if_the_command_line_names_it(here, smoke_run):
    run = RunDir(shutil.copytree(smoke_run, here / "run"))
    (here / "foreign.py").write_text("")
    write_json_atomic(run.path / "baselines" / "plugs.json", ["foreign:x"])
    done = beatrice("baselines", run.path, "--only", "saplma_last")
    assert "foreign:x is left out" in done.stderr
    only = BaselinesConfig(only=("foreign:x",))
    BASELINES.resolve_section(run, lambda _: only, is_replaceable=True)
    for verb in ("baselines", "demo"):
        preset = () if verb == "baselines" else ("--preset", "smoke")
        stderr = beatrice(verb, run.path, *preset, code=1).stderr
        assert f"`beatrice baselines {run.path} --only foreign:x`" in stderr
    assert "foreign" not in sys.modules


def test_results_of_a_users_detector_stay_done_without_its_code(here, smoke_run):
    run = shutil.copytree(smoke_run, here / "run")
    beatrice("baselines", run, "--only", "hedges:hedging")
    rows = read_result_rows(RunDir(run))
    (here / "hedges.py").unlink()
    # In processes that have not named it.
    for line in (("baselines", run), ("demo", run, "--preset", "smoke")):
        assert "baselines: already done" in call(*line).stderr
    assert read_result_rows(RunDir(run)) == rows


FAILING = """
@baseline("failing", title="Failing", source="own")
def failing(inputs):
    return DetectorOutput(inputs.nothing)
"""


def test_a_failing_detector_has_the_reason_in_its_rows_and_spares_the_others(
    here, smoke_run
):
    run = shutil.copytree(smoke_run, here / "run")
    before = read_result_rows(RunDir(run))
    with (here / "hedges.py").open("a") as file:
        file.write(FAILING)
    reason = "AttributeError: 'DetectorInput' object has no attribute 'nothing' (hedges"
    done = beatrice("baselines", run, "--only", "hedges:failing")
    assert done.stderr.count(f"failing: scoring ends in {reason}") == 2
    rows = read_result_rows(RunDir(run))
    others = [x for x in rows if "failing" not in (x.detector, x.against)]
    assert others == before
    detections = [row for row in rows if row.detector == "failing"]
    assert detections and all(reason in row.reason for row in detections)
    assert not [*run.glob("baselines/*/failing*")]  # the next start scores it again
    done = beatrice("baselines", run, "--check", "hedges:failing", code=1)
    assert "has no attribute 'nothing'" in done.output
    beatrice("baselines", run)  # still works


def test_a_detector_is_found_by_the_name_of_an_entry_point(here):
    folder = here / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\n")
    (folder / "entry_points.txt").write_text(
        "[beatrice.baselines]\nhedges_of_theirs = hedges:hedging\n"
    )
    sys.path.append(str(here))
    assert find_detector("hedges_of_theirs").name == "hedging"
    (result,) = chosen_detectors(BaselinesConfig(only=("hedges_of_theirs",)))
    assert result.name == "hedging"


@pytest.mark.parametrize("name", ["champion", "perplexity", "probe", "p_true"])
def test_the_name_of_another_row_is_refused(here, name):
    (here / "hedges.py").write_text(BLOCKS["hedges"].replace("hedging", name))
    with pytest.raises(ValueError, match=f"the name '{name}' is that of another row"):
        find_detector(f"hedges:{name}")


def oracle(given):
    return DetectorOutput(given.rows.labels[None].astype(float))


def noise(given):
    return DetectorOutput(np.random.default_rng(0).random((1, len(given.rows.ids))))


ORACLE = baseline_of(oracle, name="oracle")
NOISE = baseline_of(noise, name="noise")
GIVEN = planted.inputs()


def judge_planted(*detectors, labels=GIVEN.rows.labels, **beside):
    """Judge on the planted inputs, as in a notebook."""
    beside = {"splits": GIVEN.rows.splits, "intervals": INTERVALS} | beside
    return judge(GIVEN.store, labels, detectors, **beside)


def test_detectors_are_judged_without_a_run():
    names = []
    probe = catalogue()["linear_probe"]
    table = judge_planted(ORACLE, probe, on_score=names.append)
    assert names == ["oracle", "linear_probe"]
    aurocs = table[(table.metric == "auroc") & (table.split == "test")]
    values = aurocs.groupby("detector").value.min()
    assert values["oracle"] == 1 and values["linear_probe"] > 0.9
    (layer,) = table[table.metric == "layer"].value
    assert layer == planted.LAYER


def test_labels_may_be_truth_values_rows_or_records():
    truth, splits, rows = GIVEN.rows.labels, GIVEN.rows.splits, []
    records = [
        a_label(bool(label), example_id=f"q{i}", setting=planted.SETTING)
        for i, label in enumerate(truth)
    ]
    every, some = np.ones(150, bool), np.arange(150) % 5 > 0
    look = baseline_of(lambda inputs: rows.append(inputs.rows) or oracle(inputs))
    for is_given, labels in (
        *((every, labels) for labels in (truth, GIVEN.rows, records)),
        *((some, labels) for labels in (truth[some], GIVEN.rows, records)),
    ):
        signals = api.Signals(GIVEN.store)[is_given]
        beside = {"questions": GIVEN.questions, "splits": splits[is_given]}
        judge(signals, labels, [look], intervals=INTERVALS, **beside)
        for split in ("train", "validation", "test"):
            chosen = rows[-1].where(split)
            expected = np.flatnonzero((splits == split) & is_given)
            np.testing.assert_array_equal(chosen, expected)
            assert (rows[-1].splits == split).sum() == len(expected)  # none has failed
            np.testing.assert_array_equal(rows[-1].labels[chosen], truth[expected])


def test_labels_that_do_not_fit_are_refused():
    labels, splits = GIVEN.rows.labels, GIVEN.rows.splits.tolist()
    for given, named, message in (
        ([True, False, True], splits, "labels: .* for each of 150 answers, found 3"),
        (None, splits, "labels: expected records, or True, .* found NoneType"),
        (labels, None, "splits: expected a list"),
        (labels, ["val", *splits[1:]], "splits: expected 'train', .* found 'val'"),
    ):
        with pytest.raises(ValueError, match=message):
            judge(GIVEN.store, given, [ORACLE], splits=named)


def test_a_detector_of_another_setting_is_refused():
    (other,) = {"closed_book", "with_context"} - {planted.SETTING}
    with pytest.raises(ValueError, match=f"x is defined only for {other}, and the sig"):
        judge_planted(ORACLE, baseline_of(oracle, name="x", settings=(other,)))


def test_an_unlabelled_answer_is_counted_as_failed():
    labels, test = GIVEN.rows.labels.tolist(), GIVEN.rows.where("test")
    masked = np.ma.masked_array(labels, np.isin(np.arange(150), test[:3]))
    labels[test[0]], labels[test[1]], labels[test[2]] = None, math.nan, pandas.NA
    for some_labels in (labels, masked):
        table = judge_planted(ORACLE, labels=some_labels)
        aurocs = table[(table.metric == "auroc") & (table.split == "test")]
        assert set(aurocs.n) == {len(test) - 3} and set(aurocs.n_failed) == {3}


def test_a_labelled_answer_without_a_split_is_in_no_row():
    splits, test = GIVEN.rows.splits.copy(), GIVEN.rows.where("test")
    splits[test[:3]] = ""
    table = judge_planted(ORACLE, splits=splits)
    assert "" not in set(table.split)
    assert set(table.n[table.split == "test"]) == {len(test) - 3}


def test_answers_of_a_group_are_resampled_together_and_stay_in_one_split():
    where = GIVEN.rows.splits == "test"
    alone, halves = np.arange(150).astype(str), np.arange(150).astype(str)
    halves[where] = [str(i // 10) + "of ten" for i in range(where.sum())]
    widths = []
    for groups in (None, alone, halves):
        table = judge_planted(NOISE, groups=groups)
        at = table[table.split == "test"]
        row = at[at.metric == "auroc"].iloc[0]
        widths.append(row["ci_high"] - row["ci_low"])
    assert widths[0] == pytest.approx(widths[1]) and widths[2] > widths[0]
    with pytest.raises(ValueError, match="the answers of 'all' are in"):
        judge_planted(ORACLE, groups=["all"] * 150)
    with pytest.raises(ValueError, match=r"groups\[149\]: expected a name"):
        judge_planted(ORACLE, groups=[*range(149), np.nan])


def test_two_detectors_are_compared_with_a_p_value():
    rivals = ORACLE, NOISE
    table = judge_planted(*rivals, pairs=[("oracle", "noise")])
    at = table[(table.experiment == "paired") & (table.split == "test")]
    row = at[at.metric == "auroc"].iloc[0]
    assert (row["detector"], row["against"]) == ("oracle", "noise")
    assert row["value"] > 0 and row["p_value"] < 0.05
    with pytest.raises(ValueError, match="pairs: no detector is called 'nope'"):
        judge_planted(*rivals, pairs=[("oracle", "nope")])


def test_a_detector_that_cannot_learn_has_its_reason_in_its_rows():
    given = drawn_inputs([["a"]] * 6, labels=[0, 1, 0, 1, 0, 1])

    def refuse(_):
        raise ValueError("one class alone teaches nothing")

    read = CachedReadings({}, {"x": 3.0}, {"x": 2**60})
    scores = score(baseline_of(refuse, reads=("x",)), given, read)
    assert np.isnan(scores.output.scores).all() and scores.seconds >= 3
    assert scores.peak_bytes == 2**60
    other = DetectorScores(name="other", scores=np.arange(6.0)[None])
    rows = detection_rows(
        [other, scores.scored("own")],
        given.rows,
        BootstrapConfig(n_resamples=20),
        pairs={"paired": [("other", "own")]},
    )
    rows = [r for r in rows if r.seed == "mean"]
    detector_rows = [r for r in rows if "own" in (r.detector, r.against)]
    assert {r.experiment for r in detector_rows} == {"detection", "paired"}
    assert all(r.value is None and r.n_failed == 5 for r in detector_rows)
    assert {r.reason for r in detector_rows} == {"one class alone teaches nothing"}
    assert all(r.value is not None for r in rows if r not in detector_rows)


def test_a_detector_without_any_score_has_a_reason():
    scores = np.full((2, 4), np.nan)
    scores[1, 1:] = -np.inf  # one of its seeds is not enough
    detector = baseline_of(lambda _: DetectorOutput(scores))
    given = drawn_inputs([["a"]] * 4)
    assert score(detector, given).reason == DetectorScores.reason
    scores[0, 1] = -np.inf
    assert not score(detector, given).reason


BARE, DRAWN = baseline_of(None), baseline_of(None, needs=frozenset({"samples"}))
SHOWN = baseline_of(None, reads=("p_true",))  # reads what was drawn
ALL_DRAWN, SOME_DRAWN = [["a", "b"], ["a", "c"]], [["a", "b"], []]


@pytest.mark.parametrize(
    ("detector", "drawn", "per_draw", "expected"),
    [
        (BARE, ALL_DRAWN, None, {"seconds": 1.5}),
        (BARE, SOME_DRAWN, 0.25, {"seconds": 1.5, "n_new_tokens": 0}),
        (DRAWN, ALL_DRAWN, None, {"seconds": None}),  # was not timed
        (DRAWN, ALL_DRAWN, 0.25, {"seconds": 1.5 + 2 * 0.25}),
        (SHOWN, ALL_DRAWN, 0.25, {"seconds": 1.5 + 2 * 0.25}),
        (SHOWN, SOME_DRAWN, 0.25, {"n_new_tokens": 2}),
        (DRAWN, [[a_sample("a", token_ids=(7, 8)), "b"], []], 0, {"n_new_tokens": 3}),
        (DRAWN, [[a_sample("a", token_ids=None), "b"], []], 0, {"n_new_tokens": None}),
        # Draws used only for learning are charged once: the first row trains.
        (
            catalogue()["sep:words"],
            [["a", "b"], ["a", "c"], ["a"], []],
            1.0,
            {"seconds": 1.5 + 2 / 4, "n_new_tokens": 2 / 4},
        ),
        # States of draws cost no forward pass.
        (catalogue()["eigenscore"], [["a", "b"]], 0.0, {"n_forwards": 0}),
    ],
)
def test_a_question_costs_what_its_draws_took_or_is_unknown(
    detector, drawn, per_draw, expected
):
    n = len(drawn)
    scores = JudgedOutput(DetectorOutput(np.zeros((1, n))), seconds=1.5 * n)
    cost = cost_of(detector, drawn_inputs(drawn), scores, per_draw)
    assert {name: getattr(cost, name) for name in expected} == expected


def test_scoring_is_charged_to_the_answers_that_have_draws():
    def slow(inputs):
        time.sleep(0.05)
        return DetectorOutput(np.zeros((1, 4)))

    drawn = dataclasses.replace(DRAWN, score=slow)
    given = drawn_inputs([["a"], [], [], []])
    assert cost_of(drawn, given, score(drawn, given), 0.0).seconds >= 0.05


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("llms_know", "mlp_exact_answer"),
        ("gnosis", "gnosis_maps"),
        ("lookback_lens", "lookback"),
        ("tfidf_svm", "template"),
        ("semantic_entropy", "questions"),
        ("selfcheck_ngram", "answers"),
        ("llmcheck_perplexity", "answers"),
    ],
)
def test_a_notebook_reports_what_a_detector_lacks(name, lack):
    samples = [sample for row in GIVEN.samples for sample in row]
    beside = dict(samples=samples, relations=GIVEN.relations)
    (reason,) = set(judge_planted(catalogue()[name], **beside).reason)
    assert "expected" in reason and lack in reason


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (DetectorOutput(np.zeros(3)), ValueError, r"own returns scores of shape \[3\]"),
        (np.zeros((1, 3)), TypeError, "returns ndarray, expected DetectorOutput"),
    ],
)
def test_a_detector_that_returns_something_else_is_refused(output, kind, message):
    with pytest.raises(kind, match=message):
        score(baseline_of(lambda inputs: output), drawn_inputs([["a"]] * 3))


def test_two_detectors_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match="two detectors are named 'oracle'"):
        judge_planted(ORACLE, baseline_of(oracle, name="oracle"))


def test_a_notebook_judges_texts_by_their_template():
    beside = {x: getattr(GIVEN, x) for x in ("questions", "answers", "template")}
    table = judge_planted(catalogue()["tfidf_svm"], **beside)
    assert table[table.metric == "auroc"].value.min() > 0.9


SHAS = {"run": "1", "samples": "2", "answers": "4", "entailment": "3"}
CHOSEN = chosen_row(drawn_inputs([["a"]]).rows, "p_true", "layer", 3.0)
SCORES = JudgedOutput(DetectorOutput(np.array([[0.1, np.nan]]), (CHOSEN,)), 1.5, 7)


def cache_of(folder, **changes):
    return ScoreCache(folder=folder, setting="closed_book", identities=SHAS | changes)


@pytest.mark.parametrize(
    ("needs", "reads", "others"),
    [
        ((), (), ()),
        (("samples", "entailment"), (), ("samples", "entailment")),
        ((), ("lookback",), ("answers",)),
        ((), ("p_true",), ("answers", "samples")),  # reads what was drawn
    ],
)
def test_scores_are_cached_until_what_they_depend_on_changes(
    tmp_path, needs, reads, others
):
    detector = baseline_of(None, name="p_true", needs=frozenset(needs), reads=reads)
    cache_of(tmp_path).save(detector, SCORES._replace(reason="why"))
    held = cache_of(tmp_path).load(detector)
    np.testing.assert_array_equal(held.output.scores, SCORES.output.scores)
    assert held.output.chosen == (CHOSEN,)
    assert held[1:] == (1.5, 7, "why")
    for name in SHAS:
        is_read = name in ("run", *others)
        assert (cache_of(tmp_path, **{name: "9"}).load(detector) is None) == is_read


def test_a_users_detector_is_scored_again_when_its_file_changes(here, tmp_path):
    detector = find_detector("hedges:hedging")
    cache = cache_of(tmp_path / "cache")
    cache.save(detector, SCORES)
    assert cache.load(detector) is not None
    config = BaselinesConfig(only=("hedges:hedging", "p_true"))
    before = BASELINES.identity(config)
    with (here / "hedges.py").open("a") as file:
        file.write("# another line\n")
    assert cache.load(detector) is None
    after = BASELINES.identity(config)
    assert [name for name in after if after[name] != before[name]] == [
        "detector:hedges:hedging"
    ]
    published = BASELINES.identity(BaselinesConfig(only=("p_true",)))
    assert {*published} == {"format", "interval format"}


def test_a_run_uses_the_model_given_last_if_none_is_given(tmp_path):
    path = tmp_path / "models.json"
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    assert models_beside(path, {"encoder": None, "entailment": None}) == {}
    first = models_beside(path, {"encoder": str(tmp_path / "a"), "entailment": None})
    assert set(first) == {"encoder"}
    write_json_atomic(path, first)
    assert models_beside(path, {"encoder": None}) == first
    other = models_beside(path, {"encoder": str(tmp_path / "b")})
    assert set(other) == {"encoder"} and other != first
    path.write_text("[]")
    with pytest.raises(ValueError, match="--encoder again"):
        models_beside(path, {})


def test_a_pair_of_texts_read_before_is_charged_to_all_that_ask():
    metered = MeteredRelations(lambda pairs: np.zeros((len(pairs), 3)))
    metered([("a", "b")])
    assert metered.owed == 0.0
    metered([("a", "b"), ("b", "c")])
    assert metered.owed > 0.0


def test_what_a_run_lacks_is_reported(tmp_path):
    run, known = RunDir(tmp_path / "my run"), catalogue()
    run.path.mkdir()
    message = unmet(known["semantic_entropy"], run, BaselinesConfig())
    _, name, *arguments = shlex.split(message.split("`")[1])
    drawn = sample.make_context(name, arguments).params
    assert drawn["run_dir"] == run.path
    assert set(drawn["split"]) == {"train", "validation", "test", "ood"}
    run.samples_file.parent.mkdir()
    run.samples_file.touch()
    run.examples.touch()
    run.mark_stage("sample", run.hash_inputs(run.examples), 1.0)
    assert "--nli" in unmet(known["semantic_entropy"], run, BaselinesConfig())
    for name in ("semantic_entropy:words", "saplma_last"):
        assert unmet(known[name], run, BaselinesConfig()) is None
    assert unmet(known["semantic_entropy"], run, BaselinesConfig(nli="x")) is None
    assert "--encoder" in unmet(known["text_encoder"], run, BaselinesConfig())
    drawn = {"splits": ["validation", "test"]}
    write_json_atomic(run.samples / "config.json", drawn)
    message = unmet(known["sep:words"], run, BaselinesConfig())
    line = ["beatrice", "sample", str(run.path), "--split", "train"]
    assert shlex.split(message.split("`")[1]) == line
    assert unmet(known["semantic_entropy:words"], run, BaselinesConfig()) is None
    write_json_atomic(run.samples / "config.json", {"splits": ["train", "test"]})
    assert unmet(known["sep:words"], run, BaselinesConfig()) is None
    run.examples.write_text("other passages")  # sampled answers are of the old ones
    assert "needs samples" in unmet(known["sep:words"], run, BaselinesConfig())
    bare = make_run(tmp_path / "bare", [an_example()])
    assert "only for with_context" in unmet(known["redeep"], bare, BaselinesConfig())
    assert unmet(known["tfidf_svm"], bare, BaselinesConfig()) is None


def test_again_adds_a_users_detector_to_those_of_the_catalogue(here):
    plug = "hedges:hedging"
    config = BaselinesOptions(only=(plug, "again")).change(BaselinesConfig())
    names = [detector.name for detector in chosen_detectors(config)]
    assert names == [*catalogue(), "hedging"]
    assert BaselinesOptions().change(config) == config
    assert BaselinesOptions(nli=here).change(config).nli == str(here.resolve())
    later = BaselinesOptions(only=("p_true",)).change(config)
    assert [detector.name for detector in chosen_detectors(later)] == ["p_true"]


def test_an_unknown_name_is_refused_with_a_list_of_the_known_ones():
    with pytest.raises(ValueError, match="no detector 'sapmla'; there are .*saplma"):
        chosen_detectors(BaselinesConfig(only=("sapmla",)))
    result = chosen_detectors(BaselinesConfig(only=("p_true", "saplma_last")))
    assert [x.name for x in result] == ["saplma_last", "p_true"]


def test_the_list_has_a_line_for_every_detector():
    lines = beatrice("baselines", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(catalogue())


@pytest.fixture(scope="module")
def run(smoke_run, tmp_path_factory):
    path = shutil.copytree(smoke_run, tmp_path_factory.mktemp("judged") / "run")
    result = RunDir(path)
    quick = {name for name, x in catalogue().items() if not (x.needs or x.reads)}
    assert {name for name, _ in judged(result)} == quick
    done = call("baselines", path, "--only", "again")
    assert "baselines: eigenscore needs samples" in done.stderr
    call("report", path)
    return result


def stamps(run):
    """Return when the kept scores and readings were written."""
    files = run.path.glob("[br]*/**/*.safetensors")  # baselines and readings
    return {file: file.stat().st_mtime_ns for file in files}


def judged(run):
    return {(x.name, x.setting): x for x in stages.read_costs(stages.costs_file(run))}


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
    assert all(x.seconds > 0 for x in costs.values())
    # Its option is no single token of the embedded model.
    assert {x.name for x in costs.values() if x.reason} == {"p_true"}
    assert costs["lumina", "with_context"].n_forwards == 2
    assert costs["p_true", "closed_book"].n_forwards == 1
    assert costs["saplma_last", "closed_book"].n_forwards == 0
    rows = list(read_rows(rows_file(run, "baselines")))
    detections = [r for r in rows if r.experiment == "detection"]
    assert {(r.detector, r.setting) for r in detections} == possible
    paired = [r for r in rows if r.experiment == "paired"]
    assert {(r.against, r.setting) for r in paired} == possible
    assert {r.detector for r in paired} == {"champion"}
    assert {r.detector for r in read_result_rows(run)} > {name for name, _ in possible}
    assert "Cost per question" in (run.path / "panorama.md").read_text()


@pytest.mark.slow
def test_earlier_results_stay_and_only_the_detectors_asked_for_are_added(run):
    gone = ("llmcheck_perplexity", "tfidf_svm")
    before = stamps(run)
    files = [f for f in before if f.stem in gone]
    assert len(files) == 4
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


@pytest.mark.slow
def test_every_rival_without_samples_passes_its_check(run):
    faults = {}
    for name, detector in catalogue().items():
        if not unmet(detector, run, BaselinesConfig()):
            done = beatrice("baselines", run.path, "--check", name, code=None)
            faults |= {name: done.output} if done.exit_code else {}
    # The small tokenizer has no token for the option "A", so nothing can be asked.
    assert faults.pop("p_true").count("no answer has a score") == 2
    assert faults == {}


NAMES = ("llmcheck_hidden", "p_true")
IDENTITIES = {"answers": "1", "samples": "2"}


def no_model():
    raise AssertionError("nothing was to be read")


def keep(cache, values, rows=None):
    """Leave parts on disk as an earlier start would, each of two seconds."""
    places = np.arange(len(values)) if rows is None else rows
    for chunk in chunks_of(int(places.max()) + 1):
        in_chunk = (places >= chunk.start) & (places < chunk.stop)
        arrays = {"values": values[in_chunk], "rows": places[in_chunk]}
        arrays |= {"seconds": np.float64(2), "peak_bytes": np.int64(chunk.start)}
        cache.save(f"{chunk.start:07d}", arrays)


def unread(wanted, caches, n_rows):
    """Return for each reading the rows that would be read now."""
    rows = {name: [] for name in wanted}
    for chunk in chunks_of(n_rows):
        for name, missing in load_chunk(wanted, caches, chunk)[1].items():
            rows[name] += missing
    return rows


def test_readings_of_an_earlier_start_are_not_read_again(tmp_path):
    given = drawn_inputs([["a"]] * 300)
    caches = {name: Cache(tmp_path / name, "key") for name in NAMES}
    states = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    scalars = np.arange(300, dtype=np.float32)
    for name, values in zip(NAMES, (states, scalars), strict=True):
        keep(caches[name], values)
    ticks = []
    wanted = dict.fromkeys(NAMES, np.arange(300))
    reading = AnswerReader(given, no_model)
    read = cached_readings(reading, wanted, 300, caches, lambda: ticks.append(1))
    np.testing.assert_array_equal(read.values["llmcheck_hidden"], states)
    np.testing.assert_array_equal(read.values["p_true"], scalars)
    assert read.seconds == dict.fromkeys(NAMES, 4.0) and len(ticks) == 2
    keep(caches["p_true"], np.where(np.arange(300) % 2, np.nan, scalars))
    again = cached_readings(reading, wanted, 300, caches)
    assert again.seconds["p_true"] == 8.0  # as if all had been read
    keep(caches["p_true"], scalars)
    # The largest of the parts, not their sum.
    assert read.peak_bytes == dict.fromkeys(NAMES, 256)
    assert unread(wanted, caches, 300) == {name: [] for name in NAMES}
    (tmp_path / "p_true" / "0000256.safetensors").unlink()
    assert unread(wanted, caches, 300)["p_true"] == list(range(256, 300))
    with pytest.raises(AssertionError, match="nothing was to be read"):
        cached_readings(reading, wanted, 300, caches)


def test_readings_are_held_in_memory_only_once_and_padded_where_samples_lack(tmp_path):
    n_rows = 2000
    states = np.arange(1000 * n_rows, dtype=np.float32).reshape(n_rows, 10, 100)
    caches = {x: Cache(tmp_path / x, "key") for x in ("p_true", "sample_states")}
    keep(caches["p_true"], states)
    # A chunk of fewer samples before one that widens it; others are not read at all.
    keep(caches["sample_states"], states[:300])
    keep(caches["sample_states"], states[:256, :2])
    wanted = {"p_true": np.arange(n_rows), "sample_states": np.arange(300)}
    reader = AnswerReader(None, no_model)
    tracemalloc.start()
    values = cached_readings(reader, wanted, n_rows, caches).values
    n_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(values["p_true"], states)
    states[:256, 2:] = states[300:] = np.nan
    np.testing.assert_array_equal(values["sample_states"], states)
    # One chunk, an eighth, is also in memory while it is loaded and checked.
    assert n_bytes < 1.5 * sum(x.nbytes for x in values.values())


def test_training_answers_are_read_only_for_detectors_that_learn_from_them(tmp_path):
    given = drawn_inputs([["a"]] * 12, splits=["train", "validation", "test"] * 4)
    detectors = [catalogue()[name] for name in ("llmcheck_hidden", "lookback_lens")]
    wanted = rows_read(given.rows, detectors)
    evaluated = np.array([row for row in range(12) if row % 3])
    np.testing.assert_array_equal(wanted["llmcheck_hidden_all"], evaluated)
    assert wanted["lookback"].tolist() == list(range(12))
    values = np.arange(12, dtype=np.float32)[:, None]
    caches = {"llmcheck_hidden_all": Cache(tmp_path, "key")}
    keep(caches["llmcheck_hidden_all"], values[evaluated], evaluated)
    wanted_rows = {"llmcheck_hidden_all": evaluated}
    read = cached_readings(AnswerReader(given, no_model), wanted_rows, 12, caches)
    laid_out = np.where(np.arange(12)[:, None] % 3 == 0, np.nan, values)
    np.testing.assert_array_equal(read.values["llmcheck_hidden_all"], laid_out)
    assert read.seconds["llmcheck_hidden_all"] == 3.0  # 2 for 8 rows, so 3 for 12
    # If every row is asked for, what is there does not suffice.
    whole = {"llmcheck_hidden_all": np.arange(12)}
    assert unread(whole, caches, 12)["llmcheck_hidden_all"] == list(range(12))


class Numbers:
    """A reader that gives a row's number and the length of the reading's name."""

    def __init__(self):
        self.calls = []

    def read(self, rows, names):
        self.calls.append((rows, names))
        return {x: np.array([[row, len(x)] for row in rows], float) for x in names}


def test_a_row_is_read_once_with_all_its_wanted_readings_and_kept(tmp_path):
    reader, (first, second) = Numbers(), NAMES
    wanted = {first: np.array([1, 2, 3, 299]), second: np.array([0, 2, 3, 299])}
    caches = {name: Cache(tmp_path / name, "key") for name in NAMES}
    read = cached_readings(reader, wanted, 300, caches)
    once = [([0], (second,)), ([1], (first,)), ([2, 3], NAMES), ([299], NAMES)]
    assert reader.calls == once
    again = cached_readings(AnswerReader(None, no_model), wanted, 300, caches)
    for name, rows in wanted.items():
        expected = np.full((300, 2), np.nan)
        expected[rows] = [(row, len(name)) for row in rows]
        np.testing.assert_array_equal(read.values[name], expected)
        np.testing.assert_array_equal(again.values[name], expected)


def test_a_row_is_read_alike_whatever_rows_are_read_with_it(smoke_run):
    run, names = (
        RunDir(smoke_run),
        ("lookback", "lumina_mmd", "p_true", "sample_states"),
    )
    inputs = run_inputs(run, "with_context")
    drawn = [(a_sample("x", token_ids=(5, 6)),) * 2] * len(inputs.rows.ids)
    inputs = dataclasses.replace(inputs, samples=drawn)
    reader = AnswerReader(inputs, partial(_open_backbone, run))
    together = reader.read([5, 0, 3], names)
    for place, row in enumerate((5, 0, 3)):
        for name, alone in reader.read([row], names).items():
            np.testing.assert_allclose(together[name][place], alone[0], atol=1e-5)
    moved = {name: np.abs(np.diff(x, axis=0)).max() for name, x in together.items()}
    assert np.isnan(moved.pop("p_true"))  # the small tokenizer has no such options
    assert min(moved.values()) > 1e-3


def test_lookback_is_read_alike_among_the_runs_answers_and_retrieved_ones(smoke_run):
    run = RunDir(smoke_run)
    inputs, open_run = run_inputs(run, "with_context"), partial(_open_backbone, run)
    others = dataclasses.replace(inputs, answers=inputs.answers[:1] * 9)
    alone = AnswerReader(others, open_run, inputs)
    among = AnswerReader(inputs, open_run)
    read = (reader.read([0], ["lookback"])["lookback"] for reader in (alone, among))
    np.testing.assert_array_equal(*read)
    keys = [
        reading_keys("closed_book", IDENTITIES | more, ("lookback", *NAMES))
        for more in ({}, {"cue": "3"})
    ]
    assert {name for name, key in keys[0].items() if key != keys[1][name]} == {
        "lookback"
    }


@pytest.mark.parametrize(
    ("changed", "gone"), [("answers", set(NAMES)), ("samples", {"p_true"})]
)
def test_draws_invalidate_only_readings_that_use_them_and_answers_all(changed, gone):
    before = reading_keys("closed_book", IDENTITIES, NAMES)
    after = reading_keys("closed_book", IDENTITIES | {changed: "9"}, NAMES)
    assert {name for name in NAMES if before[name] != after[name]} == gone


def test_rows_with_fewer_samples_are_filled_up_with_nan():
    rows = [np.ones((2, 3)), np.full((1, 3), 2.0), np.ones((0, 3))]
    together = stacked(rows)
    assert together.shape == (3, 2, 3)
    np.testing.assert_array_equal(np.isnan(together[..., 0]).sum(axis=1), [0, 1, 2])
    np.testing.assert_array_equal(stacked(list(np.arange(3.0))), [0, 1, 2])

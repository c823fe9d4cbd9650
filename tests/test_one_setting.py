"""Runs of questions without passages, with some, or asked only with passages."""

import collections
import dataclasses
import json

import msgspec
import pytest

from beatrice import load
from beatrice.extract.generate.prompts import ANSWER_PRESETS
from beatrice.extract.records import IN_DOMAIN, SETTINGS, read_records, write_lines
from beatrice.extract.run.contents import read_examples, settings_of
from beatrice.extract.run.rows import ResultRow
from tests.extract import small_run
from tests.extract.small_run import beatrice, questions

BARE = {"bare", "rephrased"}  # sets without passages in a mixed run
SETTINGS_OF = {
    "closed-book": SETTINGS,  # of questions without passages
    "mixed": SETTINGS,
    "with-context": ("with_context",),
}
HAS = SETTINGS_OF | {"closed-book": ("closed_book",)}
VERBS = "answer label extract sweep train select calibrate evaluate".split()


def bare(example, dataset):
    return msgspec.structs.replace(example, dataset=dataset, passages=(), rewritten=())


def examples_of(case, n_train=96):
    """Return questions of the microworld, with passages as the case has them."""
    result = questions(n_train=n_train, n_evaluation=n_train // 2, n_ood=n_train // 8)
    if case == "closed-book":
        return [bare(item, item.dataset) for item in result]
    if case == "mixed":  # every third in-domain question is bare
        for i, item in enumerate(result):
            dataset = item.dataset if item.split == "ood" or i % 3 else "bare"
            result[i] = bare(item, dataset) if dataset in BARE else item
    return result


def make_run(path, examples, settings):
    answer = dataclasses.replace(ANSWER_PRESETS["smoke"], settings=settings)
    run = small_run.make_run(path, examples, answer=answer)
    passages = {p.text: p for example in examples for p in example.passages}
    run.passages.write_text(write_lines(passages.values()))
    return run


@pytest.fixture(scope="module", params=list(SETTINGS_OF))
def case(request):
    return request.param


@pytest.fixture(scope="module")
def run(case, tmp_path_factory):
    """A run of each case, up to its report."""
    path = tmp_path_factory.mktemp("runs") / case
    result = make_run(path, examples_of(case), SETTINGS_OF[case])
    for verb in VERBS:
        beatrice(verb, path)
    if case == "mixed":
        beatrice("control", path)
    else:
        beatrice("select", path, "--exhaustive", "--optimism")
    beatrice("evaluate", path, "--ablations")
    beatrice("report", path)
    return result


def sets_of(run, setting):
    """Return the evaluated sets of a setting, with their counts of answers."""
    wanted = ("champion", "detection", setting, "auroc", "mean")
    return {
        (r.dataset, r.split): r.n
        for r in read_records(run.results, ResultRow)
        if (r.detector, r.experiment, r.setting, r.metric, r.seed) == wanted
    }


@pytest.mark.slow
def test_every_verb_works_on_the_settings_that_a_run_has(run, case):
    assert settings_of(run) == HAS[case]
    for folder in ("features", "encoders"):
        result = {path.name for path in (run.path / folder).iterdir()}
        assert result == set(HAS[case])
    assert "every checksum holds" in beatrice("doctor", run.path, "--verify").stdout
    beatrice("doctor", run.path)


@pytest.mark.slow
def test_rows_count_the_questions_that_a_setting_has(run, case):
    examples = [e for e in read_examples(run) if e.split != "train"]
    for setting in SETTINGS:
        n = collections.Counter()
        for example in examples:
            wordings = [x for x in (example.passages, example.rewritten) if x]
            n_rows = 1 if setting == "closed_book" else len(wordings)
            n[example.dataset, example.split] += n_rows
            if example.split != "ood":
                n[IN_DOMAIN, example.split] += n_rows
        n = +n if setting in HAS[case] else {}  # sets without rows are left out
        assert sets_of(run, setting) == n
        if case == "mixed":
            assert (setting == "closed_book") == (("bare", "test") in n)


@pytest.mark.slow
def test_an_answer_is_scored_in_the_settings_that_a_run_has(run, case):
    given = next(e for e in examples_of("with-context") if e.split == "test")
    row = {"question": given.question, "answer": given.golds[0]}
    by_setting = {
        "closed_book": row,
        "with_context": row | {"context": given.passages[0].text},
    }
    scorer = load(run.path)
    for setting, row in by_setting.items():
        if setting in HAS[case]:
            (many,) = scorer.score_many([row])
            assert 0 <= many.p_correct <= 1
            assert scorer.score(**row).p_correct == pytest.approx(many.p_correct)
            continue
        with pytest.raises(ValueError, match=f"fitted only on {HAS[case][0]} answers"):
            scorer.score(**row)
        options = [x for name, text in row.items() for x in (f"--{name}", text)]
        done = beatrice("score", run.path, *options, code=1)
        assert f"the answer is {setting}" in done.stderr


@pytest.mark.slow
def test_the_report_shows_only_the_settings_that_a_run_has(run, case):
    page = run.report.read_text(encoding="utf-8")
    assert ("Never retrieve" in page) == (case == "mixed")
    assert ("AUROC from memory" in page) == ("closed_book" in HAS[case])
    assert ("AUROC with passages" in page) == ("with_context" in HAS[case])
    if case == "mixed":  # a set without passages has no accuracy with context
        line = page.split('<th scope="row">bare<small>test</small></th>')[1]
        assert line.split("</tr>")[0].count('<span class="none">–</span>') == 2


@pytest.mark.slow
def test_control_leaves_out_the_sets_without_passages(run, case):
    if case != "mixed":
        done = beatrice("control", run.path, code=1)
        assert f"has only {HAS[case][0]}" in done.stderr
        return
    rows = [json.loads(x) for x in run.results.read_text().splitlines()]
    result = {r["dataset"] for r in rows if r["experiment"] == "controller"}
    assert result and not result & BARE


@pytest.mark.parametrize("case", list(SETTINGS_OF))
def test_a_run_has_the_settings_that_its_questions_allow(case, tmp_path):
    result = make_run(tmp_path / "run", examples_of(case, n_train=8), SETTINGS_OF[case])
    assert settings_of(result) == HAS[case]


def test_passages_of_only_held_out_questions_give_no_setting(tmp_path):
    examples = [x if x.split == "ood" else bare(x, x.dataset) for x in questions()]
    run = make_run(tmp_path / "run", examples, SETTINGS)
    assert settings_of(run) == ("closed_book",)


def test_one_of_the_two_settings_may_be_left_unasked(tmp_path):
    run = make_run(tmp_path / "run", questions(), ("closed_book",))
    done = beatrice("answer", run.path)
    assert "with_context: not in this run" in done.stderr
    lines = (run.answers / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["setting"] for line in lines} == {"closed_book"}


def test_asking_only_with_context_is_refused_for_questions_without_passages(tmp_path):
    file = tmp_path / "own.jsonl"
    lines = [{"question": f"{i}?", "golds": [str(i)]} for i in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = ["data", tmp_path / "run", "--model", "embedded", "--context", "none"]
    line += ["--train", f"own={file}", "--dev", f"own={file}"]
    line += ["--n-train", 10, "--n-evaluation", 4]
    done = beatrice(*line, "--settings", "with-context", code=1)
    assert "no training or no validation question has passages" in done.stderr
    assert not (tmp_path / "run").exists()
    beatrice(*line)  # control: accepted as closed-book


def test_rewrite_is_refused_if_no_question_is_asked_with_context(tmp_path):
    run = make_run(tmp_path / "run", questions(), ("closed_book",))
    server = ["--server", "http://localhost:1/v1", "--model", "m"]
    done = beatrice("rewrite", run.path, *server, code=1)
    assert "no context to rewrite" in done.stderr

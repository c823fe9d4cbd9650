"""Runs whose questions have no passages, some have, or are asked with them alone."""

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
HAS = {
    "closed-book": ("closed_book",),
    "mixed": SETTINGS,
    "with-context": ("with_context",),
}
VERBS = "answer label extract sweep train select calibrate evaluate".split()


def bare(example, dataset):
    return msgspec.structs.replace(example, dataset=dataset, passages=(), rewritten=())


def examples_of(case, n_train=96):
    """Return questions of the microworld, with passages as the case has them."""
    result = questions(n_train=n_train, n_evaluation=n_train // 2, n_ood=n_train // 8)
    if case == "closed-book":
        return [bare(item, item.dataset) for item in result]
    if case == "with-context":
        return result
    held_out = [item for item in result if item.split == "ood"]
    in_domain = [item for item in result if item.split != "ood"]
    in_domain = [
        bare(item, "bare") if i % 3 == 0 else item for i, item in enumerate(in_domain)
    ]
    return in_domain + [
        bare(item, item.dataset) if item.dataset in BARE else item for item in held_out
    ]


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
def test_rows_are_of_the_questions_that_a_setting_has(run, case):
    examples = read_examples(run)
    for setting in SETTINGS:
        if setting not in HAS[case]:
            assert not sets_of(run, setting)
            continue
        n = {}
        for example in examples:
            n_rows = (
                1
                if setting == "closed_book"
                else len([*filter(None, (example.passages, example.rewritten))])
            )
            if example.split != "train" and n_rows:
                key = (example.dataset, example.split)
                n[key] = n.get(key, 0) + n_rows
                if example.split != "ood":
                    key = (IN_DOMAIN, example.split)
                    n[key] = n.get(key, 0) + n_rows
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
        with pytest.raises(ValueError, match=f"trained on {HAS[case][0]} answers"):
            scorer.score(**row)
        options = [x for name, text in row.items() for x in (f"--{name}", text)]
        done = beatrice("score", run.path, *options, code=1)
        assert f"this answer is {setting}" in done.stderr


@pytest.mark.slow
def test_the_report_says_what_a_run_has_and_shows_no_other(run, case):
    page = run.report.read_text(encoding="utf-8")
    assert ("Never retrieve" in page) == (case == "mixed")
    for setting, label in (
        ("closed_book", "from memory"),
        ("with_context", "with passages"),
    ):
        assert (f"AUROC {label}" in page) == (setting in HAS[case])
    if case == "mixed":  # a set without passages has no accuracy with context
        line = page.split('<th scope="row">bare<small>test</small></th>')[1]
        assert line.split("</tr>")[0].count('<span class="none">–</span>') == 2


@pytest.mark.slow
def test_control_leaves_out_the_sets_in_which_there_is_nothing_to_find(run, case):
    if case != "mixed":
        done = beatrice("control", run.path, code=1)
        assert f"has {HAS[case][0]} alone" in done.stderr
        return
    rows = [json.loads(x) for x in run.results.read_text().splitlines()]
    result = {r["dataset"] for r in rows if r["experiment"] == "controller"}
    assert result and not result & BARE


@pytest.mark.parametrize("case", list(SETTINGS_OF))
def test_a_run_has_the_settings_that_its_questions_allow(case, tmp_path):
    result = make_run(tmp_path / "run", examples_of(case, n_train=8), SETTINGS_OF[case])
    assert settings_of(result) == HAS[case]


def test_passages_of_held_out_questions_alone_teach_no_setting(tmp_path):
    result = questions()
    examples = [
        item if item.split == "ood" else bare(item, item.dataset) for item in result
    ]
    assert settings_of(make_run(tmp_path / "run", examples, SETTINGS)) == (
        "closed_book",
    )


def test_half_may_be_left_unasked(tmp_path):
    run = make_run(tmp_path / "run", questions(), ("closed_book",))
    done = beatrice("answer", run.path)
    assert "with_context: not in this run" in done.stderr
    lines = (run.answers / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["setting"] for line in lines} == {"closed_book"}


def test_context_alone_is_refused_of_questions_without_passages(tmp_path):
    questions_file = tmp_path / "own.jsonl"
    lines = [{"question": f"{i}?", "golds": [str(i)]} for i in range(20)]
    questions_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [
        "--train",
        f"own={questions_file}",
        "--dev",
        f"own={questions_file}",
        "--n-train",
        10,
    ]
    options += ["--model", "embedded", "--n-evaluation", 4, "--context", "none"]
    options += ["--settings", "with-context"]
    done = beatrice("data", tmp_path / "run", *options, code=1)
    assert "no training or no validation question has passages" in done.stderr
    assert not (tmp_path / "run").exists()
    beatrice("data", tmp_path / "run", *options[:-2])  # control: closed-book it is


def test_there_is_nothing_to_reword_where_no_context_is_asked(tmp_path):
    run = make_run(tmp_path / "run", questions(), ("closed_book",))
    server = ["--server", "http://localhost:1/v1", "--model", "m"]
    done = beatrice("rewrite", run.path, *server, code=1)
    assert "no context to rewrite" in done.stderr

"""`beatrice data` as a person meets it."""

import json

import pytest

from tests.extract.datasets import published as pub
from tests.extract.small_run import beatrice
from tests.test_cli import beatrice as process


def assert_one_sentence(done, *words):
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last, last


@pytest.fixture
def hotpot(tmp_path):
    return pub.write_array(tmp_path / "hotpot", [pub.hotpot(i) for i in range(60)])


def test_inspect_says_what_a_file_is(hotpot):
    done = beatrice("data", "--inspect", hotpot, "--json")
    report = json.loads(done.stdout)
    expected = {
        "ok": True,
        "dataset": "hotpotqa",
        "format": "HotpotQA",
        "container": "json array",
        "records": 60,
        "loaded": 60,
        "with_passages": 60,
        "with_gold_passages": 60,
        "refused": 0,
        "refusals": [],
        "error": None,
    }
    assert {key: report[key] for key in expected} == expected
    assert "HotpotQA; json array" in beatrice("data", "--inspect", hotpot).stdout


def test_a_refused_record_is_named_and_skip_bad_tolerates_it(tmp_path):
    records = [pub.hotpot(i) for i in range(30)]
    for record in records[2:27]:
        del record["answer"]
    path = pub.write_array(tmp_path / "a.json", records)
    done = beatrice("data", "--inspect", path, code=1)
    assert_one_sentence(done, "25 of 30 records", "record 3", "no 'answer'")
    assert "and 5 more" in done.stdout
    done = beatrice("data", "--inspect", path, "--json", "--skip_bad")
    report = json.loads(done.stdout)
    assert [r["record"] for r in report["refusals"]] == list(range(3, 28))


def test_a_refused_file_is_one_sentence_and_still_json(tmp_path):
    path = tmp_path / "half.json"
    whole = json.dumps([pub.hotpot(i) for i in range(9)])
    path.write_text(whole[:3000])
    done = beatrice("data", "--inspect", path, "--json", "--skip-bad", code=1)
    assert_one_sentence(done, "cut off")
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert report["loaded"] > 0
    done = beatrice("data", "--inspect", tmp_path / "none.json", "--json", code=1)
    assert_one_sentence(done, "no such file")
    assert json.loads(done.stdout)["dataset"] is None


def test_splits_are_drawn_checked_and_refused_when_changed(hotpot, tmp_path):
    out = tmp_path / "out"
    line = ("data", out, "--train", f"hotpotqa={hotpot}", "--n-train", 20)
    line += ("--model", "embedded")
    done = beatrice(*line, "--json")
    assert json.loads(done.stdout)["sizes"] == {"train": {"hotpotqa": 20}}
    beatrice(*line)  # finished already
    beatrice("doctor", out, "--verify")
    splits = out / "splits.json"
    splits.write_text(splits.read_text().replace('"seed": 0', '"seed": 1'))
    verified = beatrice("doctor", out, "--verify", code=1)
    assert "splits.json has changed since" in verified.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("out",),
        ("out", "--inspect", "x"),
        ("out", "--train", "x.json"),
        ("out", "--train", "../squad=x.json"),
        ("out", "--world", "--train", "nq=x"),
        ("out", "--train", "nq=x", "--n-held-out", "nq=many"),
        ("--inspect", "../squad=x"),
    ],
)
def test_wrong_usage_is_told_from_a_refusal(arguments):
    beatrice("data", *arguments, code=2)


def test_a_file_name_that_is_no_utf8_is_shown(tmp_path):
    path = tmp_path / "caf\udce9.json"
    path.write_text(json.dumps([pub.hotpot(i) for i in range(3)]))
    for options in ((), ("--json",)):
        done = process("data", "--inspect", path, *options)
        assert done.returncode == 0, done.stderr


def test_one_set_may_have_a_context_of_its_own(hotpot, tmp_path):
    table = pub.write_table(tmp_path / "p.tsv", [pub.popqa(i) for i in range(20)])
    command = ["data", tmp_path / "run", "--dev", f"hotpotqa={hotpot}"]
    command += ["--model", "embedded"]
    command += ["--held-out", f"popqa={table}", "--n-held-out", "popqa=5"]
    command += ["--n-evaluation", "5", "--context", "supporting"]
    assert_one_sentence(beatrice(*command, code=1), "--context popqa=none")
    twice = beatrice(*command, "--context", "all", code=2)
    assert "another one was given" in twice.stderr
    command += ["--context", "popqa=none"]
    unknown = beatrice(*command, "--n-train", "popqa=3", code=1)
    assert_one_sentence(unknown, "no training file of popqa is given")
    done = beatrice(*command, "--json")
    assert "closed-book only" in done.stderr
    sources = json.loads(done.stdout)["sources"]
    assert [s["context"] for s in sources] == ["supporting", "none"]

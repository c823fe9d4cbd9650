"""The verb `fit`: from a model and questions to a probe, or a sentence why not."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import beatrice
from beatrice.cli import main
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.store.store import read_family
from beatrice.own_model import split_answers


def called(*words):
    return CliRunner().invoke(main, ["fit", *map(str, words)])


@pytest.fixture
def questions(smoke_run, tmp_path):
    examples = read_examples(RunDir(smoke_run))
    path = tmp_path / "questions.jsonl"
    rows = [{"question": e.question, "golds": list(e.golds)} for e in examples]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_model_and_questions_become_a_probe_that_says_what_it_is_worth(
    questions, tmp_path
):
    done = called("embedded", questions, tmp_path / "probe", "--untrustworthy")
    assert done.exit_code == 0, done.output
    for words in ("perplexity", "text alone", "length alone", "ECE", "minutes"):
        assert words in done.output
    lines = (tmp_path / "probe" / "examples.jsonl").read_text().splitlines()
    assert len(lines) == 5  # whose P is looked at where the probe is loaded
    assert (
        "| perplexity's | of text alone |" in (tmp_path / "probe/README.md").read_text()
    )
    assert not (tmp_path / "probe.work").exists()
    probe = beatrice.load(tmp_path / "probe")
    score = probe.answer("where was Skiband Rugrond born?")
    assert 0 < score.p_correct < 1
    if probe.detector.doubts:
        assert score.decision == "unknown" and "trust" in score.warnings[0]


def test_answers_that_are_all_wrong_or_few_are_refused_with_how_many_would_do(
    questions, tmp_path
):
    lines = [
        {"question": f"where is place {i}?", "answer": "here", "label": i < 5}
        for i in range(24)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = called("embedded", "--labelled", path, tmp_path / "probe")
    assert done.exit_code == 1 and "40 of each would do" in done.output
    assert not (tmp_path / "probe").exists()
    path.write_text("\n".join(map(json.dumps, lines[5:])), encoding="utf-8")
    done = called("embedded", "--labelled", path, tmp_path / "probe")
    assert "too few to fit: 0 right and 19 wrong" in done.output


def test_answers_that_match_no_gold_are_said_at_once_with_what_to_do(
    questions, tmp_path
):
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    lines = [json.dumps({**row, "golds": ["nothing like it"]}) for row in rows][:60]
    questions.write_text("\n".join(lines), encoding="utf-8")
    done = called("embedded", questions, tmp_path / "probe")
    assert done.exit_code == 1
    assert "none of the first 50 answers is right ('" in done.output
    assert "expected 'nothing like it'" in done.output and "--labelled" in done.output


def test_a_fit_that_was_killed_goes_on_with_the_answers_that_are_there(tmp_path):
    model = beatrice.LanguageModel("embedded")
    questions = [f"where was Skiband {word} born?" for word in "abcdefghij" * 30]
    store = tmp_path / "signals"
    whole, expected = model.answer(questions, max_new_tokens=4, read=True, store=store)
    files = tmp_path / "signals.written"
    lines = (files / "answers.jsonl").read_text().splitlines()
    marked = [lines[0].replace(whole[0].text, "marked", 1), *lines[1:256]]
    (files / "answers.jsonl").write_text("\n".join(marked) + '\n{"exam')
    second = max(files.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    second.unlink()
    shutil.rmtree(store)
    again, signals = model.answer(questions, max_new_tokens=4, read=True, store=store)
    assert again[0].text == "marked" and again[1:] == whole[1:]
    assert second.exists()
    prob = [
        read_family(x.store, "prob", np.arange(300)).values for x in (expected, signals)
    ]
    np.testing.assert_allclose(*prob, atol=1e-5)
    with pytest.raises(ValueError, match="other content"):
        model.answer(questions, max_new_tokens=5, read=True, store=store)


def test_what_the_verb_cannot_use_is_one_sentence_before_a_model_is_loaded(
    questions, tmp_path
):
    empty, odd = tmp_path / "empty.jsonl", tmp_path / "odd.jsonl"
    empty.write_text("")
    odd.write_text('{"question": "q", "answer": "a", "label": "yes"}')
    goldless = tmp_path / "goldless.jsonl"
    goldless.write_text('{"question": "who?"}')
    cases = [
        ((questions,), "QUESTIONS and PROBE_FOLDER"),
        ((questions, tmp_path), "is there already"),
        ((empty, tmp_path / "p"), ""),
        ((goldless, tmp_path / "p"), ""),
        (("--labelled", empty, tmp_path / "p"), "no line"),
        (("--labelled", odd, tmp_path / "p"), "line 1"),
    ]
    for words, named in cases:
        done = called("nowhere/no-model", *words)
        assert done.exit_code in (1, 2) and "Error: " in done.output, done.output
        assert named in done.output and "Traceback" not in done.output
        assert "no-model" not in done.output


def test_every_part_has_its_share_of_the_right_answers():
    labels = np.arange(400) % 10 == 0
    splits = split_answers(labels, [str(i) for i in range(400)])
    for name, n in {"train": 200, "validation": 100, "test": 100}.items():
        assert (splits == name).sum() == n
        assert labels[splits == name].sum() == n // 10


def test_answers_to_one_question_are_not_torn_apart():
    rng = np.random.default_rng(0)
    labels, questions = rng.random(400) < 0.4, [str(i % 80) for i in range(400)]
    splits = split_answers(labels, questions)
    assert {len(set(splits[k::80])) for k in range(80)} == {1}
    assert set(splits) == {"train", "validation", "test"}
    with pytest.raises(ValueError, match="160 right and 240 wrong answers to 2 quest"):
        split_answers(np.arange(400) % 5 < 2, [str(i % 2) for i in range(400)])

"""The verb `fit`: from a model and questions to a probe, or a sentence why not."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import beatrice
from beatrice.cli import main
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
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
    for words in ("held back", "perplexity", "length alone", "ECE", "minutes"):
        assert words in done.output
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
    splits = split_answers(labels)
    for name, n in {"train": 200, "validation": 100, "test": 100}.items():
        assert (splits == name).sum() == n
        assert labels[splits == name].sum() == n // 10

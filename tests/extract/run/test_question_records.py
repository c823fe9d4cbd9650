"""Questions of a run are refused where their names or splits would do harm."""

import json

import pytest

from beatrice.extract.records import (
    Example,
    from_json,
    is_safe_id,
    is_safe_name,
    to_json,
)
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import write_text_atomic
from tests.records import an_example

EXAMPLE = an_example(
    id="capitals-1", dataset="capitals", split="train", question="Capital of Malawi?"
)


def line(**changes):
    return json.dumps(json.loads(to_json(EXAMPLE)) | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "x/../../../ESCAPED/pwn"}, "'x/../../../ESCAPED/pwn' is no name"),
        ({"dataset": ".."}, "'..' is no name"),
        ({"dataset": ""}, "'' is no name"),
        ({"dataset": "a" * 65}, "at most 64 characters"),
        ({"dataset": "städte"}, "is no name"),
        ({"dataset": "macro"}, "none of all in-domain, macro"),
        ({"id": "../"}, "'../' is empty"),
        ({"id": "capitals-../../x"}, "a way to another folder"),
        ({"id": ""}, "'' is empty"),
        ({"id": "a\nb"}, "cannot be shown"),
        ({"golds": []}, "'capitals-1' has no gold answer"),
        ({"golds": [" "]}, "has no gold answer"),
    ],
)
def test_a_question_that_could_do_harm_is_refused_when_it_is_read(changes, words):
    with pytest.raises(ValueError) as caught:
        from_json(Example, line(**changes), "examples.jsonl, line 7")
    assert str(caught.value).startswith("examples.jsonl, line 7")
    assert words in str(caught.value)


def test_published_names_are_safe():
    assert all(map(is_safe_name, ("hotpotqa", "2wikimultihopqa", "my-set_1.0")))
    published = ("hotpotqa-5a7a06935542990198eaf050", "2hop__482757_12019")
    assert all(map(is_safe_id, (*published, "tc_33--180/180_47.txt", "who is it...?")))


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no questions"),
        ([line(), line(question="Capital of Mali?")], "line 2: the id 'capitals-1' is"),
        (
            [line(), line(id="2", split="test", question="capital of  MALAWI")],
            "is in the split test, and as 'capitals-1' in train too",
        ),
    ],
)
def test_an_empty_file_an_id_twice_and_a_leak_are_refused(run, lines, words):
    write_text_atomic(run.examples, "".join(f"{one}\n" for one in lines))
    with pytest.raises(ValueError) as caught:
        read_examples(run)
    assert str(run.examples) in str(caught.value) and words in str(caught.value)


def test_one_text_twice_in_a_split_is_no_leak(run):
    write_text_atomic(run.examples, f"{line()}\n{line(id='2')}\n")
    assert [example.id for example in read_examples(run)] == ["capitals-1", "2"]


def test_an_answer_to_no_question_of_the_run_is_refused(run):
    write_text_atomic(run.examples, f"{line()}\n")
    answer = {
        "example_id": "capitals-9",
        "setting": "closed_book",
        "variant": "original",
        "text": "a",
        "prompt_ids": [1],
        "token_ids": [2],
        "stop_id": 3,
        "context_span": [0, 0],
    }
    write_text_atomic(run.answers_file, json.dumps(answer) + "\n")
    with pytest.raises(ValueError, match="'capitals-9', which is not in .*examples"):
        read_answers(run)

import json
import math
import re

import msgspec
import pytest

from beatrice.extract.records import (
    Answer,
    Example,
    Label,
    Passage,
    is_safe_id,
    is_safe_name,
    read_records,
    to_json,
    write_lines,
)
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import from_json, write_text_atomic
from tests.records import an_answer, an_example

EXAMPLE = Example(
    id="q1",
    dataset="capitals",
    split="test",
    question="Capital of Malawi?",
    golds=("Lilongwe", "Lilongwé"),
    passages=(Passage(title="Malawi", text="…", is_supporting=True),),
    meta={"hops": 1, "path": ["a", "b"]},
)
ANSWER = Answer(
    example_id="q1",
    setting="with_context",
    variant="rewritten",
    text="Lilongwe",
    prompt_ids=(1, 5, 6),
    token_ids=(7,),
    stop_id=None,
    context_span=(1, 2),
)
LABEL = Label(
    example_id="q1",
    setting="closed_book",
    variant="original",
    verdicts=("yes", "no"),
    label=None,
    reason="judges disagree",
)


@pytest.mark.parametrize("record", [EXAMPLE, ANSWER, LABEL])
def test_a_record_survives_its_line(record):
    assert from_json(type(record), to_json(record), "here") == record


def test_a_file_of_records_survives_the_disk(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text(write_lines([LABEL, LABEL]), encoding="utf-8")
    assert list(read_records(path, Label)) == [LABEL, LABEL]


def with_field(record, name, value):
    return json.dumps(json.loads(to_json(record)) | {name: value})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            with_field(LABEL, "lable", True),
            "unknown field lable; expected one of example_id, setting",
        ),
        ('{"example_id": "q1"}', "missing required field setting"),
        (with_field(LABEL, "setting", "open_book"), "expected one of closed_book"),
        (
            with_field(LABEL, "label", 1),
            r"field 'label': expected bool \| null, found int",
        ),
        ("[1, 2]", "expected object, found array"),
        ("", "not a JSON object"),
        ('{"example_id": "\udcff"}', "no UTF-8"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "labels.jsonl"
    content = f"{to_json(LABEL)}\n{line}\n"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=complaint) as caught:
        list(read_records(path, Label))
    assert f"{path}, line 2" in str(caught.value)


WRONG = [None, True, 1, 1.5, "x", [], ["x"], [1, "x"], [[]], {}, {"x": 1}]


@pytest.mark.parametrize("record", [EXAMPLE, ANSWER, LABEL])
def test_a_value_of_another_type_is_refused_by_its_field(record):
    kind, whole = type(record), json.loads(to_json(record))
    n_refused = 0
    for name, value in ((name, value) for name in whole for value in WRONG):
        line = with_field(record, name, value)
        try:
            result = from_json(kind, line, "here")
        except ValueError as error:
            words = f"here([,:] field '{name}|: context_span is)"
            assert re.match(words, str(error))
            n_refused += 1
        else:
            assert json.loads(to_json(result)) == {**whole, name: value}
    assert n_refused > 5 * len(whole)


def test_what_python_writes_and_json_has_not_is_read_back():
    odd = msgspec.structs.replace(EXAMPLE, meta={"pop": math.inf, "name": "\ud800"})
    assert from_json(Example, to_json(odd), "here") == odd


def test_the_bytes_of_a_line_are_those_of_pythons_writer():
    assert to_json(EXAMPLE) == (
        '{"id": "q1", "dataset": "capitals", "split": "test", "question": "Capital of '
        'Malawi?", "golds": ["Lilongwe", "Lilongw\\u00e9"], "passages": [{"title": '
        '"Malawi", "text": "\\u2026", "is_supporting": true}], "rewritten": [], '
        '"meta": {"hops": 1, "path": ["a", "b"]}}'
    )


@pytest.mark.parametrize(
    ("record", "field", "value", "words"),
    [
        (ANSWER, "token_ids", [True], "expected int, found bool"),
        (
            EXAMPLE,
            "passages",
            [{"title": "t", "txt": "x"}],
            r"field 'passages\[0\]'.*unknown field txt",
        ),
    ],
)
def test_what_is_wrong_inside_a_field_is_named(record, field, value, words):
    with pytest.raises(ValueError, match=words):
        from_json(type(record), with_field(record, field, value), "here")


QUESTION = an_example(
    id="capitals-1", dataset="capitals", split="train", question="Capital of Malawi?"
)


def line(**changes):
    return json.dumps(json.loads(to_json(QUESTION)) | changes)


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
    write_text_atomic(run.examples, "".join(f"{item}\n" for item in lines))
    with pytest.raises(ValueError) as caught:
        read_examples(run)
    assert str(run.examples) in str(caught.value) and words in str(caught.value)


def test_one_text_twice_in_a_split_is_no_leak(run):
    write_text_atomic(run.examples, f"{line()}\n{line(id='2')}\n")
    assert [example.id for example in read_examples(run)] == ["capitals-1", "2"]


def test_an_answer_to_no_question_of_the_run_is_refused(run):
    write_text_atomic(run.examples, f"{line()}\n")
    answer = an_answer(example_id="capitals-9")
    write_text_atomic(run.answers_file, write_lines([answer]))
    with pytest.raises(ValueError, match="'capitals-9', which is not in .*examples"):
        read_answers(run)

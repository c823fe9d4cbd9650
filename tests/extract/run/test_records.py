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
    read_records,
    to_json,
    write_lines,
)
from beatrice.extract.run.files import from_json

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
            found = from_json(kind, line, "here")
        except ValueError as error:
            words = f"here([,:] field '{name}|: context_span is)"
            assert re.match(words, str(error))
            n_refused += 1
        else:
            assert json.loads(to_json(found)) == {**whole, name: value}
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


def test_a_bad_field_of_a_passage_is_named_with_its_place():
    line = with_field(EXAMPLE, "passages", [{"title": "t", "txt": "x"}])
    with pytest.raises(ValueError, match=r"field 'passages\[0\]'.*unknown field txt"):
        from_json(Example, line, "here")


def test_a_truth_value_is_not_a_token():
    with pytest.raises(ValueError, match="expected int, found bool"):
        from_json(Answer, with_field(ANSWER, "token_ids", [True]), "here")

import json

import pytest

from extract.records import (
    Answer,
    Example,
    Label,
    Passage,
    _from_object,
    _NotSo,
    _reader,
    from_json,
    read_records,
    to_json,
    write_lines,
)

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
        (with_field(LABEL, "lable", True), "unknown field 'lable'"),
        ('{"example_id": "q1"}', "needs the field 'setting'"),
        (with_field(LABEL, "setting", "open_book"), "expected one of closed_book"),
        (with_field(LABEL, "label", 1), "expected bool, found int"),
        ("[1, 2]", "expected an object, found list"),
        ("", "not a JSON object"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "labels.jsonl"
    path.write_text(f"{to_json(LABEL)}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=complaint) as caught:
        list(read_records(path, Label))
    assert f"{path}, line 2" in str(caught.value)


WRONG = [None, True, 1, 1.5, "x", [], ["x"], [1, "x"], [[]], {}, {"x": 1}]


@pytest.mark.parametrize("record", [EXAMPLE, ANSWER, LABEL])
def test_the_fast_reader_takes_what_the_explaining_one_takes(record):
    kind, whole = type(record), json.loads(to_json(record))
    outcomes = set()
    for changed in whole, *({**whole, n: x} for n in whole for x in WRONG):
        try:
            explained = _from_object(kind, changed, "here")
        except ValueError:
            with pytest.raises(_NotSo):
                _reader(kind)(changed)
            outcomes.add("refused")
        else:
            assert _reader(kind)(changed) == explained
            outcomes.add("taken")
    assert outcomes == {"refused", "taken"}


def test_a_bad_field_of_a_passage_is_named_with_its_place():
    line = with_field(EXAMPLE, "passages", [{"title": "t", "txt": "x"}])
    with pytest.raises(ValueError, match="field 'passages'.*unknown field 'txt'"):
        from_json(Example, line, "here")


def test_a_truth_value_is_not_a_token():
    with pytest.raises(ValueError, match="expected int, found bool"):
        from_json(Answer, with_field(ANSWER, "token_ids", [True]), "here")

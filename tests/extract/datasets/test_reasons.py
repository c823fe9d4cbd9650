"""What a report says of refused records: alike reasons as one, fields by their name."""

import pytest
from click.testing import CliRunner

from extract.datasets.commands import data
from extract.datasets.inspection import inspect_file
from tests.extract.datasets import published as pub

PLAIN = {"question": "who", "title": "T", "short_answers": ["a"]}
NAMES = ["Ann", "O'Neil", 'so-called "pol"', "both ' and \""]
# Reasons that differ in a value alone, whatever quotes Python puts around it.
ALIKE = {
    "taken ids": [pub.hotpot(0)]
    + [pub.hotpot(0, _id=name) for name in NAMES for _ in range(2)][1:],
    "lists that cannot be told": [
        {"question": "q", "answers": f"[{name}, ..."} for name in NAMES
    ],
    "missing values": [{"question": "q", "answer": name} for name in ("nan", "null")],
    "foreign sets": [
        pub.flashrag(i, dataset=name) for i, name in enumerate(("squad", "webq's"))
    ],
    "marks": [pub.musique(i, answerable=name) for i, name in enumerate(NAMES)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_alike_reasons_are_counted_as_one(name, tmp_path):
    report = inspect_file(pub.write_lines(tmp_path / "a", ALIKE[name]))
    (count,) = report["reasons"].values()
    assert count == report["refused"] > 1


def test_reasons_of_different_kinds_stay_apart(tmp_path):
    records = [
        {"question": "q", "answers": "[Ann, ..."},
        {"question": "q", "answers": "['a' 'b']"},
        {"question": "q"},
        {"question": "q", "answers": [5]},
    ]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert list(report["reasons"].values()) == [1, 1, 1, 1]


HUB = {"question": "Who?", "question_id": "tc_1", "entity_pages": {}}
FIELDS = {
    "a target": (
        pub.lm_eval() | {"doc": {"question": "q"}, "target": 5},
        "target",
    ),
    "KILT's output": ({"id": "1", "input": "q", "output": []}, "output[].answer"),
    "the hub's answer": (HUB | {"answer": {"value": ""}}, "answer"),
    "the hub's null": (HUB | {"answer": None}, "answer"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_called_by_the_name_it_has_in_the_file(name, tmp_path):
    record, field = FIELDS[name]
    (refusal,) = inspect_file(pub.write_lines(tmp_path / "a", [record]))["refusals"]
    assert f"'{field}'" in refusal["reason"]


def test_a_context_that_is_absent_is_not_called_null(tmp_path):
    records = [PLAIN | {"context": "It is a."}, PLAIN | {"question_tokens": []}]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert [one["reason"] for one in report["refusals"]] == ["no 'context'"]


OTHERS = {
    "instructions": (
        {"instruction": "Say", "input": "", "output": "words"},
        "are of no known layout",
    ),
    "MuSiQue's own": (
        {"question_text": "q", "answer_text": "a", "contexts": [], "question_id": "2"},
        "own programs",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_is_called_what_it_is(name, tmp_path):
    record, words = OTHERS[name]
    assert words in inspect_file(pub.write_lines(tmp_path / "a", [record]))["error"]


def test_what_is_counted_and_not_listed_is_said(tmp_path):
    path = pub.write_lines(tmp_path / "a", [{"question": "q"}] * 1003)
    assert inspect_file(path)["refusals_not_listed"] == 3
    shown = CliRunner().invoke(data, ["--inspect", str(path)]).output
    assert "983 more; --json lists the first 1000 of all, 3 are" in shown

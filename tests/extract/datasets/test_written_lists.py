"""Answers in a list that was written as text: what it says, or why it is refused."""

import json

import pytest

from extract.datasets.inspection import inspect_file
from extract.datasets.loading import Loaded, open_dataset
from tests.extract.datasets import published as pub


def read(tmp_path, record):
    (found,) = open_dataset(pub.write_lines(tmp_path / "one", [record])).read()
    return found


TWICE = json.dumps('["a", "b"]')
READ = {
    "JSON": ("possible_answers", '["a", "b"]', ("a", "b")),
    "JSON inside JSON": ("possible_answers", TWICE, ("a", "b")),
    "JSON three times": ("possible_answers", json.dumps(TWICE), ("a", "b")),
    "Python": ("answers", "['a', 'b']", ("a", "b")),
    "Python, both quotes": ("answers", """['a', "b's"]""", ("a", "b's")),
    "Python, escaped": ("answers", r"""['it\'s', "b"]""", ("it's", "b")),
    "a tuple": ("answer", "('a', 'b')", ("a", "b")),
    "a bare word": ("possible_answers", "politician", ("politician",)),
    "a song": ("answer", "[Chorus] hey", ("[Chorus] hey",)),
    "braces": ("answer", "{x} set", ("{x} set",)),
    "another song": ("answer", "(I Can't Get No) Day", ("(I Can't Get No) Day",)),
    "a quoted word": ("answer", '"x"', ('"x"',)),
    "a bar in a singular name": ("answer", "a|b", ("a|b",)),
    "a word of which null is a part": ("answer", "null set", ("null set",)),
}


@pytest.mark.parametrize("name", READ)
def test_a_list_written_as_text_is_read_as_it_was_meant(name, tmp_path):
    field, value, golds = READ[name]
    found = read(tmp_path, {"question": "who is it", field: value})
    assert isinstance(found, Loaded), found
    assert found.question.golds == golds


REFUSED = {
    "NumPy's list": ("answers", "['a' 'b']", "without a comma"),
    "NumPy's list over lines": ("possible_answers", "['a'\n 'b']", "without a comma"),
    "JSON without its comma": ("answer", '["a" "b"]', "without a comma"),
    "NumPy's array": ("answer", "array(['a', 'b'], dtype=object)", "tolist"),
    "numbers": ("possible_answers", "[1999]", "found a number"),
    "nothing": ("possible_answers", "[null]", "found null"),
    "a list in a list": ("possible_answers", '[["a"]]', "found a list"),
    "an object": ("possible_answers", '{"a": 1}', "found an object"),
    "a set": ("answer", "{'a'}", "found set"),
    "null": ("possible_answers", "null", "a missing value"),
    "nan": ("answer", "nan", "a missing value"),
    "half a list": ("answer", "['a", "JSON or as a Python literal"),
    "words in brackets": ("possible_answers", "[a, b]", "JSON or as a Python literal"),
    "bars": ("possible_answers", "a|b", "whether the bars"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_that_cannot_be_told_is_refused_and_never_one_answer(name, tmp_path):
    field, value, words = REFUSED[name]
    assert words in read(tmp_path, {"question": "who is it", field: value}).reason


@pytest.mark.parametrize("target", ["['a' 'b']", "None"])
def test_the_target_of_a_log_is_held_to_the_same_and_called_by_its_name(
    target, tmp_path
):
    log = pub.lm_eval() | {"doc": {"question": "Who?"}, "target": target}
    assert read(tmp_path, log).reason.startswith("'target': ")
    plain = log | {"target": "[Chorus] hey"}
    assert read(tmp_path, plain).question.golds == ("[Chorus] hey",)


def test_numpys_list_in_the_second_column_is_refused_row_by_row(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("who is a\t['a' 'b']\nwho is b\t['b']\nwho is c\tNone\n")
    report = inspect_file(path)
    assert (report["loaded"], report["refused"], report["golds"]) == (1, 2, 1)


@pytest.mark.parametrize("write", [pub.write_table, pub.write_lines])
def test_a_header_in_the_middle_of_a_table_is_no_record(write, tmp_path):
    rows = [pub.popqa(0), dict.fromkeys(pub.popqa(0)), pub.popqa(1)]
    rows[1] = {name: name for name in rows[1]}
    report = inspect_file(write(tmp_path / "popqa.tsv", rows))
    is_table = write is pub.write_table
    assert report["records"] == 3
    assert report["refused"] == is_table  # as JSON it may be anything
    if is_table:
        (refusal,) = report["refusals"]
        assert (refusal["record"], refusal["at"]) == (2, "line 3")
        assert "column names again" in refusal["reason"]

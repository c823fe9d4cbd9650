"""Files of labelled answers in the forms of users' tables and logs."""

import json

import pandas as pd
import pytest

from beatrice import LanguageModel
from beatrice.own_model import read_given, read_labelled
from tests.extract.datasets.published import write_lines
from tests.extract.small_run import beatrice

AS_WRITTEN = {
    True: (True, 1, 1.0, "true", "True", "TRUE", " 1 ", "1.0"),
    False: (False, 0, 0.0, "false", "False", "FALSE", "0", "0.0"),
    None: (None, float("nan"), "", " ", "null", "NaN", "<NA>"),
}
KNOWN = [(written, label) for label in AS_WRITTEN for written in AS_WRITTEN[label]]


def a_row(label, **more):
    return {"question": "where?", "answer": "Rome", "label": label, **more}


def test_labels_are_read_in_every_usual_spelling_and_missing_or_both_are_counted(
    tmp_path,
):
    rows = [a_row(written) for written, _ in KNOWN]
    notes = []
    read = read_labelled(write_lines(tmp_path / "l.jsonl", rows), notes.append)
    assert [label for _, label, _ in read] == [x for _, x in KNOWN if x is not None]
    assert notes == [
        "answers without a label, left out: 7 of 23",
        "answers labelled both right and wrong, with both labels used: 1",
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("labels", [[True, False, True], [1, 0, 1], [1, 0, None]])
def test_a_table_written_by_pandas_keeps_its_labels(tmp_path, suffix, labels):
    path, notes = tmp_path / f"table.{suffix}", []
    rows = [a_row(x, question=f"where {i}?") for i, x in enumerate(labels)]
    table = pd.DataFrame(rows)
    write = table.to_csv if suffix == "csv" else table.to_parquet
    write(path, index=False)
    read = read_labelled(path, notes.append)
    assert [label for _, label, _ in read] == [bool(x) for x in labels if x is not None]
    assert len(notes) == labels.count(None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (a_row("maybe"), "'label': expected true or false (or 1 or 0), found 'maybe'"),
        (a_row(2), "'label': expected true or false (or 1 or 0), found 2"),
        (a_row([True]), "'label': expected true or false (or 1 or 0), found [True]"),
        (a_row(True, answer=None), "'answer': expected text, found null"),
        (
            a_row(True, documents=[{"url": "u"}]),
            "'documents': expected passages as a list of texts, or of objects with "
            "'title' and 'text', found a list that begins with an object; convert "
            "them, or remove the field to read the question without passages",
        ),
        (a_row(True, question=3), "'question': expected text, found a number"),
        (
            {"question": "q", "answer": "a", "correct": True},
            "no 'label'; expected 'question', 'answer' and 'label'; rename 'correct' "
            "to 'label' if that is what it says",
        ),
    ],
)
def test_a_bad_labelled_answer_is_refused_by_line_and_field(tmp_path, row, words):
    path = write_lines(tmp_path / "l.jsonl", [a_row(True), a_row(None), row])
    with pytest.raises(ValueError) as caught:
        read_labelled(path, print)
    assert str(caught.value) == f"{path}, line 3: {words}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"answer": ""}, "answer is empty"), ({"context": "a " * 900}, "at most 512")],
)
def test_a_labelled_answer_that_no_model_can_read_is_named_by_its_line(
    tmp_path, changes, words
):
    rows = [a_row(None), a_row(True), a_row(False, **changes)]
    path, model = write_lines(tmp_path / "l.jsonl", rows), LanguageModel("embedded")
    with pytest.raises(ValueError, match=f"l.jsonl, line 3: .*{words}"):
        read_given(model, read_labelled(path, print), tmp_path / "work", print)


def test_a_file_without_any_label_is_refused(tmp_path):
    path = write_lines(tmp_path / "l.jsonl", [a_row(None)] * 3)
    with pytest.raises(ValueError, match="only answers without a label .3.; label"):
        read_labelled(path, print)


def test_labelled_answers_are_not_taken_for_questions_with_golds(tmp_path):
    path = write_lines(tmp_path / "l.jsonl", [a_row(False), a_row(True)])
    assert "--labelled" in beatrice("fit", "none", path, tmp_path / "p", code=1).output


def test_labelled_answers_are_read_by_line_and_unread_fields_are_named(tmp_path):
    text = "Guzolt\u2028Falls"  # no line end, although splitlines() splits there
    row = {"question": "where?", "answer": text, "label": True}
    lines = [row, {**row, "label": False, "passages": ["Guzolt.", " "], "p": 0.5}]
    path, notes = tmp_path / "labelled.jsonl", []
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(f"\ufeff{content}\n")
    read = read_labelled(path, notes.append)
    assert [(x.question, x.answer, label) for x, label, _ in read] == [
        ("where?", text, True),
        ("where?", text, False),
    ]
    assert [[p.text for p in x.context] for x, _, _ in read] == [[], ["Guzolt."]]
    assert notes == ["fields not read: 'p' (1)"]
    path.write_bytes(b'{"question": "\xff"}')
    with pytest.raises(ValueError, match=r"labelled.jsonl, line 1: .*UTF-8"):
        read_labelled(path, notes.append)

"""Values of odd types: they are read as what they mean, or refused by their field."""

import decimal
import json
import math

import pytest

from extract.datasets.building import build_examples
from extract.datasets.config import BuildConfig, Source, SplitConfig
from extract.datasets.inspection import inspect_file
from extract.datasets.loading import Loaded, open_dataset
from tests.extract.datasets import published as pub

ANSWERABLE = {
    "true": (True, None),
    "the word True": ("True", None),
    "one": (1, None),
    "null": (None, None),
    "false": (False, "unanswerable"),
    "the word False": ("False", "unanswerable"),
    "the word false": ("false", "unanswerable"),
    "zero": (0, "unanswerable"),
    "a zero as text": ("0", "unanswerable"),
    "another word": ("maybe", "expected true or false"),
    "a list": ([], "expected true or false"),
}


@pytest.mark.parametrize("name", ANSWERABLE)
def test_an_unanswerable_question_is_known_however_it_is_marked(name, tmp_path):
    mark, words = ANSWERABLE[name]
    path = pub.write_lines(tmp_path / "full", [pub.musique(answerable=mark)])
    (found,) = open_dataset(path).read()
    if words is None:
        assert isinstance(found, Loaded)
    else:
        assert words in found.reason


def test_token_numbers_count_the_spaces_that_a_page_begins_with(tmp_path):
    record = pub.simplified()
    plain = open_dataset(pub.write_lines(tmp_path / "a", [record])).read()
    moved = pub.simplified(start=6)
    moved["document_text"] = "  " + record["document_text"]
    (note,) = moved["annotations"]
    note["long_answer"]["end_token"] += 2
    note["short_answers"] = [{"start_token": 12, "end_token": 14}]
    path = pub.write_lines(tmp_path / "b", [moved])
    for one, other in zip(plain, open_dataset(path).read(), strict=True):
        assert one.question.golds == other.question.golds == ("December 1972",)
        assert one.question.passages == other.question.passages


def columns(**types):
    """HotpotQA's hub rows with one more column, made as Arrow's arrays are."""
    import pyarrow

    table = pyarrow.Table.from_pylist([pub.hotpot_columns(i) for i in range(3)])
    for name, (values, kind) in types.items():
        table = table.append_column(name, pyarrow.array(values).view(kind))
    return table


def odd_times():
    import pyarrow

    return {
        "days beyond Python's": ([1, 2**30, 3], pyarrow.int32(), pyarrow.date32()),
        "seconds beyond Python's": ([1, 2**45, 3], None, pyarrow.timestamp("s")),
        "a zone of no table": ([1, 2, 3], None, pyarrow.timestamp("s", tz="Moon/Sea")),
    }


@pytest.mark.parametrize("name", odd_times())
def test_a_date_that_python_cannot_hold_costs_no_record(name, tmp_path):
    import pyarrow
    from pyarrow import parquet

    values, raw, kind = odd_times()[name]
    table = columns(when=(pyarrow.array(values, raw or pyarrow.int64()), kind))
    parquet.write_table(table, tmp_path / "a.parquet")
    report = inspect_file(tmp_path / "a.parquet")
    assert (report["loaded"], report["error"]) == (3, None)


def test_a_row_that_python_cannot_hold_is_refused_alone(tmp_path):
    import pyarrow
    from pyarrow import parquet

    days = pyarrow.array([1, 2**30, 3], pyarrow.int32()).view(pyarrow.date32())
    inner = pyarrow.StructArray.from_arrays([days], ["day"])
    parquet.write_table(columns().append_column("at", inner), tmp_path / "a.parquet")
    report = inspect_file(tmp_path / "a.parquet")
    assert (report["loaded"], report["refused"]) == (2, 1)
    assert report["refusals"][0]["record"] == 2
    assert "cannot be read" in report["refusals"][0]["reason"]


CELLS = {
    "a decimal": (decimal.Decimal("7"), 7),
    "a decimal with a fraction": (decimal.Decimal("7.5"), 7.5),
    "no number": (math.nan, None),
    "null": (None, None),
    "text": ("7", "7"),
}


@pytest.mark.parametrize("name", CELLS)
def test_what_a_row_says_of_its_subject_can_be_written_as_json(name, tmp_path):
    cell, expected = CELLS[name]
    rows = [pub.popqa(i) | {"s_pop": cell} for i in range(3)]
    path = pub.write_parquet(tmp_path / "popqa.parquet", rows)
    sources = [Source(dataset="popqa", role="held-out", path=path)]
    splits = SplitConfig(n_held_out={"popqa": 2})
    build_examples(
        tmp_path / "out", sources, BuildConfig(splits=splits, context="none")
    )
    lines = (tmp_path / "out" / "examples.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        held = json.loads(line, parse_constant=pytest.fail)  # JSON has no NaN
        assert held["meta"]["s_pop"] == expected


@pytest.mark.parametrize("cell", [b"\xff", [1]])
def test_a_cell_of_no_such_kind_is_refused_by_its_column(cell, tmp_path):
    rows = [pub.popqa(0) | {"subj": cell}]
    report = inspect_file(pub.write_parquet(tmp_path / "a.parquet", rows))
    assert "'subj': expected text or a number" in report["refusals"][0]["reason"]

"""Records in every container, other kinds of files, and where reading ends."""

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from beatrice.benchmarks.bench.commands import measure_fresh
from beatrice.extract.datasets.loading import Loaded, inspect_file, open_dataset
from beatrice.extract.datasets.rows import (
    MAX_RECORD,
    FileType,
    Window,
    json_values,
    read_raw,
    recognise,
)
from beatrice.extract.run.process import peak_bytes
from tests.extract.datasets import published as pub

RECORDS = [pub.hotpot(i) for i in range(70)]  # more than one batch of Parquet
LINES = [json.dumps(record) for record in RECORDS]


def questions(path):
    n_bytes = []
    rows = list(open_dataset(path).read(n_bytes.append))
    assert n_bytes == sorted(n_bytes) and n_bytes[-1] == path.stat().st_size
    assert all(isinstance(row, Loaded) for row in rows), rows
    return [row.question for row in rows]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# The content of a file, and the container that it is recognised as.
CONTAINERS = {
    "array": (json.dumps(RECORDS), "json array"),
    "indented": (json.dumps(RECORDS, indent=4), "json array"),
    "behind a tab": ("\t" + json.dumps(RECORDS), "json array"),
    "lines": ("\n".join(LINES), "json lines"),
    "lines of Windows, marked": ("\ufeff" + "\r\n".join(LINES), "json lines"),
    "values": ("\n".join(json.dumps(x, indent=1) for x in RECORDS), "json values"),
    "carriage returns alone": ("\r".join(LINES), "json values"),
    "nothing between": ("".join(LINES), "json values"),
    "object": (json.dumps({"version": 1, "data": RECORDS}), "json object"),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_every_container_gives_the_same_questions(name, is_zipped, tmp_path):
    content, container = CONTAINERS[name]
    path = write(tmp_path / "no-suffix-that-tells", content)
    path = pub.zipped(path) if is_zipped else path
    assert questions(path) == questions(pub.write_array(tmp_path / "a.json", RECORDS))
    report = inspect_file(path)
    assert (report["loaded"], report["container"]) == (70, container)
    assert (report["gzipped"], report["bom"]) == (is_zipped, "marked" in name)


def test_parquet_gives_the_questions_of_its_rows(tmp_path):
    rows = [pub.hotpot_columns(i) for i in range(70)]
    path = pub.write_parquet(tmp_path / "a", rows)
    expected = questions(pub.write_array(tmp_path / "b", RECORDS))
    assert questions(path) == questions(pub.zipped(path)) == expected


def test_a_table_gives_the_questions_of_its_rows(tmp_path):
    rows = [pub.popqa(i) for i in range(5)]
    table = pub.write_table(tmp_path / "popqa.json", rows)
    result = questions(table)
    assert questions(pub.zipped(table)) == result
    lines = questions(pub.write_lines(tmp_path / "popqa.tsv", rows))
    names, others = ([(q.id, q.question, q.golds) for q in x] for x in (result, lines))
    assert names == others
    assert result[0].golds == ("politician", 'so-called "pol"')
    content = table.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    assert questions(write(tmp_path / "crlf.tsv", content)) == result
    spreadsheets = b"\xef\xbb\xbf" + content.replace(b"\t", b";")
    assert questions(write(tmp_path / "popqa.csv", spreadsheets)) == result


EXTRA = [x | {"data": [{"a": 1}], "examples": []} for x in RECORDS[:3]]


@pytest.mark.parametrize(
    ("content", "container", "n_loaded"),
    [
        ("".join(json.dumps(x) + "\n" for x in EXTRA), "json lines", 3),
        (json.dumps(EXTRA[0]), "json lines", 1),
        ("\n".join(json.dumps(x, indent=1) for x in EXTRA), "json values", 3),
        (json.dumps(EXTRA), "json array", 3),
        (json.dumps({"data": [{"a": 1}], **RECORDS[0]}), "json lines", 1),
        (json.dumps({"version": 1, "data": EXTRA}), "json object", 3),
        (json.dumps({"about": {"data": []}, "data": EXTRA}), "json object", 3),
        ("\r".join(LINES * 50), "json values", 70),  # over 1 MiB
    ],
)
def test_records_that_hold_lists_are_not_taken_for_objects_around_a_list(
    content, container, n_loaded, tmp_path
):
    report = inspect_file(write(tmp_path / "file", content))
    assert report["error"] is None
    assert (report["loaded"], report["container"]) == (n_loaded, container)


def test_only_line_feeds_end_a_line_and_a_gzip_may_have_several_members(tmp_path):
    record = {"question": "who\u2028is\u0085it", "answer": ["a"]}
    path = write(tmp_path / "nq", json.dumps(record, ensure_ascii=False) + "\n")
    assert questions(path)[0].question == "who\u2028is\u0085it"
    members = gzip.compress(WHOLE[:999]) + b"\0\0" + gzip.compress(WHOLE[999:])
    assert len(questions(write(tmp_path / "a.gz", members))) == len(RECORDS)


WHOLE = json.dumps(RECORDS).encode()
ZIPPED = gzip.compress(WHOLE)
DATA = json.dumps(pub.trivia_file(3))
REFUSED = {
    "nothing": (b"", "empty"),
    "white space": (b" \n", "white space"),
    "an empty array": (b"[]", "no records"),
    "an empty object": (b"{}", "without any field"),
    "half an array": (WHOLE[: len(WHOLE) // 2], "cut off"),
    "more than an array": (WHOLE + b"x", "follows the end"),
    "half a gzip": (ZIPPED[: len(ZIPPED) // 2], "cut off"),
    "a changed checksum": (ZIPPED[:-8] + b"\0" * 8, "damaged"),
    "a gzip and more": (ZIPPED + b"more", "other bytes"),
    "gzip twice": (gzip.compress(ZIPPED), "gzip inside gzip"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
    "a web page": (b"<!DOCTYPE html>", "HTML"),
    "an archive": (b"PK\x03\x04", "zip"),
    "a tar": (b"a" * 257 + b"ustar\0", "tar"),
    "UTF-32": (DATA.encode("utf-32"), "UTF-32"),
    "UTF-16": (DATA.encode("utf-16"), "UTF-16"),
    "binary": (b"\x80\x04\x95\0\0", "binary"),
    "prose": (b"It was a dark and stormy night, they say.\n", "plain text"),
    "a long line of prose": (b"It was a dark night. " * 9000, "plain text"),
    "prose of old line ends": (b"It was a dark night,\rthey say.\r", "plain text"),
    "half a Parquet file": (b"PAR1" + b"\0" * 50, "Parquet"),
    "a scalar": (b"42", "plain text"),
    "an array of nulls": (b"[null, null]", "found null"),
    "Python's list": (repr(RECORDS[:1]).encode(), "Python's notation"),
    "Python's list over lines": (b"[\n {'a': 1}]", "Python's notation"),
    "Python's object": (repr(RECORDS[0]).encode(), "Python's notation"),
    "Python's object in an array": (
        b"""[{"question": "who", "answer": "a"}, {'a': 1}]""",
        "Python's notation",
    ),
    "Latin-1": ('{"question": "é", "answer": ["a"]}'.encode("latin-1"), "0xe9"),
    "other fields": (b'{"colour": "red", "size": 3}\n', "'colour', 'size'"),
    "an unfinished object": (b'{"Data": [], "Domain": "Web"', "cut off"),
    "two columns of a name": (b"question,answer,Answer\nwho,a,b\n", "named 'answer'"),
    "nothing known at all": (json.dumps([{"x": 1}] * 65).encode(), "'x' have no k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_holds_no_questions_is_refused_with_the_reason(name, tmp_path):
    content, words = REFUSED[name]
    path = write(tmp_path / "questions.json", content)
    error = inspect_file(path)["error"]
    assert words in error and str(path) in error and "\n" not in error


def test_a_directory_a_pipe_and_a_missing_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    names = {"": "directory", "pipe": "not a regular file", "no": "no such file"}
    for name, words in names.items():
        assert words in inspect_file(tmp_path / name)["error"]


@pytest.mark.parametrize("write", [pub.write_array, pub.write_lines, pub.write_parquet])
def test_only_a_record_that_is_too_long_is_refused(write, tmp_path):
    rows = [{"question": f"who is {i}?", "golden_answers": ["x"]} for i in range(3)]
    rows[1]["question"] *= MAX_RECORD // 8
    report = inspect_file(write(tmp_path / "a", rows))
    assert (report["loaded"], report["refused"]) == (2, 1)
    assert "longer than 32 MiB" in report["refusals"][0]["reason"]


def test_a_damaged_page_of_a_parquet_file_is_reported(tmp_path):
    rows = [pub.hotpot_columns(i) for i in range(500)]
    content = bytearray(pub.write_parquet(tmp_path / "a", rows).read_bytes())
    content[100:400] = b"\xee" * 300
    assert "damaged" in inspect_file(write(tmp_path / "b", bytes(content)))["error"]


def test_dates_that_python_cannot_hold_are_left_out_or_end_the_reading(tmp_path):
    table = pyarrow.Table.from_pylist([pub.hotpot_columns(i) for i in range(3)])
    days = pyarrow.array([1, 2**30, 3], pyarrow.int32()).view("date32[day]")
    parquet.write_table(table.append_column("when", days), tmp_path / "a")
    assert inspect_file(tmp_path / "a")["loaded"] == 3
    inner = pyarrow.StructArray.from_arrays([days], ["day"])
    parquet.write_table(table.append_column("at", inner), tmp_path / "b")
    assert "damaged after 0 rows" in inspect_file(tmp_path / "b")["error"]
    parquet.write_table(table.append_column("type", days), tmp_path / "c")
    assert "two columns have the same name" in inspect_file(tmp_path / "c")["error"]


def test_columns_of_dates_and_times_are_named_but_not_read(tmp_path):
    days = pyarrow.array([2**30, None], pyarrow.int32()).view("date32[day]")
    times = pyarrow.array([5, None], pyarrow.timestamp("us", "Nowhere"))
    columns = {"day": days, "question": ["a?", "b?"], "at": times, "answer": ["a", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a")
    report = inspect_file(tmp_path / "a")
    assert report["loaded"] == 2 and report["unread"] == {"day": 1, "at": 1}
    parquet.write_table(pyarrow.table(columns | {"answer": days}), tmp_path / "b")
    refusals = inspect_file(tmp_path / "b")["refusals"]
    reason = "'answer': expected text or a list of texts, found "
    assert [x["reason"] for x in refusals] == [reason + x for x in ("date", "null")]


@pytest.mark.parametrize("end", ["", 'who is q\t["q\'s"]\r\n'])
def test_a_quote_left_open_ends_the_reading_at_its_line(end, tmp_path):
    rows = "".join(f"who is {i}\t['{i}']\r\n" for i in range(20))
    content = f"who is x\t['a']\r\n\"who is y\t['b']\r\n{rows}{end}"
    report = inspect_file(write(tmp_path / "a.csv", content))
    assert report["loaded"] == 1
    assert "lines 2-2" in report["error"]
    assert "a quote is left open on line 2" in report["error"]


def test_a_row_of_many_lines_ends_the_reading_where_it_is_too_long(tmp_path):
    cells = (b"a" * (MAX_RECORD // 32) + b'","\n') * 64
    path = write(tmp_path / "a.csv", b'question,answers\nq,a\n"' + cells)
    tracemalloc.start()
    error = inspect_file(path)["error"]
    _, n_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "longer than 32 MiB" in error and "a quote is left open" in error
    assert n_bytes < 100e6


def test_a_cell_of_several_lines_is_one_row(tmp_path):
    rows = [pub.popqa(0) | {"obj": "two\nlines"}, pub.popqa(1)]
    report = inspect_file(pub.write_table(tmp_path / "popqa.tsv", rows))
    assert (report["records"], report["loaded"]) == (2, 2)
    rows[0]["possible_answers"] = ""
    report = inspect_file(pub.write_table(tmp_path / "popqa.tsv", rows))
    assert [refusal["at"] for refusal in report["refusals"]] == ["lines 2-3"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (list(pub.popqa(0)), "column names again"),
        (["too", "few"], "columns"),
        (["caf\udce9", *list(pub.popqa(1).values())[1:]], "0xe9"),
    ],
)
def test_a_table_row_that_is_not_a_record_is_refused_by_number(row, words, tmp_path):
    rows = [list(pub.popqa(0)), list(pub.popqa(0).values()), row]
    lines = ["\t".join(map(str, cells)).replace('"', "'") for cells in rows]
    path = tmp_path / "popqa.tsv"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    (refusal,) = (r for r in inspect_file(path)["refusals"] if r["record"] == 2)
    assert refusal["at"] == "line 3" and words in refusal["reason"]


# Reading the values of an array through a window.


def values(content, portion=1 << 20):
    portions = (content[i : i + portion] for i in range(0, len(content), portion))
    return json_values(Window(portions), Path("f"), FileType(container="json array"))


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


# A list whose content begins like the records before it.
@example([{"": None}, {"": None}, [None, {"": None}]], 17, None, False)
@given(
    st.lists(VALUES, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_the_objects_of_an_array_are_those_that_json_reads(
    items, portion, indent, ascii_
):
    content = json.dumps(items, indent=indent, ensure_ascii=ascii_).encode()
    result = list(values(content, portion))
    assert [x.value for x in result] == [
        x if isinstance(x, dict) else None for x in items
    ]
    assert all((x.value is None) == (x.problem is not None) for x in result)


@pytest.mark.parametrize("make", [pub.hotpot, pub.musique])
def test_every_record_starts_where_its_offset_says(make):
    records = [make(i) for i in range(20)]
    content = json.dumps(records).encode()
    for item, record in zip(values(content, 1000), records, strict=True):
        raw = json.dumps(record).encode()
        offset = int(item.at.removeprefix("byte "))
        assert content[offset : offset + len(raw)] == raw
        assert item.value == record


DAMAGES = {
    "one quote too many": lambda raw: raw.replace("?", '?"', 1),
    "two quotes too many": lambda raw: raw.replace("?", '"?"', 1),
    "a value that is missing": lambda raw: raw.replace('": ', '": ,', 1),
    "a brace that is missing": lambda raw: raw[: raw.rindex("}")],
    "a brace too many": lambda raw: raw + "}",
    "nothing": lambda raw: "",
    "a line feed in a text": lambda raw: raw.replace("?", "\n?", 1),
    "a number of 5000 digits": lambda raw: '{"a": ' + "1" * 5000 + "}",
    "lists in lists": lambda raw: '{"a": ' + "[" * 9000 + "]" * 9000 + "}",
}


@pytest.mark.parametrize("make", [pub.hotpot, pub.musique])
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_damaged_value_ends_the_reading_with_its_number_and_byte(
    make, name, position
):
    lines = [json.dumps(make(i)) for i in range(8)]
    start = 1 + sum(len(line) + 2 for line in lines[:position])
    lines[position] = DAMAGES[name](lines[position])
    results = []
    with pytest.raises(ValueError) as caught:
        for value in values(("[" + ", ".join(lines) + "]").encode(), 1000):
            results.append(value.value)
    # What follows a complete value counts as part of the next one.
    number = position + (2 if name == "a brace too many" else 1)
    assert results[:position] == [make(i) for i in range(position)]
    assert f"record {number}, which begins at byte" in str(caught.value)
    if number == position + 1 and name != "nothing":
        assert f"byte {start}, cannot be read" in str(caught.value)


def test_a_value_that_is_not_a_record_loses_no_other():
    content = b'[1, "a,]", null, [{"b": "]"}], true, {"a": "\\ud800"}, {"a": "\xff"}'
    *odd, last = values(content + b', {"a": NaN}]')
    words = ["a number", "text", "null", "a list", "true or false", "surrogate", "0xff"]
    for item, word in zip(odd, words, strict=True):
        assert item.value is None and word in item.problem
    assert last.value.keys() == {"a"} and last.number == 8
    with pytest.raises(ValueError, match="record 2, which begins at byte 10.*a comma"):
        list(values(b'[{"a": 1} {"a": 2}]'))


@pytest.mark.parametrize("make", [pub.hotpot, pub.musique])
def test_an_array_cut_off_anywhere_is_reported_as_cut_off(make):
    content = json.dumps([make(i) for i in range(4)]).encode()
    rng = random.Random(0)
    for cut in [len(content) - 1, *rng.sample(range(2, len(content) - 1), 60)]:
        with pytest.raises(ValueError, match="cut off"):
            list(values(content[:cut]))


def read_file(path):
    """Return how many questions are loaded, and the process's peak memory in bytes."""
    n_loaded = sum(isinstance(row, Loaded) for row in open_dataset(path).read())
    return n_loaded, peak_bytes()


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    passages = [[f"Title {i}", ["Words of a sentence. " * 20]] for i in range(10)]
    for n_records in (200, 4000):
        records = (pub.hotpot(i, context=passages) for i in range(n_records))
        path = write(tmp_path / str(n_records), json.dumps(list(records)))
        n_loaded, peak = measure_fresh("the loader", read_file, path)
        assert n_loaded == n_records
        peaks.append(peak)
    # A list of all records would take several times the 18 MB of the larger file.
    assert path.stat().st_size > 15_000_000
    assert peaks[1] - peaks[0] < 10_000_000
    assert peaks[1] < 300 * 2**20


def test_a_table_of_very_many_columns_is_read(tmp_path):
    names, path = ",".join(f"c{i}" for i in range(300_000)), tmp_path / "wide.csv"
    path.write_text(f"question,answer,{names}\nwho,a,{names}\n")
    assert [raw.value["answer"] for raw in read_raw(path, recognise(path))] == ["a"]

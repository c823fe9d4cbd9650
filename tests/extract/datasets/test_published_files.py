"""The same questions in every container; whatever else a file may be."""

import gzip
import json
import os

import pytest

from beatrice.extract.datasets.loading import Loaded, inspect_file, open_dataset
from tests.extract.datasets import published as pub


def questions(path, **options):
    found = list(open_dataset(path, **options).read())
    assert all(isinstance(one, Loaded) for one in found), found
    return [one.question for one in found]


RECORDS = [pub.hotpot(i) for i in range(70)]  # more than one batch of Parquet
CONTAINERS = {
    "array": lambda path: pub.write_array(path, RECORDS),
    "indented": lambda path: pub.write_array(path, RECORDS, indent=4),
    "lines": lambda path: pub.write_lines(path, RECORDS),
    "values": lambda path: (
        path.write_text("\n".join(json.dumps(r, indent=1) for r in RECORDS)),
        path,
    )[1],
    "object": lambda path: pub.write_array(path, {"version": 1, "data": RECORDS}),
    "parquet": lambda path: pub.write_parquet(
        path, [pub.hotpot_columns(i) for i in range(70)]
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_every_container_gives_the_same_questions(name, is_zipped, tmp_path):
    plain = questions(pub.write_array(tmp_path / "plain.json", RECORDS))
    path = CONTAINERS[name](tmp_path / "no-suffix-that-tells")
    assert questions(pub.zipped(path) if is_zipped else path) == plain
    assert len(plain) == 70


@pytest.mark.parametrize("is_zipped", [False, True])
def test_a_table_gives_the_questions_of_its_rows(is_zipped, tmp_path):
    rows = [pub.popqa(i) for i in range(5)]
    table = pub.write_table(tmp_path / "popqa.json", rows)
    found = questions(pub.zipped(table) if is_zipped else table)
    lines = questions(pub.write_lines(tmp_path / "popqa.tsv", rows))
    assert [(q.id, q.question, q.golds) for q in found] == [
        (q.id, q.question, q.golds) for q in lines
    ]
    assert found[0].golds == ("politician", 'so-called "pol"')
    crlf = tmp_path / "crlf.tsv"
    crlf.write_bytes(table.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    assert questions(crlf) == found


def test_a_byte_order_mark_and_carriage_returns_change_nothing(tmp_path):
    lines = pub.write_lines(tmp_path / "a.jsonl", RECORDS[:3])
    other = tmp_path / "b.jsonl"
    content = lines.read_bytes().replace(b"\n", b"\r\n")
    other.write_bytes(b"\xef\xbb\xbf" + content)
    assert questions(other) == questions(lines)
    assert inspect_file(other)["bom"]


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "nq.jsonl"
    record = {"question": "who\u2028is\u0085it", "answer": ["a"]}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert questions(path)[0].question == "who\u2028is\u0085it"


def test_a_gzip_of_several_members_is_read_to_its_end(tmp_path):
    content = json.dumps(RECORDS).encode()
    path = tmp_path / "a.gz"
    path.write_bytes(
        gzip.compress(content[:999]) + b"\0\0" + gzip.compress(content[999:])
    )
    assert len(questions(path)) == len(RECORDS)


WHOLE = json.dumps(RECORDS).encode()
ZIPPED = gzip.compress(WHOLE)
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
    "UTF-16": ("[]".encode("utf-16"), "UTF-16"),
    "binary": (b"\x80\x04\x95\0\0", "binary"),
    "prose": (b"It was a dark and stormy night, they say.\n", "plain text"),
    "half a Parquet file": (b"PAR1" + b"\0" * 50, "Parquet"),
    "a scalar": (b"42", "plain text"),
    "an array of nulls": (b"[null, null]", "found null"),
    "Python, not JSON": (b"{'question': 'a', 'answer': ['b']}\n", "notation"),
    "Latin-1": ('{"question": "é", "answer": ["a"]}'.encode("latin-1"), "0xe9"),
    "other fields": (b'{"colour": "red", "size": 3}\n', "'colour', 'size'"),
    "an unfinished object": (b'{"Data": [], "Domain": "Web"', "cut off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_file_of_questions_is_refused_with_its_reason(name, tmp_path):
    content, words = REFUSED[name]
    path = tmp_path / "questions.json"
    path.write_bytes(content)
    report = inspect_file(path)
    assert words in report["error"]
    assert str(path) in report["error"]
    assert "\n" not in report["error"]


def test_what_was_read_before_the_damage_is_counted(tmp_path):
    path = tmp_path / "half.json"
    path.write_bytes(WHOLE[: len(WHOLE) // 2])
    report = inspect_file(path)
    assert report["dataset"] == "hotpotqa"
    assert 30 < report["loaded"] < 40
    assert "record" in report["error"]


def test_a_directory_a_pipe_and_a_missing_file_are_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (tmp_path, "directory"),
        (pipe, "no regular file"),
        (tmp_path / "no", "no such file"),
    ):
        assert words in inspect_file(path)["error"]


def test_a_parquet_file_of_other_columns_names_them(tmp_path):
    path = pub.write_parquet(tmp_path / "a.parquet", [{"colour": "red", "size": 3}])
    assert "'colour', 'size'" in inspect_file(path)["error"]


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path):
    path = pub.write_parquet(
        tmp_path / "a.parquet", [pub.hotpot_columns(i) for i in range(500)]
    )
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xee" * 300
    path.write_bytes(content)
    assert "damaged" in inspect_file(path)["error"]


@pytest.mark.parametrize(
    "record",
    [
        {"id": "0", "contents": '"Title"\ntext'},
        {"title": "Title", "text": "text"},
        {"id": "1", "text": "text", "title": "Title"},
    ],
)
def test_passages_are_no_questions(record, tmp_path):
    for path in (
        pub.write_array(tmp_path / "a.json", [record] * 3),
        pub.write_table(tmp_path / "a.tsv", [record] * 3),
    ):
        report = inspect_file(path)
        assert "holds passages" in report["error"]
        assert report["format"].startswith("passages")
        assert report["container"] in ("json array", "table")
        assert report["records"] is None


def test_a_line_too_long_to_be_a_record_is_refused_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    long = {"question": "who is it", "answer": ["a" * (33 << 20)]}
    pub.write_lines(path, [long, {"question": "who is she", "answer": ["b"]}])
    report = inspect_file(path)
    assert (report["loaded"], report["refused"]) == (1, 1)
    assert "longer than 32 MiB" in report["refusals"][0]["reason"]


@pytest.mark.parametrize("end", ["", 'who is q\t["q\'s"]\r\n'])
def test_a_quote_left_open_ends_the_reading_at_its_line(end, tmp_path):
    path = tmp_path / "a.csv"
    rows = "".join(f"who is {i}\t['{i}']\r\n" for i in range(20))
    path.write_text(f"who is x\t['a']\r\n\"who is y\t['b']\r\n{rows}{end}")
    report = inspect_file(path)
    assert report["loaded"] == 1
    assert "lines 2-2" in report["error"]
    assert "a quote is left open on line 2" in report["error"]


def test_a_cell_of_several_lines_is_one_row(tmp_path):
    rows = [pub.popqa(0) | {"obj": "two\nlines"}, pub.popqa(1)]
    report = inspect_file(pub.write_table(tmp_path / "popqa.tsv", rows))
    assert (report["records"], report["loaded"]) == (2, 2)
    rows[0]["possible_answers"] = ""
    report = inspect_file(pub.write_table(tmp_path / "popqa.tsv", rows))
    assert [one["at"] for one in report["refusals"]] == ["lines 2-3"]

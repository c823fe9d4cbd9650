"""A file whose beginning looks like another kind is what it is."""

import json

import pytest

from beatrice.extract.datasets.loading import inspect_file
from tests.extract.datasets import published as pub

DATA = json.dumps(pub.trivia_file(3))
EXTRA = [pub.hotpot(i) | {"data": [{"a": 1}], "examples": []} for i in range(3)]
LINES = [json.dumps(pub.hotpot(i)) for i in range(3)]
OTHER = [{"x": 1}] * 65


# For each file: what it holds, its container, and how many are loaded and refused.
FILES = {
    "lines with a list of objects": (
        "".join(json.dumps(one) + "\n" for one in EXTRA),
        "json lines",
        3,
        0,
    ),
    "one such line": (json.dumps(EXTRA[0]), "json lines", 1, 0),
    "such values over lines": (
        "\n".join(json.dumps(one, indent=1) for one in EXTRA),
        "json values",
        3,
        0,
    ),
    "such records in an array": (json.dumps(EXTRA), "json array", 3, 0),
    "a question after the list": (
        json.dumps({"data": [{"a": 1}], **pub.hotpot(0)}),
        "json lines",
        1,
        0,
    ),
    "an object around such records": (
        json.dumps({"version": 1, "data": EXTRA}),
        "json object",
        3,
        0,
    ),
    "carriage returns alone": ("\r".join(LINES), "json values", 3, 0),
    "nothing between": ("".join(LINES), "json values", 3, 0),
    "a row without its first cell": (
        "\t['a']\r\nwho is b\t['b']\r\n",
        "table",
        1,
        1,
    ),
    "an array behind a tab": ("\t" + json.dumps(EXTRA), "json array", 3, 0),
}


@pytest.mark.parametrize("name", FILES)
def test_a_beginning_that_misleads_changes_nothing(name, tmp_path):
    content, container, n_loaded, n_refused = FILES[name]
    path = tmp_path / "file"
    path.write_text(content, newline="")
    report = inspect_file(path)
    assert report["error"] is None
    assert report["container"] == container
    assert (report["loaded"], report["refused"]) == (n_loaded, n_refused)


@pytest.mark.parametrize("between", ["\r", ""])
def test_values_without_line_feeds_are_told_in_files_of_any_size(between, tmp_path):
    path = tmp_path / "file"
    records = [json.dumps(pub.hotpot(i)) for i in range(3200)]  # over 1 MiB
    path.write_text(between.join(records), newline="")
    assert path.stat().st_size > 1 << 20
    report = inspect_file(path)
    assert (report["loaded"], report["container"]) == (3200, "json values")


def test_one_long_record_is_still_a_line(tmp_path):
    path = tmp_path / "file"
    path.write_text(json.dumps(pub.hotpot(1) | {"more": "x" * (2 << 20)}))
    report = inspect_file(path)
    assert (report["loaded"], report["container"]) == (1, "json lines")


NO_JSON = {
    "a list as Python prints it": (repr([pub.hotpot(0)]).encode(), "Python's not"),
    "the same over lines": (b"[\n {'a': 1}]", "Python's notation"),
    "an object as Python prints it": (
        repr(pub.hotpot(0)).encode(),
        "Python's notation",
    ),
    "UTF-32": (DATA.encode("utf-32"), "UTF-32"),
    "UTF-16": (DATA.encode("utf-16"), "UTF-16"),
    "nothing known at all": (json.dumps(OTHER).encode(), "'x' are of no known"),
}


@pytest.mark.parametrize("name", NO_JSON)
def test_what_is_no_json_is_called_what_it_is(name, tmp_path):
    content, words = NO_JSON[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    assert words in inspect_file(path)["error"]


def log(number, **changes):
    return pub.lm_eval(number) | changes


LOGS = {
    "two filters, no ids": (
        [log(i, filter=name) for i in range(3) for name in "ab"],
        (3, 3),
    ),
    "two filters, ids": (
        [log(i, filter=name, doc=pub.flashrag(i)) for name in "ab" for i in range(3)],
        (3, 3),
    ),
    "one filter": ([log(i, filter="a") for i in range(3)], (3, 0)),
    "one filter, one question twice": ([log(0), log(0, doc_id=1)], (2, 0)),
}


@pytest.mark.parametrize("name", LOGS)
def test_of_a_log_with_two_filters_the_first_is_read(name, tmp_path):
    records, counts = LOGS[name]
    report = inspect_file(pub.write_lines(tmp_path / "samples", records))
    assert (report["loaded"], report["refused"]) == counts
    assert all("filter 'b'" in one["reason"] for one in report["refusals"])

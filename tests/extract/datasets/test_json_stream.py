"""Values of JSON out of a window; at a damaged one reading ends, and says where."""

import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from beatrice.extract.datasets.rows import JsonValues, Window
from tests.extract.datasets.published import hotpot, musique


class Bytes:
    """Hands bytes out in portions, as a decompressor does."""

    def __init__(self, content, portion=None):
        self._content, self._portion, self._at = content, portion, 0

    def read(self, size, /):
        size = size if self._portion is None else min(size, self._portion)
        self._at += size
        return self._content[self._at - size : self._at]

    def close(self):
        pass


def values(content, portion=None):
    window = Window(Bytes(content, portion))
    return JsonValues(window, "f").walk(window.skip_space(0) + 1)


def walk(content, portion=None):
    return list(values(content, portion))


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


# A list that holds what begins like the records before it.
@example([{"": None}, {"": None}, [None, {"": None}]], 17, None, False)
@given(
    st.lists(VALUES, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_the_scanner_finds_the_objects_that_json_finds(values, portion, indent, ascii_):
    content = json.dumps(values, indent=indent, ensure_ascii=ascii_).encode()
    found = walk(content, portion)
    assert [v.value for v in found] == [
        v if isinstance(v, dict) else None for v in values
    ]
    assert all((v.value is None) == (v.problem is not None) for v in found)


@pytest.mark.parametrize("make", [hotpot, musique])
def test_every_record_starts_where_its_offset_says(make):
    records = [make(i) for i in range(20)]
    content = json.dumps(records).encode()
    for found, record in zip(walk(content, 1000), records, strict=True):
        raw = json.dumps(record).encode()
        offset = int(found.at.removeprefix("byte "))
        assert content[offset : offset + len(raw)] == raw
        assert found.value == record


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


@pytest.mark.parametrize("make", [hotpot, musique])
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_damaged_value_ends_the_reading_with_its_number_and_byte(
    make, name, position
):
    lines = [json.dumps(make(i)) for i in range(8)]
    start = 1 + sum(len(line) + 2 for line in lines[:position])
    lines[position] = DAMAGES[name](lines[position])
    found = []
    with pytest.raises(ValueError) as caught:
        for value in values(("[" + ", ".join(lines) + "]").encode(), 1000):
            found.append(value.value)
    # What follows a value that is whole is the next one's fault.
    number = position + (2 if name == "a brace too many" else 1)
    assert found[:position] == [make(i) for i in range(position)]
    assert f"record {number}, which begins at byte" in str(caught.value)
    if number == position + 1 and name != "nothing":
        assert f"byte {start}, cannot be read" in str(caught.value)


def test_a_byte_that_is_no_utf8_spoils_one_record():
    content = json.dumps([hotpot(i) for i in range(5)]).encode()
    where = content.index(b"drummer", len(content) // 2)
    found = walk(content[:where] + b"\xff" + content[where + 1 :])
    assert sum(v.value is None for v in found) == 1
    assert any("0xff" in (v.problem or "") for v in found)


def test_half_of_a_surrogate_pair_spoils_one_record():
    first, second, third = walk(rb'[{"a": 1}, {"a": "\ud800"}, {"a": 2}]')
    assert (first.value, second.value, third.value) == ({"a": 1}, None, {"a": 2})
    assert "surrogate pair" in second.problem


@pytest.mark.parametrize("make", [hotpot, musique])
def test_wherever_an_array_is_cut_off_it_says_so(make):
    content = json.dumps([make(i) for i in range(4)]).encode()
    rng = random.Random(0)
    for cut in [len(content) - 1, *rng.sample(range(2, len(content) - 1), 60)]:
        with pytest.raises(ValueError, match="cut off"):
            walk(content[:cut])


def test_what_stands_between_records_must_be_a_comma():
    with pytest.raises(ValueError, match="record 2, which begins at byte 10.*a comma"):
        walk(b'[{"a": 1} {"a": 2}]')


def test_values_that_are_no_objects_keep_their_numbers():
    found = walk(b'[1, "a,]", null, [{"b": "]"}], true, {"a": 1}]')
    assert [v.value for v in found] == [None] * 5 + [{"a": 1}]
    kinds = [v.problem.split("found ")[-1] for v in found[:5]]
    assert kinds == ["a number", "text", "null", "a list", "true or false"]


class Endless:
    """An array of many megabytes that exists nowhere as a whole."""

    def __init__(self, n_records):
        self._record = json.dumps(hotpot(1)).encode()
        self._left, self._rest = n_records, b"["

    def read(self, size, /):
        while len(self._rest) < size and self._left:
            self._left -= 1
            self._rest += self._record + (b", " if self._left else b"]")
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def close(self):
        pass


def test_the_window_does_not_grow_with_the_file():
    n_records = 60_000  # 30 MB
    window = Window(Endless(n_records))
    widest = n_found = 0
    for value in JsonValues(window, "f").walk(window.skip_space(0) + 1):
        n_found += value.value is not None
        widest = max(widest, len(window.text))
    assert n_found == n_records
    assert widest < 2 << 20

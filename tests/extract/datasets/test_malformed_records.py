"""A record that cannot be used is refused by its number and the reason."""

import pytest

from extract.datasets.loading import Refusal, open_dataset
from tests.extract.datasets import published as pub

WRONG = {
    "no answer": ({"answer": ...}, "no 'answer'"),
    "a null answer": ({"answer": None}, "'answer' is null"),
    "a number as answer": ({"answer": 5}, "found a number"),
    "an empty answer": ({"answer": " "}, "holds no word"),
    "a list with a number": ({"answer": ["a", 5]}, "'answer[1]'"),
    "no question": ({"question": ...}, "no 'question'"),
    "an empty question": ({"question": ""}, "'question' is empty"),
    "no context": ({"context": ...}, "no 'context'"),
    "a null context": ({"context": None}, "'context' is null"),
    "an empty context": ({"context": []}, "holds no paragraph"),
    "a context of text": ({"context": "words"}, "found text"),
    "a title that is a number": ({"context": [[1, ["a"]]]}, "found a number"),
    "sentences that are text": ({"context": [["t", "a"]]}, "found text and text"),
    "a sentence that is a number": ({"context": [["t", ["a", 5]]]}, "another type"),
    "a triple": ({"context": [["t", ["a"], 1]]}, "expected a pair"),
    "uneven columns": (
        {"context": {"title": ["a"], "sentences": []}},
        "1 titles but 0 sentences",
    ),
    "no facts": ({"supporting_facts": ...}, "no 'supporting_facts'"),
    "facts without a number": ({"supporting_facts": [["t"]]}, "expected a pair"),
    "a fact on a number": ({"supporting_facts": [[1, 2]]}, "expected a title"),
    "an id that is a list": ({"_id": [1]}, "expected an id"),
}


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_record_is_refused_by_number_and_reason(name, position, tmp_path):
    changes, words = WRONG[name]
    records = [pub.hotpot(i) for i in range(4)]
    records[position] = {
        key: value
        for key, value in (records[position] | changes).items()
        if value is not ...
    }
    for path in (
        pub.write_array(tmp_path / "a.json", records),
        pub.write_lines(tmp_path / "a.jsonl", records),
    ):
        found = list(open_dataset(path).read())
        refused = [one for one in found if isinstance(one, Refusal)]
        assert [one.number for one in refused] == [position + 1]
        assert words in refused[0].reason
        assert len(found) == 4


def test_a_second_record_of_the_same_id_is_refused(tmp_path):
    records = [pub.hotpot(1), pub.hotpot(2), pub.hotpot(1)]
    path = pub.write_array(tmp_path / "a.json", records)
    found = list(open_dataset(path).read())
    assert "that of record 1" in found[2].reason

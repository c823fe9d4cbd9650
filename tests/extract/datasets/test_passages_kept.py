"""Passages in a layout that is known are read; in any other the record is refused."""

import pytest

from extract.datasets.inspection import inspect_file
from extract.datasets.loading import Loaded, open_dataset
from tests.extract.datasets import published as pub


def objects(body="sentences"):
    """HotpotQA as Parquet's structs hold it: lists of objects."""
    record = pub.hotpot(1)
    return record | {
        "context": [{"title": t, body: lines} for t, lines in record["context"]],
        "supporting_facts": [
            {"title": t, "sent_id": n} for t, n in record["supporting_facts"]
        ],
    }


def without(record, *names):
    return {key: value for key, value in record.items() if key not in names}


PLAIN = {"question": "who is it", "answer": "Ann"}
PASSAGE = {"title": "T", "text": "It is Ann.", "is_supporting": True}
COLUMNS = without(pub.hotpot_columns(1), "supporting_facts")["context"]
# For each record: its passages, and how many of them are gold.
READ = {
    "sentences in objects": (objects(), 3, 2),
    "content in objects": (objects("content"), 3, 2),
    "text in objects": (
        pub.hotpot(context=[{"title": "Neil Peart", "text": "He drums."}]),
        1,
        1,
    ),
    "a plain question with its passages": (PLAIN | {"contexts": [PASSAGE]}, 1, 1),
    "the same, as text": (PLAIN | {"passages": '[{"title": "T", "text": "x"}]'}, 1, 0),
    "PopQA that retrieved": (pub.popqa() | {"ctxs": [PASSAGE]}, 1, 1),
    "FlashRAG without the facts": (pub.flashrag(metadata={"context": COLUMNS}), 3, 0),
    "FlashRAG of objects": (
        pub.flashrag(
            metadata={k: objects()[k] for k in ("context", "supporting_facts")}
        ),
        3,
        2,
    ),
    "gold passages without tokens": (
        {
            "question": "who",
            "title": "T",
            "context": "It is a.",
            "short_answers": ["a"],
        },
        1,
        1,
    ),
}


@pytest.mark.parametrize("kind", ["lines", "array"])
@pytest.mark.parametrize("name", READ)
def test_passages_in_a_known_layout_are_read(name, kind, tmp_path):
    record, n_passages, n_gold = READ[name]
    write = pub.write_lines if kind == "lines" else pub.write_array
    (found,) = open_dataset(write(tmp_path / "one", [record])).read()
    assert isinstance(found, Loaded), found
    passages = found.question.passages
    assert len(passages) == n_passages
    assert sum(p.is_supporting for p in passages) == n_gold
    assert all(p.text and p.title for p in passages)


REFUSED = {
    "plain text beside facts": (pub.twowiki(context="plain text"), "found text"),
    "the hub's columns without facts": (
        without(pub.hotpot_columns(1), "supporting_facts"),
        "no 'supporting_facts'",
    ),
    "objects without facts": (
        without(objects(), "supporting_facts", "_id"),
        "no 'supporting_facts'",
    ),
    "texts": (PLAIN | {"context": ["one", "two"]}, "a list that begins with text"),
    "one text": (PLAIN | {"context": "one"}, "'context': expected passages"),
    "an answer list": (
        PLAIN | {"answer": ["Ann"], "passages": ["one"]},
        "'passages': expected passages",
    ),
    "objects of other names": (PLAIN | {"documents": [{"body": "x"}]}, "an object"),
    "half an object": (
        pub.hotpot(context=[{"title": "T"}]),
        "'context[0]': expected an object with 'title' and 'sentences'",
    ),
    "a log of a question with plain text": (
        pub.lm_eval() | {"doc": PLAIN | {"context": "one"}},
        "in 'doc': 'context'",
    ),
    "a log whose target is the answer": (
        pub.lm_eval() | {"doc": {"question": "Who?", "context": "one"}},
        "in 'doc': 'context'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_passages_in_no_known_layout_are_never_lost_in_silence(name, tmp_path):
    record, words = REFUSED[name]
    path = pub.write_lines(tmp_path / "one", [record, record])
    report = inspect_file(path)
    assert (report["loaded"], report["refused"]) == (0, 2)
    assert words in report["refusals"][0]["reason"]


def test_an_empty_field_of_passages_loses_nothing(tmp_path):
    records = [PLAIN | {"context": empty} for empty in (None, "", [], {})]
    assert inspect_file(pub.write_lines(tmp_path / "a", records))["loaded"] == 4

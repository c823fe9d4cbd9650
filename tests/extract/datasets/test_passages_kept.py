"""Passages in a layout that is known are read; in any other the record is refused."""

import pytest

from extract.datasets.inspection import inspect_file
from extract.datasets.loading import Loaded, open_dataset
from extract.records import Passage
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
    "pairs": (PLAIN | {"context": [["T", "x"]]}, "a list that begins with a list"),
    "a text and a number": (PLAIN | {"context": ["x", 3]}, "'context[1]': expected an"),
    "objects of other names": (PLAIN | {"documents": [{"body": "x"}]}, "an object"),
    "half an object": (
        pub.hotpot(context=[{"title": "T"}]),
        "'context[0]': expected an object with 'title' and 'sentences'",
    ),
    "a log of a question with pairs": (
        pub.lm_eval() | {"doc": PLAIN | {"context": [["T", "x"]]}},
        "in 'doc': 'context'",
    ),
    "a log whose target is the answer": (
        pub.lm_eval() | {"doc": {"question": "Who?", "context": [["T", "x"]]}},
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


@pytest.mark.parametrize(
    "record",
    [
        PLAIN | {"context": "It is Ann."},
        PLAIN | {"passages": ["It is Ann.", " "]},
        PLAIN | {"context": '["It is Ann.", ""]'},
        PLAIN | {"answer": ["Ann"], "documents": ["It is Ann."]},
        {"question": "who", "golds": ["Ann"], "contexts": ["It is Ann."]},
        pub.flashrag(metadata={}) | {"context": "It is Ann."},
        pub.lm_eval() | {"doc": PLAIN | {"context": "It is Ann."}},
        pub.popqa() | {"paragraphs": "It is Ann."},
        PLAIN | {"context": " ", "passages": "It is Ann."},
    ],
)
def test_plain_texts_are_passages_without_a_title(record, tmp_path):
    (row,) = open_dataset(pub.write_lines(tmp_path / "one", [record])).read()
    assert isinstance(row, Loaded), row
    assert row.question.passages == (Passage(title="", text="It is Ann."),)


def test_a_text_in_brackets_is_a_passage_and_a_damaged_list_is_not(tmp_path):
    texts = ("[1] It is Ann.", "{{cite}} Ann", '[{"title": "T", "text": "x"]')
    records = [PLAIN | {"context": text} for text in texts]
    *read, damaged = open_dataset(pub.write_lines(tmp_path / "a", records)).read()
    assert [row.question.passages[0].text for row in read] == list(texts[:2])
    assert "'context'" in damaged.reason


def test_an_empty_cell_of_a_table_is_no_passage(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        'question,answer,context\nwho,Ann,"It is Ann, he said."\nwhere,Oslo,\n'
        "when,1900, \n"
    )
    rows = list(open_dataset(path).read())
    texts = [[p.text for p in row.question.passages] for row in rows]
    assert texts == [["It is Ann, he said."], [], []]


def test_an_empty_field_of_passages_loses_nothing(tmp_path):
    records = [PLAIN | {"context": empty} for empty in (None, "", [], {})]
    assert inspect_file(pub.write_lines(tmp_path / "a", records))["loaded"] == 4

"""Which question set a file is of; and a file of questions becomes examples."""

import json

import pandas as pd
import pytest

from beatrice.extract.datasets.loading import (
    inspect_file,
    open_dataset,
    read_questions,
)
from beatrice.extract.records import Passage
from tests.extract.datasets import published as pub


def lists(name=None, **more):
    """Records in NQ-open's layout, which others use as well; `name` is of their ids."""
    return [
        {"question": f"Which city is {i}?", "answer": ["a", "b", "c", "d"]}
        | ({"id": name.format(i)} if name else {})
        | more
        for i in range(3)
    ]


def hotpot(**more):
    return [pub.hotpot(i, **more) for i in range(3)]


RAGS = [
    pub.flashrag(i, question=f"Who is {i}?", golden_answers=list("abcd"))
    for i in range(3)
]
LONGTAIL = [
    {"id": i, "question": f"What is {i}?", "answers": ["a"], "s_wiki_title": "S"}
    for i in range(3)
]
FACTS = {"context": pub.hotpot_columns(0)["context"], "type": "bridge"}
LEVELS = [pub.twowiki(i, level="hard") for i in range(3)]
NO_ID = [{k: v for k, v in pub.twowiki(0).items() if k != "_id"}]
HEX24, STYLE = "5a7f6fd75542992e7d278cf{}", "style of the questions"
# Records, the file's name, the set, and what told it.
SETS = [
    (lists(), "a.jsonl", "nq", "layout"),
    (lists(), "nq-open.jsonl", "nq", "layout"),
    (lists(), "popqa.jsonl", "popqa", "file name"),
    (lists(dataset="trivia"), "a", "triviaqa", "records"),
    (lists(dataset="popqa"), "nq", "popqa", "records"),
    (lists(dataset="nq_open"), "popqa", "nq", "records"),
    (lists("tc_{}"), "a", "triviaqa", "records"),
    (lists(HEX24), "hotpot.jsonl", "hotpotqa", "file name"),
    (lists(HEX24), "a", None, None),
    (lists("2hop__1_{}"), "a", "musique", "records"),
    (hotpot(evidence=["x"]), "a", "hotpotqa", "records"),
    (hotpot(answer_id="Q1"), "a", "hotpotqa", "records"),
    (hotpot(entity_ids="Q1"), "2wiki", "hotpotqa", "records"),
    (LEVELS, "hotpot", "2wikimultihopqa", "records"),
    (NO_ID, "a", "2wikimultihopqa", "records"),
    (RAGS, "a", "triviaqa", STYLE),
    (RAGS, "popqa_test.jsonl", "popqa", "file name"),
    (RAGS, "squad_dev.jsonl", None, None),
    ([x | {"metadata": FACTS} for x in RAGS], "a", "hotpotqa", "records"),
    (LONGTAIL, "triviaqa", "popqa", "records"),
]


@pytest.mark.parametrize(("records", "name", "dataset", "source"), SETS)
def test_marks_go_before_names_and_names_before_guesses(
    records, name, dataset, source, tmp_path
):
    folder = tmp_path / "plain"  # the name of this test's own folder would be one too
    folder.mkdir()
    file = open_dataset(pub.write_lines(folder / name, records))
    assert (file.dataset, file.dataset_from) == (dataset, source)


@pytest.mark.parametrize("dataset", ["squad1_dev", "webq_dev", "curatedtrec_dev"])
@pytest.mark.parametrize("make", [pub.biencoder, pub.flashrag, lambda i: lists()[i]])
def test_a_record_of_a_set_that_is_none_of_the_six_is_refused(make, dataset, tmp_path):
    records = [make(i) | {"dataset": dataset} for i in range(2)]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert (report["loaded"], report["refused"]) == (0, 2)
    assert f"{dataset!r}, which is none of the six" in report["error"]


@pytest.mark.parametrize(
    ("question", "golds", "expected"),
    [
        ("who sings number {}", "['Ann']", "nq"),
        ("Who sings number {}?", "['A', 'B', 'C', 'D']", "triviaqa"),
        ("Who sings number {}?", "['A']", None),
    ],
)
def test_sets_without_a_mark_are_told_by_how_they_ask(
    question, golds, expected, tmp_path_factory
):
    path = tmp_path_factory.mktemp("plain") / "questions.csv"
    path.write_text("".join(f"{question.format(i)}\t{golds}\n" for i in range(9)))
    assert open_dataset(path).dataset == expected
    assert open_dataset(path, dataset="nq").dataset == "nq"
    named = path.with_name("trivia-dev.qa.csv")
    named.write_bytes(path.read_bytes())
    assert open_dataset(named).dataset == "triviaqa"  # a name overrides the guess


def test_a_layout_gives_way_to_the_set_that_is_named_and_a_mark_does_not(tmp_path):
    path = pub.write_lines(tmp_path / "a", lists())
    assert open_dataset(path, dataset="popqa").dataset == "popqa"
    for records, name in ((lists(dataset="nq"), "nq"), (hotpot(), "hotpotqa")):
        path = pub.write_lines(tmp_path / "b", records)
        with pytest.raises(ValueError, match=f"holds {name}, not popqa"):
            open_dataset(path, dataset="popqa")


def test_of_two_sets_with_as_many_records_the_format_decides(tmp_path):
    for records in ([pub.hotpot(), pub.musique()], [pub.musique(), pub.hotpot()]):
        file = open_dataset(pub.write_lines(tmp_path / "mixed", records))
        assert file.format.dataset == file.dataset


# A file of questions in Python, without a run.

CAPITALS = [
    {"question": "Capital of Mali?", "golds": ["Bamako"], "passages": ["In Bamako."]},
    {"question": "Capital of Peru?", "golds": ["Lima", "Ciudad de los Reyes"]},
]


def test_questions_of_ones_own_are_read_in_order_with_an_id_each(tmp_path):
    path = pub.write_lines(tmp_path / "capitals.jsonl", [*CAPITALS, CAPITALS[0]])
    mali, peru, again = read_questions(path)
    assert (mali.question, peru.golds) == (
        "Capital of Mali?",
        tuple(CAPITALS[1]["golds"]),
    )
    assert mali.passages == (Passage(title="", text="In Bamako."),)
    assert (mali.dataset, mali.split) == ("capitals", "train")
    assert again.id == f"{mali.id}-2"
    assert read_questions(str(path), "towns")[0].id.startswith("towns-")
    rows = [x | {"split": "ood", "dataset": "d"} for x in CAPITALS]
    examples = read_questions(pub.write_lines(tmp_path / "examples.jsonl", rows))
    assert [example.split for example in examples] == ["ood"] * 2


def test_a_published_set_keeps_its_name_and_the_passages_asked_for(tmp_path):
    path = pub.write_array(tmp_path / "a.json", hotpot())
    counts = {"all": 3, "supporting": 2, "first": 1, "none": 0}
    for context, n_passages in counts.items():
        examples = read_questions(path, context=context)
        assert [len(e.passages) for e in examples] == [n_passages] * 3
    assert {example.dataset for example in examples} == {"hotpotqa"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([[CAPITALS[0]]], ["list", "Example"]),
        ([pd.DataFrame(CAPITALS)], ["DataFrame", "Example"]),
        ([None], ["NoneType"]),
        (["absent.jsonl"], ["absent.jsonl", "no such file"]),
        (["own.jsonl", "../up"], ["dataset", "'../up'"]),
        (["own.jsonl", 5], ["dataset", "5"]),
        (["own.jsonl", "nq", "some"], ["context", "'some'", "supporting"]),
        (["bad.jsonl"], ["bad.jsonl", "record 2", "golds"]),
        (["text.txt"], ["text.txt"]),
    ],
)
def test_what_is_no_file_of_questions_is_named(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pub.write_lines(tmp_path / "own.jsonl", CAPITALS)
    pub.write_lines(
        tmp_path / "bad.jsonl", [CAPITALS[0], {"question": "?", "golds": []}]
    )
    (tmp_path / "text.txt").write_text(json.dumps("a text") + "\n")
    path, dataset, *context = [*arguments, None][: max(2, len(arguments))]
    options = {"context": context[0]} if context else {}
    with pytest.raises(ValueError) as caught:
        read_questions(path, dataset, **options)
    for name in named:
        assert name in str(caught.value)

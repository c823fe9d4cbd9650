"""A file of questions becomes examples in Python, without a run."""

import json

import pandas as pd
import pytest

from beatrice.extract.datasets.loading import read_questions
from beatrice.extract.records import Passage
from tests.extract.datasets import published as pub

OWN = [
    {"question": "Capital of Mali?", "golds": ["Bamako"], "passages": ["In Bamako."]},
    {"question": "Capital of Peru?", "golds": ["Lima", "Ciudad de los Reyes"]},
]


def test_questions_of_ones_own_are_read_in_order_with_an_id_each(tmp_path):
    path = pub.write_lines(tmp_path / "capitals.jsonl", [*OWN, OWN[0]])
    mali, peru, again = read_questions(path)
    assert (mali.question, peru.golds) == ("Capital of Mali?", tuple(OWN[1]["golds"]))
    assert mali.passages == (Passage(title="", text="In Bamako."),)
    assert (mali.dataset, mali.split) == ("capitals", "train")
    assert again.id == f"{mali.id}-2"
    assert read_questions(str(path), "towns")[0].id.startswith("towns-")


def test_a_published_set_keeps_its_name_and_the_passages_asked_for(tmp_path):
    path = pub.write_array(tmp_path / "a.json", [pub.hotpot(i) for i in range(3)])
    counts = {"all": 3, "supporting": 2, "first": 1, "none": 0}
    for context, n_passages in counts.items():
        examples = read_questions(path, context=context)
        assert [len(e.passages) for e in examples] == [n_passages] * 3
    assert {example.dataset for example in examples} == {"hotpotqa"}


def test_the_splits_of_a_runs_own_file_are_kept(tmp_path):
    rows = [
        row | {"split": split, "dataset": "d"}
        for row, split in zip(OWN, ("validation", "ood"), strict=True)
    ]
    examples = read_questions(pub.write_lines(tmp_path / "examples.jsonl", rows))
    assert [example.split for example in examples] == ["validation", "ood"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([[OWN[0]]], ["list", "Example"]),
        ([pd.DataFrame(OWN)], ["DataFrame", "Example"]),
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
    pub.write_lines(tmp_path / "own.jsonl", OWN)
    pub.write_lines(tmp_path / "bad.jsonl", [OWN[0], {"question": "?", "golds": []}])
    (tmp_path / "text.txt").write_text(json.dumps("a text") + "\n")
    path, dataset, *context = [*arguments, None][: max(2, len(arguments))]
    options = {"context": context[0]} if context else {}
    with pytest.raises(ValueError) as caught:
        read_questions(path, dataset, **options)
    for name in named:
        assert name in str(caught.value)

"""Which question set a record is of: its own marks, then names, then a guess."""

import pytest

from beatrice.extract.datasets.loading import inspect_file, open_dataset
from tests.extract.datasets import published as pub


def lists(**more):
    """Records in NQ-open's layout, which others use as well."""
    return [
        {"question": f"Which city is {i}?", "answer": ["a", "b", "c", "d"]} | more
        for i in range(3)
    ]


def numbered(records, name):
    return [one | {"id": name.format(i)} for i, one in enumerate(records)]


def hotpot(**more):
    return [pub.hotpot(i, **more) for i in range(3)]


RAGS = [
    pub.flashrag(i, question=f"Who is {i}?", golden_answers=list("abcd"))
    for i in range(3)
]
LONGTAIL = [
    {
        "id": i,
        "question": f"What is {i}?",
        "answers": ["a", "b", "c", "d"],
        "s_wiki_title": "S",
        "pop": 7,
        "ctxs": [{"title": "T", "text": "t"}],
    }
    for i in range(3)
]
FACTS = {"context": pub.hotpot_columns(0)["context"], "type": "bridge"}
# For each file: its records, its name, the set, and what told it.
SETS = {
    "answer lists": (lists(), "a.jsonl", "nq", "layout"),
    "answer lists of the same name": (lists(), "nq-open.jsonl", "nq", "layout"),
    "answer lists of a name": (lists(), "popqa.jsonl", "popqa", "file name"),
    "lists that say TriviaQA": (lists(dataset="trivia"), "a", "triviaqa", "records"),
    "lists that say PopQA": (lists(dataset="popqa"), "nq", "popqa", "records"),
    "lists that say NQ": (lists(dataset="nq_open"), "popqa", "nq", "records"),
    "lists with TriviaQA's ids": (
        numbered(lists(), "tc_{}"),
        "a",
        "triviaqa",
        "records",
    ),
    "lists with HotpotQA's ids": (
        numbered(lists(), "5a7f6fd75542992e7d278cf{}"),
        "hotpot.jsonl",
        "hotpotqa",
        "file name",
    ),
    "hexadecimal ids and no name": (
        numbered(lists(), "5a7f6fd75542992e7d278cf{}"),
        "a",
        None,
        None,
    ),
    "MuSiQue's ids": (numbered(lists(), "2hop__1_{}"), "a", "musique", "records"),
    "HotpotQA with evidence": (hotpot(evidence=["x"]), "a", "hotpotqa", "records"),
    "HotpotQA with an answer's id": (
        hotpot(answer_id="Q1"),
        "a",
        "hotpotqa",
        "records",
    ),
    "HotpotQA with entities": (hotpot(entity_ids="Q1"), "2wiki", "hotpotqa", "records"),
    "2Wiki with a level": (
        [pub.twowiki(i, level="hard") for i in range(3)],
        "hotpot",
        "2wikimultihopqa",
        "records",
    ),
    "2Wiki without ids": (
        [{k: v for k, v in pub.twowiki(0).items() if k != "_id"}],
        "a",
        "2wikimultihopqa",
        "records",
    ),
    "FlashRAG in TriviaQA's style": (RAGS, "a", "triviaqa", "style of the questions"),
    "FlashRAG of a name": (RAGS, "popqa_test.jsonl", "popqa", "file name"),
    "FlashRAG of a foreign name": (RAGS, "squad_dev.jsonl", None, None),
    "FlashRAG without facts": (
        [one | {"metadata": FACTS} for one in RAGS],
        "a",
        "hotpotqa",
        "records",
    ),
    "PopQA with contexts": (LONGTAIL, "triviaqa", "popqa", "records"),
}


@pytest.mark.parametrize("name", SETS)
def test_marks_go_before_names_and_names_before_guesses(name, tmp_path):
    records, file_name, dataset, source = SETS[name]
    folder = tmp_path / "plain"  # the name of this test's own folder would be one too
    folder.mkdir()
    file = open_dataset(pub.write_lines(folder / file_name, records))
    assert (file.dataset, file.dataset_from) == (dataset, source)


@pytest.mark.parametrize("dataset", ["squad1_dev", "webq_dev", "curatedtrec_dev"])
@pytest.mark.parametrize("make", [pub.biencoder, pub.flashrag, lambda i: lists()[i]])
def test_a_record_of_a_set_that_is_none_of_the_six_is_refused(make, dataset, tmp_path):
    records = [make(i) | {"dataset": dataset} for i in range(2)]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert (report["loaded"], report["refused"]) == (0, 2)
    assert f"{dataset!r}, which is none of the six" in report["error"]


def test_a_layout_alone_gives_way_to_the_set_that_is_named(tmp_path):
    path = pub.write_lines(tmp_path / "a", lists())
    assert open_dataset(path, dataset="popqa").dataset == "popqa"
    marked = pub.write_lines(tmp_path / "b", lists(dataset="nq"))
    with pytest.raises(ValueError, match="holds nq, not popqa"):
        open_dataset(marked, dataset="popqa")


def test_of_two_sets_with_as_many_records_the_format_decides(tmp_path):
    for records in ([pub.hotpot(), pub.musique()], [pub.musique(), pub.hotpot()]):
        file = open_dataset(pub.write_lines(tmp_path / "mixed", records))
        assert file.format.dataset == file.dataset

"""Records of every layout: the question that they become, or what their refusal names.

One table for layouts, passages and odd values; a record stands between two whole ones
of the same layout, which it costs nothing.
"""

import decimal
import json
import math
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from beatrice.extract.datasets.building import build_examples
from beatrice.extract.datasets.commands import data
from beatrice.extract.datasets.loading import Loaded, inspect_file, open_dataset
from beatrice.extract.datasets.splits import BuildConfig, Source, SplitConfig
from beatrice.extract.records import Passage
from tests.extract.datasets import published as pub


class Reads(NamedTuple):
    """What a record becomes: its answers, its passages, and how many are gold."""

    golds: tuple[str, ...] | None = None  # None: not compared
    n_passages: int = 0
    n_gold: int = 0


def hotpot(**changes):
    record = pub.hotpot(7) | changes
    return {key: value for key, value in record.items() if value is not ...}


def objects(body="sentences"):
    """HotpotQA as Parquet's structs hold it: lists of objects."""
    record = pub.hotpot(7)
    return record | {
        "context": [{"title": t, body: lines} for t, lines in record["context"]],
        "supporting_facts": [
            {"title": t, "sent_id": n} for t, n in record["supporting_facts"]
        ],
    }


def without(record, *names):
    return {key: value for key, value in record.items() if key not in names}


def plain(**fields):
    return {"question": "who is it", "answer": "Ann"} | fields


def answered(**field):
    return {"question": "who is it"} | field


def log(**changes):
    return pub.lm_eval(7) | changes


PASSAGE = {"title": "T", "text": "It is Ann.", "is_supporting": True}
COLUMNS = pub.hotpot_columns(7)["context"]
FACTS = {key: objects()[key] for key in ("context", "supporting_facts")}
HUB = {"question": "Who?", "question_id": "tc_7", "entity_pages": {}}
PAGES = {"title": ["T"], "wiki_context": ["It is b."]}
GOLD_INFO = {"question": "who", "title": "T", "short_answers": ["a"]}
ANN, READ = Reads(("Ann",), 1), Reads(("a", "b"))

# (what, record, the question or the words of its refusal)
TABLE = [
    # HotpotQA, 2WikiMultihopQA and MuSiQue
    ("no answer", hotpot(answer=...), "no 'answer'"),
    ("a null answer", hotpot(answer=None), "'answer' is null"),
    ("a number as answer", hotpot(answer=5), "'answer': expected text"),
    ("an empty answer", hotpot(answer=" "), "'answer' holds no word"),
    ("a list with a number", hotpot(answer=["a", 5]), "'answer[1]'"),
    ("no question", hotpot(question=...), "no 'question'"),
    ("an empty question", hotpot(question=""), "'question' is empty"),
    ("no context", hotpot(context=...), "no 'context'"),
    ("a null context", hotpot(context=None), "'context' is null"),
    ("an empty context", hotpot(context=[]), "'context' holds no paragraph"),
    ("a context of text", hotpot(context="words"), "'context': expected a list"),
    ("a title that is a number", hotpot(context=[[1, ["a"]]]), "'context[0]'"),
    ("sentences that are text", hotpot(context=[["t", "a"]]), "'context[0]'"),
    ("a number for a sentence", hotpot(context=[["t", ["a", 5]]]), "'context[0]'"),
    ("a triple", hotpot(context=[["t", ["a"], 1]]), "'context[0]': expected a pair"),
    ("half an object", hotpot(context=[{"title": "T"}]), "'context[0]'"),
    (
        "uneven columns",
        hotpot(context={"title": ["a"], "sentences": []}),
        "'context': 1 titles but 0 sentences",
    ),
    ("no facts", hotpot(supporting_facts=...), "no 'supporting_facts'"),
    ("half a fact", hotpot(supporting_facts=[["t"]]), "'supporting_facts[0]'"),
    ("a fact on a number", hotpot(supporting_facts=[[1, 2]]), "'supporting_facts[0]'"),
    ("columns alone", without(COLUMNS | plain(context=COLUMNS), "title"), "no 'suppor"),
    ("an id that is a list", hotpot(_id=[1]), "'_id': expected an id"),
    ("sentences in objects", objects(), Reads(("Rush",), 3, 2)),
    ("content in objects", objects("content"), Reads(("Rush",), 3, 2)),
    (
        "text in objects",
        hotpot(context=[{"title": "Neil Peart", "text": "He drums."}]),
        Reads(("Rush",), 1, 1),
    ),
    ("text beside facts", pub.twowiki(7, context="plain text"), "'context'"),
    *(
        (f"answerable: {mark!r}", pub.musique(7, answerable=mark), outcome)
        for outcome, marks in {
            Reads(None, 3, 2): (True, "True", 1, None),
            "unanswerable on purpose": (False, "False", "false", 0, "0"),
            "'answerable': expected true or false": ("maybe", []),
        }.items()
        for mark in marks
    ),
    # Passages beside a plain question, under any of their names
    ("objects", plain(contexts=[PASSAGE]), Reads(("Ann",), 1, 1)),
    ("objects as text", plain(passages='[{"title": "T", "text": "x"}]'), ANN),
    ("objects beside PopQA", pub.popqa(7) | {"ctxs": [PASSAGE]}, Reads(None, 1, 1)),
    ("a text", plain(context="It is Ann."), ANN),
    ("texts, one of them empty", plain(passages=["It is Ann.", " "]), ANN),
    ("texts as text", plain(context='["It is Ann.", ""]'), ANN),
    ("a list of answers", plain(answer=["Ann"], documents=["It is Ann."]), ANN),
    ("golds", answered(golds=["Ann"], contexts=["It is Ann."]), ANN),
    ("FlashRAG", pub.flashrag(7) | {"context": "It is."}, Reads(("Ann", "Bob"), 1)),
    ("a log", log(doc=plain(context="It is Ann.")), ANN),
    ("PopQA", pub.popqa(7) | {"paragraphs": "It is Ann."}, Reads(None, 1)),
    ("white space first", plain(context=" ", passages="It is Ann."), ANN),
    ("a footnote", plain(context="[1] It is Ann."), ANN),
    ("a template", plain(context="{{cite}} It is Ann."), ANN),
    *(
        (f"{x!r} is none", plain(context=x), Reads(("Ann",)))
        for x in (None, "", [], {})
    ),
    ("a damaged list", plain(context='[{"title": "T"'), "'context': expected a list"),
    ("pairs", plain(context=[["T", "x"]]), "'context': expected passages"),
    ("a number among texts", plain(context=["x", 3]), "'context[1]'"),
    ("other names", plain(documents=[{"body": "x"}]), "'documents': expected passages"),
    ("pairs in a log", log(doc=plain(context=[["T", "x"]])), "in 'doc': 'context'"),
    (
        "pairs in a log whose target is the answer",
        log(doc={"question": "Who?", "context": [["T", "x"]]}),
        "in 'doc': 'context'",
    ),
    # FlashRAG, logs and the layouts of others
    ("no facts", pub.flashrag(7, metadata={"context": COLUMNS}), Reads(None, 3)),
    ("facts", pub.flashrag(7, metadata=FACTS), Reads(("Ann", "Bob"), 3, 2)),
    ("a log of a list", log(doc={"question": "?"}, target="['a', 'b']"), READ),
    ("a log of a song", log(doc={"question": "?"}, target="[A] b"), Reads(("[A] b",))),
    ("a log of NumPy's", log(doc={"question": "?"}, target="['a' 'b']"), "'target'"),
    ("a log of None", log(doc={"question": "?"}, target="None"), "'target'"),
    ("a log of a number", log(doc={"question": "?"}, target=5), "'target'"),
    (
        "RetrievalQA, one passage without text",
        {
            "data_source": "popqa",
            "question_id": "popqa_7",
            "question": "What?",
            "ground_truth": ["a"],
            "context": [{"id": "1", "title": "T", "text": ""}, PASSAGE],
        },
        Reads(("a",), 1),
    ),
    (
        "IRCoT / Adaptive-RAG",
        {
            "dataset": "nq",
            "question_id": "single_nq_dev_7",
            "question_text": "what",
            "answers_objects": [{"number": "", "date": {"year": ""}, "spans": ["a"]}],
            "contexts": [{"title": "T", "paragraph_text": "t", "is_supporting": True}],
        },
        Reads(("a",), 1, 1),
    ),
    (
        "KILT",
        {
            "id": "5a7f6fd75542992e7d278cf7",
            "input": "Who?",
            "output": [
                {"answer": "a", "provenance": [{"title": "T"}]},
                {"answer": "b"},
            ],
        },
        READ,
    ),
    ("KILT's output", {"id": "7", "input": "q", "output": []}, "'output[].answer'"),
    ("gold passages", GOLD_INFO | {"context": "It is a."}, Reads(("a",), 1, 1)),
    (
        "Tevatron",
        {
            "query_id": "7",
            "query": "who",
            "answers": ["a"],
            "positive_passages": [{"docid": "1", "title": "T", "text": "t"}],
            "negative_passages": [],
        },
        Reads(("a",), 1, 1),
    ),
    (
        "TriviaQA (hub rows)",
        HUB | {"answer": {"value": "a", "aliases": ["a", "b"]}, "entity_pages": PAGES},
        Reads(("a", "b"), 1, 1),
    ),
    ("the hub's empty answer", HUB | {"answer": {"value": ""}}, "'answer'"),
    ("the hub's null", HUB | {"answer": None}, "'answer'"),
    # Answers in a list that was written as text
    ("JSON", answered(possible_answers='["a", "b"]'), READ),
    ("Python", answered(answers="['a', 'b']"), READ),
    ("Python, both quotes", answered(answers="""['a', "b's"]"""), Reads(("a", "b's"))),
    ("Python, escaped", answered(answers=r"['it\'s', 'b']"), Reads(("it's", "b"))),
    ("a bare word", answered(possible_answers="politician"), Reads(("politician",))),
    ("a song", answered(answer="[Chorus] hey"), Reads(("[Chorus] hey",))),
    ("braces", answered(answer="{x} set"), Reads(("{x} set",))),
    ("a tuple", answered(answer="(I Can't) Day"), Reads(("(I Can't) Day",))),
    ("a quoted word", answered(answer='"x"'), Reads(('"x"',))),
    ("a bar in a singular name", answered(answer="a|b"), Reads(("a|b",))),
    ("a word with null in it", answered(answer="null set"), Reads(("null set",))),
    ("NumPy's list", answered(answers="['a' 'b']"), "'answers': expected a list as"),
    ("NumPy's lines", answered(possible_answers="['a'\n 'b']"), "'possible_answers'"),
    ("JSON without a comma", answered(answer='["a" "b"]'), "'answer': expected a list"),
    ("numbers", answered(possible_answers="[1999]"), "'possible_answers[0]'"),
    ("a null in it", answered(possible_answers="[null]"), "'possible_answers[0]'"),
    ("a list in a list", answered(possible_answers='[["a"]]'), "'possible_answers[0]'"),
    ("an object", answered(possible_answers='{"a": 1}'), "found an object"),
    ("a set", answered(answer="{'a'}"), "found set"),
    ("null", answered(possible_answers="null"), "missing value"),
    ("nan", answered(answer="nan"), "missing value"),
    ("half a list", answered(answer="['a"), "'answer': expected a list"),
    ("words in brackets", answered(possible_answers="[a, b]"), "'possible_answers'"),
    ("code", answered(answers="[print('x')]"), "'answers': expected a list"),
    ("bars", answered(possible_answers="a|b"), "whether the bars"),
]


@pytest.mark.parametrize(
    ("record", "outcome"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_record_becomes_its_question_or_is_refused_by_its_field(
    record, outcome, tmp_path
):
    whole = [pub.hotpot(1)] if "_id" in record else []  # tells a damaged one's layout
    path = pub.write_lines(tmp_path / "one", [*whole, record])
    *_, row = open_dataset(path).read()
    if isinstance(outcome, str):
        assert outcome in row.reason
        return
    assert isinstance(row, Loaded), row
    assert outcome.golds in (None, row.question.golds)
    marks = [p.is_supporting for p in row.question.passages if p.text]
    assert (len(marks), sum(marks)) == outcome[1:]


@pytest.mark.parametrize("write", [pub.write_array, pub.write_lines])
@pytest.mark.parametrize("position", [0, 2])
def test_a_refused_record_is_numbered_and_costs_no_other(write, position, tmp_path):
    refused = [row[1] for row in TABLE if isinstance(row[2], str) and "_id" in row[1]]
    assert len(refused) > 15
    for record in refused:
        records = [pub.hotpot(i) for i in range(4)]
        records[position] = record
        report = inspect_file(write(tmp_path / "a", records))
        assert (report["loaded"], report["refused"]) == (3, 1)
        assert report["refusals"][0]["record"] == position + 1


def test_a_plain_text_is_a_passage_without_a_title(tmp_path):
    path = pub.write_lines(tmp_path / "one", [plain(context=" It is Ann. ")])
    (row,) = open_dataset(path).read()
    assert row.question.passages == (Passage(title="", text="It is Ann."),)


def test_an_empty_cell_of_a_table_is_no_passage(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        'question,answer,context\nwho,Ann,"It is Ann, he said."\nwhere,Oslo,\n'
        "when,1900, \n"
    )
    rows = list(open_dataset(path).read())
    texts = [[p.text for p in row.question.passages] for row in rows]
    assert texts == [["It is Ann, he said."], [], []]


def test_a_second_record_of_the_same_id_is_refused(tmp_path):
    records = [pub.hotpot(1), pub.hotpot(2), pub.hotpot(1)]
    *_, last = open_dataset(pub.write_array(tmp_path / "a.json", records)).read()
    assert "that of record 1" in last.reason


def test_numpys_list_in_the_second_column_is_refused_row_by_row(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("who is a\t['a' 'b']\nwho is b\t['b']\nwho is c\tNone\n")
    report = inspect_file(path)
    assert (report["loaded"], report["refused"], report["golds"]) == (1, 2, 1)


def test_token_numbers_count_the_spaces_that_a_page_begins_with(tmp_path):
    moved = pub.simplified(start=6)
    moved["document_text"] = "  " + moved["document_text"]
    (note,) = moved["annotations"]
    note["long_answer"]["end_token"] += 2
    note["short_answers"] = [{"start_token": 12, "end_token": 14}]
    path = pub.write_lines(tmp_path / "a", [pub.simplified(1), moved])
    first, second = (row.question for row in open_dataset(path).read())
    assert first.golds == second.golds == ("December 1972",)
    assert first.passages == second.passages


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (decimal.Decimal("7"), 7),
        (decimal.Decimal("7.5"), 7.5),
        (math.nan, None),
        (None, None),
        ("7", "7"),
    ],
)
def test_what_a_row_says_of_its_subject_can_be_written_as_json(
    cell, expected, tmp_path
):
    rows = [pub.popqa(i) | {"s_pop": cell} for i in range(3)]
    path = pub.write_parquet(tmp_path / "popqa.parquet", rows)
    sources = [Source(dataset="popqa", role="held-out", path=path)]
    splits = SplitConfig(n_held_out={"popqa": 2})
    build_examples(
        tmp_path / "out", sources, BuildConfig(splits=splits, context="none")
    )
    lines = (tmp_path / "out" / "examples.jsonl").read_text().splitlines()
    # JSON has no NaN.
    examples = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [example["meta"]["s_pop"] for example in examples] == [expected] * 2


@pytest.mark.parametrize("cell", [b"\xff", [1]])
def test_a_cell_of_no_such_kind_is_refused_by_its_column(cell, tmp_path):
    rows = [pub.popqa(0) | {"subj": cell}]
    report = inspect_file(pub.write_parquet(tmp_path / "a.parquet", rows))
    assert "'subj': expected text or a number" in report["refusals"][0]["reason"]


NAMES = ["Ann", "O'Neil", 'so-called "pol"', "both ' and \""]


@pytest.mark.parametrize(
    "records",
    [
        [pub.hotpot(0)]
        + [pub.hotpot(0, _id=name) for name in NAMES for _ in range(2)][1:],
        [answered(answers=f"[{name}, ...") for name in NAMES],
        [answered(answer=name) for name in ("nan", "null")],
        [pub.flashrag(i, dataset=name) for i, name in enumerate(("squad", "webq's"))],
        [pub.musique(i, answerable=name) for i, name in enumerate(NAMES)],
    ],
)
def test_reasons_that_differ_in_a_value_alone_are_counted_as_one(records, tmp_path):
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    (count,) = report["reasons"].values()
    assert count == report["refused"] > 1


def test_reasons_of_different_kinds_stay_apart(tmp_path):
    records = [answered(answers="[Ann, ..."), {"question": "q"}, answered(answers=[5])]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert list(report["reasons"].values()) == [1, 1, 1]


def test_what_is_counted_and_not_listed_is_said(tmp_path):
    path = pub.write_lines(tmp_path / "a", [{"question": "q"}] * 1003)
    assert inspect_file(path)["refusals_not_listed"] == 3
    shown = CliRunner().invoke(data, ["--inspect", str(path)]).output
    assert "983 more; --json lists the first 1000 of all, 3 are" in shown

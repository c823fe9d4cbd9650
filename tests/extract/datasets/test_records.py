"""Records of every layout: the question each becomes, or what its refusal names."""

import decimal
import json
import math
import random
import re
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from beatrice.extract.datasets.commands import data
from beatrice.extract.datasets.loading import Loaded, inspect_file, open_dataset
from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import Passage, normalise, text_key
from tests.extract.datasets import published as pub
from tests.records import spoil


class Reads(NamedTuple):
    """What a record becomes: its answers, its passages, and how many are gold."""

    golds: tuple[str, ...] | None = None  # None: not compared
    n_passages: int = 0
    n_gold: int = 0


def hotpot(**changes):
    record = pub.hotpot(7) | changes
    return {key: value for key, value in record.items() if value is not ...}


def objects(body="sentences"):
    """HotpotQA as in Parquet's structs: lists of objects."""
    record = pub.hotpot(7)
    for name, other in (("context", body), ("supporting_facts", "sent_id")):
        record[name] = [{"title": title, other: x} for title, x in record[name]]
    return record


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
TWO = Reads(("a", "b"), 1)

# (what, record, the question or the words of its refusal)
TABLE = [
    # HotpotQA, 2WikiMultihopQA and MuSiQue
    ("no answer", hotpot(answer=...), "no 'answer'"),
    ("a null answer", hotpot(answer=None), "'answer': expected text or a list"),
    ("a number as answer", hotpot(answer=5), "'answer': expected text"),
    ("an empty answer", hotpot(answer=" "), "'answer' holds no word"),
    ("a list with a number", hotpot(answer=["a", 5]), "'answer[1]'"),
    ("no question", hotpot(question=...), "no 'question'"),
    ("an empty question", hotpot(question=""), "'question' is empty"),
    ("no context", hotpot(context=...), "no 'context'"),
    ("a null context", hotpot(context=None), "'context': expected a list, found null"),
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
    ("an id that is a part", hotpot(_id=1.5), "'_id': expected an id"),
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
    # A plain question with passages, under any of their names
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
    ("no passage", plain(context="nan"), "'context': expected passages, found 'nan'"),
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
        answered(data_source="popqa", question_id="popqa_7", ground_truth=["a"])
        | {"context": [{"id": "1", "title": "T", "text": ""}, PASSAGE]},
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
            "output": [{"answer": "a", "provenance": [{}]}, {"answer": "b"}],
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
    ("NQ's page without a long answer", pub.simplified(start=-1), "no long answer"),
    ("NQ's page of too few tokens", pub.simplified(start=99), "tokens 99 to 14"),
    ("TriviaQA's blind test", without(pub.trivia(7), "Answer"), "no 'Answer' (a test"),
    ("the hub's empty answer", HUB | {"answer": {"value": ""}}, "'answer'"),
    ("the hub's null", HUB | {"answer": None}, "'answer'"),
    ("an id that leads elsewhere", answered(answer="a", id="http://x.org/q"), "'id'"),
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
    # Names in any case, as in tables
    ("capitals", {"Question": "who", "ANSWER": "Ann", "Context": ["It is Ann."]}, ANN),
    ("Context", {"Question": "q", "Answer": "a", "Context": 5}, "'context': expected"),
    # A model's answer is not a gold
    *(
        (f"an answer beside {name}", plain(contexts=["x"], **{name: ["a", "b"]}), TWO)
        for name in ("golds", "gold_answers", "golden_answers", "ground_truth")
    ),
    ("RAGAS", plain(contexts=["x"], ground_truths=["a", "b"]), TWO),
    ("a reference", plain(contexts=["x"], reference="a"), Reads(("a",), 1)),
    ("no gold beside an answer", plain(golds=None), "'golds': expected text"),
    ("a labelled answer", plain(label=None), "--labelled"),
    ("a labelled answer with a gold", plain(label=1, golds="Bob"), Reads(("Bob",))),
]


@pytest.mark.parametrize(
    ("record", "outcome"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_record_becomes_its_question_or_is_refused_by_its_field(
    record, outcome, tmp_path
):
    whole = [pub.hotpot(1)] if "_id" in record else []  # shows a damaged one's layout
    path = pub.write_lines(tmp_path / "one", [*whole, record])
    *others, row = open_dataset(path).read()
    assert row.number == len(whole) + 1 and all(isinstance(x, Loaded) for x in others)
    if isinstance(outcome, str):
        assert outcome in row.reason
        return
    assert isinstance(row, Loaded), row
    assert outcome.golds in (None, row.question.golds)
    marks = [p.is_supporting for p in row.question.passages if p.text]
    assert (len(marks), sum(marks)) == outcome[1:]


# Records of every layout, spoiled at random places, in files with intact ones.
JUNK = (
    *(None, 5, -1, 1.5, True, 10**30, "", "x", "[", "[1", "{'a':1}", "\u2028"),
    *([], {}, [1], [None], [[]], [{}], {"a": 1}, ["x"], [["a", "b"]], "[['a','b']]"),
)
MAKERS = (
    *(pub.hotpot, pub.hotpot_columns, pub.twowiki, pub.twowiki_strings, pub.musique),
    *(pub.popqa, pub.biencoder, pub.oracle, pub.simplified, pub.trivia, pub.flashrag),
    pub.lm_eval,
)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_spoiled_record_loses_no_other_and_never_causes_a_traceback(make, tmp_path):
    rng = random.Random(make.__name__)
    n_refused = 0
    for _ in range(40):
        records = [make(i) for i in range(4)]
        place = rng.randrange(4)
        write = pub.write_lines if place % 2 else pub.write_array
        records[place] = spoil(rng, records[place], JUNK)
        report = inspect_file(write(tmp_path / "file", records))
        json.dumps(report, allow_nan=False)
        assert report["error"] is None
        assert report["records"] == 4 == report["loaded"] + report["refused"]
        # A spoiled id can be that of a later record, which is then refused instead.
        numbers = [refusal["record"] for refusal in report["refusals"]]
        assert numbers == numbers[:1] and all(n > place for n in numbers)
        n_refused += numbers == [place + 1]
    assert n_refused > 0


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_spoiled_byte_is_an_error_or_leaves_other_records_loaded(make, tmp_path):
    rng = random.Random(make.__name__)
    for _ in range(20):
        lines = "".join(json.dumps(make(i)) + "\n" for i in range(4))
        content = bytearray(lines.encode())
        content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / "file").write_bytes(content)
        report = inspect_file(tmp_path / "file")
        assert report["error"] is not None or report["loaded"] >= 2
        assert report["records"] == report["loaded"] + report["refused"]


# What the published layouts hold besides answers and passages.


def question_of(tmp_path, record):
    (row,) = open_dataset(pub.write_lines(tmp_path / "one", [record])).read()
    assert isinstance(row, Loaded), row
    return row.question


UNSCORED = pub.biencoder()
for _positive in UNSCORED["positive_ctxs"]:
    del _positive["score"]
TEXTS = [["It is of 1920.", "It is mute."], ["It is of 1950."]]
META = {
    "type": "comparison",
    "supporting_facts": {"title": ["Film A"], "sent_id": [0]},
    "context": {"title": ["Film A", "Film B"], "content": TEXTS},
}
FILMS = pub.flashrag(7, metadata=META)
BAND, MUTE = "Neil was a drummer. He wrote.", "It is of 1920. It is mute."
GREEN = "Green is paragraph 0."
MOON = "Men walked  there in December 1972 ."
ANSWER = PASSAGE["text"]
# Record, set, id, which passages are gold, title and text of the first passage.
LAYOUTS = [
    *(
        (make(7), "hotpotqa", f"{7:024x}", [1, 0, 1], "Neil Peart", BAND)
        for make in (pub.hotpot, pub.hotpot_columns)
    ),
    *(
        (make(7), "2wikimultihopqa", f"{7:032x}", [1, 1], "Film A", MUTE)
        for make in (pub.twowiki, pub.twowiki_strings)
    ),
    (FILMS, "2wikimultihopqa", "test_7", [1, 0], "Film A", MUTE),
    # A distractor has the title of a gold paragraph.
    (pub.musique(7), "musique", "2hop__7_7", [1, 0, 1], "Green", GREEN),
    *(
        (pub.popqa(7) | {"id": x, "ctxs": [PASSAGE]}, "popqa", name, [1], "T", ANSWER)
        for x, name in ((7, "7"), (7.0, "7"), (float("nan"), None))
    ),
    # The positive of the annotated page, or the first if there are no scores.
    (pub.biencoder(7), "nq", None, [0, 1, 0], "Page", "Linda sings."),
    (UNSCORED, "nq", None, [1, 0, 0], "Page", "Linda sings."),
    (pub.oracle(7), "nq", None, [1, 0], "A", "Röntgen did."),
    (pub.simplified(), "nq", "-5", [1], "Moon", MOON),
]


@pytest.mark.parametrize(
    ("record", "dataset", "name", "marks", "title", "text"), LAYOUTS
)
def test_a_layout_gives_the_set_the_id_and_the_gold_passages(
    record, dataset, name, marks, title, text, tmp_path
):
    question = question_of(tmp_path, record)
    assert question.dataset == dataset
    assert question.id == name or (name is None and question.has_made_id)
    assert [p.is_supporting for p in question.passages] == marks
    assert (question.passages[0].title, question.passages[0].text) == (title, text)


FILES = [
    ("hotpotqa/hotpot_dev_distractor_v1.sample200.json", ""),
    ("2wikimultihopqa/dev.sample164.json", " "),
]


@pytest.mark.parametrize(("file", "between"), FILES)
def test_sentences_of_published_paragraphs_are_joined_as_their_set_is(file, between):
    path = pub.samples() / file
    rows = list(open_dataset(path).read())
    for row, record in zip(rows, json.loads(path.read_bytes()), strict=True):
        texts = [between.join(x).strip() for _, x in record["context"]]
        assert [x.text for x in row.question.passages] == [x for x in texts if x]


def test_a_paragraph_without_a_space_is_joined_like_the_others_of_its_record(tmp_path):
    band, toto, rush = hotpot()["context"]
    record = hotpot(context=[band, [toto[0], ["Toto!", '" (1978)']], rush])
    texts = [passage.text for passage in question_of(tmp_path, record).passages]
    assert texts[:2] == [BAND, 'Toto!" (1978)']


def test_further_fields_of_a_record_are_kept_with_its_question(tmp_path):
    assert question_of(tmp_path, pub.musique()).meta == {"hops": "2hop"}
    assert question_of(tmp_path, pub.popqa(3)).meta["prop"] == "prop 3"
    full = pub.hotpot(supporting_facts=[["Neil Peart", 0], ["Elsewhere", 1]])
    assert question_of(tmp_path, full).meta["missing_titles"] == ["Elsewhere"]
    assert inspect_file(tmp_path / "one")["missing_titles"] == 1


def test_an_unanswerable_twin_is_refused_and_its_id_stays_free(tmp_path):
    twins = [pub.musique(1, answerable=False), pub.musique(1), pub.musique(1)]
    path = pub.write_lines(tmp_path / "full.jsonl", twins)
    first, second, third = open_dataset(path).read()
    assert "unanswerable" in first.reason
    assert second.question.id == "2hop__1_7"
    assert "that of record 2" in third.reason


def test_token_numbers_count_a_pages_leading_spaces(tmp_path):
    moved = pub.simplified(start=6)
    moved["document_text"] = "  " + moved["document_text"]
    (note,) = moved["annotations"]
    note["long_answer"]["end_token"] += 2
    note["short_answers"] = [{"start_token": 12, "end_token": 14}]
    question, other = (question_of(tmp_path, x) for x in (pub.simplified(1), moved))
    assert question.golds == other.golds == ("December 1972",)
    assert question.passages == other.passages


def trivia_folder(tmp_path, **changes):
    """TriviaQA's folders: questions in `qa`, one page of 250 words."""
    words = ["word"] * 250
    words[120] = "SUNSET-boulevard,"
    page = tmp_path / "evidence" / "wikipedia" / "W.txt"
    page.parent.mkdir(parents=True)
    page.write_text(" ".join(words))
    (tmp_path / "qa").mkdir()
    return pub.write_array(tmp_path / "qa" / "dev.json", pub.trivia_file(**changes))


def test_triviaqa_finds_its_evidence_and_marks_the_first_passage_with_an_alias(
    tmp_path,
):
    path = trivia_folder(tmp_path)
    question = next(open_dataset(path).read()).question
    assert question.golds == ("Sunset Boulevard", "Sunset Blvd")
    assert [p.is_supporting for p in question.passages] == [False, True, False]
    assert [len(p.text.split()) for p in question.passages] == [100, 100, 50]
    report = inspect_file(path)
    expected = {"format": "TriviaQA (Wikipedia)", "published_split": "dev"}
    # The web pages are missing.
    expected |= {"with_gold_passages": 3, "missing_documents": 3}
    assert report | expected == report


def test_a_missing_evidence_file_is_counted_and_one_outside_is_refused(tmp_path):
    report = inspect_file(pub.write_array(tmp_path / "dev", pub.trivia_file(2)))
    assert (report["loaded"], report["with_passages"]) == (2, 0)
    assert report["missing_documents"] == 4
    path = trivia_folder(tmp_path)
    (tmp_path / "secret.txt").write_text("Sunset Boulevard")
    records = pub.trivia_file(1)
    records["Data"][0]["EntityPages"][0]["Filename"] = "../../secret.txt"
    (row,) = open_dataset(pub.write_array(path, records)).read()
    assert "is outside" in row.reason


JOINED = {  # by their separated tokens
    "Monk 's Café": "Monk's Café",
    "late 14th - century": "late 14th-century",
    "does n't": "doesn't",
    "R & B": "R&B",
    "42 : 49": "42:49",
    "a - b": "a-b",
    "1997 -- 98": "1997--98",
}


def test_golds_of_separated_tokens_are_also_accepted_joined(tmp_path):
    tokens = list(JOINED)
    gold_info = GOLD_INFO | {"context": "It is a.", "short_answers": tokens}
    rows = [pub.biencoder(7, answers=tokens), gold_info]
    path = pub.write_lines(tmp_path / "q.jsonl", rows)
    table = tmp_path / "nq-test.qa.csv"
    table.write_text(f"who\t{tokens}\n")
    for row in (*open_dataset(path).read(), *open_dataset(table, dataset="nq").read()):
        assert set(row.question.golds) == {*tokens, *JOINED.values()}
    page = pub.simplified()
    page["document_text"] = page["document_text"].replace("1972", "- 1972")
    page["annotations"][0]["short_answers"][0]["end_token"] += 1
    (row,) = open_dataset(pub.write_lines(path, [page])).read()
    assert row.question.golds == ("December - 1972", "December-1972")


def test_golds_of_nq_open_are_right_by_the_golds_of_dpr():
    golds = []
    for name in ("NQ-open.dev.jsonl", "dpr.nq-test.qa.csv"):
        rows = open_dataset(pub.samples() / "nq" / name, dataset="nq").read()
        golds.append({text_key(x.question.question): x.question.golds for x in rows})
    n = 0
    for key in golds[0].keys() & golds[1].keys():
        joined = [normalise(_squeezed(gold)) for gold in golds[1][key]]
        for gold in golds[0][key]:
            if normalise(_squeezed(gold)) in joined:
                n += 1
                assert exact_match(gold, golds[1][key]), (gold, golds[1][key])
    assert n > 1000


def _squeezed(gold):
    return re.sub(r"\s*([-–−/:&])\s*", r"\1", gold).replace(" 's", "'s")


def test_leftover_quotes_are_removed_from_dpr_questions(tmp_path):
    path = tmp_path / "trivia-dev.qa.csv"
    path.write_bytes(
        b'"""Who wrote """"A cabbage""""?"""\t"[\'Mark ""M"" Twain\', \'Sam\']"\r\n'
        b"who's\t[\"it's\"]\r\nwho is a\t['a' 'b']\r\nwho is c\tNone\r\n"
    )
    first, second, *refused = open_dataset(path).read()
    assert first.question.question == 'Who wrote "A cabbage"?'
    assert first.question.golds == ('Mark "M" Twain', "Sam")
    assert second.question.golds == ("it's",)
    assert all("column" in row.reason for row in refused) and len(refused) == 2


def test_a_flashrag_record_without_passages_is_recognised_as_musique(tmp_path):
    steps = {"question_decomposition": [{"support_paragraph": {"title": "Green"}}]}
    question = question_of(tmp_path, pub.flashrag(metadata={"metadata": steps}))
    assert (question.dataset, question.passages) == ("musique", ())


def test_an_lm_eval_log_gives_the_question_and_the_answer_of_the_model(tmp_path):
    question = question_of(tmp_path, pub.lm_eval())
    assert (question.dataset, question.golds) == ("nq", ("Ann",))
    assert question.meta["response"] == "Ann"
    same = {"question": "who did thing 0", "answer": ["Ann"]}
    # So that log and set can be joined.
    assert question_of(tmp_path, same).id == question.id


# (question, filter) pairs of a log; the second question has filter "b" first.
IDS = [(0, "a"), (1, "b"), (1, "a"), (0, "b"), (2, "b"), (2, "a")]
EXAMPLE = {"golds": ["a"], "split": "train", "dataset": "d"}


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        ([log(filter=x, doc_id=i) for i in range(3) for x in "ab"], (3, 3)),
        ([pub.lm_eval(i) | {"filter": "a"} for i in range(3)], (3, 0)),
        ([log(filter="a"), log(filter="a", doc_id=1)], (2, 0)),
        ([log(doc=pub.flashrag(i), filter=x) for i, x in IDS], (3, 3)),
        # Examples made from two logs.
        ([EXAMPLE | {"question": x, "meta": {"filter": x}} for x in "ab"], (2, 0)),
    ],
)
def test_only_the_first_of_two_filters_of_a_log_is_read(records, counts, tmp_path):
    report = inspect_file(pub.write_lines(tmp_path / "samples", records))
    assert (report["loaded"], report["refused"]) == counts
    assert all("filter 'b'" in refusal["reason"] for refusal in report["refusals"])


EMPTY = [{"title": "T", "text": ""}, {"title": "U", "text": "u"}]


@pytest.mark.parametrize(
    ("records", "name", "n"),
    [
        ([plain(contexts=EMPTY)], "empty_passages", 1),
        ([plain(answer=["a"])] * 2, "repeated_questions", 1),
        ([plain(answer=["The", "!!", "The Who"])], "golds_without_words", 2),
    ],
)
def test_oddities_are_kept_and_counted(records, name, n, tmp_path):
    report = inspect_file(pub.write_lines(tmp_path / "nq", records))
    assert (report["loaded"], report[name]) == (len(records), n)


def test_two_layouts_in_one_file_are_both_read(tmp_path):
    rows = [GOLD_INFO | {"context": "It is a ."}, pub.oracle(), pub.biencoder()]
    report = inspect_file(pub.write_lines(tmp_path / "mixed.json", rows))
    assert (report["loaded"], len(report["formats"])) == (3, 3)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"id": "0", "contents": '"Title"\ntext'}, "FlashRAG corpus"),
        ({"title": "Title", "text": "text"}, "titles and texts"),
    ],
)
def test_passages_are_not_taken_for_questions(record, kind, tmp_path):
    for path in (
        pub.write_array(tmp_path / "a.json", [record] * 3),
        pub.write_table(tmp_path / "a.tsv", [record] * 3),
    ):
        report = inspect_file(path)
        assert "holds passages" in report["error"] and kind in report["format"]
        assert report["container"] in ("json array", "table")
        assert report["records"] is None
    path = pub.write_lines(tmp_path / "mixed", [pub.hotpot(0), pub.hotpot(1), record])
    reason = inspect_file(path)["refusals"][0]["reason"]
    assert "is of another kind (passages" in reason and kind in reason


@pytest.mark.parametrize(
    "header", ["question,answer,context", "Question,ANSWER,Context"]
)
@pytest.mark.parametrize("text", ["It is Ann, he said.", "It is\tAnn."])
def test_an_empty_cell_of_a_table_is_no_passage(header, text, tmp_path):
    """Whatever the case of column names, and with tabs in a cell."""
    rows = [f'who,Ann,"{text}"', "where,Oslo,", "when,1900, "]
    path = tmp_path / "own.csv"
    path.write_text("\n".join([header, *rows]))
    passages = [row.question.passages for row in open_dataset(path).read()]
    assert passages == [(Passage(title="", text=text),), (), ()]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (decimal.Decimal("7"), 7),
        (decimal.Decimal("7.5"), 7.5),
        (math.nan, None),
        (None, None),
        ("7", "7"),
        (b"\xff", "'s_pop': expected text or a number"),
        ([1], "'s_pop': expected text or a number"),
    ],
)
def test_a_rows_facts_about_its_subject_can_be_written_as_json_or_are_refused(
    cell, expected, tmp_path
):
    rows = [pub.popqa(i) | {"s_pop": cell} for i in range(3)]
    for row in open_dataset(pub.write_parquet(tmp_path / "popqa", rows)).read():
        if isinstance(row, Loaded):
            meta = json.loads(json.dumps(row.question.meta, allow_nan=False))
            assert meta["s_pop"] == expected
        else:
            assert expected in row.reason


def test_an_examples_meta_that_is_not_json_is_refused(tmp_path):
    row = dict(id="7", dataset="d", split="train", question="who", golds=["a"])
    row["meta"] = {"share": decimal.Decimal("0.5")}
    report = inspect_file(pub.write_parquet(tmp_path / "examples", [row]))
    assert "'meta': expected JSON values" in report["error"]


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
def test_reasons_that_differ_only_in_a_value_are_counted_as_one(records, tmp_path):
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    (count,) = report["reasons"].values()
    assert count == report["refused"] > 1


def test_different_reasons_stay_apart_and_unlisted_refusals_are_counted(tmp_path):
    records = [answered(answers="[Ann, ..."), {"question": "q"}, answered(answers=[5])]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert list(report["reasons"].values()) == [1, 1, 1]
    path = pub.write_lines(tmp_path / "a", [{"question": "q"}] * 1003)
    assert inspect_file(path)["refusals_not_listed"] == 3
    shown = CliRunner().invoke(data, ["--inspect", str(path)]).output
    assert "983 more; --json lists the first 1000 of all, 3 are" in shown

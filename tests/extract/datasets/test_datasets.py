"""What each published layout becomes, and why a record is refused."""

import json

import pytest

from beatrice.extract.datasets.loading import (
    Loaded,
    Refusal,
    inspect_file,
    open_dataset,
)
from beatrice.extract.records import Passage
from tests.extract.datasets import published as pub


def read(path, **options):
    return list(open_dataset(path, **options).read())


def only(path, **options):
    (found,) = read(path, **options)
    assert isinstance(found, Loaded), found
    return found.question


def titles(question):
    return [p.title for p in question.passages if p.is_supporting]


def one(tmp_path, record):
    return only(pub.write_lines(tmp_path / "one", [record]))


@pytest.mark.parametrize("make", [pub.hotpot, pub.hotpot_columns])
def test_hotpotqa_marks_the_paragraphs_of_gold_titles(make, tmp_path):
    found = one(tmp_path, make(7))
    assert (found.dataset, found.id) == ("hotpotqa", f"{7:024x}")
    assert titles(found) == ["Neil Peart", "Rush &amp; co"]  # raw, as in the facts
    assert found.passages[0].text == "Neil was a drummer. He wrote."
    assert found.golds == ("Rush",)


@pytest.mark.parametrize("make", [pub.twowiki, pub.twowiki_strings])
def test_twowiki_is_told_from_hotpotqa_and_its_sentences_are_spaced(make, tmp_path):
    found = one(tmp_path, make(7))
    assert (found.dataset, found.id) == ("2wikimultihopqa", f"{7:032x}")
    assert found.passages[0].text == "It is of 1920. It is mute."
    assert titles(found) == ["Film A", "Film B"]


def test_a_gold_title_without_a_paragraph_is_counted(tmp_path):
    record = pub.hotpot(supporting_facts=[["Neil Peart", 0], ["Elsewhere", 1]])
    path = pub.write_array(tmp_path / "fullwiki.json", [record])
    assert only(path).meta["missing_titles"] == ["Elsewhere"]
    assert inspect_file(path)["missing_titles"] == 1


def test_musique_believes_its_marks_and_not_its_titles(tmp_path):
    found = one(tmp_path, pub.musique())
    marks = [(p.title, p.is_supporting) for p in found.passages]
    assert marks == [("Green", True), ("Green", False), ("Blue", True)]
    assert found.golds == ("Warner Music Group", "Warner Music")
    assert found.meta == {"hops": "2hop"}


def test_an_unanswerable_twin_is_refused_and_its_id_is_not_taken(tmp_path):
    twins = [pub.musique(1, answerable=False), pub.musique(1)]
    refusal, found = read(pub.write_lines(tmp_path / "full.jsonl", twins))
    assert "unanswerable" in refusal.reason
    assert found.question.id == "2hop__1_7"


def test_popqa_reads_with_its_paragraphs_too(tmp_path):
    paragraph = {"title": "George", "text": "A politician.", "is_supporting": True}
    found = one(tmp_path, pub.popqa(3) | {"paragraphs": [paragraph]})
    assert found.passages == (
        Passage(title="George", text="A politician.", is_supporting=True),
    )
    assert found.meta["prop"] == "prop 3"


def test_dpr_positives_are_gold_only_if_they_come_from_the_annotated_page(tmp_path):
    found = one(tmp_path, pub.biencoder())
    assert found.dataset == "nq"
    assert [p.text for p in found.passages if p.is_supporting] == ["Linda did."]
    unscored = pub.biencoder()
    for passage in unscored["positive_ctxs"]:
        del passage["score"]
    gold = [p.is_supporting for p in one(tmp_path, unscored).passages]
    assert gold == [True, False, False]


def test_only_isgold_makes_a_context_gold(tmp_path):
    found = one(tmp_path, pub.oracle())
    assert found.dataset == "nq"
    assert titles(found) == ["A"]


def test_simplified_nq_cuts_the_long_answer_out_by_single_spaces(tmp_path):
    found = one(tmp_path, pub.simplified())
    assert found.id == "-5"
    assert found.golds == ("December 1972",)
    (passage,) = found.passages
    assert passage == Passage(
        title="Moon", text="Men walked  there in December 1972 .", is_supporting=True
    )


def test_simplified_nq_without_a_long_answer_is_refused(tmp_path):
    records = [pub.simplified(start=-1), pub.simplified(start=99), pub.simplified()]
    found = read(pub.write_lines(tmp_path / "nq.jsonl", records))
    assert "no long answer" in found[0].reason
    assert "tokens 99 to 14" in found[1].reason
    assert isinstance(found[2], Loaded)


def rc(tmp_path, alias_at=120, **changes):
    """TriviaQA's folders: questions in `qa`, one page of 250 words."""
    words = ["word"] * 250
    words[alias_at] = "SUNSET-boulevard,"
    page = tmp_path / "evidence" / "wikipedia" / "W.txt"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(" ".join(words))
    (tmp_path / "qa").mkdir(exist_ok=True)
    return pub.write_array(
        tmp_path / "qa" / "dev.json", pub.trivia_file(**changes), indent=4
    )


def test_triviaqa_finds_its_evidence_and_marks_the_first_passage_with_an_alias(
    tmp_path,
):
    path = rc(tmp_path)
    found = read(path)[0].question
    assert found.golds == ("Sunset Boulevard", "Sunset Blvd")
    assert [p.is_supporting for p in found.passages] == [False, True, False]
    assert [len(p.text.split()) for p in found.passages] == [100, 100, 50]
    report = inspect_file(path)
    assert report["format"] == "TriviaQA (Wikipedia)"
    assert report["published_split"] == "dev"
    assert report["with_gold_passages"] == 3
    assert report["missing_documents"] == 3  # the web pages are not there


def test_triviaqa_without_its_evidence_counts_what_is_missing(tmp_path):
    path = pub.write_array(tmp_path / "dev.json", pub.trivia_file(2))
    report = inspect_file(path)
    assert (report["loaded"], report["with_passages"]) == (2, 0)
    assert report["missing_documents"] == 4


def test_an_evidence_file_outside_its_folder_is_refused(tmp_path):
    path = rc(tmp_path)
    (tmp_path / "secret.txt").write_text("Sunset Boulevard")
    records = pub.trivia_file(1)
    records["Data"][0]["EntityPages"][0]["Filename"] = "../../secret.txt"
    (found,) = read(pub.write_array(path, records))
    assert "leads out" in found.reason


def test_a_blind_test_file_is_refused_with_its_reason(tmp_path):
    records = pub.trivia_file(2)
    for record in records["Data"]:
        del record["Answer"]
    report = inspect_file(pub.write_array(tmp_path / "test.json", records))
    assert report["dataset"] == "triviaqa"
    assert report["reasons"] == {"no 'Answer' (a test set without answers?)": 2}
    assert "none of 2 records" in report["error"]


def test_dpr_questions_lose_the_quotes_that_are_left(tmp_path):
    path = tmp_path / "trivia-dev.qa.csv"
    path.write_bytes(
        b'"""Who wrote """"A cabbage""""?"""\t"[\'Mark ""M"" Twain\', \'Sam\']"\r\n'
        b"who's\t[\"it's\"]\r\n"
    )
    first, second = (one.question for one in read(path))
    assert first.question == 'Who wrote "A cabbage"?'
    assert first.golds == ('Mark "M" Twain', "Sam")
    assert second.golds == ("it's",)


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
    # How a set asks is a guess, which a name overrides.
    assert open_dataset(named).dataset == "triviaqa"


def test_flashrag_keeps_the_passages_of_its_source(tmp_path):
    plain = one(tmp_path, pub.flashrag())
    assert (plain.id, plain.golds) == ("test_0", ("Ann", "Bob"))
    source = pub.twowiki_strings()
    context = {
        "title": ["Film A", "Film B"],
        "content": [["It is of 1920.", "It is mute."], ["It is of 1950."]],
    }
    facts = {"title": ["Film A"], "sent_id": [0]}
    meta = {"type": "comparison", "supporting_facts": facts, "context": context}
    found = one(tmp_path, pub.flashrag(question=source["question"], metadata=meta))
    assert found.dataset == "2wikimultihopqa"
    assert titles(found) == ["Film A"]
    steps = [{"support_paragraph": {"title": "Green"}}]
    found = one(
        tmp_path, pub.flashrag(metadata={"metadata": {"question_decomposition": steps}})
    )
    assert (found.dataset, found.passages) == ("musique", ())


def test_an_lm_eval_log_gives_the_question_and_the_answer_of_the_model(tmp_path):
    found = one(tmp_path, pub.lm_eval())
    assert (found.dataset, found.golds) == ("nq", ("Ann",))
    assert found.meta["response"] == "Ann"
    same = {"question": "who did thing 0", "answer": ["Ann"]}
    assert one(tmp_path, same).id == found.id  # so that log and set can be joined
    bare = pub.lm_eval() | {"doc": {"question": "Who?"}, "target": "['x', \"y's\"]"}
    assert one(tmp_path, bare).golds == ("x", "y's")


def test_a_passage_without_text_is_left_out_and_counted(tmp_path):
    passages = [{"title": "T", "text": ""}, {"title": "U", "text": "u"}]
    record = {"question": "What?", "answer": "a", "contexts": passages}
    path = pub.write_lines(tmp_path / "one", [record])
    assert [p.title for p in only(path).passages] == ["U"]
    assert inspect_file(path)["empty_passages"] == 1


def test_a_repeated_question_without_ids_is_kept_and_counted(tmp_path):
    records = [{"question": "who is it", "answer": ["a"]}] * 2
    report = inspect_file(pub.write_lines(tmp_path / "nq", records))
    assert (report["loaded"], report["repeated_questions"]) == (2, 1)


def test_an_answer_of_which_nothing_is_left_is_kept_and_counted(tmp_path):
    records = [{"question": "who is a", "answer": ["The", "!!", "The Who"]}]
    path = pub.write_lines(tmp_path / "nq", records)
    assert only(path).golds == ("The", "!!", "The Who")
    assert inspect_file(path)["golds_without_words"] == 2


def test_two_layouts_in_one_file_are_both_read(tmp_path):
    gold = {"question": "who", "question_tokens": "who", "short_answers": ["a"]}
    gold |= {"context": "It is a .", "title": "T", "example_id": -7}
    rows = [gold, pub.oracle(), pub.biencoder()]
    report = inspect_file(pub.write_lines(tmp_path / "mixed.json", rows))
    assert report["loaded"] == 3
    assert len(report["formats"]) == 3


def test_a_file_of_another_set_than_it_is_given_for_is_refused(tmp_path):
    path = pub.write_array(tmp_path / "a.json", [pub.hotpot()])
    with pytest.raises(ValueError, match="holds hotpotqa, not musique"):
        open_dataset(path, dataset="musique")


def test_nan_is_read_and_a_lone_surrogate_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"question": "who is a", "answer": ["a"], "score": NaN}\n'
        '{"question": "who is b", "answer": ["\\ud800"], "score": NaN}\n'
    )
    first, second = read(path)
    assert isinstance(first, Loaded)
    assert isinstance(second, Refusal)


def test_a_report_is_json(tmp_path):
    for path in (pub.write_array(tmp_path / "a", [pub.hotpot(), 5]), tmp_path / "b"):
        json.loads(json.dumps(inspect_file(path), allow_nan=False))

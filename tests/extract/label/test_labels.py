"""Labels by comparison, by a judge in Python, and from a user's file."""

import json
import re
import string
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beatrice.extract.datasets.loading import open_dataset
from beatrice.extract.label.labels import (
    check_both_classes,
    contains_gold,
    exact_match,
    import_labels,
    label_by_match,
    label_of,
    label_with,
    token_f1,
)
from beatrice.extract.records import (
    SETTINGS,
    Label,
    normalise,
    read_records,
    text_key,
    write_lines,
)
from beatrice.extract.run.files import write_text_atomic
from beatrice.extract.run.rows import label_rule
from tests.extract.datasets import published as pub
from tests.extract.label.scripted import answered
from tests.extract.label.test_audit import fill
from tests.extract.small_run import beatrice, make_run
from tests.records import an_example


def example(name, question):
    return an_example(id=name, dataset="capitals", question=question, golds=("x",))


MALI, PERU = example("1", "Capital of Mali?"), example("2", "Capital of Peru?")
QUESTIONS = [MALI, PERU]
ANSWERS = [
    answered("Bamako", name="1"),
    answered("Segou", "with_context", name="1"),
    answered("Lima", name="2"),
]


def judged(question, text, label, **more):
    return {"question": question, "answer": text, "label": label, **more}


MINE = judged("Capital of Mali?", "Bamako", True)


def imported(folder, rows, answers=ANSWERS, questions=QUESTIONS):
    """Import labels from a user's lines, or from those of another run."""
    path = folder / "mine.jsonl"
    lines = [msgspec.to_builtins(row) for row in rows]
    return import_labels(pub.write_lines(path, lines), answers, questions)


def verdicts(labels):
    return [label.label for label in labels]


def labels_in(run):
    return verdicts(read_records(run.labels, Label))


FILES = (
    "hotpotqa/hotpot_dev_distractor_v1.sample200.json",
    "hotpotqa/react.hotpot_dev_v1_simplified.qa_only.json",
    "2wikimultihopqa/train.sample500.json",
    "musique/musique_ans_v1.0_dev.sample200.jsonl",
    "nq/NQ-open.dev.jsonl",
    "popqa/popQA.sample1000.tsv",
    "triviaqa/flashrag.triviaqa_test.1000.jsonl",
)


def scripted_words(text):
    """Return the words of SQuAD's normaliser, which is made for English."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def scripted_f1(answer, golds):
    """FlashRAG's F1, from precision and recall, without pairs that its guard skips."""
    best, answer_words = 0.0, scripted_words(answer)
    for gold in map(scripted_words, golds):
        closed = (["yes"], ["no"], ["noanswer"])
        if answer_words != gold and (answer_words in closed or gold in closed):
            continue
        n_same = sum((Counter(answer_words) & Counter(gold)).values())
        if n_same:
            precision, recall = n_same / len(answer_words), n_same / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


@pytest.mark.parametrize("file", FILES)
def test_golds_of_published_sets_are_compared_as_by_their_scripts(file):
    path = pub.samples() / file
    if not path.exists():
        pytest.skip(f"{file} is not among the samples")
    questions = [item.question for item in open_dataset(path).read()][:2000]
    # Of other texts, our normaliser deletes marks and signs that SQuAD's leaves.
    questions = [x for x in questions if "".join(x.golds).isascii()]
    assert len(questions) > 50
    for question, other in zip(questions, reversed(questions), strict=True):
        first, golds = question.golds[0], question.golds
        sentence = f"The answer is: {first}."
        for answer in (first, first.upper(), sentence, other.golds[0], "yes", "no", ""):
            same = scripted_words(answer) in [scripted_words(g) for g in golds]
            same = same and answer != ""  # to the scripts, it is the gold "*"
            assert exact_match(answer, golds) == same
            assert token_f1(answer, golds) == pytest.approx(scripted_f1(answer, golds))
        assert all(normalise(x).split() == scripted_words(x) for x in golds)


@pytest.mark.parametrize(
    ("answer", "golds", "is_exact", "holds", "f1"),
    [
        ("JK Rowling", ["J.K. Rowling"], True, True, 1),
        ("1000", ["1,000"], True, True, 1),
        ("rock-n-roll", ["Rock'n'Roll"], True, True, 1),
        (" TARN ", ["Tarn Falls", "Tarn"], True, True, 1),
        ("1979-80 season", ["1979\u201380 season"], True, True, 1),
        ("\u5317\u4eac\u3002", ["\u5317\u4eac"], True, True, 1),  # a Chinese full stop
        ("\xabSao Tome\u0301\xbb", ["Sao Tom\xe9"], True, True, 1),
        ("Sao Tome", ["Sao Tom\xe9"], False, False, 0.5),
        ("U.S.", ["US"], True, True, 1),
        ("U.S.", ["U.S.A."], False, False, 0),  # "us" and "usa" to published scripts
        ("New York", ["New-York"], False, False, 0),  # "newyork"
        ("the Beatles", ["Beatles!"], True, True, 1),
        ("the", ["A!"], False, False, 0),  # both become empty
        ("", ["'A", "*", ""], False, False, 0),
        ("a.", ["A"], True, True, 0),
        ("*", ["*"], True, True, 0),
        ("Tarn River", ["Tarn Falls"], False, False, 0.5),
        ("x x x", ["x"], False, True, 0.5),
        ("Lisbon\u2014the capital", ["Lisbon"], False, True, 0),
        ("Answer:Lisbon", ["Lisbon"], False, True, 0),
        ("1,000", ["1"], False, False, 0),
        ("-128.6 \xb0F", ["\u2212128.6\xa0\xb0F"], True, True, 1),
        ("Auli'i Cravalho", ["Auli\u02bbi Cravalho"], True, True, 1),
        ("1964 年", ["１９６４年"], True, True, 1),
        ("ガンダム", ["ｶﾞﾝﾀﾞﾑ"], True, True, 1),
        ("1947 में", ["१९४७"], False, True, 2 / 3),  # Devanagari's digits
        ("\u06f3\u06f5", ["\u0663\u0665"], True, True, 1),  # Persian's and Arabic's
        ("", ["x"], False, False, 0),
        ("yes it is", ["yes"], False, True, 0),  # FlashRAG's guard for yes and no
        ("No, they are not", ["no"], False, True, 0),
        ("Yes, no doubt", ["no"], False, False, 0),
        ("I have no idea", ["no"], False, False, 0),
        ("There is no information on that", ["no"], False, False, 0),
        ("No information is given.", ["no"], False, False, 0),
        ("no", ["no, never"], False, False, 0),
        ("No.", ["no"], True, True, 1),
        ("noanswer", ["noanswer here", "the"], False, False, 0),
        ("The answer is: Lisbon", ["Lisbon", "Lisboa"], False, True, 0.5),
        ("It is J.K. Rowling, who wrote it.", ["JK Rowling"], False, True, 4 / 9),
        ("unknown", ["no"], False, False, 0),
        ("10", ["1"], False, False, 0),
        ("anything at all", ["The"], False, False, 0),
        ("Rowling J.K.", ["J.K. Rowling"], False, False, 1),
        ("答案是北京。", ["北京"], False, True, 4 / 7),
        ("答えはParisです", ["Paris"], False, True, 2 / 7),
        ("เมืองหลวงคือกรุงเทพ", ["กรุงเทพ"], False, True, 6 / 11),
        ("កិ", ["ក"], False, False, 0),  # a vowel sign belongs to its letter
        ("ปี ๑๐", ["๑"], False, False, 0),  # a number is one word
    ],
)
def test_answers_are_compared_by_words_without_case_marks_and_articles(
    answer, golds, is_exact, holds, f1
):
    assert exact_match(answer, golds) == is_exact
    assert contains_gold(answer, golds) == holds
    assert token_f1(answer, golds) == pytest.approx(f1)


@given(st.characters(categories=["Cf"]))
def test_formatting_characters_in_an_answer_are_ignored(character):
    for gold in ("Helium", "Sao Tom\xe9", "\u0645\u06cc\u062e\u0648"):
        assert exact_match(f"{gold[:3]}{character}{gold[3:]}", [gold])
    assert normalise(f"Sao{character} Tome\u0301") == "sao tom\xe9"


@given(st.text(min_size=1))
def test_every_text_but_a_blank_one_matches_itself(text):
    assert normalise(normalise(text)) == normalise(text)
    assert exact_match(text, (text,)) == bool(text.strip())
    assert token_f1(text, (text,)) == pytest.approx(float(bool(normalise(text))))


def test_a_judge_in_python_labels_every_answer_and_may_leave_some_out():
    def by_length(question, answer):
        assert question.id == answer.example_id
        return None if answer.text == "Segou" else np.bool_(len(answer.text) > 4)

    counted = []
    labels = label_with(
        ANSWERS, QUESTIONS, by_length, progress=lambda *done: counted.append(done)
    )
    assert [label.key for label in labels] == [answer.key for answer in ANSWERS]
    assert verdicts(labels) == [True, None, False]
    assert [label.verdicts for label in labels] == [("correct",), (), ("incorrect",)]
    assert {label.reason for label in labels[::2]} == {"by by_length"}
    assert labels[1].reason == "by_length cannot decide"
    assert counted == [(1, 3), (2, 3), (3, 3)]


def test_labels_by_comparison_are_those_of_a_judge_that_compares():
    golds = [msgspec.structs.replace(MALI, golds=("Bamako",)), PERU]
    by_match = label_by_match(ANSWERS, golds)
    by_judge = label_with(ANSWERS, golds, lambda e, a: a.text in e.golds)
    for labels in (by_match, by_judge):
        assert verdicts(labels) == [True, False, False]
    longer = [msgspec.structs.replace(ANSWERS[0], text="It is Bamako.")]
    assert not label_by_match(longer, golds)[0].label
    assert label_by_match(longer, golds, "containment")[0].label
    with pytest.raises(ValueError, match="exact, containment.*'fuzzy'"):
        label_by_match(ANSWERS, QUESTIONS, "fuzzy")


def right(question, answer):
    return True


@pytest.mark.parametrize(
    ("answers", "examples", "judge", "named"),
    [
        ("Bamako", QUESTIONS, right, ["list of Answer", "str"]),
        (["Bamako"], QUESTIONS, right, ["list of Answer", "str", "place 0"]),
        ([*ANSWERS, None], QUESTIONS, right, ["list of Answer", "NoneType", "place 3"]),
        (ANSWERS, {"1": MALI}, right, ["list of Example", "dict"]),
        (ANSWERS, MALI, right, ["list of Example"]),
        (ANSWERS, None, right, ["list of Example", "NoneType"]),
        (pd.DataFrame({"answer": ["x"]}), QUESTIONS, right, ["Answer", "DataFrame"]),
        (ANSWERS, [MALI], right, ["'2'", "question"]),
        (ANSWERS, QUESTIONS, "right", ["judge", "str"]),
        (ANSWERS, QUESTIONS, lambda e, a: "yes", ["'yes'", "'Bamako'", "'1'"]),
        (ANSWERS, QUESTIONS, lambda e, a: 1, ["True, False or None", "1"]),
        (ANSWERS, QUESTIONS, lambda e, a: a.words, ["AttributeError", "'Bamako'"]),
        (ANSWERS, QUESTIONS, lambda a: True, ["TypeError", "'Bamako'"]),
    ],
)
def test_what_cannot_be_judged_is_named(answers, examples, judge, named):
    with pytest.raises(ValueError) as caught:
        label_with(answers, examples, judge)
    for name in named:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "golds", "named"),
    [
        ("Bamako", "Bamako", "golds: expected a list of texts.*'Bamako'"),
        ("Bamako", None, "golds: expected a list of texts"),
        ("Bamako", [1960], "golds: expected a list of texts"),
        ("Bamako", {"text": ["Bamako"]}, "golds: expected a list of texts.*'text'"),
        (None, ["Bamako"], "answer: expected a text"),
    ],
)
def test_golds_that_are_not_a_list_of_texts_are_refused(answer, golds, named):
    with pytest.raises(ValueError, match=named):
        exact_match(answer, golds)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("verdict", [True, False, None])
def test_a_single_class_in_training_or_validation_is_refused(setting, split, verdict):
    examples = [
        msgspec.structs.replace(MALI, id=f"{name}{i}", split=name)
        for name in ("train", "validation", "test")
        for i in range(2)
    ]
    answers = [answered("x", name, name=e.id) for e in examples for name in SETTINGS]
    mixed = label_with(answers, examples, lambda e, a: e.id[-1] == "0")
    check_both_classes(examples, mixed)

    def judge(example, answer):
        is_alone = (answer.setting, example.split) == (setting, split)
        return verdict if is_alone else example.id[-1] == "0"

    labels = label_with(answers, examples, judge)
    if split == "test":
        check_both_classes(examples, labels)
    else:
        with pytest.raises(ValueError, match=f"{setting}, {split}.*one class"):
            check_both_classes(examples, labels)


def test_an_imported_label_holds_only_for_the_same_question_and_answer(tmp_path):
    rows = [
        judged("capital of  mali", " Bamako", True),
        judged("Capital of Mali?", "Segou", False, setting="with_context"),
        judged("Capital of Peru?", "Cusco", False),
        judged("Capital of Chad?", "N'Djamena", True),
    ]
    result = imported(tmp_path, rows)
    assert verdicts(result.labels) == [True, False, None]
    assert {label.reason for label in result.labels[:2]} == {"imported from mine.jsonl"}
    assert result.labels[2].reason == "not imported from mine.jsonl"
    assert (result.n_lines, result.n_other_question, result.n_other_answer) == (4, 1, 1)
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write("\n \n")  # blank lines are no lines
    assert import_labels(tmp_path / "mine.jsonl", ANSWERS, QUESTIONS) == result
    row = judged("Capital of Mali?", "Bamako", True, setting="with_context")
    with pytest.raises(ValueError, match="no line of 1 labels an answer of this run"):
        imported(tmp_path, [row])


def test_labels_of_another_run_need_the_same_answer_and_old_ones_are_counted(
    run, tmp_path
):
    others = [*ANSWERS[:2], answered("Cusco", name="2")]
    labels = label_with(others, QUESTIONS, right)
    result = imported(tmp_path, labels)
    assert verdicts(result.labels) == [True, True, None]
    assert (result.n_other_answer, result.n_unchecked) == (1, 0)
    without = {"answer_sha": None, "question_key": None}
    old = [msgspec.structs.replace(label, **without) for label in labels]
    (path := tmp_path / "old.jsonl").write_text(write_lines(old))
    output = beatrice("label", run.path, "--import", path).output
    assert "warning: 3 lines are of an older version" in " ".join(output.split())
    assert labels_in(run) == [True, True, True]


def test_labels_of_another_run_hold_for_no_other_question_with_the_same_id(tmp_path):
    names = ("Mali", "Peru", "Chad")
    questions = [example(x, f"Is {x} in Africa?") for x in names]
    answers = [answered("yes", name=x) for x in names]
    labels = label_with(answers, questions, lambda e, a: e.id != "Peru")
    shifted = [
        msgspec.structs.replace(a, question=b.question)
        for a, b in zip(questions, questions[1:] + questions[:1], strict=True)
    ]
    with pytest.raises(ValueError, match="3 are about other questions"):
        imported(tmp_path, labels, answers, shifted)
    same = imported(tmp_path, labels, answers, questions)
    assert verdicts(same.labels) == [True, False, True]
    old = [msgspec.structs.replace(label, question_key=None) for label in labels]
    assert imported(tmp_path, old, answers, shifted).n_unchecked == 3


def test_a_label_is_tied_to_its_questions_text_not_to_a_versions_text_key(tmp_path):
    texts = ("Is Mali  in Africa?", "Is Mali in Africa? ", "is Mali in Africa")
    questions = [example("Mali", text) for text in texts]
    answer = answered("yes", name="Mali")
    keys = [label_of(x, answer, True, "by hand").question_key for x in questions]
    assert keys[0] == keys[1] != keys[2]
    label = label_of(questions[0], answer, True, "by hand")
    earlier = msgspec.structs.replace(label, question_key=text_key(texts[0]).hex())
    (label,) = imported(tmp_path, [earlier], [answer], questions[:1]).labels
    assert (label.label, label.question_key) == (True, keys[0])


def test_questions_about_c_c_sharp_and_c_plus_plus_take_their_own_verdicts(tmp_path):
    names = ("C", "C#", "C++")
    questions = [example(name, f"What is {name}?") for name in names]
    answers = [answered("A language", name=name) for name in names]
    rows = [judged(f"what is {x}", "A language", x == "C#") for x in names]
    result = imported(tmp_path, rows, answers, questions)
    assert verdicts(result.labels) == [False, True, False]
    # Marks count between questions in the run's very words.
    sums = [example(name, f"is 3 {name} 5?") for name in "<>="]
    answers = [answered("yes", name=name) for name in "<>="]
    rows = [judged(f"is 3 {name}  5?", "yes", name == "<") for name in "<>"]
    result = imported(tmp_path, rows, answers, sums)
    assert verdicts(result.labels) == [True, False, None]


def test_a_label_of_null_leaves_the_answer_undecided_and_is_counted(run, tmp_path):
    rows = [
        MINE,
        judged("Capital of Peru?", "Lima", None),
        judged("Capital of Mali?", "Bamako", None),  # the label above holds
        judged("Capital of Peru?", "Cusco", None),
    ]
    path = pub.write_lines(tmp_path / "mine.jsonl", rows)
    output = beatrice("label", run.path, "--import", path).output
    assert "1 about other answers than this run's, 2 leave the answer und" in output
    assert labels_in(run) == [True, None, None]
    _, *reasons = (label.reason for label in read_records(run.labels, Label))
    assert reasons == [f"{x} imported from mine.jsonl" for x in ("undecided,", "not")]
    with pytest.raises(ValueError, match=r"\(0 are about .*, 1 undecided\)"):
        imported(tmp_path, rows[1:2])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (judged("Capital of Mali?", "Bamako", False), "line 2 calls the answer 'Bamak"),
        (judged("Capital of Mali?", "Bamako", "yes"), "line 2, field 'label'"),
        (
            {"question": "q", "label": True},
            "line 2: Object missing required field answer; expected one of question",
        ),
    ],
)
def test_contradictory_or_invalid_lines_are_refused_by_number(tmp_path, row, words):
    with pytest.raises(ValueError) as caught:
        imported(tmp_path, [MINE, row])
    assert words in str(caught.value)


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run", QUESTIONS)
    write_text_atomic(run.answers_file, write_lines(ANSWERS))
    return run


def test_imported_labels_are_named_and_can_be_corrected_by_hand(run, tmp_path):
    path = pub.write_lines(tmp_path / "mine.jsonl", [MINE])
    run.labels.write_text("mine\n")  # not recorded by a stage
    for options in ((), ("--import", path)):
        output = beatrice("label", run.path, *options, code=1).output
        assert "labels.jsonl is there already with other content" in output
        assert run.labels.read_text() == "mine\n"
    run.labels.unlink()
    beatrice("label", run.path, "--import", path)
    assert label_rule(run) == "imported from mine.jsonl"
    labels = list(read_records(run.labels, Label))
    assert verdicts(labels) == [True, None, None]

    wrong = [msgspec.structs.replace(label, label=False) for label in labels[1:]]
    corrected = write_lines([labels[0], *wrong])
    run.labels.write_text(corrected)  # edited by hand
    for options in ((), ("--match", "containment"), ("--import", path)):
        output = beatrice("label", run.path, *options, code=1).output
        assert "labels.jsonl was changed since it was written" in output
        assert "`beatrice label --import FILE`" in output
    assert run.labels.read_text() == corrected
    elsewhere = run.labels.rename(tmp_path / "corrected.jsonl")
    beatrice("label", run.path, "--import", elsewhere)
    assert labels_in(run) == [True, False, False]
    output = beatrice("label", run.path).output
    assert "replaces the earlier labels: imported from corrected.jsonl" in output


def test_labels_by_an_earlier_rule_of_exact_match_are_made_again(run):
    beatrice("label", run.path)
    record = run.stage_record("label")
    without_format = {k: v for k, v in record.inputs.items() if k != "format"}
    run.mark_stage("label", without_format, 0.0, [run.labels])
    output = beatrice("label", run.path).output
    assert "replaces the earlier labels: an earlier exact match" in output
    assert run.stage_record("label").inputs == record.inputs
    assert "already done" in beatrice("label", run.path).output


def test_an_unreadable_file_or_a_failing_judge_leaves_the_earlier_labels(
    run, working_folder
):
    beatrice("label", run.path)
    before = run.labels.read_bytes(), run.stage_record("label")
    (bad := working_folder / "bad.jsonl").write_text('{"question": "Capital of Mali?"}')
    code = "def half(q, a):\n    return a.x\n"
    (working_folder / "failing_judge.py").write_text(code)
    for option, value, words in (
        ("--import", bad, "bad.jsonl, line 1"),
        ("--judge", "failing_judge:half", "AttributeError"),
    ):
        assert words in beatrice("label", run.path, option, value, code=1).stderr
        assert (run.labels.read_bytes(), run.stage_record("label")) == before


def test_a_judge_that_failed_is_asked_again_only_for_missing_verdicts(
    run, working_folder
):
    code = """
def costly(question, answer):
    with open("calls.txt", "a+") as calls:
        n_calls = calls.write("x") and calls.tell()
    if n_calls == 2:
        raise OSError("no credit left")
    return question.id == "x"
"""
    (working_folder / "costly_judge.py").write_text(code)
    options = ("--judge", "costly_judge:costly")
    assert "no credit left" in beatrice("label", run.path, *options, code=1).stderr
    again = beatrice("label", run.path, *options).stderr
    assert "judge_with.jsonl are not judged again" in again
    assert labels_in(run) == [False] * 3
    # A verdict and a failure, then the two missing verdicts.
    assert (working_folder / "calls.txt").read_text() == "x" * 4


def test_an_audit_uses_the_current_labels_whatever_an_earlier_sample_holds(
    run, tmp_path
):
    def audit(*options):
        output = beatrice("label", run.path, "--audit", *options).stdout
        report = json.loads((run.audit / "audit.json").read_text())
        listed = (run.audit / "disagreements.jsonl").read_text().splitlines()
        assert report["label_rule"] == label_rule(run)
        assert report["n_disagreements"] == len(listed)
        assert f"{len(listed)} disagreements in" in output
        return len(listed), "perhaps under other labels" in output

    beatrice("label", run.path)
    assert audit("--n-samples", 2) == (0, False)
    sample = run.audit / "sample.csv"
    fill(sample)
    filled = sample.read_bytes()
    path = pub.write_lines(tmp_path / "mine.jsonl", [MINE])
    beatrice("label", run.path, "--import", path)  # replaces exact match
    for content in (filled, b"a,b\n1,2\n"):
        sample.write_bytes(content)
        assert audit() == (3, True)  # two have lost their label
        assert sample.read_bytes() == content
    sample.write_bytes(filled)
    options = ("--audit", "--n-samples", 1)
    assert "another sample" in beatrice("label", run.path, *options, code=1).output
    assert sample.read_bytes() == filled


README = Path(__file__).parents[3] / "docs" / "labels.md"


def test_the_guides_judge_labels_a_run_and_again_after_its_file_has_changed(
    run, working_folder
):
    code = re.search(r"```python\n# my_judge.py\n(.*?)```", README.read_text(), re.S)[1]
    (working_folder / "my_judge.py").write_text(code)
    mali, peru = (
        msgspec.structs.replace(example, golds=(gold,))
        for example, gold in ((MALI, "Bamakoo"), (PERU, "Limassol"))
    )
    run.examples.write_text(write_lines([mali, peru]))
    spec = "my_judge:alike"
    beatrice("label", run.path, "--judge", spec)
    assert labels_in(run) == [True, None, False]
    assert label_rule(run) == f"judge {spec}"
    assert "already done" in beatrice("label", run.path, "--judge", spec).output
    (working_folder / "my_judge.py").write_text(code + "\n# in other words\n")
    done = beatrice("label", run.path, "--judge", spec)
    assert "judge_with has changed since" in done.output
    output = beatrice("label", run.path).output
    assert f"replaces the earlier labels: judge {spec}" in output
    refused = beatrice("label", run.path, "--judge", "no_judge:x", code=1).output
    assert "no_judge.py" in refused
    both = ("--judge", spec, "--match", "exact")
    assert "give one" in beatrice("label", run.path, *both, code=2).output

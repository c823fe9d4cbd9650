"""Labels that a person brings hold for the very answers that were judged."""

import json

import pytest

from extract.label.imported import import_labels
from extract.records import Answer, Example, Label, read_records, to_json, write_lines
from extract.run.contents import answers_file
from extract.run.directory import RunDir
from extract.run.files import write_text_atomic
from extract.run.results import label_rule
from tests.extract.small_run import beatrice, smoke


def example(name, question):
    return Example(
        id=name, dataset="capitals", split="test", question=question, golds=("x",)
    )


def answer(name, text, setting="closed_book"):
    return Answer(
        example_id=name,
        setting=setting,
        variant="original",
        text=text,
        prompt_ids=(1, 2),
        token_ids=(3,),
        stop_id=0,
        context_span=(1, 1),
    )


MALI, PERU = example("1", "Capital of Mali?"), example("2", "Capital of Peru?")
PAIRS = [
    (MALI, answer("1", "Bamako")),
    (MALI, answer("1", "Segou", setting="with_context")),
    (PERU, answer("2", "Lima")),
]


def judged(question, text, label, **more):
    return {"question": question, "answer": text, "label": label, **more}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_label_holds_for_the_very_answer_and_all_others_stay_without(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        judged("capital of  mali", " Bamako", True),
        judged("Capital of Mali?", "Segou", False, setting="with_context"),
        judged("Capital of Peru?", "Cusco", False),
        judged("Capital of Chad?", "N'Djamena", True),
    )
    made = import_labels(path, PAIRS)
    assert [one.label for one in made.labels] == [True, False, None]
    assert [one.reason for one in made.labels] == [
        "imported from mine.jsonl",
        "imported from mine.jsonl",
        "not imported from mine.jsonl",
    ]
    assert (made.n_lines, made.n_other_question, made.n_other_answer) == (4, 1, 1)


def test_a_setting_is_another_answer(tmp_path):
    row = judged("Capital of Mali?", "Bamako", True, setting="with_context")
    with pytest.raises(ValueError, match="no line of 1 labels an answer of this run"):
        import_labels(write(tmp_path / "mine.jsonl", row), PAIRS)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (judged("Capital of Mali?", "Bamako", False), "line 2 calls the answer 'Bamak"),
        (judged("Capital of Mali?", "Bamako", "yes"), "line 2, field 'label'"),
        ({"question": "q", "label": True}, "line 2: a JudgedAnswer needs the field"),
    ],
)
def test_lines_that_disagree_or_are_none_are_refused_by_number(tmp_path, row, words):
    path = write(tmp_path / "m.jsonl", judged("Capital of Mali?", "Bamako", True), row)
    with pytest.raises(ValueError) as caught:
        import_labels(path, PAIRS)
    assert words in str(caught.value)


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "run", smoke()) as run:
        run.examples.write_text(write_lines([MALI, PERU]))
        answers = [one for _, one in PAIRS]
        write_text_atomic(answers_file(run), write_lines(answers))
    return run


def test_labels_are_imported_named_and_corrected_by_hand(run, tmp_path):
    path = write(tmp_path / "mine.jsonl", judged("Capital of Mali?", "Bamako", True))
    beatrice("label", run.path, "--import", path)
    assert label_rule(run) == "imported from mine.jsonl"
    labels = list(read_records(run.labels, Label))
    assert [one.label for one in labels] == [True, None, None]

    corrected = write_lines([labels[0], *(_wrong(one) for one in labels[1:])])
    run.labels.write_text(corrected)  # by hand
    for options in ((), ("--match", "containment"), ("--import", path)):
        said = beatrice("label", run.path, *options, code=1).output
        assert "labels.jsonl was changed since it was written" in said
        assert "`beatrice label --import FILE`" in said
    assert run.labels.read_text() == corrected
    elsewhere = run.labels.rename(tmp_path / "corrected.jsonl")
    beatrice("label", run.path, "--import", elsewhere)
    labels = list(read_records(run.labels, Label))
    assert [one.label for one in labels] == [True, False, False]
    said = beatrice("label", run.path).output
    assert "replaces labels imported from corrected.jsonl" in said


def _wrong(label):
    return Label(**json.loads(to_json(label)) | {"label": False})


def test_labels_that_nobody_recorded_are_not_replaced(run):
    run.labels.write_text("mine\n")
    said = beatrice("label", run.path, code=1).output
    assert "labels.jsonl is there already with other content" in said
    assert run.labels.read_text() == "mine\n"
    run.labels.unlink()
    beatrice("label", run.path)

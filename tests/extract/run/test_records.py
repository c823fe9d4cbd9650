"""Records and rows are read as they were written; wrong lines are refused by number."""

import json
import math
import re

import msgspec
import pytest

from beatrice.extract.records import (
    Example,
    Label,
    Passage,
    check_id,
    is_safe_name,
    read_records,
    to_json,
)
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.files import from_json, write_text_atomic
from beatrice.extract.run.rows import (
    ResultRow,
    publish,
    published,
    read_result_rows,
    read_rows,
    rows_file,
    write_rows,
)
from tests.records import a_label, an_answer, an_example

EXAMPLE = an_example(
    id="q1",
    dataset="capitals",
    question="Capital of Malawi?",
    golds=("Lilongwe", "Lilongwé"),
    passages=(Passage(title="Malawi", text="…", is_supporting=True),),
    meta={"hops": 1, "path": ["a", "b"]},
)
ANSWER = an_answer(setting="with_context", variant="rewritten", stop_id=None)
LABEL = a_label(None, verdicts=("yes", "no"), reason="judges disagree")


# An infinite number and a lone surrogate, which msgspec does not read.
ODD = msgspec.structs.replace(EXAMPLE, meta={"pop": math.inf, "name": "\ud800"})


@pytest.mark.parametrize("record", [EXAMPLE, ANSWER, LABEL, ODD])
def test_a_record_is_read_back_from_its_line(record):
    assert from_json(type(record), to_json(record), "here") == record


def with_field(record, name, value):
    return json.dumps(json.loads(to_json(record)) | {name: value})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (with_field(LABEL, "lable", True), "unknown field lable; expected one of exam"),
        ('{"example_id": "q1"}', "missing required field setting"),
        (with_field(LABEL, "setting", "open_book"), "expected one of closed_book"),
        (with_field(LABEL, "label", 1), r"'label': expected bool \| null, found int"),
        ("[1, 2]", "expected object, found array"),
        ("", "not a JSON object"),
        ('{"example_id": "\udcff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "labels.jsonl"
    content = f"{to_json(LABEL)}\n{line}\n"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=complaint) as caught:
        list(read_records(path, Label))
    assert str(caught.value).count(f"{path}, line 2") == 1


WRONG = [None, True, 1, 1.5, "x", [], ["x"], [1, "x"], [[]], {}, {"x": 1}]


@pytest.mark.parametrize("record", [EXAMPLE, ANSWER, LABEL])
def test_a_value_of_the_wrong_type_is_refused_by_its_field(record):
    kind, whole = type(record), json.loads(to_json(record))
    n_refused = 0
    for name, value in ((name, value) for name in whole for value in WRONG):
        line = with_field(record, name, value)
        try:
            result = from_json(kind, line, "here")
        except ValueError as error:
            words = f"here([,:] field '{name}|: context_span is)"
            assert re.match(words, str(error))
            n_refused += 1
        else:
            assert json.loads(to_json(result)) == {**whole, name: value}
    assert n_refused > 5 * len(whole)


def test_the_bytes_of_a_line_are_those_of_pythons_json_writer():
    assert to_json(EXAMPLE) == (
        '{"id": "q1", "dataset": "capitals", "split": "test", "question": "Capital of '
        'Malawi?", "golds": ["Lilongwe", "Lilongw\\u00e9"], "passages": [{"title": '
        '"Malawi", "text": "\\u2026", "is_supporting": true}], "rewritten": [], '
        '"meta": {"hops": 1, "path": ["a", "b"]}}'
    )


@pytest.mark.parametrize(
    ("token", "words"), [(True, "expected int, found bool"), (-1, "expected int >= 0")]
)
def test_a_token_that_is_not_a_whole_number_from_0_is_refused(token, words):
    with pytest.raises(ValueError, match=f"field 'token_ids.*{words}"):
        from_json(type(ANSWER), with_field(ANSWER, "token_ids", [token]), "here")


QUESTION = an_example(
    id="capitals-1", dataset="capitals", split="train", question="Capital of Malawi?"
)


def line(**changes):
    return json.dumps(json.loads(to_json(QUESTION)) | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "x/../../../ESCAPED/pwn"}, "ESCAPED/pwn' is not a name"),
        ({"dataset": ".."}, "'..' is not a name"),
        ({"dataset": ""}, "'' is not a name"),
        ({"dataset": "a" * 65}, "at most 64 characters"),
        ({"dataset": "städte"}, "is not a name"),
        ({"dataset": "macro"}, "none of all in-domain, macro"),
        ({"dataset": "all_sets"}, "none of all in-domain, macro, all_sets"),
        ({"id": "../"}, "'../' is empty"),
        ({"id": "capitals-../../x"}, "a path to another folder"),
        ({"id": ""}, "'' is empty"),
        ({"id": "a\nb"}, "not printable"),
        ({"passages": [{"txt": "x"}]}, "field 'passages[0]': Object contains unknown"),
        ({"golds": []}, "'capitals-1' has no gold answer"),
        ({"golds": [" "]}, "has no gold answer"),
    ],
)
def test_a_harmful_or_invalid_question_is_refused_when_it_is_read(changes, words):
    with pytest.raises(ValueError) as caught:
        from_json(Example, line(**changes), "examples.jsonl, line 7")
    assert str(caught.value).startswith("examples.jsonl, line 7")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"golds": "Lilongwe"}, "golds: expected a list of texts"),
        ({"golds": None}, "golds: expected a list of texts"),
        ({"golds": {"text": ["Lilongwe"]}}, "golds: expected a list of texts"),
        ({"golds": ["Lilongwe", 5]}, "golds: expected a list of texts"),
        ({"question": None}, "question: expected a text"),
    ],
)
def test_a_question_with_wrong_types_is_refused_when_it_is_made(changes, words):
    with pytest.raises(ValueError, match=words):
        an_example(**changes)


def test_golds_from_an_iterator_are_kept():
    assert an_example(golds=iter(["Lilongwe"])) == an_example(golds=("Lilongwe",))


def test_published_names_are_safe():
    assert all(map(is_safe_name, ("hotpotqa", "2wikimultihopqa", "my-set_1.0")))
    published = ("hotpotqa-5a7a06935542990198eaf050", "2hop__482757_12019")
    for name in (*published, "tc_33--180/180_47.txt", "who is it...?"):
        check_id(name)


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no questions"),
        ([line(), line(question="Capital of Mali?")], "line 2: the id 'capitals-1' is"),
        (
            [line(), line(id="2", split="test", question="capital of  MALAWI")],
            "is in the split test, and as 'capitals-1' in train too",
        ),
    ],
)
def test_an_empty_file_a_repeated_id_and_a_leak_are_refused(run, lines, words):
    write_text_atomic(run.examples, "".join(f"{item}\n" for item in lines))
    with pytest.raises(ValueError) as caught:
        read_examples(run)
    assert str(run.examples) in str(caught.value) and words in str(caught.value)


def test_a_leak_written_by_a_stage_is_a_warning_and_an_edited_one_is_refused(run):
    other = line(id="2", split="test", question="\u201cCapital\u201d of MALAWI")
    third = line(id="3", split="test")
    write_text_atomic(run.examples, f"{line()}\n{other}\n{third}\n")
    run.mark_stage("data", {}, 1.0, [run.examples])
    with pytest.warns(UserWarning, match="as 'capitals-1' in .* first of 2 ") as shown:
        assert [x.id for x in read_examples(run)] == ["capitals-1", "2", "3"]
    assert len(shown) == 1
    write_text_atomic(run.examples, f"{other}\n{line()}\n")
    with pytest.raises(ValueError, match="leave one of the two out"):
        read_examples(run)


def test_a_repeated_text_in_a_split_is_no_leak_and_unknown_answers_are_refused(run):
    write_text_atomic(run.examples, f"{line()}\n{line(id='2')}\n")
    assert [example.id for example in read_examples(run)] == ["capitals-1", "2"]
    write_text_atomic(run.answers_file, to_json(an_answer(example_id="capitals-9")))
    with pytest.raises(ValueError, match="'capitals-9', which is not in .*examples"):
        read_answers(run)


def row(**changes):
    about = dict(experiment="detection", detector="champion", setting="closed_book")
    about |= dict(dataset="microworld", split="test", metric="auroc", seed="mean")
    numbers = dict(value=0.9, ci_low=0.88, ci_high=0.92, n=400, n_failed=0, reason=None)
    return ResultRow(**(about | numbers | changes))


NO_INTERVAL = {"ci_low": None, "ci_high": None}


def test_rows_are_read_as_they_were_written(tmp_path):
    undefined = row(value=None, **NO_INTERVAL, reason="one class only", seed="2")
    rows = [row(), undefined, row(detector="[β]", value=1, **NO_INTERVAL)]
    path = tmp_path / "results.jsonl"
    path.write_text(write_rows(rows), encoding="utf-8")
    assert list(read_rows(path)) == rows


def test_values_are_rounded_to_six_decimals():
    line = json.loads(write_rows([row(value=2 / 3, ci_low=0.1, ci_high=8 / 9)]))
    assert (line["value"], line["ci_low"], line["ci_high"]) == (0.666667, 0.1, 0.888889)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None, **NO_INTERVAL}, "needs a reason"),
        ({"ci_low": None}, "both ends"),
        ({"n": -1}, "negative"),
        ({"seed": "first"}, "'first'"),
        ({"seed": "-1"}, "'-1'"),
        ({"value": 7.0, **NO_INTERVAL}, "is not a share"),
        ({"ci_high": 1.2}, "is not a share"),
        ({"ci_low": 0.9, "ci_high": 0.8}, "its interval is reversed: 0.9 to 0.8"),
        *(
            ({name: number}, "not finite")
            for name in ("value", "ci_low", "ci_high")
            for number in (float("nan"), float("inf"))
        ),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        row(**changes)


ROW = write_rows([row()])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no row"),
        (ROW + ROW.replace("0.9", "NaN", 1), "results.jsonl, line 2.*not finite"),
        (
            write_rows([row(), row(seed="1"), row(value=0.75, n=9)]),
            "lines 1 and 3: two rows for .*champion",
        ),
    ],
)
def test_results_without_rows_or_with_a_wrong_one_are_refused(run, content, message):
    run.results.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_result_rows(run)


class Notes(list):
    """A progress that keeps its lines."""

    note = list.append


def test_rows_are_published_until_they_are_out_of_date(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun()) as run:
        rule = "judges: big, majority"
        run.mark_stage("label", {"rule": "exact match"}, 1.0)
        run.labels.write_text("one")
        notes = Notes()
        ours = row(label_rule="exact match")
        ablated = row(detector="without_hidden", label_rule=rule)
        publish(run, "evaluate", [row()], notes)  # gets the run's rule of labels
        run.mark_stage("evaluate", {}, 1.0, [rows_file(run, "evaluate")])
        publish(run, "ablate", [row(detector="without_hidden")], notes, rule)
        inputs, outputs = run.hash_inputs(run.labels), [rows_file(run, "ablate")]
        run.mark_stage("ablate", inputs, 1.0, outputs, "evaluate --ablations")
        publish(run, "evaluate", [ours], notes)
        assert read_result_rows(run) == [ours, ablated] and not notes
        assert published(run) == ["evaluate", "ablate"]
        run.labels.write_text("two")
        publish(run, "evaluate", [ours], notes)
        assert read_result_rows(run) == [ours]
        assert "out of date" in notes[0] and "--ablations" in notes[0]
        publish(run, "ablate", [ablated], notes, rule)
        assert read_result_rows(run) == [ours, ablated]
        rows_file(run, "evaluate").write_text(write_rows([row(value=0.75)]))
        with pytest.raises(ValueError, match="evaluate.jsonl has changed since stage"):
            publish(run, "ablate", [ablated], notes)

import json

import pytest

from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.rows import (
    ResultRow,
    publish,
    published,
    read_result_rows,
    read_rows,
    rows_file,
    write_rows,
)


def row(**changes):
    fields = dict(
        experiment="detection",
        detector="champion",
        setting="closed_book",
        dataset="microworld",
        split="test",
        metric="auroc",
        value=0.9,
        ci_low=0.88,
        ci_high=0.92,
        n=400,
        n_failed=0,
        seed="mean",
        reason=None,
    )
    return ResultRow(**(fields | changes))


def test_rows_survive_writing_and_reading(tmp_path):
    undefined = row(
        value=None, ci_low=None, ci_high=None, reason="one class only", seed="2"
    )
    rows = [row(), undefined, row(detector="[β]", value=1, ci_low=None, ci_high=None)]
    path = tmp_path / "results.jsonl"
    path.write_text(write_rows(rows), encoding="utf-8")
    assert list(read_rows(path)) == rows


def test_values_are_rounded_to_six_decimals():
    line = json.loads(write_rows([row(value=2 / 3, ci_low=0.1, ci_high=8 / 9)]))
    assert (line["value"], line["ci_low"], line["ci_high"]) == (0.666667, 0.1, 0.888889)


NO_INTERVAL = {"ci_low": None, "ci_high": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None, **NO_INTERVAL}, "needs a reason"),
        ({"ci_low": None}, "both ends"),
        ({"n": -1}, "negative"),
        ({"seed": "first"}, "'first'"),
        ({"seed": "-1"}, "'-1'"),
        ({"value": 7.0, **NO_INTERVAL}, "is no share"),
        ({"ci_high": 1.2}, "is no share"),
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"value": 0.9', '"value": NaN', "not finite"),
        ('"value": 0.9', '"value": null', "needs a reason"),
        ('"value": 0.9', '"score": 0.9', "unknown field score"),
        ('"n": 400, ', "", "missing required field n"),
        ('"closed_book"', '"open_book"', "open_book"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, old, new, message):
    path = tmp_path / "results.jsonl"
    good = write_rows([row()])
    path.write_text(good + good.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        list(read_rows(path))
    assert str(caught.value).count(f"{path}, line 2") == 1


def test_two_rows_for_one_number_are_refused(tmp_path):
    run = RunDir(tmp_path)
    other = row(value=0.75, n=9)
    run.results.write_text(write_rows([row(), row(seed="1"), other]))
    with pytest.raises(ValueError, match="lines 1 and 3: two rows for .*champion"):
        read_result_rows(run)


def test_a_file_without_rows_is_refused(tmp_path):
    run = RunDir(tmp_path)
    run.results.write_text("")
    with pytest.raises(ValueError, match="holds no row"):
        read_result_rows(run)


def test_rows_that_changed_since_their_stage_are_not_gathered(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun()) as run:
        publish(run, "evaluate", [row()], Notes())
        run.mark_stage("evaluate", {}, 1.0, [rows_file(run, "evaluate")])
        rows_file(run, "evaluate").write_text(write_rows([row(value=0.75)]))
        with pytest.raises(ValueError, match="evaluate.jsonl has changed since stage"):
            publish(run, "control", [row(experiment="controller")], Notes())


class Notes(list):
    """A progress that keeps its lines."""

    note = list.append


def test_rows_are_published_until_they_are_out_of_date(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun()) as run:
        run.mark_stage("label", {"rule": "exact match"}, 1.0)
        run.labels.write_text("one")
        notes = Notes()
        ours = row(label_rule="exact match")
        ablated = row(detector="without_hidden", label_rule="exact match")
        publish(run, "evaluate", [ours], notes)
        run.mark_stage("evaluate", {}, 1.0, [rows_file(run, "evaluate")])
        publish(run, "ablate", [ablated], notes)
        inputs, outputs = run.hash_inputs(run.labels), [rows_file(run, "ablate")]
        run.mark_stage("ablate", inputs, 1.0, outputs, "evaluate --ablations")
        publish(run, "evaluate", [ours], notes)
        assert read_result_rows(run) == [ours, ablated] and not notes
        assert published(run) == ["evaluate", "ablate"]
        run.labels.write_text("two")
        publish(run, "evaluate", [ours], notes)
        assert read_result_rows(run) == [ours]
        assert "out of date" in notes[0] and "--ablations" in notes[0]
        publish(run, "ablate", [ablated], notes)
        assert read_result_rows(run) == [ours, ablated]


def test_every_published_row_says_by_which_rule_its_answers_were_labelled(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun()) as run:
        run.labels.write_text("judged")
        judged = {"judge": "sha", "rule": "judges: big, majority"}
        run.mark_stage("label", judged, 1.0, [run.labels])
        publish(run, "evaluate", [row(), row(seed="0")], Notes())
        assert [r.label_rule for r in read_result_rows(run)] == [judged["rule"]] * 2

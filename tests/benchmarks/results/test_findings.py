import msgspec
import pytest

from beatrice.benchmarks.results.findings import (
    answer_of,
    as_latex,
    as_markdown,
    best_single,
    facts,
    findings,
    grids,
    verdicts_in_words,
)
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import encoder
from tests.benchmarks.results.sample import (
    PARTS,
    TEST,
    row,
    sample_results,
    sample_rows,
    undefined,
)

ENOUGH = [a for a in PARTS["accuracy"] if a["split"] != "train"]


def difference(low, high, p_value=0.01, **fields):
    value = (low + high) / 2
    fields = dict(experiment="paired", rival="perplexity", p_value=p_value) | fields
    fields |= dict(ci_low=low, ci_high=high)
    return row("champion", "closed_book", TEST, "auroc", value, **fields)


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (0.01, 0.05, "yes"),
        (-0.05, -0.01, "no"),
        (-0.01, 0.05, "cannot tell"),
        (0.0, 0.05, "cannot tell"),
    ],
)
def test_an_interval_that_covers_zero_tells_nothing(low, high, answer):
    assert answer_of([difference(low, high)]) == answer


def test_of_four_looks_one_must_be_four_times_as_sure():
    around_zero = [difference(-0.05, 0.04)] * 3
    assert answer_of([*around_zero, difference(0.01, 0.05, 0.02)]) == "cannot tell"
    assert answer_of([*around_zero, difference(0.01, 0.05, 0.012)]) == "yes"


def test_no_takes_every_difference_below_zero():
    below = difference(-0.05, -0.01)
    assert answer_of([below, below]) == "no"
    assert answer_of([below, difference(-0.05, 0.01)]) == "cannot tell"


def test_what_was_not_measured_or_is_undefined_is_not_answered():
    gone = undefined(difference(0.01, 0.05))
    assert answer_of([]) is None
    assert answer_of([gone]) is None
    assert answer_of([gone, difference(0.01, 0.05)]) is None


def test_the_best_single_family_is_that_of_validation_not_of_test():
    at = {"hidden_only": (0.6, 0.9), encoder("P"): (0.8, 0.5)}
    at |= {encoder("R"): (0.7, 0.7), encoder("A"): (0.7, 0.7)}
    rows = [
        row(name, "closed_book", (IN_DOMAIN, split), "auroc", value)
        for name, both in at.items()
        for split, value in zip(("validation", "test"), both, strict=True)
    ]
    assert best_single(results_of(rows), "closed_book") == "P"
    assert best_single(results_of(rows[2:]), "closed_book") is None


def test_every_question_is_answered_on_every_set_that_has_its_rows():
    all_findings = findings(sample_results(), ENOUGH)
    places = {f.place for f in all_findings}
    assert {split for _, _, split in places} == {"test", "ood"}
    assert len(places) == 8  # two settings of one set and three held out
    unanswered = {f.question for f in all_findings if f.answer is None}
    assert unanswered == {"layer_over_last"}  # the sample reads the last layer


def test_too_few_right_answers_leave_nothing_to_conclude():
    counts = {"n": 2000, "n_correct": 149, "variant": "original", "dataset": "nq"}
    counts |= {"split": "train", "setting": "closed_book"}
    all_findings = findings(sample_results(), [counts])
    answers = {f.place.setting: set() for f in all_findings}
    for f in all_findings:
        answers[f.place.setting].add(f.answer)
    assert answers["closed_book"] == {"cannot conclude", None}
    assert "cannot conclude" not in answers["with_context"]
    beside = facts(sample_results(), [counts], {}, {})["closed_book"]
    assert beside[0][1].startswith("149 correct and 1851 incorrect training answers")
    again = findings(sample_results(), [counts | {"n_correct": 150}])
    assert "cannot conclude" not in {f.answer for f in again}


def test_a_run_of_one_setting_has_the_answers_of_that_one():
    rows = [r for r in sample_rows() if r.setting == "closed_book"]
    assert [grid.setting for grid in grids(findings(results_of(rows), ENOUGH))] == [
        "closed_book"
    ]


def test_a_set_without_a_row_has_a_dash_and_no_zero():
    rows = [
        r
        for r in sample_rows()
        if not (r.experiment == "finding" and r.dataset == "places")
    ]
    text = as_markdown(findings(results_of(rows), ENOUGH), {})
    (line,) = (x for x in text.splitlines()[:20] if "Do hidden states add" in x)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3] == "–" and "–" not in (cells[1], cells[2], cells[4])


def test_the_spread_of_the_seeds_stands_beside_the_interval():
    seeds = [
        row("champion", "closed_book", TEST, "auroc", value, seed=str(i))
        for i, value in enumerate((0.90, 0.91, 0.92))
    ]
    results = results_of([*sample_rows(), *seeds])
    beside = facts(results, ENOUGH, PARTS["sweep"], PARTS["selection"])
    line = ("SD over seeds, microworld, test", ".010 over 3, questions ±.030")
    assert line in beside["closed_book"]
    text = as_markdown(findings(results, ENOUGH), beside)
    assert f"| {line[0]} | {line[1]} |" in text


def test_the_latex_table_has_a_cell_for_each_set_and_escapes_names():
    renamed = [
        msgspec.structs.replace(r, dataset="my_set") if r.dataset == "places" else r
        for r in sample_rows()
    ]
    text = as_latex(findings(results_of(renamed), ENOUGH))
    assert r"my\_set" in text and "my_set" not in text
    lines = [x for x in text.splitlines() if x.endswith(r"\\")]
    assert {line.count(" & ") for line in lines} == {4}


def test_what_cannot_be_told_is_said_once_and_not_set_by_set():
    answered = findings(sample_results(), ENOUGH)
    lines, undecided = verdicts_in_words(answered)
    by_text = {text: cells for text, *cells in lines}
    for grid_number, grid in enumerate(grids(answered)):
        for text, cells in grid.lines:
            answers = [f.answer for f in cells]
            if text in undecided:
                assert set(answers) <= {"cannot tell", None}
                continue
            words = by_text[text][grid_number]
            assert ("yes" in words) == ("yes" in answers)
            assert "cannot tell" not in words
            if {"yes", "cannot tell"} <= set(answers):
                assert f"open on {answers.count('cannot tell')}" in words
    assert lines and undecided

"""The anatomy on the page: figures and tables made only from rows."""

import re

import msgspec
import numpy as np
import pytest

from beatrice.benchmarks.results import anatomy
from beatrice.benchmarks.results.names import COSTS
from beatrice.benchmarks.results.paper import read_ledger, signs_by_table
from beatrice.benchmarks.results.tables import (
    POOLED,
    find,
    results_of,
    row_value,
    where,
)
from beatrice.extract.records import IN_DOMAIN
from tests.benchmarks.results.sample import (
    PARTS,
    anatomy_rows,
    sample_results,
    undefined,
)

ROWS = anatomy_rows()


@pytest.fixture(scope="module")
def sections():
    return anatomy.anatomy_parts(results_of(ROWS), PARTS["studies"])


def test_every_analysis_says_what_to_look_at_and_has_a_table_or_figure(sections):
    titles = [section.title for section in sections]
    assert titles == [analysis.title for analysis in anatomy.ANALYSES]
    for section in sections:
        assert section.look and (section.pictures or section.tables), section.title
    assert sum(len(section.pictures) for section in sections) == 18
    assert sections[-1].cases == PARTS["studies"]


def test_every_row_of_the_anatomy_is_in_a_table_or_a_figure(sections):
    """Parts of the ranking and cells of the boundary are drawn; heads are mapped."""
    tables = [table for section in sections for _, table in section.tables]
    shown = {id(m.row) for table in tables for m in table.measures}
    drawn = {"share", "answers", "flips"}  # of many rows, which figures show
    lacking = {
        (row.experiment, row.metric)
        for row in ROWS
        if id(row) not in shown and row.metric not in drawn and row.seed == "mean"
    }
    assert lacking == {
        ("anatomy_complementarity", "error_rate"),  # of held-out sets
        ("anatomy_complementarity", "rights"),
        ("anatomy_backbones", "auroc"),  # the points of a figure
        ("anatomy_pairs", "auroc"),  # to the worse member
        ("anatomy_other_pairs", "auroc"),
        ("anatomy_labels", "labels"),
    }


def test_mistakes_righted_by_a_family_are_shown_next_to_those_by_chance(sections):
    (table,) = (t for s in sections for h, t in s.tables if h.startswith("Mistakes"))
    results, n_columns = results_of(ROWS), len(table.columns) // 2
    for line, letter in zip(table.lines, "HPRA", strict=True):
        for side, setting in ((0, "closed_book"), (n_columns, "with_context")):
            chance, at = line.cells[side + n_columns - 1][0].row, {"setting": setting}
            error, right = (
                find(results, experiment=x, **at, **POOLED, **key).value
                for x, key in (
                    ("anatomy_complementarity", {"families": letter, "family": None}),
                    ("anatomy_flips", {"metric": "right"}),
                )
            )
            assert chance.value == 1 - error / (4 * right * (1 - right))
            assert chance.ci_low is None
    (drawn, _) = sections[0].pictures
    assert "chance" in drawn.svg and "by chance" in sections[0].look


def test_the_table_of_flips_has_the_rates_of_the_rows(sections):
    (section,) = (x for x in sections if x.title.startswith("Which family decides"))
    (table,) = (t for h, t in section.tables if h == "With context, all in-domain")
    at = dict(experiment="anatomy_flips", metric="flip_rate", setting="with_context")
    rows = where(results_of(ROWS), dataset=IN_DOMAIN, **at)["row"]
    rates = {line.label: line.cells[0][0].row for line in table.lines}
    names = {"H": "hidden states", "P": "probabilities"}
    for row in rows:
        if row.family in names:
            assert rates[f"{names[row.family]} in [{row.families}]"] == row
    assert {measure.rank for measure in table.measures} == {None}


def test_shares_of_the_tokens_have_three_decimals_like_other_shares(sections):
    assert not {r.metric for r in ROWS} & {*COSTS}  # which have two
    (table,) = (t for section in sections for h, t in section.tables if h == "Spans")
    assert {m.row.metric for m in table.measures} == {"share", "token_share"}
    assert all(re.fullmatch(r"\.\d{3}", row_value(m.row)) for m in table.measures)


@pytest.mark.parametrize("elsewhere", [0.0, 0.1])
def test_a_note_says_if_hidden_states_are_of_the_answer_only(elsewhere):
    of_spans = where(results_of(ROWS), experiment="anatomy_positions", metric="share")
    values = {"answer": 0.2, "question": elsewhere}
    shares = [
        msgspec.structs.replace(row, family="H", value=values[row.span])
        for row in where(of_spans, span=(*values,))["row"]
    ]
    pictures, tables = anatomy._positions(results_of([*ROWS, *shares]))
    texts = [p.caption for p in pictures] + [h for h, _ in tables if "Tokens" not in h]
    is_noted = ["(hidden states are of the answer only)" in text for text in texts]
    assert is_noted == [elsewhere == 0] * 5


def test_the_map_of_heads_states_its_number_of_answers():
    shares = [r for r in ROWS if (r.experiment, r.metric) == ("anatomy_heads", "share")]
    rows = results_of(msgspec.structs.replace(row, n=123) for row in shares)
    pictures, _ = anatomy._heads(rows)
    assert len(pictures) == 2
    assert all("of 123 test answers" in p.caption for p in pictures)
    # The model may have other layers between.
    assert all("attention layer read, from 0" in p.svg for p in pictures)


def test_the_matrix_of_sets_says_how_many_labels_each_detector_had():
    transfer = [r for r in ROWS if r.experiment == "anatomy_transfer"]
    rows = results_of(msgspec.structs.replace(row, n_labels=1234) for row in transfer)
    pictures, _ = anatomy._transfer(rows)
    assert pictures and all("Labels for each: 1,234." in p.caption for p in pictures)


def test_a_set_with_the_name_of_a_training_set_has_a_column_of_its_own():
    transfer = [r for r in ROWS if r.experiment == "anatomy_transfer"]
    mine = transfer[0].source
    held_out = [
        msgspec.structs.replace(row, split="ood")
        for row in transfer
        if row.dataset == mine
    ]
    pictures, _ = anatomy._transfer(results_of([*transfer, *held_out]))
    assert pictures and all("held out" in p.svg for p in pictures)


def test_the_boundary_is_drawn_in_both_settings():
    boundary = [r for r in ROWS if r.experiment == "anatomy_boundary"]
    rows = [r for r in boundary if r.bin_x is not None]
    pictures, _ = anatomy._flips(results_of(rows))
    assert {p.title for p in pictures} == {"Closed-book", "With context"}


def test_undefined_numbers_are_not_drawn():
    hollow = results_of(map(undefined, ROWS))
    sections = anatomy.anatomy_parts(hollow, PARTS["studies"])
    svgs = [picture.svg for section in sections for picture in section.pictures]
    assert len(svgs) == 5 and "nan" not in "".join(svgs)


def test_a_run_without_anatomy_has_no_section_and_one_setting_is_enough():
    assert anatomy.anatomy_parts(results_of([])) == []
    alone = results_of(row for row in ROWS if row.setting == "closed_book")
    titles = [section.title for section in anatomy.anatomy_parts(alone)]
    assert "What attention responds to" not in titles and len(titles) > 8


def test_the_curve_of_all_labels_ends_at_the_row_of_detection():
    results = results_of([*ROWS, *sample_results()["row"]])
    at = dict(setting="closed_book", **POOLED)
    shown = where(results, experiment="anatomy_labels", **at)
    curves = anatomy._learning_curves(results, shown, "closed_book")
    last = where(results, experiment="detection", detector="early_fusion", **at)
    (value,) = where(last, metric="auroc")["value"]
    n_labels, auroc = curves["encoder of all four"][-1]
    assert auroc == value and n_labels == max(where(shown, metric="labels")["value"])
    assert np.all(np.diff([n for n, _ in curves["hidden states"]]) > 0)


def test_every_comparison_with_the_paper_is_shown_with_an_analysis(sections):
    by_table = signs_by_table(read_ledger(), results_of(ROWS))
    shown = [sign.cells for section in sections for sign in section.beside]
    assert len(shown) == sum(map(len, by_table.values())) > 30
    for _, _, here, verdict in shown:
        assert "[" in here or verdict == "no interval in this run", here
    placed = [table for analysis in anatomy.ANALYSES for table in analysis.beside]
    assert by_table.keys() <= set(placed) and len(set(placed)) == len(placed)

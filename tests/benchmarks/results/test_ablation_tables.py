import xml.etree.ElementTree

import msgspec
import pytest

from beatrice.benchmarks.results.figures import ranking, to_svg
from beatrice.benchmarks.results.pictures import ranking_pictures
from beatrice.benchmarks.results.tables import (
    FEATURES,
    exhaustive_table,
    family_table,
    feature_table,
    set_names,
    span_table,
)
from tests.benchmarks.results.sample import PARTS, PLACES, row, sample_rows

TEST = PLACES[1]


def labels(table):
    return [line.label for line in table.lines]


def test_the_papers_seven_variants_are_in_its_order():
    table = feature_table(sample_rows())
    assert labels(table) == list(FEATURES.values()) and len(table.lines) == 7
    assert [line.is_ours for line in table.lines] == [False] * 6 + [True]
    assert len(table.columns) == 8  # four sets in both settings


def test_the_reference_takes_no_rank_and_takes_none_away():
    values = {"hidden_only": 0.7, "late_fusion_all": 0.95, "champion": 0.9}
    rows = [row(n, "closed_book", TEST, "auroc", v) for n, v in values.items()]
    without = row("without_hidden", "closed_book", TEST, "auroc", 0.8)
    rows.append(msgspec.structs.replace(without, experiment="ablation"))
    ranks = {line.label: line.cells[0][0].rank for line in feature_table(rows).lines}
    assert ranks == {
        FEATURES["hidden_only"]: None,
        FEATURES["without_hidden"]: "second",
        FEATURES["late_fusion_all"]: None,
        FEATURES["champion"]: "best",
    }


def test_rows_of_evaluate_alone_make_no_ablation():
    rows = [r for r in sample_rows() if r.experiment == "detection"]
    for table in (feature_table(rows), family_table(rows), span_table(rows)):
        assert table.lines == ()
    assert exhaustive_table(rows).lines == ()


def test_a_span_that_a_setting_lacks_is_not_measured():
    table = span_table(sample_rows())
    ways = ("zeroed in training", "left out of both")
    spans = ("Context", "Question", "Answer")
    whole = ["None: all spans", *(f"{x}, {way}" for way in ways for x in spans)]
    assert labels(table) == [*whole, *(f"{label} · no head" for label in whole)]
    for line in table.lines:
        lacks = [cell == (None, None) for cell in line.cells]
        assert lacks == [line.label.startswith("Context")] * 4 + [False] * 4


def test_ranked_sets_are_shown_where_they_were_chosen_too():
    columns = exhaustive_table(sample_rows()).columns
    assert [c.detail for c in columns[:3]] == ["validation", "test", "held out"]


def test_every_family_has_its_line_and_its_encoders():
    assert len(family_table(sample_rows()).lines) == 5
    named = dict(set_names(PARTS["selection"], PARTS["ablations"]))
    assert named["Without attention"] == ["(PR) (A)", "(PR) (A)"]
    assert named["Without closed-book encoders"] == ["–", "[PR] [A]"]
    none = PARTS["ablations"]
    none["closed_book"]["without_prob"] = []
    named = dict(set_names(PARTS["selection"], none))
    assert named["Without probabilities"][0] == "none: no better than chance"
    assert set_names(PARTS["selection"], {}) == []


@pytest.mark.parametrize("setting", ["closed_book", "with_context"])
def test_a_ranking_marks_greedys_rank_and_stacks_the_passes(setting):
    figure = ranking(PARTS["ranking"][setting], setting)
    top, *ribbons = figure.axes
    assert len(ribbons) == 4
    n_passes = 1 if setting == "closed_book" else 2
    for axes in figure.axes:
        assert axes.lines[-1].get_xdata()[0] == 7
    assert {len(axes.collections) for axes in ribbons} == {n_passes}
    svg = to_svg(figure, "ranking", "a ranking")
    assert xml.etree.ElementTree.fromstring(svg).get("aria-label") == "a ranking"


def test_the_caption_gives_rank_and_gap():
    closed, _ = ranking_pictures(PARTS["ranking"])
    assert "455 sets" in closed.caption and "number 7 " in closed.caption
    assert "0.0012 AUROC below the best, (HP) (PR) (HRA)" in closed.caption

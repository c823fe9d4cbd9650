"""What rivals cost: the record, the tables and the figures of the report."""

import msgspec
import pytest

from beatrice.benchmarks.baselines.judge import read_costs
from beatrice.benchmarks.results.rivals import (
    COST_HEADS,
    cells_of,
    cost_pictures,
    cost_tables,
    costs_as_markdown,
    kind_of,
    leads,
    measured,
    titles_of,
)
from beatrice.extract.run.files import write_json_atomic
from beatrice.extract.run.rows import Subject
from tests.benchmarks.results.sample import judged, sample_results

RESULTS = sample_results()


def test_the_record_is_read_as_it_was_written_and_refused_otherwise(tmp_path):
    path = tmp_path / "detectors.json"
    write_json_atomic(path, msgspec.to_builtins(judged()))
    assert read_costs(path) == judged()
    path.write_text('[{"name": "x"}]')
    with pytest.raises(ValueError, match="beatrice baselines"):
        read_costs(path)


def test_the_better_ones_come_first_and_the_unmeasured_last():
    unknown = msgspec.structs.replace(judged()[0], name="nobody")
    ranked = measured([unknown, *judged()], RESULTS)
    aurocs = [auroc for _, auroc in ranked]
    assert aurocs[-1] is None
    assert aurocs[:-1] == sorted(aurocs[:-1], reverse=True)


def test_every_setting_has_a_table_with_its_costs_and_reasons():
    broken = msgspec.structs.replace(judged()[0], reason="one class")
    tables = cost_tables([broken, *judged()[1:]], RESULTS)
    assert list(tables) == ["Closed-book", "With context"]
    lines = {
        cells[0]: dict(zip(COST_HEADS, cells, strict=True))
        for cells in tables["Closed-book"]
    }
    assert lines["Rival perplexity"][COST_HEADS[-1]].endswith("; one class")
    assert lines["Rival answer_length"]["Forwards more"] == "2"
    assert lines["Rival answer_length"]["Peak memory"] == "1.0 GiB"
    assert lines["Rival tfidf"]["Peak memory"] == "–"
    assert lines["Rival answer_length"]["Needs"] == "drawn answers"
    assert lines["Rival tfidf"]["Needs"] == "training labels"
    markdown = costs_as_markdown(judged(), RESULTS)
    assert markdown.count("### What each costs") == 2
    assert costs_as_markdown([], RESULTS) == ""


def test_a_figure_stands_where_costs_differ_and_has_every_point():
    pictures = cost_pictures(judged(), RESULTS)
    assert len(pictures) == 6
    same = [msgspec.structs.replace(x, n_forwards=1) for x in judged()]
    titles = [p.title for p in cost_pictures(same, RESULTS)]
    assert len(titles) == 4 and not any("forwards" in title for title in titles)
    assert cost_pictures([], RESULTS) == []
    for picture in pictures:
        assert "Rival tfidf" in picture.svg and "BEATRICE" in picture.svg
        assert ("Time is measured" in picture.caption) == ("seconds" in picture.title)


def test_what_was_not_timed_has_a_dash_and_no_point():
    first, *others = judged()
    untimed = [msgspec.structs.replace(first, seconds=None), *others]
    cells = cost_tables(untimed, RESULTS)["Closed-book"]
    (cells_of_first,) = (row for row in cells if row[0] == first.title)
    assert (
        dict(zip(COST_HEADS, cells_of_first, strict=True))["Seconds a question"] == "–"
    )
    for picture in cost_pictures(untimed, RESULTS):
        timed = "seconds" in picture.title and "Closed" in picture.title
        assert (first.title in picture.svg) != timed


def test_what_reads_drawn_answers_is_drawn_so_even_if_trained():
    cost = msgspec.structs.replace(judged()[0], is_trained=True)
    assert kind_of(cost) == "trained"
    assert kind_of(msgspec.structs.replace(cost, needs=("samples",))) == "sampled"


def test_rivals_go_by_their_titles():
    assert titles_of(judged())[Subject("tfidf")] == "Rival tfidf"
    compared = leads(RESULTS, "strongest")
    titles = {lead.rival: f"Rival {lead.rival.detector}" for lead in compared}
    assert all(cells_of(lead, titles)[1].startswith("Rival ") for lead in compared)
    assert "Rival" not in str([cells_of(lead) for lead in compared])

import msgspec

from beatrice.benchmarks.results.names import (
    CONTROLS,
    DETECTORS,
    RIVALS,
    SPAN_DECISIONS,
)
from beatrice.benchmarks.results.paired import gain, paired_table
from beatrice.benchmarks.results.tables import controller_table, detection_table, number
from beatrice.benchmarks.results.terminal import as_text
from beatrice.extract.records import IN_DOMAIN
from tests.benchmarks.results.sample import PLACES, row, sample_rows

TEST = PLACES[1]


def small(values, **changes):
    """A table of one column; the values by detector."""
    rows = [
        row(name, "closed_book", TEST, "auroc", value, **changes)
        for name, value in values.items()
    ]
    return detection_table(rows)


def ranks(table):
    return {line.label: line.cells[0][0].rank for line in table.lines}


def test_a_rival_of_a_run_goes_by_its_title_where_one_is_given():
    rows = [row(n, "closed_book", TEST, "auroc", 0.7) for n in ("tfidf", "saplma_last")]
    table = detection_table(rows, titles={"saplma_last": "SAPLMA (last token)"})
    assert [line.label for line in table.lines] == [
        DETECTORS["tfidf"],
        "SAPLMA (last token)",
    ]


def test_columns_are_test_then_held_out_in_either_setting():
    columns = detection_table(sample_rows()).columns
    names = [(c.group, c.label, c.detail) for c in columns]
    held_out = [(name, "held out") for name in ("pursuits", "places", "rephrased")]
    assert names == [
        (group, *place)
        for group in ("Closed-book", "With context")
        for place in [("microworld", "test"), *held_out]
    ]


def test_all_in_domain_sets_together_come_first_where_there_are_several():
    rows = sample_rows()
    other = [
        msgspec.structs.replace(r, dataset="musique")
        for r in rows
        if r.dataset == "microworld"
    ]
    columns = detection_table(rows + other).columns
    names = [(c.label, c.detail) for c in columns if c.group == "Closed-book"]
    assert names[:3] == [(d, "test") for d in (IN_DOMAIN, "microworld", "musique")]
    alone = [r for r in rows if r.dataset == IN_DOMAIN]
    assert {c.label for c in detection_table(alone).columns} == {IN_DOMAIN}


def test_a_difference_has_its_sign_a_mark_where_it_is_clear_and_no_rank():
    rows = [
        row("champion", "closed_book", TEST, "auroc_difference", value, **fields)
        for value, fields in (
            (0.05, dict(against="perplexity", p_value=0.01)),
            (-0.01, dict(against="tfidf", p_value=0.6)),
        )
    ]
    rows = [msgspec.structs.replace(r, experiment="paired") for r in rows]
    table = paired_table(rows)
    assert [line.label for line in table.lines] == [
        RIVALS[name] for name in ("perplexity", "tfidf")
    ]
    assert set(ranks(table).values()) == {None}
    assert [line.cells[0][0].is_clear for line in table.lines] == [True, False]
    text = as_text(table)
    assert "+.050!" in text and "+.020 to +.080" in text and "-.010\n" in text + "\n"
    assert gain(rows, "tfidf", dataset=TEST[0]) == (
        "-.010 [-.040 to +.020] against text only (TF-IDF)"
    )
    assert gain(rows, "perplexity", dataset="nq") == ""


def test_pgir_is_laid_out_against_each_controller_and_in_the_mean_of_the_sets():
    table = paired_table(sample_rows(), "controller_paired")
    assert [(c.label, c.detail) for c in table.columns][-1] == ("macro", "mean of sets")
    assert len(table.lines) == 3 and len(table.columns) == 5
    assert all(len(cell) == 2 for line in table.lines for cell in line.cells)


def test_lines_are_the_known_detectors_and_then_the_others():
    rows = [row("saplma", "closed_book", TEST, "auroc", 0.8), *sample_rows()]
    labels = [line.label for line in detection_table(rows).lines]
    assert labels == [*DETECTORS.values(), "saplma"]


def test_seeds_and_validation_rows_are_left_out():
    rows = [row("champion", "closed_book", TEST, "auroc", 0.9)]
    rows.append(row("champion", "closed_book", TEST, "auroc", 0.1, seed="0"))
    rows.append(row("champion", "closed_book", PLACES[0], "auroc", 0.2))
    (line,) = detection_table(rows).lines
    assert [m and m.row.value for cell in line.cells for m in cell] == [0.9, None]


def test_best_and_second_are_marked():
    found = ranks(small({"a": 0.7, "b": 0.9, "c": 0.8, "d": 0.6}))
    assert found == {"a": None, "b": "best", "c": "second", "d": None}


def test_equal_printed_digits_rank_equally():
    found = ranks(small({"a": 0.9001, "b": 0.9004, "c": 0.8}))
    assert found == {"a": "best", "b": "best", "c": "second"}


def test_zero_is_a_value_and_undefined_is_none():
    rows = [
        row("a", "closed_book", TEST, "auroc", 0.0, ci_low=None, ci_high=None),
        row("b", "closed_book", TEST, "auroc", None, reason="one class only"),
        row("c", "closed_book", TEST, "auroc", -0.1),
    ]
    assert ranks(detection_table(rows)) == {"a": "best", "b": None, "c": "second"}


def test_a_line_alone_is_not_called_best():
    assert ranks(small({"champion": 0.9})) == {DETECTORS["champion"]: None}


def test_notes_are_numbered_and_each_is_given_once():
    rows = [
        row(name, "closed_book", TEST, "auroc", None, reason="one class only")
        for name in ("a", "b")
    ]
    rows.append(row("c", "closed_book", TEST, "auroc", 0.8, n_failed=1))
    table = detection_table(rows)
    assert table.notes == ("one class only", "1 example left out: no label or no score")
    text = as_text(table)
    assert text.count("n/a[1]/-") == 2 and ".800*[2]/-" in text
    assert "[1] one class only" in text


def test_controls_and_span_decisions_have_their_own_tables():
    control = detection_table(sample_rows(), labels=CONTROLS)
    assert [line.label for line in control.lines] == list(CONTROLS.values())
    spans = detection_table(
        sample_rows(), experiment="span_decision", labels=SPAN_DECISIONS
    )
    assert [line.label for line in spans.lines] == list(SPAN_DECISIONS.values())


def test_controllers_have_macro_means_and_a_cost_without_rank():
    table = controller_table(sample_rows())
    assert [c.label for c in table.columns[-2:]] == ["macro", "generations"]
    *_, pgir, bound = table.lines
    assert all(m.rank is None for cell in bound.cells for m in cell)
    em = [cell[0].row.value for cell in pgir.cells[:-2]]
    assert pgir.is_ours
    assert abs(pgir.cells[-2][0].row.value - sum(em) / 4) < 1e-12
    assert {line.cells[-1][0].rank for line in table.lines} == {None}


def test_a_dataset_that_was_not_run_leaves_no_macro_mean():
    rows = [
        r
        for r in sample_rows()
        if r.detector != "pgir" or r.dataset not in ("places", "macro")
    ]
    pgir = controller_table(rows).lines[-2]
    assert pgir.cells[-2] == (None, None) and pgir.cells[2] == (None, None)


def test_text_fits_its_width_and_carries_no_terminal_codes():
    text = as_text(detection_table(sample_rows()), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "Closed-book" in text and ".882-.942" in text


def test_names_in_brackets_are_printed_as_they_are():
    assert "[bold]HP[/bold]" in as_text(small({"[bold]HP[/bold]": 0.9}))


def test_no_rows_make_an_empty_table():
    assert detection_table([]).lines == () and controller_table([]).lines == ()


def test_numbers_have_three_decimals_and_no_leading_zero():
    spelled = [number(x) for x in (0.8391, 1.0, 0.0, -0.012, 0.9999, 0.10)]
    assert spelled == [".839", "1.000", ".000", "-.012", "1.000", ".100"]
    assert number(2.404, "generations") == "2.40"
    gains = [number(x, "em_difference") for x in (0.0051, -0.0002, -0.3)]
    assert gains == ["+.005", "+.000", "-.300"]

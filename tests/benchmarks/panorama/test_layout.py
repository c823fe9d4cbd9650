import msgspec
import pytest

from beatrice.benchmarks.panorama.layout import (
    CHANCE,
    as_latex,
    as_markdown,
    counts_of,
    panorama_table,
    panoramas,
)
from beatrice.extract.records import IN_DOMAIN
from tests.benchmarks.results.sample import row, sample_rows

POOLED = (IN_DOMAIN, "test")


def rows_of(aurocs, place=POOLED, **fields):
    return [
        row(name, "closed_book", place, metric, value, **fields)
        for name, value in aurocs.items()
        for metric in ("auroc", "auprc")
    ]


def labels(table):
    return [line.label for line in table.lines]


def test_the_selected_set_comes_first_and_its_rivals_by_their_auroc():
    rows = rows_of({"answer_length": 0.6, "tfidf": 0.8, "champion": 0.7})
    table = panorama_table(rows, titles={"answer_length": "Length"})
    assert labels(table) == [
        "BEATRICE (selected encoders)",
        "Text only (TF-IDF)",
        "Length",
    ]


def test_a_detector_without_a_title_goes_by_its_name():
    table = panorama_table(rows_of({"champion": 0.7, "sep": 0.6}))
    assert labels(table)[-1] == "sep"


def test_own_encoders_are_left_to_their_own_tables():
    found = labels(panorama_table(sample_rows()))
    assert "Hidden states only" not in found and "Majority class" not in found
    assert not [name for name in found if name.startswith("encoder:")]


def test_guessing_has_the_auprc_of_the_share_of_wrong_answers_and_no_rank():
    rows = rows_of({"champion": 0.7, "tfidf": 0.6, "majority": 0.9})
    table = panorama_table(rows)
    first = table.lines[0]
    assert first.label == CHANCE
    ((auroc, auprc),) = first.cells
    assert auroc is None and auprc.row.value == 0.9 and auprc.rank is None
    assert auprc.row.metric == "auprc"
    assert [m.rank for m in table.lines[1].cells[0]] == ["best", "best"]


def test_the_main_table_pools_in_domain_sets_and_the_panoramas_show_each():
    rows = sample_rows()
    other = [
        msgspec.structs.replace(r, dataset="musique")
        for r in rows
        if r.dataset == "microworld"
    ]
    tables = panoramas(rows + other)
    main, closed, context = (
        [c.label for c in table.columns] for table in tables.values()
    )
    held_out = ["pursuits", "places", "rephrased"]
    assert main == [IN_DOMAIN, *held_out] * 2
    assert closed == context == [IN_DOMAIN, "microworld", "musique", *held_out]


def test_best_is_bold_and_second_underlined_in_both_spellings():
    table = panorama_table(rows_of({"champion": 0.7, "tfidf": 0.8, "sep": 0.6}))
    markdown, latex = as_markdown(table), as_latex(table)
    assert "| BEATRICE (selected encoders) | <u>.700</u>/<u>.700</u> |" in markdown
    assert "| Text only (TF-IDF) | **.800**/**.800** |" in markdown
    assert r"Text only (TF-IDF) & \textbf{.800}/\textbf{.800} \\" in latex
    assert r"sep & .600/.600 \\" in latex


def test_what_is_measured_and_what_is_left_out_is_counted_and_noted():
    rows = rows_of({"champion": 0.7}, n=1390, n_failed=10)
    rows += rows_of({"sep": 0.6}, n=1300, n_failed=100)
    table = panorama_table(rows)
    assert counts_of(table) == [(1390, 10)]
    assert "| n (left out) | 1,390 (10) |" in as_markdown(table)
    assert "2. 100 examples left out: no label or no score" in as_markdown(table)
    assert r"\underline{.600}\textsuperscript{2}" in as_latex(table)


def test_an_undefined_value_is_no_number_and_says_why():
    gone = row("sep", "closed_book", POOLED, "auroc", None, reason="one class only")
    table = panorama_table([*rows_of({"champion": 0.7}), gone])
    assert "| sep | n/a<sup>1</sup>/– |" in as_markdown(table)
    assert "1. one class only" in as_markdown(table)


@pytest.mark.parametrize("rows", [[], rows_of({"encoder:H": 0.7})])
def test_nothing_measured_makes_no_table(rows):
    assert panoramas(rows) == {}


def test_latex_rules_span_the_columns_of_their_groups():
    latex = as_latex(panorama_table(sample_rows()))
    assert latex.startswith(r"\begin{tabular}{lcccccccc}")
    assert r"\multicolumn{4}{c}{Closed-book} & \multicolumn{4}{c}{With con" in latex
    assert r"\cmidrule(lr){2-5} \cmidrule(lr){6-9}" in latex
    body = [line for line in latex.split("\n") if line.endswith(r"\\")]
    assert {line.count("&") for line in body[1:]} == {8}

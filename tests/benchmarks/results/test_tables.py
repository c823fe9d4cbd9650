import msgspec
import pandas
import pytest

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.results.names import (
    ALL_SETS,
    COMPARED,
    CONTROLS,
    DETECTORS,
    FAMILY_VARIANTS,
    FEATURES,
    RANKED,
    REFERENCE,
    RETRIEVED,
    SPAN_VARIANTS,
    WITHOUT_HIDDEN,
    probe,
)
from beatrice.benchmarks.results.rendering import as_latex, as_markdown, as_text, tex
from beatrice.benchmarks.results.report import rows_as_markdown, rows_table
from beatrice.benchmarks.results.rivals import leads_as_markdown
from beatrice.benchmarks.results.tables import (
    CHANCE,
    CHANGES,
    Column,
    ablation_table,
    answer_table,
    controller_table,
    counts_of,
    detection_table,
    find,
    main_detectors,
    named_tables,
    number,
    paired_table,
    panorama_table,
    panoramas,
    pivot,
    results_of,
    set_names,
    validated_table,
    where,
)
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from tests.benchmarks.results.sample import (
    MARKUP,
    PARTS,
    PLACES,
    POOLED,
    TEST,
    row,
    sample_results,
    sample_rows,
    undefined,
)


def auroc(name, value, eval_set=TEST, **changes):
    changes = {"metric": "auroc"} | changes
    return row(name, "closed_book", eval_set, value=value, **changes)


def table_of(values, eval_set=TEST, metrics=("auroc",)):
    """Return rows of one set; the values are given by detector."""
    return results_of(
        auroc(name, value, eval_set, metric=metric)
        for name, value in values.items()
        for metric in metrics
    )


def features(results):
    return ablation_table(results, FEATURES, "Variant")


def exhaustive(results):
    return validated_table(results, "exhaustive", RANKED, "Set")


def labels(table):
    return [line.label for line in table.lines]


def ranks(table):
    return {line.label: line.cells[0][0].rank for line in table.lines}


def test_columns_of_rows_are_typed_and_may_be_absent():
    results = table_of({Subject("layer_probe", layer=3): 0.5})
    assert results["layer"].dtype == pandas.Int64Dtype()
    assert results["value"].dtype == pandas.Float64Dtype()
    assert isinstance(results["setting"].dtype, pandas.StringDtype)
    assert results["families"].isna().all() and results["layer"].tolist() == [3]
    assert set(results.columns) == {*ResultRow.__struct_fields__, "row"}


def test_rows_are_found_by_value_absence_and_membership():
    results = table_of({encoder("HP"): 0.7, encoder("P"): 0.6, "champion": 0.9})
    assert find(results, families="HP").value == 0.7
    assert find(results, families=None).detector == "champion"
    assert len(where(results, families=("HP", "P"))) == 2
    assert find(results, families="A") is None
    with pytest.raises(ValueError, match="found 2; .*families=HP.*families=P"):
        find(results, detector="encoder")


def test_a_pivot_takes_exactly_the_rows_that_line_and_column_name():
    rows = [
        auroc(encoder("HP"), 0.1, family=family, head=head)
        for family, head in (("H", None), ("P", None), ("H", 3))
    ]
    results, columns = results_of(rows), [(Column("g", "c"), {})]
    lines = [("hidden", {"family": "H", "head": None}), ("none", {"family": "A"})]
    table = pivot(results, "x", lines, columns)
    assert labels(table) == ["hidden"] and table.lines[0].cells[0][0].row == rows[0]
    with pytest.raises(ValueError, match="expected one row .*head=3"):
        pivot(results, "x", [("hidden", {"family": "H"})], columns)


def test_all_in_domain_sets_together_come_first_if_there_are_several():
    rows = sample_rows()
    microworld = [r for r in rows if r.dataset == "microworld"]
    other = [msgspec.structs.replace(r, dataset="musique") for r in microworld]
    results = results_of(rows + other)
    columns = detection_table(results).columns
    names = [(c.label, c.detail) for c in columns if c.group == "Closed-book"]
    assert names[:3] == [(d, "test") for d in (IN_DOMAIN, "microworld", "musique")]
    alone = results_of(r for r in rows if r.dataset == IN_DOMAIN)
    assert {c.label for c in detection_table(alone).columns} == {IN_DOMAIN}
    main, closed, context = (
        [c.label for c in table.columns] for _, table in panoramas(results).values()
    )
    held_out = ["pursuits", "places", "rephrased"]
    assert main == [IN_DOMAIN, *held_out] * 2
    assert closed == context == [IN_DOMAIN, "microworld", "musique", *held_out]


def test_a_difference_has_a_sign_a_mark_if_it_is_clear_and_no_rank():
    gains = (("perplexity", 0.05, 0.01), ("tfidf", -0.01, 0.6))
    rows = [
        auroc("champion", gain, experiment="paired", rival=rival, p_value=p_value)
        for rival, gain, p_value in gains
    ]
    table = paired_table(results_of(rows))
    assert labels(table) == [COMPARED[Subject(x)] for x in ("perplexity", "tfidf")]
    assert set(ranks(table).values()) == {None}
    assert [line.cells[0][0].is_clear for line in table.lines] == [True, False]
    text = as_text(table)
    assert "+.050!" in text and "+.020 to +.080" in text and "-.010\n" in text + "\n"
    dagger, meaning = r"$^\dagger$", "95 % interval of the difference excludes zero"
    for text, mark, below in (
        (as_markdown(table), "†", f"\n† the {meaning}\n"),
        (as_latex(table), dagger, tex(f"† the {meaning}.")),
    ):
        assert f"+.050{mark}" in text and f"-.010{mark}" not in text and below in text


@pytest.mark.parametrize("metric", CHANGES)
def test_a_change_within_a_detector_has_a_sign_and_a_mark_too(metric):
    rows = [auroc(*x, metric=metric) for x in (("a", 0.05), ("b", 0.01), ("c", -0.2))]
    lines = [(row.detector, {"detector": row.detector}) for row in rows]
    table = pivot(results_of(rows), "x", lines, [(Column("g", "c"), {})])
    for make, mark in ((as_text, "!"), (as_markdown, "†"), (as_latex, r"$^\dagger$")):
        text = make(table)
        assert f"+.050{mark}" in text and f"-.200{mark}" in text, text
        assert "+.010" in text and f"+.010{mark}" not in text, text


def test_pgir_is_compared_with_each_controller_on_sets_and_their_mean():
    table = paired_table(sample_results(), "controller_paired")
    assert table.columns[-1][1:] == ("macro", "mean of sets")
    assert len(table.lines) == 3 and len(table.columns) == 5
    assert all(len(cell) == 2 for line in table.lines for cell in line.cells)


def test_known_detectors_come_first_then_titled_ones_then_the_others():
    rows = [auroc("saplma", 0.8), auroc("saplma_last", 0.8), *sample_rows()]
    titles = {Subject("saplma_last"): "SAPLMA (last token)"}
    others = [*titles.values(), "saplma"]
    table = detection_table(results_of(rows), titles=titles)
    assert labels(table) == [*DETECTORS.values(), *others]


def test_seeds_and_validation_rows_are_left_out():
    rows = [auroc("champion", 0.9), auroc("champion", 0.1, seed="0")]
    rows.append(auroc("champion", 0.2, PLACES[0]))
    (line,) = detection_table(results_of(rows)).lines
    assert [m and m.row.value for cell in line.cells for m in cell] == [0.9, None]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((0.7, 0.9, 0.8), (None, "best", "second")),
        ((0.9001, 0.9004, 0.8), ("best", "best", "second")),  # equal printed digits
        ((0.0, None, -0.1), ("best", None, "second")),  # zero is a value
        ((0.9,), (None,)),  # a single line is not marked as best
    ],
)
def test_best_and_second_are_marked_by_the_printed_digits(values, wanted):
    rows = [
        undefined(auroc(name, 0.0)) if value is None else auroc(name, value)
        for name, value in zip("abc", values, strict=False)
    ]
    assert tuple(ranks(detection_table(results_of(rows))).values()) == wanted


def test_notes_are_numbered_and_each_is_given_once():
    rows = [undefined(auroc(x, 0.5)) for x in "ab"]
    rows.append(auroc("c", 0.8, n_failed=1))
    table = detection_table(results_of(rows))
    assert table.notes == ("one class only", "1 example left out: no label or no score")
    text = as_text(table)
    assert text.count("n/a[1]/-") == 2 and ".800*[2]/-" in text
    assert "[1] one class only" in text


def test_shares_of_answers_have_a_line_each():
    rows = [
        row("backbone", "closed_book", TEST, metric, share, experiment="answers")
        for metric, share in (("cut_off", 0.1), ("empty", 0.2), ("hedged", 0.3))
    ]
    table = answer_table(results_of(rows))
    shown = {line.label: line.cells[0][0].row.value for line in table.lines}
    assert shown == {"Cut off": 0.1, "Empty": 0.2, "Hedges": 0.3}


def test_a_users_controller_or_judge_is_listed_by_its_id():
    own, eval_set = "judge:my_search:stands", ("macro", "evaluated")
    fields = dict(experiment="controller_macro")
    rows = [row(x, "both", eval_set, "em", 0.5, **fields) for x in ("pgir", own)]
    fields = dict(experiment="controller_paired", rival=own, p_value=0.5)
    rows.append(row("pgir", "both", eval_set, "em", 0.1, **fields))
    results = results_of(rows)
    assert labels(controller_table(results)) == ["PGIR", own]
    assert labels(paired_table(results, "controller_paired")) == [own]


def test_controllers_have_macro_means_and_costs_and_bounds_have_no_rank():
    table = controller_table(sample_results())
    assert [c.label for c in table.columns[-2:]] == ["macro", "generations"]
    *_, pgir, bound = table.lines
    assert all(m.rank is None for cell in bound.cells for m in cell if m)
    assert pgir.is_ours and {line.cells[-1][0].rank for line in table.lines} == {None}


def test_every_block_of_a_wide_table_repeats_the_detectors_names():
    sets = [(f"set number {i}", "test") for i in range(7)]
    rows = [auroc(x, 0.5, place) for x in ("champion", "perplexity") for place in sets]
    text = as_text(detection_table(results_of(rows)), width=100)
    blocks = [block for block in text.split("Detector") if "─" in block]
    assert 1 < len(blocks) < len(sets)  # as many columns in each as fit
    assert max(map(len, text.splitlines())) <= 100
    for name in ("champion", "perplexity"):  # a name may be wrapped
        word = DETECTORS[Subject(name)].split()[0]
        assert all(word in block for block in blocks)
    assert all(text.count(name) == 1 for name, _ in sets)


def test_text_fits_its_width_and_carries_no_terminal_codes():
    text = as_text(detection_table(sample_results()), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "Closed-book" in text and ".882-.942" in text
    marked = detection_table(table_of({"[bold]HP[/bold]": 0.9}))
    assert "[bold]HP[/bold]" in as_text(marked)


def test_no_rows_make_an_empty_table_and_rows_of_detection_none_of_ablations():
    for make in (detection_table, controller_table, features, exhaustive):
        assert make(results_of([])).lines == ()
    of_detection = where(sample_results(), experiment="detection")
    for titles in (FEATURES, FAMILY_VARIANTS, SPAN_VARIANTS):
        assert ablation_table(of_detection, titles, "x").lines == ()
    assert exhaustive(of_detection).lines == ()
    for results in (results_of([]), table_of({encoder("H"): 0.7})):
        assert panoramas(results) == {}


@pytest.mark.parametrize(
    ("value", "fields", "text"),
    [
        (0.8391, {}, ".839"),
        (1.0, {}, "1.000"),
        (0.0, {}, ".000"),
        (-0.012, {}, "-.012"),
        (0.9999, {}, "1.000"),
        (2.404, {"metric": "generations"}, "2.40"),
        (1234.5, {"metric": "tokens"}, "1,234.50"),
        (0.0, {"metric": "seconds"}, "0.00"),
        (0.1, {"metric": "seconds"}, "0.10"),
        (0.0042, {"metric": "seconds"}, "0.0042"),
        (0.000001, {"metric": "seconds"}, "0.0000010"),
        (7.0, {"metric": "best_sets"}, "7"),
        (0.0051, {"is_signed": True}, "+.005"),
        (-0.0002, {"is_signed": True}, "-.000"),
        (-0.0, {"is_signed": True}, "+.000"),
        (-0.0002, {}, ".000"),
        (-0.3, {"is_signed": True}, "-.300"),
    ],
)
def test_numbers_have_three_decimals_and_no_leading_zero(value, fields, text):
    assert number(value, **fields) == text


# Ablations.


def test_the_papers_seven_variants_are_in_its_order():
    table = features(sample_results())
    assert labels(table) == list(FEATURES.values()) and len(table.lines) == 7
    assert [line.is_ours for line in table.lines] == [False] * 6 + [True]
    assert len(table.columns) == 8  # four sets in both settings


def test_the_reference_has_no_rank_and_does_not_change_the_others():
    values = {"hidden_only": 0.7, "late_fusion_all": 0.95, "champion": 0.9}
    rows = [auroc(*item) for item in values.items()]
    rows.append(auroc(WITHOUT_HIDDEN, 0.8, experiment="ablation"))
    assert ranks(features(results_of(rows))) == {
        FEATURES[Subject("hidden_only")]: None,
        FEATURES[WITHOUT_HIDDEN]: "second",
        FEATURES[REFERENCE]: None,
        FEATURES[Subject("champion")]: "best",
    }


def test_a_span_that_a_setting_lacks_has_no_value():
    table = ablation_table(sample_results(), SPAN_VARIANTS, "Dropped span")
    assert labels(table) == list(SPAN_VARIANTS.values()) and len(SPAN_VARIANTS) == 14
    for line in table.lines:
        lacks = [cell == (None, None) for cell in line.cells]
        assert lacks == [line.label.startswith("Context")] * 4 + [False] * 4


def test_controls_and_ranked_sets_have_tables_of_their_own():
    permuted = detection_table(sample_results(), labels=CONTROLS)
    assert labels(permuted) == list(CONTROLS.values())
    columns = exhaustive(sample_results()).columns
    assert [c.detail for c in columns[:3]] == ["validation", "test", "held out"]


def test_every_family_has_its_line_and_its_encoders():
    table = ablation_table(sample_results(), FAMILY_VARIANTS, "Pool")
    assert len(table.lines) == 5
    none = {s: x | {"without_prob": []} for s, x in PARTS["ablations"].items()}
    named = {x: names for x, *names in set_names(PARTS["selection"], none)}
    assert named["Without attention"] == ["(PR) (A)", "(PR) (A)"]
    assert named["Without closed-book encoders"] == ["–", "[PR] [A]"]
    assert named["Without probabilities"][0] == "none: no better than chance"


# The paper's panoramas.

BOTH = ("auroc", "auprc")


def test_the_selected_set_comes_first_and_its_rivals_by_their_auroc():
    values = {"answer_length": 0.6, "tfidf": 0.8, "champion": 0.7, "sep": 0.5}
    titles = {Subject("answer_length"): "Length"}
    table = panorama_table(table_of(values, POOLED, BOTH), titles=titles)
    ours = "BEATRICE (selected encoders)"
    assert labels(table) == [ours, "Text only (TF-IDF)", "Length", "sep"]


def test_the_page_shows_the_two_best_published_detectors_and_no_probe_of_ours():
    published = {"sep": 0.6, "saplma_last": 0.4, "ptrue": 0.5}
    probes = {probe("H"): 0.9, probe("P"): 0.8, "linear_probe": 0.7}
    titles = {Subject(x): x for x in (*published, "linear_probe")}
    values = {"champion": 0.7, **probes, **published}
    shown = main_detectors(table_of(values, POOLED, BOTH), titles)
    assert set(labels(shown)) == {"BEATRICE (selected encoders)", "sep", "ptrue"}


def test_text_and_markdown_give_baselines_the_same_titles():
    rows = [auroc(name, 0.5, POOLED) for name in catalogue()]
    text, markdown = rows_table(rows, "detectors"), rows_as_markdown(rows)
    for detector in catalogue().values():
        assert f"\n {detector.title} " in text and f"\n| {detector.title} |" in markdown
    assert "AUROC / AUPRC\n" in text and "AUPRC: its\npositive class" in markdown
    assert text.split("\n answers (left out) ")[1].split()[:2] == ["398", "(0)"]
    with pytest.raises(ValueError, match=r"have \(all\), found detectors"):
        rows_table([], "detectors")


def test_guessing_has_the_share_of_wrong_answers_as_auprc_and_no_rank():
    values = {"champion": 0.7, "tfidf": 0.6, "majority": 0.9}
    first, second, _ = panorama_table(table_of(values, POOLED, BOTH)).lines
    ((auroc, auprc),) = first.cells
    assert first.label == CHANCE and auroc is None and auprc.rank is None
    assert auprc.row.value == 0.9 and auprc.row.metric == "auprc"
    assert [m.rank for m in second.cells[0]] == ["best", "best"]


def test_retrieved_passages_have_a_panorama_of_every_set_and_of_all_together():
    places = [POOLED, TEST, PLACES[2], (ALL_SETS, "ood")]
    values = {"champion": 0.7, "hidden_only": 0.9, "tfidf": 0.5, "majority": 0.5}
    rows = []
    for is_last, place in zip((0, 0, 0, 1), places, strict=True):
        values["perplexity"] = 0.4 + 0.2 * is_last
        for name, value in values.items():
            at = name, "with_context", place
            about = {"value": value + 0.1 * is_last, "experiment": RETRIEVED}
            rows += [row(*at, metric, **about) for metric in BOTH]
    elsewhere = sample_rows()
    results = results_of([*rows, *elsewhere])
    _, table = named_tables(results)["retrieved"]
    assert [(c.label, c.detail) for c in table.columns] == [
        ("microworld", "test"),
        ("pursuits", "held out"),
        ("all sets", ""),
    ]
    assert " | With context: all sets |\n" in as_markdown(table)
    assert r" & all sets \\" in as_latex(table)
    # Sorted by all sets together; own encoders have their own tables.
    ours, text = "BEATRICE (selected encoders)", "Text only (TF-IDF)"
    assert labels(table) == [CHANCE, ours, "Answer perplexity", text]
    assert table.lines[0].cells[2][0] is None
    assert table.lines[0].cells[2][1].row.value == pytest.approx(0.6)
    assert [m.row.value for m in table.lines[2].cells[0]] == pytest.approx([0.4] * 2)
    assert "retrieved" not in named_tables(results_of(elsewhere))


def test_best_is_bold_and_second_underlined_in_markdown_and_latex():
    values = {"champion": 0.7, "tfidf": 0.8, "sep": 0.6}
    table = panorama_table(table_of(values, POOLED, BOTH))
    markdown, latex = as_markdown(table), as_latex(table)
    assert "| BEATRICE (selected encoders) | <u>.700</u>/<u>.700</u> |" in markdown
    assert "| Text only (TF-IDF) | **.800**/**.800** |" in markdown
    assert r"Text only (TF-IDF) & \textbf{.800}/\textbf{.800} \\" in latex
    assert r"sep & .600/.600 \\" in latex


def test_measured_and_left_out_answers_are_counted_and_noted():
    rows = [
        auroc(name, value, POOLED, metric=metric, n=n, n_failed=1400 - n)
        for name, value, n in (("champion", 0.7, 1390), ("sep", 0.6, 1300))
        for metric in BOTH
    ]
    table = panorama_table(results_of(rows))
    assert counts_of(table) == ["1,390 (10)"]
    assert "| n (left out) | 1,390 (10) |" in as_markdown(table)
    assert "2. 100 examples left out: no label or no score" in as_markdown(table)
    assert r"\underline{.600}\textsuperscript{2}" in as_latex(table)
    gone = undefined(auroc("x", 0.5, POOLED))
    text = as_markdown(panorama_table(results_of([*rows, gone])))
    assert "| x | n/a<sup>3</sup>/– |" in text and "3. one class only" in text


def test_special_characters_are_escaped_in_markdown_and_latex():
    name = r"P(a|b) of {c}^2 \d ~ $5"
    table = detection_table(table_of({name: 0.9}))
    (line,) = (x for x in as_markdown(table).splitlines() if "P(a" in x)
    assert line.startswith(r"| P(a\|b) of ")
    escaped = r"P(a|b) of \{c\}\^{}2 \textbackslash{}d \textasciitilde{} \$5 & "
    assert escaped in as_latex(table)


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        (MARKUP, '&lt;script>alert("x")&lt;/script> & co'),
        ("<b>best</b> <!-- of -->", "&lt;b>best&lt;/b> &lt;!-- of -->"),
        ("a&lt;b & c", "a&amp;lt;b & c"),
        ("p < .05", "p < .05"),
        ("two\nlines", "two lines"),
        (r"a\|b|c", r"a\\\|b\|c"),  # Markdown: a backslash, and two bars in one cell
    ],
)
def test_a_title_is_plain_text_everywhere_in_markdown(title, shown):
    rows = [auroc("champion", 0.8, POOLED), auroc("mine", 0.9, POOLED)]
    results = results_of([*rows, undefined(auroc("gone", 0.9, POOLED), title)])
    titles = {Subject("mine"): title}
    text = as_markdown(panorama_table(results, titles=titles))
    assert f"| {shown} | **.900**" in text
    if "|" not in title:
        assert f"1. {shown}\n" in text
        assert f"compared: {shown}\n" in leads_as_markdown(results, titles)


def test_latex_rules_span_the_columns_of_their_groups():
    latex = as_latex(panorama_table(sample_results()))
    assert latex.startswith(r"\begin{tabular}{lcccccccc}")
    assert r"\multicolumn{4}{c}{Closed-book} & \multicolumn{4}{c}{With con" in latex
    assert r"\cmidrule(lr){2-5} \cmidrule(lr){6-9}" in latex
    body = [line for line in latex.split("\n") if line.endswith(r"\\")]
    assert {line.count("&") for line in body[1:]} == {8}

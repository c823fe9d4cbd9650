"""The table of rivals: which leads and lags are significant, and what rivals cost."""

import msgspec
import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import is_rival
from beatrice.benchmarks.results.names import COMPARED, DETECTORS
from beatrice.benchmarks.results.report import render_report
from beatrice.benchmarks.results.rivals import (
    COST_HEADS,
    cells_of,
    cost_pictures,
    cost_tables,
    costs_as_markdown,
    detectors_by_auroc,
    holm,
    kind_of,
    lead_counts,
    leads,
    leads_as_latex,
    leads_as_markdown,
    titles_of,
)
from beatrice.benchmarks.results.tables import results_of
from beatrice.benchmarks.stages import read_costs
from beatrice.extract.records import IN_DOMAIN, SETTINGS
from beatrice.extract.run.rows import Subject
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.metrics import auroc as auroc_of
from tests.benchmarks.results.sample import (
    PARTS,
    POOLED,
    row,
    sample_report,
    sample_results,
    undefined,
)
from tests.jaxprobe.samples import rows_of

OUTSIDE = ("places", "ood")
JUDGED = PARTS["judged"]  # costs of three rivals that have rows
SELECTION = PARTS["selection"]  # closed-book encoders alone, in both settings


def test_holm_gives_the_textbook_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.3, 0.6, 0.3]) == pytest.approx([0.9, 0.9, 0.9])
    assert holm([0.7, 0.1, 0.8]) == pytest.approx([1, 0.3, 1])
    assert holm([]) == []


def column(eval_set, setting="closed_book", **rivals):
    """Return rows of a set; a rival is given as its AUROC and the p of the lead."""
    at = setting, eval_set, "auroc"
    rows = [row("champion", *at, 0.9)]
    for name, (auroc, p_value) in rivals.items():
        rows.append(row(name, *at, auroc))
        if p_value is not None:
            fields = dict(experiment="paired", rival=name, p_value=p_value)
            rows.append(row("champion", *at, 0.9 - auroc, **fields))
    return rows


def leads_of(rows, against="strongest"):
    return leads(results_of(rows), against)


def rivals(compared):
    return [lead.rival.detector for lead in compared]


def test_each_column_has_its_own_strongest_rival():
    rows = column(POOLED, tfidf=(0.8, 0.01), perplexity=(0.7, 0.01))
    rows += column(OUTSIDE, tfidf=(0.6, 0.01), perplexity=(0.7, 0.02))
    assert rivals(leads_of(rows)) == ["tfidf", "perplexity"]


def test_own_encoders_and_controls_are_not_rivals_and_all_others_are_compared():
    assert {x for x in DETECTORS if is_rival(x.detector)} <= set(COMPARED)
    names = "champion hidden_only encoder late_fusion_all majority permuted_labels"
    assert not any(map(is_rival, names.split())) and is_rival("probe")
    rows = column(POOLED, hidden_only=(0.89, 0.5), tfidf=(0.6, 0.01))
    assert rivals(leads_of(rows)) == ["tfidf"]
    assert rivals(leads_of(rows, "hidden_only")) == ["hidden_only"]


def test_a_stronger_detector_without_a_pair_is_named_as_uncompared():
    (lead,) = leads_of(column(POOLED, sep=(0.95, None), tfidf=(0.6, 0.01)))
    assert (lead.rival, lead.uncompared) == (Subject("tfidf"), (Subject("sep"),))
    assert "sep" in lead_counts([lead]).values()


def partial_rival(gap, n=100):
    """Return a column; `sep` scores n easy answers of 398, with an AUROC of .88."""
    at = "closed_book", POOLED, "auroc"
    fields = dict(experiment="paired", rival="sep", p_value=0.01, n=n)
    rows = column(POOLED, tfidf=(0.85, 0.01))
    rows += [msgspec.structs.replace(rows[0], seed=s, value=0.9) for s in "01"]
    return [*rows, row("sep", *at, 0.88, n=n), row("champion", *at, gap, **fields)]


def test_the_strongest_rival_is_found_on_answers_that_both_have_scores_for():
    assert rivals(leads_of(partial_rival(0.07))) == ["tfidf"]
    assert rivals(leads_of(partial_rival(-0.02))) == ["sep"]


def test_only_a_line_of_fewer_answers_says_so_in_every_format():
    results = results_of(partial_rival(-0.2))
    page = render_report(sample_report(rows=partial_rival(-0.2)))
    spelled = leads_as_markdown(results), leads_as_latex(results), page
    where = "Closed-book, all in-domain, 100 of 398 answers"
    assert all(where in x and "numbers are of these n" in x for x in spelled)
    assert "| .680 | .880 | -.200† [-.230 to -.170] |" in spelled[0]
    assert cells_of(leads(results, "strongest")[0])[-1] == "–"  # seeds are of all
    results = results_of(partial_rival(0.02, n=398))
    spelled = leads_as_markdown(results), leads_as_latex(results)
    assert not any("of 398" in text or "of these" in text for text in spelled)
    assert "| .900 | .880 | +.020" in spelled[0]


RNG = np.random.default_rng(0)
LABELS, NOISE = RNG.random(600) < 0.5, RNG.normal(size=(2, 600))


def lead_of(scores):
    """Return the lead of the first over the second, on test answers of `LABELS`."""
    names, rows = ("champion", "tfidf"), rows_of(LABELS, splits=["test"] * len(LABELS))
    scored = [
        DetectorScores(name=x, scores=scores[i : i + 1]) for i, x in enumerate(names)
    ]
    config, pairs = BootstrapConfig(n_resamples=1000), {"paired": [names]}
    (lead,) = leads_of(detection_rows(scored, rows, config, pairs=pairs))
    return lead


@pytest.mark.parametrize("n_ours", [600, 450])
@pytest.mark.parametrize("n_theirs", [600, 300])
def test_both_aurocs_are_of_the_answers_that_both_have_scores_for(n_ours, n_theirs):
    n = len(LABELS)
    labels, scores = LABELS, LABELS + NOISE
    scores[0, n_ours:], scores[1, : n - n_theirs] = np.nan, np.nan
    lead = lead_of(scores)
    common = slice(n - n_theirs, n_ours)
    expected = [auroc_of(x[common], labels[common]).value for x in scores]
    if n_ours < n and n_theirs < n:  # the rows hold neither
        expected = [None, None]
    assert list(lead.aurocs) == pytest.approx(expected)
    assert lead.n == len(labels[common])


def test_the_correction_covers_all_columns_of_both_settings():
    columns = [
        column(eval_set, setting, tfidf=(0.8, 0.02))
        for setting in SETTINGS
        for eval_set in (POOLED, OUTSIDE)
    ]
    compared = leads_of(sum(columns, []))
    assert [lead.p_holm for lead in compared] == [0.08] * 4
    assert not any(lead.is_sure for lead in compared)
    (alone,) = leads_of(columns[0])
    assert alone.is_sure


def test_an_undefined_difference_is_left_out_of_the_correction():
    rows = column(POOLED, hidden_only=(0.8, 0.02))
    champion, _, gain = column(OUTSIDE, hidden_only=(0.8, 0.02))
    first, second = leads_of([*rows, champion, undefined(gain)], "hidden_only")
    assert (first.p_holm, second.p_holm) == (0.02, None)
    assert "n/a (one class only)" in cells_of(second)
    assert lead_counts([first, second])["Columns compared"] == "1"


def test_a_significant_lag_is_counted_as_a_lag():
    numbers = lead_counts(leads_of(column(POOLED, tfidf=(0.95, 0.001))))
    leads_name = "Significant leads (Holm p < .05)"
    assert (numbers[leads_name], numbers["Significant lags"]) == ("0", "1")


def test_single_in_domain_sets_have_no_column_next_to_their_pool():
    places = [lead.place for lead in leads(sample_results(), "strongest")]
    assert len(places) == 8
    assert {p.dataset for p in places if p.split == "test"} == {IN_DOMAIN}
    assert all(p.split != "validation" for p in places)


def test_the_spread_of_seeds_is_shown_with_the_interval_of_questions():
    rows = column(POOLED, tfidf=(0.8, 0.02))
    for seed, value in enumerate((0.89, 0.9, 0.91)):
        rows.append(msgspec.structs.replace(rows[0], seed=str(seed), value=value))
    (lead,) = leads_of(rows)
    assert lead.seeds_sd == pytest.approx(0.01)
    assert cells_of(lead)[-1] == ".010, questions ±.030"


def test_markdown_and_latex_have_every_column_and_mark_what_is_significant():
    results = results_of(column(POOLED, tfidf=(0.8, 0.002), hidden_only=(0.85, 0.5)))
    markdown, latex = leads_as_markdown(results), leads_as_latex(results)
    assert markdown.count("| Closed-book, all in-domain |") == 2
    assert "| **.002** |" in markdown and "| .5 |" in markdown
    assert latex.count(r"\toprule") == 2 and r"\textbf{.002}" in latex
    assert "†" not in latex


@pytest.mark.parametrize("strength", [1.0, 0.0, -0.9])
def test_a_planted_lead_or_lag_is_significant_and_a_tie_is_not(strength):
    """The champion sees more of the truth than its rival by so much."""
    lead = lead_of(LABELS * np.array([[1.0 + strength], [1.0]]) + NOISE)
    assert lead.is_sure == bool(strength)
    assert not lead.is_sure or np.sign(lead.difference.value) == np.sign(strength)


RESULTS = sample_results()


def test_a_damaged_record_of_costs_says_what_writes_it_again(tmp_path):
    path = tmp_path / "detectors.json"
    path.write_text('[{"name": "x"}]')
    with pytest.raises(ValueError, match="beatrice baselines"):
        read_costs(path)


def test_costs_are_sorted_by_auroc_with_unmeasured_ones_last():
    unknown = msgspec.structs.replace(JUDGED[0], name="nobody")
    ranked = detectors_by_auroc([unknown, *JUDGED], RESULTS)
    aurocs = [auroc for _, auroc in ranked]
    assert aurocs[-1] is None
    assert aurocs[:-1] == sorted(aurocs[:-1], reverse=True)


def closed_book_costs(costs):
    """Return the cells of the closed-book table by title and head."""
    cells = cost_tables(costs, RESULTS)["Closed-book"]
    return {line[0]: dict(zip(COST_HEADS, line, strict=True)) for line in cells}


def test_every_setting_has_a_table_with_its_costs_and_reasons():
    broken = msgspec.structs.replace(JUDGED[0], reason="one class")
    costs = [broken, *JUDGED[1:]]
    assert list(cost_tables(costs, RESULTS)) == ["Closed-book", "With context"]
    lines = closed_book_costs(costs)
    assert lines["Rival perplexity"][COST_HEADS[-1]].endswith("; one class")
    assert lines["Rival answer_length"]["Extra forward passes"] == "2"
    assert lines["Rival answer_length"]["Peak memory"] == "1.0 GiB"
    assert lines["Rival tfidf"]["Peak memory"] == "–"
    assert lines["Rival answer_length"]["Needs"] == "drawn answers"
    assert lines["Rival tfidf"]["Needs"] == "training labels"
    markdown = costs_as_markdown(JUDGED, RESULTS)
    assert markdown.count("### Cost per question") == 2
    assert costs_as_markdown([], RESULTS) == ""


@pytest.mark.parametrize(
    ("value", "seconds", "tokens"),
    [
        (0.0, "0", "0"),
        (0.0000123, "0.000012", "0.0000123"),
        (0.25, "0.25", "0.25"),
        (123.4, "120", "123"),
        (1000.0, "1000", "1000"),
    ],
)
def test_a_cost_has_no_exponent(value, seconds, tokens):
    cost = msgspec.structs.replace(JUDGED[0], seconds=value, n_new_tokens=value)
    line = closed_book_costs([cost])[cost.title]
    assert (line["Seconds per question"], line["Extra tokens"]) == (seconds, tokens)


def test_a_figure_is_drawn_only_if_costs_differ():
    pictures = cost_pictures(JUDGED, RESULTS, SELECTION)
    assert len(pictures) == 6
    same = [msgspec.structs.replace(x, n_forwards=1) for x in JUDGED]
    titles = [p.title for p in cost_pictures(same, RESULTS, SELECTION)]
    assert len(titles) == 4 and not any("forward" in title for title in titles)
    assert cost_pictures([], RESULTS, SELECTION) == []
    for picture in pictures:
        assert "Rival tfidf" in picture.svg and "BEATRICE" in picture.svg
        assert ("Time is measured" in picture.caption) == ("seconds" in picture.title)


@pytest.mark.parametrize("names", [["[HP]", "(A)"], ["[HP]", "[A]"]])
def test_one_pass_gives_all_signals_if_no_member_reads_closed_book_answers(names):
    selection = SELECTION | {"with_context": {"selected": names}}
    pictures = cost_pictures(JUDGED, RESULTS, selection)
    assert len(pictures) == 6
    for picture in pictures:
        is_one = picture.title.startswith("Closed") or "(A)" not in names
        assert ("the pass that gave the answer" in picture.caption) == is_one
        assert ("one more generation" in picture.caption) != is_one
        assert ("with-context pass only" in picture.svg) != is_one


@pytest.mark.parametrize(
    ("field", "head", "word"),
    [
        ("seconds", "Seconds per question", "seconds"),
        ("n_new_tokens", "Extra tokens", "tokens generated"),
    ],
)
def test_an_unmeasured_cost_has_a_dash_and_no_point(field, head, word):
    first, *others = JUDGED
    unmeasured = [msgspec.structs.replace(first, **{field: None}), *others]
    assert closed_book_costs(unmeasured)[first.title][head] == "–"
    pictures = cost_pictures(unmeasured, RESULTS, SELECTION)
    assert len(pictures) == 6
    for picture in pictures:
        is_without = word in picture.title and "Closed" in picture.title
        assert (first.title in picture.svg) != is_without
        assert ("has no point" in picture.caption) == (
            is_without or "seconds" in picture.title
        )


def test_a_detector_of_drawn_answers_counts_as_sampled_even_if_trained():
    cost = msgspec.structs.replace(JUDGED[0], is_trained=True)
    assert kind_of(cost) == "trained"
    assert kind_of(msgspec.structs.replace(cost, needs=("samples",))) == "sampled"


def test_rivals_are_named_by_their_titles():
    assert titles_of(JUDGED)[Subject("tfidf")] == "Rival tfidf"
    compared = leads(RESULTS, "strongest")
    titles = {lead.rival: f"Rival {lead.rival.detector}" for lead in compared}
    named = [cells_of(lead, titles)[1].startswith("Rival ") for lead in compared]
    assert named == [True] * 8
    assert "Rival" not in str([cells_of(lead) for lead in compared])

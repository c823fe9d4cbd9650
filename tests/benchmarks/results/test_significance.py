import numpy as np
import pytest

from beatrice.benchmarks.baselines.detector import is_rival
from beatrice.benchmarks.results.names import DETECTORS, RIVALS
from beatrice.benchmarks.results.rivals import (
    cells_of,
    holm,
    lead_counts,
    leads,
    leads_as_latex,
    leads_as_markdown,
)
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import Subject
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from tests.benchmarks.results.sample import POOLED, row, sample_results, undefined
from tests.benchmarks.rows import rows_of

OUTSIDE = ("places", "ood")


def test_holm_gives_the_textbook_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def column(eval_set, rivals, champion=0.9, setting="closed_book"):
    """One set: the AUROC of each rival, and p of the lead over it."""
    rows = [row("champion", setting, eval_set, "auroc", champion)]
    for name, (auroc, p_value) in rivals.items():
        rows.append(row(name, setting, eval_set, "auroc", auroc))
        if p_value is not None:
            fields = dict(experiment="paired", rival=name, p_value=p_value)
            gain = champion - auroc
            rows.append(row("champion", setting, eval_set, "auroc", gain, **fields))
    return rows


def leads_of(rows, against="strongest"):
    return leads(results_of(rows), against)


def rivals(compared):
    return [lead.rival.detector for lead in compared]


def test_the_strongest_rival_is_chosen_anew_in_each_column():
    rows = column(POOLED, {"tfidf": (0.8, 0.01), "perplexity": (0.7, 0.01)})
    rows += column(OUTSIDE, {"tfidf": (0.6, 0.01), "perplexity": (0.7, 0.02)})
    assert rivals(leads_of(rows)) == ["tfidf", "perplexity"]


def test_all_that_the_run_measures_by_itself_is_compared_with_the_selected_set():
    # The same score for every answer has half of everything, and is no rival.
    assert {x for x in DETECTORS if is_rival(x.detector)} <= set(RIVALS)


def test_own_encoders_and_controls_are_no_rivals():
    names = "champion hidden_only encoder late_fusion_all majority permuted_labels"
    assert not any(map(is_rival, names.split())) and is_rival("probe")
    rows = column(POOLED, {"hidden_only": (0.89, 0.5), "tfidf": (0.6, 0.01)})
    assert rivals(leads_of(rows)) == ["tfidf"]
    assert rivals(leads_of(rows, "hidden_only")) == ["hidden_only"]


def test_a_stronger_detector_without_a_pair_is_named_and_not_passed_over_in_silence():
    rows = column(POOLED, {"sep": (0.95, None), "tfidf": (0.6, 0.01)})
    (lead,) = leads_of(rows)
    assert (lead.rival, lead.uncompared) == (Subject("tfidf"), (Subject("sep"),))
    assert "sep" in lead_counts([lead]).values()


def test_the_correction_runs_over_all_columns_of_both_settings():
    rows = []
    for setting in ("closed_book", "with_context"):
        for eval_set in (POOLED, OUTSIDE):
            rows += column(eval_set, {"tfidf": (0.8, 0.02)}, setting=setting)
    compared = leads_of(rows)
    assert [lead.p_holm for lead in compared] == [0.08] * 4
    assert not any(lead.is_sure for lead in compared)
    (alone,) = leads_of(column(POOLED, {"tfidf": (0.8, 0.02)}))
    assert alone.is_sure


def test_an_undefined_difference_takes_no_part_in_the_correction():
    rows = column(POOLED, {"hidden_only": (0.8, 0.02)})
    gone = undefined(column(OUTSIDE, {"hidden_only": (0.8, 0.02)})[-1])
    first, second = leads_of([*rows, *column(OUTSIDE, {}), gone], "hidden_only")
    assert (first.p_holm, second.p_holm) == (0.02, None)
    assert "n/a (one class only)" in cells_of(second)
    assert lead_counts([first, second])["Columns compared"] == "1"


def test_a_lag_is_as_sure_as_a_lead_and_counted_as_a_lag():
    numbers = lead_counts(leads_of(column(POOLED, {"tfidf": (0.95, 0.001)})))
    assert (numbers["Sure leads (p < .05)"], numbers["Sure lags"]) == ("0", "1")


def test_single_in_domain_sets_are_no_columns_beside_their_pool():
    places = [lead.place for lead in leads(sample_results(), "strongest")]
    assert len(places) == 8
    assert {p.dataset for p in places if p.split == "test"} == {IN_DOMAIN}
    assert all(p.split != "validation" for p in places)


def test_seeds_stand_beside_the_questions():
    rows = column(POOLED, {"tfidf": (0.8, 0.02)})
    for seed, value in enumerate((0.89, 0.9, 0.91)):
        fields = dict(seed=str(seed))
        rows.append(row("champion", "closed_book", POOLED, "auroc", value, **fields))
    (lead,) = leads_of(rows)
    assert lead.seeds_sd == pytest.approx(0.01)
    assert cells_of(lead)[-1] == ".010, questions ±.030"


def test_both_spellings_have_every_column_and_mark_what_is_sure():
    rows = column(POOLED, {"tfidf": (0.8, 0.002), "hidden_only": (0.85, 0.5)})
    markdown, latex = (
        spell(results_of(rows)) for spell in (leads_as_markdown, leads_as_latex)
    )
    assert markdown.count("| Closed-book, all in-domain |") == 2
    assert "| **.002** |" in markdown and "| .5 |" in markdown
    assert latex.count(r"\toprule") == 2 and r"\textbf{.002}" in latex
    assert "†" not in latex


def planted(strength, seed=0):
    """Rows of a run whose champion sees more of the truth than its rival by so much."""
    n, draws = 600, np.random.default_rng(seed)
    labels = draws.random(n) < 0.5
    noise = draws.normal(size=(2, n))
    scores = labels * np.array([[1.0 + strength], [1.0]]) + noise
    rows = rows_of(labels, splits=["test"] * n)
    names = ("champion", "tfidf")
    scored = [
        Scored(name=x, scores=s[None]) for x, s in zip(names, scores, strict=True)
    ]
    config = BootstrapConfig(n_resamples=1000, seed=0)
    return detection_rows(scored, rows, config, pairs={"paired": [names]})


def test_a_planted_lead_is_sure_and_equals_are_not():
    (lead,) = leads_of(planted(1.0))
    assert lead.is_sure and lead.difference.value > 0
    (equal,) = leads_of(planted(0.0))
    assert not equal.is_sure
    (lag,) = leads_of(planted(-0.9))
    assert lag.is_sure and lag.difference.value < 0

import collections
import tomllib
from pathlib import Path

import pytest

from beatrice.benchmarks.paper.ledger import (
    Difference,
    as_markdown,
    beside,
    read_ledger,
)
from beatrice.extract.records import IN_DOMAIN
from tests.benchmarks.results.sample import row

ROOT = Path(__file__).parents[3]
# How many numerals the LaTeX of each table has; counted by a reader that knows no
# columns, when the tables were transcribed.
N_NUMBERS = {
    "main-detection": 169,
    "ablation": 107,
    "label-dist": 69,
    "appendix-detection": 231,
    "appendix-detection-ctx": 329,
    "significance": 40,
    "champion-vs-hidden": 40,
    "span-ablation": 56,
    "textonly-control": 51,
    "anatomy-flip-profile": 64,
    "anatomy-grounding": 18,
    "realrag-detection": 329,
    "realrag-detection-gemma": 329,
    "pgir-application": 120,
    "case-studies": 11,
    "gemma-detection": 185,
    "gemma-pgir": 120,
}
# Numbers that only the anatomy's text and captions print, counted as read and again
# among all numerals of those sections; and what is said of an order without a number.
N_IN_TEXT = {
    "fig:complementarity": 2,
    "fig:signal-synergy": 2,
    "fig:combination-search": 3,
    "fig:gemma-combination-search": 4,
    "sec:anatomy": 3,
    "app:span": 4,
    "fig:layer-sweep": 1,
    "fig:boundary-band": 8,
    "app:anatomy-signals": 1,
    "fig:cross-model-synergy, top": 2,
    "fig:cross-model-synergy, bottom": 4,
    "fig:attention-heads": 5,
    "app:cases": 1,
}
N_ORDERS = {"fig:complementarity": 8, "fig:boundary-band": 8, "fig:attention-heads": 1}
RANKED = ("auroc", "auprc", "em", "f1")
UNRANKED_ROWS = ("Random AUPRC (error rate)", "Late fusion (all)")
CELLS = read_ledger()


def of(table, *metrics):
    return [c for c in CELLS if c.table == table and c.metric in metrics]


def test_every_table_of_the_paper_is_there_with_all_its_numbers():
    printed = collections.Counter(c.table for c in CELLS if c.value is not None)
    assert printed == N_NUMBERS | N_IN_TEXT
    assert collections.Counter(c.table for c in CELLS if c.value is None) == N_ORDERS


def test_no_two_lines_are_the_same_number_of_the_paper():
    places = [(c.table, c.backbone, c.row, c.column, c.metric) for c in CELLS]
    assert len(set(places)) == len(places)


def test_the_wheel_takes_the_ledger_along():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    taken = project["tool"]["setuptools"]["package-data"]["beatrice.benchmarks.paper"]
    assert "paper.jsonl" in taken


def test_what_the_paper_marks_as_best_and_second_is_so_in_every_column():
    columns = collections.defaultdict(list)
    for cell in CELLS:
        if cell.metric in RANKED and cell.row not in UNRANKED_ROWS:
            columns[cell.table, cell.column, cell.metric].append(cell)
    n_checked = 0
    for place, own in columns.items():
        marked = collections.defaultdict(set)
        for cell in own:
            marked[cell.mark].add(cell.value)
        first, second, *_ = [*sorted({c.value for c in own}, reverse=True), None]
        if marked["bold"]:
            n_checked += 1
            assert marked["bold"] == {first}, place
        if marked["underlined"]:
            assert marked["underlined"] == {second}, place
    assert n_checked == 16 + 16 + 14 + 14 + 8 + 14 + 14 + 14 + 16 + 14


@pytest.mark.parametrize("panorama", ["appendix-detection", "appendix-detection-ctx"])
def test_the_main_table_repeats_the_panoramas(panorama):
    def by_place(cells):
        return {(c.setting, c.dataset, c.detector, c.metric): c.value for c in cells}

    whole = by_place(of(panorama, "auroc", "auprc"))
    main = by_place(of("main-detection", "auroc", "auprc"))
    shared = main.keys() & whole.keys()
    assert len(shared) > 70
    assert {key: main[key] for key in shared} == {key: whole[key] for key in shared}


def test_the_auprc_of_guessing_is_the_share_of_wrong_answers():
    right = {
        (c.setting, c.dataset, c.split): c.value
        for c in of("label-dist", "accuracy_percent")
        if c.variant == "original"
    }
    guessing = [c for c in CELLS if c.detector == "majority" and c.metric == "auprc"]
    checked = [c for c in guessing if c.split is not None]
    assert len(checked) == 14
    for cell in checked:
        share = 1 - right[cell.setting, cell.dataset, cell.split] / 100
        assert cell.value == pytest.approx(share, abs=0.0021), cell


@pytest.mark.parametrize("table", ["pgir-application", "gemma-pgir"])
def test_macro_is_the_mean_of_the_six_sets(table):
    for name in {cell.row for cell in of(table, "em")}:
        for metric in ("em", "f1"):
            own = [c for c in of(table, metric) if c.row == name]
            *sets, macro = [cell.value for cell in own]
            assert len(sets) == 6
            assert macro == pytest.approx(sum(sets) / 6, abs=0.001)


def test_a_difference_is_that_of_the_two_aurocs_beside_it():
    own = collections.defaultdict(dict)
    for cell in of("champion-vs-hidden", "auroc", "auroc_difference"):
        own[cell.row][cell.column] = cell.value
    for aurocs in own.values():
        gain = aurocs["Champion"] - aurocs["Hidden only"]
        assert gain == pytest.approx(aurocs["Difference (95% CI)"], abs=0.0016)


def found_of(rows, accuracy=()):
    return {
        (b.paper.table, b.paper.row, b.paper.column, b.paper.metric): b
        for b in beside(CELLS, rows, accuracy)
    }


def test_a_run_stands_beside_the_same_detector_set_setting_and_metric_only():
    place = ("popqa", "ood")
    found = found_of([row("champion", "closed_book", place, "auprc", 0.25)])
    assert {key[2:] for key in found} == {
        ("Closed-book, PopQA", "auprc"),
        ("PopQA", "auprc"),
    }
    assert {b.paper.value for b in found.values()} == {0.976, 0.993}
    assert {b.value for b in found.values()} == {0.25}
    rows = [row("encoder:P", "closed_book", place, "auprc", 0.25)]
    assert found_of(rows) == {}


def test_a_set_that_the_paper_held_out_may_be_in_domain_and_a_note_says_so():
    at = ("main-detection", "BEATRICE", "With context, NQ", "auroc")
    inside = row("champion", "with_context", ("nq", "test"), "auroc", 0.7)
    outside = row("champion", "with_context", ("nq", "ood"), "auroc", 0.6)
    assert found_of([inside])[at].split == "test"
    assert found_of([inside, outside])[at].value == 0.6
    told = as_markdown(CELLS, beside(CELLS, [inside], ()), [])
    assert "* With context, NQ: in-domain here, held out in the paper; 398 a" in told


def test_the_in_domain_sets_together_are_never_taken_for_held_out_ones():
    place = (IN_DOMAIN, "ood")
    assert found_of([row("champion", "closed_book", place, "auroc", 0.7)]) == {}


def test_an_undefined_number_is_shown_as_such_and_one_of_a_single_seed_not_at_all():
    place = ("triviaqa", "ood")
    gone = row("tfidf", "closed_book", place, "auroc", None, reason="one class only")
    told = as_markdown(CELLS, beside(CELLS, [gone], ()), [])
    assert "| TF-IDF + logistic regr. | .643 → n/a |" in told
    seed = row("tfidf", "closed_book", place, "auroc", 0.6, seed="1")
    assert beside(CELLS, [seed], ()) == []


def test_a_gain_stands_beside_the_papers_with_its_interval():
    fields = dict(experiment="paired", against="hidden_only", p_value=0.5)
    fields |= dict(ci_low=-0.01, ci_high=0.03)
    place = ("nq", "ood")
    gain = row("champion", "with_context", place, "auroc_difference", 0.01, **fields)
    told = as_markdown(CELLS, beside(CELLS, [gain], ()), [])
    assert "| With context, NQ | +.016†/+.005/+.027 → +.010/-.010/+.030 |" in told


def test_accuracy_of_all_in_domain_sets_counts_every_answer_of_the_wording():
    counts = [("hotpotqa", "original", 100, 30), ("musique", "original", 300, 30)]
    counts += [("hotpotqa", "rewritten", 100, 90)]
    names = ("dataset", "variant", "n", "n_correct")
    accuracy = [
        dict(zip(names, own, strict=True), setting="with_context", split="test")
        for own in counts
    ]
    found = found_of([], accuracy)
    at = ("label-dist", "Test, All", "With-context, Orig. (%)", "accuracy_percent")
    assert found[at].value == 15.0
    at = (at[0], "Test, HotpotQA", "With-context, Rewr. (%)", at[3])
    assert found[at].value == 90.0


def test_every_table_is_told_of_with_what_differs_first():
    differing = [Difference(what="Backbone", paper="Qwen", here="embedded")]
    told = as_markdown(CELLS, [], differing)
    assert "| Backbone | Qwen | embedded |" in told
    for table, n in N_NUMBERS.items():
        assert f"* tab:{table}, {n} numbers: " in told

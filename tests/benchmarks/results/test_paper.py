"""The paper's numbers: as printed, compared with a run's, and whether orders agree."""

import collections

import pytest

from beatrice.benchmarks.results.names import ALL_SETS, RETRIEVED
from beatrice.benchmarks.results.paper import (
    OF_AN_INTERVAL,
    PAPER,
    PaperCell,
    as_markdown,
    experiments_differ,
    ledger,
    paper_pairs,
    read_ledger,
    signs,
    signs_by_table,
    verdict_counts,
    with_summaries,
)
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import ACROSS_SETS, IN_DOMAIN
from beatrice.extract.run.rows import encoder
from beatrice.pgir.controllers import CONTROLLERS
from tests.benchmarks.results.sample import anatomy_rows, row, undefined
from tests.records import a_label, an_example

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
    "fig:gemma-combination-search": 5,
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
# The figure of contributions, and so the text, has only those with context.
N_ORDERS = {"fig:complementarity": 8, "fig:boundary-band": 4, "fig:attention-heads": 1}
RANKED = ("auroc", "auprc", "em", "f1")
UNRANKED_ROWS = ("Random AUPRC (error rate)", "Late fusion (all)")
# Controllers that have another name in the paper.
OTHER_TITLES = {
    "No-RAG": "Never retrieve",
    "Vanilla RAG": "Always retrieve once",
    "PGIR (ours)": "PGIR",
}
CELLS = read_ledger()


def test_the_ledger_has_all_numbers_of_every_table_of_the_paper():
    printed = collections.Counter(c.table for c in CELLS if c.value is not None)
    assert printed == N_NUMBERS | N_IN_TEXT
    assert collections.Counter(c.table for c in CELLS if c.value is None) == N_ORDERS


def place(cell, row=None):
    """Return what distinguishes a number of the paper from all others."""
    return cell.table, cell.backbone, row or cell.row, cell.column, cell.metric


PLACES = {place(cell) for cell in CELLS}


def test_no_number_of_the_paper_has_two_lines():
    assert len(PLACES) == len(CELLS)


def test_every_table_uses_a_set_as_the_paper_does():
    uses = {(c.dataset, c.split) for c in CELLS if c.split in ("test", "ood")}
    splits = collections.Counter(name for name, _ in uses if name not in ACROSS_SETS)
    assert set(splits.values()) == {1}, splits


def test_numbers_marked_best_and_second_are_so_in_every_column():
    columns = collections.defaultdict(list)
    for cell in CELLS:
        if cell.metric in RANKED and cell.row not in UNRANKED_ROWS:
            columns[cell.table, cell.column, cell.metric].append(cell)
    n_checked = 0
    for column, cells in columns.items():
        first, second, *_ = [*sorted({c.value for c in cells}, reverse=True), None]
        bold = {c.value for c in cells if c.mark == "bold"}
        assert bold in ({first}, set()), column
        n_checked += len(bold)
        underlined = {c.value for c in cells if c.mark == "underlined"}
        assert underlined in ({second}, set()), column
    assert n_checked == 16 + 16 + 14 + 14 + 8 + 14 + 14 + 14 + 16 + 14


def matches_of(*rows, accuracy=()):
    return {
        (b.paper.table, b.paper.row, b.paper.column, b.paper.metric): b
        for b in paper_pairs(CELLS, results_of(rows), accuracy)
    }


def page_of(*rows):
    return as_markdown(CELLS, paper_pairs(CELLS, results_of(rows)), [])


def test_a_run_is_compared_only_by_the_same_detector_set_setting_and_metric():
    eval_set = ("popqa", "ood")
    matches = matches_of(row("champion", "closed_book", eval_set, "auprc", 0.25))
    assert {key[2:] for key in matches} == {
        ("Closed-book, PopQA", "auprc"),
        ("PopQA", "auprc"),
    }
    assert {b.paper.value for b in matches.values()} == {0.976, 0.993}
    assert {b.value for b in matches.values()} == {0.25}
    assert not matches_of(row(encoder("P"), "closed_book", eval_set, "auprc", 0.25))


def test_every_controller_of_the_paper_is_compared_with_the_runs_own():
    for table in ("pgir-application", "gemma-pgir"):
        cells = [cell for cell in CELLS if cell.table == table]
        assert all(cell.has_counterpart for cell in cells), table
        for cell in cells:
            title = CONTROLLERS[cell.detector]
            assert title == OTHER_TITLES.get(cell.row, cell.row)
    done = row("dragin", "both", ("popqa", "ood"), "em", 0.25, experiment="controller")
    assert {key[:3] for key in matches_of(done)} == {
        ("pgir-application", "DRAGIN", "PopQA"),
        ("gemma-pgir", "DRAGIN", "PopQA"),
    }
    absent = "* tab:gemma-pgir, 120 numbers: this run has no rows of `beatrice control`"
    assert absent in page_of() and absent not in page_of(done)


def test_detectors_on_retrieved_passages_are_compared_with_the_papers():
    at = "with_context", (ALL_SETS, "ood"), "auroc"
    fields = {"experiment": RETRIEVED, "ci_low": 0.6, "ci_high": 0.9}
    ours, rival = (row(x, *at, 0.8, **fields) for x in ("champion", "saplma_mean"))
    key = "realrag-detection", "SAPLMA (mean)", "All", "auroc"
    assert matches_of(rival)[key].value == 0.8
    assert not matches_of(row("saplma_mean", *at, 0.8))  # of gold passages
    fields |= {"experiment": f"{RETRIEVED}_paired", "p_value": 0.01}
    gain = row("champion", *at, 0.05, rival="saplma_mean", **fields | {"ci_low": 0.01})
    (sign,) = signs_by_table(CELLS, results_of([ours, rival, gain]))[key[0]]
    assert sign.is_paired and sign.verdict == "agrees"
    page = page_of(rival)
    assert "| SAPLMA (mean) | .852 → .800 |" in page and "questions in the" not in page
    assert "329 numbers: this run has no rows of `beatrice transfer`" in page_of(gain)


def test_a_note_says_if_a_set_held_out_by_the_paper_is_in_domain_here():
    at = ("main-detection", "BEATRICE", "With context, NQ", "auroc")
    inside = row("champion", "with_context", ("nq", "test"), "auroc", 0.7)
    outside = row("champion", "with_context", ("nq", "ood"), "auroc", 0.6)
    assert matches_of(inside)[at].row.split == "test"
    assert matches_of(inside, outside)[at].value == 0.6
    note = "* With context, NQ: in-domain here, held out in the paper; 398 a"
    assert note in page_of(inside)


def test_pooled_in_domain_sets_never_count_as_held_out():
    pooled = row("champion", "closed_book", (IN_DOMAIN, "ood"), "auroc", 0.7)
    assert not matches_of(pooled)


def test_undefined_numbers_are_shown_and_those_of_single_seeds_are_not():
    eval_set = ("triviaqa", "ood")
    gone = undefined(row("tfidf", "closed_book", eval_set, "auroc", 0.5))
    assert "| TF-IDF + logistic regr. | .643 → n/a |" in page_of(gone)
    assert not matches_of(row("tfidf", "closed_book", eval_set, "auroc", 0.6, seed="1"))


def test_a_gain_is_shown_with_its_interval_next_to_the_papers():
    fields = dict(experiment="paired", rival="hidden_only", p_value=0.5)
    fields |= dict(ci_low=-0.01, ci_high=0.03)
    gain = row("champion", "with_context", ("nq", "ood"), "auroc", 0.01, **fields)
    line = "| With context, NQ | +.016†/+.005/+.027 → +.010/-.010/+.030 |"
    assert line in page_of(gain)
    fields |= dict(rival="selfcheck_nli", p_value=0.0004, n_failed=3)
    gain = row("champion", "closed_book", (IN_DOMAIN, "test"), "auroc", 0.01, **fields)
    page = page_of(gain)
    assert "+.060 → +.010/-.010/+.030 | .007 → .0004 |" in page
    assert "up to 3 here without a label or a score" in page


def test_an_end_that_the_paper_prints_as_below_zero_stays_so():
    fields = dict(experiment="paired", rival="hidden_only", ci_low=0.001, ci_high=0.02)
    gain = row("champion", "closed_book", ("popqa", "ood"), "auroc", 0.01, **fields)
    assert "| +.007/-.000/+.014 → +.010/+.001/+.020 |" in page_of(gain)


def test_accuracy_of_all_in_domain_sets_counts_every_answer_of_the_wording():
    about = dict(setting="with_context", split="test")
    accuracy = [
        about | dict(dataset="hotpotqa", variant="original", n=100, n_correct=30),
        about | dict(dataset="musique", variant="original", n=300, n_correct=30),
        about | dict(dataset="hotpotqa", variant="rewritten", n=100, n_correct=90),
    ]
    matches = matches_of(accuracy=accuracy)
    for line, wording, percent in (("All", "Orig.", 15), ("HotpotQA", "Rewr.", 90)):
        at = f"Test, {line}", f"With-context, {wording} (%)", "accuracy_percent"
        assert matches["label-dist", *at].value == percent


def test_only_differences_between_the_experiments_are_listed():
    at = dict(table="t", backbone="b", row="r", column="c", detector="backbone")
    splits = ("train", "validation", "test", "ood")
    cells = [
        PaperCell(metric="n", value=2, dataset="a", split=x, setting="both", **at)
        for x in splits
    ]
    examples = [an_example(dataset="a", split=x) for x in 2 * splits]
    here = {"Backbone": "b", **PAPER}
    assert experiments_differ(here, cells, examples) == []
    facts = experiments_differ(here | {"Training seeds": "1"}, cells, examples[1:])
    assert facts == [
        ("Training seeds", "3", "1"),
        ("Questions, training", "a 2", "a 1"),
    ]


def test_the_page_lists_what_differs_and_every_table():
    differing = [("Backbone", "Qwen", "embedded")]
    page = as_markdown(CELLS, [], differing)
    assert "| Backbone | Qwen | embedded |" in page
    for table, n in N_NUMBERS.items():
        assert f"* tab:{table}, {n} numbers: " in page


# Whether orders agree.

ANATOMY = [c for c in CELLS if c.experiment not in (None, RETRIEVED) or c.reason]


def of_run(experiment, name, metric, value, low=None, high=None, **changes):
    fields = dict(experiment=experiment, ci_low=low, ci_high=high, n=100) | changes
    eval_set = fields.pop("dataset", IN_DOMAIN), fields.pop("split", "test")
    return row(name, "with_context", eval_set, metric, value, **fields)


def flips(family, value, half=0.01, families="HPRA"):
    ends = value - half, value + half
    name, fields = encoder(families), {"family": family}
    return of_run("anatomy_flips", name, "flip_rate", value, *ends, **fields)


def only(rows, cells=CELLS):
    results = results_of(rows)
    compared = signs(paper_pairs(cells, results), results)
    return {(s.first.paper.row, s.first.paper.backbone): s for s in compared}


def summaries(rows):
    added = with_summaries(results_of(rows))["row"]
    return [r for r in added if r.experiment == "anatomy_summary"]


def test_every_number_of_the_anatomy_has_a_row_of_ours_or_a_reason():
    tables = {c.table for c in ANATOMY}
    of_anatomy = [c for c in CELLS if c.table in tables]
    assert len(of_anatomy) == 64 + 18 + 11 + 41 + 13
    for cell in of_anatomy:
        assert cell.has_counterpart != (cell.reason is not None), cell


def test_a_number_is_compared_with_another_of_the_same_table():
    compared = {place(c, c.than) for c in CELLS if c.than is not None}
    # 36 + 20 of ablations, 20 + 9 + 12 of the anatomy, 4 of real retrieval.
    assert len([c for c in CELLS if c.than is not None]) == 101
    assert compared <= PLACES


def test_rows_of_every_analysis_that_the_paper_has_find_their_numbers():
    matches = paper_pairs(ANATOMY, with_summaries(results_of(anatomy_rows())))
    lacking = {c.table for c in ANATOMY} - {b.paper.table for b in matches}
    assert lacking == {"case-studies", "app:cases", "fig:signal-synergy"}
    page = as_markdown(ANATOMY, matches, [])
    assert "≥ -0.6" in page and "< -0.6" not in page  # a loss of at most .6


def test_the_rank_of_the_greedy_set_among_all_sets_is_compared():
    rank = of_run("exhaustive", "greedy_three", "rank", 3, split="validation")
    page = page_of(rank)
    line = "| Rank of the greedy selection among them |"
    (ours,) = (x for x in page.splitlines() if x.startswith(line))
    assert "| 1 → 3 |" in ours
    assert "no rows of `beatrice select --exhaustive` (Rank of the greedy" in page


def test_flipped_answers_are_not_taken_for_a_sets_size():
    name, fields = encoder("HPRA"), {"family": "P", "n": 60}
    for metric, is_size in (("flip_rate", True), ("flip_precision", False)):
        page = page_of(of_run("anatomy_flips", name, metric, 0.5, **fields))
        assert ("60 answers here" in page) == is_size


def test_an_order_that_our_intervals_decide_agrees_or_differs():
    known = [flips("H", 0.6), flips("P", 0.1), flips("A", 0.8)]
    signs = only(known)
    assert signs["Prob", "Qwen3.5-9B"].verdict == "agrees"
    assert signs["Attn", "Qwen3.5-9B"].verdict == "differs"
    assert signs["Attn", "Qwen3.5-9B"].change == pytest.approx(0.2)
    _, paper, here, verdict = signs["Attn", "Qwen3.5-9B"].cells
    assert paper == ".065 against .668 (Hidden)" and verdict == "opposite to the paper"
    assert here == ".800 [.790, .810] against .600 [.590, .610]"


def test_overlapping_intervals_leave_an_order_open():
    signs = only([flips("H", 0.5, 0.1), flips("P", 0.4, 0.1)])
    assert signs["Prob", "Gemma 4 E4B"].verdict == "cannot be told"
    assert "intervals overlap" in signs["Prob", "Gemma 4 E4B"].cells[3]


def test_the_papers_own_encoder_is_used_if_a_run_has_it():
    rows = [flips("P", 0.1), flips("P", 0.2, families="HPA")]
    rate = [b for b in paper_pairs(CELLS, results_of(rows)) if b.paper.row == "Prob"]
    assert {b.value for b in rate} == {0.2}
    assert {b.value for b in paper_pairs(CELLS, results_of(rows[:1]))} == {0.1}


ABOVE_ZERO = "anatomy_backbones", "two_backbones", "spearman"
NOT_ABOVE_ZERO = "anatomy_heads", encoder("HPRA"), "moved_more_by_top_heads"


@pytest.mark.parametrize(
    ("names", "low", "high", "verdict"),
    [
        (ABOVE_ZERO, 0.1, 0.3, "agrees"),
        (ABOVE_ZERO, -0.1, 0.5, "cannot be told"),
        (ABOVE_ZERO, -0.5, -0.1, "differs"),
        (ABOVE_ZERO, None, None, "no interval"),
        # At most as much as random heads: less, or no clear difference.
        (NOT_ABOVE_ZERO, -0.2, 0.1, "agrees"),
        (NOT_ABOVE_ZERO, -0.2, -0.1, "agrees"),
        (NOT_ABOVE_ZERO, 0.1, 0.2, "differs"),
    ],
)
def test_a_number_has_the_papers_sign_if_its_interval_says_so(
    names, low, high, verdict
):
    value = 0.2 if low is None else (low + high) / 2
    results = results_of([of_run(*names, value, low, high)])
    ((sign,),) = signs_by_table(CELLS, results).values()
    assert sign.verdict == verdict
    assert ("covers zero" in sign.cells[3]) == (verdict == "cannot be told")
    assert names == ABOVE_ZERO or sign.cells[2][0] in "+-"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.001, 0.001, "agrees"),
        (-0.005, -0.002, "agrees"),  # a loss, and less than the paper's
        (-0.18, -0.12, "differs"),
        (-0.02, 0.01, "cannot be told"),
    ],
)
def test_a_loss_with_an_upper_bound_is_compared_with_that_bound(low, high, verdict):
    name, against = encoder("HPRA")._replace(span="context"), encoder("HPRA")
    value = (low + high) / 2
    row = of_run("anatomy_spans", name, "auroc", value, low, high, rival=against)
    ((sign,),) = signs_by_table(CELLS, results_of([row])).values()
    assert sign.verdict == verdict and sign.cells[1] == "≥ -0.6"
    assert ("covers the bound" in sign.cells[3]) == (verdict == "cannot be told")


def test_a_paired_difference_is_preferred_and_has_the_papers_direction():
    rows = [
        of_run("detection", name, "auroc", value, value - 0.05, value + 0.05)
        for name, value in (("champion", 0.9), ("hidden_only", 0.88))
    ]
    assert only(rows)["Hidden-only", "Qwen3.5-9B"].verdict == "cannot be told"
    name, rival = "anatomy_fusion", {"rival": "hidden_only"}
    gain = of_run(name, "champion", "auroc", 0.02, 0.01, 0.03, **rival)
    signs = only([*rows, gain])
    assert signs["Hidden-only", "Qwen3.5-9B"].verdict == "agrees"


def test_equal_numbers_of_the_paper_and_undefined_ones_are_not_compared():
    at = dict(setting="with_context", dataset=IN_DOMAIN, split="test")
    at |= dict(table="t", backbone="b", column="c", metric="auroc", value=0.5)
    cells = [
        PaperCell(row="one", detector="champion", than="two", **at),
        PaperCell(row="two", detector="tfidf", **at),
    ]
    interval = "auroc", 0.5, 0.4, 0.6
    rows = [of_run("detection", name, *interval) for name in ("champion", "tfidf")]
    assert only(rows, cells) == {}
    assert only([undefined(flips(x, 0.5)) for x in "HP"]) == {}
    assert only([flips("P", 0.5), undefined(flips("H", 0.5))]) == {}


def test_least_and_most_are_rows_with_their_own_intervals():
    name, values = "anatomy_complementarity", {"P": 0.5, "R": 0.2, "A": 0.4}
    rights = [
        of_run(name, encoder(x), "rights", value, value - 0.1, value, family="H")
        for x, value in values.items()
    ]
    table = {row.detector: row for row in summaries(rights)}
    assert (table["least_of_hidden"].value, table["most_of_hidden"].value) == (0.2, 0.5)
    assert table["least_of_hidden"].ci_low == pytest.approx(0.1)


def pair_gain(value, rival, **place):
    ends = value - 0.01, value + 0.01
    fields = dict(rival=encoder(rival)) | place
    return of_run("anatomy_pairs", encoder("PA"), "auroc", value, *ends, **fields)


def gains_in(rows):
    both = [row for row in summaries(rows) if row.setting == "both"]
    return {row.metric: row.value for row in both}


def test_the_gain_of_a_pair_is_over_its_better_member():
    pairs = {"a": (0.3, 0.1), "b": (-0.2, 0.2), "c": (0.04, 0.05)}
    gains = gains_in(
        pair_gain(value, rival, dataset=name, split="ood")
        for name, values in pairs.items()
        for rival, value in zip("PA", values, strict=True)
    )
    wanted = {"median_gain": 0.04, "gains_above_zero": 2, "gains": 3}
    assert wanted.items() <= gains.items()


def test_gains_count_in_domain_sets_only_together():
    places = ({}, {"dataset": "a"}, {"dataset": "c"}, {"dataset": "b", "split": "ood"})
    assert gains_in(pair_gain(0.1, "P", **place) for place in places)["gains"] == 2


def test_the_order_of_a_runs_rows_changes_no_verdict():
    def verdicts(rows):
        tables = signs_by_table(CELLS, results_of(rows))
        return {table: [sign.cells for sign in x] for table, x in tables.items()}

    assert verdicts(anatomy_rows()) == verdicts(anatomy_rows()[::-1])


def test_the_ledger_names_what_has_no_number_here_and_why():
    results = with_summaries(results_of(anatomy_rows()))
    numbers = paper_pairs(CELLS, results)
    compared = signs(numbers, results)
    text = as_markdown(CELLS, numbers, [], compared)
    assert "## fig:attention-heads (Qwen3.5-9B)" in text
    assert "* Here the encoder of HPRA replaces that of HPA" in text
    assert "no row names the selected encoders" in text
    counts = dict(verdict_counts(compared))
    n_opposite = int(counts["opposite to the paper"])
    assert text.count(" | opposite to the paper |") == n_opposite > 0
    assert sum(map(int, counts.values())) == len(compared)
    assert verdict_counts([]) == []


GAINS = ("significance", "champion-vs-hidden")
OTHERWISE = {  # words for what our rows measure differently, and in which lines
    "every wording": lambda c: c.setting == "with_context" and c.table in GAINS,
    "placements": lambda c: c.metric in OF_AN_INTERVAL and c.table in GAINS,
    "Wilson's": lambda c: c.metric in OF_AN_INTERVAL and "flip" in c.table,
    "five splits": lambda c: "gains" in (c.ours or "") or c.ours == "median_gain",
    "`sequences`": lambda c: (c.detector, c.metric) == ("seakr", "generations"),
    "answer only": lambda c: c.experiment == "anatomy_spans" or c.ours == "loss",
    "one half": lambda c: c.ours in ("share_of_top_heads", "moved_more_by_top_heads"),
}


@pytest.mark.parametrize("words", OTHERWISE)
def test_numbers_measured_differently_from_the_paper_say_how(words):
    cells = [cell for cell in CELLS if OTHERWISE[words](cell)]
    assert cells and all(words in (cell.departs or "") for cell in cells)


def test_only_a_run_of_several_wordings_differs_in_them():
    fields = {"experiment": "paired", "rival": "hidden_only"}
    gain = row("champion", "with_context", (IN_DOMAIN, "test"), "auroc", 0.1, **fields)
    here, labels = {"Backbone": "b", **PAPER}, {}
    for variant, n in (("original", 0), ("rewritten", 1)):
        label = a_label(True, setting="with_context", variant=variant)
        labels[label.key] = label
        text = ledger([gain], here, [an_example()], labels)
        assert text.count("* Different here: every wording of a context;") == n
        assert "the larger p of bootstrap and placements" in text

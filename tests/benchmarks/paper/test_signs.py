"""The paper's comparisons beside a run's: what agrees, what differs, what is open."""

import collections

import pytest

from beatrice.benchmarks.anatomy.parts import PARTS, anatomy_parts
from beatrice.benchmarks.paper.cells import PaperCell, beside, read_ledger
from beatrice.benchmarks.paper.ledger import as_markdown
from beatrice.benchmarks.paper.signs import in_a_sentence, signs, signs_by_table
from beatrice.benchmarks.paper.summaries import summaries
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import ResultRow
from tests.benchmarks.results.sample import anatomy_rows

CELLS = read_ledger()
TEST = dict(setting="with_context", dataset=IN_DOMAIN, split="test")
ANATOMY = [c for c in CELLS if c.experiment is not None or c.reason is not None]


def of_run(experiment, detector, metric, value, low=None, high=None, **changes):
    fields = dict(experiment=experiment, detector=detector, metric=metric, n=100)
    fields |= TEST | dict(value=value, ci_low=low, ci_high=high) | changes
    return ResultRow(**fields)


def flips(detector, value, half=0.01):
    ends = value - half, value + half
    return of_run("anatomy_flips", detector, "flip_rate", value, *ends)


def only(rows, cells=CELLS):
    found = beside(cells, rows)
    return {(s.first.paper.row, s.first.paper.backbone): s for s in signs(found, rows)}


def value_of(table, row, column, metric):
    (cell,) = (
        c
        for c in CELLS
        if (c.table, c.row, c.column, c.metric) == (table, row, column, metric)
    )
    return cell.value


@pytest.mark.parametrize(
    ("table", "row", "column", "metric", "value"),
    [
        ("anatomy-grounding", "Wrong answers present in passage", "NQ", None, 45.1),
        ("fig:cross-model-synergy, top", None, "Closed-book", "spearman", 0.78),
        ("fig:cross-model-synergy, top", None, "With context", "spearman", 0.79),
        ("fig:cross-model-synergy, bottom", None, "Closed-book, TQA", "points", 6.4),
        ("fig:attention-heads", "The eight largest", "[A]", "share_percent", 8.3),
        ("fig:boundary-band", "Resid", None, "share", 0.45),
        ("fig:layer-sweep", None, "both", "layer", 17),
    ],
)
def test_a_number_of_the_anatomy_is_the_papers(table, row, column, metric, value):
    wanted = dict(table=table, row=row, column=column, metric=metric)
    own = [
        c.value
        for c in CELLS
        if all(getattr(c, k) == v for k, v in wanted.items() if v is not None)
    ]
    assert own == [value]


def test_the_captions_losses_are_differences_of_the_tables_numbers():
    own = [c for c in CELLS if c.table == "app:span"]
    for cell in own:
        gone, whole = (
            value_of("span-ablation", row, cell.column, "auroc")
            for row in ("Answer", "None (full)")
        )
        assert cell.value == pytest.approx(gone - whole, abs=1e-9)


def test_the_precision_that_others_are_compared_with_is_the_one_in_bold():
    own = [c for c in CELLS if c.metric == "flip_precision" and c.table.endswith("ile")]
    by_place = {(c.backbone, c.row, c.column): c for c in own}
    compared = [c for c in own if c.than is not None]
    assert len(compared) == 8
    for cell in compared:
        best = by_place[cell.backbone, cell.than, cell.column]
        assert best.mark == "bold" and best.value > cell.value


def test_every_number_of_the_anatomy_has_a_row_of_ours_or_a_reason():
    tables = {c.table for c in ANATOMY}
    of_anatomy = [c for c in CELLS if c.table in tables]
    assert len(of_anatomy) == 64 + 18 + 11 + 40 + 17
    for cell in of_anatomy:
        assert cell.has_counterpart != (cell.reason is not None), cell


def test_what_is_compared_is_a_row_of_the_same_table():
    places = {(c.table, c.backbone, c.row, c.column, c.metric) for c in CELLS}
    compared = [c for c in CELLS if c.than is not None]
    assert len(compared) == 100  # 36 + 20 of ablations, 20 + 9 + 15 of the anatomy
    for c in compared:
        assert (c.table, c.backbone, c.than, c.column, c.metric) in places


def test_rows_of_every_analysis_that_the_paper_has_find_their_numbers():
    rows = anatomy_rows()
    own = beside(ANATOMY, [*rows, *summaries(rows)])
    lacking = {c.table for c in ANATOMY} - {b.paper.table for b in own}
    assert lacking == {"case-studies", "app:cases", "fig:signal-synergy"}


def test_an_order_that_our_intervals_show_agrees_or_differs():
    known = [flips("[HPRA]-H", 0.6), flips("[HPRA]-P", 0.1), flips("[HPRA]-A", 0.8)]
    found = only(known)
    assert found["Prob", "Qwen3.5-9B"].verdict == "agrees"
    assert found["Attn", "Qwen3.5-9B"].verdict == "differs"
    told = found["Attn", "Qwen3.5-9B"].sentence
    assert ".065 beside .668 (Hidden) in the paper" in told
    assert ".800 [.790, .810] beside .600 [.590, .610] here; the other way." in told


def test_overlapping_intervals_leave_an_order_open():
    found = only([flips("[HPRA]-H", 0.5, 0.1), flips("[HPRA]-P", 0.4, 0.1)])
    assert found["Prob", "Gemma 4 E4B"].verdict == "cannot be told"
    assert "intervals overlap" in found["Prob", "Gemma 4 E4B"].sentence


def test_the_papers_own_encoder_is_taken_where_a_run_has_it():
    rows = [flips("[HPRA]-P", 0.1), flips("[HPA]-P", 0.2)]
    rate = [b for b in beside(CELLS, rows) if b.paper.row == "Prob"]
    assert {b.value for b in rate} == {0.2}
    assert {b.value for b in beside(CELLS, rows[:1])} == {0.1}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.3, "agrees"),
        (-0.1, 0.5, "cannot be told"),
        (-0.5, -0.1, "differs"),
        (None, None, "no interval"),
    ],
)
def test_a_correlation_has_the_papers_sign_where_its_interval_excludes_zero(
    low, high, verdict
):
    value = 0.2 if low is None else (low + high) / 2
    rows = [of_run("anatomy_backbones", "a | b", "spearman", value, low, high)]
    (sign,) = signs_by_table(CELLS, rows)["fig:cross-model-synergy, top"]
    assert sign.verdict == verdict
    assert (": our interval covers zero" in sign.sentence) == (
        verdict == "cannot be told"
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.2, 0.1, "agrees"), (-0.2, -0.1, "agrees"), (0.1, 0.2, "differs")],
)
def test_no_more_than_random_heads_is_less_or_not_told_apart(low, high, verdict):
    middle = (low + high) / 2
    rows = [of_run("anatomy_heads", "[HPRA]", "moved more by 8", middle, low, high)]
    (sign,) = signs_by_table(CELLS, rows)["fig:attention-heads"]
    assert sign.verdict == verdict


def test_a_paired_difference_is_preferred_and_turned_the_papers_way():
    rows = [
        of_run("detection", name, "auroc", value, value - 0.05, value + 0.05)
        for name, value in (("champion", 0.9), ("hidden_only", 0.88))
    ]
    assert only(rows)["Hidden-only", "Qwen3.5-9B"].verdict == "cannot be told"
    name, against = "anatomy_fusion", {"against": "hidden_only"}
    gain = of_run(name, "champion", "auroc_difference", 0.02, 0.01, 0.03, **against)
    found = only([*rows, gain])
    assert found["Hidden-only", "Qwen3.5-9B"].verdict == "agrees"


def test_what_the_paper_has_equal_or_ours_undefined_is_not_compared():
    cells = [
        PaperCell(table="t", backbone="b", row=row, column="c", metric="auroc", **rest)
        for row, rest in (
            ("one", TEST | dict(value=0.5, detector="champion", than="two")),
            ("two", TEST | dict(value=0.5, detector="tfidf")),
        )
    ]
    rows = [
        of_run("detection", name, "auroc", 0.5, 0.4, 0.6)
        for name in ("champion", "tfidf")
    ]
    assert only(rows, cells) == {}
    hollow = [
        of_run("anatomy_flips", f"[HPRA]-{x}", "flip_rate", None, reason="no answers")
        for x in "HP"
    ]
    assert only(hollow) == {}


def test_least_most_and_middle_are_rows_with_their_own_intervals():
    rights = [
        of_run("anatomy_complementarity", f"encoder:{x}", "rights:H", v, v - 0.1, v)
        for x, v in (("P", 0.5), ("R", 0.2), ("A", 0.4))
    ]
    found = {row.detector: row for row in summaries(rights)}
    assert (found["least of H"].value, found["most of H"].value) == (0.2, 0.5)
    assert found["least of H"].ci_low == pytest.approx(0.1)
    gains = [
        of_run(
            "anatomy_pairs",
            "encoder:PA",
            "auroc_difference",
            value,
            value - 0.01,
            value + 0.01,
            against=f"encoder:{x}",
            dataset=name,
        )
        for name, pair in (("a", (0.3, 0.1)), ("b", (-0.2, 0.2)), ("c", (0.04, 0.05)))
        for x, value in zip("PA", pair, strict=True)
    ]
    found = {row.metric: row for row in summaries(gains) if row.setting == "both"}
    assert found["median gain"].value == 0.04
    assert found["gains above zero"].value == 2 and found["gains"].value == 3


def test_one_in_domain_set_is_counted_once_among_the_gains():
    one = dict(against="encoder:P")
    gains = [
        of_run("anatomy_pairs", "encoder:PA", "auroc_difference", 0.1, 0, 0.2, **place)
        for place in (one, one | {"dataset": "a"}, one | dict(dataset="b", split="ood"))
    ]
    found = {row.metric: row.value for row in summaries(gains) if row.setting == "both"}
    assert found["gains"] == 2


def test_the_order_of_a_runs_rows_changes_no_verdict():
    rows = anatomy_rows()
    first, second = (signs_by_table(CELLS, own) for own in (rows, rows[::-1]))
    assert {t: [s.sentence for s in own] for t, own in first.items()} == {
        t: [s.sentence for s in own] for t, own in second.items()
    }


def test_the_page_counts_the_verdicts_and_says_what_differs():
    rows = anatomy_rows()
    by_table = signs_by_table(CELLS, rows)
    parts = anatomy_parts(rows)
    shown = [line for part in parts for line in part.beside]
    assert len(shown) == sum(map(len, by_table.values())) > 30
    for part in parts:
        told = part.found[-1] if part.beside else ""
        for what, _, here, verdict in part.beside:
            assert "[" in here or verdict == "without an interval here", here
            name = what.rsplit(";", 1)[0] + ")"
            assert (name in told) == (verdict == "the other way"), told
    placed = [table for tables in PARTS.values() for table in tables]
    assert by_table.keys() <= set(placed) and len(set(placed)) == len(placed)


def test_the_ledger_names_what_has_no_number_here_and_why():
    rows = anatomy_rows()
    rows = [*rows, *summaries(rows)]
    found = beside(CELLS, rows)
    told = as_markdown(CELLS, found, [], signs(found, rows))
    assert "## fig:attention-heads (Qwen3.5-9B)" in told
    assert "* Here [HPRA] for [HPA]" in told
    assert "no row has which encoders are selected" in told
    counts = collections.Counter(s.verdict for s in signs(found, rows))
    assert told.count("; the other way.") == counts["differs"] > 0
    assert in_a_sentence([]) == ""

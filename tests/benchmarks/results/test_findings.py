"""What a run found, compared with rivals, the spread of its seeds and other runs."""

import collections
import dataclasses
import re

import msgspec
import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.results.evaluate import (
    choose_answers,
    decision_rows,
    reliability_of,
)
from beatrice.benchmarks.results.findings import (
    as_latex,
    as_markdown,
    best_single,
    decide,
    facts,
    findings,
    grids,
    verdicts_in_words,
)
from beatrice.benchmarks.results.page import headline
from beatrice.benchmarks.results.report import (
    Side,
    comparison,
    correlation,
    read_part,
    run_side,
)
from beatrice.benchmarks.results.shown import ShownSet
from beatrice.benchmarks.results.tables import decision_table, find, results_of
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.console import shell_line
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import encoder
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import FusionConfig
from beatrice.jaxprobe.detector import SettingHead
from beatrice.jaxprobe.families import SUBSET_NAMES
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.scope import Evidence, Validation
from beatrice.pgir.score_files import shown_tokens
from beatrice.selection.reach import Ranked, agreement, rank_correlation
from tests.benchmarks.results.sample import (
    PARTS,
    TEST,
    row,
    sample_results,
    sample_rows,
    undefined,
)
from tests.extract.generate.test_local import byte_fallback
from tests.extract.small_run import beatrice
from tests.jaxprobe.samples import rows_of
from tests.records import an_answer

ENOUGH = [a for a in PARTS["accuracy"] if a["split"] != "train"]


def difference(low, high, p_value=0.01, **fields):
    value = (low + high) / 2
    fields = dict(experiment="paired", rival="perplexity", p_value=p_value) | fields
    fields |= dict(ci_low=low, ci_high=high)
    return row("champion", "closed_book", TEST, "auroc", value, **fields)


ABOVE, BELOW, AROUND = (
    difference(*ends) for ends in ((0.01, 0.05), (-0.05, -0.01), (-0.05, 0.04))
)


@pytest.mark.parametrize(
    ("differences", "answer", "decides"),
    [
        ([ABOVE], "yes", 0),
        ([BELOW], "no", 0),
        ([AROUND], "cannot tell", 0),
        ([difference(0.0, 0.05)], "cannot tell", 0),
        # With four comparisons, one must be four times as sure.
        ([AROUND] * 3 + [difference(0.01, 0.05, 0.02)], "cannot tell", 3),
        ([AROUND] * 3 + [difference(0.01, 0.05, 0.012)], "yes", 3),
        ([AROUND] * 3 + [difference(0.01, 0.05, None)], "cannot tell", 3),
        # "No" requires every difference to be below zero.
        ([BELOW, difference(-0.04, -0.01)], "no", 1),
        ([BELOW, AROUND], "cannot tell", 1),
        # The largest difference is not significant; another one is.
        ([difference(-0.01, 0.2, 0.1), difference(0.02, 0.06, 0.001)], "yes", 1),
        ([ABOVE, difference(0.02, 0.06)], "yes", 1),
        # What was not measured or is undefined is not answered.
        ([], None, None),
        ([undefined(ABOVE)], None, 0),
        ([undefined(ABOVE), ABOVE], None, 1),
    ],
)
def test_intervals_give_the_answer_and_the_deciding_difference_is_shown(
    differences, answer, decides
):
    shown = None if decides is None else differences[decides]
    assert decide(differences) == (answer, shown)


def test_the_best_single_family_is_chosen_on_validation_not_on_test():
    at = {"hidden_only": (0.6, 0.9), encoder("P"): (0.8, 0.5)}
    at |= {encoder("R"): (0.7, 0.7), encoder("A"): (0.7, 0.7)}
    rows = [
        row(name, "closed_book", (IN_DOMAIN, split), "auroc", value)
        for name, both in at.items()
        for split, value in zip(("validation", "test"), both, strict=True)
    ]
    assert best_single(results_of(rows), "closed_book") == "P"
    assert best_single(results_of(rows[2:]), "closed_book") is None


def test_every_question_is_answered_on_every_set_that_has_its_rows():
    all_findings = findings(sample_results(), ENOUGH)
    places = {f.place for f in all_findings}
    assert {split for _, _, split in places} == {"test", "ood"}
    assert len(places) == 8  # two settings of one set and three held out
    unanswered = {f.question for f in all_findings if f.answer is None}
    assert unanswered == {"layer_over_last"}  # the sample reads the last layer


def test_too_few_right_answers_leave_nothing_to_conclude():
    counts = {"n": 2000, "n_correct": 149, "variant": "original", "dataset": "nq"}
    counts |= {"split": "train", "setting": "closed_book"}
    answers = collections.defaultdict(set)
    for f in findings(sample_results(), [counts]):
        answers[f.place.setting].add(f.answer)
    assert answers["closed_book"] == {"cannot conclude", None}
    assert "cannot conclude" not in answers["with_context"]
    beside = facts(sample_results(), [counts], {}, {})["closed_book"]
    assert beside[0][1].startswith("149 correct and 1851 incorrect training answers")
    again = findings(sample_results(), [counts | {"n_correct": 150}])
    assert "cannot conclude" not in {f.answer for f in again}


def test_a_run_of_one_setting_has_findings_only_for_that_one():
    rows = [r for r in sample_rows() if r.setting == "closed_book"]
    (grid,) = grids(findings(results_of(rows), ENOUGH))
    assert grid.setting == "closed_book"


def test_a_set_without_a_row_is_shown_as_a_dash():
    gone = ("finding", "places")
    rows = [r for r in sample_rows() if (r.experiment, r.dataset) != gone]
    text = as_markdown(findings(results_of(rows), ENOUGH), {})
    (line,) = (x for x in text.splitlines()[:20] if "Do hidden states add" in x)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3] == "–" and "–" not in (cells[1], cells[2], cells[4])


def test_the_spread_of_the_seeds_is_shown_with_the_interval():
    seeds = [
        row("champion", "closed_book", TEST, "auroc", value, seed=str(i))
        for i, value in enumerate((0.90, 0.91, 0.92))
    ]
    results = results_of([*sample_rows(), *seeds])
    beside = facts(results, ENOUGH, PARTS["sweep"], PARTS["selection"])
    line = (
        "SD over seeds, microworld, test",
        ".010 over 3, 95 % over questions ±.030",
    )
    assert line in beside["closed_book"]
    text = as_markdown(findings(results, ENOUGH), beside)
    assert f"| {line[0]} | {line[1]} |" in text


def test_the_latex_table_has_a_cell_for_each_set_and_escapes_names():
    renamed = [
        msgspec.structs.replace(r, dataset="my_set") if r.dataset == "places" else r
        for r in sample_rows()
    ]
    text = as_latex(findings(results_of(renamed), ENOUGH))
    assert r"my\_set" in text and "my_set" not in text
    lines = [x for x in text.splitlines() if x.endswith(r"\\")]
    assert {line.count(" & ") for line in lines} == {4}


def of_two_in_domain_sets():
    rows = sample_rows()
    several = [r for r in rows if r.dataset == "microworld"]
    return [*rows, *(msgspec.structs.replace(r, dataset="musique") for r in several)]


@pytest.mark.parametrize("rows", [sample_rows(), of_two_in_domain_sets()])
def test_open_questions_are_listed_once_and_the_pool_is_not_counted_as_a_set(rows):
    answered = findings(results_of(rows), ENOUGH)
    lines, undecided = verdicts_in_words(answered)
    by_text = {text: cells for text, *cells in lines}
    for grid_number, grid in enumerate(grids(answered)):
        for text, cells in grid.lines:
            answers = [f.answer for f in cells if f.place.dataset != IN_DOMAIN]
            pooled = [f.answer for f in cells if f.place.dataset == IN_DOMAIN]
            if text in undecided:
                assert {*answers, *pooled} <= {"cannot tell", None}
                continue
            words = by_text[text][grid_number]
            together, _, of_sets = words.rpartition(" on all in-domain questions; ")
            assert together == "".join(x if x == "yes" else "open" for x in pooled)
            assert ("yes" in of_sets) == ("yes" in answers)
            assert "cannot tell" not in words
            if {"yes", "cannot tell"} <= set(answers):
                assert f"open on {answers.count('cannot tell')}" in of_sets
            if set(answers) == {"yes"}:
                assert of_sets == f"yes on all {len(answers)} sets"
    assert lines and undecided


def test_a_question_answered_only_by_all_sets_together_is_not_undecided():
    rows = [
        msgspec.structs.replace(difference(*ends), dataset=dataset)
        for dataset, ends in (("a", (-1, 1)), ("b", (-1, 1)), (IN_DOMAIN, (0.1, 0.3)))
    ]
    lines, undecided = verdicts_in_words(findings(results_of(rows), ENOUGH))
    words = "yes on all in-domain questions; open on 2"
    assert [line[1] for line in lines] == [words] and not undecided


CONFIG = BootstrapConfig(n_resamples=400)


def encoders(seed, strengths=None, n=200, prefix="q"):
    """Return made-up answers ranked by encoders of these strengths; noise if None."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.4
    scores = rng.normal(size=(2, 15, n))
    if strengths is not None:
        scores += np.asarray(strengths)[None, :, None] * labels
    return Ranked(np.array([f"{prefix}{i}" for i in range(n)]), labels, scores)


def test_a_run_agrees_fully_with_itself_and_fully_disagrees_with_its_reverse():
    run = encoders(0, np.linspace(0, 2, 15))
    assert agreement(run, run, CONFIG) == pytest.approx((1.0, 1.0, 1.0))
    reverse = run._replace(scores=-run.scores)
    assert agreement(run, reverse, CONFIG) == pytest.approx((-1.0, -1.0, -1.0))


def test_independent_noise_agrees_with_nothing():
    interval = agreement(encoders(1), encoders(2, prefix="other"), CONFIG)
    assert interval.low < 0 < interval.high


def test_planted_strengths_are_found_on_other_questions():
    strengths = np.linspace(0, 2, 15)
    first, second = encoders(3, strengths), encoders(4, strengths, prefix="other")
    interval = agreement(first, second, CONFIG)
    assert interval.value > 0.9
    # Resampling adds noise, so the interval lies lower.
    assert 0.7 < interval.low <= interval.value <= interval.high


def test_questions_that_two_runs_share_are_resampled_together():
    first = encoders(5, np.linspace(0, 0.3, 15))
    order = np.random.default_rng(0).permutation(len(first.ids))
    shuffled = Ranked(first.ids[order], first.labels[order], first.scores[:, :, order])
    together = agreement(first, shuffled, CONFIG)
    assert together.low == pytest.approx(1.0, abs=1e-6)
    apart = agreement(first, shuffled._replace(ids=np.arange(len(order))), CONFIG)
    assert apart.low < 0.95 < apart.value <= apart.high


def test_the_correlation_is_spearmans_with_averaged_ties():
    rng = np.random.default_rng(0)
    a, b = rng.integers(5, size=(2, 15, 4)).astype(float)
    wanted = [spearmanr(a[:, i], b[:, i]).statistic for i in range(4)]
    assert rank_correlation(a, b) == pytest.approx(wanted)


def test_answers_of_only_one_class_have_no_ranking_and_say_so():
    run = encoders(0)
    interval = agreement(run._replace(labels=np.ones(200, bool)), run, CONFIG)
    assert np.isnan(interval.value) and "only one class" in correlation(interval)


def test_a_run_compared_with_itself_agrees_and_with_its_reverse_differs():
    answered, swap = findings(sample_results(), ENOUGH), {"yes": "no", "no": "yes"}
    rows = [  # of other questions, whose test set meets that of the first
        msgspec.structs.replace(
            r,
            dataset="mine" if r.dataset == "microworld" else r.dataset,
            value=0.123 if r.detector == "champion" else r.value,
        )
        for r in sample_rows()
    ]
    reverse = [
        x._replace(answer=swap.get(x.answer, x.answer))
        for x in findings(results_of(rows), ENOUGH)
    ]
    run = encoders(0, np.linspace(0, 2, 15))
    both = {"closed_book": run, "with_context": run}
    opposite = {"closed_book": run._replace(scores=-run.scores)}
    first = Side("one", sample_results(), answered, both, CONFIG, {})
    other = Side("two", results_of(rows), reverse, opposite, CONFIG, {})
    sizes = []
    for setting in both:
        given = [x.answer for x in answered if x.place.setting == setting]
        sizes += [len(given) - given.count(None), sum(x in swap for x in given)]
        sizes.append(given.count("cannot conclude"))
    n, n_sure, k, m, m_sure, j = sizes
    assert 0 < n_sure < n and n_sure != m_sure
    for side, counts, value in (
        (first, [n, n, k, n_sure, 0, m, m, j, m_sure, 0], "1.000"),
        (other, [n, n - n_sure, k, n_sure, n_sure], "-1.000"),
    ):
        text = comparison(first, side)
        shown = re.findall(r"^\| [a-z, ]+ \| (\d+) \|$", text, re.M)
        assert [*map(int, shown)] == counts
        assert text.count("| differs |") == (n_sure if side is other else 0)
        assert f"**{value} [{value} to {value}]** (200 and 200 answers" in text
        cells = re.search(r"^\| BEATRICE \(sel.*$", text, re.M).group().split(" | ")
        assert [".123" in cell for cell in cells[1:]] == [False, side is other] * 4
        quoted = [".780"] if side is other else [".780", ".790"]
        assert re.findall(r"the paper has (\S+) ", text) == quoted
    with pytest.raises(ValueError, match="one and two have no setting in common"):
        comparison(first._replace(validation={"with_context": run}), other)


def test_compared_runs_report_shared_questions_and_differing_sets():
    other = results_of(
        msgspec.structs.replace(r, dataset="mine") if r.dataset == "microworld" else r
        for r in sample_rows()
    )
    sides = []
    for results, first in ((sample_results(), 0), (other, 2), (sample_results(), 0)):
        answered = [
            x._replace(answer=x.answer and "cannot conclude")
            for x in findings(results, ENOUGH)
        ]
        numbers = frozenset(("microworld", bytes([i])) for i in range(first, first + 5))
        asked = {("closed_book", IN_DOMAIN): numbers}
        ranked = {"closed_book": encoders(1)}
        sides.append(Side("run", results, answered, ranked, CONFIG, asked))
    a, b, same = sides
    text = comparison(a, b)
    assert "all in-domain: 3 of 5 labelled test questions are in both; A and" in text
    assert "A's questions are of microworld, B's of mine, so their numbers" in text
    bare = a._replace(results=a.results[a.results.split != "test"])
    assert "A's questions are" not in comparison(bare, b)
    assert "| all in-domain of microworld, A | all in-domain of mine, B |" in text
    assert "? | all in-domain (A of microworld, B of mine) | " in text
    given = [x.answer for x in a.answered if x.place.setting == "closed_book"]
    n = given.count("cannot conclude")
    assert f"| of these, cannot conclude in both | {n} |" in text
    text = comparison(a, same)
    assert "all in-domain: 5 of 5 labelled test questions are in both\n" in text
    assert "| all in-domain, A | all in-domain, B |" in text and "A and B" not in text


def test_runs_are_compared_by_their_encoders_on_validation(smoke_run, tmp_path):
    side, out = run_side(RunDir(smoke_run)), tmp_path / "comparison.md"
    at = {"experiment": "detection", "detector": "encoder", "metric": "auroc"}
    at |= {"dataset": IN_DOMAIN, "split": "validation", "seed": "mean"}
    assert len(side.validation) == 2
    for setting, run in side.validation.items():
        for name, scores in zip(SUBSET_NAMES, run.scores[0], strict=True):
            measured = find(side.results, setting=setting, families=name, **at)
            auroc = roc_auc_score(run.labels, scores)
            assert measured.value == pytest.approx(auroc, abs=1e-6)
    text = beatrice("report", smoke_run, smoke_run, "--out", out).stdout
    assert text == f"{out.read_text()}\n" and text.count("**1.000 [") == 2
    # Closed-book, in which a question has one answer.
    at |= {"split": "test", "setting": "closed_book", "families": "H"}
    n = find(side.results, **at).n
    assert f"all in-domain: {n} of {n} labelled test questions" in text


def test_the_ledger_of_a_run_names_what_differs_from_the_paper(smoke_run):
    text = beatrice("report", smoke_run, "--ledger").stdout
    for fact in (
        "| Backbone | Qwen3.5-9B and Gemma 4 E4B | embedded |",
        " | of the embedded world, in two wordings where in-domain |\n| Training s",
        "2wikimultihopqa 500 | microworld 32 |",
        "\n\nA cell is the paper's number → this run's.",
        "## tab:main-detection (Qwen3.5-9B)",
    ):
        assert fact in text
    table = beatrice("report", smoke_run, "--print", "detectors").stdout
    done = beatrice("control", smoke_run).stderr
    assert done.endswith(f"\nnext: {shell_line('report', smoke_run)}\n")
    assert table.startswith("Detecting wrong answers: AUROC") and "BEATRICE" in table


def test_shown_answers_cover_test_and_held_out_sets_once_each(smoke_run):
    shown = read_part(smoke_run / "shown.json", tuple[ShownSet, ...], "evaluate")
    places = [(x.setting, x.dataset, x.split) for x in shown]
    assert len({*places}) == len(places)
    assert {split for *_, split in places} == {"test", "ood"}
    assert IN_DOMAIN not in {dataset for _, dataset, _ in places}
    assert {x.wanted for x in shown} == {0.9}


P = np.array([0.9, 0.1, 0.8, 0.2, 0.9, 0.9, 0.9, 0.4])
LABELS = np.array([1, 0, 0, 1, 1, 1, 1, 0], bool)
IDS = ["h", "b", "c", "d", "e", "f", "g", "a"]


def chosen(p_correct=P, labels=LABELS, ids=IDS, threshold=0.5):
    kinds = choose_answers(p_correct, labels, ids, threshold)
    return {kind: (n, [ids[i] for i in indices]) for kind, n, indices in kinds}


def test_the_surest_answers_of_each_kind_are_shown():
    shown = chosen()
    assert shown["wrong and caught"] == (2, ["b", "a"])  # the lowest P first
    assert shown["wrong and missed"] == (1, ["c"])
    assert shown["right and not trusted"] == (1, ["d"])


def test_ties_are_broken_by_the_smaller_id_in_any_order():
    assert chosen()["right and trusted"] == (4, ["e", "f", "g"])
    order = np.random.default_rng(0).permutation(len(P))
    mixed = chosen(P[order], LABELS[order], [IDS[i] for i in order])
    assert mixed == chosen()


def test_an_answer_at_the_threshold_is_trusted():
    assert chosen(threshold=0.8)["wrong and missed"] == (1, ["c"])
    assert chosen(threshold=0.81)["wrong and missed"] == (0, [])


def a_head(p, labels):
    """Return a head that gives validation answers these P."""
    return SettingHead(
        reads=(),
        config=FusionConfig(),
        params={},
        calibrator=Calibrator(name="identity", scores=(), p_correct=()),
        evidence=Evidence(train=(99, 99), validation=(99, 99), auroc=(0.6, 1.0)),
        validation=Validation(p, labels),
    )


def test_decisions_are_certified_on_validation_and_counted_on_other_answers():
    rng = np.random.default_rng(0)
    p = rng.random(3000)
    rows = rows_of(rng.random(3000) < p)
    validation = rows.where("validation")
    head = a_head(p[validation], rows.labels[validation])
    measured = {
        (r.kind, r.wanted, r.metric): r
        for r in decision_rows(head, p, rows)
        if r.dataset == "world"
    }
    test = rows.where("test")
    for kind, right in (("trust", rows.labels[test]), ("distrust", ~rows.labels[test])):
        at = getattr(head.thresholds(0.8), kind).p_correct
        decided = p[test] >= at if kind == "trust" else p[test] <= at
        coverage, precision = (
            measured[kind, 0.8, metric] for metric in ("coverage", "precision")
        )
        assert coverage.value == decided.mean() > 0.2 and coverage.n == len(test)
        assert precision.value == pytest.approx(right[decided].mean())
        assert precision.n == decided.sum()
        assert precision.ci_low < precision.value < precision.ci_high
        assert precision.value > 0.75  # P is calibrated
    never = measured["trust", 0.95, "precision"]
    assert never.value is None and "no P holds" in never.reason
    unsure = decision_rows(head, np.full(3000, 0.5), rows)
    reasons = {r.reason for r in unsure if r.metric == "precision" and r.wanted == 0.8}
    assert reasons == {"no answer lies beyond the threshold"}
    table = decision_table(results_of(measured.values()))
    labels = [line.label for line in table.lines]
    assert labels[::4] == ["Trust at 0.7", "Distrust at 0.7"]


def test_a_head_with_doubts_decides_nothing_and_its_rows_and_words_say_why():
    rng = np.random.default_rng(0)
    p = 0.3 * rng.random(3000)
    rows = rows_of(rng.random(3000) < p)
    validation = rows.where("validation")
    head = a_head(p[validation], rows.labels[validation])
    assert head.thresholds().distrust.p_correct is not None
    few = Evidence(train=(160, 1840), validation=(8, 92), auroc=(0.6, 1.0))
    (doubt,) = few.doubts
    head = dataclasses.replace(head, evidence=few)
    measured = decision_rows(head, p, rows)
    assert {r.value for r in measured if r.metric == "coverage"} == {0}
    precisions = {(r.value, r.reason) for r in measured if r.metric == "precision"}
    assert precisions == {(None, doubt)}
    assert headline(results_of(measured), []) == []
    thresholds = head.thresholds()
    words = [threshold.in_words() for threshold in thresholds]
    assert words == [f"no threshold to {x}: {doubt}" for x in ("trust", "distrust")]
    assert {thresholds.decide(x) for x in p} == {("unknown", doubt)}


def test_a_question_left_out_of_decisions_is_counted_once():
    """Only the original of two wordings is decided on, so only it can be left out."""
    twice = rows_of(np.arange(1200) % 2 == 0).take(np.repeat(np.arange(1200), 2))
    variants = np.tile(["original", "rewritten"], 1200)
    is_labelled = np.repeat(np.arange(1200) % 7 > 0, 2)
    rows = dataclasses.replace(twice, variants=variants, is_labelled=is_labelled)
    head = a_head(np.full(50, 0.9), np.ones(50, bool))
    n_left_out = (~is_labelled & (rows.splits == "test")).sum() // 2
    measured = decision_rows(head, np.full(2400, 0.9), rows)
    assert {r.n_failed for r in measured if r.split == "test"} == {n_left_out}
    assert n_left_out > 0


def test_a_bin_counts_a_question_with_two_wordings_once():
    twice = rows_of(np.arange(300) % 2 == 0).take(np.repeat(np.arange(300), 2))
    curves, _ = reliability_of(np.full(600, 0.5), np.full(600, 0.6), twice)
    assert [(x.n, x.n_questions) for x in curves.calibrated] == [(600, 300)]


def test_shown_tokens_keep_their_numbers_if_first_rows_are_not_stored():
    tokenizer, ids = byte_fallback(), tuple(range(98, 110))  # the bytes a to l
    spans = dict(prompt_ids=ids[:10], token_ids=ids[10:], context_span=(6, 6))
    answer = an_answer(**spans)
    prob = np.arange(12 * 5, dtype=float).reshape(12, 5)
    whole = shown_tokens(tokenizer, answer, prob)
    spared = shown_tokens(tokenizer, answer, prob[6:], 6)
    assert [token["text"] for token in whole] == list("ghikl")
    assert spared == whole[1:]  # what emitted the first one was not kept


def test_the_shown_tokens_of_an_answer_make_up_its_text():
    tokenizer, text = byte_fallback(), " Paris 🦇"
    prompt_ids, token_ids = (tuple(tokenizer(x)["input_ids"]) for x in ("who?", text))
    spans = dict(prompt_ids=prompt_ids, token_ids=token_ids, context_span=(0, 0))
    prob = np.zeros((len(prompt_ids) + len(token_ids), 5))
    tokens = shown_tokens(tokenizer, an_answer(**spans), prob)
    texts = [token["text"] for token in tokens if token["span"] == "answer"]
    assert "".join(texts) == text and len(texts) == len(token_ids)

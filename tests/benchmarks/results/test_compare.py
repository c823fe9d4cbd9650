import numpy as np
import pytest

from beatrice.benchmarks.results.evaluate import choose_answers, decision_rows
from beatrice.benchmarks.results.report import correlation
from beatrice.benchmarks.results.tables import decision_table, results_of
from beatrice.jaxprobe.calibration import Calibrator
from beatrice.jaxprobe.config import FusionConfig
from beatrice.jaxprobe.detector import SettingHead
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.scope import Validation
from beatrice.pgir.score_files import shown_tokens
from beatrice.selection.anatomy.reach import Ranked, agreement, rank_correlation
from tests.benchmarks.rows import rows_of
from tests.records import an_answer

CONFIG = BootstrapConfig(n_resamples=400)


def encoders(seed, strengths=None, n=200, prefix="q"):
    """Made-up answers that encoders of these strengths rank; noise alone if None."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.4
    scores = rng.normal(size=(2, 15, n))
    if strengths is not None:
        scores += np.asarray(strengths)[None, :, None] * labels
    return Ranked(np.array([f"{prefix}{i}" for i in range(n)]), labels, scores)


def test_a_run_agrees_with_itself_entirely_and_negated_ranks_in_reverse():
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
    assert interval.value > 0.9 and interval.low > 0.7
    assert (
        interval.low <= interval.value + 0.05
    )  # resampling adds noise, so it lies lower


def test_questions_of_both_runs_are_drawn_together():
    first = encoders(5, np.linspace(0, 0.3, 15))
    order = np.random.default_rng(0).permutation(len(first.ids))
    shuffled = Ranked(first.ids[order], first.labels[order], first.scores[:, :, order])
    together = agreement(first, shuffled, CONFIG)
    assert together.low == pytest.approx(1.0, abs=1e-6)
    apart = agreement(first, shuffled._replace(ids=np.arange(len(order))), CONFIG)
    assert apart.low < 0.95


def test_the_correlation_is_spearmans_with_ties_in_the_middle():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    a, b = rng.integers(5, size=(2, 15, 4)).astype(float)
    wanted = [spearmanr(a[:, i], b[:, i]).statistic for i in range(4)]
    assert rank_correlation(a, b) == pytest.approx(wanted)


def test_one_class_alone_has_no_ranking_and_says_so():
    run = encoders(0)
    interval = agreement(run._replace(labels=np.ones(200, bool)), run, CONFIG)
    assert np.isnan(interval.value) and "one class only" in correlation(interval)


P = np.array([0.9, 0.1, 0.8, 0.2, 0.9, 0.9, 0.9, 0.4])
LABELS = np.array([1, 0, 0, 1, 1, 1, 1, 0], bool)
IDS = ["h", "b", "c", "d", "e", "f", "g", "a"]


def chosen(p_correct=P, labels=LABELS, ids=IDS, threshold=0.5):
    kinds = choose_answers(p_correct, labels, ids, threshold)
    return {kind.name: (n, [ids[i] for i in indices]) for kind, n, indices in kinds}


def test_of_each_kind_the_surest_are_shown():
    shown = chosen()
    assert shown["wrong and caught"] == (2, ["b", "a"])  # the lowest P first
    assert shown["wrong and missed"] == (1, ["c"])
    assert shown["right and not trusted"] == (1, ["d"])


def test_of_equals_the_smaller_id_is_shown_whatever_the_order():
    assert chosen()["right and trusted"] == (4, ["e", "f", "g"])
    order = np.random.default_rng(0).permutation(len(P))
    mixed = chosen(P[order], LABELS[order], [IDS[i] for i in order])
    assert mixed == chosen()


def test_an_answer_at_the_threshold_is_trusted():
    assert chosen(threshold=0.8)["wrong and missed"] == (1, ["c"])
    assert chosen(threshold=0.81)["wrong and missed"] == (0, [])


def test_decisions_are_certified_on_validation_and_counted_on_other_answers():
    rng = np.random.default_rng(0)
    p = rng.random(3000)
    rows = rows_of(rng.random(3000) < p)
    validation = rows.where("validation")
    head = SettingHead(
        reads=(),
        config=FusionConfig(),
        params={},
        calibrator=Calibrator(name="identity", scores=(), p_correct=()),
        validation=Validation(p[validation], rows.labels[validation]),
    )
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
        assert precision.value > 0.75  # P means what it says
    never = measured["trust", 0.95, "precision"]
    assert never.value is None and "no P holds" in never.reason
    table = decision_table(results_of(measured.values()))
    assert [line.label for line in table.lines][::4] == [
        "Trust at 0.7",
        "Distrust at 0.7",
    ]


def test_tokens_are_shown_with_their_own_numbers_where_the_first_rows_are_spared():
    ids = dict(prompt_ids=tuple(range(10)), token_ids=(10, 11), context_span=(6, 6))
    answer = an_answer(**ids)
    prob = np.arange(12 * 5, dtype=float).reshape(12, 5)
    whole = shown_tokens(str, answer, prob)
    spared = shown_tokens(str, answer, prob[6:], 6)
    assert [token["text"] for token in whole] == [f"[{i}]" for i in (6, 7, 8, 10, 11)]
    assert spared == whole[1:]  # what emitted the first one was not kept

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from beatrice.benchmarks.results.tables import find, results_of
from beatrice.benchmarks.results.tables import where as select
from beatrice.extract.records import IN_DOMAIN
from beatrice.jaxprobe.evaluation import (
    DetectorScores,
    detection_rows,
    permute_by_question,
)
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    auroc_gain_interval,
    interval_of,
    resamples,
    two_sided_p,
    weighted_metrics,
)
from tests.jaxprobe.samples import rows_like


def some_rows(n=200, n_labelled=150, p_right=0.9):
    """Two wordings of every question; the last questions have no label."""
    is_labelled = np.repeat(np.arange(n) < n_labelled, 2)
    labels = np.random.default_rng(0).random(2 * n) < p_right
    return rows_like(
        labels & is_labelled,
        ids=np.repeat([f"q{i}" for i in range(n)], 2),
        splits=["test"] * 2 * n,
        variants=np.tile(["original", "rewritten"], n),
        is_labelled=is_labelled,
    )


def test_permuted_labels_are_shuffled_among_labelled_questions():
    rows = some_rows()
    where = rows.where("test")
    permuted = permute_by_question(rows, seed=0)
    assert permuted[where].sum() == rows.labels[where].sum()
    assert (permuted[where] != rows.labels[where]).any()
    assert not permuted[~rows.is_labelled].any()
    rows = some_rows(n_labelled=200, p_right=0.5)

    def pairs(labels):
        return sorted(map(tuple, labels.reshape(-1, 2).tolist()))

    assert pairs(permute_by_question(rows, seed=1)) == pairs(rows.labels)


RATES = {"hotpotqa": 0.8, "musique": 0.2, "nq": 0.5}
BOOTSTRAP = BootstrapConfig(n_resamples=200)


def several_sets(n=120):
    """Two in-domain sets and a held-out one; every question in two wordings."""
    rng = np.random.default_rng(0)
    places = [(d, s) for d in ("hotpotqa", "musique") for s in ("train", "test")]
    places.append(("nq", "ood"))
    labels = [np.repeat(rng.random(n) < RATES[d], 2) for d, _ in places]
    return rows_like(
        np.concatenate(labels),
        ids=[f"{d}-{s}-{i // 2}" for d, s in places for i in range(2 * n)],
        datasets=np.repeat([d for d, _ in places], 2 * n),
        splits=np.repeat([s for _, s in places], 2 * n),
        variants=np.tile(["original", "rewritten"], n * len(places)),
        is_labelled=rng.random(2 * n * len(places)) < 0.95,
    )


def noisy(rows, name, strength, seed, n_seeds=3):
    noise = np.random.default_rng(seed).standard_normal((n_seeds, len(rows.ids)))
    return DetectorScores(name=name, scores=strength * rows.labels + noise)


def measured(rows, *scored, pairs=(), config=BOOTSTRAP, strata=None):
    pairs = {"paired": pairs}
    result = detection_rows(list(scored), rows, config, pairs=pairs, strata=strata)
    return results_of(result)


def test_the_pooled_auroc_is_that_of_all_in_domain_questions_together():
    rows = several_sets()
    scored = noisy(rows, "champion", 1.0, 1)
    table = measured(rows, scored)
    # Both sets and both wordings; the questions without a label are counted.
    is_test = rows.splits == "test"
    where = np.flatnonzero(is_test & rows.is_labelled)
    assert set(rows.datasets[where]) == {"hotpotqa", "musique"}
    assert set(rows.variants[where]) == {"original", "rewritten"}
    pooled = {"dataset": IN_DOMAIN, "split": "test", "seed": "mean"}
    labels, scores = rows.labels[where], scored.scores[:, where]
    expected = {
        "auroc": [roc_auc_score(labels, score) for score in scores],
        "auprc": [average_precision_score(~labels, -score) for score in scores],
    }
    expected = {metric: np.mean(values) for metric, values in expected.items()}
    for metric, value in expected.items():
        row = find(table, metric=metric, **pooled)
        assert row.value == pytest.approx(value) and row.ci_low < value < row.ci_high
        assert (row.n, row.n_failed) == (len(where), is_test.sum() - len(where))
        # Perfect on every resample, but not certain.
        perfect = DetectorScores(name="champion", scores=rows.labels[None] * 1.0)
        row = find(measured(rows, perfect), metric=metric, **pooled)
        assert row.value == row.ci_high == 1 > row.ci_low + 0.005
    single = find(table, metric="auroc", **pooled | {"dataset": "musique"})
    assert single.value != pytest.approx(expected["auroc"], abs=1e-3)
    assert select(table, dataset=IN_DOMAIN, split="ood").empty


def test_a_single_in_domain_set_is_its_own_pool():
    rows = several_sets()
    rows.datasets[rows.datasets == "musique"] = "hotpotqa"
    table = measured(rows, noisy(rows, "champion", 1.0, 1))
    shared = {"split": "test", "metric": "auroc", "seed": "mean"}
    rows = (find(table, dataset=d, **shared) for d in ("hotpotqa", IN_DOMAIN))
    single, pooled = ((row.value, row.ci_low, row.n) for row in rows)
    assert single == pooled


def test_a_paired_difference_resamples_both_detectors_together():
    rows = several_sets()
    ours = noisy(rows, "champion", 1.0, 1)
    near = DetectorScores(name="near", scores=ours.scores + 0.05 * rows.labels)
    table = measured(rows, ours, near, pairs=[("champion", "near")])
    where = rows.where("test")
    assert len(where) > 400
    labels = rows.labels[where]
    (weights,) = resamples(rows.ids[where], BOOTSTRAP)

    def mean_of_seeds(metric, item):
        return np.mean([metric(scores) for scores in item.scores[:, where]], axis=0)

    def difference(metric):
        return mean_of_seeds(metric, ours) - mean_of_seeds(metric, near)

    columns = {"dataset": IN_DOMAIN, "split": "test", "metric": "auroc"}
    row = find(table, experiment="paired", against="near", **columns)
    value = difference(lambda scores: auroc(scores, labels).value)
    assert row.value == pytest.approx(value)
    draws = difference(lambda x: weighted_metrics(x, labels, weights)["auroc"])
    scores = [x.scores[:, where] for x in (ours, near)]
    by_places = auroc_gain_interval(*scores, labels, rows.ids[where])
    low, high = zip(interval_of(draws), by_places[:2], strict=True)
    assert (row.ci_low, row.ci_high) == pytest.approx((min(low), max(high)))
    assert row.p_value == pytest.approx(max(two_sided_p(draws), by_places[2]))
    # Near twins: each has a wide interval, their difference a narrow one.
    mean = {"experiment": "detection", "detector": "champion", "seed": "mean"}
    alone = find(table, **mean, **columns)
    assert row.ci_high - row.ci_low < 0.7 * (alone.ci_high - alone.ci_low)
    assert (row.p_value < 0.05) == (row.ci_low > 0 or row.ci_high < 0)


def test_a_difference_with_an_undefined_side_gives_the_reason():
    rows = several_sets()
    ours, rival = noisy(rows, "champion", 1.0, 1), noisy(rows, "rival", 0.5, 2)
    rows.labels[rows.datasets == "nq"] = True
    table = measured(rows, ours, rival, pairs=[("champion", "rival")])
    row = find(table, experiment="paired", dataset="nq", metric="auroc")
    assert row.value is None and "one class" in row.reason


def test_rows_without_a_score_are_left_out_and_counted_also_in_pairs():
    rows = several_sets()
    ours, half = noisy(rows, "champion", 1.0, 1), noisy(rows, "part", 0.5, 2)
    nowhere = DetectorScores(name="nowhere", scores=np.full_like(half.scores, np.nan))
    where = rows.where("test")
    half.scores[0, where[::3]] = np.nan  # one seed's gap counts for all
    rest = np.setdiff1d(where, where[::3])
    pairs = [("champion", "part"), ("champion", "nowhere")]
    table = measured(rows, ours, half, nowhere, pairs=pairs)
    fields = {"dataset": IN_DOMAIN, "split": "test"}

    def mean(item, at):
        return np.mean([auroc(s[at], rows.labels[at]).value for s in item.scores])

    row = find(table, detector="part", metric="auroc", seed="mean", **fields)
    fields["experiment"] = "detection"
    whole = find(table, detector="champion", metric="auroc", seed="mean", **fields)
    fields["experiment"] = "paired"
    assert row.value == pytest.approx(mean(half, rest))
    assert row.n == len(rest) and row.n_failed == whole.n_failed + len(where[::3])
    pair = find(table, against="part", metric="auroc", **fields)
    assert pair.value == pytest.approx(mean(ours, rest) - mean(half, rest))
    assert pair.n == len(rest)
    gone = select(table, metric="auroc", against="nowhere")["row"]
    assert [(row.value, row.n) for row in gone] == [(None, 0)] * 4
    assert all("no score" in row.reason for row in gone)
    (weights,) = resamples(rows.ids[where], BOOTSTRAP)
    answers = rows.labels[rest], weights[np.isin(where, rest)]
    draws = [weighted_metrics(x[rest], *answers)["auroc"] for x in half.scores]
    fields |= {"experiment": "detection", "seed": "mean", "metric": "auroc"}
    row = find(measured(rows, half, strata=np.zeros(len(rows.ids))), **fields)
    low, high = interval_of(np.mean(draws, axis=0))
    assert row.ci_low < low + 1e-6 and high - 1e-6 < row.ci_high


def test_a_gain_at_equal_length_on_two_pairs_is_not_significant():
    rows = rows_like(np.arange(8) % 2 > 0, splits=["test"] * 8)
    ours = DetectorScores(name="champion", scores=rows.labels[None] * 1.0)
    other = DetectorScores(name="other", scores=-ours.scores)
    strata = np.arange(8) // 2  # four pairs; in two of them both scores are equal
    ours.scores[0, :4] = other.scores[0, :4] = 0.0
    table = measured(rows, ours, other, pairs=[("champion", "other")], strata=strata)
    row = find(table, experiment="paired", metric="auroc", dataset=IN_DOMAIN)
    assert row.value == 0.5 and row.ci_low <= 0 and row.p_value >= 0.125


def test_permuted_labels_do_not_tell_in_domain_sets_apart():
    rows = several_sets(n=2000)
    permuted = permute_by_question(rows, seed=0)
    for split in ("train", "test"):
        sets = (rows.where(split, name) for name in ("hotpotqa", "musique"))
        first, second = (permuted[where].mean() for where in sets)
        assert abs(first - second) < 0.06  # from .8 and .2; five s.d.
    held_out = rows.where("ood", "nq")
    assert permuted[held_out].sum() == rows.labels[held_out].sum()

import numpy as np
import pytest

from beatrice.benchmarks.results.compare import correlation
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.selection.anatomy.reach import Ranked, agreement, rank_correlation

CONFIG = BootstrapConfig(n_resamples=400)


def encoders(seed, strengths=None, n=200, prefix="q"):
    """Made-up answers that encoders of these strengths rank; noise alone if None."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.4
    scores = rng.normal(size=(2, 15, n))
    if strengths is not None:
        scores += np.asarray(strengths)[None, :, None] * labels
    return Ranked(np.array([f"{prefix}{i}" for i in range(n)]), labels, scores)


def test_a_run_agrees_with_itself_entirely():
    one = encoders(0, np.linspace(0, 2, 15))
    assert agreement(one, one, CONFIG) == pytest.approx((1.0, 1.0, 1.0))


def test_a_run_whose_scores_are_negated_ranks_in_reverse():
    one = encoders(0, np.linspace(0, 2, 15))
    reverse = one._replace(scores=-one.scores)
    assert agreement(one, reverse, CONFIG) == pytest.approx((-1.0, -1.0, -1.0))


def test_independent_noise_agrees_with_nothing():
    found = agreement(encoders(1), encoders(2, prefix="other"), CONFIG)
    assert found.low < 0 < found.high


def test_planted_strengths_are_found_on_other_questions():
    strengths = np.linspace(0, 2, 15)
    first, second = encoders(3, strengths), encoders(4, strengths, prefix="other")
    found = agreement(first, second, CONFIG)
    assert found.value > 0.9 and found.low > 0.7
    assert found.low <= found.value + 0.05  # resampling adds noise, so it lies lower


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
    one = encoders(0)
    found = agreement(one._replace(labels=np.ones(200, bool)), one, CONFIG)
    assert np.isnan(found.value) and "one class only" in correlation(found)

"""Controls for what is easy: length, the commoner class, a linear probe."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks.baselines.length import length_scores, majority_scores
from benchmarks.baselines.linear import standardise
from benchmarks.baselines.probe import pooled_signals, probe_scores
from extract.store.read import read_family
from jaxprobe.features.reading import SPANS
from jaxprobe.features.rows import Rows, load_rows


def some_rows(labels, setting="closed_book"):
    """A third each of training, validation and test rows."""
    n = len(labels)
    return Rows(
        setting=setting,
        ids=np.array([f"q{i}" for i in range(n)]),
        datasets=np.full(n, "world"),
        splits=np.array(["train", "validation", "test"])[np.arange(n) * 3 // n],
        variants=np.full(n, "original"),
        labels=labels,
        is_labelled=np.ones(n, bool),
    )


def lengths(n_tokens):
    """The features of answers that were neither empty nor cut."""
    zeros = np.zeros(len(n_tokens))
    return np.stack([n_tokens, np.log1p(n_tokens), zeros, zeros], axis=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_answer_length_learns_its_direction_from_training_answers(sign):
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 30, size=900)
    rows = some_rows(sign * (n_tokens - 15) + rng.normal(0, 5, 900) > 0)
    (scores,) = length_scores(lengths(n_tokens), rows)
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_answer_length_learns_that_the_middle_is_best():
    rng = np.random.default_rng(0)
    n_tokens = rng.integers(1, 200, size=900)
    rows = some_rows((n_tokens > 5) & (n_tokens < 60))
    (scores,) = length_scores(lengths(n_tokens), rows)
    test = rows.where("test")
    assert roc_auc_score(rows.labels[test], scores[test]) > 0.9


def test_the_majority_ranks_nothing():
    rows = some_rows(np.arange(90) % 3 == 0)
    (scores,) = majority_scores(rows)
    assert len(set(scores)) == 1 and scores[0] == pytest.approx(1 / 3)


def test_standardised_features_have_variance_one_together():
    features = np.random.default_rng(0).normal(3, [1, 5, 0, 9], (50, 4))
    standardise(features, np.arange(40))
    np.testing.assert_allclose(features[:40].mean(axis=0), 0, atol=1e-12)
    assert features[:40].var(axis=0).sum() == pytest.approx(3 / 4)  # one is constant

import numpy as np

from jaxprobe.evaluation import permute_by_question
from jaxprobe.features.rows import Rows


def some_rows(n=200, n_labelled=150, p_right=0.9):
    """Two wordings of every question; the last questions have no label."""
    is_labelled = np.repeat(np.arange(n) < n_labelled, 2)
    labels = np.random.default_rng(0).random(2 * n) < p_right
    return Rows(
        setting="with_context",
        ids=np.repeat([f"q{i}" for i in range(n)], 2),
        datasets=np.full(2 * n, "world"),
        splits=np.full(2 * n, "test"),
        variants=np.tile(["original", "rewritten"], n),
        labels=labels & is_labelled,
        is_labelled=is_labelled,
    )


def test_permuted_labels_are_those_of_the_labelled_rows_dealt_out_anew():
    rows = some_rows()
    where = rows.where("test")
    permuted = permute_by_question(rows, seed=0)
    assert permuted[where].sum() == rows.labels[where].sum()
    assert (permuted[where] != rows.labels[where]).any()
    assert not permuted[~rows.is_labelled].any()


def test_the_wordings_of_a_question_stay_together():
    rows = some_rows(n_labelled=200, p_right=0.5)

    def pairs(labels):
        return sorted(map(tuple, labels.reshape(-1, 2).tolist()))

    assert pairs(permute_by_question(rows, seed=1)) == pairs(rows.labels)

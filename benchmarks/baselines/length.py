"""What is too easy: the length of the answer alone, and the commoner class."""

import numpy as np

from benchmarks.baselines.linear import scores_of, standardise
from extract.run.contents import read_answers
from extract.run.directory import RunDir
from jaxprobe.features.rows import Rows


def length_features(run: RunDir, rows: Rows) -> np.ndarray:
    """Return length, log(1 + length), is empty and was cut of every row's answer.

    Length is in tokens, the stop token not counted; cut is an answer that reached the
    limit before it stopped. `[n_rows, 4]` float64.
    """
    answers = {answer.key: answer for answer in read_answers(run, rows.setting)}
    own = [answers[i, rows.setting, v] for i, v in zip(rows.ids, rows.variants)]
    n_tokens = np.array([len(answer.token_ids) for answer in own], float)
    is_empty = [not answer.text.strip() for answer in own]
    was_cut = [answer.stop_id is None for answer in own]
    return np.stack([n_tokens, np.log1p(n_tokens), is_empty, was_cut], axis=1)


def length_scores(features: np.ndarray, rows: Rows) -> np.ndarray:
    """Return the scores that a logistic regression gives by length, `[1, n_rows]`.

    Whether longer is better, and up to which length, is learned on the training rows.

    Args:
      features: see `length_features`.
      rows: what the rows are.
    """
    features = features.copy()
    standardise(features, rows.where("train"))
    return scores_of(features, rows)[0]


def majority_scores(rows: Rows) -> np.ndarray:
    """Return the share of right training answers for every row, `[1, n_rows]`.

    A constant ranks nothing: its AUROC is one half, and its AUPRC the share of wrong
    answers, which is what the AUPRC of the others is to be read against.
    """
    share = rows.labels[rows.where("train")].mean()
    return np.full((1, len(rows.ids)), share)

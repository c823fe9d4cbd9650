"""What is too easy: the length of the answer alone, and the commoner class.

And what is left of every detector where length tells nothing: among answers of equally
many tokens.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.linear import scores_of, standardise
from beatrice.extract.records import Answer
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.features.rows import Rows
from beatrice.jaxprobe.metrics import BootstrapConfig, paired_strata


def length_features(answers: Sequence[Answer]) -> np.ndarray:
    """Return length, log(1 + length), is empty and was cut of every answer.

    Length is in tokens, the stop token not counted; cut is an answer that reached the
    limit before it stopped. `[n_answers, 4]` float64.
    """
    n_tokens = np.array([len(answer.token_ids) for answer in answers], float)
    is_empty = [not answer.text.strip() for answer in answers]
    was_cut = [answer.stop_id is None for answer in answers]
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


def rows_at_equal_length(
    detectors: Sequence[Scored],
    rows: Rows,
    n_tokens: np.ndarray,
    config: BootstrapConfig,
    names: Sequence[str],
) -> list[ResultRow]:
    """Return what detectors are worth among answers of equally many tokens.

    The AUROC is of pairs of a right and a wrong answer of the same length, see
    `jaxprobe.metrics.stratified_auroc`: terciles would leave length to tell the answers
    of one tercile apart. A score that follows length alone has one half.

    Args:
      detectors: of a setting.
      rows: what they score.
      n_tokens: `[n_rows]` tokens of the answers.
      config: of the intervals.
      names: of the detectors that are measured; the first against each of the others.

    Returns:
      Rows of the experiment "at_equal_length", whose `n` are the answers with a
      counterpart of the other class; the gains of the first one as
      "at_equal_length_paired"; and for each set the share of labelled answers without
      a counterpart, which say nothing here ("unmatched").
    """
    experiment = "at_equal_length"
    own = [one for one in detectors if one.name in names]
    ours, *rivals = names
    made = detection_rows(
        own,
        rows,
        config,
        experiment,
        {f"{experiment}_paired": [(ours, rival) for rival in rivals]},
        strata=n_tokens,
    )
    n_matched, unmatched = {}, []
    for place in rows.evaluated_sets():
        dataset, split = place
        where = rows.where(split, dataset)
        strata = paired_strata(rows.labels[where], n_tokens[where])
        n_matched[place] = sum(map(len, strata))
        fields = {"experiment": experiment, "detector": "answers"}
        fields |= {"metric": "unmatched", **rows.fields_of(dataset, split)}
        value = 1 - n_matched[place] / len(where) if len(where) else None
        reason = None if len(where) else "no labelled example"
        unmatched.append(ResultRow(**fields, value=value, reason=reason))
    return [
        *(
            msgspec.structs.replace(row, n=n_matched[row.dataset, row.split])
            for row in made
        ),
        *unmatched,
    ]

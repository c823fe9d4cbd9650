"""What a person's verdicts on a sample say of the labels, and of detectors by them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beatrice.benchmarks.results.names import AT_EQUAL_LENGTH
from beatrice.extract.run.files import read_json
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.evaluation import Scored
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    interval_of,
    resamples,
    weighted_metrics,
)
from beatrice.jaxprobe.rows import Rows

SPLIT = "annotated"


def read_verdicts(path: Path) -> dict[str, Any]:
    """Return a person's verdicts, as `label --audit` has written them.

    Raises:
      ValueError: they are not as they were written.
    """
    return read_json(path, dict[str, Any], "run `beatrice label --audit` again")


def annotated_rows(
    found: Mapping[str, Any],
    detectors: Sequence[Scored],
    rows: Rows,
    config: BootstrapConfig,
) -> list[ResultRow]:
    """Return what a person disputes, and AUROC on the annotated answers.

    The sample has as many right labels as wrong; every answer counts for as many as it
    was drawn from.

    Args:
      found: see `read_verdicts`.
      detectors: that are measured.
      rows: what they score.
      config: of the intervals.

    Returns:
      Rows of the experiment "label_noise": per label the share that is disputed
      ("disputed", Wilson's interval). And of the experiment "annotated" the AUROC of
      detectors, where `dataset` says by which truth: "labels", "undisputed labels"
      (the disputed answers are out), or "a person".
    """
    noise = [one for one in found["noise"] if one["setting"] == rows.setting]
    human = {(x[0], x[2]): x[3] for x in found["verdicts"] if x[1] == rows.setting}
    made = [_disputed(one) for one in noise]
    keys = list(zip(rows.ids.tolist(), rows.variants.tolist(), strict=True))
    is_evaluated = np.isin(rows.splits, ("test", "ood")) & rows.is_labelled
    where = np.array([i for i in np.flatnonzero(is_evaluated) if keys[i] in human], int)
    labels = rows.labels[where]
    verdicts = np.array([human[keys[i]] for i in where], bool)
    counts = {one["label"]: one["n_all"] / max(1, one["n"]) for one in noise}
    weights = np.array([counts[label] for label in labels.tolist()], np.float32)
    everyone = np.arange(len(where))
    truths = {
        "labels": (everyone, labels),
        "undisputed labels": (np.flatnonzero(labels == verdicts), labels),
        "a person": (everyone, verdicts),
    }
    for name, (some, truth) in truths.items():
        fields = {"experiment": "annotated", "setting": rows.setting, "metric": "auroc"}
        fields |= {"dataset": name, "split": SPLIT, "n": len(some)}
        is_defined = 0 < truth[some].sum() < len(some)
        drawn = [np.ones((len(some), 1), np.float32)]
        if is_defined:
            drawn += resamples(rows.ids[where[some]], config)
        drawn = np.concatenate(drawn, axis=1) * weights[some, None]
        for one in detectors:
            if one.name not in AT_EQUAL_LENGTH:
                continue
            if not is_defined:
                reason = "the annotated answers are of one class only"
                row = ResultRow(**fields, detector=one.name, value=None, reason=reason)
            else:
                own = one.scores[:, where[some]]
                all_seeds = [weighted_metrics(x, truth[some], drawn) for x in own]
                value, *draws = np.mean([x["auroc"] for x in all_seeds], axis=0)
                low, high = interval_of(np.array(draws))
                row = ResultRow(
                    **fields,
                    detector=one.name,
                    value=float(value),
                    ci_low=low,
                    ci_high=high,
                )
            made.append(row)
    return made


def _disputed(noise: dict[str, Any]) -> ResultRow:
    """Return how often a person disputes one label."""
    n = noise["n"]
    return ResultRow(
        experiment="label_noise",
        detector="labels:right" if noise["label"] else "labels:wrong",
        setting=noise["setting"],
        dataset="annotated",
        split=SPLIT,
        metric="disputed",
        value=noise["n_disputed"] / n if n else None,
        ci_low=noise["ci_low"],
        ci_high=noise["ci_high"],
        n=n,
        reason=None if n else "no answer with this label was annotated",
    )

"""The input and the output of every analysis, and shares as rows with intervals.

An analysis reads the encoders and heads of a finished run and returns rows. Nothing is
trained again, except where an analysis says so. `anatomy.stage` has the table of all.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from beatrice.extract.records import IN_DOMAIN, Answer, Example, Setting
from beatrice.extract.run.rows import ResultRow, Subject
from beatrice.jaxprobe.detector import HeadName, SettingHead
from beatrice.jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from beatrice.jaxprobe.rows import Rows
from beatrice.selection.anatomy import Study
from beatrice.selection.anatomy.encoders import Deployed
from beatrice.selection.exhaustive import Ranking

Part = Literal["closed_book", "with_context", "rankings", "ablations", "other"]


class Search(NamedTuple):
    """The encoders that a search has selected, and the scores of its heads.

    Attributes:
      reads: pass and letters of every selected encoder.
      scores: `[n_seeds, n_rows]` P(correct) by the head's name, "champion" and others.
    """

    reads: tuple[tuple[Setting, str], ...]
    scores: Mapping[str, np.ndarray]


class QuestionTexts(NamedTuple):
    """Questions by id, and answers by (question, setting, variant)."""

    examples: Mapping[str, Example]
    answers: Mapping[tuple[str, str, str], Answer]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AnalysisInput:
    """The input of an analysis.

    Attributes:
      settings: the encoders of every setting.
      read_texts: reads the questions and answers; most analyses need none.
      parts: identity of each part that not every run has, by its name.
      rankings: of every set of three encoders, by setting.
      without_hidden: `[n_seeds, n_rows]` P(correct) by the search among encoders that
        do not read hidden states, by setting; where it has selected some.
      other: the encoders of a run of another backbone, by setting.
      models: names of this run's backbone and of the other one's.
      folder: of encoders that are trained anew, until all of them are.
    """

    settings: Mapping[Setting, Deployed]
    searches: Mapping[HeadName, Search]
    heads: Mapping[HeadName, SettingHead]
    read_texts: Callable[[], QuestionTexts]
    parts: Mapping[Part, str]
    rankings: Mapping[Setting, Ranking]
    without_hidden: Mapping[Setting, np.ndarray]
    other: Mapping[Setting, Deployed]
    models: tuple[str, ...]
    folder: Path


AnalysisOutput = Sequence[ResultRow | Study]  # rows, and cases to be shown


def row_of(
    experiment: str,
    subject: Subject | str,
    metric: str,
    value: float | None,
    n: int,
    columns: Mapping[str, Any],
    interval: tuple[float | None, float | None] = (None, None),
    reason: str | None = None,
) -> ResultRow:
    """Return a row; `columns` are those of its set, and others beside the subject's."""
    low, high = interval
    fields = {**Subject.of(subject)._asdict(), **columns, "reason": reason}
    fields |= {"value": value, "ci_low": low, "ci_high": high, "n": n}
    return ResultRow(experiment=experiment, metric=metric, **fields)


def per_setting(
    rows_of: Callable[[Deployed], list[ResultRow]],
) -> Callable[[AnalysisInput], AnalysisOutput]:
    """Return an analysis of every setting by itself."""
    return lambda inputs: [x for s in inputs.settings.values() for x in rows_of(s)]


def judged_sets(rows: Rows) -> list[tuple[str, str]]:
    """Return the test and held-out sets, all in-domain ones together first.

    Of one in-domain set alone there is one entry.
    """
    sets = [x for x in rows.evaluated_sets() if x[1] in ("test", "ood")]
    in_domain = [x for x in sets if x[1] == "test" and x[0] != IN_DOMAIN]
    return [x for x in sets if len(in_domain) > 1 or x not in in_domain]


def draw_rows(rows: Rows, where: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Draw `n` of some rows by a hash of their question, whatever their order."""

    def key(i: int) -> bytes:
        text = f"{seed} {rows.ids[i]} {rows.variants[i]}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return np.array(sorted(where.tolist(), key=key)[:n], dtype=np.int64)


class Ratio(NamedTuple):
    """A share or a mean: the sum of `numerator` over the sum of `denominator`.

    Attributes:
      numerator: `[..., n]`; leading axes such as seeds are summed.
      denominator: the same; 0 where an example does not count.
      columns: of the row beside those of its detector, such as `family`.
    """

    detector: Subject | str
    metric: str
    numerator: np.ndarray
    denominator: np.ndarray
    columns: Mapping[str, Any] = {}


def ratio_rows(
    experiment: str,
    ratios: Sequence[Ratio],
    ids: np.ndarray,
    set_fields: dict[str, Any],
    config: BootstrapConfig,
    reason: str = "no answer of this kind",
) -> list[ResultRow]:
    """Return ratios with 95 % intervals that resample questions.

    Args:
      experiment: of the rows.
      ratios: of the same `n` examples.
      ids: `[n]` questions; two wordings of one move together.
      set_fields: the rows' setting, dataset and split.
      config: of the resamples, which all ratios share.
      reason: why a ratio is undefined whose denominator is 0.
    """
    n = len(ids)
    numerators, denominators = (
        np.stack([np.asarray(x, np.float32).reshape(-1, n).sum(axis=0) for x in side])
        if ratios
        else np.zeros((0, n), np.float32)
        for side in ([r.numerator for r in ratios], [r.denominator for r in ratios])
    )
    draws: list[np.ndarray] = []
    if n and len(ratios):
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = [
                (numerators @ w) / (denominators @ w) for w in resamples(ids, config)
            ]
    joined = np.concatenate(draws, axis=1) if draws else np.zeros((len(ratios), 0))
    result = []
    for ratio, numerator, denominator, ratio_draws in zip(
        ratios, numerators, denominators, joined, strict=True
    ):
        total, value, ends, missing = (
            denominator.sum(dtype=np.float64),
            None,
            (),
            reason,
        )
        if total:
            value = float(numerator.sum(dtype=np.float64) / total)
            low, high = interval_of(ratio_draws)
            # Sums in single precision can leave a share of everything just beside it.
            ends, missing = (min(low, value), max(high, value)), None
        n_counted, columns = (
            int((denominator != 0).sum()),
            {**ratio.columns, **set_fields},
        )
        measured = experiment, ratio.detector, ratio.metric, value, n_counted, columns
        result.append(row_of(*measured, ends or (None, None), missing))
    return result

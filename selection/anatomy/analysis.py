"""What every analysis is given, and how shares become rows with intervals.

An analysis asks the encoders and heads of a finished run and gives rows. Nothing is
trained again, except where an analysis says so. A file of analyses lists them in its
`ANALYSES`; the stage does those of all files.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from beatrice.extract.records import IN_DOMAIN, Answer, Example, Setting
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.detector import HeadName, SettingHead
from beatrice.jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from beatrice.jaxprobe.rows import Rows
from beatrice.selection.anatomy import Study
from beatrice.selection.anatomy.encoders import Deployed
from beatrice.selection.exhaustive import Ranking

Part = Literal["closed_book", "with_context", "rankings", "ablations", "other"]


class Search(NamedTuple):
    """What a search has selected, and what its heads say.

    Attributes:
      reads: pass and letters of every selected encoder.
      scores: `[n_seeds, n_rows]` P(correct) by the head's name, "champion" and others.
    """

    reads: tuple[tuple[Setting, str], ...]
    scores: Mapping[str, np.ndarray]


class Texts(NamedTuple):
    """Questions by id, and answers by (question, setting, variant)."""

    examples: Mapping[str, Example]
    answers: Mapping[tuple[str, str, str], Answer]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AnalysisInput:
    """What an analysis is given.

    Attributes:
      settings: the encoders of every setting.
      searches: by branch.
      heads: calibrated, by branch.
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
    read_texts: Callable[[], Texts]
    parts: Mapping[Part, str]
    rankings: Mapping[Setting, Ranking]
    without_hidden: Mapping[Setting, np.ndarray]
    other: Mapping[Setting, Deployed]
    models: tuple[str, ...]
    folder: Path


class Findings(NamedTuple):
    """What an analysis gives: rows of the results, and cases where it shows some."""

    rows: list[ResultRow]
    cases: tuple[Study, ...] = ()


class Analysis(NamedTuple):
    """An analysis of the anatomy.

    Attributes:
      name: by which it is asked for.
      work: does it.
      needs: parts that its input must have.
      uses: parts that it reads where its input has them.
    """

    name: str
    work: Callable[[AnalysisInput], Findings]
    needs: tuple[Part, ...] = ()
    uses: tuple[Part, ...] = ()


def in_each_setting(
    work: Callable[[Deployed], list[ResultRow]],
) -> Callable[[AnalysisInput], Findings]:
    """Return what does some work in every setting, one after another."""

    def analyse(given: AnalysisInput) -> Findings:
        each = map(work, given.settings.values())
        return Findings([row for rows in each for row in rows])

    return analyse


def judged_sets(rows: Rows) -> list[tuple[str, str]]:
    """Return the test and held-out sets, all in-domain ones together first.

    One in-domain set alone is not a second time itself.
    """
    places = [p for p in rows.evaluated_sets() if p[1] in ("test", "ood")]
    own = [p for p in places if p[1] == "test" and p[0] != IN_DOMAIN]
    return [p for p in places if len(own) > 1 or p not in own]


def drawn(rows: Rows, where: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return `n` of some rows, or all of fewer; the same ones in whatever order.

    Questions are drawn by a hash of their id, so that the order in which they lie
    does not matter.
    """

    def key(i: int) -> bytes:
        text = f"{seed} {rows.ids[i]} {rows.variants[i]}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return np.array(sorted(where.tolist(), key=key)[:n], dtype=np.int64)


class Ratio(NamedTuple):
    """A share or a mean: the sum of `part` over the sum of `whole`.

    Attributes:
      detector: of the row.
      metric: of the row.
      part: `[..., n]`; leading axes such as seeds are summed.
      whole: the same; 0 where an example does not count.
    """

    detector: str
    metric: str
    part: np.ndarray
    whole: np.ndarray


def ratio_rows(
    experiment: str,
    ratios: Sequence[Ratio],
    ids: np.ndarray,
    place: dict[str, Any],
    config: BootstrapConfig,
    nothing: str = "no answer of this kind",
) -> list[ResultRow]:
    """Return ratios with 95 % intervals that resample questions.

    Args:
      experiment: of the rows.
      ratios: of the same `n` examples.
      ids: `[n]` questions; two wordings of one move together.
      place: the rows' setting, dataset and split.
      config: of the resamples, which all ratios share.
      nothing: why a ratio is undefined whose whole is 0.
    """
    n = len(ids)
    parts, wholes = (
        np.stack([np.asarray(x, np.float32).reshape(-1, n).sum(axis=0) for x in side])
        if ratios
        else np.zeros((0, n), np.float32)
        for side in ([r.part for r in ratios], [r.whole for r in ratios])
    )
    draws: list[np.ndarray] = []
    if n and len(ratios):
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = [(parts @ w) / (wholes @ w) for w in resamples(ids, config)]
    joined = np.concatenate(draws, axis=1) if draws else np.zeros((len(ratios), 0))
    made = []
    for one, part, whole, own in zip(ratios, parts, wholes, joined, strict=True):
        fields = dict(experiment=experiment, detector=one.detector, metric=one.metric)
        fields |= {**place, "n": int((whole != 0).sum())}
        total = float(whole.sum(dtype=np.float64))
        if total == 0:
            made.append(ResultRow(**fields, value=None, reason=nothing))
            continue
        low, high = interval_of(own)
        value = float(part.sum(dtype=np.float64)) / total
        # Sums in single precision can leave a share of everything just beside it.
        low, high = min(low, value), max(high, value)
        made.append(ResultRow(**fields, value=value, ci_low=low, ci_high=high))
    return made

"""What every analysis is given, and how shares become rows with intervals.

An analysis asks the encoders and heads of a finished run, setting by setting, and gives
rows. Nothing is trained again, except where an analysis says so.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from extract.records import IN_DOMAIN, Setting
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from extract.run.results import ResultRow
from extract.store.read import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.config import GridConfig
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from jaxprobe.stage import grid_config, open_rows, run_bootstrap

EVERY_FAMILY = "HPRA"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A setting of a finished run; what several analyses read is read once.

    Attributes:
      run: with selected encoders.
      setting: whose answers are looked at.
      selected: encoders of this pass that some search has selected, by their letters.
    """

    run: RunDir
    setting: Setting
    selected: tuple[str, ...]

    @cached_property
    def _loaded(self) -> tuple[FeatureStore, Rows]:
        return open_rows(self.run, self.setting)

    @property
    def store(self) -> FeatureStore:
        """The setting's signals."""
        return self._loaded[0]

    @property
    def rows(self) -> Rows:
        """What the rows of the store are."""
        return self._loaded[1]

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Weights, and what all encoders say of all rows; see `jaxprobe.fit.stage`."""
        return checkpoint.restore(self.run.encoders(self.setting))[0]

    @cached_property
    def config(self) -> GridConfig:
        """How the encoders are trained."""
        return grid_config(self.run)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """All settings of the run."""
        return settings_of(self.run)

    @property
    def n_seeds(self) -> int:
        """Training seeds of every encoder."""
        return self.config.train.n_seeds

    @cached_property
    def logits(self) -> np.ndarray:
        """What the encoders say of every row, `[n_seeds, 15, n_rows]`."""
        logits = np.asarray(self.tree["outputs"]["logits"])
        return logits.reshape(self.n_seeds, N_SUBSETS, -1)

    @cached_property
    def bootstrap(self) -> BootstrapConfig:
        """How intervals are made."""
        return run_bootstrap(self.run)

    @cached_property
    def queried(self) -> tuple[str, ...]:
        """Encoders that are looked into: that of all families, and selected ones.

        The paper queries the combination encoders that its search selected. Ours may
        have selected a single family, which decides alone; the encoder of all four is
        the one that every run has.
        """
        combined = (name for name in self.selected if len(name) > 1)
        return tuple(dict.fromkeys([EVERY_FAMILY, *combined]))

    @cached_property
    def judged(self) -> np.ndarray:
        """Labelled test and held-out rows, `[n]` indices into the store."""
        is_judged = np.isin(self.rows.splits, ("test", "ood")) & self.rows.is_labelled
        return np.flatnonzero(is_judged)

    def printed(self, name: str) -> str:
        """Return an encoder's printed name, [HP] with context and (HP) without."""
        return f"({name})" if self.setting == "closed_book" else f"[{name}]"


def subset_logits(evidence: Evidence, name: str) -> np.ndarray:
    """Return what one encoder says of every row, `[n_seeds, n_rows]`."""
    return evidence.logits[:, SUBSET_NAMES.index(name)]


def judged_sets(rows: Rows) -> list[tuple[str, str]]:
    """Return the test and held-out sets, all in-domain ones together first.

    One in-domain set alone is not a second time itself.
    """
    places = [p for p in rows.evaluated_sets() if p[1] in ("test", "ood")]
    own = [p for p in places if p[1] == "test" and p[0] != IN_DOMAIN]
    return [p for p in places if len(own) > 1 or p not in own]


def some_rows(rows: Rows, where: np.ndarray) -> Rows:
    """Return what some rows are, `[n]` indices."""
    fields = ("ids", "datasets", "splits", "variants", "labels", "is_labelled")
    return dataclasses.replace(rows, **{f: getattr(rows, f)[where] for f in fields})


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


def place_of(setting: Setting, dataset: str, split: str) -> dict[str, Any]:
    """Return the fields of a row that say where it was measured."""
    return {"setting": setting, "dataset": dataset, "split": split}

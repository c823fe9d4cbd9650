"""What every analysis is given and takes, and how shares become rows with intervals.

An analysis asks the encoders and heads of a finished run, setting by setting, and gives
rows. Nothing is trained again, except where an analysis says so.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from extract.records import IN_DOMAIN, Setting
from extract.run.contents import settings_of
from extract.run.directory import RunDir
from extract.run.results import ResultRow, read_rows, rows_file
from extract.store.read import FeatureStore
from jaxprobe import checkpoint
from jaxprobe.evaluation import bootstrap_of
from jaxprobe.features.reading import family_dims
from jaxprobe.features.rows import Rows, load_rows, rows_at_once
from jaxprobe.features.subsets import N_SUBSETS, SUBSET_NAMES
from jaxprobe.features.widths import widths_of
from jaxprobe.metrics import BootstrapConfig, interval_of, resamples
from jaxprobe.settings import GridConfig, grid_config

EVERY_FAMILY = "HPRA"
Tick = Callable[[], None]


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
        return load_rows(self.run, self.setting)

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
        return bootstrap_of(self.run)

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

    @property
    def n_tokens(self) -> np.ndarray:
        """Tokens of every row that encoders read, `[n_rows]`."""
        spans = self.store.spec.spans
        return (spans[..., 1] - spans[..., 0]).sum(axis=1)

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


_SHARE = 1 / 20  # of what resampling a score takes: two products beside two sorted sums
# Bytes of the counts of resamples that are held together, and of three arrays as large
# that a sorted score makes of them.
RESAMPLING = 4 * 2**24 * 4


class Load(NamedTuple):
    """What an analysis does in a setting, counted.

    Attributes:
      steps: gradient steps of all tokens of an answer.
      passes: steps that forward passes without signals take; several analyses read the
        same ones, and the first of a start makes them.
      scores: answers whose AUROC is resampled, times scores and differences.
      shares: answers of which a share is resampled, times shares.
      layers: states of a layer of an answer that are read and fitted.
      held: bytes of the arrays that lie in memory together.
    """

    steps: float = 0.0
    passes: float = 0.0
    scores: float = 0.0
    shares: float = 0.0
    layers: float = 0.0
    held: int = 0


def n_resampled(evidence: Evidence) -> int:
    """Return the answers of all judged sets, those of all in-domain sets again."""
    rows = evidence.rows
    return sum(len(rows.where(split, name)) for name, split in judged_sets(rows))


def part_bytes(evidence: Evidence) -> int:
    """Return what the largest part of rows takes, with what is made of it.

    A copy with signals replaced, and the encoder's activations, no more than that.
    """
    spans = evidence.store.spec.spans
    widths, dims = widths_of(spans[..., 1] - spans[..., 0]), family_dims(evidence.store)
    n_rows = min(len(evidence.judged), rows_at_once(widths, dims))
    return 2 * 4 * n_rows * sum(widths) * dims.total


def pooled_bytes(evidence: Evidence, n_rows: int) -> int:
    """Return what regression holds: pooled signals, scaled, and side by side."""
    n_parts = evidence.store.spec.spans.shape[1] + 2
    return 3 * 4 * n_rows * n_parts * family_dims(evidence.store).total


class Rates(NamedTuple):
    """Seconds that this run took for one of each, zero where it was not done.

    Attributes:
      step: a gradient step of one token, of `train`.
      score: resampling the AUROC of one answer's score, of `evaluate`.
      layer: one answer's state of one layer, of `sweep`.
    """

    step: float
    score: float
    layer: float

    @property
    def in_words(self) -> str:
        """Say of what forecasts are made."""
        step, score, layer = (1e6 * x for x in self)
        return (
            f"forecasts are counts at the rates of this run: {step:.2f} µs a gradient "
            f"step of a token (train), {score:.1f} µs resampling an answer's score "
            f"(evaluate), {layer:.1f} µs a layer's state (sweep); compiling, reading "
            "and regressions come on top; memory is what this process holds now, what "
            "resampling takes, and the largest arrays"
        )

    def seconds(self, load: Load, n_tokens: float) -> float:
        """Return what a load takes where answers have so many tokens."""
        return (
            (load.steps + load.passes) * n_tokens * self.step
            + (load.scores + _SHARE * load.shares) * self.score
            + load.layers * self.layer
        )


def rates_of(run: RunDir, settings: Sequence[Evidence], n_swept: int) -> Rates:
    """Return what this run's own stages took.

    Args:
      run: trained and selected.
      settings: of the run.
      n_swept: most rows of a split that `sweep` read.
    """
    took = {
        name: 0.0 if (record := run.stage_record(name)) is None else record.seconds
        for name in ("train", "evaluate", "sweep")
    }
    n_steps, n_states = 0.0, 0
    for own in settings:
        n_epochs = np.asarray(own.tree["info"]["n_epochs"]).astype(float)
        control = n_epochs.mean() * own.n_seeds
        n_train = len(own.rows.where("train"))
        n_steps += (n_epochs.sum() + control) * n_train * float(own.n_tokens.mean())
        n_rows = (len(own.rows.where(split)) for split in ("train", "validation"))
        n_layers = len(own.store.spec.hidden_layers)
        n_states += n_layers * sum(min(n, n_swept) for n in n_rows)
    path = rows_file(run, "evaluate")
    resampled = read_rows(path) if path.exists() else ()
    n_scores = sum(
        row.n
        for row in resampled
        if row.metric.startswith("auroc") and row.ci_low is not None
    )
    return Rates(
        took["train"] / n_steps,
        took["evaluate"] / max(n_scores, 1),
        took["sweep"] / max(n_states, 1),
    )

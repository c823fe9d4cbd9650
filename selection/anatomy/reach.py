"""How far it reaches: how much data it takes, other sets, another backbone.

Encoders are trained anew here. Beyond the paper: a user with 200 labelled answers asks
whether they are enough; so of n labels four fifths train and one fifth stops the
training (or chooses the penalty of a linear probe). And a detector of one question set
is read on each other one, all trained on equally many answers; a held-out set, on which
nothing of the run is trained, teaches with one half of its questions and is read on the
other.

To bound what it costs, encoders have one seed, three sizes and one drawing of answers
(of which the larger hold the smaller); the probe has more sizes. All sizes are repeated
to one number of rows, so that all take the same steps in the same executable. Answers
whose text is far longer than most are not drawn.

Do the same combinations win on another backbone? Spearman's correlation of the fifteen
encoders' AUROC (paper, appendix E, figure across backbones), with an interval that
resamples both runs' questions.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.stats import rankdata

from beatrice.extract.records import IN_DOMAIN, Setting
from beatrice.extract.run.rows import ResultRow
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.evaluation import Scored, detection_rows
from beatrice.jaxprobe.families import (
    LETTERS,
    SUBSET_NAMES,
    FamilyTokens,
    subset_index,
    widths_of,
)
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    interval_of,
    resamples,
    weighted_metrics,
)
from beatrice.jaxprobe.rows import Bucket, Rows, TrainingSet
from beatrice.jaxprobe.train import train_encoders
from beatrice.selection.anatomy.analysis import (
    Analysis,
    AnalysisInput,
    Findings,
    drawn,
)
from beatrice.selection.anatomy.combining import pairs
from beatrice.selection.anatomy.encoders import EVERY_FAMILY, Deployed
from beatrice.selection.anatomy.places import linear_scores, pooled_signals

CURVE, TRANSFER = "anatomy_labels", "anatomy_transfer"
SIZES = (100, 200, 400, 800, 1600)  # labelled answers
ENCODER_SIZES = (100, 400, 1600)  # of which encoders are trained on these
_FOR_VALIDATION = 5  # one of so many labels
PROBE = "probe:HPRA"
_ONE_CLASS = "the drawn answers hold one class"
BACKBONES, OTHER_PAIRS = "anatomy_backbones", "anatomy_other_pairs"


def candidates(deployed: Deployed, split: str) -> np.ndarray:
    """Return a split's labelled rows in their original wording, few of them left out.

    Padding makes every row as long as the longest: those of more than four times the
    median's tokens are left out.
    """
    rows = deployed.rows
    where = rows.where(split)
    where = where[rows.variants[where] == "original"]
    n_tokens = deployed.data.lengths[where].sum(axis=1)
    return where[n_tokens <= 4 * np.median(n_tokens)] if len(where) else where


def parted(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Part drawn rows into those that train and those that validate, in turn."""
    is_valid = np.arange(len(order)) % _FOR_VALIDATION == _FOR_VALIDATION - 1
    return order[~is_valid], order[is_valid]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Few:
    """Trains encoders on few rows of a setting.

    Attributes:
      deployed: of the setting.
      n_train: rows of an epoch, to which fewer are repeated.
      n_valid: likewise.
      lengths: padded length of every span.
      folder: where finished members are kept until all are done.
    """

    deployed: Deployed
    n_train: int
    n_valid: int
    lengths: tuple[int, ...]
    folder: Path

    @classmethod
    def of(
        cls, deployed: Deployed, drawn_rows: np.ndarray, n_most: int, folder: Path
    ) -> "Few":
        """Return what trains on at most `n_most` of some rows."""
        train, valid = parted(np.arange(n_most))
        return cls(
            deployed=deployed,
            n_train=len(train),
            n_valid=len(valid),
            lengths=widths_of(deployed.data.lengths[drawn_rows]),
            folder=folder,
        )

    def scores(
        self, names: Sequence[str], order: np.ndarray, where: np.ndarray
    ) -> dict[str, np.ndarray] | None:
        """Train encoders on some labelled rows, and return what they say of others.

        Args:
          names: of encoders.
          order: `[n]` rows that are trained and validated on, as `parted` takes them.
          where: `[m]` rows that are scored.

        Returns:
          `[m]` logits by name; None where a part of the rows holds one class.
        """
        labels, config = self.deployed.rows.labels, self.deployed.config
        parts = parted(order)
        if any(len(set(labels[part].tolist())) < 2 for part in parts):
            return None
        sizes = self.n_train, self.n_valid
        repeated = [np.resize(p, n) for p, n in zip(parts, sizes, strict=True)]
        taken = np.concatenate([*repeated, where])
        places = np.split(np.arange(len(taken)), np.cumsum(sizes))
        data = self._rows(taken, places[:2])
        digest = hashlib.sha256(taken.tobytes()).hexdigest()
        one_seed = dataclasses.replace(config.train, n_seeds=1)
        trained, outputs = train_encoders(
            data,
            dataclasses.replace(config, train=one_seed, stream=None),
            subsets=[subset_index(name) for name in names],
            cache=Cache(self.folder / digest[:16], digest),
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        at = {m.subset: i for i, m in enumerate(trained.members)}
        own = np.asarray(outputs.logits)[:, places[2]]
        return {name: own[at[subset_index(name)]] for name in names}

    def _rows(self, taken: np.ndarray, places: Sequence[np.ndarray]) -> TrainingSet:
        """Return some rows of the store as if they were all; no others are read.

        Args:
          taken: `[n]` rows of the store, some more than once.
          places: of training and validation rows among them.
        """
        data = self.deployed.data

        def read(where: np.ndarray, *widths: tuple[int, ...]) -> FamilyTokens:
            return data.read(taken[where], *widths)

        return dataclasses.replace(
            data,
            rows=data.rows.take(taken),
            lengths=data.lengths[taken],
            read=read,
            read_train=read,
            where=tuple(places),
            in_memory=tuple(
                (Bucket(np.arange(len(own)), read(own, self.lengths)),)
                for own in places
            ),
        )


def selected_here(given: AnalysisInput, setting: Setting) -> list[str]:
    """Return the selected encoders of a pass, of the search in this pass alone."""
    branch = "single_pass" if setting == "with_context" else setting
    return [name for _, name in given.searches[branch].reads]


def _scored(name: str, scores: np.ndarray, reason: str = "") -> Scored:
    if reason:
        return Scored(name=name, scores=scores[None], reason=reason)
    return Scored(name=name, scores=scores[None])


def learning_curve(given: AnalysisInput) -> Findings:
    """Return AUROC on test and held-out sets against the number of labelled answers.

    `encoder:H at 400` and so on; `selected at 400` is the mean of the probabilities of
    the selected encoders of this pass, which is how a head begins; `probe:HPRA at 400`
    logistic regression on all four families.
    """
    each = (_curve(given, deployed) for deployed in given.settings.values())
    return Findings([row for rows in each for row in rows])


def _curve(given: AnalysisInput, deployed: Deployed) -> list[ResultRow]:
    rows, judged = deployed.rows, deployed.judged
    pool = np.concatenate(
        [candidates(deployed, split) for split in ("train", "validation")]
    )
    order = drawn(rows, pool, max(SIZES), deployed.seed)
    sizes = [n for n in SIZES if n <= len(order)]
    if not sizes:
        return []
    where = np.concatenate([order, judged])
    blocks = pooled_signals(deployed, where)
    selected = selected_here(given, deployed.setting)
    names = tuple(dict.fromkeys([*LETTERS, EVERY_FAMILY, *selected]))
    n_most = max(n for n in sizes if n in ENCODER_SIZES)
    few = Few.of(deployed, order, n_most, given.folder)
    scored: list[Scored] = []
    for n in sizes:
        train, valid = parted(np.arange(n))
        labels = rows.labels[where]
        for letters, chosen in (
            *((x, [blocks[f]]) for f, x in enumerate(LETTERS)),
            (EVERY_FAMILY, blocks),
        ):
            scores = linear_scores(chosen, labels, train, valid)[len(order) :]
            scored.append(_scored(f"probe:{letters} at {n}", scores, _ONE_CLASS))
        if n not in ENCODER_SIZES:
            continue
        found = few.scores(names, order[:n], judged)
        found = found or dict.fromkeys(names, np.full(len(judged), np.nan))
        shown = [*LETTERS, EVERY_FAMILY]
        scored += [_scored(f"encoder:{x} at {n}", found[x], _ONE_CLASS) for x in shown]
        mean = np.mean([1 / (1 + np.exp(-found[x])) for x in selected], axis=0)
        scored.append(_scored(f"selected at {n}", mean, _ONE_CLASS))
    own = rows.take(judged)
    made = detection_rows(scored, own, deployed.bootstrap, CURVE)
    n_all = sum(len(rows.where(split)) for split in ("train", "validation"))
    place = deployed.place(IN_DOMAIN, "test")
    fields = dict(experiment=CURVE, detector="run", metric="labels", n=n_all)
    of_run = ResultRow(**fields, **place, value=float(n_all))
    return [of_run, *(row for row in made if row.metric == "auroc")]


def _half(ids: Iterable[str]) -> np.ndarray:
    """Return which questions teach, by a hash of their id; the others are read on."""
    digests = (hashlib.blake2b(f"half {one}".encode()).digest() for one in ids)
    return np.array([digest[0] % 2 == 0 for digest in digests], bool)


def sources_of(rows: Rows, pools: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the rows from which every set may teach, `[n]` indices by its name.

    Args:
      rows: of a setting.
      pools: rows that may be drawn, by split.
    """
    found = {}
    taught = np.concatenate([pools["train"], pools["validation"]])
    for dataset in dict.fromkeys(rows.datasets[taught].tolist()):
        found[dataset] = taught[rows.datasets[taught] == dataset]
    held_out = pools["ood"]
    held_out = held_out[_half(rows.ids[held_out])] if len(held_out) else held_out
    for dataset in dict.fromkeys(rows.datasets[held_out].tolist()):
        found[dataset] = held_out[rows.datasets[held_out] == dataset]
    return found


def transfer(given: AnalysisInput) -> Findings:
    """Return AUROC on every set of detectors that were trained on one set each.

    `encoder:HPRA from NAME` and `probe:HPRA from NAME`, from as many answers of each.
    """
    each = (_matrix(deployed, given.folder) for deployed in given.settings.values())
    return Findings([row for rows in each for row in rows])


def _matrix(deployed: Deployed, folder: Path) -> list[ResultRow]:
    rows, seed = deployed.rows, deployed.seed
    splits = ("train", "validation", "ood")
    sources = sources_of(rows, {s: candidates(deployed, s) for s in splits})
    n = min(min(map(len, sources.values())), max(SIZES))
    taught = {name: drawn(rows, own, n, seed) for name, own in sources.items()}
    judged = deployed.judged
    is_read = (rows.splits[judged] == "test") | ~_half(rows.ids[judged])
    judged = judged[is_read]
    every = np.concatenate([*taught.values(), judged])
    blocks = pooled_signals(deployed, every)
    few = Few.of(deployed, np.concatenate(list(taught.values())), n, folder)
    scored = []
    for place, (name, order) in enumerate(taught.items()):
        train, valid = (place * n + part for part in parted(np.arange(n)))
        scores = linear_scores(blocks, rows.labels[every], train, valid)
        own = scores[len(taught) * n :]
        scored.append(_scored(f"{PROBE} from {name}", own, _ONE_CLASS))
        found = few.scores([EVERY_FAMILY], order, judged)
        logits = found[EVERY_FAMILY] if found else np.full(len(judged), np.nan)
        scored.append(
            _scored(f"encoder:{EVERY_FAMILY} from {name}", logits, _ONE_CLASS)
        )
    made = detection_rows(scored, rows.take(judged), deployed.bootstrap, TRANSFER)
    kept = [row for row in made if row.metric == "auroc"]
    return [row for row in kept if row.dataset != IN_DOMAIN]


class Ranked(NamedTuple):
    """What the encoders of a run say of its answers of a split.

    Attributes:
      ids: `[n]` questions; two wordings of one share an id.
      labels: `[n]` bool.
      scores: `[n_seeds, 15, n]`, higher = more likely correct.
    """

    ids: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


class Agreement(NamedTuple):
    """Spearman's correlation of two rankings of the subsets, with its 95 % interval."""

    value: float
    low: float
    high: float


def subset_aurocs(found: Ranked, weights: np.ndarray) -> np.ndarray:
    """Return every subset's AUROC, mean over seeds, under many weightings.

    Args:
      found: of a run.
      weights: `[n, n_resamples]` float32 counts.

    Returns:
      `[n_subsets, n_resamples]`; NaN where a resample lacks a class.
    """
    return np.stack(
        [
            np.mean(
                [
                    weighted_metrics(own, found.labels, weights)["auroc"]
                    for own in found.scores[:, subset]
                ],
                axis=0,
            )
            for subset in range(found.scores.shape[1])
        ]
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation down each column, `[n_subsets, n]` each; NaN if constant.

    Returns:
      `[n]` in [-1, 1].
    """
    a, b = (rankdata(x, axis=0, nan_policy="propagate") for x in (first, second))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))


def agreement(first: Ranked, second: Ranked, config: BootstrapConfig) -> Agreement:
    """Do two runs rank the subsets of signal families alike?

    The paper's conservation of the ranking between its two models, .78. It gives no
    interval. Ours resamples the validation questions of both runs and computes all
    AUROCs anew. It does not resample the subsets: they are all there are, and they
    share families, so they are no sample of anything. What is by chance is which
    questions were asked. A question that both runs were asked is drawn for both
    together. Resampled AUROCs have more noise than the sample's, so the interval lies
    somewhat nearer to zero than one around the value would.

    Args:
      first: a run's validation answers.
      second: those of another run with the same subsets.
      config: of the bootstrap.
    """
    n = len(first.ids)
    ones = [np.ones((len(x.ids), 1), np.float32) for x in (first, second)]

    def correlate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return rank_correlation(subset_aurocs(first, a), subset_aurocs(second, b))

    value = float(correlate(*ones)[0])
    if not np.isfinite(value):
        return Agreement(value, value, value)
    together = np.concatenate([first.ids, second.ids])
    blocks = resamples(together, config)
    draws = np.concatenate([correlate(block[:n], block[n:]) for block in blocks])
    return Agreement(value, *interval_of(draws))


def _answers(deployed: Deployed, split: str) -> Ranked:
    """Return what a run's encoders say of its in-domain answers of a split."""
    rows = deployed.rows
    where = rows.where(split)
    return Ranked(rows.ids[where], rows.labels[where], deployed.logits[:, :, where])


def _auroc_rows(
    found: Ranked, config: BootstrapConfig, which: str, place: dict
) -> list[ResultRow]:
    """Return the AUROC of every subset on one run, with its interval."""
    draws = np.concatenate(
        [subset_aurocs(found, block) for block in resamples(found.ids, config)], axis=1
    )
    made = []
    for subset, name in enumerate(SUBSET_NAMES):
        values = [auroc(own, found.labels) for own in found.scores[:, subset]]
        fields = dict(experiment=BACKBONES, detector=f"{which} {name}", metric="auroc")
        fields |= place | {"n": len(found.labels)}
        if reason := next((v.reason for v in values if v.reason), None):
            made.append(ResultRow(**fields, value=None, reason=reason))
            continue
        low, high = interval_of(draws[subset])
        value = float(np.mean([v.value for v in values]))
        made.append(ResultRow(**fields, value=value, ci_low=low, ci_high=high))
    return made


def backbones(given: AnalysisInput) -> Findings:
    """Return how two runs' encoders compare on test answers, in shared settings.

    And what pairs of families gain on the other backbone.
    """
    shared = [setting for setting in given.settings if setting in given.other]
    if not shared:
        raise ValueError(
            f"this run has {', '.join(given.settings)}, the other one has "
            f"{', '.join(given.other)}, and they have no setting in common; give a run "
            "whose questions were asked in the same way"
        )
    made: list[ResultRow] = []
    for setting in shared:
        both = given.settings[setting], given.other[setting]
        config, place = both[0].bootstrap, both[0].place(IN_DOMAIN, "test")
        ranked = [_answers(deployed, "test") for deployed in both]
        for which, side in zip(("first", "second"), ranked, strict=True):
            made += _auroc_rows(side, config, which, place)
        alike = agreement(*ranked, config)
        fields = dict(experiment=BACKBONES, metric="spearman", n=len(SUBSET_NAMES))
        fields |= {"detector": " | ".join(given.models), **place}
        if np.isfinite(alike.value):
            ends = {"ci_low": alike.low, "ci_high": alike.high}
            made.append(ResultRow(**fields, value=alike.value, **ends))
        else:
            reason = "one class only, or all subsets are equally good"
            made.append(ResultRow(**fields, value=None, reason=reason))
    of_pairs = [row for setting in shared for row in pairs(given.other[setting])]
    made += [msgspec.structs.replace(row, experiment=OTHER_PAIRS) for row in of_pairs]
    return Findings(made)


ANALYSES = (
    Analysis("labels", learning_curve),
    Analysis("transfer", transfer),
    Analysis("backbones", backbones, needs=("other",)),
)

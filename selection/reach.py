"""How far a detector generalises: number of labels, other sets, another backbone.

The first two go beyond the paper, and retrain encoders. Four fifths of n labelled
answers are trained on, and one fifth serves for early stopping (or chooses the penalty
of a linear probe). Detectors trained on one question set, all on equally many
answers, are tested on every set; a held-out set trains with one half of its
questions and tests on the other.

To bound the cost, encoders have one seed, three sizes and one random sample of answers
(larger samples contain the smaller). All samples are repeated to a common number of
rows, so that all take the same steps in the same executable.

Another backbone: Spearman's correlation of the fifteen encoders' AUROC on two runs
(paper, appendix G, figure across backbones).
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
from beatrice.extract.run.rows import ResultRow, Subject, encoder
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import PROTOCOL, GridConfig
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import LETTERS, SUBSET_NAMES, subset_index, widths_of
from beatrice.jaxprobe.metrics import (
    BootstrapConfig,
    auroc,
    interval_of,
    resamples,
    weighted_metrics,
    wider_interval,
)
from beatrice.jaxprobe.rows import Bucket, StoreRows, TrainingSet
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.jaxprobe.train import train_encoders
from beatrice.selection.analysis import (
    EVERY_FAMILY,
    AnalysisInput,
    AnalysisOutput,
    Deployed,
    draw_rows,
    per_setting,
    row_of,
)
from beatrice.selection.decisions import pairs
from beatrice.selection.places import linear_scores, pooled_signals

CURVE, TRANSFER = "anatomy_labels", "anatomy_transfer"
SIZES = (100, 200, 400, 800, 1600)  # labelled answers
ENCODER_SIZES = (100, 400, 1600)  # the sizes on which encoders are trained
_FOR_VALIDATION = 5  # every fifth label is for validation
_SINGLE_CLASS = "the drawn answers hold one class, or a single answer of the other"
_NONE_DRAWN = "too few of its labelled answers could be drawn to teach"
BACKBONES, OTHER_PAIRS = "anatomy_backbones", "anatomy_other_pairs"


def candidates(deployed: Deployed, split: str) -> np.ndarray:
    """Return a split's labelled rows in their original wording, without very long ones.

    Padding makes every row as long as the longest, so rows with more than four times
    the median number of tokens are left out.
    """
    rows = deployed.rows
    where = rows.where(split)
    where = where[rows.variants[where] == "original"]
    n_tokens = deployed.data.lengths[where].sum(axis=1)
    return where[n_tokens <= 4 * np.median(n_tokens)] if len(where) else where


def train_valid_split(order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split drawn rows: every fifth is for validation, the others for training."""
    is_valid = np.arange(len(order)) % _FOR_VALIDATION == _FOR_VALIDATION - 1
    return order[~is_valid], order[is_valid]


@dataclasses.dataclass(frozen=True, eq=False)
class SmallSampleTrainer:
    """Trains encoders on small samples of a setting's rows."""

    deployed: Deployed  # of the setting
    drawn: np.ndarray  # all rows from which samples are taken; padded to one width
    n_most: int  # size of the largest sample; smaller ones are repeated up to it
    folder: Path  # for finished members, until all are finished

    def scores(
        self, names: Sequence[str], order: np.ndarray, where: np.ndarray
    ) -> dict[str, np.ndarray] | None:
        """Train encoders on labelled rows `order`, and return logits of rows `where`.

        `names` are the encoders' letters; for `order` `[n]` see `train_valid_split`.
        Logits are `[m]` by name; None if training or validation rows have one class, or
        training rows for encoders that begin as regressions one answer of a class.
        """
        labels = self.deployed.rows.labels
        splits = train_valid_split(order)
        # A regression that leaves out a fold needs two training answers of each class.
        least = 1 + self._config.encoder.is_linear_first, 1
        counts = (np.bincount(labels[split], minlength=2).min() for split in splits)
        if any(n < fewest for n, fewest in zip(counts, least, strict=True)):
            return None
        sizes = [len(x) for x in train_valid_split(np.arange(self.n_most))]
        repeated = [np.resize(p, n) for p, n in zip(splits, sizes, strict=True)]
        taken = np.concatenate([*repeated, where])
        indices = np.split(np.arange(len(taken)), np.cumsum(sizes))
        data = self._rows(taken, indices[:2])
        trained = train_encoders(
            data,
            self._config,
            subsets=[subset_index(name) for name in names],
            cache=self.cache(taken),
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        assert trained is not None  # only a share of the members returns None
        logits = np.asarray(trained[1].logits)[:, indices[2]]
        subsets = [member.subset for member in trained[0].members]
        return {name: logits[subsets.index(subset_index(name))] for name in names}

    @property
    def _config(self) -> GridConfig:
        config = self.deployed.config
        train = dataclasses.replace(config.train, n_seeds=1)
        return dataclasses.replace(config, train=train, stream=None)

    def cache(self, taken: np.ndarray) -> Cache:
        """Return the cache of members trained and scored on rows `[n]`."""
        source = self.deployed
        text = (
            f"{PROTOCOL} {source.store.id} {source.layer} {self.n_most} {self._config}"
        )
        labels = source.rows.labels[taken]
        digest = hashlib.sha256(text.encode() + taken.tobytes() + labels.tobytes())
        return Cache(self.folder / digest.hexdigest()[:16], digest.hexdigest())

    def _rows(self, taken: np.ndarray, splits: Sequence[np.ndarray]) -> TrainingSet:
        """Return a training set of the given rows only.

        Args:
          taken: `[n]` rows of the store, which may repeat.
          splits: indices into `taken` of the training and validation rows.
        """
        data = self.deployed.data
        lengths = widths_of(data.lengths[self.drawn])

        def read(where: np.ndarray, *widths: tuple[int, ...]) -> FamilyTokens:
            return data.read(taken[where], *widths)

        return dataclasses.replace(
            data,
            rows=data.rows.take(taken),
            lengths=data.lengths[taken],
            read=read,
            read_train=read,
            where=tuple(splits),
            in_memory=tuple(
                (Bucket(np.arange(len(split)), read(split, lengths)),)
                for split in splits
            ),
        )


def selected_members(inputs: AnalysisInput, setting: Setting) -> list[str]:
    """Return the encoders selected by the search within this pass only."""
    branch = "single_pass" if setting == "with_context" else setting
    return [name for _, name in inputs.searches[branch].reads]


def _scored(name: Subject, scores: np.ndarray) -> DetectorScores:
    return DetectorScores(name=name, scores=scores[None], reason=_SINGLE_CLASS)


def _curve(inputs: AnalysisInput, deployed: Deployed) -> list[ResultRow]:
    rows, judged = deployed.rows, deployed.judged
    pool = np.concatenate(
        [candidates(deployed, split) for split in ("train", "validation")]
    )
    order = draw_rows(rows, pool, max(SIZES), deployed.bootstrap.seed)
    sizes = [n for n in SIZES if n <= len(order)]
    if not sizes:
        return []
    where = np.concatenate([order, judged])
    blocks, labels = pooled_signals(deployed, where), rows.labels[where]
    selected = selected_members(inputs, deployed.setting)
    names = tuple(dict.fromkeys([*LETTERS, EVERY_FAMILY, *selected]))
    n_most = max(n for n in sizes if n in ENCODER_SIZES)
    trainer = SmallSampleTrainer(deployed, order, n_most, inputs.folder)
    scored: list[DetectorScores] = []
    for n in sizes:
        train, valid = train_valid_split(np.arange(n))
        for letters, features in (
            *((x, [blocks[f]]) for f, x in enumerate(LETTERS)),
            (EVERY_FAMILY, blocks),
        ):
            scores = linear_scores(features, labels, train, valid)[len(order) :]
            scored.append(_scored(Subject("probe", letters, n_labels=n), scores))
        if n not in ENCODER_SIZES:
            continue
        logits = trainer.scores(names, order[:n], judged)
        logits = logits or dict.fromkeys(names, np.full(len(judged), np.nan))
        for letters in (*LETTERS, EVERY_FAMILY):
            reader = encoder(letters)._replace(n_labels=n)
            scored.append(_scored(reader, logits[letters]))
        mean = np.mean([1 / (1 + np.exp(-logits[x])) for x in selected], axis=0)
        scored.append(_scored(Subject("selected", n_labels=n), mean))
    result = detection_rows(scored, rows.take(judged), deployed.bootstrap, CURVE)
    n_all = sum(len(rows.where(split)) for split in ("train", "validation"))
    set_fields = deployed.set_fields(IN_DOMAIN, "test")
    of_run = row_of(CURVE, "run", "labels", float(n_all), n_all, set_fields)
    return [of_run, *(row for row in result if row.metric == "auroc")]


def learning_curve(inputs: AnalysisInput) -> AnalysisOutput:
    """Return AUROC on test and held-out sets against the number of labelled answers.

    Rows are `encoder:H at 400` and so on; `selected at 400` is the mean probability of
    this pass's selected encoders, without a head; `probe:HPRA at 400` is a logistic
    regression on all four families.
    """
    return per_setting(lambda deployed: _curve(inputs, deployed))(inputs)


def _half(ids: Iterable[str]) -> np.ndarray:
    """Return which held-out questions to train on, by a hash of their ids."""
    digests = (hashlib.blake2b(f"half {x}".encode()).digest() for x in ids)
    return np.array([digest[0] % 2 == 0 for digest in digests], bool)


def sources_of(
    rows: StoreRows, pools: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return each set's rows that may be trained on, `[n]` indices by its name.

    They are empty for a set without such rows in the pools.
    """
    held_out = pools["ood"][_half(rows.ids[pools["ood"]])]
    pool = np.concatenate([pools["train"], pools["validation"], held_out])
    datasets = np.concatenate([rows.datasets[rows.where(x)] for x in pools])
    names = dict.fromkeys(datasets.tolist())
    return {name: pool[rows.datasets[pool] == name] for name in names}


def teachers_of(sources: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sets that have enough rows to train on, or else the largest ones.

    All sets train on equally many, and one validation answer has only one class.
    """
    enough = min(2 * _FOR_VALIDATION, max(map(len, sources.values())))
    return {name: where for name, where in sources.items() if len(where) >= enough}


def transfer(inputs: AnalysisInput) -> AnalysisOutput:
    """Return the AUROC on every set of encoders and probes trained on each one."""
    return per_setting(lambda deployed: _matrix(deployed, inputs.folder))(inputs)


def _matrix(deployed: Deployed, folder: Path) -> list[ResultRow]:
    rows, judged = deployed.rows, deployed.judged
    splits = ("train", "validation", "ood")
    sources = sources_of(rows, {s: candidates(deployed, s) for s in splits})
    teachers = teachers_of(sources)
    n = min(*map(len, teachers.values()), max(SIZES))
    orders = [
        draw_rows(rows, where, n, deployed.bootstrap.seed)
        for where in teachers.values()
    ]
    is_read = (rows.splits[judged] == "test") | ~_half(rows.ids[judged])
    judged = judged[is_read]
    every = np.concatenate([*orders, judged])
    blocks = pooled_signals(deployed, every)
    trainer = SmallSampleTrainer(deployed, np.concatenate(orders), n, folder)
    readers = Subject("probe", EVERY_FAMILY), encoder(EVERY_FAMILY)
    scored = [
        DetectorScores(
            name=x._replace(source=name, n_labels=0),
            scores=np.full((1, len(judged)), np.nan),
            reason=_NONE_DRAWN,
        )
        for name in sources
        for x in readers
        if name not in teachers
    ]
    for number, (name, order) in enumerate(zip(teachers, orders, strict=True)):
        train, valid = (number * n + x for x in train_valid_split(np.arange(n)))
        probe, reader = (x._replace(source=name, n_labels=n) for x in readers)
        scores = linear_scores(blocks, rows.labels[every], train, valid)
        scored.append(_scored(probe, scores[len(orders) * n :]))
        logits = trainer.scores([EVERY_FAMILY], order, judged)
        logits = logits or {EVERY_FAMILY: np.full(len(judged), np.nan)}
        scored.append(_scored(reader, logits[EVERY_FAMILY]))
    result = detection_rows(scored, rows.take(judged), deployed.bootstrap, TRANSFER)
    return [r for r in result if r.metric == "auroc" and r.dataset != IN_DOMAIN]


class Ranked(NamedTuple):
    """Scores of all encoders of a run on its answers in one split."""

    ids: np.ndarray  # `[n]` question ids; two wordings share one
    labels: np.ndarray  # `[n]` bool
    scores: np.ndarray  # `[n_seeds, 15, n]`, higher = more likely correct


class RankAgreement(NamedTuple):
    """Spearman's correlation of two rankings of the subsets, with a 95 % interval."""

    value: float
    low: float
    high: float


def subset_aurocs(ranked: Ranked, weights: np.ndarray) -> np.ndarray:
    """Return every subset's AUROC in each resample, averaged over seeds.

    `weights` `[n, n_resamples]` tell how often each answer was resampled. AUROCs are
    `[n_subsets, n_resamples]`; NaN for resamples with only one class.
    """

    def auroc_of(scores: np.ndarray) -> np.ndarray:
        return weighted_metrics(scores, ranked.labels, weights)["auroc"]

    subsets = np.moveaxis(ranked.scores, 1, 0)
    return np.stack([np.mean([*map(auroc_of, seeds)], axis=0) for seeds in subsets])


def rank_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation, column by column, of two `[n_subsets, n]` arrays.

    It is `[n]` in [-1, 1], NaN for constant columns.
    """
    a, b = (rankdata(x, axis=0, nan_policy="propagate") for x in (first, second))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))


def agreement(first: Ranked, second: Ranked, config: BootstrapConfig) -> RankAgreement:
    """Correlate how two runs rank the subsets of signal families.

    The paper reports .78 closed-book and .79 with context between its two models, and
    no interval. Our interval resamples the questions of both runs, those asked in both
    together, and recomputes all AUROCs. Subsets are not resampled, since there are no
    others. Resampled AUROCs are noisier than the sample's, so the interval lies
    somewhat nearer to zero than one centred on the value, which it always includes.
    """
    n = len(first.ids)
    ones = [np.ones((len(x.ids), 1), np.float32) for x in (first, second)]

    def correlate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return rank_correlation(subset_aurocs(first, a), subset_aurocs(second, b))

    value = float(correlate(*ones)[0])
    if not np.isfinite(value):
        return RankAgreement(value, value, value)
    together = np.concatenate([first.ids, second.ids])
    blocks = resamples(together, config)
    draws = np.concatenate([correlate(block[:n], block[n:]) for block in blocks])
    low, high = interval_of(draws)
    return RankAgreement(value, min(low, value), max(high, value))


def _auroc_rows(
    ranked: Ranked, config: BootstrapConfig, backbone: dict[str, str], set_fields: dict
) -> list[ResultRow]:
    """Return the AUROC of every subset on one backbone, with its interval."""
    draws = np.concatenate(
        [subset_aurocs(ranked, block) for block in resamples(ranked.ids, config)],
        axis=1,
    )
    result = []
    for subset, name in enumerate(SUBSET_NAMES):
        values = [auroc(scores, ranked.labels) for scores in ranked.scores[:, subset]]
        reason = next((v.reason for v in values if v.reason), None)
        value, ends = None, (None, None)
        if reason is None:
            value = float(np.mean([v.value for v in values]))
            of_subset = ranked.scores[:, subset], ranked.labels, ranked.ids
            ends = wider_interval(draws[subset], *of_subset)
        measured = "auroc", value, len(ranked.labels), backbone | set_fields
        result.append(row_of(BACKBONES, encoder(name), *measured, ends, reason))
    return result


def _test_answers(deployed: Deployed) -> Ranked:
    rows = deployed.rows
    where = rows.where("test")
    return Ranked(rows.ids[where], rows.labels[where], deployed.logits[:, :, where])


def backbones(inputs: AnalysisInput) -> AnalysisOutput:
    """Compare the encoders of two runs on test answers, and add the other's pairs."""
    shared: list[Setting] = [s for s in inputs.settings if s in inputs.other]
    if not shared:
        raise ValueError(
            f"this run has {', '.join(inputs.settings)} and the other has "
            f"{', '.join(inputs.other)}, so they have no setting in common; give a run "
            "whose questions were asked in the same way"
        )
    result: list[ResultRow] = []
    for setting in shared:
        both = inputs.settings[setting], inputs.other[setting]
        config, set_fields = both[0].bootstrap, both[0].set_fields(IN_DOMAIN, "test")
        ranked = [_test_answers(deployed) for deployed in both]
        if not all(len(answers.ids) for answers in ranked):
            continue  # a run without labelled test answers
        for kind, source, side in zip(
            ("first", "second"), inputs.models, ranked, strict=True
        ):
            backbone = {"kind": kind, "source": source}
            result += _auroc_rows(side, config, backbone, set_fields)
        correlation = agreement(ranked[0], ranked[1], config)
        value, ends, reason = correlation.value, correlation[1:], None
        if not np.isfinite(value):
            reason = "one class only, or all subsets are equally good"
            value, ends = None, (None, None)
        measured = "spearman", value, len(SUBSET_NAMES), set_fields
        result.append(row_of(BACKBONES, "two_backbones", *measured, ends, reason))
    of_pairs = [row for setting in shared for row in pairs(inputs.other[setting])]
    result += [msgspec.structs.replace(row, experiment=OTHER_PAIRS) for row in of_pairs]
    return result

"""From a trained grid and selected heads to a detector, and to its probabilities.

Calibration sees validation rows alone: one isotonic map and one threshold a head.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from beatrice.extract.records import Setting
from beatrice.extract.store.store import FeatureStore
from beatrice.jaxprobe.calibration import fit_calibrator
from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.detector import (
    Detector,
    EncoderBank,
    HeadName,
    Provenance,
    Scores,
    SettingHead,
)
from beatrice.jaxprobe.features.families import (
    Standardizer,
    span_lengths,
    used_spans,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.features.reading import family_dims, longest_spans, read_features
from beatrice.jaxprobe.features.rows import Rows, partners, rows_at_once
from beatrice.jaxprobe.features.subsets import FamilyDims
from beatrice.jaxprobe.fit.grid import Trained
from beatrice.jaxprobe.model.encoder import Params
from beatrice.jaxprobe.pool import branch_setting, reads
from beatrice.jaxprobe.scope import choose_threshold, fit_scope

SEEN = ("train", "validation")  # the rows that a detector knows
_OF_A_KIND = 64  # rows of similar length that are worth a shape of their own


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """A setting's trained encoders, with the rows that they were trained on.

    Attributes:
      store: the signals.
      rows: what the rows of the store are.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None
        where no family is stored by layer.
      trained: every subset with every seed.
      standardizer: fitted on the training rows.
      config: widths of the encoders.
    """

    store: FeatureStore
    rows: Rows
    layer: int | None
    trained: Trained
    standardizer: Standardizer
    config: EncoderConfig

    @property
    def dims(self) -> FamilyDims:
        """The families that the encoders read."""
        return family_dims(self.store)


class FusedHead(NamedTuple):
    """The heads of a selected set, with what they say of every row of their setting.

    Attributes:
      members: pool positions, see `jaxprobe.pool.reads`.
      config: shape of the heads.
      params: leaves `[n_seeds, ...]`.
      scores: `[n_seeds, n_rows]` uncalibrated probabilities.
    """

    members: Sequence[int]
    config: FusionConfig
    params: Params
    scores: np.ndarray


def calibrated_head(
    branch: HeadName, fused: FusedHead, grid: Grid, precision: float
) -> SettingHead:
    """Fit a head's map and threshold on the labelled validation rows.

    Args:
      branch: which rows and which passes the head is of.
      fused: the heads.
      grid: of the branch's setting.
      precision: share of the trusted answers that shall be correct, in (0, 1].
    """
    where = grid.rows.where("validation")
    scores, labels = fused.scores.mean(axis=0)[where], grid.rows.labels[where]
    calibrator = fit_calibrator(scores, labels)
    return SettingHead(
        reads=reads(branch, fused.members, grid.dims.subset_names),
        config=fused.config,
        params=fused.params,
        calibrator=calibrator,
        threshold=choose_threshold(calibrator(scores), labels, precision),
    )


def selected_params(trained: Trained, subsets: Sequence[int]) -> Params:
    """Return some subsets' weights, every seed: leaves `[n_seeds, n_subsets, ...]`.

    Args:
      trained: members of the grid.
      subsets: their numbers.
    """
    seeds = sorted({member.seed for member in trained.members})
    places = [
        [trained.members.index((subset, seed)) for subset in subsets] for seed in seeds
    ]
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(places)], trained.params)


def encoder_bank(grid: Grid, names: Sequence[str]) -> EncoderBank:
    """Return some subsets' encoders, with where the signals of training lay.

    Args:
      grid: the setting's trained encoders.
      names: subsets that some head reads, as in "HPA".
    """
    store, rows, dims = grid.store, grid.rows, grid.dims
    return EncoderBank(
        dims=dims,
        config=grid.config,
        standardizer=grid.standardizer,
        names=tuple(names),
        spans=used_spans(store.spec.spans),
        params=selected_params(grid.trained, list(map(dims.subset_index, names))),
        lengths=longest_spans(store),
        scope=fit_scope(
            partial(read_features, store, grid.layer),
            dims,
            store.spec.n_read,
            *map(rows.where, SEEN),
        ),
    )


def calibrated(
    fused: Mapping[HeadName, FusedHead],
    grids: Mapping[Setting, Grid],
    *,
    provenance: Provenance | None = None,
    precision: float = 0.9,
) -> Detector:
    """Return the detector of selected heads and the encoders that they read.

    Args:
      fused: the selected heads, by branch.
      grids: the trained encoders, by pass; one that no head reads is left out.
      provenance: what the detector was trained on; None for a caller's arrays.
      precision: share of the trusted answers that shall be correct, in (0, 1].
    """
    heads = {
        branch: calibrated_head(branch, head, grids[branch_setting(branch)], precision)
        for branch, head in fused.items()
    }
    banks = {}
    for setting, grid in grids.items():
        read = {name for h in heads.values() for s, name in h.reads if s == setting}
        if read:
            names = [name for name in grid.dims.subset_names if name in read]
            banks[setting] = encoder_bank(grid, names)
    return Detector(banks=banks, heads=heads, provenance=provenance)


def score_store(
    detector: Detector,
    branch: HeadName,
    stores: Mapping[Setting, FeatureStore],
    *,
    layer: int | None,
    examples: np.ndarray | None = None,
) -> Scores:
    """Return a detector's scores of stored answers, read a few at a time.

    Args:
      detector: trained on the same families.
      branch: which head.
      stores: of the passes. The answers are those of the branch's setting; a head that
        reads closed-book encoders too finds the answer to the same question there.
      layer: entry of the resid axis for the hidden family (0 is the embedding); None
        where no family is stored by layer.
      examples: `[n]` indices into the store of the branch's setting, at least one; None
        for all.

    Raises:
      ValueError: a pass or one of its questions is missing, or its families are others
        than the detector's.
    """
    setting = branch_setting(branch)
    passes = detector.passes_of(branch)
    if missing := {setting, *passes} - stores.keys():
        raise ValueError(
            f"scoring {branch} needs the signals of {' and '.join(sorted(missing))}"
        )
    own = stores[setting]
    where = np.arange(len(own.spec.keys)) if examples is None else np.asarray(examples)
    rows, lengths = {}, {}
    for name in passes:
        store, bank = stores[name], detector.banks[name]
        _check_families(bank.dims, store)
        rows[name] = (
            where if name == setting else partners(_ids(own), _ids(store))[where]
        )
        lengths[name] = span_lengths(store.spec.spans[rows[name]], bank.spans)
    places, scores = [], []
    every = np.concatenate(list(lengths.values()), axis=1)
    for group in width_groups(every, _OF_A_KIND):
        widths = {name: widths_of(lengths[name][group]) for name in passes}
        fitting = (rows_at_once(widths[n], detector.banks[n].dims) for n in passes)
        n_at_once = min(len(group), *fitting)
        for start in range(0, len(group), n_at_once):
            part = group[start : start + n_at_once]
            padded = np.pad(part, (0, n_at_once - len(part)), "edge")
            features = {
                name: read_features(
                    stores[name],
                    layer,
                    rows[name][padded],
                    widths[name],
                    detector.banks[name].spans,
                )
                for name in passes
            }
            places.append(part)
            scores.append(detector.score(branch, features).first(len(part)))
    return Scores.joined(scores).take(np.argsort(np.concatenate(places)))


def _check_families(dims: FamilyDims, store: FeatureStore) -> None:
    """Raise where a store lacks signals that encoders read."""
    stored = family_dims(store)
    is_kept = all(
        kept in ("all", read)
        for kept, read in zip(stored.spans, dims.spans, strict=False)
    )
    if (stored.names, stored.sizes) != (dims.names, dims.sizes) or not is_kept:
        raise ValueError(
            f"{store.url} has {stored}, and the detector was trained on {dims}; give "
            "the signals that it was trained on"
        )


def _ids(store: FeatureStore) -> list[str]:
    return [key[0] for key in store.spec.keys]

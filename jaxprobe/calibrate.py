"""From a trained grid and selected heads to a detector that says probabilities.

Calibration sees validation rows alone: one isotonic map and one threshold a head.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from extract.records import Setting
from extract.store.read import FeatureStore
from jaxprobe.calibration import fit_calibrator
from jaxprobe.config import EncoderConfig, FusionConfig
from jaxprobe.detector import (
    Detector,
    EncoderBank,
    HeadName,
    Provenance,
    SettingHead,
)
from jaxprobe.features.families import Standardizer, longest_spans
from jaxprobe.features.reading import family_dims, read_features
from jaxprobe.features.rows import Rows
from jaxprobe.features.subsets import SUBSET_NAMES, subset_index
from jaxprobe.fit.grid import Trained
from jaxprobe.model.encoder import Params
from jaxprobe.pool import branch_setting, reads
from jaxprobe.scope import choose_threshold, fit_scope

SEEN = ("train", "validation")  # the rows that a detector knows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """A setting's trained encoders, with the rows that they were trained on.

    Attributes:
      store: the signals.
      rows: what the rows of the store are.
      layer: entry of the resid axis for the hidden family (0 is the embedding).
      trained: every subset with every seed.
      standardizer: fitted on the training rows.
      config: widths of the encoders.
    """

    store: FeatureStore
    rows: Rows
    layer: int
    trained: Trained
    standardizer: Standardizer
    config: EncoderConfig


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
    branch: HeadName, fused: FusedHead, rows: Rows, precision: float
) -> SettingHead:
    """Fit a head's map and threshold on the labelled validation rows.

    Args:
      branch: which rows and which passes the head is of.
      fused: the heads.
      rows: of the branch's setting.
      precision: share of the trusted answers that shall be correct, in (0, 1].
    """
    where = rows.where("validation")
    scores, labels = fused.scores.mean(axis=0)[where], rows.labels[where]
    calibrator = fit_calibrator(scores, labels)
    return SettingHead(
        reads=reads(branch, fused.members),
        config=fused.config,
        params=fused.params,
        calibrator=calibrator,
        threshold=choose_threshold(calibrator(scores), labels, precision),
    )


def selected_params(trained: Trained, names: Sequence[str]) -> Params:
    """Return the weights of some subsets, every seed: leaves `[n_seeds, n_names, ...]`.

    Args:
      trained: members of the grid.
      names: subsets, as in "HPA".
    """
    seeds = sorted({member.seed for member in trained.members})
    places = [
        [trained.members.index((subset_index(name), seed)) for name in names]
        for seed in seeds
    ]
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(places)], trained.params)


def encoder_bank(grid: Grid, names: Sequence[str]) -> EncoderBank:
    """Return some subsets' encoders, with where the signals of training lay.

    Args:
      grid: the setting's trained encoders.
      names: subsets that some head reads, as in "HPA".
    """
    store, rows, dims = grid.store, grid.rows, family_dims(grid.store)
    return EncoderBank(
        dims=dims,
        config=grid.config,
        standardizer=grid.standardizer,
        names=tuple(names),
        params=selected_params(grid.trained, names),
        lengths=longest_spans(store.spec.spans, rows.setting),
        scope=fit_scope(
            partial(read_features, store, rows.setting, grid.layer),
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
        branch: calibrated_head(
            branch, head, grids[branch_setting(branch)].rows, precision
        )
        for branch, head in fused.items()
    }
    banks = {}
    for setting, grid in grids.items():
        read = {name for h in heads.values() for s, name in h.reads if s == setting}
        if read:
            names = [name for name in SUBSET_NAMES if name in read]
            banks[setting] = encoder_bank(grid, names)
    return Detector(banks=banks, heads=heads, provenance=provenance)

"""The training and validation rows of a setting, as encoders read them.

Rows lie on the device, or stay in the store and are read while encoders train: what
trains on them need not know which.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.stages.rows import Rows
from benchmarks.stages.sweep_stage import chosen_layer
from extract.records import Setting
from extract.run.directory import RunDir
from extract.store.read import FeatureStore
from jaxprobe.config import StreamConfig
from jaxprobe.features.families import (
    FamilyTokens,
    Features,
    Standardizer,
    keep_spans,
    split_families,
)
from jaxprobe.features.reading import (
    family_dims,
    fit_reading,
    fit_reading_of,
    longest_spans,
    read_features,
)
from jaxprobe.features.subsets import FamilyDims

ROWS_AT_ONCE = 1024  # examples standardised and encoded together, to bound memory
Read = Callable[[np.ndarray], FamilyTokens]  # of rows of the store, `[n]`


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Reads standardised tokens of stored rows, in one padded width."""

    store: FeatureStore
    setting: Setting
    layer: int
    dims: FamilyDims
    standardizer: Standardizer
    widths: tuple[int, ...]

    def __call__(self, where: np.ndarray) -> FamilyTokens:
        """Read rows `[n]` of the store, some at a time: few executables serve all."""
        parts = []
        for start in range(0, len(where), ROWS_AT_ONCE):
            part = where[start : start + ROWS_AT_ONCE]
            n_more = (1 << (len(part) - 1).bit_length()) - len(part)
            full = np.pad(part, (0, n_more), mode="edge")
            features = read_features(
                self.store, self.setting, self.layer, full, self.widths
            )
            tokens = split_families(features, self.dims, self.standardizer)
            real = slice(len(part))
            parts.append(jax.tree.map(lambda x, r=real: np.asarray(x)[:, r], tokens))
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
        return jax.device_put(joined)


def tokens_of(
    run: RunDir,
    setting: Setting,
    store: FeatureStore,
    rows: Rows,
    stream: StreamConfig | None,
) -> Tokens:
    """Fit the standardisation on the training rows, some at a time if streamed."""
    layer = chosen_layer(run)
    dims = family_dims(store)
    widths = longest_spans(store.spec.spans, setting)
    where = rows.where("train")

    def features(some: np.ndarray) -> Features:
        return read_features(store, setting, layer, some, widths)

    if stream is None:
        standardizer = fit_reading(features(where), dims)
    else:
        starts = range(0, len(where), ROWS_AT_ONCE)
        parts = [where[start : start + ROWS_AT_ONCE] for start in starts]
        standardizer = fit_reading_of(lambda: map(features, parts), dims)
    return Tokens(
        store=store,
        setting=setting,
        layer=layer,
        dims=dims,
        standardizer=standardizer,
        widths=widths,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sides:
    """What encoders of a setting are trained and validated on.

    Attributes:
      read: standardised tokens of rows of the store.
      where: training rows and validation rows, indices into the store.
      held: their tokens on the device; None where they are streamed.
      stream: how the store is parted; None where the tokens are held.
    """

    read: Read
    where: tuple[np.ndarray, np.ndarray]
    held: tuple[FamilyTokens, FamilyTokens] | None
    stream: StreamConfig | None

    def with_spans(self, span_mask: np.ndarray) -> "Sides":
        """Return the same rows with some spans left out; see `keep_spans`."""

        def read(where: np.ndarray) -> FamilyTokens:
            return keep_spans(self.read(where), span_mask)

        held = self.held and tuple(keep_spans(one, span_mask) for one in self.held)
        return dataclasses.replace(self, read=read, held=held)


def sides_of(read: Tokens, rows: Rows, stream: StreamConfig | None) -> Sides:
    """Return a setting's rows; a store that memory cannot hold is not read here."""
    where = rows.where("train"), rows.where("validation")
    held = None if stream else tuple(map(read, where))
    return Sides(read=read, where=where, held=held, stream=stream)

"""Which stored row is which question, and the rows that encoders are trained on.

Training rows lie on the device, or stay in the store and are read while encoders
train: what trains on them need not know which.
"""

import dataclasses
import json
from collections.abc import Callable

import jax
import numpy as np

from extract.records import Setting
from extract.run.contents import read_examples, read_labels
from extract.run.directory import RunDir
from extract.store.read import FeatureStore, open_store
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
ReadRows = Callable[[np.ndarray], FamilyTokens]  # of rows of the store, `[n]`


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of one setting's feature store, in its order.

    Attributes:
      ids: `[n_rows]` example ids; an original and a rewritten context share one.
      datasets: `[n_rows]`.
      splits: `[n_rows]`.
      variants: `[n_rows]`.
      labels: `[n_rows]` bool; False where `is_labelled` is False.
      is_labelled: `[n_rows]` bool; False where the judges disagreed.
    """

    setting: Setting
    ids: np.ndarray
    datasets: np.ndarray
    splits: np.ndarray
    variants: np.ndarray
    labels: np.ndarray
    is_labelled: np.ndarray

    def where(self, split: str, dataset: str | None = None) -> np.ndarray:
        """Return the indices of the labelled rows of a split (and a set)."""
        chosen = (self.splits == split) & self.is_labelled
        if dataset is not None:
            chosen &= self.datasets == dataset
        return np.flatnonzero(chosen)

    def n_unlabelled(self, split: str, dataset: str) -> int:
        """Return how many rows of a set have no label."""
        chosen = (self.splits == split) & (self.datasets == dataset)
        return int((chosen & ~self.is_labelled).sum())

    def columns(self) -> list[tuple[str, str]]:
        """Return the evaluated (dataset, split) pairs, in-domain first."""
        pairs = dict.fromkeys(zip(self.datasets, self.splits, strict=True))
        return [(str(d), str(s)) for d, s in pairs if s != "train"]


def load_rows(run: RunDir, setting: Setting) -> tuple[FeatureStore, Rows]:
    """Open a setting's store and say what its rows are.

    Raises:
      ValueError: the store is missing, or a row has no label record.
    """
    store = open_store(run.features(setting))
    examples = {example.id: example for example in read_examples(run)}
    labels = read_labels(run)
    keys = store.spec.keys
    unlabelled = [key for key in keys if key not in labels]
    if unlabelled:
        raise ValueError(
            f"{run.labels} has no label for {unlabelled[0]}; run `beatrice label` again"
        )
    found = [labels[key].label for key in keys]
    return store, Rows(
        setting=setting,
        ids=np.array([key[0] for key in keys]),
        datasets=np.array([examples[key[0]].dataset for key in keys]),
        splits=np.array([examples[key[0]].split for key in keys]),
        variants=np.array([key[2] for key in keys]),
        labels=np.array([label is True for label in found]),
        is_labelled=np.array([label is not None for label in found]),
    )


def partners(rows: Rows, closed_book: Rows) -> np.ndarray:
    """Return, for every row, the closed-book row of the same question.

    Returns:
      `[n_rows]` int64 indices into `closed_book`.

    Raises:
      ValueError: a question has no closed-book row.
    """
    place = {example_id: i for i, example_id in enumerate(closed_book.ids)}
    missing = [example_id for example_id in rows.ids if example_id not in place]
    if missing:
        raise ValueError(
            f"question {missing[0]!r} has no closed-book answer; answer and extract "
            "both settings"
        )
    return np.array([place[example_id] for example_id in rows.ids], dtype=np.int64)


def chosen_layer(run: RunDir) -> int:
    """Return the layer the hidden family is read from."""
    return int(json.loads(run.sweep.read_text())["layer"])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowReader:
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


def row_reader(
    run: RunDir,
    setting: Setting,
    store: FeatureStore,
    rows: Rows,
    stream: StreamConfig | None,
) -> RowReader:
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
    return RowReader(
        store=store,
        setting=setting,
        layer=layer,
        dims=dims,
        standardizer=standardizer,
        widths=widths,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRows:
    """What encoders of a setting are trained and validated on.

    Attributes:
      read: standardised tokens of rows of the store.
      where: training rows and validation rows, indices into the store.
      in_memory: their tokens on the device; None where they are streamed.
      stream: how the store is parted; None where the tokens are in_memory.
    """

    read: ReadRows
    where: tuple[np.ndarray, np.ndarray]
    in_memory: tuple[FamilyTokens, FamilyTokens] | None
    stream: StreamConfig | None

    def with_spans(self, span_mask: np.ndarray) -> "TrainingRows":
        """Return the same rows with some spans left out; see `keep_spans`."""

        def read(where: np.ndarray) -> FamilyTokens:
            return keep_spans(self.read(where), span_mask)

        in_memory = self.in_memory and tuple(
            keep_spans(one, span_mask) for one in self.in_memory
        )
        return dataclasses.replace(self, read=read, in_memory=in_memory)


def training_rows(
    read: RowReader, rows: Rows, stream: StreamConfig | None
) -> TrainingRows:
    """Return a setting's rows; a store that memory cannot hold is not read here."""
    where = rows.where("train"), rows.where("validation")
    in_memory = None if stream else tuple(map(read, where))
    return TrainingRows(read=read, where=where, in_memory=in_memory, stream=stream)
